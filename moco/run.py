"""One run, one folder: its lock, its metrics, and the record that makes it a result.

A folder belongs to one process at a time. ``metrics.json`` holds one JSON line per log step, as
Detectron2 writes it. ``run.json`` is written last: a run without it is not done.
"""

import dataclasses
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from moco.errors import LockedError, UserError
from moco.fileio import (
    TEMPORARY_PREFIX,
    PathLike,
    atomic_write_json,
    atomic_write_text,
    cannot_write,
)

SCHEMA = 1
RECORD_NAME = "run.json"
METRICS_NAME = "metrics.json"
EVENT_FILES = "events.out.tfevents.*"  # tensorboard's
LOCK_NAME = ".lock"
KINDS = ("pretrain", "detection", "linear", "finetune", "knn")
PACKAGES = ("torch", "torchvision", "detectron2", "fvcore", "numpy", "pillow")


class RunFolder:
    """The output folder of one run, locked while the context is open.

    Args:
        path: created if missing.
        resume: continue what is in the folder.
        overwrite: start anew; the files of the earlier run that would be mistaken for this one's
            (record, metrics, events) are removed, checkpoints are replaced as they come.
        owner: False for the other processes of a run, which neither lock it nor write to it.

    Raises:
        LockedError: another process holds the folder.
        UserError: the folder holds files and neither ``resume`` nor ``overwrite`` was asked for.
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
            raise UserError(
                f"{self.path}: cannot be used as output folder ({error.strerror})"
            ) from (error)
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
        files = sorted(p.name for p in self.path.iterdir() if p.name != LOCK_NAME)
        if files and not self._overwrite:
            raise UserError(
                f"{self.path} is not empty (it holds {files[0]}); "
                "add --resume to continue, --overwrite to start anew, or set another OUTPUT_DIR"
            )
        for name in (RECORD_NAME, METRICS_NAME, EVENT_FILES):
            for earlier in self.path.glob(name):
                earlier.unlink()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    def log(self, values: Mapping[str, Any]) -> None:
        """Append one line to ``metrics.json``; values that are not finite become null.

        Raises:
            UserError: the disk is full.
        """
        line = json.dumps(jsonable(dict(values)), allow_nan=False)
        path = self.path / METRICS_NAME
        try:
            with open(path, "a") as file:
                file.write(line + "\n")
        except OSError as error:
            raise cannot_write(path, error, path.stat().st_size if path.exists() else 0) from error


def drop_metrics(
    folder: PathLike, last: int, keep: Callable[[Mapping[str, Any]], bool] = lambda line: True
) -> None:
    """Remove lines of metrics.json after an iteration: those of steps that will be done again.

    So is a line that a crash cut off, and one that ``keep`` does not hold for.
    """
    path, kept = Path(folder) / METRICS_NAME, []
    if not path.exists():
        return
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line["iteration"] <= last and keep(line):
            kept.append(text)
    atomic_write_text(path, "".join(f"{text}\n" for text in kept))


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What one run was and what came of it; the only source of a number in a table.

    Attributes:
        kind: one of ``KINDS``.
        status: ``"done"`` or ``"failed"``; only done runs have numbers.
        task: the recipe's or task's name, e.g. ``faster_rcnn_R_50_C4_24k``.
        engine: ``"detectron2"``, ``"embedded"`` or ``"moco"``.
        init: name of the initialisation, e.g. ``random`` or the weights' file name.
        weights_sha256, weights_source: the converted file and what it was made from, or None.
        config_sha256: of the protocol: everything but seed, folders, weights and devices.
        config: every resolved key, flat.
        provenance: see :func:`provenance`.
        seconds: wall time of training and evaluation.
        metrics: canonical name → number, AP and accuracy in 0..100; None where it is not a number.
        coverage: which tensors came from the weights and which started anew, or None.
        notes: what a reader of the number has to know, one sentence each.
        recipe: ``label`` ("as in the paper (…)") and ``deviations`` of a detection run, or None.
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
    config: dict[str, Any]
    provenance: dict[str, Any]
    iterations: int
    seconds: float
    metrics: dict[str, float | None]
    coverage: dict[str, Any] | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    recipe: dict[str, Any] | None = None
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        _choice("kind", self.kind, KINDS)
        _choice("status", self.status, ("done", "failed"))
        if self.schema != SCHEMA:
            raise ValueError(f"schema: got {self.schema}, expected {SCHEMA}")
        for name in ("task", "engine", "init", "config_sha256"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected text")
        for name in ("config", "provenance", "metrics"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"{name}: expected a mapping")
        for name, value in self.metrics.items():
            if value is not None and not isinstance(value, int | float):
                raise ValueError(f"metrics[{name!r}]: got {value!r}, expected a number or null")


def write_record(folder: PathLike, record: RunRecord) -> Path:
    """Write ``run.json`` atomically; to be called after everything else is on disk."""
    path = Path(folder) / RECORD_NAME
    atomic_write_json(path, jsonable(dataclasses.asdict(record)))
    return path


def read_record(path: PathLike) -> RunRecord:
    """Read and validate a ``run.json``.

    Raises:
        UserError: unreadable, not JSON, missing or unknown fields, wrong types.
    """
    try:
        fields = json.loads(Path(path).read_text())
        return RunRecord(**fields)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError) as error:
        reason = str(error).replace("RunRecord.__init__() ", "")
        raise UserError(f"{path}: not a valid run record ({reason})") from error


def provenance() -> dict[str, Any]:
    """Versions, source revision, hardware, command and UTC time of this process."""
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
        "git": _git_revision(),
        "hardware": {"cpu": _cpu_name(), "cpu_threads": torch.get_num_threads(), "gpus": gpus},
        "command": shlex.join(sys.argv),
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def jsonable(value: Any) -> Any:
    """``value`` with tuples as lists, NumPy and tensor scalars as numbers, non-finite as None."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [jsonable(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: got {value!r}, choices are {', '.join(choices)}")


def _git_revision() -> str | None:
    """Revision of this source tree, with ``+dirty`` when it has changes; None outside git."""
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+dirty"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
