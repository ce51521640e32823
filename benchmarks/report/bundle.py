"""Reader of bundles: reports in one zip file, which benchmarks/report/share.py writes.

Nothing is unpacked to disk. Contents of a bundle:

README.txt                          a description of the bundle
table.html, compare-….html          the pages, except of results that others may cite
<suite>/runs/<task>/<init>/<seed>/run.json    the records, in the folders of the suite
                       …/error_types.json, …     other files of a run that reports read (`EVIDENCE`)
<suite>/suite.json                  marks the folders next to it as those of a suite; it contains
                                    the plan of the looks, if seeds were added until a decision
<suite>/inits/<name>.knn.json       kNN accuracies of the pre-training whose checkpoints are rows
about.json                          of results that others may cite: who measured them, and where
                                    the weights are
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from benchmarks.report.sequential import SeedPlan
from detection.evaluation import metrics
from detection.evaluation.metrics import ERRORS_NAME, ROBUSTNESS_NAME
from moco.common.errors import DataError, UserError, shown
from moco.common.files import PathLike, open_file, read_bytes
from moco.common.limits import Implausible, open_zip, read_part
from moco.common.run import RECORD_NAME, RunRecord, parse_record

SUITE_NAME, ABOUT_NAME = "suite.json", "about.json"
SCORES_NAME = "reachable.json"  # in a suite's folder, by `metric_sha256`
PLAN = "until_decided"  # key of the plan of the looks in the former
NOT_PUBLIC = "not public"
MAX_ABOUT = 200  # characters of a text about a bundle
MAX_SUITE_BYTES = 1 << 20
MAX_RECORDS_BYTES = 64 << 20  # total size of all records
MATCHES_NAME = f"inference/{metrics.MATCHES_NAME}"
# Files that reports read next to a run's record → maximum size in bytes.
EVIDENCE = {MATCHES_NAME: metrics.MAX_MATCHES_BYTES, ERRORS_NAME: 1 << 20, ROBUSTNESS_NAME: 1 << 20}
MAX_KNN_BYTES = 1 << 20


@dataclass(frozen=True)
class About:
    """Origin of the results of a bundle.

    Attributes:
        measured_by: Name of a person or group.
        weights: Address of the weights, or `NOT_PUBLIC`.
    """

    measured_by: str
    weights: str = NOT_PUBLIC

    def __post_init__(self) -> None:
        """Check the texts.

        Raises:
            ValueError: If one is empty, longer than `MAX_ABOUT` characters or not one line.
        """
        for name, text in vars(self).items():
            if not (isinstance(text, str) and text.isprintable() and 0 < len(text) <= MAX_ABOUT):
                expected = f"expected one line of at most {MAX_ABOUT} characters"
                raise ValueError(f"{name}: got {shown(text)}, {expected}")


@dataclass(frozen=True)
class Evidence:
    """Files of one run that are named in `EVIDENCE`, on disk or inside a bundle.

    Attributes:
        folder: Folder of the run, relative to the root of the bundle if there is one.
        bundle: Path of the bundle, or None for files on disk.
    """

    folder: Path | PurePosixPath
    bundle: Path | None = None

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if the run does not have it.

        Raises:
            DataError: If the file cannot be read or exceeds its maximum size.
        """
        return self._read(self.folder / name, EVIDENCE[name])

    def read_knn(self, pretraining: str) -> bytes | None:
        """Return the file `knn_name` of the run's suite, or None; raise as `read`."""
        return self._read(self.folder.parents[3] / knn_name(pretraining), MAX_KNN_BYTES)

    def _read(self, path: Path | PurePosixPath, limit: int) -> bytes | None:
        if self.bundle is None:
            if not Path(path).is_file():
                return None
            with _reading(path):
                if Path(path).stat().st_size > limit:
                    raise Implausible(f"more than {limit} bytes")
                return read_bytes(path)
        with _reading(self.bundle), open_file(self.bundle) as file, open_zip(file) as archive:
            info = archive.NameToInfo.get(str(path))
            if info is not None and info.file_size > limit:
                raise Implausible(f"{path}: more than {limit} bytes")
            return None if info is None else read_part(archive, info)


def knn_name(pretraining: str) -> str:
    """Return the path, in a suite's folder, of the kNN accuracies that a pre-training logged."""
    return f"inits/{pretraining}.knn.json"


def suite_task(folder: Path | PurePosixPath, exists: Callable[[Any], bool]) -> str | None:
    """Return the suite's task name for a run in `runs/<task>/<init>/<seed>`, else None."""
    task = folder.parent.parent
    runs = task.parent
    return task.name if runs.name == "runs" and exists(runs.parent / SUITE_NAME) else None


def seed_plan(text: bytes, where: str) -> SeedPlan | None:
    """Return the plan of a suite's looks from its `suite.json`, or None if it has none.

    Raises:
        UserError: If the file is damaged.
    """
    return SeedPlan.parse(parse_mapping(text, where).get(PLAN), where)


def parse_mapping(text: bytes, where: str) -> dict[str, Any]:
    """Return the mapping in a JSON file, empty if it holds something else.

    Raises:
        UserError: If the file is damaged.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error})") from error
    return content if isinstance(content, dict) else {}


def read_bundle(
    path: PathLike,
) -> dict[PurePosixPath, tuple[RunRecord, str | None, SeedPlan | None]]:
    """Read the records of a bundle with the suite's name of their task and its plan, by folder.

    Raises:
        DataError: If the file is not a bundle, damaged or malicious.
        UserError: If a record is invalid.
    """
    with _reading(path), open_file(path) as file, open_zip(file) as archive:
        parts = {PurePosixPath(info.filename): info for info in archive.infolist()}
        if len(parts) < len(archive.infolist()):
            seen = Counter(str(PurePosixPath(info.filename)) for info in archive.infolist())
            raise Implausible(f"{shown(seen.most_common(1)[0][0])}: is in it more than once")
        records = {name: info for name, info in parts.items() if name.name == RECORD_NAME}
        for name, info in records.items():
            if name.is_absolute() or ".." in name.parts or str(name) != info.filename:
                raise Implausible(f"{shown(info.filename)}: not a path inside it")
        total = sum(info.file_size for info in records.values())
        if total > MAX_RECORDS_BYTES:
            raise Implausible(f"records: got {total} bytes, expected at most {MAX_RECORDS_BYTES}")
        texts = {name: read_part(archive, info) for name, info in records.items()}
        suites = {
            name: read_part(archive, info)
            for name, info in parts.items()
            if name.name == SUITE_NAME and info.file_size <= MAX_SUITE_BYTES
        }
    plans = {name.parent: seed_plan(text, f"{path}/{name}") for name, text in suites.items()}
    found = {}
    for name, text in texts.items():
        task = suite_task(name.parent, parts.__contains__)
        plan = plans.get(name.parents[4]) if task else None
        found[name.parent] = parse_record(text, f"{path}/{name}"), task, plan
    return found


def read_about(path: PathLike) -> About:
    """Read who measured the results of a bundle.

    Raises:
        DataError: If the bundle does not say so, or is damaged.
    """
    with _reading(path), open_file(path) as file, open_zip(file) as archive:
        info = archive.NameToInfo.get(ABOUT_NAME)
        if info is not None and info.file_size > 8 * MAX_ABOUT:
            raise Implausible(f"{ABOUT_NAME}: more than {8 * MAX_ABOUT} bytes")
        content = None if info is None else json.loads(read_part(archive, info))
        about = None if content is None else About(**content)
    if about is None:
        raise DataError(
            f"{path}: does not say who measured its results; make it again with --measured-by NAME"
        )
    return about


def check_files(path: PathLike) -> int:
    """Compare every file of a bundle with its checksum, and return their number.

    Raises:
        DataError: If one is damaged.
    """
    with _reading(path), open_file(path) as file, open_zip(file) as archive:
        if (broken := archive.testzip()) is not None:
            raise Implausible(f"{shown(broken)}: its checksum differs")
        return len(archive.infolist())


@contextmanager
def _reading(path: PathLike) -> Iterator[None]:
    """Turn any error while reading a file into a DataError that names it."""
    try:
        yield
    except Implausible as error:
        raise DataError(f"{path}: damaged or made to mislead ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # a damaged archive may raise anything
        raise DataError(
            f"{path}: not a bundle of moco-transfer table, or damaged ({error})"
        ) from error
