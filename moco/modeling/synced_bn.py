"""Batch normalization synchronized over all processes, on any device.

`torch.nn.SyncBatchNorm` supports GPUs only. Names and shapes are those of torch's layers.

n images of one process, C channels, H W size of a map in pixels.
"""

from typing import Any

import torch
from torch import Tensor, nn

from moco.common.distributed import mean_over_ranks, world_size


class _Mean(torch.autograd.Function):
    """Mean over the processes, with the mean of their gradients in the backward pass.

    The gradient is averaged because each process has the loss of its own share of the batch.
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
        """Normalize (n, C), in evaluation mode and with one process as `BatchNorm1d`."""
        synced = self.training and world_size() > 1
        return _normalize(self, input) if synced else super().forward(input)


class SyncedBatchNorm2d(nn.BatchNorm2d):
    """`BatchNorm2d` with batch statistics over all processes."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (n, C, H, W), in evaluation mode and with one process as `BatchNorm2d`."""
        synced = self.training and world_size() > 1
        return _normalize(self, input) if synced else super().forward(input)


def _normalize(bn: nn.BatchNorm1d | nn.BatchNorm2d, input: Tensor) -> Tensor:
    """Normalize by the statistics of all processes, which have the same number of images each."""
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
