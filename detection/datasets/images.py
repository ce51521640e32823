"""Reading of images for detection, and errors about unusable ones."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from PIL import Image

from moco.common.errors import DataError
from moco.common.files import PathLike, regular
from moco.data.decode import FORMATS

_EXIF_ORIENTATION = 274
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


OpenURL = Callable[[str], BinaryIO]  # opens a path that contains `://`


def read_image(path: str, open_url: OpenURL | None = None) -> Image.Image:
    """Read an image as RGB, rotated by its EXIF orientation.

    Deviation: Detectron2 rotates a TIFF twice, because Pillow has already rotated it.

    Raises:
        DataError: If the file is missing, truncated, not an image, or has more than 8 bits.
    """
    try:
        with opened(path, open_url) as file, Image.open(file, formats=FORMATS) as image:
            check_bits(image, path)
            image.load()
            method = _TRANSPOSE.get(image.getexif().get(_EXIF_ORIENTATION, 1))
            if method is not None:
                return image.transpose(method).convert("RGB")
            return image if image.mode == "RGB" else image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path}: cannot be read as an image ({reason}); replace it") from error


@contextmanager
def opened(path: str, open_url: OpenURL | None) -> Iterator[str | BinaryIO]:
    """Open a path that contains `://` by `open_url`; yield the path of any other file."""
    if open_url is None or "://" not in path:
        yield str(regular(path))
        return
    try:
        file = open_url(path)
    except Exception as error:  # from the user's handler or from the network
        raise DataError(f"{path}: cannot be opened ({error})") from error
    with file:
        yield file


def check_bits(image: Image.Image, path: object) -> None:
    """Raise DataError if the header says gray of more than 8 bits; the error names the file.

    Deviation: Detectron2 lets PIL convert it, which clips every value above 255 to white.
    Pre-training (moco/data/decode.py) scales it.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        raise DataError(
            f"{path}: gray of more than 8 bits (mode {image.mode}), which detection does not read; "
            "convert it to 8 bits (16-bit values divided by 257 are what pre-training sees)"
        )


def check_size(record: Mapping[str, Any], size: tuple[int, ...]) -> None:
    """Raise DataError if `size`, the image's (height, width), is not the record's."""
    if size != (record["height"], record["width"]):
        raise DataError(
            f"{record['file_name']}: the image is {size[1]}x{size[0]}, but its annotation has "
            f"{record['width']}x{record['height']}; correct the annotation's size"
        )


def first_error(batch: Iterable[Any]) -> DataError | None:
    """Return the first error in a batch, or None.

    Data-loader workers return errors as samples, because raising there adds a traceback.
    """
    return next((sample for sample in batch if isinstance(sample, DataError)), None)


def resumable(error: DataError, checkpoint: PathLike | None, doctor: str) -> str:
    """Format the message of a training that stopped at an unusable image.

    Args:
        error: The error about the image.
        checkpoint: Checkpoint to resume from; None if nothing was trained.
        doctor: Command that checks all images (detection/datasets/doctor.py), or "".
    """
    saved = "nothing was trained yet"
    if checkpoint is not None:
        saved = f"saved {checkpoint}, from which --resume continues once that is fixed"
    return f"{error}; {saved}" + (f"; to check all images: {doctor}" if doctor else "")
