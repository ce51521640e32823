"""Zip and tar archives of untrusted origin: checked as a whole, then unpacked as plain files.

Nothing is written before every name, kind and size in the archive is known to be harmless: no name
leads out of the folder, everything is a file or folder, no file is there twice, and all of it
together fits the given limit and the disk.
"""

import posixpath
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from detection.datasets.layout import inside
from moco.common.errors import DataError, UserError, shown
from moco.common.files import cannot_write
from moco.common.progress import Progress

_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,  # a method of compression
    ValueError,
    OverflowError,
    MemoryError,
)


@dataclass(frozen=True)
class _Member:
    """A file in an archive, its declared size in bytes, and how it is read."""

    name: str
    size: int
    open: Callable[[], IO[bytes]]


def unpack(
    archive: Path, folder: Path, takes: Collection[str] = ("",), strip: int = 0, limit: int = 0
) -> None:
    """Unpack into `folder`, which is created.

    Args:
        takes: beginnings of the names that are wanted; others are checked and left out.
        strip: number of folders to strip from the names.
        limit: bytes that the files have at most; 0: not known.

    Raises:
        DataError: damaged, or anything in it that leads out of the folder, is no file or folder, is
            there twice, or is larger than declared.
        UserError: not enough space.
    """
    try:
        with ExitStack() as stack:
            wanted = _wanted(archive, stack, takes, strip)
            total = sum(member.size for member in wanted.values())
            if limit and total > limit:
                what = f"declares files of {total} bytes, expected at most {limit}"
                raise DataError(f"{archive}: {what}; refused, and nothing was unpacked")
            folder.mkdir(parents=True)
            if total > (free := shutil.disk_usage(folder).free):
                raise UserError(
                    f"{folder}: unpacking {archive.name} needs {total} bytes, {free} are free; "
                    "free space, or choose another folder with --root"
                )
            with Progress(len(wanted), f"unpack {archive.name}", "file") as progress:
                for path, member in wanted.items():
                    _write(archive, folder / path, member)
                    progress.update()
    except OSError as error:
        if error.errno is not None:  # gzip's own has none
            raise cannot_write(folder, error, 0) from error
        raise _damaged(archive, error) from error
    except _DAMAGED as error:
        raise _damaged(archive, error) from error


def _damaged(archive: Path, error: Exception) -> DataError:
    return DataError(
        f"{archive}: not a zip or tar archive, or damaged ({error}); remove it and run again"
    )


def _wanted(
    archive: Path, stack: ExitStack, takes: Collection[str], strip: int
) -> dict[str, _Member]:
    """Path → member, once all of the archive is checked."""
    members: Iterator[_Member]
    if archive.suffix == ".zip":
        members = _zip_members(archive, stack.enter_context(zipfile.ZipFile(archive)))
    else:
        members = _tar_members(archive, stack.enter_context(tarfile.open(archive)))  # noqa: SIM115
    seen: set[str] = set()
    wanted = {}
    for member in members:
        name = _checked(archive, member.name)
        if name in seen:
            raise DataError(f"{archive}: {shown(name)} is in it twice; refused")
        seen.add(name)
        if name.startswith(tuple(takes)):
            wanted["/".join(name.split("/")[strip:])] = member
    for name in seen:
        if not seen.isdisjoint(map(str, PurePosixPath(name).parents)):
            raise DataError(f"{archive}: {shown(name)} is in a folder that is also a file; refused")
    if not wanted:
        raise DataError(f"{archive}: has none of {', '.join(takes)}; it is another archive")
    return wanted


def _checked(archive: Path, name: str) -> str:
    """A member's name, normalized.

    Raises:
        DataError: it is absolute, leads out, or means different files on different systems.
    """
    inside(name, f"{archive}")
    if "\\" in name or re.match("[A-Za-z]:", name):
        raise DataError(f"{archive}: {shown(name)} has a drive or backslashes in it; refused")
    return posixpath.normpath(name)


def _zip_members(path: Path, archive: zipfile.ZipFile) -> Iterator[_Member]:
    for info in archive.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)
        # The name that zipfile shows ends at a NUL.
        _checked(path, info.orig_filename)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR) or info.flag_bits & 1:
            raise _refused(path, info.filename)
        if not info.is_dir():
            yield _Member(info.filename, info.file_size, partial(archive.open, info))


def _tar_members(path: Path, archive: tarfile.TarFile) -> Iterator[_Member]:
    offset = -1
    while info := archive.next():
        # Sizes that are negative lead back, for ever (CVE-2025-8194).
        if not offset < info.offset_data <= info.offset_data + info.size:
            raise tarfile.ReadError(f"{shown(info.name)} has {info.size} bytes")
        offset = info.offset_data
        _checked(path, info.name)
        if not (info.isdir() or info.isreg()) or info.issparse():
            raise _refused(path, info.name)
        if info.isreg():
            yield _Member(info.name, info.size, partial(_open, archive, info))


def _open(archive: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    file = archive.extractfile(info)
    assert file is not None  # only links and folders have none
    return file


def _refused(archive: Path, name: str) -> DataError:
    what = "a link, device or encrypted file, expected files and folders"
    return DataError(f"{archive}: {shown(name)} is {what}; refused, and nothing was unpacked")


def _write(archive: Path, path: Path, member: _Member) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with member.open() as source, open(path, "xb") as file:
        left = member.size
        while chunk := source.read(min(left, 1 << 20)):
            file.write(chunk)
            left -= len(chunk)
        if left or source.read(1):
            raise DataError(f"{archive}: {shown(member.name)} is not as large as declared; damaged")
