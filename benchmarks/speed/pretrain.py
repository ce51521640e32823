"""Measurements of pre-training, on one thread of a CPU or on a GPU."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.speed import reference, step
from benchmarks.speed.measure import Setting, interleaved
from benchmarks.speed.results import Result, Run, compare
from benchmarks.speed.shuffle import received_bytes
from moco.modeling.grouped_bn import GroupedBatchNorm2d
from moco.modeling.loss import info_nce


def loss(setting: Setting) -> list[Result]:
    """Loss, accuracy and the queries' gradient."""
    N, _, K, *_ = step.sizes(setting)
    (q, k), queue = step.queries_and_keys(N), step.unit_columns(K)

    def official(q: Tensor, k: Tensor, queue: Tensor) -> Tensor:
        value, _, _ = reference.loss_and_accuracy(q, k, queue, step.T)
        return torch.autograd.grad(value, q)[0]

    def ours(bf16: bool) -> Tensor:
        value, _ = info_nce(q, k, queue, step.T, bf16=bf16)
        return torch.autograd.grad(value, q)[0]

    contenders: dict[str, Callable[[], Tensor]] = {
        "reference": partial(official, q, k, queue),
        "fp32": partial(ours, bf16=False),
        "bf16": partial(ours, bf16=True),
    }
    with suppress(ImportError):
        from lightly.loss import NTXentLoss

        peer = NTXentLoss(step.T, memory_bank_size=(K, step.DIM))
        contenders["lightly"] = lambda: torch.autograd.grad(peer(q, k), q)[0]
    seconds = interleaved(contenders, setting.rounds)
    exact = official(q.detach().double().requires_grad_(), k.double(), queue.double())
    error = {
        name: ((run() - exact).abs().max() / exact.abs().max()).item()
        for name, run in contenders.items()
    }
    sizes = f"N={N}, C={step.DIM}, K={K}"
    rows = []
    for name in ("fp32", "bf16"):
        rows += [
            compare(f"loss {name}", seconds, name, sizes=f"{sizes}, {name}"),
            compare(f"loss {name} error", error, name, sizes=name),
        ]
    return [*rows, compare("lightly loss", seconds, "fp32", "lightly", sizes)]


def grouped_bn(setting: Setting, goal: str, device: str) -> list[Result]:
    """Groups of BN: forward and backward, in both memory layouts."""

    def run(layer: nn.Module, x: Tensor, upstream: Tensor) -> None:
        layer(x).backward(upstream)

    rows = []
    shape = (8, 16, 8, 8) if setting.quick else (64, 256, 56, 56)
    layouts = {"(C, H, W)": torch.contiguous_format, "(H, W, C)": torch.channels_last}
    for name, layout in layouts.items():
        x = torch.randn(shape, device=device).contiguous(memory_format=layout).requires_grad_()
        norms = {"ours": GroupedBatchNorm2d(shape[1], 8), "plain": nn.BatchNorm2d(shape[1])}
        contenders = {
            key: partial(run, bn.to(device), x, torch.randn_like(x)) for key, bn in norms.items()
        }
        seconds = interleaved(contenders, setting.rounds, device)
        sizes = f"{shape} in memory as {name}"
        rows.append(compare(goal, seconds, reference="plain", sizes=sizes))
    return rows


def shuffle(setting: Setting) -> list[Result]:
    """What reaches a process for the keys of one step, in the mean over two processes."""
    n, size = 2 if setting.quick else 32, step.sizes(setting)
    found = received_bytes(2, n, size.P, step.DIM, size.K, setting.scratch)
    mib = {way: number / 2**20 for way, number in found.bytes.items()}
    sizes = f"2 processes of {n} images"
    return [
        compare(goal, mib, way, "official", sizes, differs=not found.equal[way])
        for goal, way in (("shuffle", "index"), ("shuffle all_to_all", "all_to_all"))
    ]


GOALS: dict[str, Run | None] = {
    "loss": loss,
    "step_bf16": step.bf16_step,
    "step_fp32": step.fp32_step,
    "momentum": partial(step.momentum, goal="momentum", device="cpu"),
    "shuffle": shuffle,
    "overhead": step.overhead,
    "grouped_bn": partial(grouped_bn, goal="grouped_bn", device="cpu"),
    "gpu_step": step.gpu_step,
    "cuda_graphs": None,
    "gpu_momentum": partial(step.momentum, goal="gpu_momentum", device="cuda"),
    "gpu_grouped_bn": partial(grouped_bn, goal="gpu_grouped_bn", device="cuda"),
    "gpu_colors": step.gpu_colors,
    "gpu_loader": None,
}
