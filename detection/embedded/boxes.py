"""Pure functions of boxes: encoding, matching, sampling, rescaling; equal to Detectron2's.

Encoding and matching are torchvision's. Its sampler is not used, because it returns masks, which
lose the order of sampling. torchvision is imported inside the functions, because building a network
without it takes half the time.

Shapes: R boxes (x1, y1, x2, y2) in pixels, G objects, K foreground classes.
"""

import torch
from torch import Tensor

Weights = tuple[float, float, float, float]  # of dx, dy, dw, dh


def encode(boxes: Tensor, references: Tensor, weights: Weights) -> Tensor:
    """Return the deltas (R, 4) from references (R, 4) to boxes (R, 4)."""
    from torchvision.models.detection._utils import BoxCoder

    return BoxCoder(weights).encode_single(boxes, references)


def decode(deltas: Tensor, references: Tensor, weights: Weights) -> Tensor:
    """Apply deltas (R, 4 K) to references (R, 4), in fp32 also under autocast: boxes (R, 4 K)."""
    from torchvision.models.detection._utils import BoxCoder

    return BoxCoder(weights).decode_single(deltas.float(), references)


def match(
    objects: Tensor, boxes: Tensor, thresholds: tuple[float, float], *, each_object: bool
) -> Tensor:
    """Match each box to an object: its index (R,), -1 for background, or -2 for neither.

    Args:
        objects: (G, 4).
        boxes: (R, 4).
        thresholds: An IoU below the first is background; from the second on, the box belongs to
            the object with the highest IoU.
        each_object: Also match to an object the boxes with its highest IoU, however low.
    """
    if not len(objects) or not len(boxes):
        return torch.full((len(boxes),), -1, device=boxes.device)
    from torchvision.models.detection._utils import Matcher
    from torchvision.ops import box_iou

    iou = box_iou(objects, boxes).nan_to_num_(0.0)  # (G, R); NaN if both areas are 0
    return Matcher(thresholds[1], thresholds[0], allow_low_quality_matches=each_object)(iou)


def sample(matched: Tensor, size: int, positive_fraction: float) -> tuple[Tensor, Tensor]:
    """Sample up to `size` of the matched boxes: indices of foreground and of background.

    `positive_fraction` of `size` is the maximum of foreground. The indices are returned in the
    order of sampling, which is the order of every sum over the regions.
    """
    positive, negative = (matched >= 0).nonzero().squeeze(1), (matched == -1).nonzero().squeeze(1)
    num_positive = min(len(positive), int(size * positive_fraction))
    num_negative = min(len(negative), size - num_positive)
    chosen = torch.randperm(len(positive), device=matched.device)[:num_positive]
    others = torch.randperm(len(negative), device=matched.device)[:num_negative]
    return positive[chosen], negative[others]


def rescale(boxes: Tensor, from_size: tuple[int, int], to_size: tuple[int, int]) -> Tensor:
    """Rescale boxes (R, 4) from one image size (height, width) to another, and clip them to it."""
    from torchvision.ops import clip_boxes_to_image

    scale_y, scale_x = to_size[0] / from_size[0], to_size[1] / from_size[1]
    return clip_boxes_to_image(boxes * boxes.new_tensor([scale_x, scale_y] * 2), to_size)
