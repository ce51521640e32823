"""Download, verification and unpacking of published datasets from their official archives.

An archive is downloaded to `archives/` in the folder of all datasets, unpacked into a scratch
folder next to its target, moved there, and removed. So no file is ever half-written under its final
name, however the process ends, and the next call continues with what is missing.

Archives are untrusted. Nothing is written before every name, type and size in an archive is known
to be harmless: tarfile's data filter and zipfile alone would rename members that lead out of the
folder instead of refusing them, and write those before the refused one.
"""

import filecmp
import functools
import hashlib
import os
import posixpath
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from PIL import Image
from tabulate import tabulate
from tqdm import tqdm

from detection.datasets.base import doctor_command
from detection.datasets.files import DATASETS_VARIABLE, check_relative, read_ids
from moco.common.cfgnode import read_own_yaml
from moco.common.command import program, quote
from moco.common.download import download, has_digest
from moco.common.errors import DataError, LockedError, UserError, echo, format_value
from moco.common.files import (
    TEMPORARY_PREFIX,
    existing_folder,
    open_file,
    require_regular,
    write_error,
)
from moco.common.progress import Progress, format_seconds

FILE = Path(__file__).with_name("archives.yaml")
ARCHIVES = "archives"  # subfolder of the folder of all datasets
MBIT_PER_SECOND = 100  # assumed for the estimated duration
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


@dataclass(frozen=True)
class Archive:
    """One file to download; the header of archives.yaml documents the fields."""

    name: str
    folder: str
    complete: tuple[str, ...]
    takes: tuple[str, ...] = ()
    strip: int = 0
    url: str = ""
    size: int = 0
    about: int = 0
    hash: str = ""
    contents: str = ""
    source: str = ""
    prepare: str = ""

    def present(self, root: Path) -> bool:
        """Return whether the archive is unpacked below `root`, the folder of all datasets."""
        return all((root / self.folder / path).exists() for path in self.complete)


@dataclass(frozen=True)
class Dataset:
    """A dataset that `datasets fetch` gets; the header of archives.yaml documents the fields."""

    name: str
    contains: str
    doctor: str
    splits: tuple[str, ...]
    archives: tuple[Archive, ...]
    terms: str
    custom: str = ""
    account: str = ""
    license: str = ""


@functools.cache
def datasets() -> dict[str, Dataset]:
    """Return all datasets that can be fetched, by name."""
    facts = read_own_yaml(FILE)
    archives = {name: Archive(name, **_fields(a)) for name, a in facts["archives"].items()}
    for dataset in facts["datasets"].values():
        dataset["archives"] = [archives[name] for name in dataset["archives"]]
    return {name: Dataset(name, **_fields(d)) for name, d in facts["datasets"].items()}


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """Drop null values and turn lists into tuples, so that the dataclasses are hashable."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if v is not None}


def fetch_command(*splits: str, root: str = "") -> str:
    """Return the command that fetches the datasets with these splits, or "" if there is none."""
    every = datasets().values()
    names = [next((d.name for d in every if split in d.splits), "") for split in splits]
    arguments = [*filter(None, dict.fromkeys(names)), *(["--root", root] if root else [])]
    start = program("datasets")
    return f"{start} fetch {quote(*arguments)}" if any(names) else ""


def fetch_hint(kind: str, split: str, root: str | Path, otherwise: str = "") -> str:
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


def format_listing(root: Path) -> str:
    """Format a table of all datasets: what is present below `root`, size, contents, terms."""
    rows = []
    for dataset in datasets().values():
        present, number = sum(a.present(root) for a in dataset.archives), len(dataset.archives)
        state = {0: "absent", number: "present"}.get(present, f"{present} of {number} archives")
        size = total_size(dataset.archives) + (", needs an account" if dataset.account else "")
        rows.append((dataset.name, state, size, f"{dataset.contains}\n{dataset.terms}"))
    return tabulate(rows, ("name", "state", "download", "contents, terms of use"), "plain")


@dataclass(frozen=True)
class Fetcher:
    """Download of published datasets into a folder.

    Attributes:
        root: Folder of all datasets.
        mirror: URL of a folder with the same files; "" for the official addresses.
        keep: Whether to keep the archives after unpacking.
        again: Whether to fetch archives that are already unpacked, and add their missing files.
        dry_run: Whether to print the plan only.
        split: Function that writes the splits of an unpacked dataset without any.
    """

    root: Path
    mirror: str
    keep: bool
    again: bool
    dry_run: bool
    split: Callable[[Path], None]

    def fetch(self, wanted: Sequence[Dataset]) -> bool:
        """Print the plan, then download, verify and unpack what is missing of the datasets.

        Returns:
            True if anything was missing.

        Raises:
            UserError: If there is no network or too little space, or an archive needs an account.
            DataError: If the hash of an archive is not the published one, an archive is damaged or
                malicious, or a different file exists under a name of the archive.
            LockedError: If another process fetches into the same folder.
        """
        for dataset in wanted:
            self._check_account(dataset)
        missing = list(dict.fromkeys(a for dataset in wanted for a in self._missing(dataset)))
        echo(*self._plan(missing).splitlines())
        print("terms of use:", *dict.fromkeys(d.terms for d in wanted), flush=True)
        for dataset in filter(lambda d: d.license, wanted):
            print(f"{dataset.name}: {dataset.license}", flush=True)
        if self.dry_run:
            return True
        if missing:
            self._get_all(missing)
        if unchecked := [a.name for a in missing if not (a.hash or a.contents)]:
            print(f"not verified, because no hash is published: {', '.join(unchecked)}")
        return bool(missing)

    def _missing(self, dataset: Dataset) -> list[Archive]:
        return [a for a in dataset.archives if self.again or not a.present(self.root)]

    def _file(self, archive: Archive) -> Path:
        return self.root / ARCHIVES / archive.name

    def _address(self, archive: Archive) -> str:
        """Return the URL of an archive, or "" if it needs an account."""
        return f"{self.mirror.rstrip('/')}/{archive.name}" if self.mirror else archive.url

    def _check_account(self, dataset: Dataset) -> None:
        files = [self._file(a) for a in self._missing(dataset) if not self._address(a)]
        if absent := [file.name for file in files if not file.is_file()]:
            raise UserError(
                f"{dataset.name} needs an account: log in at {dataset.account}, download "
                f"{' and '.join(absent)} into {self.root / ARCHIVES}, then: "
                f"{fetch_command(*dataset.splits, root=str(self.root))}"
            )

    def _plan(self, missing: Sequence[Archive]) -> str:
        """Describe what will be downloaded, with sizes, estimated duration and disk space."""
        if not missing:
            return f"in {self.root}: everything is present"
        absent = [archive for archive in missing if not self._file(archive).is_file()]
        seconds = 8 * sum(map(_bytes, absent)) / MBIT_PER_SECOND / 1e6
        places = [self._address(a) if a in absent else self._file(a) for a in missing]
        rows = [(total_size([a]), place) for a, place in zip(missing, places, strict=True)]
        return (
            f"to {self.root}:\n{tabulate(rows, tablefmt='plain', colalign=('right',))}\n"
            f"download {total_size(absent)}: {format_seconds(seconds)} at "
            f"{MBIT_PER_SECOND} Mbit/s\n"
            f"disk space {_format_size(self._needed(missing))} or more, "
            f"{_format_size(self._free())} are free"
        )

    def _needed(self, missing: Sequence[Archive]) -> int:
        """Estimate the peak disk usage in bytes, as if nothing were compressed."""
        used = needed = 0
        for archive in missing:
            used += _bytes(archive) * (1 if self._file(archive).is_file() else 2)
            needed = max(needed, used)
            used -= 0 if self.keep else _bytes(archive)
        return needed

    def _free(self) -> int:
        return shutil.disk_usage(existing_folder(self.root)).free

    def _get_all(self, missing: Sequence[Archive]) -> None:
        if (needed := self._needed(missing)) > (free := self._free()):
            raise UserError(
                f"{self.root}: {_format_size(needed)} or more are needed, {_format_size(free)} are "
                "free; free space, or choose another folder with --root"
            )
        folder = self.root / ARCHIVES
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock", timeout=0):
                for archive in missing:
                    self._get(archive)
        except Timeout as error:
            raise LockedError(f"{folder}: another process is fetching datasets into it") from error
        except OSError as error:
            raise write_error(folder, error, 0) from error

    def _get(self, archive: Archive) -> None:
        """Download, check and unpack one archive."""
        file = self._file(archive)
        if address := self._address(archive):
            # COCO's server has no https; its files are verified by their hashes.
            download(address, file, archive.hash, archive.size, allow_http=True)
        elif archive.hash and not has_digest(file, archive.hash):
            raise DataError(f"{file}: not the published file ({archive.hash}); download it again")
        _place(archive, file, self.root / archive.folder, self.split)
        if address and not self.keep:  # the user downloaded what needs an account, and keeps it
            file.unlink()
            file.with_name(f".{file.name}.lock").unlink(missing_ok=True)


def _place(archive: Archive, file: Path, target: Path, split: Callable[[Path], None]) -> None:
    """Unpack an archive into a scratch folder in `target`, and move the contents to their place."""
    scratch = target / f"{TEMPORARY_PREFIX}{archive.name}"
    shutil.rmtree(scratch, ignore_errors=True)  # left by a call that was killed
    content = scratch / "content"
    try:
        if archive.takes:
            # An uncompressed tar is larger than the files in it.
            limit = archive.size if file.suffix == ".tar" else 0
            unpack(file, content, archive.takes, archive.strip, limit)
        else:
            copy = content / archive.complete[0]
            copy.parent.mkdir(parents=True)
            shutil.copyfile(file, copy)
        if archive.contents and (found := contents_sha256(content)) != archive.contents:
            raise DataError(
                f"{file}: not the published files: got contents {found}, expected "
                f"{archive.contents}; remove it and run again"
            )
        if archive.prepare == "train_aug":
            make_train_aug(content, target, scratch / "made")
            content = scratch / "made"
        elif archive.prepare == "split":
            split(content)
        complete = [target / path for path in archive.complete]
        moves = list(_moves(content, target))
        moves.sort(key=lambda move: any(path.is_relative_to(move[1]) for path in complete))
        for source, place in moves:
            source.rename(place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def contents_sha256(folder: Path) -> str:
    """Return `sha256:…` of the lines `<name> <sha256>` of the files below a folder."""
    total = hashlib.sha256()
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    for name, path in sorted(files.items()):
        with open_file(path) as file:
            total.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return f"sha256:{total.hexdigest()}"


def _moves(source: Path, target: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the (source, target) pairs to move; a folder that is new is moved as a whole.

    Raises:
        DataError: If a different file exists at a target.
    """
    if source.is_dir() and target.is_dir():
        for child in source.iterdir():
            yield from _moves(child, target / child.name)
    elif not os.path.lexists(target):
        yield source, target
    elif not (target.is_file() and source.is_file() and filecmp.cmp(source, target, False)):
        raise DataError(
            f"{target}: exists and differs from the archive's; nothing was overwritten; move it "
            "away and run again"
        )


def _bytes(archive: Archive) -> int:
    return archive.size or archive.about


def total_size(archives: Sequence[Archive]) -> str:
    """Format the total size: `19.3GB`, `19.3GB or more` if some are unknown, `?` if all are."""
    total = sum(map(_bytes, archives))
    if all(map(_bytes, archives)):
        return _format_size(total)
    return f"{_format_size(total)} or more" if total else "?"


def _format_size(number: int) -> str:
    return tqdm.format_sizeof(number, "B")


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
        file: zipfile.ZipFile | tarfile.TarFile
        is_zip = archive.suffix == ".zip"
        with (
            zipfile.ZipFile(require_regular(archive))
            if is_zip
            else tarfile.open(require_regular(archive)) as file
        ):
            wanted = _wanted(archive, _members(file), tuple(takes), strip)
            total = sum(size for _, size in wanted.values())
            if limit and total > limit:
                raise _refused(archive, f"files of {total} bytes, at most {limit} are expected")
            folder.mkdir(parents=True)
            if total > (free := shutil.disk_usage(folder).free):
                raise UserError(
                    f"{folder}: unpacking {archive.name} needs {total} bytes, {free} are free; "
                    "free space, or choose another folder with --root"
                )
            with Progress(len(wanted), f"unpack {archive.name}", "file") as progress:
                for path, (info, size) in wanted.items():
                    _extract(file, info, path, folder)
                    if (folder / path).stat().st_size != size:
                        raise ValueError(f"{format_value(path)} is not as large as declared")
                    progress.update()
    except (OSError, *_DAMAGED) as error:
        if isinstance(error, OSError) and error.errno is not None:  # gzip's own errors have none
            raise write_error(folder, error, 0) from error
        raise DataError(
            f"{archive}: not a zip or tar archive, or damaged ({error}); remove it and run again"
        ) from error


def _members(file: Any) -> Iterator[tuple[Any, str, bool, bool, int]]:
    """Yield each member's info, name, whether it is plain, whether it is a folder, and its size.

    Files and folders are plain if they are not encrypted; links and devices are not.
    """
    if isinstance(file, zipfile.ZipFile):
        for info in file.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            plain = kind in (0, stat.S_IFREG, stat.S_IFDIR) and not info.flag_bits & 1
            # `info.filename` is cut at a NUL; the check needs the original name.
            yield info, info.orig_filename, plain, info.is_dir(), info.file_size
        return
    offset = -1
    while member := file.next():
        # A negative size leads back and loops forever (CVE-2025-8194).
        if not offset < member.offset_data <= member.offset_data + member.size:
            raise tarfile.ReadError(f"{format_value(member.name)} has {member.size} bytes")
        offset = member.offset_data
        plain = (member.isdir() or member.isreg()) and not member.issparse()
        yield member, member.name, plain, member.isdir(), member.size


def _wanted(
    archive: Path,
    members: Iterator[tuple[Any, str, bool, bool, int]],
    takes: tuple[str, ...],
    strip: int,
) -> dict[str, tuple[Any, int]]:
    """Validate all members, and return info and size of the wanted files by path."""
    files: dict[str, tuple[Any, int]] = {}
    for info, path, plain, is_folder, size in members:
        check_relative(path, f"{archive}")
        name = posixpath.normpath(path)
        if "\\" in name or re.match("[A-Za-z]:", name):
            raise _refused(archive, f"{format_value(name)}, a drive or backslashes in a name")
        if not plain:
            raise _refused(archive, f"{format_value(name)}, a link, device or encrypted file")
        if name in files:
            raise _refused(archive, f"{format_value(name)} twice")
        if not is_folder:
            files[name] = info, size
    for name in files:
        if not files.keys().isdisjoint(map(str, PurePosixPath(name).parents)):
            raise _refused(archive, f"{format_value(name)} in a folder that is also a file")
    wanted = {n.split("/", strip)[strip]: m for n, m in files.items() if n.startswith(takes)}
    if not wanted:
        raise _refused(archive, f"none of {', '.join(takes)}")
    return wanted


def _extract(file: Any, info: Any, path: str, folder: Path) -> None:
    """Extract a validated member as `path` in `folder`."""
    if isinstance(file, zipfile.ZipFile):
        info.filename = path
        file.extract(info, folder)
    else:
        info.name = path
        file.extraction_filter = getattr(tarfile, "data_filter", None)  # none in Python 3.11.3
        file.extract(info, folder, set_attrs=False)  # owner and mode of new files are the user's


def _refused(archive: Path, what: str) -> DataError:
    return DataError(f"{archive}: has {what}; refused, and nothing was unpacked")


def make_train_aug(sbd: Path, voc: Path, made: Path) -> None:
    """Convert SBD's masks (Hariharan et al. 2011) from MATLAB to VOC2012's train_aug in `made`.

    The split has all images with a mask in VOC2012 or SBD except those of VOC's val. If an image
    has a mask in VOC2012, that one is used: it marks the borders of objects as ignored, SBD's does
    not.

    Args:
        sbd: Folder with `train.txt`, `val.txt`, `cls/<id>.mat`.
        voc: The folder VOC2012.
        made: Folder that gets SegmentationClassAug/*.png and
            ImageSets/Segmentation/train_aug.txt.

    Raises:
        DataError: If a list or mask is missing or damaged.
    """
    lists = voc / "ImageSets" / "Segmentation"
    train, val = ({*read_ids(lists / f"{name}.txt")} for name in ("train", "val"))
    extra = {i for name in ("train", "val") for i in read_ids(sbd / f"{name}.txt")}
    ids = sorted((train | extra) - val)
    masks = made / "SegmentationClassAug"
    masks.mkdir(parents=True)
    with Progress(len(ids), "masks of train_aug", "img") as progress:
        for image_id in ids:
            file = f"{image_id}.png"
            if image_id in train:
                shutil.copyfile(voc / "SegmentationClass" / file, masks / file)
            else:
                mask = _read_mask(sbd / "cls" / f"{image_id}.mat")
                Image.fromarray(mask).save(masks / file)
            progress.update()
    new_list = made / "ImageSets" / "Segmentation" / "train_aug.txt"
    new_list.parent.mkdir(parents=True)
    new_list.write_text("".join(f"{image_id}\n" for image_id in ids), encoding="utf-8")


def _read_mask(path: Path) -> np.ndarray:
    """Read a mask of SBD as class ids (H, W) uint8, 0..20."""
    from scipy.io import loadmat

    try:
        mask = loadmat(path, variable_names=["GTcls"])["GTcls"]["Segmentation"][0, 0]
    except Exception as error:  # scipy raises many types of errors
        raise DataError(f"{path}: not a mask of SBD, or damaged ({error})") from error
    if mask.dtype != np.uint8 or mask.ndim != 2:
        raise DataError(f"{path}: expected (H, W) of uint8, got {mask.shape} of {mask.dtype}")
    return mask
