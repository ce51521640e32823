"""Running statistics of batch normalization over the processes of a run.

W processes, B numbers in the running statistics of all BN layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moco.common import distributed


@contextmanager
def mean_statistics(model: nn.Module) -> Iterator[Tensor]:
    """Give `model` the mean of all processes' running statistics while the context is open.

    All processes enter together. Yields the statistics of each process, (W, B), with which training
    continues.
    """
    own = [buffer.flatten() for buffer in _buffers(model)]
    rows = distributed.gather_rows(torch.cat(own or [torch.empty(0)])[None])
    # Equal rows, such as those of a frozen network, are kept, because a mean would round.
    set_statistics(model, rows[0] if bool((rows == rows[0]).all()) else rows.mean(dim=0))
    yield rows
    set_statistics(model, rows[distributed.rank()])


def set_statistics(model: nn.Module, flat: Tensor) -> None:
    """Copy statistics (B,) into the model's buffers."""
    buffers = _buffers(model)
    parts = flat.split([buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view_as(buffer))


def _buffers(model: nn.Module) -> list[Tensor]:
    # Two encoders that are one network (end-to-end) count twice.
    return [
        buffer
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name.endswith(("running_mean", "running_var"))
    ]
