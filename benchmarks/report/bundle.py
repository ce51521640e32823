"""A report in one zip file: its page and the records of its runs, read without unpacking anything.

README.txt                          what this is
table.html                          the page
<suite>/runs/<task>/<init>/<seed>/run.json    the records, in folders as the suite had them
<suite>/suite.json                  empty; says that the folders beside it are a suite's

The same report makes the same bytes.
"""

import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from moco.common.errors import DataError, shown
from moco.common.files import PathLike, atomic_write
from moco.common.limits import Implausible, open_zip
from moco.common.run import RECORD_NAME, RunRecord, parse_record

SUITE_NAME = "suite.json"
README_NAME = "README.txt"
MAX_RECORDS_BYTES = 64 << 20  # of all records together
README = f"""\
Results of moco-transfer: open {{page}} in a browser; each {RECORD_NAME} is the record of a run.

    moco-transfer table --diff THIS.zip OTHER    compare with another such file or folder of runs
    moco-transfer table THIS.zip                 make the tables again
"""


def suite_task(folder: Path | PurePosixPath, exists: Callable[[Any], bool]) -> str | None:
    """The suite's name of the task of a run in `runs/<task>/<init>/<seed>`; None of another run."""
    task = folder.parent.parent
    runs = task.parent
    return task.name if runs.name == "runs" and exists(runs.parent / SUITE_NAME) else None


def read_bundle(path: PathLike) -> dict[PurePosixPath, tuple[RunRecord, str | None]]:
    """The records in a bundle and their suite's names of the task, by folder.

    Raises:
        DataError: not a bundle, damaged or made to mislead.
        UserError: a record that is none.
    """
    try:
        with open(path, "rb") as file, open_zip(file) as archive:
            parts = {PurePosixPath(info.filename): info for info in archive.infolist()}
            records = {name: info for name, info in parts.items() if name.name == RECORD_NAME}
            for name, info in records.items():
                if name.is_absolute() or ".." in name.parts or str(name) != info.filename:
                    raise Implausible(f"{shown(info.filename)}: not a path inside it")
            claimed = sum(info.file_size for info in records.values())
            if claimed > MAX_RECORDS_BYTES:
                raise Implausible(f"records of {claimed} bytes, at most {MAX_RECORDS_BYTES}")
            texts = {name: archive.read(info) for name, info in records.items()}
    except Implausible as error:
        raise DataError(f"{path}: damaged or made to mislead ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # whatever a damaged archive may raise
        raise DataError(f"{path}: not a bundle of make_table, or damaged ({error})") from error
    return {
        name.parent: (
            parse_record(text, f"{path}/{name}"),
            suite_task(name.parent, parts.__contains__),
        )
        for name, text in texts.items()
    }


def write_bundle(
    path: PathLike, page: tuple[str, str], records: Mapping[PurePosixPath, tuple[RunRecord, bool]]
) -> None:
    """Write a bundle, atomically.

    Args:
        page: its name and text.
        records: by folder; whether the folder is of a suite.
    """
    files = {README_NAME: README.format(page=page[0]), page[0]: page[1]}
    for folder, (record, in_suite) in records.items():
        files[f"{folder / RECORD_NAME}"] = json.dumps(asdict(record), indent=2, sort_keys=True)
        if in_suite:
            files[f"{folder.parents[3] / SUITE_NAME}"] = "{}"

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(files):
                info = zipfile.ZipInfo(name)  # of 1980, whatever the time
                info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(info, f"{files[name].rstrip()}\n")

    atomic_write(path, write)
