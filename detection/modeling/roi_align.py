"""RoIAlign with a gradient by two matrix products, for bf16 on a CPU.

Torchvision's gradient on a CPU processes the channels one by one and takes a quarter of a C4 step
in bf16. RoIAlign is linear and separable: a cell is a weighted mean of rows and of columns.

Shapes: R regions, C channels, P pooled cells per side, H W pixels of the feature map.
"""

from typing import Any

import torch
from torch import Tensor

PIXELS_PER_CELL = 1500  # of the map; above it, products, which visit all pixels, are slower
CHUNK_REGIONS = 32  # regions at a time in the gradient, which allocates (32, C, P, W) for them


def roi_align(
    features: Tensor, rois: Tensor, size: int, spatial_scale: float, sampling_ratio: int
) -> Tensor:
    """Pool (N, C, H, W) in regions (R, 5), image index and box, with half-pixel alignment.

    Both pooling and gradient are torchvision's, except the gradient for small maps in bf16 on a
    CPU. `rois` are in fp32 also there: in bf16, a coordinate of 300 px is off by up to one pixel.

    Returns:
        (R, C, P, P); P is `size`.
    """
    small = features.shape[-2] * features.shape[-1] <= PIXELS_PER_CELL * size
    if features.dtype == torch.bfloat16 and features.device.type == "cpu" and small and len(rois):
        pooled: Tensor = _RoIAlign.apply(features, rois, size, spatial_scale, sampling_ratio)
        return pooled
    from torchvision import ops

    return ops.roi_align(features, rois, size, spatial_scale, sampling_ratio, aligned=True)


class _RoIAlign(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features: Tensor, rois: Tensor, size: int, scale: float, sampling_ratio: int
    ) -> Tensor:
        ctx.save_for_backward(rois)
        ctx.shape, ctx.scale, ctx.sampling_ratio = features.shape, scale, sampling_ratio
        from torchvision import ops

        pooled = ops.roi_align(features.float(), rois, size, scale, sampling_ratio, aligned=True)
        return pooled.to(features.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rois,) = ctx.saved_tensors
        number, channels, height, width = ctx.shape
        size, boxes = grad.shape[-1], rois[:, 1:] * ctx.scale - 0.5
        rows = axis_weights(boxes[:, 1], boxes[:, 3], size, height, ctx.sampling_ratio)
        columns = axis_weights(boxes[:, 0], boxes[:, 2], size, width, ctx.sampling_ratio)
        rows, columns = rows.to(grad.dtype), columns.to(grad.dtype)
        total = torch.zeros(number, height, channels, width)
        for image in range(number):
            (own,) = (rois[:, 0] == image).nonzero(as_tuple=True)
            for index in own.split(CHUNK_REGIONS):
                spread = grad[index].transpose(1, 2).flatten(1, 2) @ columns[index]
                spread = spread.view(len(index) * size, channels * width)
                total[image] += (rows[index].flatten(0, 1).t() @ spread).view_as(total[image])
        return total.transpose(1, 2).to(grad.dtype), None, None, None, None


def axis_weights(low: Tensor, high: Tensor, size: int, length: int, sampling_ratio: int) -> Tensor:
    """Compute the weights of pixels in the cells of regions along one axis: (R, P, `length`).

    Args:
        low: (R,) starts of the regions; the center of pixel 0 is 0.
        high: (R,) ends of the regions.
        size: P, cells per region.
        length: Pixels of the axis.
        sampling_ratio: Points per cell; 0 takes one per pixel.
    """
    cell = ((high - low) / size)[:, None, None]
    number = torch.full_like(cell, sampling_ratio) if sampling_ratio else cell.ceil()
    point, points = torch.arange(int(number.max())), number.clamp(min=1)
    first = low[:, None, None] + torch.arange(size)[:, None] * cell
    at = first + (point + 0.5) * cell / points
    counts = (point < number) & (at >= -1) & (at <= length)
    distance = at.clamp(0, length - 1)[..., None] - torch.arange(length)
    tents = (1 - distance.abs()).clamp(min=0) * counts[..., None]
    return tents.sum(dim=2) / points
