"""Validated records of run folders. Only finished runs have numbers; the others are listed.

A run writes its record (`run.json`) last, so a folder with other files of a run but no record is
unfinished. Nothing is read from logs.
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

from benchmarks.report.bundle import (
    SCORES_NAME,
    SUITE_NAME,
    Evidence,
    parse_mapping,
    read_bundle,
    seed_plan,
    suite_task,
)
from benchmarks.report.sequential import SeedPlan
from detection.config import keys
from detection.evaluation.metrics import HEADLINE, metric_sha256
from moco.classification import config as classification
from moco.common.cfgnode import cfg_sha256
from moco.common.command import RANDOM
from moco.common.errors import UserError, shown
from moco.common.files import PathLike, read_bytes
from moco.common.keys import Keys
from moco.common.run import DIGITS, METRICS_NAME, RECORD_NAME, RunRecord, read_record
from moco.engine.config import protocol_sha256
from moco.engine.keys import CLASSIFICATION

TASK_KEYS: Keys = {**CLASSIFICATION, **keys.KEYS}  # of the tasks that have rows in a report


@dataclass(frozen=True)
class FinishedRun:
    """Record of a finished run, and the folder that it was found in.

    Attributes:
        folder: Folder of the record, which need not be the one that the run wrote.
        record: Validated record.
        suite_task: Name of the task in its suite, or None for a run outside of a suite.
        evidence: Other files of the run, which need not be in `folder`.
        plan: Plan of the looks of its suite, or None if its number of seeds was fixed.
    """

    folder: Path
    record: RunRecord
    suite_task: str | None = None
    evidence: Evidence | None = field(default=None, compare=False)
    plan: SeedPlan | None = None

    def read(self, name: str) -> bytes | None:
        """Return the content of a file of `EVIDENCE`, or None if the run does not have it.

        Raises:
            DataError: If the file cannot be read or exceeds its maximum size.
        """
        return self.evidence.read(name) if self.evidence else None

    def read_knn(self, pretraining: str) -> bytes | None:
        """Return the kNN accuracies of a pre-training from the run's suite; raise as `read`."""
        return self.evidence.read_knn(pretraining) if self.evidence and self.suite_task else None

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
        return f"{hardware['cpu']}, {hardware.get('cpu_threads')} threads"

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
    suites: dict[Path, tuple[SeedPlan | None, dict[str, Any]]] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path}: no such run folder")
        if path.suffix == ".zip" and path.is_file():
            own = path.resolve()
            for inside, (record, task, plan) in read_bundle(path).items():
                made = _hashed(record), task, Evidence(inside, own), plan
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
                f"{folder / RECORD_NAME}: got the init {shown(record.init)} with weights_sha256 "
                f"{sha256}; expected {RANDOM!r} if and only if there are no weights"
            )
        if record.status != "done":
            reason = record.notes[-1] if record.notes else "no reason recorded"
            unusable.append(Unusable(folder, f"failed: {reason}"))
        elif record.kind == "pretrain":
            pretraining.append(run)
        else:
            transfer.append(run)
    return Results(tuple(transfer), tuple(pretraining), tuple(unusable))


def _read_run(
    folder: Path,
    configs: dict[frozenset[str], Mapping[str, Any]],
    suites: dict[Path, tuple[SeedPlan | None, dict[str, Any]]],
) -> FinishedRun:
    record = _hashed(read_record(folder / RECORD_NAME))
    task = suite_task(folder, Path.is_file)
    if task is None:
        return FinishedRun(folder, _sharing_config(record, configs), None, Evidence(folder))
    suite = folder.parents[3]
    if suite not in suites:
        file, scores = suite / SUITE_NAME, suite / SCORES_NAME
        known = parse_mapping(read_bytes(scores), str(scores)) if scores.is_file() else {}
        suites[suite] = seed_plan(read_bytes(file), str(file)), known
    plan, known = suites[suite]
    try:
        record = _sharing_config(_with_score(record, known), configs)
    except ValueError as error:
        raise UserError(f"{suite / SCORES_NAME}: not scores of a suite ({error})") from error
    return FinishedRun(folder, record, task, Evidence(folder), plan)


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
    """Compute the protocol hash of a record from its configuration.

    Its own may be over an older set of keys. Pre-training runs are not in tables and keep theirs.
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
