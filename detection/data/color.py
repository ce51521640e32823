"""Photometric distortion of SSD (arXiv 1512.02325, Sec. 3.6, "Data augmentation").

Its ranges and order are those of `PhotoMetricDistortion` in mmsegmentation
(mmseg/datasets/transforms/transforms.py), which the recipes of semantic segmentation use.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_BRIGHTNESS, _FACTOR, _HUE = 32.0, 0.5, 18 / 180


@dataclass(frozen=True)
class Color:
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
    def draw(cls, rng: Any) -> Self:
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
