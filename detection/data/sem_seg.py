"""Images and label maps for semantic segmentation, written once for both engines.

"Training is with random scaling (by a ratio in [0.5, 2.0]), cropping, and horizontal flipping"
(appendix A.5). Sizes are (height, width) in pixels.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from fvcore.common.config import CfgNode
from numpy.typing import NDArray
from PIL import Image


@dataclass(frozen=True)
class Draw:
    """What happens to one image; `corner` is (y, x) of the crop in 0..1 of the possible ones."""

    scale: float
    flip: bool
    corner: tuple[float, float]


@dataclass(frozen=True)
class Augmentation:
    """Random scale, flip and crop; the crop is square, `crop_px` 0 keeps the whole image.

    Attributes:
        scale_range: ratios of the new size to the old, uniformly between them.
        pad_value: of the pixels that a crop has beyond the image, per channel, 0..255; their label
            is `ignore_value`.
    """

    scale_range: tuple[float, float]
    flip: bool
    crop_px: int
    pad_value: tuple[float, float, float]
    ignore_value: int

    @classmethod
    def from_config(cls, cfg: CfgNode) -> Self:
        return cls(
            scale_range=tuple(cfg.INPUT.SEM_SEG_SCALE_RANGE),
            flip=cfg.INPUT.RANDOM_FLIP == "horizontal",
            crop_px=cfg.INPUT.SEM_SEG_CROP_SIZE,
            pad_value=tuple(cfg.MODEL.PIXEL_MEAN),  # zero once normalized
            ignore_value=cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE,
        )

    def draw(self, rng: Any) -> Draw:
        """Random numbers in a fixed order from `rng` (numpy's RandomState, or numpy.random)."""
        scale = float(rng.uniform(*self.scale_range))
        flip = self.flip and bool(rng.uniform() < 0.5)
        return Draw(scale, flip, (float(rng.uniform()), float(rng.uniform())))

    def apply(
        self, image: NDArray[np.uint8], labels: NDArray[np.uint8], draw: Draw
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """(H, W, 3) and (H, W) → the same with H = W = `crop_px`.

        Pixels are interpolated bilinearly, labels take their nearest neighbor.
        """
        height, width = (max(1, int(side * draw.scale + 0.5)) for side in labels.shape)
        size = (width, height)
        image = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
        labels = np.asarray(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))
        if draw.flip:
            image, labels = image[:, ::-1], labels[:, ::-1]
        if not self.crop_px:
            return np.ascontiguousarray(image), np.ascontiguousarray(labels)
        crop = self.crop_px
        top, left = (
            int(part * (max(side - crop, 0) + 1))
            for part, side in zip(draw.corner, (height, width), strict=True)
        )
        window = slice(top, top + crop), slice(left, left + crop)
        image, labels = image[window], labels[window]
        padded = np.empty((crop, crop, 3), np.uint8)
        padded[:] = np.round(self.pad_value)
        padded_labels = np.full((crop, crop), self.ignore_value, np.uint8)
        padded[: image.shape[0], : image.shape[1]] = image
        padded_labels[: labels.shape[0], : labels.shape[1]] = labels
        return padded, padded_labels
