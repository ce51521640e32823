"""Boxes as pure functions: coding, matching, sampling, rescaling; equal to Detectron2's.

Shapes: R boxes (x1, y1, x2, y2) in pixels, G objects, K foreground classes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import box_iou, clip_boxes_to_image

Weights = tuple[float, float, float, float]  # of dx, dy, dw, dh


def encode(boxes: Tensor, references: Tensor, weights: Weights) -> Tensor:
    """Deltas (R, 4) that lead from references (R, 4) to boxes (R, 4)."""
    return BoxCoder(weights).encode_single(boxes, references)


def decode(deltas: Tensor, references: Tensor, weights: Weights) -> Tensor:
    """Deltas (R, 4 K) from references (R, 4) -> boxes (R, 4 K); in fp32 also under autocast."""
    return BoxCoder(weights).decode_single(deltas.float(), references)


def match(
    objects: Tensor, boxes: Tensor, thresholds: tuple[float, float], *, each_object: bool
) -> tuple[Tensor, Tensor]:
    """The best object (R,) of every box, and its label (R,): 1 found, 0 background, -1 between.

    Args:
        objects: (G, 4). boxes: (R, 4).
        thresholds: IoU below the first is background, from the second on found.
        each_object: the boxes that overlap an object most are found as well, however little.
    """
    if not len(objects):
        nothing = torch.zeros(len(boxes), dtype=torch.int64, device=boxes.device)
        return nothing, nothing.clone()
    iou = box_iou(objects, boxes).nan_to_num_(0.0)  # (G, R); NaN where neither has an area
    best, index = iou.max(dim=0)
    labels = (best >= thresholds[1]).long() - (
        (best >= thresholds[0]) & (best < thresholds[1])
    ).long()
    if each_object:
        labels[(iou == iou.max(dim=1, keepdim=True).values).any(dim=0)] = 1
    return index, labels


def sample(labels: Tensor, size: int, positive_fraction: float) -> tuple[Tensor, Tensor]:
    """Indices of a random sample: those of label 1 up to the fraction, filled up with label 0.

    In the order in which they were drawn: it is the order of every sum over the regions.
    """
    positive, negative = (labels == 1).nonzero().squeeze(1), (labels == 0).nonzero().squeeze(1)
    num_positive = min(len(positive), int(size * positive_fraction))
    num_negative = min(len(negative), size - num_positive)
    chosen = torch.randperm(len(positive), device=labels.device)[:num_positive]
    others = torch.randperm(len(negative), device=labels.device)[:num_negative]
    return positive[chosen], negative[others]


def nonempty(boxes: Tensor, min_side_px: float = 0.0) -> Tensor:
    """(R, 4) -> (R,) bool: both sides longer than `min_side_px`."""
    return (boxes[:, 2:] - boxes[:, :2] > min_side_px).all(dim=1)


def rescale(boxes: Tensor, from_size: tuple[int, int], to_size: tuple[int, int]) -> Tensor:
    """(R, 4) boxes in an image of `from_size` (height, width) -> clipped boxes in `to_size`."""
    scale_y, scale_x = to_size[0] / from_size[0], to_size[1] / from_size[1]
    return clip_boxes_to_image(boxes * boxes.new_tensor([scale_x, scale_y] * 2), to_size)
