"""Label maps of semantic segmentation: PNG files whose pixel values are class ids."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from moco.errors import DataError


def read_labels(path: Path | str) -> NDArray[np.uint8]:
    """Class ids (H, W) as stored: grey value, or index into the palette and never its colour.

    Raises:
        DataError: the file is missing, damaged, or has neither 8-bit grey nor palette pixels.
    """
    try:
        with Image.open(path) as image:
            mode = image.mode
            labels = np.array(image)  # never convert("L"): of a palette it would keep the colours
    except Exception as error:  # Pillow raises many kinds, all mean the same to the user
        raise DataError(f"{path}: not a label map or damaged ({error})") from error
    if mode not in ("L", "P"):
        raise DataError(
            f"{path}: got a picture of mode {mode}, expected class ids as 8-bit grey (L) or "
            "palette (P) pixels"
        )
    return labels
