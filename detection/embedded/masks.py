"""Masks and keypoints of regions: training targets, and detections in pixels of the image.

Equal to detectron2/structures/{masks,keypoints}.py and layers/mask_ops.py. Keypoint heatmaps are
torchvision's. Its masks are not used: they are soft, not aligned, and pasted at whole pixels.

Shapes: R regions (x1, y1, x2, y2), M or S cells per side of a mask or heatmap, H W pixels.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from detection.data.objects import Polygons, draw_polygons


def crop_polygons(objects: Sequence[Polygons], boxes: Tensor, size: int) -> Tensor:
    """Rasterize R objects within their boxes (R, 4), `size` cells per side: (R, M, M) bool."""
    masks = torch.zeros(len(boxes), size, size, dtype=torch.bool)
    for mask, polygons, box in zip(masks, objects, boxes.cpu().numpy(), strict=True):
        sides = np.maximum(box[2:] - box[:2], 0.1)
        # As in Detectron2, corner and scale are in fp32 and the polygon in fp64.
        moved = [(p.reshape(-1, 2) - box[:2]) * (size / sides) for p in polygons]
        mask.copy_(torch.from_numpy(draw_polygons([p.ravel() for p in moved], (size, size))))
    return masks.to(boxes.device)


def crop_bitmaps(objects: Sequence[Tensor], boxes: Tensor, size: int) -> Tensor:
    """Crop the bitmaps (H, W) of R objects to their boxes (R, 4): (R, M, M) bool."""
    from torchvision.ops import roi_align

    crops = [
        roi_align(bitmap[None, None].float(), [box[None]], size, aligned=True)[0]
        for bitmap, box in zip(objects, boxes, strict=True)
    ]
    return torch.cat(crops) >= 0.5


def paste(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Paste masks (R, M, M) in 0..1 into their boxes (R, 4): (R, H, W) bool in an image of `size`.

    Each mask is computed by itself, near its box only.
    """
    pasted = torch.zeros(len(masks), *size, dtype=torch.bool, device=masks.device)
    for target, mask, box in zip(pasted, masks, boxes, strict=True):
        x0, y0 = (int(low) for low in (box[:2].floor() - 1).clamp(min=0))
        x1, y1 = (
            int(min(high, limit))
            for high, limit in zip(box[2:].ceil() + 1, size[::-1], strict=True)
        )
        x, y = (
            # Pixel centers, in -1..1 across the box.
            (torch.arange(start, stop, device=box.device) + 0.5 - low) / (high - low) * 2 - 1
            for start, stop, low, high in ((x0, x1, box[0], box[2]), (y0, y1, box[1], box[3]))
        )
        grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
        near = F.grid_sample(mask[None, None], grid[None].to(mask.dtype), align_corners=False)
        target[y0:y1, x0:x1] = near[0, 0] >= 0.5
    return pasted


def visible_in(keypoints: Tensor, boxes: Tensor) -> Tensor:
    """Return which regions (R, 4) contain a labeled keypoint of their object (R, number, 3)."""
    x, y, visibility = keypoints.unbind(dim=2)
    left, top, right, bottom = boxes[:, :, None].unbind(dim=1)
    inside = (x >= left) & (x <= right) & (y >= top) & (y <= bottom)
    return (inside & (visibility >= 1)).any(dim=1)


def locate_keypoints(heatmaps: Tensor, boxes: Tensor) -> Tensor:
    """Locate keypoints by logits (R, number, S, S) in boxes (R, 4): (R, number, 3) of x, y, score.

    The score is the peak's share in a softmax over the map, with the peak of the interpolated map.
    """
    from torchvision.models.detection.roi_heads import heatmaps_to_keypoints

    points, peaks = heatmaps_to_keypoints(heatmaps, boxes)
    shares = 1 / (heatmaps - peaks[:, :, None, None]).exp().sum(dim=(2, 3))
    return torch.cat([points[:, :, :2], shares[:, :, None]], dim=2)
