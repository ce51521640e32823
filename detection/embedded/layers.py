"""Norms by the values of Detectron2's `*.NORM` keys, convolutions with them, freezing of stages."""

from typing import cast

import torch
import torch.nn.functional as F
from fvcore.nn.distributed import differentiable_all_reduce
from torch import Tensor, nn

from convert.modeling.resnet import ConvNorm, NormLayer
from moco.common import distributed


class FrozenBatchNorm(nn.Module):
    """Batch norm with fixed statistics and fixed affine parameters: (N, C, H, W) -> same.

    The two ways to compute it differ in the last bit; the choice between them is that of
    FrozenBatchNorm2d in detectron2/layers/batch_norm.py.
    """

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(num_features))
        self.register_buffer("bias", torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features) - eps)
        self.register_buffer("num_batches_tracked", None)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize with the fixed statistics."""
        weight, bias = cast(Tensor, self.weight), cast(Tensor, self.bias)
        mean, var = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        if not x.requires_grad:
            return F.batch_norm(x, mean, var, weight, bias, training=False, eps=self.eps)
        # This avoids the gradients of weight and bias, which F.batch_norm would compute.
        scale = weight * (var + self.eps).rsqrt()
        shift = bias - mean * scale
        # Under autocast the result would otherwise be in fp32.
        scale, shift = scale.to(x.dtype), shift.to(x.dtype)
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


class NaiveSyncBatchNorm(nn.BatchNorm2d):
    """Batch norm with statistics averaged over processes, also on CPUs: (N, C, H, W) -> same.

    All processes have the same weight, whatever their numbers of pixels. Equal to
    NaiveSyncBatchNorm in detectron2/layers/batch_norm.py, which does not update
    `num_batches_tracked` either. Statistics are in fp32 for any dtype of the input, because a
    variance is a small difference of large numbers.
    """

    weight: nn.Parameter
    running_mean: Tensor
    running_var: Tensor
    momentum: float

    def forward(self, x: Tensor) -> Tensor:
        """Normalize with the statistics of all processes, in evaluation with the running ones."""
        if distributed.world_size() == 1 or not self.training:
            return super().forward(x)
        dtype, x = x.dtype, x.float()
        moments = torch.cat([x.mean(dim=(0, 2, 3)), (x * x).mean(dim=(0, 2, 3))])
        moments = differentiable_all_reduce(moments) * (1.0 / distributed.world_size())
        mean, mean_square = moments.split(x.shape[1])
        var = mean_square - mean * mean
        scale = self.weight * (var + self.eps).rsqrt()
        shift = self.bias - mean * scale
        with torch.no_grad():
            self.running_mean += self.momentum * (mean - self.running_mean)
            self.running_var += self.momentum * (var - self.running_var)
        return (x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)).to(dtype)


class LayerNorm(nn.Module):
    """Layer norm over the channels of each cell: (N, C, H, W) -> same.

    Equal to LayerNorm in detectron2/layers/batch_norm.py; torch's rounds in another order.
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the channels."""
        # `x - mean` is computed twice: sharing it would add its gradients in another order.
        mean = x.mean(1, keepdim=True)
        var = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(var + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


NORMS: dict[str, NormLayer] = {
    "BN": nn.BatchNorm2d,
    "SyncBN": nn.SyncBatchNorm,
    "naiveSyncBN": NaiveSyncBatchNorm,
    "FrozenBN": FrozenBatchNorm,
    "GN": lambda channels: nn.GroupNorm(32, channels),
    "LN": LayerNorm,
}


def norm_layer(name: str) -> NormLayer | None:
    """Return the layer of a `*.NORM` key, or None for ""."""
    return NORMS[name] if name else None


def conv(
    in_channels: int, out_channels: int, kernel_size: int, norm: NormLayer | None = None
) -> nn.Conv2d:
    """Build a convolution that keeps the map's size, with a norm or, without one, a bias."""
    if norm is None:
        return nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2)
    return ConvNorm(in_channels, out_channels, kernel_size, norm)


def normal_fill(layer: nn.Conv2d | nn.Linear, std: float) -> None:
    """Fill the weights from a normal distribution and the biases with 0."""
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.get_parameter("bias"))


def freeze(module: nn.Module) -> None:
    """Freeze all parameters and batch norms of `module` (in place), as CNNBlockBase.freeze."""
    for parameter in module.parameters():
        parameter.requires_grad = False
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d | nn.SyncBatchNorm):
                frozen = FrozenBatchNorm(child.num_features, child.eps)
                frozen.num_batches_tracked = torch.tensor(0)
                frozen.load_state_dict(child.state_dict())
                setattr(parent, name, frozen)
