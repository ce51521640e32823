"""Checks of code that runs on GPUs only, against the results on a CPU."""

import copy
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.quickstart import NETWORKS, SMOKE_DETECTION, SMOKE_PRETRAIN
from benchmarks.speed.measure import ROOT, Row, Setting
from benchmarks.suites.synthetic import write_images, write_scenes
from detection.config.engines import detectron2_installed
from detection.data.random_state import random_state, restore_random
from moco.common.errors import Preempted
from moco.common.run import metrics_lines

PROGRAM = (sys.executable, "-m", "benchmarks")  # what starts a training


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference, relative to the largest value of `b`."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def random_numbers(device: str) -> float:
    """Sample before and after restoring the random state; return the difference."""
    torch.empty(1, device=device)  # a GPU has a random state only after its first use
    state = copy.deepcopy(random_state())
    first = torch.rand(8, device=device)
    restore_random(state)
    return difference(torch.rand(8, device=device), first)


def collectives(device: str) -> float:
    """Run the collectives in one process (NCCL on a GPU), where each must return its input."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, model = torch.randn(6, 4, 5, 5, device=device), nn.Conv2d(4, 3, 1).to(device)
        found = [torch.zeros_like(x), torch.zeros_like(x), x.clone(), x.clone()]
        dist.all_gather_into_tensor(found[0], x)
        dist.all_to_all_single(found[1], x, [6], [6])
        dist.all_reduce(found[2])
        dist.broadcast(found[3], 0)
        parallel = DistributedDataParallel(model, broadcast_buffers=False)
        synced = nn.BatchNorm2d(4) if device == "cpu" else nn.SyncBatchNorm(4)  # refuses a CPU
        pairs = [(parallel(x), model(x)), (synced.to(device)(x), nn.BatchNorm2d(4).to(device)(x))]
        return max(difference(*pair) for pair in [*pairs, *((each, x) for each in found)])
    finally:
        dist.destroy_process_group()


def training(name: str, keys: dict[str, object], *flags: str, stop: bool = False) -> Tensor:
    """Run a training command and return the losses; `stop` interrupts it once by SIGTERM."""
    folder = Path(str(keys["OUTPUT_DIR"]))
    pairs = [str(part) for pair in keys.items() for part in pair]
    command = [*PROGRAM, name, *flags, *pairs]
    if stop:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        while process.poll() is None and len(metrics_lines(folder) or []) < 3:
            time.sleep(0.05)
        process.terminate()
        assert process.wait() == Preempted.exit_code, f"stopped with {process.returncode}"
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = metrics_lines(folder) or []
    return torch.tensor(
        [line[key] for line in lines for key in line if key in ("loss", "total_loss")]
    )


def checks(device: str, scratch: Path) -> dict[str, tuple[float, Callable[[], float]]]:
    """Return name → (limit, check); a check returns the largest difference from a reference."""
    write_images(scratch / "images", 64, seed=0)
    write_scenes(scratch / "scenes", 8, 4, seed=0)

    def pretrain_losses(
        where: str, precision: str = "fp32", *, compiled: bool = False, stop: bool = False
    ) -> Tensor:
        folder = scratch / f"{where}-{precision}-{compiled}-{stop}"
        keys = {**SMOKE_PRETRAIN, **NETWORKS["resnet"].smoke, "DATA.ROOT": scratch / "images"}
        keys |= {"OUTPUT_DIR": folder}
        keys |= {"DEVICE": where, "SOLVER.PRECISION": precision, "SOLVER.COMPILE": compiled}
        keys |= {"SOLVER.MAX_ITERS": 40, "LOG.EVERY_ITERS": 1}
        flags = ("--resume", "--config-file", "pretrain/quickstart")
        return training("pretrain", keys, *flags, stop=stop)

    def train_loss(where: str, engine: str = "embedded") -> Tensor:
        keys = {**SMOKE_DETECTION, "DATASETS.VOC_DIR": scratch / "scenes", "SEED": 0}
        keys |= {"OUTPUT_DIR": scratch / f"{engine}-{where}", "MODEL.DEVICE": where}
        keys |= {"MODEL.WEIGHTS": "random", "SOLVER.PRECISION": "bf16"}
        flags = ("--overwrite", "--engine", engine, "--config-file", "voc/quickstart_R_10_C4")
        return training("train", keys, *flags)[:1]

    def first(**how: Any) -> float:
        return difference(pretrain_losses(device, **how)[:3], pretrain_losses("cpu")[:3])

    def resumed() -> float:
        return difference(*(pretrain_losses(device, "bf16", stop=stop) for stop in (True, False)))

    def trained(engine: str) -> float:
        return difference(*(train_loss(where, engine) for where in (device, "cpu")))

    engines = ["embedded", *(["detectron2"] if detectron2_installed() else [])]
    return {
        "restored random state": (0.0, partial(random_numbers, device)),
        "gather, exchange, sum, broadcast, DDP, SyncBN": (1e-4, partial(collectives, device)),
        "first losses of pretrain, fp32": (1e-3, first),
        "first losses of pretrain, fp32, compiled": (1e-3, partial(first, compiled=True)),
        "first losses of pretrain, fp16": (5e-2, partial(first, precision="fp16")),
        "first losses of pretrain, bf16": (5e-2, partial(first, precision="bf16")),
        "losses of pretrain, stopped and resumed": (0.0, resumed),
        **{
            f"first loss of train, {engine}, bf16": (1e-2, partial(trained, engine))
            for engine in engines
        },
    }


def branches(setting: Setting) -> list[Row]:
    """Run every check; a check that raises does not stop the others."""
    rows = []
    for what, (limit, check) in checks("cuda", setting.scratch).items():
        try:
            with torch.backends.cudnn.flags(allow_tf32=False):
                found = check()
        except Exception as error:  # a branch that never ran on a GPU may raise anything
            print(f"{what} failed: {type(error).__name__}: {error}", flush=True)
            found = float("inf")
        rows.append(Row(what, found, 0.0, "the same on the CPU", limit, "error", ""))
    return rows
