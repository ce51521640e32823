"""Augmentation of images and label maps for semantic segmentation, shared by both engines.

"Training is with random scaling (by a ratio in [0.5, 2.0]), cropping, and horizontal flipping"
(appendix A.5). Recipes of mmsegmentation scale relative to a fixed size, sample another crop if one
class fills it (`cat_max_ratio`), and distort the colors. Sizes are (height, width) in pixels.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from fvcore.common.config import CfgNode
from numpy.typing import NDArray
from PIL import Image

from detection.data.transforms import ColorDistortion

RETRIES = 10  # other crops, as in mmsegmentation's RandomCrop
_BILINEAR, _NEAREST = Image.Resampling.BILINEAR, Image.Resampling.NEAREST


@dataclass(frozen=True)
class AugmentationParams:
    """Sampled augmentation of one image.

    Attributes:
        scale: Ratio of the new size to the old one, or to `Augmentation.short_edge_px`.
        flip: Flip horizontally.
        corner: The crop's (y, x) in 0..1 of its range.
        others: Corners to try next if one class fills the crop.
        color: Photometric distortion; None: none.
    """

    scale: float
    flip: bool
    corner: tuple[float, float]
    others: tuple[tuple[float, float], ...] = ()
    color: ColorDistortion | None = None


@dataclass(frozen=True)
class Augmentation:
    """Random scale, flip, crop and photometric distortion.

    Attributes:
        scale_range: Range of the ratio of the new size to the old, sampled uniformly.
        flip: Flip horizontally with probability 1/2.
        crop_px: Size of the crop; (0, 0) keeps the whole image.
        pad_value: Value per channel, 0..255, of a crop's pixels beyond the image.
        ignore_value: Label of these pixels.
        short_edge_px: If > 0, the shorter side before scaling; the image's own otherwise.
        max_size_px: With `short_edge_px`, limit of the longer side before scaling.
        max_class_share: Share of the labeled pixels above which one class fills a crop; 1: never.
        color: Distort the colors.
        channel_order: "RGB" or "BGR".
    """

    scale_range: tuple[float, float]
    flip: bool
    crop_px: tuple[int, int]
    pad_value: tuple[float, float, float]
    ignore_value: int
    short_edge_px: int = 0
    max_size_px: int = 0
    max_class_share: float = 1.0
    color: bool = False
    channel_order: str = "RGB"

    @classmethod
    def from_config(cls, cfg: CfgNode) -> Self:
        """Build the augmentation from INPUT.SEM_SEG_* and INPUT.RANDOM_FLIP."""
        keys = cfg.INPUT
        height = keys.SEM_SEG_CROP_SIZE
        return cls(
            scale_range=tuple(keys.SEM_SEG_SCALE_RANGE),
            flip=keys.RANDOM_FLIP == "horizontal",
            crop_px=(height, round(height * keys.SEM_SEG_CROP_ASPECT)),
            pad_value=tuple(cfg.MODEL.PIXEL_MEAN),  # 0 after normalization
            ignore_value=cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE,
            short_edge_px=keys.SEM_SEG_SIZE,
            max_size_px=keys.MAX_SIZE_TRAIN,
            max_class_share=keys.SEM_SEG_MAX_CLASS_SHARE,
            color=keys.SEM_SEG_COLOR,
            channel_order=keys.FORMAT,
        )

    def sample_params(self, rng: Any) -> AugmentationParams:
        """Sample an augmentation, in a fixed order, from a NumPy RandomState or numpy.random."""
        scale = float(rng.uniform(*self.scale_range))
        flip = self.flip and bool(rng.uniform() < 0.5)
        corner = float(rng.uniform()), float(rng.uniform())
        others: tuple[tuple[float, float], ...] = ()
        if self.max_class_share < 1:
            others = tuple((float(y), float(x)) for y, x in rng.uniform(size=(RETRIES, 2)))
        return AugmentationParams(
            scale, flip, corner, others, ColorDistortion.sample(rng) if self.color else None
        )

    def apply(
        self, image: NDArray[np.uint8], labels: NDArray[np.uint8], params: AugmentationParams
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Augment an image (H, W, 3) and its labels (H, W).

        Images are interpolated bilinearly, labels by the nearest neighbor.
        """
        height, width = self._size((labels.shape[0], labels.shape[1]), params.scale)
        image = np.asarray(Image.fromarray(image).resize((width, height), _BILINEAR))
        labels = np.asarray(Image.fromarray(labels).resize((width, height), _NEAREST))
        if params.flip:
            image, labels = image[:, ::-1], labels[:, ::-1]
        is_cropped = any(self.crop_px)
        if is_cropped:
            window = self._window(labels, params)
            image, labels = image[window], labels[window]
        if params.color:
            image = params.color.apply(image, self.channel_order)
        if not is_cropped:
            return np.ascontiguousarray(image), np.ascontiguousarray(labels)
        padded = np.empty((*self.crop_px, 3), np.uint8)
        padded[:] = np.round(self.pad_value)
        padded_labels = np.full(self.crop_px, self.ignore_value, np.uint8)
        padded[: image.shape[0], : image.shape[1]] = image
        padded_labels[: labels.shape[0], : labels.shape[1]] = labels
        return padded, padded_labels

    def _size(self, size: tuple[int, int], scale: float) -> tuple[int, int]:
        """Return the new (height, width) of an image, before the crop."""
        ratio = scale
        if self.short_edge_px:
            ratio *= min(self.short_edge_px / min(size), self.max_size_px / max(size))
        height, width = (max(1, int(side * ratio + 0.5)) for side in size)
        return height, width

    def _window(self, labels: NDArray[np.uint8], params: AugmentationParams) -> tuple[slice, slice]:
        """Return the first crop that no class fills, or else the last one."""
        corners, (height, width) = [params.corner, *params.others], self.crop_px
        for corner in corners:
            top, left = (
                int(part * (max(side - crop, 0) + 1))
                for part, side, crop in zip(corner, labels.shape, self.crop_px, strict=True)
            )
            window = slice(top, top + height), slice(left, left + width)
            if corner is corners[-1] or not self._filled(labels[window]):
                break
        return window

    def _filled(self, labels: NDArray[np.uint8]) -> bool:
        counts = np.bincount(labels[labels != self.ignore_value])
        counts = counts[counts > 0]
        return len(counts) < 2 or counts.max() >= self.max_class_share * counts.sum()
