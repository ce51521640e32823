"""Checks shared by all readers: paths, image lists, JSON, image headers."""

import contextlib
import hashlib
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, TiffImageFile

from detection.datasets.archives import fetch_command
from detection.datasets.images import OpenURL, check_bits, opened
from moco.common.command import program
from moco.common.errors import DataError, first_few
from moco.common.files import read_bytes, read_text, regular
from moco.data.decode import FORMATS

DATASETS_VARIABLE = "DETECTRON2_DATASETS"
_TURNED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_ORIENTATION = 0x0112
_LONGEST_LINK = 255  # bytes
_NAMED = 5  # files and folders in a message


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


def slashed(name: str, folder: str | Path) -> str:
    """Return a name below a folder with slashes if only Windows would find it with backslashes."""
    with_slashes = name.replace("\\", "/")
    return name if name == with_slashes or Path(folder, name).exists() else with_slashes


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
    """Read the image ids of a list, one per line, all different; an id may have blanks.

    Args:
        path: Text file.
        columns: Alternative format of a line, whose first group is the id.

    Raises:
        DataError: If the list is empty, has malformed lines, or an id leads out of the folder.
    """
    try:
        lines = read_text(path, "utf-8-sig").splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text file in UTF-8") from error
    ids = [line.strip() for line in lines if line.strip()]
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
        found = f"{', '.join(alike)} exists" if alike else other_spelling(missing[0])
        raise DataError(f"{missing[0]}: {number}; {found or hint}")


def other_spelling(path: str | Path) -> str:
    """Return the hint that a missing file exists under another spelling of its name, or ""."""
    folder, name = os.path.split(path)
    for other, why in spellings(name).items():
        if os.path.exists(os.path.join(folder, other)):
            return f"{other!r} exists: {why}"
    return ""


def spellings(name: str) -> dict[str, str]:
    """Return other spellings of a file's name → why both differ, and what to do."""
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


def contents(folder: str | Path) -> str:
    """Return what a folder has, for messages: `it has a/, b.txt`, where a/ is a folder."""
    names = [f"{name}/" if Path(folder, name).is_dir() else name for name in names_in(str(folder))]
    shown = sorted(name for name in names if name[0] != ".")
    return f"it has {first_few(shown, _NAMED)}" if shown else "it is empty"


def inner_folders(folder: Path, depth: int = 2) -> Iterator[Path]:
    """Yield the folders below a folder, down to VOCdevkit/VOC2007."""
    for name in sorted(names_in(str(folder))) if depth else ():
        if name[0] != "." and (inner := folder / name).is_dir():
            yield inner
            yield from inner_folders(inner, depth - 1)


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
            width, height = _stored_size(image)
            check_bits(image, path)
            turned = image.getexif().get(_ORIENTATION, 1) in _TURNED
            if decode:
                image.load()
    except DataError:
        raise
    except Exception as error:  # Pillow raises many types, all with the same meaning here
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
