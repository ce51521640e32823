"""Polygons, bitmaps and boxes of an image's objects.

Equal to detectron2/structures/{masks,boxes}.py. R objects; H W pixels; boxes (x1, y1, x2, y2).
"""

from collections.abc import Sequence

import numpy as np
import pycocotools.mask as mask_util
import torch
from numpy.typing import NDArray
from torch import Tensor

Polygons = Sequence[NDArray[np.float64]]  # of one object: x0, y0, x1, y1, ... each


def draw_polygons(polygons: Polygons, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Polygons of one object -> (H, W) bool, by COCO's rule."""
    if not len(polygons):
        return np.zeros(size, dtype=bool)
    runs = mask_util.frPyObjects(list(polygons), *size)
    return mask_util.decode(mask_util.merge(runs)).astype(bool)


def boxes_of_polygons(objects: Sequence[Polygons]) -> Tensor:
    """(R, 4) around the polygons of R objects; (inf, inf, 0, 0) around none."""
    boxes = torch.tensor([[torch.inf, torch.inf, 0, 0]]).repeat(len(objects), 1)
    for box, polygons in zip(boxes, objects, strict=True):
        for polygon in polygons:
            points = torch.from_numpy(polygon).view(-1, 2).float()
            box[:2] = torch.minimum(box[:2], points.amin(dim=0))
            box[2:] = torch.maximum(box[2:], points.amax(dim=0))
    return boxes


def boxes_of_bitmaps(bitmaps: Tensor) -> Tensor:
    """(R, H, W) bool → (R, 4) from the first to behind the last pixel; 0 around none."""
    boxes = torch.zeros(len(bitmaps), 4)
    for box, bitmap in zip(boxes, bitmaps, strict=True):
        rows, columns = bitmap.nonzero(as_tuple=True)
        if len(rows):
            box[:] = torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    return boxes


def nonempty(boxes: Tensor, min_side_px: float = 0.0) -> Tensor:
    """(R, 4) -> (R,) bool: both sides longer than `min_side_px`."""
    return (boxes[:, 2:] - boxes[:, :2] > min_side_px).all(dim=1)
