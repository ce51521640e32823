"""Shuffling BN on one device (sec. 3.3): batch normalisation in groups, keys in another order.

The paper normalises 256 pictures on 8 GPUs, so in 8 groups of 32, and shuffles the keys between
GPUs so that a query and its key never share their batch statistics. On one device the groups are
a matter of indexing: the first N/G pictures are the first group, and so on.

N batch, C channels, H W pixels, G groups.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GroupedBatchNorm2d(nn.BatchNorm2d):
    """``BatchNorm2d`` whose batch statistics are taken over ``num_groups`` parts of the batch.

    Parameters and buffers have ``BatchNorm2d``'s names and shapes. In evaluation mode, and with
    one group, it is ``BatchNorm2d``.

    Running statistics: the mean over the groups of what each group alone would have left.
    Deviation: with the official code they are those of the first GPU; the mean has the same
    expectation and less noise.
    """

    def __init__(self, num_features: int, num_groups: int) -> None:
        super().__init__(num_features)
        self.num_groups = num_groups

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.num_groups == 1:
            return super().forward(input)
        G = self.num_groups
        assert input.shape[0] % G == 0, f"{input.shape[0]} pictures in {G} groups"
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        means = self.running_mean.expand(G, -1).clone()  # (G, C)
        variances = self.running_var.expand(G, -1).clone()
        # A loop over views. One call on a view (N/G, G * C, H, W) is as fast on a CPU where memory
        # holds pictures as (C, H, W), and 20% slower where as (H, W, C): it has to copy.
        groups = [
            F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum, self.eps)
            for x, mean, var in zip(input.chunk(G), means, variances, strict=True)
        ]
        with torch.no_grad():
            self.running_mean.copy_(means.mean(dim=0))
            self.running_var.copy_(variances.mean(dim=0))
            self.num_batches_tracked.add_(1)
        return torch.cat(groups)


def shuffle_plan(num_samples: int, num_groups: int, seed: int, step: int) -> Tensor:
    """The order in which the keys of one step are encoded: a permutation (N,) of 0..N-1.

    A pure function of its arguments. Position p of the shuffled batch holds sample ``plan[p]`` and
    is normalised in group ``p // (N/G)``; no group of keys consists of the same samples as a group
    of queries (where G and N allow it).
    """
    rng = np.random.default_rng([seed, step, _STREAM])
    queries = _groups(np.arange(num_samples), num_groups)
    while True:
        plan = rng.permutation(num_samples)
        if not 1 < num_groups < num_samples or queries.isdisjoint(_groups(plan, num_groups)):
            return torch.from_numpy(plan)


def unshuffle(x: Tensor, plan: Tensor) -> Tensor:
    """Undo ``x[plan]`` along the first dimension: ``unshuffle(x[plan], plan)`` equals ``x``."""
    restored = torch.empty_like(x)
    restored[plan] = x
    return restored


_STREAM = 1  # keeps these random numbers apart from those of the data's order


def _groups(order: np.ndarray, num_groups: int) -> set[frozenset[int]]:
    """The samples that are normalised together when the batch comes in this order."""
    return {frozenset(group.tolist()) for group in np.split(order, num_groups)}
