"""Reads a report in one zip file (benchmarks/report/share.py writes it) without unpacking anything.

table.html, README.txt              the page, and what this is
<suite>/runs/<task>/<init>/<seed>/run.json    the records, in folders as the suite had them
                       …/error_types.json, …     what else reports read of a run (`EVIDENCE`)
<suite>/suite.json                  empty; says that the folders beside it are a suite's
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from detection.evaluation import metrics
from detection.evaluation.metrics import ERRORS_NAME, ROBUSTNESS_NAME
from moco.common.errors import DataError, shown
from moco.common.files import PathLike
from moco.common.limits import Implausible, open_zip, read_part
from moco.common.run import RECORD_NAME, RunRecord, parse_record

SUITE_NAME = "suite.json"
MAX_RECORDS_BYTES = 64 << 20  # of all records together
MATCHES_NAME = f"inference/{metrics.MATCHES_NAME}"
# What reports read of a run beside its record, and the most bytes of each file.
EVIDENCE = {MATCHES_NAME: metrics.MAX_MATCHES_BYTES, ERRORS_NAME: 1 << 20, ROBUSTNESS_NAME: 1 << 20}


@dataclass(frozen=True)
class Evidence:
    """The files of `EVIDENCE` of one run: in its folder, or in that folder of a bundle."""

    folder: Path | PurePosixPath
    bundle: Path | None = None

    def read(self, name: str) -> bytes | None:
        """The content of a file; None: the run has none.

        Raises:
            DataError: it cannot be read, or is larger than any.
        """
        path, limit = self.folder / name, EVIDENCE[name]
        if self.bundle is None:
            if not Path(path).is_file():
                return None
            with _reading(path):
                if Path(path).stat().st_size > limit:
                    raise Implausible(f"more than {limit} bytes")
                return Path(path).read_bytes()
        with _reading(self.bundle), open(self.bundle, "rb") as file, open_zip(file) as archive:
            info = archive.NameToInfo.get(str(path))
            if info is not None and info.file_size > limit:
                raise Implausible(f"{path}: more than {limit} bytes")
            return None if info is None else read_part(archive, info)


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
    with _reading(path), open(path, "rb") as file, open_zip(file) as archive:
        parts = {PurePosixPath(info.filename): info for info in archive.infolist()}
        if len(parts) < len(archive.infolist()):
            seen = Counter(str(PurePosixPath(info.filename)) for info in archive.infolist())
            raise Implausible(f"{shown(seen.most_common(1)[0][0])}: is in it twice")
        records = {name: info for name, info in parts.items() if name.name == RECORD_NAME}
        for name, info in records.items():
            if name.is_absolute() or ".." in name.parts or str(name) != info.filename:
                raise Implausible(f"{shown(info.filename)}: not a path inside it")
        claimed = sum(info.file_size for info in records.values())
        if claimed > MAX_RECORDS_BYTES:
            raise Implausible(f"records of {claimed} bytes, at most {MAX_RECORDS_BYTES}")
        texts = {name: read_part(archive, info) for name, info in records.items()}
    return {
        name.parent: (
            parse_record(text, f"{path}/{name}"),
            suite_task(name.parent, parts.__contains__),
        )
        for name, text in texts.items()
    }


@contextmanager
def _reading(path: PathLike) -> Iterator[None]:
    """Whatever goes wrong is a DataError of that file."""
    try:
        yield
    except Implausible as error:
        raise DataError(f"{path}: damaged or made to mislead ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # whatever a damaged archive may raise
        raise DataError(
            f"{path}: not a bundle of moco-transfer table, or damaged ({error})"
        ) from error
