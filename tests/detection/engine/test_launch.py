"""Processes of a job: their number, their norms, and their result or first error."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from detection.config.task import default_task
from detection.embedded.layers import FrozenBatchNorm, NaiveSyncBatchNorm, freeze, norm_layer
from detection.engine import launch
from detection.engine.job import (
    ONE_PROCESS,
    Job,
    Processes,
    check_processes,
    known_iterations,
    set_iterations,
    torchrun_processes,
)
from detection.engine.launch import read_outcome, report
from detection.engine.weights import Coverage, EngineResult
from detection.modeling.norms import with_process_norms
from moco.common.distributed import LostProcess
from moco.common.errors import DataError, NumericError, Preempted, UserError
from moco.engine.stop import leave
from tests.oracles.tiny_detector import merge


def test_one_gpu_for_several_processes(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    cfg = merge(default_task(), {"MODEL.DEVICE": "cuda:1", "SOLVER.IMS_PER_BATCH": 2})
    check_processes(cfg, ONE_PROCESS)
    with pytest.raises(UserError, match="cuda:1 is one GPU for 2 processes; set it to cuda"):
        check_processes(cfg, Processes(2))
    with pytest.raises(UserError, match="--num-gpus 3: this machine has 2 GPUs"):
        check_processes(cfg, Processes(3))
    with pytest.raises(UserError, match="--nproc-per-node 3: this machine has 2 GPUs"):
        check_processes(cfg, Processes(3, started=True))


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
    check_processes(merge(default_task(), {"MODEL.DEVICE": "cpu"}), processes)


@pytest.mark.parametrize(
    ("device", "number", "names"),
    [
        ("cuda", 1, {"SyncBN": "BN", "naiveSyncBN": "BN"}),
        ("cpu", 1, {"SyncBN": "BN", "naiveSyncBN": "BN"}),
        ("cuda", 2, {"SyncBN": "SyncBN", "naiveSyncBN": "naiveSyncBN"}),
        ("cpu", 2, {"SyncBN": "naiveSyncBN", "naiveSyncBN": "naiveSyncBN"}),
    ],
)
def test_which_batch_norm_is_synchronized_how(device, number, names):
    classes = {
        "BN": nn.BatchNorm2d,
        "SyncBN": nn.SyncBatchNorm,
        "naiveSyncBN": NaiveSyncBatchNorm,
        "GN": nn.GroupNorm,
    }
    for wanted, name in {**names, "GN": "GN"}.items():
        keys = {"MODEL.DEVICE": device, "MODEL.FPN.NORM": wanted}
        cfg = with_process_norms(merge(default_task(), keys), number)
        assert cfg.MODEL.FPN.NORM == name
        assert type(norm_layer(name)(32)) is classes[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_synchronized_batch_norm_has_its_statistics_in_single_precision(dtype, monkeypatch):
    """Statistics of images with mean 20 times the deviation are exact in low precision."""
    monkeypatch.setattr("moco.common.distributed.world_size", lambda: 2)
    monkeypatch.setattr("detection.embedded.layers.differentiable_all_reduce", lambda x: 2 * x)
    torch.manual_seed(0)
    x = (torch.randn(4, 8, 16, 16) * 0.1 + 2).to(dtype)
    ours, plain = NaiveSyncBatchNorm(8), nn.BatchNorm2d(8)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        answer = ours(x)
    assert answer.dtype == dtype
    assert torch.allclose(answer.float(), plain(x.float()), atol=0.02)
    assert torch.allclose(ours.running_mean, plain.running_mean)


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm, NaiveSyncBatchNorm])
def test_every_batch_norm_can_be_frozen(kind):
    model = nn.Sequential(kind(4))
    model[0].running_mean += 2
    freeze(model)
    assert type(model[0]) is FrozenBatchNorm
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model(torch.full((1, 4, 2, 2), 2.0)), torch.zeros(1, 4, 2, 2))


JOB = Job("embedded", merge(default_task(), {"MODEL.DEVICE": "cpu"}))


def raising(error: Exception):
    def work(job: Job, stop: object) -> EngineResult:
        raise error

    return work


@pytest.mark.parametrize("kind", [UserError, DataError, NumericError])
def test_an_error_in_one_of_several_processes_keeps_its_kind(kind, tmp_path):
    outcome = tmp_path / "outcome.json"
    error = kind("what went wrong")
    set_iterations(error, 4)
    with pytest.raises(kind):
        report(JOB, raising(error), outcome, rank=1, local_rank=1)
    with pytest.raises(kind, match=r"what went wrong \(process 1\)") as caught:
        read_outcome(outcome)
    assert type(caught.value) is kind and known_iterations(caught.value) == 4


@pytest.mark.parametrize("consequence", [LostProcess("process 0 is gone"), RuntimeError("reset")])
def test_the_first_error_is_worth_more_than_what_follows_from_it(consequence, tmp_path):
    outcome = tmp_path / "outcome.json"
    for rank, error in enumerate((DataError("the reason"), consequence)):
        with pytest.raises(type(error)):
            report(JOB, raising(error), outcome, rank=rank, local_rank=rank)
    with pytest.raises(DataError, match=r"^the reason \(process 0\)"):
        read_outcome(outcome)
    # The second of two causes is not the first.
    with pytest.raises(UserError, match="another"):
        report(JOB, raising(UserError("another")), outcome, rank=2, local_rank=2)
    with pytest.raises(DataError, match=r"^the reason \(process 0\)"):
        read_outcome(outcome)
    # In the other order, too.
    outcome.unlink()
    for rank, error in enumerate((consequence, DataError("the reason"))):
        with pytest.raises(type(error)):
            report(JOB, raising(error), outcome, rank=rank, local_rank=rank)
    with pytest.raises(DataError, match=r"^the reason \(process 1\)"):
        read_outcome(outcome)


def test_an_unexpected_error_comes_back_with_its_traceback(tmp_path):
    with pytest.raises(KeyError):
        report(JOB, raising(KeyError("x")), tmp_path / "o", rank=1, local_rank=1)
    with pytest.raises(RuntimeError, match=r"^KeyError: 'x' \(process 1\)") as caught:
        read_outcome(tmp_path / "o")
    assert "in work" in caught.value.__notes__[0]


def test_a_stop_comes_back_as_a_stop(tmp_path):
    def stopped(job: Job, stop: object) -> EngineResult:
        leave(signal.SIGTERM, "iteration 4", Path("model_0000004.pth"))

    for rank in (1, 0):
        report(JOB, stopped, tmp_path / "outcome.json", rank=rank, local_rank=rank)
    with pytest.raises(Preempted, match=r"after iteration 4 .*--resume"):
        read_outcome(tmp_path / "outcome.json")


def test_the_main_processs_result_comes_back_whole(tmp_path):
    result = EngineResult({"bbox/AP": 1.5}, 3, 2.0, Coverage(7, ("a", "b")))
    other = EngineResult({}, 3, 2.5, None)
    for rank, own in ((0, result), (1, other)):
        report(JOB, lambda *_, own=own: own, tmp_path / "o", rank=rank, local_rank=rank)
    assert read_outcome(tmp_path / "o") == result


def first_dies(local_rank: int, *_: object) -> None:
    if local_rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.slow
def test_a_death_that_no_other_process_reported_is_the_runs_error(monkeypatch):
    """Their parent may see that a process died before the others miss its connection."""
    monkeypatch.setattr(launch, "_in_process", first_dies)
    with pytest.raises(LostProcess, match=r"process 0 of this run died \(SIGKILL\).*--resume"):
        launch.run(replace(JOB, processes=Processes(2)))


def test_the_gpus_of_the_process_that_starts_others_stay_visible(monkeypatch):
    """A later run of the same Python process may be on them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(launch, "_launch", raising(UserError("nothing starts here")))
    with pytest.raises(UserError, match="nothing starts here"):
        launch.run(replace(JOB, processes=Processes(2)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
