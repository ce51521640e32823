"""Executors: devices and their locks, the choice of one, and one registered from outside."""

import os
import subprocess
import time
from collections.abc import Sequence

import pytest
import torch

from benchmarks.run_suite import build_parser, make_executor
from benchmarks.suites import forkserver
from benchmarks.suites.executors import local
from benchmarks.suites.executors.base import EXECUTORS, Executor, Options, Process
from benchmarks.suites.executors.local import LocalExecutor, visible_gpus
from benchmarks.suites.locks import Lock, is_held
from benchmarks.suites.runs import Run
from moco.common.errors import UserError
from tests.benchmarks.suites.run_code import command


def run_of(folder, code: str) -> Run:
    folder.mkdir(exist_ok=True)
    return Run("r", "r", folder, command(code))


def test_gpus_are_packed_in_groups(tmp_path):
    executor = LocalExecutor(["0", "1", "2"])
    assert executor.gpus == 3 and [executor.parallel(gpus) for gpus in (0, 1, 2)] == [3, 3, 1]
    pair, single = executor.reserve(2), executor.reserve(1)
    assert pair == ["0", "1"] and single == ["2"]
    assert executor.reserve(1) is None
    executor.release(single)
    assert executor.reserve(2) is None, "one is free, two are wanted"
    run = run_of(tmp_path / "shown", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    lock = Lock.acquire(run.lock)
    assert lock is not None
    shown = executor.start(run, lock, pair)
    lock.release()
    while shown.poll() is None:
        time.sleep(0.01)
    assert run.log.read_text() == "0,1\n" and shown.poll() == 0


def test_a_child_keeps_its_runs_lock_until_it_is_killed(tmp_path):
    executor = LocalExecutor(cores=1)
    run = run_of(tmp_path / "run", "import time; print('here', flush=True); time.sleep(60)")
    lock = Lock.acquire(run.lock)
    assert lock is not None
    process = executor.start(run, lock, executor.reserve(0) or ())
    lock.release()  # the runner's own descriptor closes when it dies
    while not (run.log.is_file() and run.log.read_text()):
        time.sleep(0.01)
    assert is_held(run.lock)
    process.kill()
    assert not is_held(run.lock) and process.poll() == -9


def test_children_can_use_a_gpu():
    """No import of the fork server initializes CUDA, which no fork could use afterwards."""
    assert forkserver.call(torch.cuda._is_in_bad_fork) is False


def test_a_call_has_the_variables_of_now(monkeypatch):
    """A notebook may set one after the server was started."""
    forkserver.context()
    monkeypatch.setenv("DETECTRON2_DATASETS", "elsewhere")
    assert forkserver.call(os.getenv, "DETECTRON2_DATASETS") == "elsewhere"


def test_which_executor(tmp_path, monkeypatch):
    monkeypatch.setattr(local.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(OSError))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6,-1,7")
    assert visible_gpus() == ("4", "6")
    assert make_executor("auto", Options(tmp_path)).gpus == 2
    assert make_executor("cpu", Options(tmp_path, workers=3)).parallel(0) == 3
    with pytest.raises(UserError, match="--workers"):
        make_executor("auto", Options(tmp_path, workers=2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == () and make_executor("auto", Options(tmp_path)).gpus == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus() == ()


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, ("GPU-aa11", "MIG-cc33", "MIG-dd44")),
        ("0,GPU-aa11,GPU-aa", ("GPU-aa11",)),
        ("1,GPU-bb22,MIG-cc33", ("MIG-cc33",)),
        ("MIG-dd,0,7", ("MIG-dd44", "GPU-aa11", "7")),
    ],
)
def test_all_names_of_a_gpu_are_one_device(tmp_path, monkeypatch, chosen, expected):
    listed = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aa11)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bb22)
  MIG 3g.20gb     Device  0: (UUID: MIG-cc33)
  MIG 3g.20gb     Device  1: (UUID: MIG-dd44)"""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    executor = LocalExecutor(visible_gpus())
    assert executor.reserve(len(expected)) == list(expected) and executor.reserve(1) is None


def test_an_index_among_different_gpus_stays(tmp_path, monkeypatch):
    """CUDA counts the fastest first, which nvidia-smi does not know."""
    tool = tmp_path / "nvidia-smi"
    listed = ["GPU 0: NVIDIA T4 (UUID: GPU-aa)", "GPU 1: NVIDIA H100 (UUID: GPU-bb)"]
    tool.write_text("#!/bin/sh\n" + "\n".join(f"echo '{line}'" for line in listed))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert visible_gpus() == ("0",)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert visible_gpus() == ("GPU-aa",)


class Ended(Process):
    """Process that had ended when it was returned."""

    def __init__(self, code: int) -> None:
        self._code = code

    def poll(self) -> int:
        return self._code


class ToyExecutor(Executor):
    """Executor that computes a run in `start`."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def parallel(self, gpus: int) -> int:
        return 1

    def where(self) -> str:
        return "in a toy"

    def reserve(self, gpus: int) -> Sequence[str]:
        return ()

    def start(self, run: Run, lock: Lock, devices: Sequence[str]) -> Ended:
        self.started.append(run.name)
        return Ended(subprocess.run(run.argv, stdin=subprocess.DEVNULL).returncode)


def test_an_executor_from_outside(lab, register, capsys):
    toy_executor = ToyExecutor()

    def toy(options: Options) -> ToyExecutor:
        assert options.folder == lab.out
        return toy_executor

    register(EXECUTORS, toy)
    assert build_parser().parse_args(["s", "--executor", "toy"]).executor == "toy"
    lab.run("--executor", "toy", "--trials", "1", "--skip", "b")
    assert "2 runs, in a toy" in capsys.readouterr().out
    lab.assert_once(2)
    assert toy_executor.started == list(lab.count("done"))
