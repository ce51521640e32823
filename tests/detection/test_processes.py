"""How processes are counted, and how their result or first error comes back."""

import signal
from pathlib import Path

import pytest

from detection.processes import (
    ONE_PROCESS,
    Processes,
    check_processes,
    read_outcome,
    report,
    torchrun_processes,
)
from detection.task import default_task
from detection.weights import Coverage, EngineResult
from moco.distributed import LostProcess
from moco.errors import DataError, NumericError, Preempted, UserError
from moco.stop import leave
from tests.oracles.tiny_detector import merge


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ({"num_gpus": 3}, "IMS_PER_BATCH 2 cannot be divided among 3"),
        ({"num_gpus": 0}, "expected at least one of each"),
        ({"num_machines": 2}, "needs --dist-url"),
        ({"num_machines": 2, "machine_rank": 2, "dist_url": "tcp://a:1"}, "below the number"),
    ],
)
def test_impossible_numbers_of_processes(processes, message):
    cfg = merge(default_task(), {"MODEL.DEVICE": "cpu", "SOLVER.IMS_PER_BATCH": 2})
    check_processes(cfg, Processes(2))
    with pytest.raises(UserError, match=message):
        check_processes(cfg, Processes(**processes))


def test_one_gpu_for_several_processes(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    cfg = merge(default_task(), {"MODEL.DEVICE": "cuda:1", "SOLVER.IMS_PER_BATCH": 2})
    check_processes(cfg, ONE_PROCESS)
    with pytest.raises(UserError, match="cuda:1 is one GPU for 2 processes; set it to cuda"):
        check_processes(cfg, Processes(2))
    with pytest.raises(UserError, match="--num-gpus 3: this machine has 2"):
        check_processes(cfg, Processes(3))


def test_processes_of_torchrun(monkeypatch):
    assert torchrun_processes() is None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name, value in zip(names, (6, 8, 2, 4), strict=True):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setenv("MASTER_PORT", "1")
    processes = torchrun_processes()
    assert processes == Processes(4, 2, 1, started=True)
    assert processes.world_size == 8
    check_processes(merge(default_task(), {"MODEL.DEVICE": "cpu"}), processes)  # needs no address


def raising(error: Exception):
    def work(stop: object) -> EngineResult:
        raise error

    return work


@pytest.mark.parametrize("kind", [UserError, DataError, NumericError])
def test_an_error_in_one_of_several_processes_keeps_its_kind(kind, tmp_path):
    outcome = tmp_path / "outcome.json"
    with pytest.raises(kind):
        report(raising(kind("what went wrong")), outcome, rank=1, local_rank=1, saves=True)
    with pytest.raises(kind, match=r"what went wrong \(process 1\)") as caught:
        read_outcome(outcome)
    assert type(caught.value) is kind


@pytest.mark.parametrize("consequence", [LostProcess("process 0 is gone"), RuntimeError("reset")])
def test_the_first_error_is_worth_more_than_what_follows_from_it(consequence, tmp_path):
    outcome = tmp_path / "outcome.json"
    for rank, error in enumerate((DataError("the reason"), consequence)):
        with pytest.raises(type(error)):
            report(raising(error), outcome, rank=rank, local_rank=rank, saves=False)
    with pytest.raises(DataError, match=r"^the reason \(process 0\)"):
        read_outcome(outcome)
    # In the other order, too.
    outcome.unlink()
    for rank, error in enumerate((consequence, DataError("the reason"))):
        with pytest.raises(type(error)):
            report(raising(error), outcome, rank=rank, local_rank=rank, saves=False)
    with pytest.raises(DataError, match=r"^the reason \(process 1\)"):
        read_outcome(outcome)


def test_a_stop_comes_back_as_a_stop(tmp_path):
    def stopped(stop: object) -> EngineResult:
        leave(signal.SIGTERM, "iteration 4", Path("model_0000004.pth"))

    for rank in (1, 0):
        report(stopped, tmp_path / "outcome.json", rank=rank, local_rank=rank, saves=True)
    with pytest.raises(Preempted, match=r"after iteration 4 .*--resume"):
        read_outcome(tmp_path / "outcome.json")


def test_the_main_processs_result_comes_back_whole(tmp_path):
    result = EngineResult({"bbox/AP": 1.5}, 3, 2.0, Coverage(7, ("a", "b")))
    other = EngineResult({}, 3, 2.5, None)
    for rank, own in ((0, result), (1, other)):
        report(lambda _, own=own: own, tmp_path / "o", rank=rank, local_rank=rank, saves=True)
    assert read_outcome(tmp_path / "o") == result
