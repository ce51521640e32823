"""Faults of runs in one process, and files from strangers, by the rows of RELIABILITY."""

import contextlib
import importlib.util
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
import torch

from moco import finetune, knn, linear
from moco.common.errors import DataError, Preempted, UserError
from moco.common.files import TEMPORARY_PREFIX, sha256_state
from moco.common.run import RunFolder, provenance
from moco.data.cifar import TEST, TRAIN, class_names, read_cifar
from moco.data.images import find_images
from moco.engine.checkpoint import list_checkpoints, load_checkpoint, newest_checkpoint
from moco.pretrain import main
from moco.verify import changed_files, write_sums
from moco.verify import main as verify
from tests.moco.classification.classify_runs import words as classify_words
from tests.moco.classification.classify_runs import write_labeled, write_pretrained
from tests.oracles.launch import Fault, kill_while_saving, run_ranks, save_and_remove
from tests.oracles.payloads import corpus, harmless

ROOT = Path(__file__).resolve().parents[3]
KILLS = 50
DETECTRON2 = importlib.util.find_spec("detectron2") is not None


@pytest.fixture
def words(images, tiny, tmp_path):
    """`words(KEY=value)`: of a tiny run of 8 steps in tmp_path/run."""

    def build(**changes):
        return tiny(DATA__ROOT=images, OUTPUT_DIR=tmp_path / "run", **changes)

    return build


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    counts = {"train": (6, 6, 6), "val": (2, 2, 2)}
    return write_labeled(tmp_path_factory.mktemp("labeled"), counts, noise=25)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return write_pretrained(tmp_path_factory.mktemp("weights") / "moco.pth.tar")


def pretrain_process(words, **options):
    return subprocess.run(
        [sys.executable, "-m", "moco.pretrain", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )


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

    def test_a_run_and_its_reading_processes(self, words, tmp_path):
        """The folder is free at once: data-loader workers live on for seconds, and hold no lock."""
        fault = Fault(0, 5, signal.SIGKILL)
        done = run_ranks(1, words(DATA__NUM_WORKERS=2), tmp_path, fault)
        assert done.codes == [-signal.SIGKILL]
        main([*words(), "--resume"])
        main([*words(), "OUTPUT_DIR", str(tmp_path / "straight")])
        one, other = (list_checkpoints(tmp_path / name)[-1] for name in ("run", "straight"))
        a, b = (load_checkpoint(path)["state_dict"] for path in (one, other))
        assert sha256_state(a) == sha256_state(b)


class TestFullDisk:
    """Row 2."""

    LIMIT = 1 << 20

    def limit(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.LIMIT, self.LIMIT))

    def test_the_old_checkpoint_stays(self, words, tmp_path):
        big = words(MODEL__WIDTH=0.25)
        with pytest.raises(Preempted):
            main([*big, "SOLVER.STOP_AT_ITERS", "3"])
        (before,) = list_checkpoints(tmp_path / "run")
        content = before.read_bytes()
        assert len(content) > self.LIMIT
        done = pretrain_process([*big, "--resume"], preexec_fn=self.limit)
        assert done.returncode == 2
        path = tmp_path / "run" / "checkpoint_0001.pth.tar"
        pattern = (
            rf"error: cannot write {path}: File too large \((\d+) bytes written\); free space.*"
        )
        match = re.fullmatch(pattern, done.stderr.strip())
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
        command = [sys.executable, "-c", code, tmp_path]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2
        path = tmp_path / "metrics.json"
        expected = f"error: cannot write {path}: File too large (100 bytes written); free space"
        assert done.stderr.startswith(expected) and done.stderr.count("\n") == 1


class TestPayloads:
    """Row 10: files that would run code, opened by every program that opens a file from others."""

    @pytest.fixture
    def entry_points(self, words, labeled, pretrained, tmp_path):
        """Each: (path of a checkpoint in tmp_path/run) → None."""
        run = tmp_path / "run"

        def classify(program, checkpoint, *flags):
            program.main([*classify_words(run, labeled, checkpoint), *flags])

        def convert(path):
            from convert.convert_to_d2 import convert_file

            convert_file(path, tmp_path / "out.pth")

        def detector(path):
            from detection.engine.weights import read_weights

            read_weights(str(path))

        def trained_detector(path):
            from detection.engine.weights import read_trained

            read_trained(path)

        def detection_resume(path):
            from detection.embedded.checkpoint import load_checkpoint as load

            load(path, torch.nn.Linear(1, 1), None)

        def inspect(path):
            from convert.inspect_file import inspect_file

            print(inspect_file(path))

        def cifar(path):
            for name in (*TRAIN, *TEST, "batches.meta"):
                shutil.copy(path, path.parent / name)
            try:
                with pytest.raises(DataError):
                    class_names(path.parent)
                read_cifar(path.parent, TRAIN)
            except DataError as error:
                raise DataError(f"{path}: {error}") from error
            finally:
                for name in (*TRAIN, *TEST, "batches.meta"):
                    (path.parent / name).unlink()

        def detection_resume_d2(path):
            from detection.d2.checkpoint import check_checkpoint

            check_checkpoint(str(path))

        return {
            **({"detection --resume, Detectron2": detection_resume_d2} if DETECTRON2 else {}),
            "convert --inspect": inspect,
            "cifar": cifar,
            "pretrain --resume": lambda path: main([*words(), "--resume"]),
            "pretrain --resume FILE": lambda path: main([*words(), "--resume", str(path)]),
            "knn": lambda path: knn.main(["--checkpoint", str(path), "--data", str(labeled)]),
            "linear": lambda path: classify(linear, path, "--resume"),
            "finetune": lambda path: classify(finetune, path, "--resume"),
            "linear --resume": lambda path: classify(linear, pretrained, "--resume"),
            "finetune --resume FILE": lambda path: classify(
                finetune, pretrained, "--resume", str(path)
            ),
            "convert": convert,
            "detection": detector,
            "detection, trained": trained_detector,
            "detection --resume": detection_resume,
        }

    def test_no_program_runs_them(self, entry_points, tmp_path):
        marker = tmp_path / "marker"
        path = tmp_path / "run" / "checkpoint_0000.pth.tar"
        path.parent.mkdir()
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

    def test_no_program_unpickles_what_is_no_pickle(self, entry_points, tmp_path):
        marker = tmp_path / "marker"
        path = tmp_path / "run" / "checkpoint_0000.pth.tar"
        path.parent.mkdir()
        for what, content in harmless(marker).items():
            path.write_bytes(content)
            for name, program in entry_points.items():
                with contextlib.suppress(UserError):
                    program(path)
                assert not marker.exists(), f"{name}: {what}"

    def test_a_good_checkpoint_is_opened_by_all(self, entry_points, words, tmp_path, pretrained):
        """Or the test above would prove nothing."""
        path = tmp_path / "run" / "checkpoint_0000.pth.tar"
        path.parent.mkdir()
        shutil.copy(pretrained, path)
        for name, program in entry_points.items():
            try:
                program(path)
            except Exception as error:  # of another kind of checkpoint, or of another recipe
                assert "refused" not in str(error), name
                assert "damaged" not in str(error) or name == "cifar", name


class TestPathTraversal:
    """Row 12; tests/moco/data/test_shards.py has tar files, tests/detection the annotations."""

    @pytest.mark.parametrize("entry", ["../../etc/passwd", "a/../../secret.jpg", ".."])
    def test_a_list_stays_below_its_folder(self, images, tmp_path, entry):
        folder = tmp_path / "data"
        (folder / "a").mkdir(parents=True)
        image = sorted(images.iterdir())[0]
        shutil.copy(image, tmp_path / "secret.jpg")
        shutil.copy(image, folder / "a" / "x.jpg")
        (folder / "list.txt").write_text(f"a/x.jpg\n./a/../a/x.jpg\n{image}\n")
        here = folder / "a/x.jpg"
        assert find_images(folder / "list.txt") == [here, here, image]  # whole paths are allowed
        (folder / "list.txt").write_text(f"a/x.jpg\n{entry}\n")
        with pytest.raises(DataError, match=r"list.txt: line 2: .* leads out of the list's folder"):
            find_images(folder / "list.txt")

    def test_what_is_no_image_is_only_named(self, words, tmp_path):
        """A whole path may name anything; its content is not shown."""
        (tmp_path / "secret").write_text("top secret")
        (tmp_path / "list.txt").write_text(f"{tmp_path / 'secret'}\n" * 8)
        with pytest.raises(DataError, match="secret: not an image") as caught:
            main([*words(), "DATA.ROOT", str(tmp_path / "list.txt")])
        assert "top secret" not in str(caught.value)
        (tmp_path / "list.txt").write_text("/dev/zero\n" * 8)
        with pytest.raises(DataError, match="no such file /dev/zero"):
            find_images(tmp_path / "list.txt")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_a_decompression_bomb_takes_no_memory(tmp_path):
    """Row 17: 400 megapixels in 49 KB; decoding them as RGB would take 1.2 GB."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    side = 20_000
    rows = zlib.compress(bytes(side * (1 + side // 8)), 9)  # a bit per pixel
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    (tmp_path / "bomb.png").write_bytes(bomb + chunk(b"IDAT", rows) + chunk(b"IEND", b""))
    assert (tmp_path / "bomb.png").stat().st_size < 50_000
    code = (
        "import sys\n"
        "from moco.data.decode import decode\n"
        "from moco.common.errors import DataError\n"
        "try: decode(sys.argv[1])\n"
        "except DataError as error: print(error)\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"  # its peak, KiB
    )
    command = [sys.executable, "-c", code, tmp_path / "bomb.png"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    message, kib = done.stdout.splitlines()
    assert "bomb.png: decompression bomb?" in message
    assert int(kib) < 300 << 10


class TestHashes:
    """Row 18."""

    @pytest.fixture
    def folder(self, images, tmp_path):
        shutil.copytree(images, tmp_path / "data")
        return tmp_path / "data"

    def test_a_flipped_bit_is_found(self, folder, capsys):
        verify([str(folder), "--write"])
        verify([str(folder), "-j", "1"])
        path = folder / "003.jpg"
        content = bytearray(path.read_bytes())
        content[-20] ^= 1
        path.write_bytes(content)
        capsys.readouterr()
        with pytest.raises(DataError, match="1 problems") as caught:
            verify([str(folder)])
        assert caught.value.exit_code == 3
        out = capsys.readouterr().out
        assert "26 images, 0 bad" in out, "the decoder should not see it, or this proves nothing"
        assert "003.jpg: has changed (SHA-256 " in out

    def test_missing_and_new_files(self, folder):
        assert write_sums(folder) == 26
        (folder / "001.jpg").unlink()
        (folder / "new.jpg").touch()
        (folder / ".hidden").touch()
        assert changed_files(folder) == ["001.jpg: missing", "new.jpg: not in SHA256SUMS"]
        (folder / "SHA256SUMS").write_text(f"{'0' * 64}  ../../etc/passwd\n")
        assert "../../etc/passwd: missing" in changed_files(folder)  # not opened
        (folder / "SHA256SUMS").write_text("hello\n")
        with pytest.raises(DataError, match=r"SHA256SUMS: line 1: expected a SHA-256"):
            changed_files(folder)

    @pytest.mark.skipif(not shutil.which("sha256sum"), reason="no sha256sum here")
    def test_sha256sum_agrees(self, folder):
        write_sums(folder)
        subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=folder, check=True)

    def test_bad_images_are_all_named_and_nothing_is_recorded(self, folder, capsys):
        (folder / "003.jpg").write_bytes(b"")
        (folder / "005.jpg").write_bytes((folder / "005.jpg").read_bytes()[:400])
        with pytest.raises(DataError, match="2 problems"):
            verify([str(folder), "--write"])
        out = capsys.readouterr().out
        assert "003.jpg: the file is empty" in out and "005.jpg: cannot be decoded" in out
        assert not (folder / "SHA256SUMS").exists()


@pytest.mark.race
class TestReadingProcess:
    """Row 21; tests/moco/pretraining/test_pretrain.py has one that dies in pre-training."""

    def test_hangs(self, words):
        """For ten minutes, and ignoring SIGTERM: the run does not wait for it at its end."""
        code = (
            "import time\n"
            "from moco import errors, images, pretrain\n"
            "images.decode_pixels = lambda path: time.sleep(600)\n"
            "errors.run_cli(pretrain.main)"
        )
        keys = words(DATA__NUM_WORKERS=2, DATA__WORKER_TIMEOUT_SECONDS=1)
        command = [sys.executable, "-c", code, *keys]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
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
        monkeypatch.setattr("moco.knn.WORKER_TIMEOUT_SECONDS", 1)
        monkeypatch.setattr("moco.data.images.decode_pixels", lambda path: time.sleep(3))
        with pytest.raises(DataError, match=r"died or hangs .*timed out.*/dev/shm"):
            knn.main(command)


class TestUsedFolder:
    """Row 25: from the start of the process to its exit, so before torch is imported."""

    @pytest.mark.parametrize("module", ["moco.pretrain", "moco.linear"])
    def test_second_writer(self, tmp_path, module):
        checkpoint = tmp_path / "x.pth.tar"
        checkpoint.write_bytes(b"PK\x03\x04")
        flags = ["--checkpoint", checkpoint] if module == "moco.linear" else []
        pairs = ["DATA.ROOT", tmp_path, "OUTPUT_DIR", tmp_path / "run"]
        command = [sys.executable, "-m", module, *flags, *pairs]

        (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
        path = {**os.environ, "PYTHONPATH": str(tmp_path)}
        with RunFolder(tmp_path / "run"):
            done = subprocess.run(command, cwd=ROOT, env=path, capture_output=True, text=True)
        assert done.returncode == 5
        assert "is in use by another process" in done.stderr
        assert done.stderr.count("\n") == 1

    def test_files_of_another_run(self, words, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "run/notes.txt").touch()
        done = pretrain_process(words())
        assert done.returncode == 2
        assert "is not empty (it holds notes.txt); add --resume" in done.stderr


class TestClock:
    """Row 28."""

    def test_newest_is_by_step(self, words, tmp_path):
        """Copied files have any time of change."""
        with pytest.raises(Preempted):
            main(words(SOLVER__STOP_AT_ITERS=5))
        names = list_checkpoints(tmp_path / "run")
        assert len(names) == 2
        for age, path in enumerate(names):
            os.utime(path, (2e9 - age * 1e6,) * 2)
        assert newest_checkpoint(tmp_path / "run")[0] == names[-1]
        main([*words(), "--resume"])
        assert load_checkpoint(list_checkpoints(tmp_path / "run")[-1])["step"] == 8

    def test_utc_in_any_time_zone(self, monkeypatch):
        times = []
        for zone in ("UTC", "Asia/Kathmandu", "America/Anchorage"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            times.append(provenance()["utc"])
        monkeypatch.undo()
        time.tzset()
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", t) for t in times)
        assert len({t[:15] for t in times}) == 1  # the same ten minutes
