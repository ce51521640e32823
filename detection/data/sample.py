"""Samples, which mappers make and engines take; polygons, bitmaps and boxes of their objects.

The functions equal detectron2/structures/{masks,boxes}.py.

Shapes: R objects, H W pixels, boxes (x1, y1, x2, y2).
"""

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import pycocotools.mask as mask_util
import torch
from numpy.typing import NDArray
from torch import Tensor


class Sample(TypedDict, total=False):
    """Image and, in training, its targets; R objects.

    Other fields of a user's records are passed to the model as well.

    Attributes:
        image: (3, H, W) uint8, channels in the order of INPUT.FORMAT.
        file_name: Path of the image file.
        image_id: Id in the dataset, if it has one.
        height: Height of the original image in px, to which predictions are scaled; by default that
            of `image`.
        width: Width of the original image, likewise.
        boxes: (R, 4) as (x1, y1, x2, y2), px of `image`.
        classes: (R,) int64, in 0..K-1.
        masks: (R, H, W) bool, or polygons of every object (`detection.data.sample.Polygons`).
        keypoints: (R, number, 3): x, y and visibility.
        sem_seg: (H, W) int64, the class of every pixel.
    """

    image: Tensor
    file_name: str
    image_id: int | str
    height: int
    width: int
    boxes: Tensor
    classes: Tensor
    masks: Any
    keypoints: Tensor
    sem_seg: Tensor


Polygons = Sequence[NDArray[np.float64]]  # of one object; each is x0, y0, x1, y1, ...


def draw_polygons(polygons: Polygons, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Rasterize the polygons of one object by COCO's rule: (H, W) bool."""
    if not len(polygons):
        return np.zeros(size, dtype=bool)
    runs = mask_util.frPyObjects(list(polygons), *size)
    return mask_util.decode(mask_util.merge(runs)).astype(bool)


def boxes_of_polygons(objects: Sequence[Polygons]) -> Tensor:
    """Return the boxes (R, 4) around the polygons of R objects; (inf, inf, 0, 0) without any."""
    boxes = torch.tensor([[torch.inf, torch.inf, 0, 0]]).repeat(len(objects), 1)
    for box, polygons in zip(boxes, objects, strict=True):
        for polygon in polygons:
            points = torch.from_numpy(polygon).view(-1, 2).float()
            box[:2] = torch.minimum(box[:2], points.amin(dim=0))
            box[2:] = torch.maximum(box[2:], points.amax(dim=0))
    return boxes


def boxes_of_bitmaps(bitmaps: Tensor) -> Tensor:
    """Return the boxes (R, 4) of bitmaps (R, H, W), (0, 0, 0, 0) of empty ones."""
    boxes = torch.zeros(len(bitmaps), 4)
    for box, bitmap in zip(boxes, bitmaps, strict=True):
        rows, columns = bitmap.nonzero(as_tuple=True)
        if len(rows):
            box[:] = torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    return boxes


def nonempty(boxes: Tensor, min_side_px: float = 0.0) -> Tensor:
    """Return which boxes (R, 4) have both sides longer than `min_side_px`: (R,) bool."""
    return (boxes[:, 2:] - boxes[:, :2] > min_side_px).all(dim=1)
