"""What happens to an image and its annotations; large-scale jitter (Ghiasi et al. 2021, arXiv
2012.07177): flip, random scale, crop to a square.

Bitwise identical to RandomFlip, ResizeScale and FixedSizeCrop of Detectron2
(detectron2/data/transforms/augmentation_impl.py) in the order of ViTDet's configs, under the same
random numbers. The geometry is fvcore's, as there; shapely cuts the polygons.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fvcore.common.config import CfgNode
from fvcore.transforms.transform import (
    CropTransform,
    HFlipTransform,
    PadTransform,
    Transform,
    TransformList,
    VFlipTransform,
)
from numpy.typing import NDArray
from PIL import Image

PAD_VALUE = 128.0  # Detectron2's default, in every channel


class Resize(Transform):
    """From one size (height, width) to another; images and masks of uint8."""

    def __init__(self, size: tuple[int, int], new_size: tuple[int, int]) -> None:
        super().__init__()
        self.size, self.new_size = size, new_size

    def apply_image(self, img: NDArray[Any]) -> NDArray[Any]:
        return self._resized(img, Image.Resampling.BILINEAR)

    def apply_segmentation(self, segmentation: NDArray[Any]) -> NDArray[Any]:
        return self._resized(segmentation, Image.Resampling.NEAREST)

    def apply_coords(self, coords: NDArray[Any]) -> NDArray[Any]:
        (height, width), (new_height, new_width) = self.size, self.new_size
        coords[:, 0] = coords[:, 0] * (new_width / width)
        coords[:, 1] = coords[:, 1] * (new_height / height)
        return coords

    def _resized(self, array: NDArray[Any], how: Image.Resampling) -> NDArray[Any]:
        return np.array(Image.fromarray(array).resize(self.new_size[::-1], how))


@dataclass(frozen=True)
class Moved:
    """What happened to an image of which `size` (height, width) is left; `flip` is among it."""

    transforms: TransformList
    size: tuple[int, int]
    flip: str

    def __call__(self, points: NDArray[Any]) -> NDArray[Any]:
        """(..., 2) points, not cut to the image; may be changed in place."""
        return self.transforms.apply_coords(points.reshape(-1, 2)).reshape(points.shape)

    def polygons(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Polygons (P, 2) of one object; a crop cuts them: more of them, fewer, or none."""
        cut: list[NDArray[Any]] = self.transforms.apply_polygons(list(parts))
        return cut

    def bitmap(self, mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """(H, W) of the image as it was → of the image as it is."""
        changed: NDArray[np.uint8] = self.transforms.apply_segmentation(mask)
        return changed


def flips(flip: str, size: tuple[int, int]) -> list[Transform]:
    """Of an image of `size` (height, width): "horizontal", "vertical" or "none"."""
    return {
        "none": [],
        "horizontal": [HFlipTransform(size[1])],
        "vertical": [VFlipTransform(size[0])],
    }[flip]


@dataclass(frozen=True)
class JitterDraw:
    """Sampled changes: the flip, the ratio of the target size, the place of the crop in 0..1."""

    flip: str
    ratio: float
    offset: float


@dataclass(frozen=True)
class LargeScaleJitter:
    """INPUT.LSJ.

    Deviation: bitmaps are filled up with background. Detectron2's default, meant for labels of
    semantic segmentation, makes what is beyond the image part of every object.

    Attributes:
        size_px: side of the square.
        scale_range: lowest and highest ratio of it that the image is made to fit.
        pad: fill the square where the image is smaller.
        flip: "horizontal", "vertical" or "none"; done with probability 1/2.
    """

    size_px: int
    scale_range: tuple[float, float]
    pad: bool
    flip: str

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "LargeScaleJitter":
        given = cfg.INPUT.LSJ
        return cls(given.SIZE, tuple(given.SCALE_RANGE), given.PAD, cfg.INPUT.RANDOM_FLIP)

    def draw(self, rng: np.random.RandomState) -> JitterDraw:
        """The random numbers are RandomFlip's, ResizeScale's and FixedSizeCrop's."""
        flipped = self.flip != "none" and rng.uniform() < 0.5
        ratio = rng.uniform(*self.scale_range)
        return JitterDraw(self.flip if flipped else "none", ratio, rng.uniform())

    def changes(self, size: tuple[int, int], draw: JitterDraw) -> Moved:
        """What `draw` does to an image of `size` (height, width)."""
        old, side = np.array(size), self.size_px
        # Rounded half to even, as there.
        new = np.round(old * (side * draw.ratio / old).min()).astype(int)
        y, x = np.round(np.maximum(new - side, 0) * draw.offset).astype(int)
        height, width = np.minimum(new, side)
        transforms = flips(draw.flip, size)
        transforms += [Resize(size, (int(new[0]), int(new[1]))), CropTransform(x, y, side, side)]
        if self.pad:
            transforms.append(PadTransform(0, 0, side - width, side - height, pad_value=PAD_VALUE))
            height = width = side
        return Moved(TransformList(transforms), (int(height), int(width)), draw.flip)
