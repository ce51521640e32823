"""Batch norm statistics that several processes have estimated, each from its own images, as one.

For both engines' PreciseBN, which fvcore's `update_bn_stats` does on each process by itself.
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
    """BN layers in training mode → number of values per channel that pass through each of them."""
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
    """Mean and variance over the ranks' values together, written into every rank's layers.

    With n_r values of mean m_r and variance v_r on rank r: m = sum n_r m_r / n, and
    v = sum n_r (v_r + m_r^2) / n - m^2. In double precision, because v is a difference.

    Args:
        counts: layer → n_r, the same layers in the same order on every rank.
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
            continue  # a layer that no rank used keeps what training left
        mean = sums[:channels] / total
        var = sums[channels:-1] / total - mean**2
        running_mean.copy_(mean)
        running_var.copy_(var)
