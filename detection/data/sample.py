"""An image as the mappers make it and the engines take it."""

from typing import Any, TypedDict

from torch import Tensor


class Sample(TypedDict, total=False):
    """An image and, in training, what is to be learned from it; R objects.

    A user's records may have more, which a model of the user's gets, too.

    Attributes:
        image: (3, H, W) uint8, in the channels' order of INPUT.FORMAT.
        file_name: of the image as it is stored.
        image_id: of the dataset, where it has one.
        height: of the original, px, whose size predictions have; by default that of `image`.
        width: likewise.
        boxes: (R, 4) as (x1, y1, x2, y2), px of `image`.
        classes: (R,) int64, in 0..K-1.
        masks: (R, H, W) bool, or polygons of every object (`detection.data.objects.Polygons`).
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
