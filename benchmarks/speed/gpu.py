"""Every branch of the code that needs a GPU, against the same on the CPU: the largest difference.

Each check takes the device, so that the CPU runs it, too, against itself.
"""

import copy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.speed import detection, pretrain, reference, step
from benchmarks.speed.measure import Setting
from benchmarks.speed.results import Result, Run
from benchmarks.suites.chain import PRETRAIN_CONFIG, SMOKE_DETECTION, SMOKE_PRETRAIN
from benchmarks.suites.synthetic import write_images, write_scenes
from detection.engine.random_state import random_state, restore_random
from moco.common.errors import Preempted
from moco.common.run import metrics_lines
from moco.data.augment import V2, apply_colors
from moco.modeling.grouped_bn import GroupedBatchNorm2d
from moco.modeling.loss import info_nce

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 40


def difference(a: Tensor, b: Tensor) -> float:
    """The largest one, relative to the largest value of `b`."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def both(run: Callable[[str], Tensor], device: str) -> float:
    """The difference between a device's result and the CPU's, from one seed."""
    found = []
    for where in (device, "cpu"):
        torch.manual_seed(0)
        found.append(run(where))
    return difference(*found)


def training(where: str, bf16: bool) -> Tensor:
    """Losses of three steps of pre-training."""
    setting = Setting(Path(), 1, quick=True)
    size, dtype = step.sizes(setting), torch.bfloat16 if bf16 else None
    ours = step.OurStep(step.encoder(setting, device=where), size.K, dtype)
    views = [view.to(where) for view in step.random_batch(size.N, 64)[:2]]
    return torch.stack([ours(views[0], views[1], torch.arange(size.N)) for _ in range(3)])


def loss(where: str, bf16: bool) -> Tensor:
    """The gradient of InfoNCE."""
    q, k = (x.to(where) for x in step.queries_and_keys(64))
    q = q.detach().requires_grad_()
    value, _ = info_nce(q, k, step.unit_columns(4096).to(where), step.T, bf16=bf16)
    return torch.autograd.grad(value, q)[0]


def colors(where: str) -> Tensor:
    """Pixels that were pinned, sent, and colored."""
    pixels, params = step.random_crops(16, 64)
    if where != "cpu":
        pixels, params = pixels.pin_memory(), params.pin_memory()
    pixels, params = (x.to(where, non_blocking=True) for x in (pixels, params))
    return apply_colors(pixels, params, V2, reference.MEAN, reference.STD)


def norm(where: str, compiled: bool) -> Tensor:
    """Output of grouped BN."""
    layer: Callable[[Tensor], Tensor] = GroupedBatchNorm2d(16, 8).to(where)
    x = torch.randn(64, 16, 8, 8)
    return (torch.compile(layer) if compiled else layer)(x.to(where))


def random_numbers(device: str) -> float:
    """Draws after a state was saved, and again after it was restored."""
    torch.empty(1, device=device)  # a GPU has a state from its first use
    state = copy.deepcopy(random_state())
    first = torch.rand(8, device=device)
    restore_random(state)
    return difference(torch.rand(8, device=device), first)


@contextmanager
def _connected(device: str) -> Iterator[None]:
    """A group of one process: NCCL on a GPU."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def collectives(device: str) -> float:
    """All that the project calls, among one process: each has to give what it got."""
    with _connected(device):
        x = torch.randn(6, 4, device=device)
        found = [torch.empty_like(x), torch.empty_like(x), x.clone(), x.clone()]
        dist.all_gather_into_tensor(found[0], x)
        dist.all_to_all_single(found[1], x, [6], [6])
        dist.all_reduce(found[2])
        dist.broadcast(found[3], 0)
        model = nn.Linear(4, 3).to(device)
        plain, parallel = model(x), DistributedDataParallel(model, broadcast_buffers=False)(x)
        return max(*(difference(each, x) for each in found), difference(parallel, plain))


def sync_bn(device: str) -> float:
    """torch's SyncBN against BN; on the CPU, which SyncBN refuses, BN against itself."""
    with _connected(device):
        x = torch.randn(4, 8, 5, 5, device=device)
        layer = nn.SyncBatchNorm(8) if device != "cpu" else nn.BatchNorm2d(8)
        return difference(layer.to(device)(x), nn.BatchNorm2d(8).to(device)(x))


def pretraining(device: str, scratch: Path, precision: str, interrupted: bool = False) -> Tensor:
    """Losses of `moco.pretrain`; interrupted by SIGTERM once and resumed, or not."""
    images = scratch / "images"
    if not images.exists():
        write_images(images, 64, seed=0)
    folder = scratch / f"{device}-{precision}-{interrupted}"
    keys = {**SMOKE_PRETRAIN, "DATA.ROOT": images, "OUTPUT_DIR": folder, "DEVICE": device}
    keys |= {"SOLVER.PRECISION": precision, "SOLVER.MAX_ITERS": ITERATIONS, "LOG.EVERY_ITERS": 1}
    words = [str(part) for pair in keys.items() for part in pair]
    command = ["moco.pretrain", "--resume", "--config-file", str(PRETRAIN_CONFIG), *words]
    _run(command, folder if interrupted else None)
    lines = metrics_lines(folder) or []
    return torch.tensor([line["loss"] for line in lines if "loss" in line])


def fine_tuning(device: str, scratch: Path) -> Tensor:
    """Losses of `detection.train_net` on the embedded engine, in bf16."""
    scenes, folder = scratch / "scenes", scratch / f"detection-{device}"
    if not scenes.exists():
        write_scenes(scenes, 8, 4, seed=0)
    keys = {**SMOKE_DETECTION, "DATASETS.VOC_DIR": scenes, "OUTPUT_DIR": folder, "SEED": 0}
    keys |= {"MODEL.DEVICE": device, "MODEL.WEIGHTS": "random", "SOLVER.PRECISION": "bf16"}
    words = [str(part) for pair in keys.items() for part in pair]
    config = ["--overwrite", "--engine", "embedded", "--config-file", "voc/quickstart_R_10_C4"]
    _run(["detection.train_net", *config, *words])
    lines = metrics_lines(folder) or []
    return torch.tensor([line["total_loss"] for line in lines if "total_loss" in line])


def _run(module: list[str], stop_in: Path | None = None) -> None:
    """A command of the project; with `stop_in` stopped after its first lines, then continued."""
    command = [sys.executable, "-m", *module]
    if stop_in is not None:
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and len(metrics_lines(stop_in) or []) < 3:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
        if process.returncode != Preempted.exit_code:
            raise RuntimeError(f"{module[0]}: stopped with {process.returncode}, expected 85")
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def checks(device: str, scratch: Path) -> dict[str, Callable[[], float]]:
    """Goal → the largest difference between the device and what it has to equal."""

    def pretrained(precision: str) -> float:
        whole = pretraining(device, scratch, precision)
        return difference(whole[:3], pretraining("cpu", scratch, "fp32")[:3])

    def resumed() -> float:
        runs = [pretraining(device, scratch, "bf16", interrupted) for interrupted in (True, False)]
        return difference(*runs)

    def fine_tuned() -> float:
        return difference(*(fine_tuning(where, scratch)[:1] for where in (device, "cpu")))

    compare = partial(both, device=device)
    return {
        "branches loss fp32": lambda: compare(partial(loss, bf16=False)),
        "branches loss bf16": lambda: compare(partial(loss, bf16=True)),
        "branches step fp32": lambda: compare(partial(training, bf16=False)),
        "branches step bf16": lambda: compare(partial(training, bf16=True)),
        "branches colors": lambda: compare(colors),
        "branches grouped bn": lambda: compare(partial(norm, compiled=False)),
        "branches compile": lambda: compare(partial(norm, compiled=True)),
        "branches random state": lambda: random_numbers(device),
        "branches collectives": lambda: collectives(device),
        "branches sync bn": lambda: sync_bn(device),
        "branches pretrain fp16": lambda: pretrained("fp16"),
        "branches pretrain bf16": lambda: pretrained("bf16"),
        "branches resume": resumed,
        "branches fine-tune": fine_tuned,
    }


def branches(setting: Setting) -> list[Result]:
    """Every check; one that fails does not stop the others."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = []
    for goal, check in checks("cuda", setting.scratch).items():
        try:
            rows.append(Result(goal, check(), 0.0))
        except Exception as error:  # whatever a branch that never ran does
            print(f"{goal} failed: {type(error).__name__}: {error}", flush=True)
            rows.append(Result(goal, 1.0, 0.0, differs=True))
    return rows


# What is wrong is not timed: the branches come first.
TIMED = ("gpu_step", "gpu_momentum", "gpu_grouped_bn", "gpu_colors")
GOALS: dict[str, Run | None] = {
    "branches": branches,
    **{name: pretrain.GOALS[name] for name in TIMED},
    "gpu_training": detection.GOALS["gpu_training"],
}
