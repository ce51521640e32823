"""PreciseBN that ends with the same statistics on every rank.

Deviation: Detectron2's hook re-estimates the statistics of each rank from that rank's own pictures,
weighted by their number of pixels, and never compares them (facebookresearch/detectron2#5398): the
ranks go on to evaluate with different networks. Here the ranks' estimates are combined into those
of all pictures together.

Deviation: the pictures are the first of the training's order each time, and what their augmentation
draws does not advance the training's streams, as on the embedded engine. Detectron2 goes on with
the pictures after those of the time before, which a resumed run would not know.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from detectron2.engine import HookBase
from detectron2.engine.hooks import PreciseBN
from detectron2.utils import comm
from fvcore.nn.precise_bn import get_bn_modules
from torch import nn

from detection.d2.random_state import private_random


class RankEqualPreciseBN(HookBase):
    """Detectron2's hook, followed by the combination over ranks.

    Args:
        inner: Detectron2's hook, which runs the model over its data.
        model: the model that ``inner`` updates.
        period_iters: run after so many iterations; 0: at the end only.
    """

    def __init__(self, inner: PreciseBN, model: nn.Module, period_iters: int) -> None:
        self.inner, self.model, self.period_iters = inner, model, period_iters

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        due = self.period_iters > 0 and done % self.period_iters == 0
        if due or done == self.trainer.max_iter:
            self.inner._data_iter = None
            with count_values(self.model) as counts, private_random():
                self.inner.update_stats()
            combine_statistics(counts)


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
    if comm.get_world_size() == 1:
        return
    for layer, count in counts.items():
        running_mean, running_var = (
            layer.get_buffer("running_mean"),
            layer.get_buffer("running_var"),
        )
        mean, var = running_mean.double(), running_var.double()
        channels = mean.numel()
        sums = torch.cat([mean * count, (var + mean**2) * count, mean.new_tensor([count])])
        torch.distributed.all_reduce(sums)
        total = sums[-1]
        if total == 0:
            continue  # a layer that no rank used keeps what training left
        mean = sums[:channels] / total
        var = sums[channels:-1] / total - mean**2
        running_mean.copy_(mean)
        running_var.copy_(var)
