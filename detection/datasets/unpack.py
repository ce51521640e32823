"""Safe unpacking of untrusted zip and tar archives: validated as a whole, then written as files.

Nothing is written before every name, type and size in the archive is known to be harmless: no name
leads out of the folder, every member is a file or folder, no name occurs twice, and the total size
fits the given limit and the disk.
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
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from detection.datasets.layout import inside
from moco.common.errors import DataError, UserError, shown
from moco.common.files import cannot_write, open_file, regular
from moco.common.progress import Progress

_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    ValueError,
    OverflowError,
    NotImplementedError,  # an unknown compression method
    MemoryError,
)


class _Member(NamedTuple):
    """Entry of an archive; `plain` if it is an unencrypted file or folder."""

    name: str
    plain: bool
    is_folder: bool
    size: int
    open: Callable[[], IO[bytes] | None]


def unpack(
    archive: Path, folder: Path, takes: Collection[str] = ("",), strip: int = 0, limit: int = 0
) -> None:
    """Unpack an archive into `folder`, which is created.

    Args:
        archive: Zip or tar file.
        folder: Folder to create.
        takes: Prefixes of the wanted names; other members are validated and left out.
        strip: Number of leading folders to strip from the names.
        limit: Maximum total size of the files in bytes; 0 if unknown.

    Raises:
        DataError: If the archive is damaged, or a member leads out of the folder, is neither file
            nor folder, occurs twice, or is not as large as declared.
        UserError: If there is too little disk space.
    """
    try:
        with ExitStack() as stack:
            members: Iterator[_Member]
            if archive.suffix == ".zip":
                members = _zip_members(stack.enter_context(zipfile.ZipFile(regular(archive))))
            else:
                members = _tar_members(stack.enter_context(tarfile.open(regular(archive))))
            wanted = _wanted(archive, members, tuple(takes), strip)
            total = sum(member.size for member in wanted.values())
            if limit and total > limit:
                raise _refused(archive, f"files of {total} bytes, at most {limit} are expected")
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
    except (OSError, *_DAMAGED) as error:
        if isinstance(error, OSError) and error.errno is not None:  # gzip's own errors have none
            raise cannot_write(folder, error, 0) from error
        raise DataError(
            f"{archive}: not a zip or tar archive, or damaged ({error}); remove it and run again"
        ) from error


def _wanted(
    archive: Path, members: Iterator[_Member], takes: tuple[str, ...], strip: int
) -> dict[str, _Member]:
    """Validate all members, and return the wanted files by path."""
    files: dict[str, _Member] = {}
    for member in members:
        inside(member.name, f"{archive}")
        name = posixpath.normpath(member.name)
        if "\\" in name or re.match("[A-Za-z]:", name):
            raise _refused(archive, f"{shown(name)}, a drive or backslashes in a name")
        if not member.plain:
            raise _refused(archive, f"{shown(name)}, a link, device or encrypted file")
        if name in files:
            raise _refused(archive, f"{shown(name)} twice")
        if not member.is_folder:
            files[name] = member
    for name in files:
        if not files.keys().isdisjoint(map(str, PurePosixPath(name).parents)):
            raise _refused(archive, f"{shown(name)} in a folder that is also a file")
    wanted = {n.split("/", strip)[strip]: m for n, m in files.items() if n.startswith(takes)}
    if not wanted:
        raise _refused(archive, f"none of {', '.join(takes)}")
    return wanted


def _zip_members(archive: zipfile.ZipFile) -> Iterator[_Member]:
    for info in archive.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)
        plain = kind in (0, stat.S_IFREG, stat.S_IFDIR) and not info.flag_bits & 1
        opened = partial(archive.open, info)
        # `info.filename` is cut at a NUL; the check needs the original name.
        yield _Member(info.orig_filename, plain, info.is_dir(), info.file_size, opened)


def _tar_members(archive: tarfile.TarFile) -> Iterator[_Member]:
    offset = -1
    while info := archive.next():
        # A negative size leads back and loops forever (CVE-2025-8194).
        if not offset < info.offset_data <= info.offset_data + info.size:
            raise tarfile.ReadError(f"{shown(info.name)} has {info.size} bytes")
        offset = info.offset_data
        plain = (info.isdir() or info.isreg()) and not info.issparse()
        opened: Any = partial(archive.extractfile, info)
        yield _Member(info.name, plain, info.isdir(), info.size, opened)


def _refused(archive: Path, what: str) -> DataError:
    return DataError(f"{archive}: has {what}; refused, and nothing was unpacked")


def _write(archive: Path, path: Path, member: _Member) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    source = member.open()
    assert source is not None  # only links and folders have none
    with source, open_file(path, "xb") as file:
        shutil.copyfileobj(source, file, 1 << 20)  # both readers end at the declared size
        if file.tell() != member.size:
            raise DataError(f"{archive}: {shown(member.name)} is not as large as declared; damaged")
