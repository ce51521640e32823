"""Download, verification and unpacking of published datasets from their official archives.

An archive is downloaded to `archives/` in the folder of all datasets, unpacked into a scratch
folder next to its target, moved there, and removed. So no file is ever half-written under its final
name, however the process ends, and the next call continues with what is missing.
"""

import filecmp
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from tabulate import tabulate
from tqdm import tqdm

from detection.datasets import doctor
from detection.datasets.archives import Archive, Dataset, datasets, fetch_command
from detection.datasets.base import formats
from detection.datasets.sbd import make_train_aug
from detection.datasets.unpack import unpack
from moco.common.download import download, has_digest
from moco.common.errors import DataError, LockedError, UserError, say
from moco.common.files import TEMPORARY_PREFIX, cannot_write, existing_folder, open_file
from moco.common.progress import format_seconds

ARCHIVES = "archives"  # subfolder of the folder of all datasets
MBIT_PER_SECOND = 100  # assumed for the estimated duration


def listing(root: Path) -> str:
    """Format a table of all datasets: what is present below `root`, size, contents, terms."""
    rows = []
    for dataset in datasets().values():
        present, number = sum(a.present(root) for a in dataset.archives), len(dataset.archives)
        state = {0: "absent", number: "present"}.get(present, f"{present} of {number} archives")
        size = total_size(dataset.archives) + (", needs an account" if dataset.account else "")
        rows.append((dataset.name, state, size, f"{dataset.contains}\n{dataset.terms}"))
    return tabulate(rows, ("name", "state", "download", "contents, terms of use"), "plain")


@dataclass(frozen=True)
class Fetch:
    """Options of fetching datasets; call it with their names.

    Attributes:
        root: Folder of all datasets.
        mirror: URL of a folder with the same files; "" for the official addresses.
        keep: Keep the archives after unpacking.
        again: Fetch what is present too, and add its missing files.
        dry_run: Only print what would be done.
    """

    root: Path
    mirror: str = ""
    keep: bool = False
    again: bool = False
    dry_run: bool = False

    def __call__(self, names: Sequence[str]) -> bool:
        """Fetch what is missing of the datasets, then let the doctor examine them.

        Returns:
            True if the doctor found nothing wrong.

        Raises:
            UserError: If there is no network or too little space, or an archive needs an account.
            DataError: If the hash of an archive is not the published one, an archive is damaged or
                malicious, or a different file exists under a name of the archive.
            LockedError: If another process fetches into the same folder.
        """
        wanted = [datasets()[name] for name in dict.fromkeys(names)]
        for dataset in wanted:
            self._check_account(dataset)
        missing = list(dict.fromkeys(a for dataset in wanted for a in self._missing(dataset)))
        say(*self._plan(missing).splitlines())
        print("terms of use:", *dict.fromkeys(d.terms for d in wanted), flush=True)
        for dataset in filter(lambda d: d.license, wanted):
            print(f"{dataset.name}: {dataset.license}", flush=True)
        if self.dry_run:
            return True
        if missing:
            self._get_all(missing)
        if unchecked := [a.name for a in missing if not (a.hash or a.contents)]:
            print(f"not verified, because no hash is published: {', '.join(unchecked)}")
        right = True
        for dataset in filter(lambda d: d.custom, wanted):
            custom = formats()[dataset.doctor].custom
            assert custom is not None
            folder = str(self.root / dataset.custom)
            findings, following = doctor.examine_custom(custom, folder, "")
            print(f"\n{doctor.report(findings, following)}", flush=True)
            right = right and doctor.all_right(findings)
        for kind in dict.fromkeys(dataset.doctor for dataset in wanted if not dataset.custom):
            format_, root = formats()[kind], str(self.root)
            splits = {split for dataset in wanted for split in dataset.splits}
            findings = doctor.examine(format_, root, splits=splits)
            following = doctor.next_step(kind, format_, root, findings)
            print(f"\n{doctor.report(findings, following)}", flush=True)
            right = right and doctor.all_right(findings)
        if not (right or missing):
            print("to add files that are missing, run the same command with --again")
        return right

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
            f"disk space {_size(self._needed(missing))} or more, {_size(self._free())} are free"
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
                f"{self.root}: {_size(needed)} or more are needed, {_size(free)} are free; free "
                "space, or choose another folder with --root"
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
            raise cannot_write(folder, error, 0) from error

    def _get(self, archive: Archive) -> None:
        """Download, check and unpack one archive."""
        file = self._file(archive)
        if address := self._address(archive):
            # COCO's server has no https; its files are verified by their hashes.
            download(address, file, archive.hash, archive.size, allow_http=True)
        elif archive.hash and not has_digest(file, archive.hash):
            raise DataError(f"{file}: not the published file ({archive.hash}); download it again")
        _place(archive, file, self.root / archive.folder)
        if address and not self.keep:  # the user downloaded what needs an account, and keeps it
            file.unlink()
            file.with_name(f".{file.name}.lock").unlink(missing_ok=True)


def _place(archive: Archive, file: Path, target: Path) -> None:
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
        return _size(total)
    return f"{_size(total)} or more" if total else "?"


def _size(number: int) -> str:
    return tqdm.format_sizeof(number, "B")
