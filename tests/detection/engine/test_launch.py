"""Processes of a job: their number, their norms, and their first error."""

import os
import signal
import time
from dataclasses import replace

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
    iterations_before,
    set_iterations,
    torchrun_processes,
)
from detection.engine.launch import first_failure
from detection.modeling.norms import with_process_norms
from moco.common.distributed import LostProcess, write_failure
from moco.common.errors import DataError, NumericError, Preempted, UserError
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


@pytest.fixture
def failed(tmp_path, monkeypatch):
    """Return `failed(rank, error)`, which lets a process end with an error."""

    def fail(rank: int, error: Exception) -> None:
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"failure_{rank}.json"))
        for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "0")
        write_failure(error)

    return fail


@pytest.mark.parametrize("kind", [UserError, DataError, NumericError, Preempted])
def test_an_error_in_one_of_several_processes_keeps_its_kind(kind, failed, tmp_path):
    assert first_failure(tmp_path) is None
    error = kind("what went wrong")
    set_iterations(error, 4)
    failed(1, error)
    found = first_failure(tmp_path)
    assert (type(found), str(found)) == (kind, "what went wrong (process 1)")
    assert iterations_before(found, tmp_path) == 4


def test_the_first_error_by_time_is_reported(failed, tmp_path):
    failed(2, DataError("the reason"))
    for rank, error in enumerate((RuntimeError("Connection closed by peer"), UserError("another"))):
        failed(rank, error)
    assert str(first_failure(tmp_path)) == "the reason (process 2)"


def test_an_unexpected_error_comes_back_with_its_traceback(failed, tmp_path):
    try:
        {}["x"]
    except KeyError as error:
        failed(1, error)
    found = first_failure(tmp_path)
    assert (type(found), str(found)) == (RuntimeError, "KeyError: 'x' (process 1)")
    assert 'File "' in found.__notes__[0]


def first_dies(local_rank: int, *_: object) -> None:
    if local_rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def first_fails(local_rank: int, *_: object) -> None:
    if local_rank == 0:
        raise UserError("without a word to the others")
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "cause"), [(first_dies, "SIGKILL"), (first_fails, "exit code 1")]
)
def test_a_death_that_no_other_process_reported_is_the_runs_error(process, cause, monkeypatch):
    """A process that hangs, or does not notice the death, is ended."""
    monkeypatch.setattr(launch, "_in_process", process)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    before = time.monotonic()
    with pytest.raises(LostProcess, match=rf"process 0 of this run died \({cause}\).*--resume"):
        launch.run(replace(JOB, processes=Processes(2)))
    assert time.monotonic() - before < 50
    # A later run of the same Python process may be on them.
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
