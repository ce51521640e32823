"""Output folder of a run: lock, metrics, and the record of the result.

A folder belongs to one process at a time. `metrics.json` holds one JSON line per log step, as
Detectron2 writes it. `run.json` is written last: a run without it is not finished.
"""

import dataclasses
import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from moco import __version__
from moco.common.errors import LockedError, UserError, format_value
from moco.common.files import (
    TEMPORARY_PREFIX,
    PathLike,
    atomic_write_json,
    atomic_write_text,
    open_file,
    read_bytes,
    read_text,
    write_error,
)
from moco.common.limits import CorruptFileError, check_parts
from moco.common.shipped import CHECKOUT, ROOT

SCHEMA = 1
RECORD_NAME = "run.json"
METRICS_NAME = "metrics.json"
START_NAME = "start.json"  # detection/engine/start.py
DIGITS = 16  # of each SHA-256 in it: enough to detect accidental differences
EVENT_FILES = "events.out.tfevents.*"  # tensorboard's
LOGGERS_NAME = "loggers.json"  # ids of the run in its loggers
LOCK_NAME = ".lock"
MAX_PARTS = 1_000_000  # values in a record
KINDS = ("pretrain", "detection", "linear", "finetune", "knn")
PACKAGES = ("torch", "torchvision", "detectron2", "fvcore", "numpy", "pillow")
SOURCES = ("moco", "convert", "detection", "benchmarks", "moco_transfer")  # this project's packages


class RunFolder:
    """The output folder of one run, locked while the context is open.

    Args:
        path: Path of the folder, which is created if missing.
        resume: Continue the run in the folder.
        overwrite: Start from scratch. Files of the earlier run that could be mistaken for this
            one's (record, metrics, events) are removed, and checkpoints when the run starts.
        owner: False for processes other than the main one, which neither lock nor write the folder.

    Raises:
        LockedError: If another process has locked the folder.
        UserError: If the folder is not empty and neither `resume` nor `overwrite` is set.
    """

    def __init__(
        self, path: PathLike, resume: bool = False, overwrite: bool = False, owner: bool = True
    ) -> None:
        if resume and overwrite:
            raise UserError("--resume and --overwrite exclude each other; give one of them")
        self.path = Path(path)
        self._resume, self._overwrite, self._owner = resume, overwrite, owner
        self._lock = FileLock(self.path / LOCK_NAME)

    def __enter__(self) -> "RunFolder":
        if not self._owner:
            return self
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise LockedError(
                f"{self.path} is in use by another process; "
                "wait for it or choose another OUTPUT_DIR"
            ) from error
        except OSError as error:
            reason = f"{self.path}: cannot be used as output folder ({error.strerror})"
            raise UserError(reason) from error
        try:
            self._prepare()
        except BaseException:
            self._lock.release()
            raise
        return self

    def _prepare(self) -> None:
        for stale in self.path.glob(f"{TEMPORARY_PREFIX}*"):
            stale.unlink()
        if self._resume:
            return
        if not self._overwrite:
            check_unused(self.path)
        for name in (RECORD_NAME, METRICS_NAME, START_NAME, LOGGERS_NAME, EVENT_FILES):
            for earlier in self.path.glob(name):
                earlier.unlink()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def log(self, values: Mapping[str, Any]) -> None:
        """Append one line to `metrics.json`; values that are not finite become null.

        Raises:
            UserError: If the line cannot be written, e.g., because the disk is full.
        """
        check_in_place(self.path)
        line = json.dumps(jsonable(dict(values)), allow_nan=False)
        path = self.path / METRICS_NAME
        try:
            with open_file(path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise write_error(path, error, path.stat().st_size if path.exists() else 0) from error


def check_in_place(folder: PathLike) -> None:
    """Check that the folder of a run still exists, before a write would create it again.

    Raises:
        UserError: If it was moved or deleted.
    """
    if not Path(folder).is_dir():
        raise UserError(
            f"{Path(folder).absolute()} is gone: it was moved or deleted while a run was writing "
            "into it; move it back, and --resume continues from its last checkpoint"
        )


def check_unused(folder: PathLike) -> None:
    """Check that a run may start from scratch in `folder`, without changing anything.

    Raises:
        UserError: If the folder is not empty.
    """
    path = Path(folder)
    files = sorted(p.name for p in path.iterdir() if p.name != LOCK_NAME) if path.is_dir() else []
    if files:
        raise UserError(
            f"{path} is not empty (it holds {files[0]}); "
            "add --resume to continue, --overwrite to start from scratch, or set another OUTPUT_DIR"
        )


def drop_metrics(folder: PathLike, is_kept: Callable[[Mapping[str, Any]], bool]) -> None:
    """Remove the lines of metrics.json that a resumed run writes again, and unreadable ones."""
    if (lines := metrics_lines(folder)) is not None:
        text = "".join(f"{json.dumps(line)}\n" for line in lines if is_kept(line))
        atomic_write_text(Path(folder) / METRICS_NAME, text)


def metrics_lines(folder: PathLike) -> list[dict[str, Any]] | None:
    """Read the lines of metrics.json; None if there is no file.

    A truncated line, or one that is no mapping with an iteration, is left out.
    """
    path, lines = Path(folder) / METRICS_NAME, []
    if not path.is_file():
        return None
    for text in read_text(path).splitlines():
        with suppress(ValueError, RecursionError):
            line = json.loads(text)
            at: Any = line.get("iteration") if isinstance(line, dict) else None
            if _is_number(at) and math.isfinite(at):
                lines.append(line)
    return lines


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """Record of one run and its result; the only source of the numbers in tables.

    Attributes:
        kind: `pretrain`, `detection`, `linear`, `finetune` or `knn`.
        status: `"done"` or `"failed"`; only done runs have numbers.
        task: Name of the recipe or task, e.g. `faster_rcnn_R_50_C4_24k`.
        engine: `"detectron2"`, `"embedded"` or `"moco"`.
        init: Name of the initialization, e.g. `random` or the weights' file name.
        weights_sha256: Hash of the file that MODEL.WEIGHTS names, in a suite of the file that its
            init names; None for random weights.
        weights_source: Source that the file was converted from, or None.
        seed: `SEED`, which determines everything that is sampled.
        config_sha256: Hash of the protocol: every key except seed, folders, weights and devices.
        config: Every resolved key, flat.
        provenance: See `provenance`.
        iterations: Number of optimizer steps.
        seconds: Wall time of training and evaluation.
        metrics: Numbers by canonical name, AP and accuracy in 0..100; None if not a number.
        coverage: Tensors that came from the weights and those left at initialization, or None.
        notes: Facts that a reader of the result needs, one sentence each; the last note of a failed
            run is the error.
        warnings: Facts that every table with the run repeats, such as a small test split.
        diverged: Whether a run failed because a loss or a weight was not finite.
        recipe: `label` ("as in the paper (…)") and `deviations` of a detection run, or None.
        start: Starting point of a fine-tuning or linear classification, or None. The first of
            `batches` is the digest of the first batch (detection/engine/start.py,
            moco/classification/run.py). A frozen backbone has `frozen`, the number of its tensors
            and their digest before and after; a detection run has `weights_sha256`, None for
            random. Earlier records have seven more batches, and `head`, a digest of every tensor
            that came from no file of weights.
        reachable: Score of perfect predictions on the test split of a detection run, or None; the
            runs of a suite share theirs (benchmarks/suites/checks.py), and have it in bundles.
            `highest` maps each headline metric to 0..100, and `faults` lists the reasons why it is
            not 100 (detection/evaluation/reachable.py).
        schema: Version of this format.
    """

    kind: str
    status: str
    task: str
    engine: str
    init: str
    weights_sha256: str | None
    weights_source: str | None
    seed: int
    config_sha256: str
    config: Mapping[str, Any]
    provenance: dict[str, Any]
    iterations: int
    seconds: float
    metrics: dict[str, float | None]
    coverage: dict[str, Any] | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    diverged: bool = False
    recipe: dict[str, Any] | None = None
    start: dict[str, Any] | None = None
    reachable: dict[str, Any] | None = None
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: If a field has a wrong type or an impossible value; the message names it.
        """
        for path, (expected, valid) in _CHECKS.items():
            *parents, name = path
            inside = vars(self)
            for parent in parents:
                inside = inside.get(parent) or {}
            value = inside.get(name)
            if not valid(value) and not (parents and value is None):
                raise ValueError(
                    f"{': '.join(path)}: got {format_value(value)}, expected {expected}"
                )
        for name, value in self.metrics.items():
            if value is not None and not _is_number(value):
                found = f"{name[:80]}: got {format_value(value)}"
                raise ValueError(f"metrics: {found}, expected a number or null")
        for name, value in vars(self).items():
            try:
                check_parts(value, MAX_PARTS)
            except CorruptFileError as error:
                raise ValueError(f"{name}: {error}") from error


def write_record(folder: PathLike, record: RunRecord) -> Path:
    """Write `run.json` atomically, after everything else is on disk."""
    check_in_place(folder)
    path = Path(folder) / RECORD_NAME
    atomic_write_json(path, jsonable(dataclasses.asdict(record)))
    return path


def read_record(path: PathLike) -> RunRecord:
    """Read and validate a `run.json`.

    Raises:
        UserError: If the file cannot be read or is not valid; see `parse_record`.
    """
    try:
        text = read_bytes(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_record(text, path)


def parse_record(text: bytes, path: PathLike) -> RunRecord:
    """Parse and validate the text of a `run.json`; `path` is for messages.

    Raises:
        UserError: If the text is not JSON, a field is missing, unknown or of a wrong type, or a
            number is not finite; the message names the file and the field.
    """
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"got a {type(fields).__name__}, expected a mapping")
        unknown = fields.keys() - {field.name for field in dataclasses.fields(RunRecord)}
        if unknown:
            raise ValueError(f"{min(unknown)[:80]}: no such field")
        record = RunRecord(**fields)
        metrics = {f"metrics: {name[:80]}": value for name, value in record.metrics.items()}
        for name, value in {"seconds": record.seconds, **metrics}.items():
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name}: got {value}, expected a finite number")
        return record
    except (ValueError, TypeError, RecursionError) as error:  # TypeError names a missing field
        raise UserError(f"{path}: not a valid run record ({str(error)[:300]})") from error


def provenance() -> dict[str, Any]:
    """Return versions, source revision, hardware, command and UTC time of this process.

    Returns:
        `versions` of Python and of `PACKAGES` (None if not installed); `project`: its `version` and
        the `source_sha256` of the code that runs; `git`, the revision or None; `hardware`: `cpu`,
        `cpu_threads` and the names of the `gpus`; `command`; `utc`. The
        trainings of `moco/` add `processes` and `images` (number and folder), those of `detection/`
        add `data` (name and hash of each split), `imports`, and in a suite `converted_sha256`, the
        hash of the file that it converted `weights_sha256` into.
    """
    import torch

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None  # type: ignore[assignment]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "versions": versions,
        "project": {"version": __version__, "source_sha256": source_sha256()},
        "git": _git_revision(),
        "hardware": {"cpu": _cpu_name(), "cpu_threads": torch.get_num_threads(), "gpus": gpus},
        "command": shlex.join(sys.argv),
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def jsonable(value: Any) -> Any:
    """Convert a value to JSON types: tuples to lists, NumPy and tensor scalars to numbers.

    Numbers that are not finite become None.
    """
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [jsonable(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_integer(value)


def _is_named_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


_Check = tuple[str, Callable[[Any], bool]]
_NAME: _Check = ("text", lambda value: _is_text(value) and value != "")
_TEXT_OR_NULL: _Check = ("text or null", lambda value: value is None or _is_text(value))
_INTEGER: _Check = ("an integer of at most 64 bits", _is_integer)
_MAPPING: _Check = ("a mapping", lambda value: isinstance(value, Mapping))
_MAPPING_OR_NULL: _Check = ("a mapping or null", lambda value: isinstance(value, dict | None))
_TEXTS: _Check = (
    "a list of texts",
    lambda value: isinstance(value, list | tuple) and all(map(_is_text, value)),
)
# Checks of a record's fields, and of those parts of its mappings that a report reads.
_CHECKS: dict[tuple[str, ...], _Check] = {
    ("schema",): (f"{SCHEMA}", lambda value: value == SCHEMA),
    ("kind",): (f"one of {', '.join(KINDS)}", lambda value: value in KINDS),
    ("status",): ("done or failed", lambda value: value in ("done", "failed")),
    **dict.fromkeys([("task",), ("engine",), ("init",), ("config_sha256",)], _NAME),
    **dict.fromkeys([("weights_sha256",), ("weights_source",)], _TEXT_OR_NULL),
    **dict.fromkeys([("seed",), ("iterations",)], _INTEGER),
    ("seconds",): ("a number", _is_number),
    **dict.fromkeys([("config",), ("provenance",), ("metrics",)], _MAPPING),
    **dict.fromkeys([("coverage",), ("recipe",), ("start",), ("reachable",)], _MAPPING_OR_NULL),
    **dict.fromkeys([("notes",), ("warnings",)], _TEXTS),
    ("diverged",): ("true or false", lambda value: isinstance(value, bool)),
    ("config", "DATASETS.TEST"): _TEXTS,
    ("recipe", "label"): _TEXT_OR_NULL,
    ("recipe", "deviations"): _TEXTS,
    ("start", "batches"): _TEXTS,
    ("reachable", "highest"): ("a mapping to numbers", _is_named_numbers),
    ("reachable", "faults"): _TEXTS,
    ("provenance", "versions"): _MAPPING,
    ("provenance", "git"): _NAME,
    ("provenance", "hardware"): _MAPPING,
    ("provenance", "hardware", "cpu"): _NAME,
    ("provenance", "hardware", "gpus"): _TEXTS,
}


def source_sha256() -> str:
    """Return the hash of the modules of this project, the same for a checkout and its wheel."""
    digest = hashlib.sha256()
    for package in SOURCES:
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
            digest.update(hashlib.sha256(read_bytes(path)).digest())
    return digest.hexdigest()


def _git_revision() -> str | None:
    """Return the revision of a checkout, with `+dirty` if it has changes, else None."""
    if not CHECKOUT:  # site-packages may be inside the repository of another project
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty=+dirty"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        for line in read_text("/proc/cpuinfo").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
