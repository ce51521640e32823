"""Convolution with a faster weight gradient on CPUs, for many weights and small feature maps.

N batch size, C channels, H W size of a map in pixels, k side of the kernel.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Number of weights per output pixel above which a matrix product is faster than oneDNN's
# convolution, measured with AVX2. Below it, copying the windows takes longer than is saved.
MIN_WEIGHTS_PER_PIXEL = 100


class Conv2d(nn.Conv2d):
    """`nn.Conv2d` with a faster weight gradient on CPUs in float32 and channels_last.

    In late stages, with many weights and few pixels, oneDNN takes several times as long for this
    gradient as for the forward pass. Results agree with `nn.Conv2d` up to rounding.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve (N, C, H, W), with the faster gradient if the conditions are met."""
        if not self._uses_matmul(input):
            return super().forward(input)
        return _Convolution.apply(input, self.weight, self.stride[0], self.padding[0])

    def _uses_matmul(self, x: Tensor) -> bool:
        assert isinstance(self.padding, tuple)
        k, stride, border = self.kernel_size[0], self.stride[0], 2 * self.padding[0]
        pixels = len(x)
        for side in x.shape[2:]:
            pixels *= (side + border - k) // stride + 1
        return (
            self.weight.numel() >= MIN_WEIGHTS_PER_PIXEL * pixels
            and self.weight.requires_grad
            and torch.is_grad_enabled()
            and x.device.type == "cpu"
            and x.dtype == torch.float32
            and x.is_contiguous(memory_format=torch.channels_last)
            and self.groups == 1
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
        )


class _Convolution(torch.autograd.Function):
    """Convolution with a square kernel and one group, without bias and dilation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(x, weight, stride=stride, padding=padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding = ctx.stride, ctx.padding
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient, _, _ = torch.ops.aten.convolution_backward(
                gradient,
                x,
                weight,
                None,  # no bias
                [stride, stride],
                [padding, padding],
                [1, 1],  # dilation
                False,  # not transposed
                [0, 0],  # output padding
                1,  # groups
                (True, False, False),
            )
        C, _, k, _ = weight.shape
        pixels = x.permute(0, 2, 3, 1)
        if padding:
            pixels = F.pad(pixels, (0, 0, padding, padding, padding, padding))
        windows = pixels.unfold(1, k, stride).unfold(2, k, stride)  # (N, H, W, C, k, k)
        windows = windows.permute(0, 1, 2, 4, 5, 3).flatten(0, 2).flatten(1)
        rows = gradient.permute(0, 2, 3, 1).flatten(0, 2)
        weight_gradient = (rows.T @ windows).view(C, k, k, -1).permute(0, 3, 1, 2)
        return x_gradient, weight_gradient, None, None
