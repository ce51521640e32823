"""Batch normalization synchronized over all processes, on any device.

`torch.nn.SyncBatchNorm` supports GPUs only. Names and shapes are those of torch's layers.

n images per process, C channels, H W size of a map in pixels, W processes, B numbers in the running
statistics of all BN layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moco.common import distributed
from moco.common.distributed import mean_over_ranks, world_size


class _Mean(torch.autograd.Function):
    """Mean over the processes, with the mean of the gradients in the backward pass.

    The gradient is averaged because each process computes the loss of a share of the batch.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return mean_over_ranks(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return mean_over_ranks(gradient)


class SyncedBatchNorm1d(nn.BatchNorm1d):
    """`BatchNorm1d` with batch statistics over all processes."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (n, C); as `BatchNorm1d` in evaluation mode or with one process."""
        synced = self.training and world_size() > 1
        return _normalize(self, input) if synced else super().forward(input)


class SyncedBatchNorm2d(nn.BatchNorm2d):
    """`BatchNorm2d` with batch statistics over all processes."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (n, C, H, W); as `BatchNorm2d` in evaluation mode or with one process."""
        synced = self.training and world_size() > 1
        return _normalize(self, input) if synced else super().forward(input)


def _normalize(bn: nn.BatchNorm1d | nn.BatchNorm2d, input: Tensor) -> Tensor:
    """Normalize by the statistics of all processes, which have equal numbers of images."""
    assert bn.running_mean is not None and bn.running_var is not None
    assert bn.num_batches_tracked is not None and bn.momentum is not None
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    dims, shape = [0, *range(2, x.ndim)], (1, -1, *[1] * (x.ndim - 2))
    mean = _Mean.apply(x.mean(dim=dims))  # (C,)
    centered = x - mean.view(shape)
    variance = _Mean.apply(centered.square().mean(dim=dims))  # (C,)
    with torch.no_grad():
        values = world_size() * x.numel() // x.shape[1]
        unbiased = variance * (values / (values - 1))
        bn.running_mean.lerp_(mean.to(bn.running_mean.dtype), bn.momentum)
        bn.running_var.lerp_(unbiased.to(bn.running_var.dtype), bn.momentum)
        bn.num_batches_tracked.add_(1)
    output = centered * torch.rsqrt(variance + bn.eps).view(shape)
    if bn.affine:
        output = output * bn.weight.view(shape) + bn.bias.view(shape)
    return output.to(input.dtype)


@contextmanager
def mean_statistics(model: nn.Module) -> Iterator[Tensor]:
    """Set the running statistics of `model` to the mean over all processes inside the context.

    All processes enter together. The context yields the statistics of each process, (W, B), which
    are restored at the end.
    """
    own = [buffer.flatten() for buffer in _buffers(model)]
    rows = distributed.gather_rows(torch.cat(own or [torch.empty(0)])[None])
    # Equal rows, such as those of a frozen network, are kept, because a mean would round.
    set_statistics(model, rows[0] if bool((rows == rows[0]).all()) else rows.mean(dim=0))
    yield rows
    set_statistics(model, rows[distributed.rank()])


def set_statistics(model: nn.Module, flat: Tensor) -> None:
    """Copy running statistics (B,) into the model's buffers."""
    buffers = _buffers(model)
    parts = flat.split([buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view_as(buffer))


def _buffers(model: nn.Module) -> list[Tensor]:
    # A network that is both encoders (end-to-end) counts twice.
    return [
        buffer
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name.endswith(("running_mean", "running_var"))
    ]
