"""Executors: devices and their locks, which one is chosen, and one that is added from outside."""

import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from benchmarks import run_suite
from benchmarks.run_suite import build_parser, make_executor
from benchmarks.suites.executors import local
from benchmarks.suites.executors.base import EXECUTORS, Executor, Options, Process, Slots
from benchmarks.suites.executors.local import LocalExecutor, visible_gpus
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import Run
from moco.common.errors import UserError
from tests.benchmarks.suites.lab import ROOT


def run_of(folder, code: str) -> Run:
    folder.mkdir(exist_ok=True)
    return Run("r", "r", folder, lambda: [sys.executable, "-c", code])


def test_gpus_are_packed_in_groups(tmp_path):
    executor = LocalExecutor(tmp_path, ["0", "1", "2"])
    assert executor.gpus == 3 and [executor.parallel(gpus) for gpus in (0, 1, 2)] == [3, 3, 1]
    pair, single = executor.reserve(2), executor.reserve(1)
    assert pair is not None and single is not None
    assert (pair.devices, single.devices) == (("0", "1"), ("2",))
    assert executor.reserve(1) is None
    run = run_of(tmp_path / "run", "import time; time.sleep(60)")
    lock = Lock.take(run.lock)
    assert lock is not None
    process = executor.start(run, run.argv(), lock, pair)
    pair.release()  # as when the runner dies
    assert executor.reserve(2) is None, "the process has its devices still"
    process.kill()
    pair = executor.reserve(2)
    assert pair is not None and pair.devices == ("0", "1")
    run = run_of(tmp_path / "shown", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    shown = executor.start(run, run.argv(), lock, pair)
    while shown.poll() is None:
        time.sleep(0.01)
    assert run.log.read_text() == "0,1\n"
    pair.release()
    one = executor.reserve(1)
    assert one is not None and executor.reserve(2) is None  # 1 is free, 2 are wanted
    assert executor.reserve(1) is not None, "none is kept where there were too few"


def test_which_executor(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6,-1,7")
    assert visible_gpus() == ("4", "6")
    assert make_executor("auto", Options(tmp_path)).gpus == 2
    assert make_executor("cpu", Options(tmp_path, workers=3)).parallel(0) == 3
    with pytest.raises(UserError, match="--workers"):
        make_executor("auto", Options(tmp_path, workers=2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == () and make_executor("auto", Options(tmp_path)).gpus == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(local.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(OSError))
    assert visible_gpus() == ()


class Ended(Process):
    """A process that ran to its end when it was started."""

    def __init__(self, code: int) -> None:
        self._code = code

    def poll(self) -> int:
        return self._code


class ToyExecutor(Executor):
    """One run after the other, each to its end before the next."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def parallel(self, gpus: int) -> int:
        return 1

    def where(self) -> str:
        return "in a toy"

    def reserve(self, gpus: int) -> Slots:
        return Slots()

    def start(self, run: Run, argv: Sequence[str], lock: Lock, slots: Slots) -> Ended:
        self.started.append(run.name)
        return Ended(subprocess.run(argv, stdin=subprocess.DEVNULL).returncode)


def test_an_executor_from_outside(lab, capsys):
    toy_executor = ToyExecutor()

    def toy(options: Options) -> ToyExecutor:
        assert options.folder == lab.out
        return toy_executor

    EXECUTORS.register(toy)
    try:
        assert build_parser().parse_args(["s", "--executor", "toy"]).executor == "toy"
        lab.run("--executor", "toy", "--trials", "1")
    finally:
        del EXECUTORS._obj_map["toy"]
    assert "4 runs, in a toy" in capsys.readouterr().out
    lab.assert_once(4)
    assert toy_executor.started == list(lab.count("done"))


def test_help_is_fast():
    argv = [sys.executable, "-X", "importtime", "-m", "benchmarks.run_suite", "--help"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    for name, _ in EXECUTORS:
        assert name in done.stdout
    for name in ("torch", "numpy", "PIL", "matplotlib"):
        assert f" {name}\n" not in done.stderr, f"--help imports {name}"


def test_flags_may_follow_the_overrides():
    argv = ["suite.yaml", "--opts", "SOLVER.BASE_LR", "1", "SEED=-1", "--dry-run"]
    args = run_suite.build_parser().parse_args(argv)
    assert args.dry_run and args.opts == ["SOLVER.BASE_LR", "1", "SEED=-1"]
