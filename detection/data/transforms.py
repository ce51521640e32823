"""Transforms of an image and its annotations: resizing, large-scale jitter, distortion of colors.

Large-scale jitter (Ghiasi et al. 2021, arXiv 2012.07177) is a flip, a random scale and a crop to a
square. Bitwise identical to RandomFlip, ResizeScale and FixedSizeCrop of Detectron2
(detectron2/data/transforms/augmentation_impl.py) in the order of ViTDet's configs, under the same
random numbers. As there, the transforms are fvcore's, and shapely crops the polygons.

The photometric distortion is that of SSD (arXiv 1512.02325, Sec. 3.6, "Data augmentation"). Its
ranges and order are those of `PhotoMetricDistortion` in mmsegmentation
(mmseg/datasets/transforms/transforms.py), which the recipes of semantic segmentation use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

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
    """Resize from one size (height, width) to another; images and masks are uint8."""

    def __init__(self, size: tuple[int, int], new_size: tuple[int, int]) -> None:
        super().__init__()
        self.size, self.new_size = size, new_size

    def apply_image(self, img: NDArray[Any]) -> NDArray[Any]:
        """Resize an image bilinearly."""
        return self._resized(img, Image.Resampling.BILINEAR)

    def apply_segmentation(self, segmentation: NDArray[Any]) -> NDArray[Any]:
        """Resize a mask by its nearest pixels."""
        return self._resized(segmentation, Image.Resampling.NEAREST)

    def apply_coords(self, coords: NDArray[Any]) -> NDArray[Any]:
        """Scale points (N, 2) of x and y (in place)."""
        (height, width), (new_height, new_width) = self.size, self.new_size
        coords[:, 0] = coords[:, 0] * (new_width / width)
        coords[:, 1] = coords[:, 1] * (new_height / height)
        return coords

    def _resized(self, array: NDArray[Any], resample: Image.Resampling) -> NDArray[Any]:
        return np.array(Image.fromarray(array).resize(self.new_size[::-1], resample))


@dataclass(frozen=True)
class AppliedTransforms:
    """Transforms applied to an image, its `size` (height, width) after them, and their `flip`."""

    transforms: TransformList
    size: tuple[int, int]
    flip: str

    def __call__(self, points: NDArray[Any]) -> NDArray[Any]:
        """Transform points (..., 2), possibly in place; they are not clipped to the image."""
        return self.transforms.apply_coords(points.reshape(-1, 2)).reshape(points.shape)

    def polygons(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Transform the polygons (P, 2) of one object; a crop can change their number."""
        polygons: list[NDArray[Any]] = self.transforms.apply_polygons(list(parts))
        return polygons

    def bitmap(self, mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Transform a mask (H, W) of the original image."""
        bitmap: NDArray[np.uint8] = self.transforms.apply_segmentation(mask)
        return bitmap


def flips(flip: str, size: tuple[int, int]) -> list[Transform]:
    """Return the transform of a flip, if any: "horizontal", "vertical" or "none"."""
    return {
        "none": [],
        "horizontal": [HFlipTransform(size[1])],
        "vertical": [VFlipTransform(size[0])],
    }[flip]


@dataclass(frozen=True)
class JitterParams:
    """Sampled parameters: the flip, the ratio of the target size, the crop's position in 0..1."""

    flip: str
    ratio: float
    offset: float


@dataclass(frozen=True)
class LargeScaleJitter:
    """Large-scale jitter of INPUT.LSJ.

    Deviation: bitmaps are padded with background. Detectron2's default, meant for labels of
    semantic segmentation, makes the padding part of every object.

    Attributes:
        size_px: Side of the square.
        scale_range: Lowest and highest ratio of `size_px` that images are resized to fit.
        pad: Pad smaller images to the square.
        flip: "horizontal", "vertical" or "none"; applied with probability 1/2.
    """

    size_px: int
    scale_range: tuple[float, float]
    pad: bool
    flip: str

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "LargeScaleJitter":
        """Build the jitter from INPUT.LSJ and INPUT.RANDOM_FLIP."""
        keys = cfg.INPUT.LSJ
        return cls(keys.SIZE, tuple(keys.SCALE_RANGE), keys.PAD, cfg.INPUT.RANDOM_FLIP)

    def sample_params(self, rng: np.random.RandomState) -> JitterParams:
        """Sample the parameters of one image, as RandomFlip, ResizeScale and FixedSizeCrop do."""
        flipped = self.flip != "none" and rng.uniform() < 0.5
        ratio = rng.uniform(*self.scale_range)
        return JitterParams(self.flip if flipped else "none", ratio, rng.uniform())

    def transforms(self, size: tuple[int, int], params: JitterParams) -> AppliedTransforms:
        """Return the transforms of `params` for an image of `size` (height, width)."""
        old, side = np.array(size), self.size_px
        # Detectron2 rounds half to even here.
        new = np.round(old * (side * params.ratio / old).min()).astype(int)
        y, x = np.round(np.maximum(new - side, 0) * params.offset).astype(int)
        height, width = np.minimum(new, side)
        transforms = flips(params.flip, size)
        transforms += [Resize(size, (int(new[0]), int(new[1]))), CropTransform(x, y, side, side)]
        if self.pad:
            transforms.append(PadTransform(0, 0, side - width, side - height, pad_value=PAD_VALUE))
            height = width = side
        return AppliedTransforms(TransformList(transforms), (int(height), int(width)), params.flip)


_BRIGHTNESS, _FACTOR, _HUE = 32.0, 0.5, 18 / 180


@dataclass(frozen=True)
class ColorDistortion:
    """Sampled distortion of an image; the defaults change nothing.

    Attributes:
        brightness: Added to every value of 0..255.
        contrast: Factor of every value.
        saturation: Factor of the saturation.
        hue: Shift of the hue, in turns.
        contrast_last: Change the contrast after saturation and hue, instead of before.
    """

    brightness: float = 0.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0
    contrast_last: bool = False

    @classmethod
    def sample(cls, rng: Any) -> Self:
        """Sample each change with probability 1/2 from a NumPy RandomState or numpy.random."""
        chosen, amounts = rng.uniform(size=4) < 0.5, rng.uniform(-1, 1, size=4)
        brightness, contrast, saturation, hue = (
            float(amount) if on else 0.0 for on, amount in zip(chosen, amounts, strict=True)
        )
        return cls(
            _BRIGHTNESS * brightness,
            1 + _FACTOR * contrast,
            1 + _FACTOR * saturation,
            _HUE * hue,
            bool(rng.uniform() < 0.5),
        )

    def apply(self, image: NDArray[np.uint8], order: str) -> NDArray[np.uint8]:
        """Distort an image (H, W, 3) whose channels are in `order`, "RGB" or "BGR".

        Deviation: hue and saturation have 8 bits, as Pillow converts them. mmsegmentation's have
        fewer for the hue (OpenCV's, 0..179).
        """
        image = _linear(image, 1.0, self.brightness)
        if not self.contrast_last:
            image = _linear(image, self.contrast, 0.0)
        if self.saturation != 1 or self.hue:
            image = self._saturation_and_hue(image, order)
        if self.contrast_last:
            image = _linear(image, self.contrast, 0.0)
        return image

    def _saturation_and_hue(self, image: NDArray[np.uint8], order: str) -> NDArray[np.uint8]:
        rgb = image[..., ::-1] if order == "BGR" else image
        hsv = np.array(Image.fromarray(np.ascontiguousarray(rgb)).convert("HSV"))
        hsv[..., 0] += np.uint8(round(256 * self.hue) % 256)  # wraps around
        hsv[..., 1] = _linear(hsv[..., 1], self.saturation, 0.0)
        rgb = np.array(Image.fromarray(hsv, "HSV").convert("RGB"))
        return rgb[..., ::-1] if order == "BGR" else rgb


def _linear(image: NDArray[np.uint8], factor: float, offset: float) -> NDArray[np.uint8]:
    if factor == 1 and offset == 0:
        return image
    return np.clip(image.astype(np.float32) * factor + offset, 0, 255).astype(np.uint8)
