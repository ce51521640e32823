"""Speed of pre-training against the official code: loss, step, momentum update, grouped BN.

N batch, C dimension, K length of the queue, P crop size in pixels.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed import reference
from benchmarks.speed.measure import Row, Setting, compare, interleaved
from moco.modeling import encoder
from moco.modeling.encoder import EncoderSpec
from moco.modeling.grouped_bn import GroupedBatchNorm2d
from moco.modeling.loss import info_nce
from moco.modeling.mechanisms.base import KeyBatch, Passes
from moco.modeling.mechanisms.momentum_queue import MomentumQueue

DIM, M, T, LR = 128, 0.999, 0.07, 0.03


def sizes(setting: Setting) -> tuple[int, int, int, int]:
    """Return N, K and P of the paper's recipe, and N for steps on a CPU."""
    return (8, 64, 32, 4) if setting.quick else (256, 65536, 224, 16)


def build_encoder(setting: Setting, arch: str, device: str) -> tuple[EncoderSpec, nn.Module]:
    """Build an encoder with a linear head, with the same weights in every call."""
    torch.manual_seed(0)
    spec = EncoderSpec("resnet10", width=0.125) if setting.quick else EncoderSpec(arch)
    return spec, encoder.build_encoder(spec, DIM, mlp=False).to(device)


class OurStep:
    """Pre-training step of one process, with autocast to `dtype` or in float32."""

    def __init__(self, network: nn.Module, K: int, dtype: torch.dtype | None = None) -> None:
        device = next(network.parameters()).device
        self.model = MomentumQueue(network, DIM, K, M, T).to(device)
        self.model = self.model.to(memory_format=torch.channels_last).train()
        self.optimizer = torch.optim.SGD(network.parameters(), LR, momentum=0.9, weight_decay=1e-4)
        self._dtype, self._device = dtype, device

    def __call__(self, x_q: Tensor, x_k: Tensor, plan: Tensor) -> Tensor:
        """Do one step, as `benchmarks.speed.reference.Step` does."""
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


def build_step(
    setting: Setting, side: str, N: int, P: int, arch: str = "resnet50", device: str = "cpu"
) -> Callable[[], Tensor]:
    """Build a step on N random images.

    Sides are the official code, its `autocast`, and ours: `fp32`, `bf16`, and `compiled` in bf16.
    """
    spec, network = build_encoder(setting, arch, device)
    K, dtype = sizes(setting)[1], None if side in ("official code", "fp32") else torch.bfloat16
    x_q, x_k = (torch.randn(N, 3, P, P, device=device) for _ in range(2))
    plan = torch.randperm(N, device=device)
    if side in ("official code", "autocast"):
        queue = F.normalize(torch.randn(DIM, K, device=device), dim=0)
        return partial(reference.Step(network, queue, M, T, LR, dtype), x_q, x_k, plan)
    ours = OurStep(network, K, dtype)
    if side == "bf16" and device == "cpu":
        encoder.contiguous_last_stages(ours.model, spec, N, P)
    if side == "compiled":  # as SOLVER.COMPILE does
        for network_ in (ours.model.encoder_q, ours.model.encoder_k):
            network_.compile()
    return partial(ours, x_q, x_k, plan.cpu())  # where a training plans it


def loss(setting: Setting) -> list[Row]:
    """Measure the loss, the accuracy and the gradient of the queries, and check its error."""
    N, K = sizes(setting)[:2]
    queue, q = (F.normalize(torch.randn(n, DIM), dim=1) for n in (K, N))
    queue, k = queue.T.contiguous(), F.normalize(q + 0.1 * torch.randn(N, DIM), dim=1)
    q.requires_grad_()

    def official(q: Tensor, k: Tensor, queue: Tensor) -> Tensor:
        value, _, _ = reference.loss_and_accuracy(q, k, queue, T)
        return torch.autograd.grad(value, q)[0]

    def ours(*, bf16: bool) -> Tensor:
        return torch.autograd.grad(info_nce(q, k, queue, T, bf16=bf16)[0], q)[0]

    contenders = {"fp32": partial(ours, bf16=False), "bf16": partial(ours, bf16=True)}
    contenders["official code"] = partial(official, q, k, queue)
    sides = interleaved(contenders, setting.rounds)
    exact, rows = official(q.detach().double().requires_grad_(), k.double(), queue.double()), []
    apart = {name: (run() - exact).abs().max() for name, run in contenders.items()}
    error = {name: (each / exact.abs().max()).item() for name, each in apart.items()}
    for name, goal, limit in (("fp32", 2.5, 1e-6), ("bf16", 6.0, 1e-3)):
        what = f"InfoNCE and its gradient, {name}; N={N}, C={DIM}, K={K}"
        rows.append(compare(what, sides, name, goal=goal))
        what, against = f"largest error of that gradient, {name}", error["official code"]
        rows.append(Row(what, error[name], against, goal=limit, kind="error", unit=""))
    return rows


def step(setting: Setting) -> list[Row]:
    """Measure whole steps of two networks."""
    rows, (N, K, P, step_n) = [], sizes(setting)
    for arch, n, px, goals in (
        ("resnet50", step_n, P, {"bf16": 2.5, "fp32": 1.12}),
        ("resnet18", N // 4, min(P, 64), {"bf16": 1.5, "fp32": 1.12}),
    ):
        names = ("official code", *goals)
        steps = {name: build_step(setting, name, n, px, arch) for name in names}
        sides, of = interleaved(steps, setting.rounds), f"{arch}, {px} px, N={n}, K={K}"
        rows += [compare(f"step, {name}; {of}", sides, name, goal=goals[name]) for name in goals]
    return rows


def momentum(setting: Setting, device: str = "cpu", goal: float = 2.2) -> list[Row]:
    """Measure the momentum update."""
    model = OurStep(build_encoder(setting, "resnet50", device)[1], sizes(setting)[1]).model
    empty = Passes([], [], torch.arange(0), 0.0)
    contenders: dict[str, Callable[[], object]] = {
        "official code": lambda: reference.momentum_update(model.encoder_k, model.encoder_q, M),
        "ours": lambda: model.update(empty),
    }
    sides = interleaved(contenders, setting.rounds, device)
    return [compare("momentum update, ResNet-50", sides, goal=goal)]


def grouped_bn(setting: Setting, device: str = "cpu") -> list[Row]:
    """Measure grouped BN, forward and backward, in both memory layouts."""

    def run(layer: nn.Module, x: Tensor, upstream: Tensor) -> None:
        layer.to(device)(x).backward(upstream)

    rows, shape = [], (8, 16, 8, 8) if setting.quick else (64, 256, 56, 56)
    norms = {"ours": GroupedBatchNorm2d(shape[1], 8), "plain BN": nn.BatchNorm2d(shape[1])}
    for layout in (torch.contiguous_format, torch.channels_last):
        tensors = (torch.randn(shape, device=device) for _ in range(2))
        x, upstream = (tensor.contiguous(memory_format=layout) for tensor in tensors)
        x.requires_grad_()
        sides = {name: partial(run, bn, x, upstream) for name, bn in norms.items()}
        found = interleaved(sides, setting.rounds, device)
        what = f"BN in 8 groups, forward and backward; {shape}, {layout}"
        rows.append(compare(what, found, "ours", "plain BN", 1.05, "share"))
    return rows


# The loss is first: later, the official code's large tensors would reuse freed pages.
CASES = {"loss": loss, "step": step, "momentum": momentum, "grouped_bn": grouped_bn}
