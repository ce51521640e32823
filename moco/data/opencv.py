"""The colors of one view on a CPU by OpenCV: what `augment.apply_colors` does, in half of the time.

Brightness, contrast, saturation, gray and normalization are affine maps of a pixel's RGB. They are
multiplied into one, which the pixels pass before the hue or the blur, and where values can leave
0..1 and have to be cut off.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import cv2
except ImportError:  # or a library that it needs: augment's own operations are equal, and slower
    AVAILABLE = False
else:
    AVAILABLE = True
    cv2.setNumThreads(0)  # images are small, and its threads do not survive a fork

BRIGHTNESS, CONTRAST, SATURATION, HUE, GRAYSCALE = range(5)
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, PIL's and torchvision's weights

Array = NDArray[Any]  # float32
Map = NDArray[np.float64]  # (4, 4), of (R, G, B, 1)
_SAME = np.eye(4)
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
    """Colors, blur, solarization and normalization of one view (3, P, P), into `out` (3, P, P).

    Args:
        operations: in their order, see `augment.operations`.
        factors: indexed by them; the last one is the hue's shift.
        sigma_px: of the blur; 0 for none.
        solarized: whether it is, see `augment.solarize`.
        normalization: see `normalization_map`.
    """
    x: Array = cv2.merge(list(pixels)).astype(np.float32)  # (P, P, 3)
    waiting = _scaled(1 / 255)
    for operation in operations:
        if operation == GRAYSCALE:
            waiting = _GRAY @ waiting
            continue
        factor = factors[operation]
        if operation == HUE:
            x, waiting = _turned(_mapped(x, waiting), factor), _SAME
            continue
        if operation == BRIGHTNESS:
            step = _scaled(factor)
        elif operation == SATURATION:
            step = _scaled(factor) + (1 - factor) * (_GRAY - _CORNER)
        else:
            step = _scaled(factor)
            mean = _GRAY @ waiting @ [*cv2.mean(x)[:3], 1.0]
            step[:3, 3] = (1 - factor) * mean[:3]
        waiting = step @ waiting
        if factor > 1:  # otherwise a mean of values in 0..1
            x, waiting = _mapped(x, waiting), _SAME
            np.clip(x, 0, 1, out=x)
    x = _mapped(x, waiting if solarized else normalization @ waiting)
    if sigma_px:  # leaves the normalization as it is: the weights' sum is 1
        side = 2 * math.ceil(3 * sigma_px) + 1
        x = cv2.GaussianBlur(x, (side, side), sigma_px, borderType=cv2.BORDER_REPLICATE)
    if solarized:
        x = _mapped(np.minimum(x, 1 - x), normalization)
    cv2.split(x, list(out))


def normalization_map(mean: Sequence[float], std: Sequence[float]) -> Map:
    """`(x - mean) / std` for values in 0..1."""
    scale = np.diag([*(1 / np.asarray(std)), 1.0])
    scale[:3, 3] = -np.asarray(mean) / std
    return scale


def _scaled(factor: float) -> Map:
    return np.diag([factor, factor, factor, 1.0])


_CORNER = _scaled(0.0)


def _mapped(x: Array, by: Map) -> Array:
    return x if by is _SAME else cv2.transform(x, by[:3])


def _turned(x: Array, shift: float) -> Array:
    """The hue moved by `shift` parts of the circle."""
    turn = _SAME[:3].copy()
    turn[0, 3] = 360 * (shift % 1)  # OpenCV takes more than 360 degrees, and not less than 0
    return cv2.cvtColor(cv2.transform(cv2.cvtColor(x, cv2.COLOR_RGB2HSV), turn), cv2.COLOR_HSV2RGB)
