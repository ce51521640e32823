"""Shuffling BN (sec. 3.3): batch normalization in groups, keys in another order than queries.

The paper normalizes 256 images on 8 GPUs, so in 8 groups of 32, and shuffles the keys between
GPUs so that a query and its key never share their batch statistics. Here the groups are a matter of
indexing: the first N/G images are the first group, and so on; W processes have G/W groups each.
What is in this file is the plan, a pure function of (seed, step); moco/common/distributed.py
moves rows.

N batch, C channels, H W pixels, G groups.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


def shuffle_plan(
    num_samples: int, num_groups: int, seed: int, step: int, number: int = 0
) -> Tensor:
    """The order in which the keys of one step are encoded: a permutation (N,) of 0..N-1.

    A pure function of its arguments; `number` tells the passes of a step apart. Position p of
    the shuffled batch holds sample `plan[p]` and is normalized in group `p // (N/G)`; no group
    of keys consists of the same samples as a group of queries (where G and N allow it).
    """
    rng = np.random.default_rng([seed, step, _STREAM + number])
    queries = _groups(np.arange(num_samples), num_groups)
    while True:
        plan = rng.permutation(num_samples)
        if not 1 < num_groups < num_samples or queries.isdisjoint(_groups(plan, num_groups)):
            return torch.from_numpy(plan)


class Pass(NamedTuple):
    """Which views are queries and keys in one pass over the batch; no key: none is encoded."""

    query_view: int
    key_view: int | None


def items_of_step(
    positions: Sequence[tuple[int, int]],
    passes: Sequence[Pass],
    plans: Sequence[Tensor | None],
    rank: int,
    world_size: int,
) -> list[tuple[int, int, int]]:
    """What one process loads for a step: for each pass its n queries, then the n keys it encodes.

    Shuffle by index: the keys are those of the plan, so no image moves between processes; with
    more than one of them, an image is decoded where its query is and where its key is.

    Args:
        positions: (epoch, index) of the step's N images, those of the first process first.
        plans: one per pass; None leaves the keys where their queries are.

    Returns:
        (epoch, index, view)
    """
    n = len(positions) // world_size
    mine = slice(rank * n, (rank + 1) * n)
    items = []
    for one, plan in zip(passes, plans, strict=True):
        items += [(*position, one.query_view) for position in positions[mine]]
        if one.key_view is not None:
            order = range(len(positions)) if plan is None else plan.tolist()
            items += [(*positions[p], one.key_view) for p in order[mine]]
    return items


class Exchange(NamedTuple):
    """One process's part in `moco.common.distributed.exchange_rows`."""

    send: Tensor
    send_counts: list[int]
    place: Tensor
    counts: list[int]


def exchange_plan(plan: Tensor, rank: int, world_size: int) -> Exchange:
    """How rows (n, ...) on each of W processes come into the order of `plan` (N,): by all-to-all.

    Process r has rows r n to (r + 1) n - 1 and gets `plan[r n : (r + 1) n]`.
    """
    n = len(plan) // world_size
    wanted = plan.view(world_size, n)
    holder = wanted // n
    send = [wanted[process][holder[process] == rank] - rank * n for process in range(world_size)]
    place = [(holder[rank] == process).nonzero()[:, 0] for process in range(world_size)]
    return Exchange(
        torch.cat(send), [len(rows) for rows in send], torch.cat(place), [len(p) for p in place]
    )


def unshuffle(x: Tensor, plan: Tensor) -> Tensor:
    """Undo `x[plan]` along the first dimension: `unshuffle(x[plan], plan)` equals `x`."""
    restored = torch.empty_like(x)
    restored[plan] = x
    return restored


_STREAM = 1  # keeps these random numbers apart from those of the data's order


def _groups(order: np.ndarray, num_groups: int) -> set[frozenset[int]]:
    """The samples that are normalized together when the batch comes in this order."""
    return {frozenset(group.tolist()) for group in np.split(order, num_groups)}
