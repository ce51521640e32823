"""OpenCV implementation of the color transforms for CPUs, twice as fast as `moco.data.augment`.

Brightness, contrast, saturation, grayscale and normalization are affine maps of a pixel's RGB.
Consecutive maps are multiplied into one, which is applied to the pixels before hue and blur, and
wherever values can leave 0..1 and have to be clipped.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import cv2
except ImportError:  # also if a shared library is missing; `augment` is used instead
    AVAILABLE = False
else:
    AVAILABLE = True
    cv2.setNumThreads(0)  # images are small, and OpenCV's threads do not survive a fork

BRIGHTNESS, CONTRAST, SATURATION, HUE, GRAYSCALE = range(5)
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, PIL's and torchvision's weights

Array = NDArray[Any]  # float32
Map = NDArray[np.float64]  # (4, 4), applied to (R, G, B, 1)
_IDENTITY = np.eye(4)
_GRAY = np.vstack([np.tile([*LUMA, 0.0], (3, 1)), [0, 0, 0, 1]])


def color_view(
    pixels: NDArray[np.uint8],
    operations: Sequence[int],
    factors: Sequence[float],
    sigma_px: float,
    solarized: bool,
    normalization: Map,
    out: Array,
) -> None:
    """Apply color transforms, blur, solarization and normalization to one view.

    Args:
        pixels: Crop (3, P, P).
        operations: Color operations in order (`augment.operations`).
        factors: Parameter of each operation, indexed by the operation: a shift for HUE, else a
            factor.
        sigma_px: Standard deviation of the blur, or 0 for none.
        solarized: Apply `augment.solarize`.
        normalization: Affine map from `normalization_map`.
        out: Array (3, P, P) that receives the result.
    """
    x: Array = cv2.merge(list(pixels)).astype(np.float32)  # (P, P, 3)
    pending = _scaling(1 / 255)  # product of the maps that have not been applied to `x` yet
    for operation in operations:
        if operation == GRAYSCALE:
            pending = _GRAY @ pending
            continue
        factor = factors[operation]
        if operation == HUE:
            x, pending = _shift_hue(_transform(x, pending), factor), _IDENTITY
            continue
        if operation == BRIGHTNESS:
            step = _scaling(factor)
        elif operation == SATURATION:
            step = _scaling(factor) + (1 - factor) * (_GRAY - _CORNER)
        else:
            step = _scaling(factor)
            mean = _GRAY @ pending @ [*cv2.mean(x)[:3], 1.0]
            step[:3, 3] = (1 - factor) * mean[:3]
        pending = step @ pending
        if factor > 1:  # for a factor <= 1 the result is a mean of values in 0..1
            x, pending = _transform(x, pending), _IDENTITY
            np.clip(x, 0, 1, out=x)
    x = _transform(x, pending if solarized else normalization @ pending)
    if sigma_px:  # commutes with the normalization, since the kernel sums to 1
        side = 2 * math.ceil(3 * sigma_px) + 1
        x = cv2.GaussianBlur(x, (side, side), sigma_px, borderType=cv2.BORDER_REPLICATE)
    if solarized:
        x = _transform(np.minimum(x, 1 - x), normalization)
    cv2.split(x, list(out))


def normalization_map(mean: Sequence[float], std: Sequence[float]) -> Map:
    """Return the affine map `(x - mean) / std` of values in 0..1."""
    scale = np.diag([*(1 / np.asarray(std)), 1.0])
    scale[:3, 3] = -np.asarray(mean) / std
    return scale


def _scaling(factor: float) -> Map:
    return np.diag([factor, factor, factor, 1.0])


_CORNER = _scaling(0.0)


def _transform(x: Array, affine: Map) -> Array:
    return x if affine is _IDENTITY else cv2.transform(x, affine[:3])


def _shift_hue(x: Array, shift: float) -> Array:
    """Shift the hue by the fraction `shift` of the color circle."""
    affine = _IDENTITY[:3].copy()
    affine[0, 3] = 360 * (shift % 1)  # OpenCV accepts more than 360 degrees, but none below 0
    hsv = cv2.transform(cv2.cvtColor(x, cv2.COLOR_RGB2HSV), affine)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
