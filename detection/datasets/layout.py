"""The checks that all readers share: of paths, lists, JSON, image headers."""

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
from moco.data.decode import FORMATS

DATASETS_VARIABLE = "DETECTRON2_DATASETS"
_TURNED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_ORIENTATION = 0x0112
_LONGEST_LINK = 255  # bytes


def datasets_root() -> str:
    """The folder of Detectron2's own datasets: $DETECTRON2_DATASETS, else `datasets`."""
    return os.path.expanduser(os.environ.get(DATASETS_VARIABLE, "datasets"))


def expected(kind: str, split: str, root: str | Path, otherwise: str = "") -> str:
    """The end of a message about missing files of a published split.

    Args:
        kind: the format's name; root: the folder of all datasets; otherwise: another way.
    """
    get = f" get it: {fetch};" if (fetch := fetch_command(split)) else ""
    return (
        f"expected in ${DATASETS_VARIABLE} (now {root}){otherwise};{get} what is expected: "
        f"{doctor_command()} {kind}"
    )


def doctor_command() -> str:
    """How the doctor is started."""
    return program("doctor", "python -m detection.datasets doctor")


def inside(name: Any, where: str) -> str:
    """`name`, if it is a relative path that by its parts cannot lead out of its folder.

    Raises:
        DataError: empty, absolute, with a `..` in it, or not text; begins with `where`.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise DataError(f"{where}: got {name!r}, expected the name of a file")
    if os.path.isabs(name) or ".." in name.replace("\\", "/").split("/"):
        raise DataError(f"{where}: {name!r} leads out of the dataset's folder")
    return name


def read_json(path: str | Path) -> tuple[Any, str]:
    """The content of a JSON file, and the hex SHA-256 of its bytes.

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


def read_ids(path: Path, columns: re.Pattern[str] | None = None) -> list[str]:
    """The image ids of a list, one per line, none of them twice.

    Args:
        columns: another form of a line, whose first group is the id.

    Raises:
        DataError: empty, odd lines, or an id that would lead out of the folder.
    """
    try:
        ids = [
            line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
        ]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text file") from error
    if columns:
        ids = [found[1] if (found := columns.fullmatch(line)) else line for line in ids]
    if not ids:
        raise DataError(f"{path}: no image ids in it; expected one per line")
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
    """Every file exists; each folder is listed once, no file is opened.

    Raises:
        DataError: how many of the `files` (called `what`) are missing, and the first; ends with the
            files of its name but for the ending, or with `hint`.
    """
    if missing := absent(files):
        folder, name = os.path.split(missing[0])
        stem = os.path.splitext(name)[0].lower()
        alike = sorted(n for n in names_in(folder) if os.path.splitext(n)[0].lower() == stem)
        number = f"missing ({len(missing)} of the {len(files)} {what})"
        hint = f"{', '.join(alike)} exists" if alike else hint
        raise DataError(f"{missing[0]}: {number}; {hint}")


def absent(files: Sequence[str]) -> list[str]:
    """Those of `files` that do not exist."""
    listed = {folder: names_in(folder) for folder in {os.path.dirname(file) for file in files}}
    return [file for file in files if os.path.basename(file) not in listed[os.path.dirname(file)]]


def names_in(folder: str) -> set[str]:
    """The names in a folder; none if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries}
    except OSError:
        return set()


def is_turned(path: str | Path) -> bool:
    """Return whether an image's EXIF orientation turns or mirrors it; False where it is damaged."""
    with contextlib.suppress(Exception), Image.open(path, formats=FORMATS) as image:
        return image.getexif().get(_ORIENTATION) in range(2, 9)
    return False


def image_size(
    path: str | Path, *, decode: bool = False, open_url: OpenURL | None = None
) -> tuple[int, int]:
    """Read the (width, height) of an image as it is shown (EXIF orientation), px, from its header.

    Raises:
        DataError: not an image, of more than 8 bits, or, to `decode`, damaged.
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
    except Exception as error:  # Pillow raises many kinds, all mean the same to the user
        raise DataError(f"{path}: {_damage(path, error)}") from error
    return (height, width) if turned else (width, height)


def _damage(path: str | Path, error: Exception) -> str:
    """What is wrong with an image that cannot be opened."""
    with contextlib.suppress(OSError, ValueError):
        target = Path(path).read_bytes()[:_LONGEST_LINK].decode().strip()
        if target and (Path(path).parent / target).is_file():
            return (
                f"not an image but a text with the path {target}, as a copied symbolic link can "
                "become; copy the dataset again with its links (cp -a, rsync -a, tar)"
            )
    return f"not an image or damaged ({error})"
