"""Size limits for untrusted files: pickles, YAML, configs, zip archives."""

from __future__ import annotations

import os
import zipfile
from collections import OrderedDict
from typing import Any, BinaryIO

MAX_LEVELS = 100
MAX_BITS = 1000  # of an integer: float() does not overflow, and Python can print it
_ZIP_END, _ZIP_END_BYTES = b"PK\5\6", 22


class CorruptFileError(ValueError):
    """Untrusted file that declares more data than it contains; the message names what."""


def check_parts(root: Any, limit: int) -> None:
    """Raise CorruptFileError if a nested value has too many parts or levels.

    Args:
        root: Nested dictionaries, lists and tuples; other types and subclasses have no parts.
        limit: Largest number of parts; a part that is referred to several times counts each time.
    """
    done: dict[int, tuple[int, int]] = {}

    def measure(value: Any, depth: int) -> tuple[int, int]:
        """Return the number of parts and levels of a value at `depth`; `done` has them by id."""
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise CorruptFileError(f"a whole number of {value.bit_length()} bits")
        if type(value) not in (dict, OrderedDict, list, tuple):
            return 1, 0
        count, levels = done.get(id(value), (1, 1))
        if id(value) not in done and depth <= MAX_LEVELS:
            for part in value.values() if isinstance(value, dict) else value:
                parts, below = measure(part, depth + 1)
                count, levels = count + parts, max(levels, below + 1)
            done[id(value)] = count, levels
        if depth + levels > MAX_LEVELS:
            raise CorruptFileError(f"nested more than {MAX_LEVELS} levels deep")
        if count > limit:
            raise CorruptFileError(f"more than {limit} parts, or one named again and again")
        return count, levels

    measure(root, 0)


def open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """Open a zip archive; its list of parts takes about ten times its size in memory.

    Raises:
        CorruptFileError: If bytes follow the archive.
        zipfile.BadZipFile: If the file is not a zip archive.
    """
    archive = zipfile.ZipFile(file)
    file.seek(-_ZIP_END_BYTES, os.SEEK_END)
    if not file.read().startswith(_ZIP_END):
        raise CorruptFileError("bytes follow its end")
    return archive


def read_part(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Read a part of an archive in no more memory than its entry declares.

    `ZipFile.read` can inflate a few bytes to gigabytes before it compares the size with that of the
    entry. Only deflation can be stopped midway, so other methods are refused.

    Raises:
        CorruptFileError: If the part is compressed by another method.
        zipfile.BadZipFile: If the part is not as long as its entry declares.
    """
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise CorruptFileError(f"{info.filename[:60]!r}: compressed by method {info.compress_type}")
    with archive.open(info) as file:
        return file.read(info.file_size)
