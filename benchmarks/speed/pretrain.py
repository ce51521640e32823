"""Goals of pre-training: C on one thread of a CPU, G on a GPU.

N batch, C dimension, K length of the queue, P crop size in pixels, G groups of BN.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed import reference, scaling
from benchmarks.speed.measure import copy_bytes_per_second, description, interleaved
from benchmarks.speed.report import Row, at_least, at_most, duration, faster
from benchmarks.speed.shuffle import received_bytes
from moco.data.augment import NUM_PARAMS, V1, V2, Augmentation, apply_colors, draw_colors
from moco.data.images import find_images, open_images
from moco.data.views import Views
from moco.modeling.encoder import EncoderSpec, build_encoder
from moco.modeling.grouped_bn import GroupedBatchNorm2d
from moco.modeling.loss import info_nce
from moco.modeling.mechanisms.base import Dictionary, KeyBatch
from moco.modeling.mechanisms.momentum_queue import MomentumQueue

TITLE = "Pre-training"
ABOUT = """
Only ratios count: both sides ran in turn in one process, and the smallest CPU time (on a GPU:
the median) of all rounds was taken. The reference is `benchmarks/speed/reference.py`, a plain
transcription of the official code; lightly is the package of that name.
"""
DIM, M, T, LR = 128, 0.999, 0.07, 0.03
IMAGENET_PX, IMAGENET_BYTES = (500, 375), 110_000  # of a typical image of ImageNet
REFERENCE, OURS, PEER, MATMUL = "reference", "ours", "lightly", "matmul"
NEEDS_GPU = "needs a GPU"
# Bytes that one image moves through a GPU's memory in a step of ResNet-50 at 224 px, operation by
# operation in bfloat16; a count on paper.
BYTES_PER_IMAGE = 650e6
# Why something stays below its goal; printed where it does.
WHY = {
    "C1": "decoding takes 40% of our time; the colors are one pass over the image for each "
    "elementary operation, and a kernel compiled for them would make it a single one",
    "C3": "decoding takes two thirds of our time, and the same library does it on both sides",
    "C4": "what remains is how much faster this processor multiplies in bf16 than in fp32: see "
    "the share of the matmul rate",
    "C6": "the two matrix products take two thirds of the time; the rest is the exponential and "
    "the dictionary's conversion to bf16",
    "BN": "torch makes the gradient of each group as a new tensor, which is copied into its place",
}

ALLOCATOR = (
    "measured in a fresh process, where the reference's large tensors are new pages of memory at "
    "each step; in one that holds much freed memory (after C4, say) it is faster by a third"
)

Batch = tuple[Tensor, Tensor, Tensor]  # x_q, x_k (N, 3, P, P) float32, plan (N,)


@dataclass(frozen=True)
class Setting:
    """What to measure with.

    Args:
        scratch: folder for images.
        images: folder with JPEG images, None to generate some.
        rounds: of each timing.
        quick: tiny sizes.
    """

    scratch: Path
    images: str | None
    rounds: int
    quick: bool

    @property
    def queue_length(self) -> int:
        """K."""
        return 64 if self.quick else 65536

    @property
    def batch(self) -> int:
        """N of the paper's recipe."""
        return 8 if self.quick else 256

    @property
    def step_batch(self) -> int:
        """N of the steps that are timed whole on a CPU."""
        return 4 if self.quick else 16

    @property
    def matmul_size(self) -> int:
        """Side of the matrices whose product is the limit of a step."""
        return 64 if self.quick else 2048

    @property
    def crop_px(self) -> int:
        """P."""
        return 32 if self.quick else 224

    @cached_property
    def photographs(self) -> Path:
        """A folder `<class>/*.jpg`."""
        root = self.scratch / "images"
        folder = root / "0"
        folder.mkdir(parents=True)
        count = 4 if self.quick else 48
        if self.images is None:
            generate_images(folder, count)
        else:
            for i, path in enumerate(find_images(self.images)[:count]):
                (folder / f"{i:03d}{path.suffix}").symlink_to(path.resolve())
        return root

    @cached_property
    def resnet50_seconds(self) -> dict[str, float]:
        """Whole steps at 224 pixels: the reference's, ours in bf16 and fp32; a matrix product."""
        return self._steps("resnet50", "imagenet", self.crop_px, self.step_batch)

    @cached_property
    def resnet18_seconds(self) -> dict[str, float]:
        """The same at 64 pixels, four times the images."""
        return self._steps("resnet18", "imagenet", 64 if not self.quick else 32, self.batch // 4)

    @cached_property
    def resnet50_flops(self) -> int:
        """Of one step of the reference."""
        step = reference.Step(self.encoder("resnet50"), unit_columns(self.queue_length), M, T, LR)
        with FlopCounterMode(display=False) as counter:
            step(*random_batch(self.step_batch, self.crop_px))
        return counter.get_total_flops()

    def encoder(self, arch: str, stem: str = "imagenet") -> nn.Module:
        """With a linear head, the same weights each time."""
        torch.manual_seed(0)
        spec = EncoderSpec("resnet10", stem, 0.125) if self.quick else EncoderSpec(arch, stem)
        return build_encoder(spec, DIM, mlp=False)

    def description(self) -> list[str]:
        """Hardware, versions, command; what was read."""
        lines = description(self.rounds)
        if "photographs" in vars(self):
            lines.append(f"images: {_describe(self.photographs)}")
        return lines

    def _steps(self, arch: str, stem: str, crop_px: int, batch: int) -> dict[str, float]:
        official = reference.Step(
            self.encoder(arch, stem), unit_columns(self.queue_length), M, T, LR
        )
        steps: dict[str, Callable[..., Tensor]] = {REFERENCE: official}
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", None)):
            steps[name] = OurStep(self.encoder(arch, stem), self.queue_length, dtype)
        views = random_batch(batch, crop_px)
        contenders = {name: partial(step, *views) for name, step in steps.items()}
        a, b = (torch.randn(self.matmul_size, self.matmul_size).bfloat16() for _ in range(2))
        return interleaved({**contenders, MATMUL: partial(torch.mm, a, b)}, self.rounds)


class OurStep:
    """The training step of one process, as moco.pretrain does it.

    Args:
        encoder: becomes the query encoder; its device is used.
        dtype: of autocast; None for float32.
    """

    def __init__(self, encoder: nn.Module, K: int, dtype: torch.dtype | None) -> None:
        device = next(encoder.parameters()).device
        self.model = MomentumQueue(encoder, DIM, K, M, T).to(device)
        self.model = self.model.to(memory_format=torch.channels_last).train()
        self.optimizer = torch.optim.SGD(encoder.parameters(), LR, momentum=0.9, weight_decay=1e-4)
        self._dtype, self._device = dtype, device

    def __call__(self, x_q: Tensor, x_k: Tensor, plan: Tensor) -> Tensor:
        """See `benchmarks.speed.reference.Step`."""
        x_q, x_k = (x.contiguous(memory_format=torch.channels_last) for x in (x_q, x_k[plan]))
        images = torch.arange(len(x_q))
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype is not None):
            dictionary = self.model.dictionary(KeyBatch(x_k, plan, images, step=0))
            out = self.model(x_q, dictionary)
        self.optimizer.zero_grad()
        out.loss.backward()
        self.optimizer.step()
        self.model.update([dictionary], [out.queries], images)
        return out.loss.detach()


def random_batch(N: int, crop_px: int, device: str = "cpu") -> Batch:
    """Two views and an order of the keys."""
    x_q, x_k = (torch.randn(N, 3, crop_px, crop_px, device=device) for _ in range(2))
    return x_q, x_k, torch.randperm(N, device=device)


def unit_columns(K: int, device: str = "cpu") -> Tensor:
    """A random dictionary (C, K)."""
    return F.normalize(torch.randn(DIM, K, device=device), dim=0)


def queries_and_keys(N: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Queries (N, C) that ask for a gradient, and keys near them."""
    q = F.normalize(torch.randn(N, DIM, device=device), dim=1)
    k = F.normalize(q + 0.1 * torch.randn(N, DIM, device=device), dim=1)
    return q.requires_grad_(), k


def two_views(setting: Setting) -> list[Row]:
    """C1: decode, crop, colors, normalization of both views, one process, one thread."""
    rows = []
    for kind, aug in (("v1", V1), ("v2", V2)):
        official = reference.loader(str(setting.photographs), kind, 16)
        contenders: dict[str, Callable[[], object]] = {
            REFERENCE: partial(list, official),
            OURS: partial(_our_loader, setting.photographs, aug, with_colors=True),
        }
        peer = _lightly_loader(setting.photographs, kind)
        if peer is not None:
            contenders[PEER] = partial(list, peer)
        seconds = _per_image(setting, interleaved(contenders, setting.rounds))
        rows.append(faster("C1", f"two views of a JPEG, {kind}", seconds, REFERENCE, OURS, 3))
        rows.append(_peer(f"two views of a JPEG, {kind}", seconds))
    return rows


def decode_and_crop(setting: Setting) -> list[Row]:
    """C3: what is left to the CPU when the colors are done on the training device."""
    rows = []
    for kind, aug in (("v1", V1), ("v2", V2)):
        official = reference.loader(str(setting.photographs), kind, 16)
        seconds = interleaved(
            {
                REFERENCE: partial(list, official),
                OURS: partial(_our_loader, setting.photographs, aug, with_colors=False),
            },
            setting.rounds,
        )
        what = f"two views of a JPEG, {kind}, ours without colors (done on the device)"
        rows.append(faster("C3", what, _per_image(setting, seconds), REFERENCE, OURS, 4))
    return rows


def bf16_step(setting: Setting) -> list[Row]:
    """C4."""
    N = setting.step_batch
    seconds = setting.resnet50_seconds
    what = f"step, ResNet-50, {setting.crop_px} px, N={N}, K={setting.queue_length}, bf16"
    limit = 2 * setting.matmul_size**3 / seconds[MATMUL]
    rate = setting.resnet50_flops / seconds["bf16"]
    gflops = f"{rate / 1e9:.0f} GFLOP/s", f"{limit / 1e9:.0f} GFLOP/s"
    return [
        faster("C4", what, seconds, REFERENCE, "bf16", 2.5),
        at_least(
            "C4", "that step's share of this run's bf16 matmul rate", rate / limit, 0.55, *gflops
        ),
    ]


def fp32_step(setting: Setting) -> list[Row]:
    """C5."""
    K, N = setting.queue_length, setting.step_batch
    return [
        faster(
            "C5",
            f"step, ResNet-50, {setting.crop_px} px, N={N}, K={K}, fp32",
            setting.resnet50_seconds,
            REFERENCE,
            "fp32",
            1.12,
        ),
        faster(
            "C5",
            f"step, ResNet-18, 64 px, N={setting.batch // 4}, K={K}, bf16",
            setting.resnet18_seconds,
            REFERENCE,
            "bf16",
            1.5,
        ),
    ]


def loss(setting: Setting) -> list[Row]:
    """C6: loss, accuracy and the queries' gradient."""
    N, K = setting.batch, setting.queue_length
    (q, k), queue = queries_and_keys(N), unit_columns(K)

    def official() -> Tensor:
        value, _, _ = reference.loss_and_accuracy(q, k, queue, T)
        return torch.autograd.grad(value, q)[0]

    def ours(bf16: bool) -> Tensor:
        value, _ = info_nce(q, k, queue, T, bf16=bf16)
        return torch.autograd.grad(value, q)[0]

    contenders: dict[str, Callable[[], Tensor]] = {
        REFERENCE: official,
        "fp32": lambda: ours(bf16=False),
        "bf16": lambda: ours(bf16=True),
    }
    peer = _lightly_loss(K)
    if peer is not None:
        contenders[PEER] = lambda: torch.autograd.grad(peer(q, k), q)[0]
    seconds = interleaved(contenders, setting.rounds)
    exact = _exact_gradient(q, k, queue)
    what = f"InfoNCE and its gradient, N={N}, C={DIM}, K={K}"
    rows = []
    for name, ratio, error in (("fp32", 2.5, 1e-6), ("bf16", 6, 1e-3)):
        row = faster("C6", f"{what}, {name}", seconds, REFERENCE, name, ratio)
        rows.append(replace(row, note=ALLOCATOR))
        worst, official_worst = (
            _relative_error(contenders[side](), exact) for side in (name, REFERENCE)
        )
        rows.append(
            Row(
                "C6",
                f"largest error of that gradient / its largest value, {name}",
                f"{worst:.1e}",
                f"{official_worst:.1e}",
                f"{worst:.1e}",
                f"<= {error:.0e}",
                worst <= error,
            )
        )
    return [*rows, _peer(what, {**seconds, OURS: seconds["fp32"]})]


def momentum(setting: Setting, device: str = "cpu") -> list[Row]:
    """C7, G4."""
    step = OurStep(setting.encoder("resnet50").to(device), setting.queue_length, None)
    encoder_q, encoder_k = step.model.encoder_q, step.model.encoder_k
    images = torch.arange(0)
    contenders: dict[str, Callable[[], object]] = {
        REFERENCE: lambda: reference.momentum_update(encoder_k, encoder_q, M),
        OURS: lambda: step.model.update([], [], images),
    }
    try:
        from lightly.models.utils import update_momentum

        contenders[PEER] = lambda: update_momentum(encoder_q, encoder_k, M)
    except ImportError:
        pass
    seconds = interleaved(contenders, setting.rounds, device)
    goal, wanted = ("C7", 2.2) if device == "cpu" else ("G4", 15.0)
    what = "momentum update, ResNet-50"
    return [faster(goal, what, seconds, REFERENCE, OURS, wanted), _peer(what, seconds)]


def grouped_bn(setting: Setting, device: str = "cpu") -> list[Row]:
    """G5, and the same on a CPU."""
    rows = []
    shape = (8, 16, 8, 8) if setting.quick else (64, 256, 56, 56)
    for name, layout in (
        ("(C, H, W)", torch.contiguous_format),
        ("(H, W, C)", torch.channels_last),
    ):
        x = torch.randn(shape, device=device).contiguous(memory_format=layout).requires_grad_()
        upstream = torch.randn_like(x)
        norms = {
            "plain": nn.BatchNorm2d(shape[1]).to(device),
            OURS: GroupedBatchNorm2d(shape[1], 8).to(device),
        }
        seconds = interleaved(
            {key: partial(_forward_backward, norm, x, upstream) for key, norm in norms.items()},
            setting.rounds,
            device,
        )
        rows.append(
            Row(
                "G5" if device == "cuda" else "BN",
                f"BN in 8 groups ÷ plain BN, forward and backward, {shape} in memory as {name}",
                duration(seconds[OURS]),
                duration(seconds["plain"]),
                f"{seconds[OURS] / seconds['plain']:.2f}",
                "<= 1.05",
                seconds[OURS] <= 1.05 * seconds["plain"],
            )
        )
    return rows


def shuffle(setting: Setting) -> list[Row]:
    """C8: what reaches a process for the keys of one step, in the mean over two processes."""
    n = 2 if setting.quick else 32
    found = received_bytes(2, n, setting.crop_px, DIM, setting.queue_length, setting.scratch)
    what = f"bytes per process and step for the keys, 2 processes of {n} images"
    rows = []
    for name, key, wanted in (
        ("shuffle by index", "index", 500.0),
        ("crops exchanged (all_to_all)", "all_to_all", 0.0),
    ):
        ratio = found.bytes["official"] / found.bytes[key]
        rows.append(
            Row(
                "C8",
                f"{what}, {name}; same permutation, keys "
                + ("equal" if found.equal[key] else "DIFFERENT"),
                f"{found.bytes[key]:,.0f}",
                f"{found.bytes['official']:,.0f}",
                f"{ratio:.0f}x",
                f">= {wanted:g}x" if wanted else "",
                (ratio >= wanted and found.equal[key]) if wanted else None,
            )
        )
    rows += [
        Row("", f"on paper: {line.what}", line.ours, line.official, line.measured, line.wanted)
        for line in scaling.lines()
    ]
    return rows


def overhead(setting: Setting) -> list[Row]:
    """C10: the share of everything that is not an encoder, for the recipe's batch.

    The encoders' time per image is that of the timed step, whose batch is smaller; the rest is
    measured at the recipe's batch.
    """
    step = OurStep(setting.encoder("resnet50"), setting.queue_length, torch.bfloat16)
    for p in step.model.encoder_q.parameters():
        p.grad = torch.zeros_like(p)
    contenders = {}
    for name, N, with_colors in (
        ("small", setting.step_batch, False),
        ("recipe", setting.batch, True),
    ):
        contenders[name] = _rest_of_step(step, N, setting.crop_px, with_colors)
    rest = interleaved(contenders, setting.rounds)
    whole = setting.resnet50_seconds["bf16"]
    encoders = (whole - rest["small"]) / setting.step_batch * setting.batch
    share = rest["recipe"] / (rest["recipe"] + encoders)
    what = (
        f"share of colors, loss, optimizer, momentum update and queue in a step of "
        f"ResNet-50, {setting.crop_px} px, bf16, N={setting.batch}"
    )
    return [at_most("C10", what, share, 0.03, duration(rest["recipe"]), duration(encoders))]


def gpu_step(setting: Setting) -> list[Row]:
    """G1, G2, G8."""
    N, P, K = setting.batch, setting.crop_px, setting.queue_length
    views = random_batch(N, P, "cuda")
    builders: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "fp32": partial(_official_step, setting, None),
        "autocast": partial(_official_step, setting, torch.bfloat16),
        OURS: lambda: OurStep(setting.encoder("resnet50").cuda(), K, torch.bfloat16),
    }
    peak: dict[str, int] = {}
    for name, build in builders.items():
        torch.cuda.reset_peak_memory_stats()
        build()(*views)
        peak[name] = torch.cuda.max_memory_allocated()
    steps = {name: partial(build(), *views) for name, build in builders.items()}
    seconds = interleaved(steps, setting.rounds, "cuda")
    what = f"step, ResNet-50, {P} px, N={N}, K={K}"
    bandwidth = copy_bytes_per_second(setting.rounds, "cuda", 1 << (20 if setting.quick else 32))
    rate, floor = N / seconds[OURS], bandwidth / BYTES_PER_IMAGE
    memory = {name: f"{value / 2**30:.1f} GiB" for name, value in peak.items()}
    share = peak[OURS] / peak["autocast"]
    return [
        faster("G1", f"{what}, against fp32", seconds, "fp32", OURS, 3),
        faster("G1", f"{what}, against autocast", seconds, "autocast", OURS, 1.6),
        at_least(
            "G2",
            f"images per second, of what the measured {bandwidth / 1e12:.2f} TB/s allow",
            rate / floor,
            0.3,
            f"{rate:.0f}",
            f"{floor:.0f}",
        ),
        at_most("G8", "peak memory of that step", share, 0.85, memory[OURS], memory["autocast"]),
    ]


def gpu_colors(setting: Setting) -> list[Row]:
    """G6."""
    N, P = setting.batch, setting.crop_px
    pixels, params = _random_crops(2 * N, P, V2)
    pixels = pixels.cuda()
    views = random_batch(N, P, "cuda")
    step = OurStep(setting.encoder("resnet50").cuda(), setting.queue_length, torch.bfloat16)
    seconds = interleaved(
        {
            "colors": lambda: apply_colors(pixels, params, V2, reference.MEAN, reference.STD),
            "step": lambda: step(*views),
        },
        setting.rounds,
        "cuda",
    )
    share = seconds["colors"] / (seconds["colors"] + seconds["step"])
    what = f"share of the colors of two views, v2, in a step of ResNet-50, {P} px, N={N}"
    return [at_most("G6", what, share, 0.05, *map(duration, seconds.values()))]


GOALS: Mapping[str, Callable[[Setting], list[Row]]] = {
    "C6": loss,  # first: see ALLOCATOR
    "C1": two_views,
    "C3": decode_and_crop,
    "C4": bf16_step,
    "C5": fp32_step,
    "C7": momentum,
    "C8": shuffle,
    "C10": overhead,
    "BN": grouped_bn,
    "G1": gpu_step,
    "G4": lambda setting: momentum(setting, "cuda"),
    "G5": lambda setting: grouped_bn(setting, "cuda"),
    "G6": gpu_colors,
}
GPU_GOALS = {
    "G1": "step ÷ the reference's (G1), share of the memory bandwidth (G2), peak memory (G8)",
    "G4": "momentum update",
    "G5": "grouped BN ÷ plain BN",
    "G6": "share of the colors in a step",
}
# What this command does not measure, and why.
UNMEASURED = {
    "G3": "N=32 with CUDA graphs: this code has none",
    "G7": "from JPEG in memory, of random data's speed: needs 16 cores beside the GPU",
}


def measure(setting: Setting, goals: Sequence[str]) -> list[Row]:
    """The rows of these goals, with progress on the terminal; missed ones get their reason."""
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    rows: list[Row] = []
    start = time.monotonic()
    for goal in goals:
        print(f"{time.monotonic() - start:4.0f} s  {goal} ...", flush=True)
        if goal.startswith("G") and not torch.cuda.is_available():
            rows.append(Row(goal, f"{GPU_GOALS[goal]}: {NEEDS_GPU}"))
            continue
        torch.manual_seed(0)
        rows += [
            replace(row, note="; ".join(filter(None, (WHY.get(goal), row.note))))
            if row.met is False
            else row
            for row in GOALS[goal](setting)
        ]
    if set(goals) == set(GOALS):
        rows += [Row(goal, f"{what}: not measured") for goal, what in UNMEASURED.items()]
    return rows


def _our_loader(root: Path, aug: Augmentation, with_colors: bool) -> None:
    """Two views of all images, in batches of 16 of them."""
    images = open_images(root)
    views = Views(images, aug, seed=0)
    for first in range(0, len(images), 16):
        indices = range(first, min(first + 16, len(images)))
        batch = views.__getitems__([(0, i, view) for view in (0, 1) for i in indices])
        if with_colors:
            apply_colors(batch.pixels, batch.params, aug, reference.MEAN, reference.STD)


def _per_image(setting: Setting, seconds: Mapping[str, float]) -> dict[str, float]:
    count = len(find_images(setting.photographs))
    return {name: value / count for name, value in seconds.items()}


def _peer(what: str, seconds: Mapping[str, float]) -> Row:
    """How lightly compares with ours."""
    if PEER not in seconds:
        return Row("", f"{what}: lightly", note="lightly is not installed, see the extra `speed`")
    return faster("", f"{what}: lightly", seconds, PEER, OURS, 0)


def _lightly_loader(root: Path, kind: str) -> object | None:
    """Two views by lightly's transforms, without its own progress and command line."""
    try:
        from lightly.transforms import MoCoV1Transform, MoCoV2Transform
    except ImportError:
        return None
    transform = MoCoV1Transform() if kind == "v1" else MoCoV2Transform()
    return torch.utils.data.DataLoader(reference.ImageFolder(str(root), transform), batch_size=16)


def _lightly_loss(K: int) -> nn.Module | None:
    try:
        from lightly.loss import NTXentLoss
    except ImportError:
        return None
    found: nn.Module = NTXentLoss(T, memory_bank_size=(K, DIM))
    return found


def _forward_backward(layer: nn.Module, x: Tensor, upstream: Tensor) -> None:
    layer(x).backward(upstream)


def _exact_gradient(q: Tensor, k: Tensor, queue: Tensor) -> Tensor:
    """In float64."""
    wide = q.detach().double().requires_grad_()
    value, _, _ = reference.loss_and_accuracy(wide, k.double(), queue.double(), T)
    return torch.autograd.grad(value, wide)[0]


def _relative_error(x: Tensor, exact: Tensor) -> float:
    return ((x - exact).abs().max() / exact.abs().max()).item()


def _rest_of_step(step: OurStep, N: int, crop_px: int, with_colors: bool) -> Callable[[], None]:
    """A step without its encoders."""
    q, k = queries_and_keys(N)
    x = torch.empty(0)
    pixels, params = _random_crops(2 * N if with_colors else 2, crop_px, V2)
    images = torch.arange(N)
    queue: Tensor = step.model.queue

    def rest() -> None:
        nonlocal x
        if with_colors:
            x = apply_colors(pixels, params, V2, reference.MEAN, reference.STD)
            x = x.contiguous(memory_format=torch.channels_last)
        value, _ = info_nce(F.normalize(q, dim=1), F.normalize(k, dim=1), queue, T)
        value.backward()
        step.optimizer.step()
        step.model.update([Dictionary(k, queue, keys=k)], [q], images)

    return rest


def _random_crops(count: int, crop_px: int, aug: Augmentation) -> tuple[Tensor, Tensor]:
    rng = Random(0)
    pixels = torch.randint(0, 256, (count, 3, crop_px, crop_px), dtype=torch.uint8)
    params = torch.tensor([draw_colors(rng, aug) for _ in range(count)])
    assert params.shape[1] == NUM_PARAMS
    return pixels, params


def _official_step(setting: Setting, dtype: torch.dtype | None) -> reference.Step:
    queue = unit_columns(setting.queue_length, "cuda")
    return reference.Step(setting.encoder("resnet50").cuda(), queue, M, T, LR, dtype)


def generate_images(folder: Path, count: int) -> None:
    """JPEG files of ImageNet's typical size in pixels and bytes, with a photograph's spectrum."""
    W, H = IMAGENET_PX
    rng = np.random.default_rng(0)
    fy, fx = np.fft.fftfreq(H)[:, None], np.fft.rfftfreq(W)[None]
    spectrum = 1 / np.maximum(np.hypot(fx, fy), 1 / W) ** 1.2
    for i in range(count):
        noise = rng.normal(size=(3, H, W))
        shape = np.fft.irfft2(np.fft.rfft2(noise) * spectrum, s=(H, W))
        shape[1:] = 0.3 * shape[1:] + shape[:1]  # channels that resemble each other
        shape = (shape - shape.mean((1, 2), keepdims=True)) / shape.std((1, 2), keepdims=True)
        pixels = np.clip(128 + 56 * shape, 0, 255).astype(np.uint8).transpose(1, 2, 0)
        Image.fromarray(pixels).save(folder / f"{i:03d}.jpg", quality=95)


def _describe(root: Path) -> str:
    paths = find_images(root)
    sizes = [Image.open(path).size for path in paths]
    W, H = (sum(side) / len(sizes) for side in zip(*sizes, strict=True))
    kib = sum(path.stat().st_size for path in paths) / len(paths) / 1024
    return f"{len(paths)} JPEG files, in the mean {W:.0f} x {H:.0f} pixels and {kib:.0f} KiB"
