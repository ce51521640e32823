"""Precise batch norm on several processes: combines the statistics of all ranks.

fvcore's `update_bn_stats`, which both engines use, estimates them on each process by itself.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from fvcore.nn.precise_bn import get_bn_modules
from torch import nn

from moco.common import distributed


@contextmanager
def count_values(model: nn.Module) -> Iterator[dict[nn.Module, int]]:
    """Count the values per channel that pass through each BN layer in training mode."""
    counts: dict[nn.Module, int] = dict.fromkeys(get_bn_modules(model), 0)

    def count(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        counts[layer] += inputs[0].numel() // inputs[0].shape[1]

    handles = [layer.register_forward_pre_hook(count) for layer in counts]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def combine_statistics(counts: Mapping[nn.Module, int]) -> None:
    """Set the statistics of each layer to mean and variance over the values of all ranks.

    With n_r values of mean m_r and variance v_r on rank r: m = sum n_r m_r / n, and
    v = sum n_r (v_r + m_r^2) / n - m^2. In double precision, because v is a difference.

    Args:
        counts: n_r by layer, the same layers in the same order on every rank.
    """
    if distributed.world_size() == 1:
        return
    for layer, count in counts.items():
        running_mean, running_var = (
            layer.get_buffer("running_mean"),
            layer.get_buffer("running_var"),
        )
        mean, var = running_mean.double(), running_var.double()
        channels = mean.numel()
        sums = torch.cat([mean * count, (var + mean**2) * count, mean.new_tensor([count])])
        sums = distributed.sum_over_ranks(sums)
        total = sums[-1]
        if total == 0:
            continue  # A layer that no rank used keeps the statistics of the training.
        mean = sums[:channels] / total
        var = sums[channels:-1] / total - mean**2
        running_mean.copy_(mean)
        running_var.copy_(var)
