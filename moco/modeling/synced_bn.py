"""Batch normalization over the batch of all processes, on any device.

`torch.nn.SyncBatchNorm` is for GPUs alone. Names and shapes are those of torch's layers. N images
of all processes, n of this one, C channels, W processes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from moco.common.distributed import mean_over_ranks, world_size


class _Mean(torch.autograd.Function):
    """The mean over the processes, and of its gradients: each process's loss has its share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return mean_over_ranks(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return mean_over_ranks(gradient)


class SyncedBatchNorm1d(nn.BatchNorm1d):
    """`BatchNorm1d` of (n, C); with one process, and in evaluation mode, torch's own."""

    def forward(self, input: Tensor) -> Tensor:
        together = self.training and world_size() > 1
        return _normalize(self, input) if together else super().forward(input)


class SyncedBatchNorm2d(nn.BatchNorm2d):
    """`BatchNorm2d` of (n, C, H, W), the same."""

    def forward(self, input: Tensor) -> Tensor:
        together = self.training and world_size() > 1
        return _normalize(self, input) if together else super().forward(input)


def _normalize(bn: nn.BatchNorm1d | nn.BatchNorm2d, input: Tensor) -> Tensor:
    """By the mean and variance of all processes' values; each has equally many images."""
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
