"""One training step with a mechanism, as the loop of moco.pretrain does it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moco.common.distributed import rank, world_size
from moco.modeling.mechanisms.base import KeyBatch, Mechanism, StepOutput


def train_step(
    model: Mechanism,
    optimizer: torch.optim.Optimizer,
    x_q: Tensor,
    x_k: Tensor,
    plan: Tensor | None = None,
    images: Sequence[int] | None = None,
    step: int = 0,
    parallel: torch.nn.Module | None = None,
) -> StepOutput:
    """Loss, gradients, and both updates.

    Args:
        x_q, x_k: (N, 3, H, W) of all processes, in the order of the queries; each takes its part.
            Mechanisms without key views are given an empty `x_k`.
        images: (N,) numbers of the images; 0 to N - 1 if not given.
        parallel: `data_parallel(model)`, with several processes.
    """
    N, n = len(x_q), len(x_q) // world_size()
    mine = slice(rank() * n, (rank() + 1) * n)
    numbers = torch.tensor(images if images is not None else range(N))
    order = torch.arange(N) if plan is None else plan
    if model.needs_key_view:
        x_k = x_k[order[mine]]
    dictionary = model.dictionary(KeyBatch(x_k, plan, numbers, step))
    out: StepOutput = (parallel or model)(x_q[mine], dictionary)
    optimizer.zero_grad()
    out.loss.backward()
    optimizer.step()
    model.update([dictionary], [out.queries], numbers)
    return out
