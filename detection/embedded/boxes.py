"""Box arithmetic where Detectron2 and torchvision differ.

Shapes: R boxes as (x1, y1, x2, y2) in pixels, K foreground classes.
"""

from __future__ import annotations

from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import clip_boxes_to_image


class Float32BoxCoder(BoxCoder):
    """torchvision's coder, decoding in fp32 also under autocast (in bf16 boxes end 100s of px off).

    Equal to Box2BoxTransform in detectron2/modeling/box_regression.py.
    """

    def decode(self, rel_codes: Tensor, boxes: list[Tensor]) -> Tensor:
        """(R, 4 k) deltas and boxes per image (R in all) -> (R, k, 4) boxes."""
        return super().decode(rel_codes.float(), boxes)


def nonempty(boxes: Tensor, min_side_px: float = 0.0) -> Tensor:
    """(R, 4) -> (R,) bool: both sides longer than `min_side_px`."""
    sides = boxes[:, 2:] - boxes[:, :2]
    return (sides > min_side_px).all(dim=1)


def rescale(boxes: Tensor, from_size: tuple[int, int], to_size: tuple[int, int]) -> Tensor:
    """(R, 4) boxes in an image of `from_size` (height, width) -> clipped boxes in one of `to_size`.

    As detector_postprocess in detectron2/modeling/postprocessing.py.
    """
    scale_y, scale_x = to_size[0] / from_size[0], to_size[1] / from_size[1]
    scale = boxes.new_tensor([scale_x, scale_y, scale_x, scale_y])
    return clip_boxes_to_image(boxes * scale, to_size)
