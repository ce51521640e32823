"""Files of datasets: names, lists of ids, JSON, and images, read with errors that name the file."""

import contextlib
import hashlib
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, TiffImageFile

from moco.common.errors import DataError, first_few
from moco.common.files import PathLike, read_bytes, require_regular
from moco.data.decode import FORMATS

DATASETS_VARIABLE = "DETECTRON2_DATASETS"
_ORIENTATION = 0x0112  # EXIF tag
_TURNED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_LONGEST_LINK = 255  # bytes of a symbolic link that was copied as a file
_NAMED = 5  # files and folders named in a message
# EXIF orientation → transposition that makes the image upright.
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
        with open_image_file(path, open_url) as file, Image.open(file, formats=FORMATS) as image:
            check_bits(image, path)
            image.load()
            method = _TRANSPOSE.get(image.getexif().get(_ORIENTATION, 1))
            if method is not None:
                return image.transpose(method).convert("RGB")
            return image if image.mode == "RGB" else image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path}: cannot be read as an image ({reason}); replace it") from error


@contextmanager
def open_image_file(path: str, open_url: OpenURL | None) -> Iterator[str | BinaryIO]:
    """Open a path that contains `://` by `open_url`; yield the path of any other file."""
    if open_url is None or "://" not in path:
        yield str(require_regular(path))
        return
    try:
        file = open_url(path)
    except Exception as error:  # from the user's handler or from the network
        raise DataError(f"{path}: cannot be opened ({error})") from error
    with file:
        yield file


def check_bits(image: Image.Image, path: object) -> None:
    """Raise DataError if the header of an image declares grayscale of more than 8 bits.

    Deviation: Detectron2 lets Pillow convert such an image, which clips every value above 255 to
    white. Pre-training (moco/data/decode.py) scales the values.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        raise DataError(
            f"{path}: grayscale of more than 8 bits (mode {image.mode}), which detection does not "
            "read; convert it to 8 bits (16-bit values divided by 257 are what pre-training sees)"
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


def datasets_root() -> str:
    """Return the folder of Detectron2's own datasets: $DETECTRON2_DATASETS, else `datasets`."""
    return os.path.expanduser(os.environ.get(DATASETS_VARIABLE, "datasets"))


def check_relative(name: Any, where: str) -> str:
    """Return `name` if it is a relative path that stays inside its folder.

    Raises:
        DataError: If `name` is empty, absolute, contains `..`, or is not a string. The message
            starts with `where`.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise DataError(f"{where}: got {name!r}, expected the name of a file")
    if os.path.isabs(name):
        raise DataError(
            f"{where}: {name!r} leads out of the dataset's folder; write the path below that folder"
        )
    if ".." in name.replace("\\", "/").split("/"):
        raise DataError(f"{where}: {name!r} leads out of the dataset's folder")
    return name


def with_slashes(name: str, folder: str | Path) -> str:
    """Return a name below a folder with slashes if only Windows would find it with backslashes."""
    with_slashes = name.replace("\\", "/")
    return name if name == with_slashes or Path(folder, name).exists() else with_slashes


def read_content(path: str | Path) -> bytes:
    """Read a whole file; raise DataError if it cannot be read."""
    try:
        return read_bytes(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file, empty ones too; raise DataError unless it is in UTF-8."""
    try:
        return read_content(path).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text file in UTF-8") from error


def read_json(path: str | Path) -> tuple[Any, str]:
    """Read a JSON file; return its content and the hex SHA-256 of its bytes.

    Raises:
        DataError: If the file cannot be read or is not JSON.
    """
    raw = read_content(path)
    try:
        return json.loads(raw), hashlib.sha256(raw).hexdigest()
    except (ValueError, RecursionError) as error:  # includes UnicodeDecodeError
        raise DataError(f"{path}: not valid JSON ({error})") from error


def read_ids(path: Path, columns: re.Pattern[str] | None = None) -> list[str]:
    """Read a list of different image ids, one per line; ids may contain spaces.

    Args:
        path: Text file.
        columns: Alternative format of a line, whose first group is the id.

    Raises:
        DataError: If the list is empty, has malformed lines, or an id leads out of the folder.
    """
    ids = [line.strip() for line in read_lines(path) if line.strip()]
    if columns:
        ids = [found[1] if (found := columns.fullmatch(line)) else line for line in ids]
    if not ids:
        raise DataError(f"{path}: has no image ids; expected one per line")
    for image_id in ids:
        if Path(image_id).name != image_id or image_id == "..":
            raise DataError(f"{path}: id {image_id!r} leads out of the dataset's folder")
    if len(set(ids)) < len(ids):
        twice, _ = Counter(ids).most_common(1)[0]
        raise DataError(f"{path}: {twice} is listed twice")
    return ids


def require_files(files: Sequence[str], what: str, hint: str) -> None:
    """Check that all files exist, by listing each folder once and opening no file.

    Raises:
        DataError: If files are missing. The message states their number (`what` describes the
            files) and the first one, and existing files of the same stem, or else `hint`.
    """
    if missing := missing_files(files):
        folder, name = os.path.split(missing[0])
        stem = os.path.splitext(name)[0].lower()
        alike = sorted(n for n in list_names(folder) if os.path.splitext(n)[0].lower() == stem)
        number = f"missing ({len(missing)} of the {len(files)} {what})"
        found = f"{', '.join(alike)} exists" if alike else spelling_hint(missing[0])
        raise DataError(f"{missing[0]}: {number}; {found or hint}")


def spelling_hint(path: str | Path) -> str:
    """Format a hint at an existing file whose name is spelled differently; "" if there is none."""
    folder, name = os.path.split(path)
    for other, why in other_spellings(name).items():
        if os.path.exists(os.path.join(folder, other)):
            return f"{other!r} exists: {why}"
    return ""


def other_spellings(name: str) -> dict[str, str]:
    """Return other spellings of a file name, each with the difference and its correction."""
    rename = "rename the file, or correct the annotations"
    found = {
        name.replace("\\", "/"): "the annotations have backslashes; write slashes",
        unicodedata.normalize("NFC", name): f"accents are composed there (NFC); {rename}",
        unicodedata.normalize("NFD", name): f"accents are apart there (NFD, of macOS); {rename}",
    }
    with contextlib.suppress(UnicodeEncodeError):
        latin = os.fsdecode(name.encode("latin-1"))
        found[latin] = "that name is not in UTF-8; rename the file (convmv -f latin1 -t utf8)"
    return {other: why for other, why in found.items() if other != name}


def missing_files(files: Sequence[str]) -> list[str]:
    """Return the `files` that do not exist."""
    listed = {folder: list_names(folder) for folder in {os.path.dirname(file) for file in files}}
    return [file for file in files if os.path.basename(file) not in listed[os.path.dirname(file)]]


def list_names(folder: str) -> set[str]:
    """Return the names in a folder; empty if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries}
    except OSError:
        return set()


def describe_folder(folder: str | Path) -> str:
    """Format the contents of a folder for messages: `it has a/, b.txt`, where a/ is a folder."""
    names = [
        f"{name}/" if Path(folder, name).is_dir() else name for name in list_names(str(folder))
    ]
    shown = sorted(name for name in names if name[0] != ".")
    return f"it has {first_few(shown, _NAMED)}" if shown else "it is empty"


def inner_folders(folder: Path, depth: int = 2) -> Iterator[Path]:
    """Yield the folders below a folder, two levels deep, as VOCdevkit/VOC2007."""
    for name in sorted(list_names(str(folder))) if depth else ():
        if name[0] != "." and (inner := folder / name).is_dir():
            yield inner
            yield from inner_folders(inner, depth - 1)


def has_exif_rotation(path: str | Path) -> bool:
    """Return whether an image's EXIF orientation rotates or mirrors it; False if it is damaged."""
    with (
        contextlib.suppress(Exception),
        Image.open(require_regular(path), formats=FORMATS) as image,
    ):
        return image.getexif().get(_ORIENTATION) in range(2, 9)
    return False


def image_size(
    path: str | Path, *, decode: bool = False, open_url: OpenURL | None = None
) -> tuple[int, int]:
    """Read an image's (width, height) in pixels from its header, after its EXIF orientation.

    Args:
        path: File, or URL for `open_url`.
        decode: Also decode the pixels.
        open_url: Opens a path that contains `://`.

    Raises:
        DataError: If it is not an image, has more than 8 bits, or cannot be decoded.
    """
    try:
        with (
            open_image_file(str(path), open_url) as file,
            Image.open(file, formats=FORMATS) as image,
        ):
            width, height = _stored_size(image)
            check_bits(image, path)
            turned = image.getexif().get(_ORIENTATION, 1) in _TURNED
            if decode:
                image.load()
    except DataError:
        raise
    except Exception as error:  # Pillow raises many types of errors
        raise DataError(f"{path}: {_damage(path, error)}") from error
    return (height, width) if turned else (width, height)


def _stored_size(image: Image.Image) -> tuple[int, int]:
    """Return the size of an opened image before its EXIF orientation.

    Pillow applies the orientation of a TIFF itself: newer versions when the file is opened, older
    ones when it is decoded.
    """
    if isinstance(image, TiffImageFile):
        return image.tag_v2[IMAGEWIDTH], image.tag_v2[IMAGELENGTH]
    return image.size


def _damage(path: str | Path, error: Exception) -> str:
    """Describe why an image cannot be opened."""
    with contextlib.suppress(OSError, ValueError):
        target = read_bytes(path)[:_LONGEST_LINK].decode().strip()
        if target and (Path(path).parent / target).is_file():
            return (
                f"not an image but a text with the path {target}, probably a symbolic link copied "
                "as a file; copy the dataset again with its links (cp -a, rsync -a, tar)"
            )
    return f"not an image or damaged ({error})"
