"""Published datasets, from their official archives: downloaded, checked, unpacked, examined.

An archive is downloaded to `archives/` in the folder of all datasets, unpacked into a scratch
folder beside its target, moved there, and removed. So whatever ends the process, no file is
half-written under its final name, and the next call continues with what is missing.
"""

import filecmp
import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout
from tabulate import tabulate
from tqdm import tqdm

from detection.datasets import doctor
from detection.datasets.archives import Archive, Dataset, datasets
from detection.datasets.base import formats
from detection.datasets.sbd import make_train_aug
from detection.datasets.unpack import unpack
from moco.common.download import download, has_digest
from moco.common.errors import DataError, LockedError, UserError
from moco.common.files import TEMPORARY_PREFIX, cannot_write
from moco.common.progress import format_seconds

ARCHIVES = "archives"  # folder of the archives, below that of all datasets
MBIT_PER_SECOND = 100  # for the estimate of the time


def listing(root: Path) -> str:
    """All names: contents, size, and what of each is present below `root`."""
    rows = []
    for dataset in datasets().values():
        present = sum(archive.present(root) for archive in dataset.archives)
        number = len(dataset.archives)
        state = {0: "absent", number: "present"}.get(present, f"{present} of {number} archives")
        account = ", needs an account" if dataset.account else ""
        size = _total(dataset.archives) + account
        rows.append((dataset.name, state, size, f"{dataset.contains}\n{dataset.terms}"))
    headers = ("name", "state", "download", "contents, terms of use")
    return tabulate(rows, headers, tablefmt="plain")


def fetch(
    names: Sequence[str],
    root: Path,
    mirror: str = "",
    keep: bool = False,
    again: bool = False,
    dry_run: bool = False,
) -> bool:
    """Get what is missing of the datasets, then let the doctor examine them.

    Args:
        mirror: address of a folder with the same files; "": the official addresses.
        keep: leave the archives where they are.
        again: get what is present too, and add the files of it that are missing.
        dry_run: only say what would be done.

    Returns:
        Whether the doctor found nothing wrong.

    Raises:
        UserError: no network, no space, an archive that needs an account.
        DataError: an archive with another hash than published, damaged, or made to do harm; files
            in the way that are not equal.
        LockedError: another process fetches into the same folder.
    """
    wanted = [datasets()[name] for name in dict.fromkeys(names)]
    parts = dict.fromkeys(archive for dataset in wanted for archive in dataset.archives)
    missing = [archive for archive in parts if again or not archive.present(root)]
    folder = root / ARCHIVES
    _check_accounts(wanted, missing, root, mirror)
    print(_plan(missing, root, mirror, keep), flush=True)
    if dry_run:
        return True
    if missing:
        if (needed := _needed(missing, folder, keep)) > (free := _free(root)):
            raise UserError(
                f"{root}: {_size(needed)} or more are needed, {_size(free)} are free; free space, "
                "or choose another folder with --root"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock", timeout=0):
                for archive in missing:
                    _get(archive, root, mirror, keep)
        except Timeout as error:
            raise LockedError(f"{folder}: another process fetches datasets into it") from error
        except OSError as error:
            raise cannot_write(folder, error, 0) from error
    if unchecked := [archive.name for archive in missing if not archive.hash]:
        print(f"not compared with a hash, as none is published: {', '.join(unchecked)}")
    kinds = dict.fromkeys(dataset.doctor for dataset in wanted)
    right = all(list(map(partial(_examine, wanted, root), kinds)))
    if not (right or missing):
        print("files that are missing from what is present: the same command with --again")
    return right


def _plan(missing: Sequence[Archive], root: Path, mirror: str, keep: bool) -> str:
    """What is about to be done; how much, how long."""
    folder = root / ARCHIVES
    if not missing:
        return f"in {root}: all of it is present"
    absent = [archive for archive in missing if not (folder / archive.name).is_file()]
    seconds = 8 * sum(map(_bytes, absent)) / MBIT_PER_SECOND / 1e6
    lines = [
        f"  {_total([a]):>8}  {_address(a, mirror) if a in absent else folder / a.name}"
        for a in missing
    ]
    return "\n".join(
        [
            f"to {root}:",
            *lines,
            f"download {_total(absent)}: {format_seconds(seconds)} at {MBIT_PER_SECOND} Mbit/s",
            f"disk {_size(_needed(missing, folder, keep))} or more while it runs, "
            f"{_size(_free(root))} are free",
        ]
    )


def _check_accounts(
    wanted: Sequence[Dataset], missing: Sequence[Archive], root: Path, mirror: str
) -> None:
    folder = root / ARCHIVES
    for dataset in wanted:
        files = [a.name for a in dataset.archives if a in missing and not _address(a, mirror)]
        if absent := [name for name in files if not (folder / name).is_file()]:
            raise UserError(
                f"{dataset.name} needs an account: log in at {dataset.account}, download "
                f"{' and '.join(absent)} into {folder}, then: "
                f"moco-transfer datasets fetch {dataset.name} --root {root}"
            )


def _get(archive: Archive, root: Path, mirror: str, keep: bool) -> None:
    """Download, check and unpack one archive."""
    file = root / ARCHIVES / archive.name
    if address := _address(archive, mirror):
        # COCO's server has no https: what comes from there is known by its hash.
        download(address, file, archive.hash, archive.size, allow_http=True)
    elif archive.hash and not has_digest(file, archive.hash):
        raise DataError(f"{file}: not the published file ({archive.hash}); download it again")
    _place(archive, file, root / archive.folder)
    if not keep and address:  # what needs an account is not ours to remove
        file.unlink()
        file.with_name(f".{file.name}.lock").unlink(missing_ok=True)


def _place(archive: Archive, file: Path, target: Path) -> None:
    """Unpack into a scratch folder in `target`, and move what is there to its place."""
    scratch = target / f"{TEMPORARY_PREFIX}{archive.name}"
    shutil.rmtree(scratch, ignore_errors=True)  # of a call that was killed
    content = scratch / "content"
    try:
        if archive.takes:
            # The files in an uncompressed tar are smaller than it.
            limit = archive.size if file.suffix == ".tar" else 0
            unpack(file, content, archive.takes, archive.strip, limit)
        else:
            copy = content / archive.complete[0]
            copy.parent.mkdir(parents=True)
            shutil.copyfile(file, copy)
        if archive.prepare == "train_aug":
            make_train_aug(content, target, content := scratch / "made")
        last = [target / path for path in archive.complete]
        moves = sorted(_moves(content, target), key=lambda move: _holds(move[1], last))
        for source, place in moves:
            source.rename(place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _moves(source: Path, target: Path) -> Iterator[tuple[Path, Path]]:
    """What has to be moved where, whole folders at once where there is none of the name.

    Raises:
        DataError: a file is in the way that is not equal.
    """
    if source.is_dir() and target.is_dir():
        for child in source.iterdir():
            yield from _moves(child, target / child.name)
    elif not os.path.lexists(target):
        yield source, target
    elif not (target.is_file() and source.is_file() and filecmp.cmp(source, target, False)):
        raise DataError(
            f"{target}: exists, and is not what the archive has; nothing was overwritten. Move it "
            "away and run again"
        )


def _holds(place: Path, paths: Sequence[Path]) -> bool:
    return any(path.is_relative_to(place) for path in paths)


def _examine(fetched: Sequence[Dataset], root: Path, kind: str) -> bool:
    format_ = formats()[kind]
    splits = {split for dataset in fetched for split in dataset.splits}
    findings = doctor.examine(format_, str(root), splits=splits)
    following = doctor.next_step(kind, format_, str(root), findings)
    print(f"\n{doctor.report(findings, following)}", flush=True)
    return doctor.all_right(findings)


def _address(archive: Archive, mirror: str) -> str:
    return f"{mirror.rstrip('/')}/{archive.name}" if mirror else archive.url


def _needed(missing: Sequence[Archive], folder: Path, keep: bool) -> int:
    """Bytes of disk at the worst moment, if nothing were compressed."""
    used = needed = 0
    for archive in missing:
        download = 0 if (folder / archive.name).is_file() else _bytes(archive)
        used += download + _bytes(archive)
        needed = max(needed, used)
        used -= 0 if keep else _bytes(archive)
    return needed


def _free(root: Path) -> int:
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _bytes(archive: Archive) -> int:
    return archive.size or archive.about


def _total(archives: Sequence[Archive]) -> str:
    """`19.3GB`, `19.3GB or more` where some size is not known, `?` where none is."""
    total = sum(map(_bytes, archives))
    if all(map(_bytes, archives)):
        return _size(total)
    return f"{_size(total)} or more" if total else "?"


def _size(number: int) -> str:
    return tqdm.format_sizeof(number, "B")
