"""The training step and the parts that are not an encoder.

N batch, C dimension, K length of the queue, P crop size in pixels.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from random import Random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed import reference
from benchmarks.speed.measure import Setting, interleaved
from benchmarks.speed.results import Result, compare
from moco.data.augment import V2, apply_colors, draw_colors
from moco.modeling.encoder import EncoderSpec, build_encoder
from moco.modeling.loss import info_nce
from moco.modeling.mechanisms.base import Dictionary, KeyBatch, Passes
from moco.modeling.mechanisms.momentum_queue import MomentumQueue

DIM, M, T, LR = 128, 0.999, 0.07, 0.03
# Bytes that one image moves through a GPU's memory in a step of ResNet-50 at 224 px, operation by
# operation in bfloat16; a count on paper.
BYTES_PER_IMAGE = 650e6


class Sizes(NamedTuple):
    """`step_n`: of the steps that are timed whole on a CPU; `matmul`: side of the matrices."""

    N: int
    step_n: int
    K: int
    P: int
    resnet18_px: int
    matmul: int


def sizes(setting: Setting) -> Sizes:
    """The paper's recipe, or tiny ones."""
    return Sizes(8, 4, 64, 32, 32, 64) if setting.quick else Sizes(256, 16, 65536, 224, 64, 2048)


class OurStep:
    """The training step of one process, as moco.pretrain does it.

    Args:
        encoder: becomes the query encoder; its device is used.
        dtype: of autocast; None for float32.
    """

    def __init__(self, encoder: nn.Module, K: int, dtype: torch.dtype | None = None) -> None:
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
        self.model.update(Passes([dictionary], [out.queries], images, 0.0))
        return out.loss.detach()

    def without_encoders(self, N: int, P: int, with_colors: bool) -> Callable[[], object]:
        """Everything else of a step; the gradients that the optimizer applies are zeros."""
        q, k = queries_and_keys(N)
        pixels, params = random_crops(2 * N, P)
        images, queue = torch.arange(N), self.model.queue
        for parameter in self.model.encoder_q.parameters():
            parameter.grad = torch.zeros_like(parameter)

        def rest() -> object:
            x = None
            if with_colors:
                x = apply_colors(pixels, params, V2, reference.MEAN, reference.STD)
                x = x.contiguous(memory_format=torch.channels_last)
            value, _ = info_nce(F.normalize(q, dim=1), F.normalize(k, dim=1), queue, T)
            value.backward()
            self.optimizer.step()
            self.model.update(Passes([Dictionary(k, queue, keys=k)], [q], images, 0.0))
            return x

        return rest


def encoder(setting: Setting, arch: str = "resnet50", device: str = "cpu") -> nn.Module:
    """With a linear head, the same weights each time."""
    torch.manual_seed(0)
    spec = EncoderSpec("resnet10", "imagenet", 0.125) if setting.quick else EncoderSpec(arch)
    return build_encoder(spec, DIM, mlp=False).to(device)


def build_step(
    setting: Setting, side: str, arch: str = "resnet50", device: str = "cpu"
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A training step: the reference's, the same under autocast, ours in bf16 or in fp32."""
    model, K = encoder(setting, arch, device), sizes(setting).K
    dtype = torch.bfloat16 if side in ("bf16", "autocast") else None
    if side in ("bf16", "fp32"):
        return OurStep(model, K, dtype)
    return reference.Step(model, unit_columns(K, device), M, T, LR, dtype)


def random_batch(N: int, P: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Two views (N, 3, P, P) and an order (N,) of the keys."""
    x_q, x_k = (torch.randn(N, 3, P, P, device=device) for _ in range(2))
    return x_q, x_k, torch.randperm(N, device=device)


def random_crops(count: int, P: int) -> tuple[Tensor, Tensor]:
    """Pixels (count, 3, P, P) uint8 and the parameters of their colors."""
    rng = Random(0)
    pixels = torch.randint(0, 256, (count, 3, P, P), dtype=torch.uint8)
    return pixels, torch.tensor([draw_colors(rng, V2) for _ in range(count)])


def unit_columns(K: int, device: str = "cpu") -> Tensor:
    """A random dictionary (C, K)."""
    return F.normalize(torch.randn(DIM, K, device=device), dim=0)


def queries_and_keys(N: int) -> tuple[Tensor, Tensor]:
    """Queries (N, C) that need a gradient, and keys near them."""
    q = F.normalize(torch.randn(N, DIM), dim=1)
    k = F.normalize(q + 0.1 * torch.randn(N, DIM), dim=1)
    return q.requires_grad_(), k


@cache
def step_seconds(setting: Setting, arch: str = "resnet50") -> tuple[dict[str, float], str]:
    """Whole steps: the reference's, ours in bf16 and fp32; a bf16 matrix product; and the sizes."""
    size = sizes(setting)
    N, P = (size.step_n, size.P) if arch == "resnet50" else (size.N // 4, size.resnet18_px)
    views = random_batch(N, P)
    contenders: dict[str, Callable[[], object]] = {
        side: partial(build_step(setting, side, arch), *views)
        for side in ("reference", "bf16", "fp32")
    }
    a, b = (torch.randn(size.matmul, size.matmul).bfloat16() for _ in range(2))
    contenders["matmul"] = partial(torch.mm, a, b)
    return interleaved(contenders, setting.rounds), f"{P} px, N={N}, K={size.K}"


def bf16_step(setting: Setting) -> list[Result]:
    """A step in bf16, and its share of the matmul rate."""
    size = sizes(setting)
    seconds, of = step_seconds(setting)
    with FlopCounterMode(display=False) as counter:
        build_step(setting, "reference")(*random_batch(size.step_n, size.P))
    rate = counter.get_total_flops() / seconds["bf16"] / 1e9
    limit = 2 * size.matmul**3 / seconds["matmul"] / 1e9
    return [compare("step_bf16", seconds, "bf16", sizes=of), Result("step_bf16 rate", rate, limit)]


def fp32_step(setting: Setting) -> list[Result]:
    """A step in fp32, and one of a small network in bf16."""
    large, small = step_seconds(setting), step_seconds(setting, "resnet18")
    return [
        compare("step_fp32", large[0], "fp32", sizes=large[1]),
        compare("step_fp32 resnet18", small[0], "bf16", sizes=small[1]),
    ]


def momentum(setting: Setting, goal: str, device: str) -> list[Result]:
    """The momentum update."""
    step = OurStep(encoder(setting, device=device), sizes(setting).K)
    encoder_q, encoder_k = step.model.encoder_q, step.model.encoder_k
    images = torch.arange(0)
    contenders: dict[str, Callable[[], object]] = {
        "reference": lambda: reference.momentum_update(encoder_k, encoder_q, M),
        "ours": lambda: step.model.update(Passes([], [], images, 0.0)),
    }
    with suppress(ImportError):
        from lightly.models.utils import update_momentum

        contenders["lightly"] = lambda: update_momentum(encoder_q, encoder_k, M)
    seconds = interleaved(contenders, setting.rounds, device)
    return [compare(goal, seconds), compare("lightly momentum", seconds, reference="lightly")]


def overhead(setting: Setting) -> list[Result]:
    """The share of everything that is not an encoder, for the recipe's batch.

    The encoders' time per image is that of the timed step, whose batch is smaller; the rest is
    measured at the recipe's batch.
    """
    size = sizes(setting)
    step = OurStep(encoder(setting), size.K, torch.bfloat16)
    contenders = {
        "small": step.without_encoders(size.step_n, size.P, with_colors=False),
        "recipe": step.without_encoders(size.N, size.P, with_colors=True),
    }
    rest = interleaved(contenders, setting.rounds)
    encoders = (step_seconds(setting)[0]["bf16"] - rest["small"]) / size.step_n * size.N
    whole = rest["recipe"] + encoders
    return [Result("overhead", rest["recipe"], whole, f"{size.P} px, N={size.N}")]


def gpu_step(setting: Setting) -> list[Result]:
    """A step on a GPU: time, bandwidth, memory."""
    N, _, K, P, *_ = sizes(setting)
    views = random_batch(N, P, "cuda")
    peak, sides = {}, ("reference", "autocast", "bf16")
    for side in sides:
        torch.cuda.reset_peak_memory_stats()
        build_step(setting, side, device="cuda")(*views)
        peak[side] = torch.cuda.max_memory_allocated() / 2**30
    a = torch.zeros(1 << (20 if setting.quick else 32), dtype=torch.uint8, device="cuda")
    contenders = {side: partial(build_step(setting, side, device="cuda"), *views) for side in sides}
    contenders["copy"] = partial(torch.empty_like(a).copy_, a)
    seconds = interleaved(contenders, setting.rounds, "cuda")
    bandwidth = 2 * a.nbytes / seconds["copy"]  # bytes read plus bytes written
    of = f"{P} px, N={N}, K={K}"
    limit, terabytes = bandwidth / BYTES_PER_IMAGE, f"{bandwidth / 1e12:.2f} TB/s"
    return [
        compare("gpu_step fp32", seconds, "bf16", sizes=of),
        compare("gpu_step autocast", seconds, "bf16", "autocast", of),
        Result("gpu_step bandwidth", N / seconds["bf16"], limit, terabytes),
        compare("gpu_step memory", peak, "bf16", "autocast"),
    ]


def gpu_colors(setting: Setting) -> list[Result]:
    """Colors on a GPU, as a share of them and a step."""
    N, _, _, P, *_ = sizes(setting)
    pixels, params = random_crops(2 * N, P)
    step = build_step(setting, "bf16", device="cuda")
    colors = partial(apply_colors, pixels.cuda(), params, V2, reference.MEAN, reference.STD)
    contenders: dict[str, Callable[[], object]] = {
        "colors": colors,
        "step": partial(step, *random_batch(N, P, "cuda")),
    }
    seconds = interleaved(contenders, setting.rounds, "cuda")
    return [Result("gpu_colors", seconds["colors"], sum(seconds.values()), f"{P} px, N={N}")]
