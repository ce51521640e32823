"""Checks shared by all readers: paths, image lists, JSON, image headers."""

import contextlib
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from detection.datasets.archives import fetch_command
from detection.datasets.images import OpenURL, check_bits, opened
from moco.common.command import program
from moco.common.errors import DataError
from moco.common.files import read_bytes, read_text, regular
from moco.data.decode import FORMATS

DATASETS_VARIABLE = "DETECTRON2_DATASETS"
_TURNED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_ORIENTATION = 0x0112
_LONGEST_LINK = 255  # bytes


def datasets_root() -> str:
    """Return the folder of Detectron2's own datasets: $DETECTRON2_DATASETS, else `datasets`."""
    return os.path.expanduser(os.environ.get(DATASETS_VARIABLE, "datasets"))


def expected(kind: str, split: str, root: str | Path, otherwise: str = "") -> str:
    """Format the hint of an error about missing files of a published split.

    Args:
        kind: Name of the format.
        split: Name of the split.
        root: Folder of all datasets.
        otherwise: Another way to fix it.
    """
    get = f" get it: {fetch};" if (fetch := fetch_command(split)) else ""
    return (
        f"expected in ${DATASETS_VARIABLE} (now {root}){otherwise};{get} to see the expected "
        f"files: {doctor_command()} {kind}"
    )


def doctor_command() -> str:
    """Return the command that starts the doctor."""
    return program("doctor", "python -m detection.datasets doctor")


def inside(name: Any, where: str) -> str:
    """Return `name` if it is a relative path whose parts cannot lead out of its folder.

    Raises:
        DataError: If it is empty, absolute, contains `..`, or is no text; starts with `where`.
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


def read_json(path: str | Path) -> tuple[Any, str]:
    """Read a JSON file; return its content and the hex SHA-256 of its bytes.

    Raises:
        DataError: If the file cannot be read or is not JSON.
    """
    try:
        raw = read_bytes(path)
        return json.loads(raw), hashlib.sha256(raw).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # also bytes that are not text
        raise DataError(f"{path}: not valid JSON ({error})") from error


def read_ids(path: Path, columns: re.Pattern[str] | None = None) -> list[str]:
    """Read the image ids of a list, one per line, all different.

    Args:
        path: Text file.
        columns: Alternative format of a line, whose first group is the id.

    Raises:
        DataError: If the list is empty, has malformed lines, or an id leads out of the folder.
    """
    try:
        ids = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text file in UTF-8") from error
    if columns:
        ids = [found[1] if (found := columns.fullmatch(line)) else line for line in ids]
    if not ids:
        raise DataError(f"{path}: has no image ids; expected one per line")
    for image_id in ids:
        if len(image_id.split()) != 1:
            raise DataError(f"{path}: line {image_id!r}: expected one image id per line")
        if Path(image_id).name != image_id or image_id == "..":
            raise DataError(f"{path}: id {image_id!r} leads out of the dataset's folder")
    if len(set(ids)) < len(ids):
        twice, _ = Counter(ids).most_common(1)[0]
        raise DataError(f"{path}: {twice} is listed twice")
    return ids


def require_files(files: Sequence[str], what: str, hint: str) -> None:
    """Check that all files exist, by listing each folder once and opening none of them.

    Raises:
        DataError: If files are missing. The message has their number (`what` names the files) and
            the first, and ends with existing files of the same stem, or else with `hint`.
    """
    if missing := absent(files):
        folder, name = os.path.split(missing[0])
        stem = os.path.splitext(name)[0].lower()
        alike = sorted(n for n in names_in(folder) if os.path.splitext(n)[0].lower() == stem)
        number = f"missing ({len(missing)} of the {len(files)} {what})"
        hint = f"{', '.join(alike)} exists" if alike else hint
        raise DataError(f"{missing[0]}: {number}; {hint}")


def absent(files: Sequence[str]) -> list[str]:
    """Return the `files` that do not exist."""
    listed = {folder: names_in(folder) for folder in {os.path.dirname(file) for file in files}}
    return [file for file in files if os.path.basename(file) not in listed[os.path.dirname(file)]]


def names_in(folder: str) -> set[str]:
    """Return the names in a folder; empty if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries}
    except OSError:
        return set()


def is_turned(path: str | Path) -> bool:
    """Return whether an image's EXIF orientation rotates or mirrors it; False if it is damaged."""
    with contextlib.suppress(Exception), Image.open(regular(path), formats=FORMATS) as image:
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
        with opened(str(path), open_url) as file, Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            check_bits(image, path)
            turned = image.getexif().get(_ORIENTATION, 1) in _TURNED
            if decode:
                image.load()
    except DataError:
        raise
    except Exception as error:  # Pillow raises many types, all with the same meaning here
        raise DataError(f"{path}: {_damage(path, error)}") from error
    return (height, width) if turned else (width, height)


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
