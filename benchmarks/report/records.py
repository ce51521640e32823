"""Run folders → validated records. Only a finished run has numbers; the others are listed by name.

A record (`run.json`) is written last by the run itself, so a folder with other traces of a run
but without it is unfinished. Nothing is read from logs.
"""

import hashlib
import json
import os
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from benchmarks.report.bundle import Evidence, read_bundle, suite_task
from detection.config import keys
from detection.evaluation.metrics import HEADLINE
from moco.classification import config as classification
from moco.common.cfgnode import cfg_sha256
from moco.common.errors import UserError
from moco.common.files import PathLike
from moco.common.run import DIGITS, METRICS_NAME, RECORD_NAME, RunRecord, read_record
from moco.engine.config import protocol_sha256


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its record and where it was found, maybe not the machine that wrote it.

    Attributes:
        suite_task: the suite's name of the task; None of a run outside of a suite.
        evidence: its other files, also where `folder` is not theirs.
    """

    folder: Path
    record: RunRecord
    suite_task: str | None = None
    evidence: Evidence | None = field(default=None, compare=False)

    def read(self, name: str) -> bytes | None:
        """A file of `EVIDENCE` (benchmarks/report/bundle.py); None: it has none.

        Raises:
            DataError: it cannot be read, or is larger than any.
        """
        return self.evidence.read(name) if self.evidence else None

    @property
    def digest(self) -> str:
        """Tell the run from an earlier one in its folder, for what is made of it later."""
        r = self.record
        made = (r.task, r.engine, r.init, r.seed, r.weights_sha256, r.metrics)
        text = json.dumps([*made, r.provenance.get("utc")], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]

    @property
    def tested_on(self) -> tuple[str, ...]:
        """DATASETS.TEST; empty where there is none (classifications)."""
        return tuple(self.record.config.get("DATASETS.TEST") or ())

    @property
    def label(self) -> str:
        """`as in the paper (…)` or the like, then every deviation; empty if there is none."""
        recipe = self.record.recipe or {}
        parts = [str(recipe.get("label") or ""), *map(str, recipe.get("deviations") or ())]
        return "; ".join(part for part in parts if part)

    @property
    def versions(self) -> str:
        """`python 3.11.4, torch 2.5.1, …`: what was installed, and the project's revision."""
        made = self.record.provenance
        parts = [f"{k} {v}" for k, v in (made.get("versions") or {}).items() if v is not None]
        return ", ".join([*parts, *([f"git {made['git'][:12]}"] if made.get("git") else [])])

    @property
    def hardware(self) -> str:
        """`8 x NVIDIA V100` or the processor's name, with its number of threads."""
        hardware = self.record.provenance.get("hardware") or {}
        if gpus := list(hardware.get("gpus") or ()):
            return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
        if not hardware.get("cpu"):
            return ""
        return f"{hardware['cpu']}, {hardware.get('cpu_threads')} threads"

    @property
    def finished(self) -> str:
        """When it was, in UTC whatever the zone it was noted in; empty if that is not known."""
        try:
            noted = datetime.fromisoformat(str(self.record.provenance.get("utc")))
            if noted.tzinfo is None:  # provenance() writes UTC
                noted = noted.replace(tzinfo=UTC)
            return noted.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        except (ValueError, OverflowError):
            return ""


@dataclass(frozen=True)
class Unusable:
    """A run that has no numbers, and why."""

    folder: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.folder}: {self.reason}"


@dataclass(frozen=True)
class Results:
    """The runs of a set of folders."""

    transfer: tuple[FinishedRun, ...]  # everything but pre-training: the rows of tables
    pretraining: tuple[FinishedRun, ...]
    unusable: tuple[Unusable, ...]


def collect(paths: Sequence[PathLike]) -> Results:
    """Read every run below `paths`: run folders, folders of run folders, `run.json` files, bundles.

    A folder reached twice counts once. The order is that of the folders' names.

    Raises:
        UserError: a path that does not exist, no run below any of them, or an invalid record.
        DataError: a damaged bundle.
    """
    found: dict[Path, FinishedRun | None] = {}
    configs: dict[frozenset[str], Mapping[str, Any]] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path}: no such run folder")
        if path.suffix == ".zip" and path.is_file():
            own = path.resolve()
            for inside, pair in read_bundle(path).items():
                record, task = pair
                evidence = Evidence(inside, own)
                found[own / inside] = FinishedRun(own / inside, _hashed(record), task, evidence)
            continue
        for folder in [path.parent.resolve()] if path.is_file() else _run_folders(path.resolve()):
            has_record = (folder / RECORD_NAME).is_file()
            found[folder] = _read_run(folder, configs) if has_record else None
    if not found:
        raise UserError(
            f"no runs below {', '.join(map(str, paths))}; expected folders with a {RECORD_NAME}, "
            "as moco-transfer train, linear and finetune write them into OUTPUT_DIR"
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
        if record.status != "done":
            reason = record.notes[-1] if record.notes else "no reason recorded"
            unusable.append(Unusable(folder, f"failed: {reason}"))
        elif record.kind == "pretrain":
            pretraining.append(run)
        else:
            transfer.append(run)
    return Results(tuple(transfer), tuple(pretraining), tuple(unusable))


def _read_run(folder: Path, configs: dict[frozenset[str], Mapping[str, Any]]) -> FinishedRun:
    record = _sharing_config(_hashed(read_record(folder / RECORD_NAME)), configs)
    return FinishedRun(folder, record, suite_task(folder, Path.is_file), Evidence(folder))


def _hashed(record: RunRecord) -> RunRecord:
    """The record with the hash of the keys that it has; its own may be of others."""
    config = record.config
    if record.kind == "detection":
        sha256 = keys.protocol_sha256(config)
    elif record.kind in ("linear", "finetune"):
        defaults = classification.default_cfg({})
        sha256 = protocol_sha256(config, defaults, classification.NOT_PROTOCOL)
    elif record.kind == "knn":
        sha256 = cfg_sha256(config)
    else:  # of pre-training there are no tables
        return record
    return record if sha256 == record.config_sha256 else replace(record, config_sha256=sha256)


def _sharing_config(
    record: RunRecord, configs: dict[frozenset[str], Mapping[str, Any]]
) -> RunRecord:
    """The record with its config as what differs from the first one with the same keys.

    Configs are most of a record's memory, and those of a suite differ in few values.
    """
    first = configs.setdefault(frozenset(record.config), record.config)
    if first is record.config:
        return record
    own = {
        key: value
        for key, value in record.config.items()
        if (other := first[key]) is not value and (type(other), other) != (type(value), value)
    }
    # Nothing writes into the second one.
    shared = cast(MutableMapping[str, Any], first)
    record = copy(record)  # not `replace`, which would check it a second time
    object.__setattr__(record, "config", ChainMap(own, shared))
    return record


def _run_folders(root: Path) -> Iterator[Path]:
    """Folders below `root` with a record or, as traces of an unfinished run, metrics.

    What is inside a run's folder belongs to that run: `--eval-only` leaves the record of an
    evaluation in `inference/`, which is not another trial.
    """
    for folder, below, files in os.walk(root):
        if RECORD_NAME in files or METRICS_NAME in files:
            yield Path(folder)
            below.clear()
