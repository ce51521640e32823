"""Image decoding: every file format becomes 8-bit RGB.

Gray, palette and CMYK are converted by PIL; transparency is dropped; 16-bit gray is scaled to 8
bits; of an animation the first frame is taken. EXIF orientation is ignored, as in torchvision's and
the official loader: images are used as they are stored.
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
from moco.common.files import PathLike

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".gif")
# What those suffixes promise, whatever the content is: PIL's other readers include one that runs
# Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF")
MAX_PIXELS = 89_478_485  # PIL's own limit for a warning: a quarter of a gigabyte of RGB


def decode(file: PathLike | bytes, name: str = "") -> Image.Image:
    """One image as 8-bit RGB, following the policy above.

    Args:
        file: a path, or a file's content, then with a `name` for messages.

    Raises:
        DataError: with the name and what is wrong: empty, truncated, no image, too large.
    """
    with _opened(file, name) as image:
        return _to_rgb(image)


def decode_pixels(file: PathLike | bytes, name: str = "") -> "Tensor":
    """The pixels of `decode`, (H, W, 3) uint8; JPEG, the usual case, in 3/4 of the time.

    torchvision uses the same library as PIL and spares two copies. What it refuses is left to PIL,
    whose messages say more.
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
    """An image of which the header was read; errors while it is open become DataErrors."""
    where = name if isinstance(file, bytes) else os.fspath(file)
    source: Any = io.BytesIO(file) if isinstance(file, bytes) else file
    try:
        with warnings.catch_warnings():
            # The size is checked here, against the same limit, with an error instead.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(source, formats=FORMATS) as image:
                W, H = image.size
                if W * H > MAX_PIXELS:
                    raise DataError(_bomb(where, f"{W} x {H} pixels"))
                yield image
    except Image.DecompressionBombError as error:
        raise DataError(_bomb(where, "hundreds of millions of pixels")) from error
    except Image.UnidentifiedImageError as error:
        size = len(file) if isinstance(file, bytes) else os.path.getsize(file)
        formats = ", ".join(FORMATS)
        reason = f"not an image ({formats})" if size else "the file is empty (0 bytes)"
        raise DataError(f"{where}: {reason}") from error
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise DataError(f"{where}: cannot be decoded ({error})") from error


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
    # convert() returns an image that no longer depends on the open file.
    return image.convert("RGB")


def _bomb(name: str, size: str) -> str:
    return (
        f"{name}: decompression bomb? {size} is more than the limit of {MAX_PIXELS}; "
        "shrink or remove it"
    )
