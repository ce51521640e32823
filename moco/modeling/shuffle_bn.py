"""Shuffling BN (sec. 3.3): keys and queries of an image are normalized in different groups.

The paper normalizes 256 images on 8 GPUs, in 8 groups of 32, and shuffles the keys between the
GPUs so that the batch statistics of a query and its key come from different subsets. Here the
groups are defined by index: the first N/G images form the first group, and so on; each of W
processes has G/W groups. This module computes the shuffle plan, a pure function of (seed, step);
moco/common/distributed.py moves the rows.

N batch size, C channels, H W size of a map in pixels, G groups, W processes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moco.common.async_copy import to_device_async


def shuffle_plan(
    num_samples: int, num_groups: int, seed: int, step: int, number: int = 0
) -> Tensor:
    """Return the order in which the keys of one pass are encoded: a permutation (N,) of 0..N-1.

    The plan is a pure function of the arguments; `number` is the number of the pass in the step.
    Position p of the shuffled batch holds sample `plan[p]` and is normalized in group
    `p // (N/G)`. If 1 < G < N, no group of keys consists of the same samples as a group of queries.
    """
    rng = np.random.default_rng([seed, step, _STREAM + number])
    queries = _groups(np.arange(num_samples), num_groups)
    while True:
        plan = rng.permutation(num_samples)
        if not 1 < num_groups < num_samples or queries.isdisjoint(_groups(plan, num_groups)):
            return torch.from_numpy(plan)


class Pass(NamedTuple):
    """Views that are queries and keys in one pass over the batch; keys are optional."""

    query_view: int
    key_view: int | None


def items_of_step(
    positions: Sequence[tuple[int, int]],
    passes: Sequence[Pass],
    plans: Sequence[Tensor | None],
    rank: int,
    world_size: int,
) -> list[tuple[int, int, int]]:
    """Return the items that one process loads: n queries, then n keys of each pass.

    Keys are shuffled by index: a process loads the keys that it encodes, so no image moves between
    processes, but an image whose query and key are on different processes is decoded twice.

    Args:
        positions: (epoch, index) of the step's N images, those of the first process first.
        passes: Passes over the batch.
        plans: Shuffle plan of each pass; None keeps the keys on the processes of their queries.
        rank: Rank of the process.
        world_size: Number of processes.

    Returns:
        Items (epoch, index, view).
    """
    n = len(positions) // world_size
    mine = slice(rank * n, (rank + 1) * n)
    items = []
    for views, plan in zip(passes, plans, strict=True):
        items += [(*position, views.query_view) for position in positions[mine]]
        if views.key_view is not None:
            order = range(len(positions)) if plan is None else plan.tolist()
            items += [(*positions[p], views.key_view) for p in order[mine]]
    return items


def exchange_plan(
    plan: Tensor, rank: int, world_size: int
) -> tuple[Tensor, list[int], Tensor, list[int]]:
    """Plan the all-to-all that brings rows (n, ...) on each of W processes into order `plan` (N,).

    Process r starts with rows r n to (r + 1) n - 1 and ends with rows `plan[r n : (r + 1) n]`.

    Returns:
        Arguments of `moco.common.distributed.exchange_rows` on one process, after the rows.
    """
    n = len(plan) // world_size
    wanted = plan.view(world_size, n)
    holder = wanted // n
    sent = [wanted[process][holder[process] == rank] - rank * n for process in range(world_size)]
    place = [(holder[rank] == process).nonzero()[:, 0] for process in range(world_size)]
    return torch.cat(sent), [len(rows) for rows in sent], torch.cat(place), [len(p) for p in place]


def unshuffle(x: Tensor, plan: Tensor) -> Tensor:
    """Undo `x[plan]` along the first dimension: `unshuffle(x[plan], plan)` equals `x`."""
    restored = torch.empty_like(x)
    restored[to_device_async(plan, x.device)] = x
    return restored


_STREAM = 1  # separates these random numbers from the order of the data


def _groups(order: np.ndarray, num_groups: int) -> set[frozenset[int]]:
    """Return the sets of samples that are normalized together in a batch of this order."""
    return {frozenset(group.tolist()) for group in np.split(order, num_groups)}
