"""Batch norm over several processes as Detectron2 naively does it, on CPUs too."""

import torch
from fvcore.nn.distributed import differentiable_all_reduce
from torch import Tensor, nn

from moco.common import distributed


class NaiveSyncBatchNorm(nn.BatchNorm2d):
    """Batch norm with the mean of the processes' statistics: (N, C, H, W) -> same.

    Every process counts alike, however many pixels it has. Equal to NaiveSyncBatchNorm in
    detectron2/layers/batch_norm.py, whose counter of batches does not count either. Statistics are
    in single precision, whatever x is in: their difference, the variance, needs the digits.
    """

    weight: nn.Parameter
    running_mean: Tensor
    running_var: Tensor
    momentum: float

    def forward(self, x: Tensor) -> Tensor:
        if distributed.world_size() == 1 or not self.training:
            return super().forward(x)
        given, x = x.dtype, x.float()
        moments = torch.cat([x.mean(dim=(0, 2, 3)), (x * x).mean(dim=(0, 2, 3))])
        moments = differentiable_all_reduce(moments) * (1.0 / distributed.world_size())
        mean, mean_square = moments.split(x.shape[1])
        var = mean_square - mean * mean
        scale = self.weight * (var + self.eps).rsqrt()
        shift = self.bias - mean * scale
        with torch.no_grad():
            self.running_mean += self.momentum * (mean - self.running_mean)
            self.running_var += self.momentum * (var - self.running_var)
        return (x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)).to(given)
