"""Image decoding to 8-bit RGB.

PIL converts gray, palette and CMYK images. Transparency is dropped, 16-bit gray is scaled to 8
bits, and animations yield their first frame. EXIF orientation is ignored, as in torchvision's and
the official loader, so images are used as they are stored.
"""

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from moco.common.errors import DataError
from moco.common.files import PathLike, require_regular

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".gif")
# Only the formats of these suffixes are decoded, because another of PIL's readers runs Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF")
MAX_PIXELS = 89_478_485  # above it PIL warns; a quarter of a gigabyte of RGB


def decode(file: PathLike | bytes, name: str = "") -> Image.Image:
    """Decode an image to 8-bit RGB by the rules of this module.

    Args:
        file: Path or content of a file.
        name: Name of the file in error messages, if `file` is its content.

    Raises:
        DataError: If the file is empty, truncated, too large or not an image.
    """
    with _opened(file, name) as image:
        return _to_rgb(image)


def decode_pixels(file: PathLike | bytes, name: str = "") -> "Tensor":
    """Decode an image to a tensor (H, W, 3) uint8 with the same values as `decode`.

    JPEG takes 3/4 of the time, because torchvision uses the same library as PIL without two of the
    copies. Files that torchvision rejects are left to PIL, whose messages are more specific.
    """
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    with _opened(file, name) as image:
        if image.format == "JPEG" and image.mode == "RGB":
            content = bytearray(file) if isinstance(file, bytes) else np.fromfile(file, np.uint8)
            data = torch.frombuffer(content, dtype=torch.uint8)
            with suppress(RuntimeError):
                return decode_jpeg(data, ImageReadMode.RGB).permute(1, 2, 0)
        return torch.from_numpy(np.array(_to_rgb(image)))


@contextmanager
def _opened(file: PathLike | bytes, name: str) -> Iterator[Image.Image]:
    """Open an image by reading the header; errors inside the context become DataErrors."""
    label = name if isinstance(file, bytes) else os.fspath(file)
    try:
        source: Any = io.BytesIO(file) if isinstance(file, bytes) else require_regular(file)
        with warnings.catch_warnings():
            # The size is checked below against the same limit, and exceeding it is an error.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(source, formats=FORMATS) as image:
                W, H = image.size
                if W * H > MAX_PIXELS:
                    raise DataError(_bomb(label, f"{W} x {H} pixels"))
                yield image
    except Image.DecompressionBombError as error:
        raise DataError(_bomb(label, "hundreds of millions of pixels")) from error
    except Image.UnidentifiedImageError as error:
        size = len(file) if isinstance(file, bytes) else os.path.getsize(file)
        formats = ", ".join(FORMATS)
        reason = f"not an image ({formats})" if size else "the file is empty (0 bytes)"
        raise DataError(f"{label}: {reason}") from error
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise DataError(f"{label}: cannot be decoded ({error})") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("pixels are floating-point numbers; convert the file to 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        # PIL's own conversion clips everything above 255 to white.
        wide = np.asarray(image, dtype=np.int64)
        if wide.min() < 0 or wide.max() > 65535:
            raise ValueError("gray values outside 0..65535; convert the file to 8 or 16 bits")
        image = Image.fromarray((wide / 257).round().astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    # The result of convert() does not depend on the open file.
    return image.convert("RGB")


def _bomb(name: str, size: str) -> str:
    return (
        f"{name}: decompression bomb? {size} is more than the limit of {MAX_PIXELS}; "
        "shrink or remove it"
    )
