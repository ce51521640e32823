"""Validated records of run folders and bundles. Only finished runs have numbers.

A run writes its record (`run.json`) last, so a folder with other files of a run but no record is
unfinished. Nothing is read from logs, and nothing of a bundle (benchmarks/report/bundle.py) is
unpacked to disk.
"""

import hashlib
import json
import os
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, cast

from detection.config import keys
from detection.evaluation import metrics
from detection.evaluation.metrics import ERRORS_NAME, HEADLINE, ROBUSTNESS_NAME, metric_sha256
from moco.classification import config as classification
from moco.common.cfgnode import cfg_sha256
from moco.common.command import RANDOM
from moco.common.errors import DataError, UserError, format_value, plural
from moco.common.files import PathLike, open_file, read_bytes
from moco.common.keys import Keys
from moco.common.limits import CorruptFileError, open_zip, read_part
from moco.common.run import DIGITS, METRICS_NAME, RECORD_NAME, RunRecord, parse_record, read_record
from moco.engine.config import protocol_sha256
from moco.engine.keys import CLASSIFICATION

SUITE_NAME, ABOUT_NAME = "suite.json", "about.json"
SCORES_NAME = "reachable.json"  # in a suite's folder, by `metric_sha256`
PLAN = "until_decided"  # the one key of the former in a bundle, for the suites that have it
MAX_SUITE_BYTES = 1 << 20
MAX_RECORDS_BYTES = 64 << 20  # total size of all records
MATCHES_NAME = f"inference/{metrics.MATCHES_NAME}"
# Files that reports read next to a run's record → maximum size in bytes.
EVIDENCE = {
    MATCHES_NAME: metrics.MAX_MATCHES_BYTES,
    ERRORS_NAME: 1 << 20,
    ROBUSTNESS_NAME: 1 << 20,
    METRICS_NAME: 1 << 27,  # of a bundle: the lines of evaluations alone
}
MAX_KNN_BYTES = 1 << 20
NOT_PUBLIC = "not public"
MAX_ABOUT = 200  # characters of a text about a bundle
TASK_KEYS: Keys = {**CLASSIFICATION, **keys.KEYS}  # of the tasks that have rows in a report


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
                raise ValueError(f"{name}: got {format_value(text)}, {expected}")


def parse_mapping(text: bytes, where: Path | PurePosixPath) -> dict[str, Any]:
    """Return the mapping in a JSON file, empty if it holds something else.

    Raises:
        UserError: If the file is damaged.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error})") from error
    return content if isinstance(content, dict) else {}


def knn_name(pretraining: str) -> str:
    """Return the path, in a suite's folder, of the kNN accuracies that a pre-training logged."""
    return f"inits/{pretraining}.knn.json"


def suite_task(folder: Path | PurePosixPath, exists: Callable[[Any], bool]) -> str | None:
    """Return the suite's task name for a run in `runs/<task>/<init>/<seed>`, else None."""
    task = folder.parent.parent
    runs = task.parent
    return task.name if runs.name == "runs" and exists(runs.parent / SUITE_NAME) else None


def read_bundle(path: PathLike) -> dict[PurePosixPath, tuple[RunRecord, str | None]]:
    """Read the records of a bundle and the suite's names of their tasks, by folder.

    Raises:
        DataError: If the file is not a bundle, damaged or malicious.
        UserError: If a record is invalid.
    """
    with reading(path), open_file(path) as file, open_zip(file) as archive:
        parts = {PurePosixPath(info.filename): info for info in archive.infolist()}
        if len(parts) < len(archive.infolist()):
            seen = Counter(str(PurePosixPath(info.filename)) for info in archive.infolist())
            raise CorruptFileError(
                f"{format_value(seen.most_common(1)[0][0])}: is in it more than once"
            )
        records = {name: info for name, info in parts.items() if name.name == RECORD_NAME}
        for name, info in records.items():
            if name.is_absolute() or ".." in name.parts or str(name) != info.filename:
                raise CorruptFileError(f"{format_value(info.filename)}: not a path inside it")
        total = sum(info.file_size for info in records.values())
        if total > MAX_RECORDS_BYTES:
            raise CorruptFileError(
                f"records: got {total} bytes, expected at most {MAX_RECORDS_BYTES}"
            )
        texts = {name: read_part(archive, info) for name, info in records.items()}
    return {
        name.parent: (
            parse_record(text, f"{path}/{name}"),
            suite_task(name.parent, parts.__contains__),
        )
        for name, text in texts.items()
    }


def read_about(path: PathLike) -> About:
    """Read the origin of the results of a bundle.

    Raises:
        DataError: If the bundle records no origin, or is damaged.
    """
    with reading(path), open_file(path) as file, open_zip(file) as archive:
        info = archive.NameToInfo.get(ABOUT_NAME)
        if info is not None and info.file_size > 8 * MAX_ABOUT:
            raise CorruptFileError(f"{ABOUT_NAME}: more than {8 * MAX_ABOUT} bytes")
        content = None if info is None else json.loads(read_part(archive, info))
        about = None if content is None else About(**content)
    if about is None:
        raise DataError(
            f"{path}: does not say who measured its results; make it again with --measured-by NAME"
        )
    return about


@contextmanager
def reading(path: PathLike) -> Iterator[None]:
    """Turn any error while reading a file into a DataError that names it."""
    try:
        yield
    except CorruptFileError as error:
        raise DataError(f"{path}: damaged or made to mislead ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # a damaged archive may raise anything
        raise DataError(
            f"{path}: not a bundle of moco-transfer table, or damaged ({error})"
        ) from error


@dataclass(frozen=True)
class FinishedRun:
    """Record of a finished run, and the folder of the record.

    Attributes:
        folder: Folder of the record, which may be a copy of the run's folder.
        record: Validated record.
        suite_task: Name of the task in its suite, or None for a run outside of a suite.
        source: Folder of the run's other files, inside `bundle` if it is not None.
        bundle: Bundle of the run's other files, or None if they are on disk.
    """

    folder: Path
    record: RunRecord
    suite_task: str | None = None
    source: Path | PurePosixPath | None = field(default=None, compare=False)
    bundle: Path | None = field(default=None, compare=False)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file of `EVIDENCE`, or None if the run does not have it.

        Raises:
            DataError: If the file cannot be read or exceeds its maximum size.
        """
        return self._read(self.source / name, EVIDENCE[name]) if self.source else None

    def read_knn(self, pretraining: str) -> bytes | None:
        """Return the kNN accuracies of a pre-training from the run's suite; raise as `read`."""
        if self.source is None or self.suite_task is None:
            return None
        return self._read(self.source.parents[3] / knn_name(pretraining), MAX_KNN_BYTES)

    def read_suite(self) -> dict[str, Any]:
        """Return the content of the run's suite.json, empty outside of a suite; raise as `read`.

        Raises:
            UserError: If it is not JSON.
        """
        if self.source is None or self.suite_task is None:
            return {}
        path = self.source.parents[3] / SUITE_NAME
        return parse_mapping(self._read(path, MAX_SUITE_BYTES) or b"{}", path)

    def _read(self, path: Path | PurePosixPath, limit: int) -> bytes | None:
        if self.bundle is None:
            if not Path(path).is_file():
                return None
            with reading(path):
                if Path(path).stat().st_size > limit:
                    raise CorruptFileError(f"more than {limit} bytes")
                return read_bytes(path)
        with reading(self.bundle), open_file(self.bundle) as file, open_zip(file) as archive:
            info = archive.NameToInfo.get(str(path))
            if info is not None and info.file_size > limit:
                raise CorruptFileError(f"{path}: more than {limit} bytes")
            return None if info is None else read_part(archive, info)

    @property
    def digest(self) -> str:
        """Hash that distinguishes the run from earlier runs in its folder."""
        r = self.record
        made = (r.task, r.engine, r.init, r.seed, r.weights_sha256, r.metrics)
        text = json.dumps([*made, r.provenance.get("utc")], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]

    @property
    def tested_on(self) -> tuple[str, ...]:
        """DATASETS.TEST, empty for classification."""
        return tuple(self.record.config.get("DATASETS.TEST") or ())

    @property
    def label(self) -> str:
        """Label of the recipe, such as `as in the paper (…)`, followed by all deviations."""
        recipe = self.record.recipe or {}
        parts = [str(recipe.get("label") or ""), *map(str, recipe.get("deviations") or ())]
        return "; ".join(part for part in parts if part)

    @property
    def versions(self) -> str:
        """Installed packages and the project's revision: `python 3.11.4, torch 2.5.1, …`."""
        made = self.record.provenance
        parts = [f"{k} {v}" for k, v in (made.get("versions") or {}).items() if v is not None]
        return ", ".join([*parts, *([f"git {made['git'][:12]}"] if made.get("git") else [])])

    @property
    def hardware(self) -> str:
        """GPUs as `8 x NVIDIA V100`, or the CPU with its number of threads."""
        hardware = self.record.provenance.get("hardware") or {}
        if gpus := list(hardware.get("gpus") or ()):
            return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
        if not hardware.get("cpu"):
            return ""
        return f"{hardware['cpu']}, {plural(hardware.get('cpu_threads', 0), 'thread')}"

    @property
    def finished(self) -> str:
        """Time of the record in UTC, whatever its time zone, or "" if it is not known."""
        try:
            time = datetime.fromisoformat(str(self.record.provenance.get("utc")))
            if time.tzinfo is None:  # provenance() writes UTC
                time = time.replace(tzinfo=UTC)
            return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        except (ValueError, OverflowError):
            return ""


@dataclass(frozen=True)
class Unusable:
    """Run without numbers, and the reason."""

    folder: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.folder}: {self.reason}"


@dataclass(frozen=True)
class Results:
    """Runs of a set of folders.

    Attributes:
        transfer: Finished runs of tables: detection, classification and kNN.
        pretraining: Finished pre-training runs.
        unusable: Unfinished and failed runs.
    """

    transfer: tuple[FinishedRun, ...]
    pretraining: tuple[FinishedRun, ...]
    unusable: tuple[Unusable, ...]


def collect(paths: Sequence[PathLike]) -> Results:
    """Read every run below `paths`: run folders, folders of run folders, `run.json` files, bundles.

    A folder that is reached twice counts once. Runs are sorted by folder.

    Raises:
        UserError: If a path does not exist, there is no run below any of them, or a record is
            invalid.
        DataError: If a bundle is damaged.
    """
    found: dict[Path, FinishedRun | None] = {}
    configs: dict[frozenset[str], Mapping[str, Any]] = {}
    suites: dict[Path, dict[str, Any]] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path}: no such run folder")
        if path.suffix == ".zip" and path.is_file():
            own = path.resolve()
            for inside, (record, task) in read_bundle(path).items():
                made = _hashed(record), task, inside, own
                found[own / inside] = FinishedRun(own / inside, *made)
            continue
        for folder in [path.parent.resolve()] if path.is_file() else _run_folders(path.resolve()):
            has_record = (folder / RECORD_NAME).is_file()
            found[folder] = _read_run(folder, configs, suites) if has_record else None
    if not found:
        raise UserError(
            f"no runs below {', '.join(map(str, paths))}; expected folders with a {RECORD_NAME}, "
            "which moco-transfer train, linear and finetune write into OUTPUT_DIR"
        )
    transfer, pretraining, unusable = [], [], []
    for folder, run in sorted(found.items()):
        if run is None:
            unusable.append(Unusable(folder, f"unfinished: it has no {RECORD_NAME} yet"))
            continue
        record = run.record
        for name, value in record.metrics.items():
            if name.split("/", 1)[0] in HEADLINE and value is not None and not 0 <= value <= 100:
                raise UserError(
                    f"{folder / RECORD_NAME}: metric {name}: got {value}, expected 0 to 100"
                )
        if (record.init == RANDOM) != (record.weights_sha256 is None) and record.kind != "pretrain":
            sha256 = record.weights_sha256 and record.weights_sha256[:10]
            raise UserError(
                f"{folder / RECORD_NAME}: got the init {format_value(record.init)} with "
                f"weights_sha256 {sha256}; expected {RANDOM!r} if and only if there are no weights"
            )
        if record.status != "done":
            reason = record.notes[-1] if record.notes else "no reason recorded"
            unusable.append(Unusable(folder, f"failed: {reason}"))
        elif record.kind == "pretrain":
            pretraining.append(run)
        else:
            transfer.append(run)
    return Results(tuple(transfer), tuple(pretraining), tuple(unusable))


def finished_detectors(paths: Sequence[Path]) -> list[FinishedRun]:
    """Return the finished runs of detectors below folders.

    Raises:
        UserError: If there is none.
    """
    runs = [run for run in collect(paths).transfer if run.record.kind == "detection"]
    if not runs:
        raise UserError(f"no finished run of a detector below {', '.join(map(str, paths))}")
    return runs


def _read_run(
    folder: Path,
    configs: dict[frozenset[str], Mapping[str, Any]],
    suites: dict[Path, dict[str, Any]],
) -> FinishedRun:
    record, task = _hashed(read_record(folder / RECORD_NAME)), suite_task(folder, Path.is_file)
    if task is not None:
        scores = folder.parents[3] / SCORES_NAME
        if scores not in suites:
            suites[scores] = parse_mapping(read_bytes(scores), scores) if scores.is_file() else {}
        try:
            record = _with_score(record, suites[scores])
        except ValueError as error:
            raise UserError(f"{scores}: not scores of a suite ({error})") from error
    return FinishedRun(folder, _sharing_config(record, configs), task, folder)


def _with_score(record: RunRecord, known: Mapping[str, Any]) -> RunRecord:
    """Add the score of perfect predictions that the run's suite has computed, if there is one.

    Raises:
        ValueError: If the score has another form.
    """
    data = record.provenance.get("data")
    test = data[-1] if isinstance(data, list) and data else None
    if not known or record.reachable or not isinstance(test, list):
        return record
    score = known.get(metric_sha256(test, record.config))
    return replace(record, reachable=score) if score else record


def protocol_of(record: RunRecord) -> str:
    """Compute the protocol hash of a record from the configuration.

    The recorded hash may be over an older set of keys. Records of pre-training, which are not in
    tables, keep the recorded hash.
    """
    config = record.config
    if record.kind == "detection":
        return keys.protocol_sha256(config)
    if record.kind in ("linear", "finetune"):
        return protocol_sha256(config, classification.default_cfg({}), CLASSIFICATION)
    return cfg_sha256(config) if record.kind == "knn" else record.config_sha256


def _hashed(record: RunRecord) -> RunRecord:
    sha256 = protocol_of(record)
    return record if sha256 == record.config_sha256 else replace(record, config_sha256=sha256)


def _sharing_config(
    record: RunRecord, configs: dict[frozenset[str], Mapping[str, Any]]
) -> RunRecord:
    """Store the config of a record as its differences from the first one with the same keys.

    Configs take most of the memory of a record, and those of a suite differ in few values.
    """
    first = configs.setdefault(frozenset(record.config), record.config)
    if first is record.config:
        return record
    own = {
        key: value
        for key, value in record.config.items()
        if (other := first[key]) is not value and (type(other), other) != (type(value), value)
    }
    # A ChainMap writes into its first mapping only.
    shared = cast(MutableMapping[str, Any], first)
    record = copy(record)  # `replace` would validate it a second time
    object.__setattr__(record, "config", ChainMap(own, shared))
    return record


def _run_folders(root: Path) -> Iterator[Path]:
    """Yield folders below `root` that have a record, or metrics of an unfinished run.

    Folders inside a run's folder belong to that run: `--eval-only` writes the record of an
    evaluation into `inference/`, which is not another trial.
    """
    for folder, below, files in os.walk(root):
        if RECORD_NAME in files or METRICS_NAME in files:
            yield Path(folder)
            below.clear()
