"""Where the members of a tar are, read from its headers (ustar, GNU and pax).

Nothing is extracted. Python's tarfile takes a damaged header for the end of the tar, which would
lose the pictures behind it, and loops for ever over a negative size (CVE-2025-8194).
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from moco.errors import DataError

MAX_NAME_BYTES = 1 << 20  # of a long name or extended header; the longest paths have 4 KiB

_BLOCK = 512
_FILE, _LONG_NAME, _EXTENDED = b"0\0", b"L", b"x"
_NO_MEMBER = b"5gKV"  # folder, global header, long name of a link, label
_WITHOUT_DATA = b"123456"  # links, devices, folders
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """A regular file in a tar: its path there, and where its bytes are."""

    name: str
    offset: int
    size: int


def members(path: Path, file: BinaryIO, wanted: Callable[[str], bool]) -> Iterator[Member]:
    """The regular files whose names are ``wanted``, in the tar's order.

    Args:
        path: of the open ``file``, for messages.

    Raises:
        DataError: compressed, truncated, damaged, no tar, or a link or device of a wanted name.
    """
    end = os.fstat(file.fileno()).st_size
    offset, long_name, size_given = 0, None, None
    while True:
        header = os.pread(file.fileno(), _BLOCK, offset)
        where = f"{path}: at byte {offset}"
        if offset == 0:
            _refuse_compressed(path, header)
        if len(header) < _BLOCK:
            if offset == 0:
                raise DataError(f"{path}: {end} bytes, not a tar; was it copied completely?")
            raise DataError(f"{where}: the tar ends without its end mark; copied completely?")
        if header == bytes(_BLOCK):
            if os.pread(file.fileno(), 20 * _BLOCK, offset).strip(b"\0"):
                raise DataError(f"{where}: more data behind the tar's end; joined by cat? Use tar")
            return
        checksum = sum(header) - sum(header[148:156]) + 8 * ord(" ")
        if header[148:156].strip(b" \0").lstrip(b"0") != b"%o" % checksum:
            raise DataError(f"{where}: not the header of a tar's member; damaged, or not a tar")
        kind, data = header[156:157], offset + _BLOCK
        if kind in _WITHOUT_DATA:
            size = 0
        else:
            size = size_given if size_given is not None else _number(header[124:136], where)
        if data + size > end:
            raise DataError(
                f"{where}: a member of {size} bytes goes beyond the end; was it copied completely?"
            )
        offset = data + -(-size // _BLOCK) * _BLOCK
        if kind in (_LONG_NAME, _EXTENDED):
            if size > MAX_NAME_BYTES:
                raise DataError(f"{where}: a name of {size} bytes; damaged?")
            content = os.pread(file.fileno(), size, data)
            if kind == _LONG_NAME:
                long_name = _text(content)
            else:
                long_name, size_given = _extended(content, where, long_name)
            continue
        name = long_name if long_name is not None else _name(header)
        long_name = size_given = None
        if not wanted(name):
            continue
        if kind in _FILE:
            yield Member(name, data, size)
        elif kind not in _NO_MEMBER:
            raise DataError(
                f"{path}:{printable(name)}: a link or special file, which has no content "
                "here; write the tar with the contents instead (tar -h)"
            )


def _refuse_compressed(path: Path, start: bytes) -> None:
    for magic, kind in _COMPRESSED.items():
        if start.startswith(magic):
            raise DataError(f"{path}: {repack(f'compressed with {kind}')}")


def _number(field: bytes, where: str) -> int:
    """A size: octal digits, or GNU's base 256 for more than 8 GiB."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    return _digits(field.strip(b" \0"), 8, where)


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _extended(content: bytes, where: str, name: str | None) -> tuple[str | None, int | None]:
    """Path and size of a pax header, whose records are ``length key=value\\n``."""
    size = None
    while content:
        digits = content.split(b" ", 1)[0]
        length = int(digits) if digits.isdigit() and len(digits) < 9 else 0
        record = content[len(digits) + 1 : length]
        if not len(digits) + 1 < length <= len(content) or record[-1:] != b"\n":
            raise DataError(f"{where}: a damaged extended header")
        key, _, value = record[:-1].partition(b"=")
        if key == b"path":
            name = _text(value)
        elif key == b"size":
            size = _digits(value, 10, where)
        content = content[length:]
    return name, size


def _digits(field: bytes, base: int, where: str) -> int:
    try:
        value = int(field[:24].decode("ascii"), base)
    except ValueError:
        value = -1
    if value < 0:
        raise DataError(f"{where}: a member's size is not a number; damaged?")
    return value


def _text(field: bytes) -> str:
    return os.fsdecode(field.split(b"\0", 1)[0])


def printable(name: str) -> str:
    """A member's name for a message: what could move the cursor becomes ``?``."""
    return "".join(c if c.isprintable() else "?" for c in name)


def repack(what: str) -> str:
    """What to do with a compressed tar."""
    return (
        f"{what}, which cannot be read at random; pictures are compressed as they are: unpack it "
        "to a plain .tar"
    )
