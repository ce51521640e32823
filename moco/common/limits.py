"""Limits on what is read from files of others: pickles, YAML, configs, zip archives."""

from __future__ import annotations

import os
import struct
import zipfile
from collections import OrderedDict
from typing import Any, BinaryIO

MAX_DEPTH = 100
MAX_BITS = 1000  # float() of it does not overflow, and Python prints it
_SINGLE = frozenset({str, float, bool, type(None)})
_ZIP_END, _ZIP_END_BYTES = b"PK\5\6", 22
# A file of 5 GB lists its parts in 2 MB; each byte of a list takes about ten of memory.
MAX_LIST_BYTES = 16 << 20


class Implausible(ValueError):
    """The file claims more than it can hold; the message says what."""


def check_parts(root: Any, limit: int) -> None:
    """Raise Implausible unless a walk through all parts of a value ends soon.

    Args:
        root: dictionaries, lists and tuples; anything else, a subclass among it, has no parts.
        limit: number of parts, each counted as often as it can be reached.
    """
    _measure(root, 0, limit, {})


def _measure(
    value: Any, depth: int, limit: int, done: dict[int, tuple[int, int]]
) -> tuple[int, int]:
    """Parts and levels of a value that is N levels below the root; `done` has them by identity."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise Implausible(f"a whole number of {value.bit_length()} bits")
    if type(value) not in (dict, OrderedDict, list, tuple):
        return 1, 0
    count, levels = done.get(id(value), (1, 1))
    if id(value) not in done and depth <= MAX_DEPTH:
        for part in value.values() if isinstance(value, dict) else value:
            kind = type(part)
            if kind in _SINGLE or (kind is int and part.bit_length() <= MAX_BITS):
                count += 1  # most of a record, without a call
                continue
            parts, below = _measure(part, depth + 1, limit, done)
            count, levels = count + parts, max(levels, below + 1)
        done[id(value)] = count, levels
    if depth + levels > MAX_DEPTH:
        raise Implausible(f"nested more than {MAX_DEPTH} levels deep")
    if count > limit:
        raise Implausible(f"more than {limit} parts, or one named again and again")
    return count, levels


def open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """A zip archive whose list of parts fits into memory, and that nothing follows.

    Raises:
        Implausible: it does not, or something does; zipfile.BadZipFile: it is none.
    """
    file.seek(-min(_ZIP_END_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
    end = file.read().ljust(_ZIP_END_BYTES)
    signature, list_bytes = struct.unpack("<4s8xI6x", end)
    if signature == _ZIP_END and MAX_LIST_BYTES < list_bytes < 2**32 - 1:
        raise Implausible(f"its list of parts claims more than {MAX_LIST_BYTES} bytes")
    archive = zipfile.ZipFile(file)
    if signature != _ZIP_END:
        archive.close()
        raise Implausible("bytes follow its end")
    return archive


def read_part(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Read a part of an archive in no more memory than its entry says.

    `ZipFile.read` inflates gigabytes from a few bytes before it compares with that size; of the
    methods of compression only deflation can be stopped.

    Raises:
        Implausible: another method; zipfile.BadZipFile: the part is not as long as it says.
    """
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Implausible(f"{info.filename[:60]!r}: compressed by method {info.compress_type}")
    with archive.open(info) as file:
        return file.read(info.file_size)
