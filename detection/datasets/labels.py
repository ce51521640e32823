"""Label maps of semantic segmentation: PNG files whose pixel values are class ids."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from moco.common.errors import DataError


def read_labels(path: Path | str) -> NDArray[np.uint8]:
    """Class ids (H, W) as stored: gray value, or index into the palette and never its color.

    Raises:
        DataError: the file is missing, damaged, or has neither 8-bit gray nor palette pixels.
    """
    try:
        with Image.open(path) as image:
            mode = image.mode
            labels = np.array(image)  # never convert("L"): of a palette it would keep the colors
    except Exception as error:  # Pillow raises many kinds, all mean the same to the user
        raise DataError(f"{path}: not a label map or damaged ({error})") from error
    if mode not in ("L", "P"):
        raise DataError(
            f"{path}: got an image of mode {mode}, expected class ids as 8-bit gray (L) or "
            "palette (P) pixels"
        )
    return labels
