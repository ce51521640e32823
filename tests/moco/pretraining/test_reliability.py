"""Faults of runs in one process, and files from strangers, by the rows of RELIABILITY."""

import contextlib
import importlib.util
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from moco import finetune, knn, linear
from moco.common.errors import DataError, Preempted, UserError
from moco.common.files import TEMPORARY_PREFIX
from moco.common.run import RunFolder, provenance
from moco.data.cifar import TEST, TRAIN, class_names, read_cifar
from moco.engine.checkpoint import list_checkpoints, newest_checkpoint
from moco.pretrain import main
from tests.moco.classification.classify_runs import words as classify_words
from tests.oracles.launch import Fault, kill_while_saving, run_ranks, save_and_remove
from tests.oracles.payloads import corpus, harmless
from tests.oracles.training import weights

ROOT = Path(__file__).resolve().parents[3]
KILLS = 50
DETECTRON2 = importlib.util.find_spec("detectron2") is not None


def python(*arguments, **options):
    """Runs `python ARGUMENTS` to its end."""
    command = [sys.executable, *map(str, arguments)]
    how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, **how, **options)


@pytest.mark.slow
@pytest.mark.race
class TestKilledWhileSaving:
    """Row 1."""

    def test_fifty_times(self, tmp_path):
        """Before each call that changes a file; all but the first went on from a checkpoint."""
        save_and_remove(tmp_path)
        step, stale, unremoved = 1, 0, 0
        for call in range(1, KILLS + 1):
            saved = kill_while_saving(tmp_path, call) or step
            _, state, warnings = newest_checkpoint(tmp_path)
            assert not warnings
            assert state["step"] in (saved, saved + 1)  # what was reported is there
            assert saved >= step
            assert (state["state_dict"]["x"] == state["step"]).all()
            assert (tmp_path / (tmp_path / "last_checkpoint").read_text()).is_file()
            step = state["step"]
            stale += len(list(tmp_path.glob(f"{TEMPORARY_PREFIX}*")))
            # A kill before old ones are removed leaves one more, each time.
            unremoved = max(unremoved, len(list_checkpoints(tmp_path)))
            with RunFolder(tmp_path, resume=True):
                assert not list(tmp_path.glob(f"{TEMPORARY_PREFIX}*"))
        assert stale and unremoved > 2, "the kills did not come while files were being changed"
        assert save_and_remove(tmp_path) == step + 1
        assert len(list_checkpoints(tmp_path)) == 2
        assert newest_checkpoint(tmp_path)[1]["step"] == step + 1

    def test_a_run_and_its_reading_processes(self, opts, tmp_path):
        """The folder is free at once: data-loader workers live on for seconds, and hold no lock."""
        fault = Fault(0, 5, signal.SIGKILL)
        done = run_ranks(1, opts(DATA__NUM_WORKERS=2), tmp_path, fault)
        assert done.codes == [-signal.SIGKILL]
        main([*opts(), "--resume"])
        main(opts("straight"))
        assert weights(tmp_path / "run") == weights(tmp_path / "straight")


@pytest.mark.slow
class TestFullDisk:
    """Row 2."""

    LIMIT = 1 << 20

    def limit(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.LIMIT, self.LIMIT))

    def test_the_old_checkpoint_stays(self, opts, tmp_path):
        big = opts(MODEL__WIDTH=0.25)
        with pytest.raises(Preempted):
            main([*big, "SOLVER.STOP_AT_ITERS", "3"])
        (before,) = list_checkpoints(tmp_path / "run")
        content = before.read_bytes()
        assert len(content) > self.LIMIT
        done = python("-m", "moco.pretrain", *big, "--resume", preexec_fn=self.limit)
        assert done.returncode == 2
        path = tmp_path / "run" / "checkpoint_0001.pth.tar"
        match = re.match(rf"error: cannot write {path}: .* \((\d+) bytes written\)", done.stderr)
        assert match and done.stderr.count("\n") == 1, done.stderr
        assert 0 < int(match[1]) <= self.LIMIT
        assert list_checkpoints(tmp_path / "run") == [before]
        assert before.read_bytes() == content
        assert (tmp_path / "run/last_checkpoint").read_text() == before.name
        assert not list((tmp_path / "run").glob(f"{TEMPORARY_PREFIX}*"))

    def test_metrics(self, tmp_path):
        code = (
            "import resource, sys\n"
            "from moco.common.errors import run_cli\n"
            "from moco.common.run import RunFolder\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
            "folder = RunFolder(sys.argv[1])\n"
            "run_cli(lambda argv: [folder.log({'loss': 1.0 + i}) for i in range(20)] and 0)"
        )
        done = python("-c", code, tmp_path)
        assert done.returncode == 2
        expected = (
            f"error: cannot write {tmp_path}/metrics.json: File too large (100 bytes written)"
        )
        assert done.stderr.startswith(expected) and done.stderr.count("\n") == 1


@pytest.mark.slow
class TestPayloads:
    """Row 10: files that would run code, opened by every program that opens a file from others."""

    @pytest.fixture
    def path(self, tmp_path):
        (tmp_path / "run").mkdir()
        return tmp_path / "run" / "checkpoint_0000.pth.tar"

    @pytest.fixture
    def entry_points(self, opts, labeled, pretrained, tmp_path):
        """Each: (path of a checkpoint in tmp_path/run) → None."""
        from convert.inspect_file import inspect_file
        from detection.config.weights import read_weights
        from detection.engine.weights import read_trained

        def classify(program, checkpoint, *flags):
            program.main([*classify_words(tmp_path / "run", labeled, checkpoint), *flags])

        def convert(path):
            from convert.convert_to_d2 import convert_file

            convert_file(path, tmp_path / "out.pth")

        def detection_resume(path):
            from detection.embedded.checkpoint import load_checkpoint as load

            load(path, torch.nn.Linear(1, 1), None)

        def cifar(path):
            folder = path.parent / "cifar"
            folder.mkdir(exist_ok=True)
            for name in (*TRAIN, *TEST, "batches.meta"):
                shutil.copy(path, folder / name)
            try:
                with pytest.raises(DataError):
                    class_names(folder)
                read_cifar(folder, TRAIN)
            except DataError as error:
                raise DataError(f"{path}: {error}") from error
            finally:
                shutil.rmtree(folder)

        def detection_resume_d2(path):
            from detection.d2.checkpoint import check_checkpoint

            check_checkpoint(str(path))

        return {
            **({"detection --resume, Detectron2": detection_resume_d2} if DETECTRON2 else {}),
            "convert --inspect": lambda path: print(inspect_file(path)),
            "cifar": cifar,
            "pretrain --resume": lambda path: main([*opts(), "--resume"]),
            "pretrain --resume FILE": lambda path: main([*opts(), "--resume", str(path)]),
            "knn": lambda path: knn.main(["--checkpoint", str(path), "--data", str(labeled)]),
            "linear": lambda path: classify(linear, path, "--resume"),
            "finetune": lambda path: classify(finetune, path, "--resume"),
            "linear --resume": lambda path: classify(linear, pretrained, "--resume"),
            "finetune --resume FILE": lambda path: classify(
                finetune, pretrained, "--resume", str(path)
            ),
            "convert": convert,
            "detection": lambda path: read_weights(str(path)),
            "detection, trained": read_trained,
            "detection --resume": detection_resume,
        }

    def test_no_program_runs_them(self, entry_points, path, tmp_path):
        marker = tmp_path / "marker"
        payloads = corpus(marker)
        assert len(payloads) >= 20
        for what, content in payloads.items():
            path.write_bytes(content)
            for name, program in entry_points.items():
                case = f"{name}: {what}"
                try:
                    program(path)
                except DataError as error:
                    message = str(error)
                    assert path.name in message and "\n" not in message, case
                else:
                    assert name == "convert --inspect", case  # it describes what is inert
                assert not marker.exists(), case

    def test_no_program_unpickles_what_is_no_pickle(self, entry_points, path, tmp_path):
        marker = tmp_path / "marker"
        for what, content in harmless(marker).items():
            path.write_bytes(content)
            for name, program in entry_points.items():
                with contextlib.suppress(UserError):
                    program(path)
                assert not marker.exists(), f"{name}: {what}"

    def test_a_good_checkpoint_is_opened_by_all(self, entry_points, path, pretrained):
        """Or the test above would prove nothing."""
        shutil.copy(pretrained, path)
        for name, program in entry_points.items():
            try:
                program(path)
            except Exception as error:  # of another kind of checkpoint, or of another recipe
                assert "refused" not in str(error), name
                assert "damaged" not in str(error) or name == "cifar", name


@pytest.mark.slow
@pytest.mark.race
class TestReadingProcess:
    """Row 21."""

    def test_hangs(self, opts):
        """For ten minutes, and ignoring SIGTERM: the run does not wait for it at its end."""
        code = (
            "import time\n"
            "from moco import pretrain\n"
            "from moco.common import errors\n"
            "from moco.data import images\n"
            "images.decode_pixels = lambda path: time.sleep(600)\n"
            "errors.run_cli(pretrain.main)"
        )
        keys = opts(DATA__NUM_WORKERS=2, DATA__WORKER_TIMEOUT_SECONDS=1)
        done = python("-c", code, *keys)
        assert done.returncode == 3
        assert re.match(r".*died or hangs .*timed out.*/dev/shm.*TIMEOUT_SECON", done.stderr)
        assert done.stderr.count("\n") == 1

    def test_dies_or_hangs_in_knn(self, labeled, pretrained, tmp_path, monkeypatch):
        state = torch.load(pretrained, weights_only=True)
        torch.save({**state, "config": {"AUG.CROP_PX": 16}}, tmp_path / "x.pth.tar")
        command = ["--checkpoint", str(tmp_path / "x.pth.tar"), "--data", str(labeled), "-j", "1"]
        knn.main(command)
        monkeypatch.setattr("moco.data.images.decode_pixels", lambda path: os._exit(1))
        with pytest.raises(DataError, match=r"died or hangs .*/dev/shm"):
            knn.main(command)
        monkeypatch.setattr("moco.engine.knn.WORKER_TIMEOUT_SECONDS", 1)
        monkeypatch.setattr("moco.data.images.decode_pixels", lambda path: time.sleep(3))
        with pytest.raises(DataError, match=r"died or hangs .*timed out.*/dev/shm"):
            knn.main(command)


@pytest.mark.slow
class TestUsedFolder:
    """Row 25: from the start of the process to its exit, so before torch is imported."""

    @pytest.mark.parametrize("module", ["moco.pretrain", "moco.linear"])
    def test_second_writer(self, tmp_path, module):
        checkpoint = tmp_path / "x.pth.tar"
        checkpoint.write_bytes(b"PK\x03\x04")
        flags = ["--checkpoint", checkpoint] if module == "moco.linear" else []
        pairs = ["DATA.ROOT", tmp_path, "OUTPUT_DIR", tmp_path / "run"]
        (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
        path = {**os.environ, "PYTHONPATH": str(tmp_path)}
        with RunFolder(tmp_path / "run"):
            done = python("-m", module, *flags, *pairs, env=path)
        assert done.returncode == 5
        assert "is in use by another process" in done.stderr
        assert done.stderr.count("\n") == 1


def test_utc_in_any_time_zone(monkeypatch):
    """Row 28; tests/moco/engine/test_checkpoint.py: the newest checkpoint is so by its name."""
    times = []
    for zone in ("UTC", "Asia/Kathmandu", "America/Anchorage"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        times.append(provenance()["utc"])
    monkeypatch.undo()
    time.tzset()
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", t) for t in times)
    assert len({t[:15] for t in times}) == 1  # the same ten minutes
