"""Type of a sample, which mappers make and engines take."""

from typing import Any, TypedDict

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
