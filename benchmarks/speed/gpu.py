"""Timings on a GPU: pre-training and detection against other projects in the same process.

N batch, K length of the queue, P crop size in pixels.
"""

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed import detection, pretrain
from benchmarks.speed.branches import branches, training
from benchmarks.speed.input import write_image
from benchmarks.speed.measure import Row, Setting, Timing, compare, interleaved
from benchmarks.speed.peers import LightlyStep, TorchvisionStep
from benchmarks.speed.reference import MEAN, STD
from detection.config.engines import detectron2_installed
from moco.common.run import metrics_lines
from moco.data.augment import apply_colors, sample_colors
from moco.pretraining.config import default_cfg
from moco.pretraining.run import augmentations_from

OFFICIAL, AUTOCAST, LIGHTLY, OURS = "official code", "official code, autocast", "lightly", "bf16"
FILES, IMAGES, PHOTO_PX = 96, 8192, (500, 375)  # distinct files; names of them; a typical size


class Traffic(TorchDispatchMode):
    """Counter of the bytes that operations read (inputs) and write (outputs), once each."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            self.bytes += sum(_bytes(x) for x in (*args, *(kwargs or {}).values(), out))
        return out


def _bytes(x: Any) -> int:
    if isinstance(x, list | tuple):
        return sum(map(_bytes, x))
    return x.numel() * x.element_size() if isinstance(x, Tensor) else 0


def ceilings(setting: Setting, device: str) -> tuple[float, float]:
    """Measure bytes per second of a copy, and FLOP per second of a product of bf16 matrices."""
    size, n = (2**20, 256) if setting.quick else (2**32, 8192)
    source, a, b = (
        torch.randint(0, 99, (size,), dtype=torch.uint8, device=device),
        *(torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2)),
    )
    target, product = torch.empty_like(source), torch.empty_like(a)
    runs: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "product": lambda: torch.mm(a, b, out=product),
    }
    found = interleaved(runs, setting.rounds, device)
    return 2 * size / found["copy"].seconds, 2 * n**3 / found["product"].seconds


def build_lightly(setting: Setting, N: int, P: int, device: str) -> Callable[[], Tensor]:
    """Build lightly's step on random images, with the same encoder as the other sides."""
    network = pretrain.build_encoder(setting, "resnet50", device)[1]
    K = pretrain.sizes(setting)[1]
    constants = pretrain.DIM, K, pretrain.M, pretrain.T, pretrain.LR, torch.bfloat16
    x_q, x_k = (torch.randn(N, 3, P, P, device=device) for _ in range(2))
    plan = torch.randperm(N, device=device)
    return partial(LightlyStep(network, *constants), x_q, x_k, plan)


def step(setting: Setting, device: str = "cuda") -> list[Row]:
    """Measure a pre-training step: time, memory, share of the lower bound, color transforms."""
    N, K, P, *_ = pretrain.sizes(setting)
    bandwidth, rate = ceilings(setting, device)
    build: dict[str, Callable[[], Callable[[], Tensor]]] = {
        name: partial(pretrain.build_step, setting, side, N, P, device=device)
        for name, side in ((OFFICIAL, OFFICIAL), (AUTOCAST, "autocast"), (OURS, OURS))
    }
    if importlib.util.find_spec("lightly"):
        build[LIGHTLY] = partial(build_lightly, setting, N, P, device)
    contenders: dict[str, Callable[[], object]] = {}
    peak = {}
    for side, make in build.items():
        before = torch.cuda.memory_allocated()
        contenders[side] = make()
        torch.cuda.reset_peak_memory_stats()
        contenders[side]()
        peak[side] = (torch.cuda.max_memory_allocated() - before) / 2**30
    contenders["colors"] = colors(N, P, device)
    sides, of = interleaved(contenders, setting.rounds, device), f"resnet50, {P} px, N={N}, K={K}"
    with FlopCounterMode(display=False) as flop, Traffic() as traffic:
        contenders[OURS]()
    goals = {OFFICIAL: 3.0, AUTOCAST: 1.6, LIGHTLY: None}
    rows = [
        compare(f"step, bf16; {of}", sides, OURS, side, goals[side])
        for side in build
        if side != OURS
    ]
    for side in (AUTOCAST, LIGHTLY):
        if side in peak:
            goal = 0.85 if side == AUTOCAST else None
            what = f"peak memory of a step, bf16; {of}"
            rows.append(Row(what, peak[OURS], peak[side], side, goal, "share", "GiB"))
    floors = (
        (traffic.bytes / bandwidth, f"{traffic.bytes / 1e9:.3g} GB as a copy does them, "
         f"{bandwidth / 1e12:.3g} TB/s", 0.3),
        (flop.get_total_flops() / rate, f"{flop.get_total_flops() / 1e12:.3g} TFLOP as a product "
         f"of matrices does them, {rate / 1e12:.3g} TFLOP/s", None),
    )  # fmt: skip
    seconds = sides[OURS].seconds
    rows += [
        Row(f"step, bf16; {of}", seconds, floor, against, goal, "floor")
        for floor, against, goal in floors
    ]
    whole = {"colors": sides["colors"], "step": sides[OURS]}
    what = f"color transforms of both views, v2, on the GPU; {P} px, N={N}"
    return [*rows, compare(what, whole, "colors", "step", 0.05, "share")]


def colors(N: int, P: int, device: str) -> Callable[[], object]:
    """Return a function that applies the color transforms of v2 to two views of N images."""
    rng, (aug, _) = Random(0), augmentations_from(default_cfg("v2"))
    pixels = torch.randint(0, 256, (2 * N, 3, P, P), dtype=torch.uint8).to(device)
    params = torch.tensor([sample_colors(rng, aug) for _ in range(2 * N)])
    return lambda: apply_colors(pixels, params, aug, MEAN, STD)


def compiled(setting: Setting, device: str = "cuda") -> list[Row]:
    """Measure the gain of SOLVER.COMPILE in a step with the recipe's batch size per GPU."""
    N, K, P, *_ = pretrain.sizes(setting)
    N, sides = max(2, N // 8), (OURS, "compiled")
    build = partial(pretrain.build_step, setting, N=N, P=P, device=device)
    runs = {side: build(side=side) for side in sides}
    found = interleaved(runs, setting.rounds, device)
    what = f"step, bf16, SOLVER.COMPILE; resnet50, {P} px, N={N}, K={K}"
    return [compare(what, found, "compiled", OURS, 1.4)]


def from_files(setting: Setting, device: str = "cuda") -> list[Row]:
    """Measure the pre-training command on JPEG files in memory, against steps on random images."""
    N, K, P, *_ = pretrain.sizes(setting)
    files, images, iters = (4, 16, 4) if setting.quick else (FILES, IMAGES, 120)
    folder = setting.scratch / "photographs"
    folder.mkdir()
    for i in range(files):
        write_image(folder / f"{i:05d}.jpg", PHOTO_PX, seed=i)
    for i in range(files, images):
        (folder / f"{i:05d}.jpg").symlink_to(folder / f"{i % files:05d}.jpg")
    keys: dict[str, object] = {"DATA.ROOT": folder, "OUTPUT_DIR": setting.scratch / "run"}
    keys |= {"DEVICE": device, "SOLVER.PRECISION": "bf16", "SOLVER.BATCH_SIZE": N, "MOCO.K": K}
    keys |= {"SOLVER.MAX_ITERS": iters, "LOG.EVERY_ITERS": iters // 4, "AUG.CROP_PX": P}
    keys |= {"SOLVER.REFERENCE_BATCH_SIZE": N}
    keys |= {"DATA.NUM_WORKERS": 0 if setting.quick else os.cpu_count() or 1}
    if setting.quick:
        keys |= {"MODEL.ARCH": "resnet18", "MODEL.WIDTH": 0.125, "MOCO.BN_SPLITS": 2}
    training("pretrain", keys, "--config-file", "pretrain/moco_v2_r50_in1m_200ep")
    lines = metrics_lines(setting.scratch / "run") or []
    speeds = [line["images_per_second"] for line in lines if "images_per_second" in line]
    seconds = N * len(speeds[1:]) / sum(speeds[1:])  # the first includes the start of the workers
    random = interleaved(
        {"step": pretrain.build_step(setting, OURS, N, P, device=device)}, setting.rounds, device
    )["step"]
    what = f"pre-training from JPEG files, v2, {keys['DATA.NUM_WORKERS']} workers; {P} px, N={N}"
    return [Row(what, seconds, random.seconds, "step on random images", 0.9, "floor")]


def torchvision(setting: Setting, device: str = "cuda") -> list[Row]:
    """Measure Mask R-CNN FPN on the embedded engine against torchvision's reference loop."""
    # 512 regions of an image are the default of both.
    px, regions, workers = (96, 4, 0) if setting.quick else (800, 512, detection.WORKERS)
    batch = 2
    data = detection.Generated("compared", setting.scratch, 32, detection.IMAGE_PX)
    keys = {"INPUT.MIN_SIZE_TRAIN": [px], "SOLVER.IMS_PER_BATCH": batch, "MODEL.DEVICE": device}
    keys |= {"DATALOADER.NUM_WORKERS": workers, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": regions}
    split, runs = data.read(), {}
    for kind in ("fp32", "bf16"):
        own = {"SOLVER.PRECISION": kind}
        cfg = detection.task_config(data, detection.EMBEDDED, detection.MASK_FPN, keys, own)
        runs[kind] = detection.training_iteration(cfg, detection.EMBEDDED)
    for name, amp in (("torchvision's loop", False), ("torchvision's loop, --amp", True)):
        numbers = len(split.classes), batch, px, regions, workers
        runs[name] = TorchvisionStep(split.records, *numbers, device, amp)
    # As in trainings: the number of regions varies, and each number would be tuned anew.
    torch.backends.cudnn.benchmark = False
    found: dict[str, Timing] = interleaved(runs, setting.rounds, device)
    what = f"training iteration; Mask R-CNN FPN, {batch} images of {px} px; embedded"
    return [
        compare(f"{what}, fp32", found, "fp32", "torchvision's loop"),
        compare(f"{what}, bf16", found, "bf16", "torchvision's loop, --amp"),
        compare(f"{what}, bf16", found, "bf16", "fp32"),
    ]


CASES: dict[str, Callable[[Setting], list[Row]]] = {
    "branches": branches,  # first, as timings of wrong results mean nothing
    "step": step,
    "momentum": partial(pretrain.momentum, device="cuda", goal=15.0),
    "grouped_bn": partial(pretrain.grouped_bn, device="cuda"),
    "files": from_files,
    "torchvision": torchvision,
    **(
        {"iteration": partial(detection.iteration, device="cuda")} if detectron2_installed() else {}
    ),
    "compiled": compiled,
}
