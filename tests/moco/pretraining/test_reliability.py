"""Faults of runs in one process, and untrusted files, by the rows of RELIABILITY."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torchvision.datasets import CIFAR10

from moco.common.errors import DataError, UserError
from moco.common.run import provenance
from moco.data.cifar import read_cifar
from tests.moco.classification.classify_runs import words as classify_words
from tests.moco.commands import finetune, knn, linear
from tests.moco.commands import pretrain as main
from tests.oracles.payloads import corpus, harmless

ROOT = Path(__file__).resolve().parents[3]


def python(*arguments, **options):
    """Run `python ARGUMENTS` to its end."""
    command = [sys.executable, *map(str, arguments)]
    how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, **how, **options)


@pytest.mark.slow
class TestFullDisk:
    """Row 2."""

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
            program([*classify_words(tmp_path / "run", labeled, checkpoint), *flags])

        def convert(path):
            from convert.convert_to_d2 import convert_file

            convert_file(path, tmp_path / "out.pth")

        def detection_resume(path):
            from detection.engine.checkpoint import read_checkpoint

            read_checkpoint(path)

        def cifar(path):
            folder = path.parent / "cifar"
            folder.mkdir(exist_ok=True)
            for file, _ in CIFAR10.train_list + CIFAR10.test_list:
                shutil.copy(path, folder / file)
            shutil.copy(path, folder / CIFAR10.meta["filename"])
            try:
                read_cifar(folder, train=True)
            except DataError as error:
                raise DataError(f"{path}: {error}") from error
            finally:
                shutil.rmtree(folder)

        return {
            "inspect": lambda path: print(inspect_file(path)),
            "cifar": cifar,
            "pretrain --resume": lambda path: main([*opts(), "--resume"]),
            "pretrain --resume FILE": lambda path: main([*opts(), "--resume", str(path)]),
            "knn": lambda path: knn(["--checkpoint", str(path), "--data", str(labeled)]),
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
                    assert name == "inspect", case  # it describes what is inert
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
        """Otherwise the tests above would prove nothing."""
        shutil.copy(pretrained, path)
        for name, program in entry_points.items():
            try:
                program(path)
            except Exception as error:  # of another kind of checkpoint, or of another recipe
                assert "refused" not in str(error), name
                assert "damaged" not in str(error), name


@pytest.mark.slow
@pytest.mark.race
class TestReadingProcess:
    """Row 21."""

    def test_hangs(self, opts):
        """The run does not wait for a worker that sleeps for ten minutes and ignores SIGTERM."""
        code = (
            "import time\n"
            "from benchmarks.__main__ import cli\n"
            "from moco.data import images\n"
            "images.decode_pixels = lambda path: time.sleep(600)\n"
            "cli()"
        )
        keys = opts(DATA__NUM_WORKERS=2, DATA__WORKER_TIMEOUT_SECONDS=1)
        done = python("-c", code, "pretrain", *keys)
        assert done.returncode == 3
        assert re.match(r".*died or hangs .*timed out.*/dev/shm.*TIMEOUT_SECON", done.stderr)
        assert done.stderr.count("\n") == 1

    def test_dies_or_hangs_in_knn(self, labeled, pretrained, tmp_path, monkeypatch):
        state = torch.load(pretrained, weights_only=True)
        torch.save({**state, "config": {"AUG.CROP_PX": 16}}, tmp_path / "x.pth.tar")
        command = ["--checkpoint", str(tmp_path / "x.pth.tar"), "--data", str(labeled), "-j", "1"]
        knn(command)
        monkeypatch.setattr("moco.data.images.decode_pixels", lambda path: os._exit(1))
        with pytest.raises(DataError, match=r"died or hangs .*/dev/shm"):
            knn(command)
        monkeypatch.setattr("moco.engine.knn.WORKER_TIMEOUT_SECONDS", 1)
        monkeypatch.setattr("moco.data.images.decode_pixels", lambda path: time.sleep(3))
        with pytest.raises(DataError, match=r"died or hangs .*timed out.*/dev/shm"):
            knn(command)


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
