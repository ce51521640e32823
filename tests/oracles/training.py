"""One training step with a mechanism, as the loop of pre-training does it; what a run left."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moco.common.distributed import rank, world_size
from moco.common.files import sha256_state
from moco.engine.checkpoint import FORMAT, list_checkpoints, load_checkpoint
from moco.modeling.mechanisms.base import KeyBatch, Mechanism, Passes, StepOutput


def train_step(
    model: Mechanism,
    optimizer: torch.optim.Optimizer,
    x_q: Tensor,
    x_k: Tensor,
    plan: Tensor | None = None,
    images: Sequence[int] | None = None,
    step: int = 0,
    parallel: torch.nn.Module | None = None,
    progress: float = 0.0,
) -> StepOutput:
    """Compute the loss and the gradients, and make both updates.

    `x_q` and `x_k` (N, 3, H, W) are of all processes, in the order of the queries, and each takes
    its part; mechanisms without key views take an empty `x_k`. `images` (N,) are their numbers, 0
    to N - 1 by default, `parallel` is `data_parallel(model)`, and `progress` the share of the run
    that is done with this step.
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
    model.update(Passes([dictionary], [out.queries], numbers, progress))
    return out


def newest(folder: Path, form: str = FORMAT) -> dict[str, Any]:
    """Load a run's last checkpoint."""
    return load_checkpoint(list_checkpoints(folder)[-1], form)


def weights(folder: Path, form: str = FORMAT) -> str:
    """Return a hash of the model's state in the last checkpoint."""
    return sha256_state(newest(folder, form)["state_dict"])


def metrics(folder: Path) -> list[dict[str, float]]:
    """Return the lines of metrics.json."""
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
