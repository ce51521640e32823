"""Where datasets lie, and the checks that all readers share: paths, JSON, image headers."""

import hashlib
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from detection.datasets.images import check_bits
from moco.common.errors import DataError

DATASETS_VARIABLE = "DETECTRON2_DATASETS"
_TURNED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_ORIENTATION = 0x0112
_LONGEST_LINK = 255  # bytes


def datasets_root() -> str:
    """The folder of Detectron2's own datasets: $DETECTRON2_DATASETS, else `datasets`."""
    return os.path.expanduser(os.environ.get(DATASETS_VARIABLE, "datasets"))


def inside(name: Any, where: str) -> str:
    """`name`, if it is a relative path that cannot lead out of its folder.

    By its parts alone, not by where links point: datasets made of links are common.

    Raises:
        DataError: empty, absolute, with a `..` in it, or not text; begins with `where`.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise DataError(f"{where}: got {name!r}, expected the name of a file")
    if os.path.isabs(name) or ".." in name.replace("\\", "/").split("/"):
        raise DataError(f"{where}: {name!r} leads out of the dataset's folder")
    return name


def read_json(path: str | Path) -> tuple[Any, str]:
    """What a JSON file holds, and the hex SHA-256 of its bytes.

    Raises:
        DataError: unreadable or not JSON.
    """
    try:
        raw = Path(path).read_bytes()
        return json.loads(raw), hashlib.sha256(raw).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # also bytes that are not text
        raise DataError(f"{path}: not valid JSON ({error})") from error


def absent(files: Iterable[str]) -> list[str]:
    """Those of `files` that are not there; each folder is listed once, no file is opened."""
    listed: dict[str, set[str]] = {}
    missing = []
    for file in files:
        folder, name = os.path.split(file)
        if folder not in listed:
            listed[folder] = names_in(folder)
        if name not in listed[folder]:
            missing.append(file)
    return missing


def alike(file: str) -> str:
    """The end of a message about a file that is missing: those of its name but for the ending."""
    folder, name = os.path.split(file)
    stem = os.path.splitext(name)[0].lower()
    found = sorted(n for n in names_in(folder) if os.path.splitext(n)[0].lower() == stem)
    return f"; {', '.join(found)} is there" if found else ""


def names_in(folder: str) -> set[str]:
    """The names of what lies in a folder; none if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries}
    except OSError:
        return set()


def image_size(source: str | Path | bytes, where: str | Path | None = None) -> tuple[int, int]:
    """(width, height) in pixels from an image's header, as it is shown (EXIF orientation).

    Args:
        source: the file; or the bytes of a mask, which `where` names and whose mode is checked
            where its labels are read.

    Raises:
        DataError: not an image, or of more than 8 bits.
    """
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            width, height = image.size
            if not isinstance(source, bytes):
                check_bits(image, source)
            turned = image.getexif().get(_ORIENTATION, 1) in _TURNED
    except DataError:
        raise
    except Exception as error:  # Pillow raises many kinds, all mean the same to the user
        if isinstance(source, bytes):
            raise DataError(f"{where!s}: not an image or damaged ({error})") from error
        raise DataError(f"{source!s}: {_damage(source, error)}") from error
    return (height, width) if turned else (width, height)


def checked_image(path: str, size: tuple[int, int]) -> None:
    """Decode an image to its end and compare its size (width, height) with what is annotated.

    Raises:
        DataError: damaged, or of another size.
    """
    actual = image_size(path)
    try:
        with Image.open(path) as image:
            image.load()
    except Exception as error:  # Pillow raises many kinds, all mean the same to the user
        raise DataError(f"{path}: {_damage(path, error)}") from error
    if actual != size:
        raise DataError(
            f"{path}: {actual[0]}x{actual[1]} contradicts its annotations, which say "
            f"{size[0]}x{size[1]}"
        )


def _damage(path: str | Path, error: Exception) -> str:
    """What is wrong with an image that cannot be opened."""
    try:
        start = Path(path).read_bytes()[:_LONGEST_LINK]
        target = start.decode().strip()
        if target and (Path(path).parent / target).is_file():
            return (
                f"not an image but a text with the path {target}, as a copied symbolic link can "
                "become; copy the dataset again with its links (cp -a, rsync -a, tar)"
            )
    except (OSError, ValueError):
        pass
    return f"not an image or damaged ({error})"
