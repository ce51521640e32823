"""A suite's folder: what was asked, and how far each run is. Nothing is read from logs.

suite.json               what was asked, agreed on by every call on this folder
inits/<name>.pth         copies of the weights, so that a run is named after its init
runs/<task>/<init>/seed<k>-<id>/
    run.json             by the run itself, last: a run is done when this says so
    suite.log            what its processes printed
    .claim               locked by who is at it, and who that is
    failed.json          why it failed; no number comes from such a run
tables/                  made at the end
"""

import importlib.metadata
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report.records import Results, Unusable
from benchmarks.suites import locks as claims
from benchmarks.suites.jobs import last_iteration
from benchmarks.suites.keep import newest_name
from benchmarks.suites.locks import Claim
from benchmarks.suites.suite import (
    DETECTION,
    RANDOM,
    WEIGHT_ENDINGS,
    Init,
    RunSpec,
    Suite,
    trials_of,
    without_places,
)
from moco.common.errors import DataError, UserError
from moco.common.files import TEMPORARY_PREFIX, atomic_write, atomic_write_json, sha256_file
from moco.common.run import METRICS_NAME, RECORD_NAME, RunRecord, read_record

SUITE_NAME, LOCK_NAME = "suite.json", ".suite.lock"
RUNS, TABLES, INITS = "runs", "tables", "inits"
LOG_NAME, CLAIM_NAME, FAILED_NAME = "suite.log", ".claim", "failed.json"
DONE, RUNNING, FAILED, STOPPED, WAITING = "done", "running", "failed", "interrupted", "waiting"
CHECKPOINT = "checkpoint"  # in a lock file: the newest checkpoint when the process began
SCHEMA = 1
# A later call may ask for more of these, never for less or for something else.
MAY_GROW = ("trials", "inits", "engines")


@dataclass(frozen=True)
class State:
    """How far a run is.

    Attributes:
        kind: `done`, `running`, `failed`, `interrupted` (to be continued) or `waiting`.
        iteration: the last one that it has logged.
        text: why it failed, or who is at it.
        seconds: since its process started, for a running one; of the whole run for a done one, 0
            where its record has those of its last process alone.
        began_at: the iteration that its process started at.
        foreign: it failed because its folder holds what is not of it, from which nothing goes on.
    """

    kind: str
    iteration: float = 0.0
    text: str = ""
    seconds: float = 0.0
    began_at: float = 0.0
    foreign: bool = False

    @property
    def settled(self) -> bool:
        return self.kind in (DONE, FAILED)


class SuiteFolder:
    """The paths of a suite's folder, and the states of its runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def runs(self) -> Path:
        return self.path / RUNS

    @property
    def tables(self) -> Path:
        return self.path / TABLES

    def run(self, spec: RunSpec) -> Path:
        return self.runs / spec.name

    def log(self, spec: RunSpec) -> Path:
        return self.run(spec) / LOG_NAME

    def claim(self, spec: RunSpec) -> Path:
        return self.run(spec) / CLAIM_NAME

    def metrics(self, spec: RunSpec) -> Path:
        return self.run(spec) / METRICS_NAME

    def checkpoint(self, spec: RunSpec) -> str:
        """The name of a run's newest checkpoint; empty before the first.

        Another name is progress. `metrics.json` is not: what it tells after the newest checkpoint
        is done again, and what it does not tell yet may be saved.
        """
        return newest_name(self.run(spec))

    def lock(self) -> AbstractContextManager[None]:
        """For what two runners must not do at the same time; held for moments."""
        return claims.alone(self.path / LOCK_NAME)

    def state(self, spec: RunSpec, *, mine: bool = False) -> State:
        """How far a run is; reads only.

        Args:
            mine: the caller holds the run's claim, so nobody else is at it.
        """
        folder, iteration = self.run(spec), last_iteration(self.metrics(spec))
        try:
            record = self.record(spec)
        except UserError as error:
            return State(FAILED, iteration, f"{error}; {_anew(folder)}", foreign=True)
        if record is not None and record.status == "done":
            problem = contradiction(spec, record)
            if problem:
                text = f"{folder / RECORD_NAME} is not of this run: {problem}; {_anew(folder)}"
                return State(FAILED, text=text, foreign=True)
            return State(DONE, record.iterations, seconds=self._whole_seconds(spec, record))
        if not mine and claims.held(self.claim(spec)):
            who = claims.read(self.claim(spec))
            return State(
                RUNNING,
                iteration,
                f"on {who.get('host', '?')} since {who.get('utc', '?')}",
                max(0.0, time.time() - float(who.get("time", math.inf))),
                float(who.get("iteration", 0.0)),
            )
        failed = read_json(folder / FAILED_NAME)
        if failed:
            return State(FAILED, iteration, f"{failed['error']}; its log is {self.log(spec)}")
        if record is not None:
            reason = record.notes[-1] if record.notes else "no reason recorded"
            return State(FAILED, iteration, f"{reason}; its log is {self.log(spec)}")
        begun = iteration > 0 or self.log(spec).exists()
        return State(STOPPED if begun else WAITING, iteration)

    def record(self, spec: RunSpec) -> RunRecord | None:
        path = self.run(spec) / RECORD_NAME
        return read_record(path) if path.is_file() else None

    def _whole_seconds(self, spec: RunSpec, record: RunRecord) -> float:
        """A detection run that was continued has only its last process's in its record: 0."""
        began = claims.read(self.claim(spec))
        resumed = began.get(CHECKPOINT) or began.get("iteration")
        return 0.0 if spec.program == DETECTION and resumed else record.seconds

    def note_claim(self, claim: Claim, spec: RunSpec) -> None:
        """Say who is at a run, for `--status`."""
        now = datetime.now(UTC)
        content = {
            "host": socket.gethostname(),
            "runner": os.getpid(),
            "utc": now.strftime("%Y-%m-%d %H:%M UTC"),
            "time": now.timestamp(),
            "iteration": last_iteration(self.metrics(spec)),
            CHECKPOINT: self.checkpoint(spec),
        }
        claim.write(content)

    def fail(self, spec: RunSpec, error: str, exit_code: int) -> None:
        """Note that a run failed; only for who holds its claim."""
        content = {
            "error": error,
            "exit_code": exit_code,
            "utc": datetime.now(UTC).isoformat(timespec="microseconds"),
        }
        atomic_write_json(self.run(spec) / FAILED_NAME, content)

    def failure(self, spec: RunSpec) -> str:
        """What tells one failure of a run from the next; empty if it has not failed."""
        return str(read_json(self.run(spec) / FAILED_NAME).get("utc", ""))

    def forget_failure(self, spec: RunSpec) -> None:
        """Before a failed run is tried again; only for who holds its claim."""
        (self.run(spec) / FAILED_NAME).unlink(missing_ok=True)
        record = self.record(spec)
        if record is not None and record.status != "done":
            (self.run(spec) / RECORD_NAME).unlink()

    def results(self, specs: Sequence[RunSpec]) -> Results:
        """Finished runs of this suite, and why the others have no numbers.

        Only runs of `specs` count, whatever else lies in the folder.
        """
        from benchmarks.report.records import collect

        states = {spec: self.state(spec) for spec in specs}
        done = [self.run(spec) for spec, state in states.items() if state.kind == DONE]
        found = collect(done) if done else Results((), (), ())
        unusable = tuple(
            Unusable(self.run(spec), reason(state))
            for spec, state in states.items()
            if state.kind != DONE
        )
        return replace(found, unusable=unusable)

    def agree(self, content: Mapping[str, Any], specs: Sequence[RunSpec]) -> None:
        """Make the folder this suite's, or check that it is.

        Args:
            content: from `asked`.

        Raises:
            UserError: the folder holds something else, or was made with something else.
        """
        path = self.path / SUITE_NAME
        self._check_folder()
        with self.lock():
            remove_stale(self.path)
            before = read_json(path)
            if before:
                check_agreement(before, content, str(self.path))
            runs = [_described(spec) for spec in specs]
            after = {**content, "schema": SCHEMA, "runs": runs}
            if after != before:
                atomic_write_json(path, after)

    def check(self, content: Mapping[str, Any]) -> None:
        """The checks of `agree`, without writing.

        Raises:
            UserError: as there.
        """
        self._check_folder()
        before = read_json(self.path / SUITE_NAME)
        if before:
            check_agreement(before, content, str(self.path))

    def asked(self) -> tuple[dict[str, Any], tuple[RunSpec, ...]]:
        """What `suite.json` says, and its runs.

        Raises:
            UserError: there is none, or it is of another version.
        """
        path = self.path / SUITE_NAME
        content = read_json(path)
        if not content:
            raise UserError(f"{path}: no suite was started here; give --output of one that was")
        if content.get("schema") != SCHEMA:
            raise UserError(f"{path}: schema: got {content.get('schema')}, expected {SCHEMA}")
        return content, tuple(_spec(run) for run in content["runs"])

    def data_before(self) -> dict[str, str] | None:
        """Task → digest of its own folders of data, as the folder was made; None: it is new.

        Raises:
            UserError: the folder is none, or cannot be written.
        """
        self._check_folder()
        tasks = read_json(self.path / SUITE_NAME).get("tasks")
        return tasks and {name: str(task.get("data", "")) for name, task in tasks.items()}

    def copy_weights(self, inits: Mapping[str, Init]) -> dict[str, str]:
        """Init → what its runs are given: the word `random`, or a copy called after the init.

        A copy, since a link to where the weights are on one machine leads nowhere on another.
        """
        given = {}
        with self.lock():
            for name, init in inits.items():
                if init.weights == RANDOM:
                    given[name] = RANDOM
                    continue
                source = Path(init.weights)
                copy = self.path / INITS / f"{name}{_ending(source.name)}"
                if copy.is_symlink() or not copy.is_file() or sha256_file(copy) != init.sha256:
                    with open(source, "rb") as file:
                        atomic_write(copy, partial(shutil.copyfileobj, file))
                given[name] = str(copy)
        return given

    def _check_folder(self) -> None:
        path = self.path.absolute()
        nearest = next(place for place in (path, *path.parents) if place.exists())
        if not nearest.is_dir():
            raise UserError(f"{nearest}: is a file; expected a folder, choose another --output")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(f"{nearest}: cannot be written; choose another --output")
        if nearest != path:
            return
        if (self.path / SUITE_NAME).is_file():
            return
        others = sorted(p.name for p in self.path.iterdir() if not p.name.startswith("."))
        if others:
            raise UserError(f"{self.path} holds other files ({others[0]}); choose another --output")


def reason(state: State) -> str:
    """Why a run that is not done has no numbers."""
    if state.kind == FAILED:
        return f"failed: {state.text}"
    return "unfinished: " + {
        RUNNING: "it is still running",
        STOPPED: "it was interrupted",
        WAITING: "it was not started",
    }.get(state.kind, state.kind)


def _anew(folder: Path) -> str:
    return f"remove {folder}, and the same command computes it anew"


def contradiction(spec: RunSpec, record: RunRecord) -> str:
    """Where a finished run's record is not of `spec`; empty if it is."""
    for name, got, expected in (
        ("kind", record.kind, spec.program),
        ("engine", record.engine, spec.engine),
        ("seed", record.seed, spec.seed),
        ("init", record.init, spec.init),
        ("weights_sha256", record.weights_sha256, spec.weights_sha256),
    ):
        if got != expected:
            return f"{name} is {got}, expected {expected}"
    return ""


def identify(weights: Mapping[str, str]) -> dict[str, Init]:
    """Name → what it stands for, by the hash of the file's bytes.

    Raises:
        DataError: a file that does not exist; one line for all of them.
    """
    missing = [
        f"--init {name}={file}: no such file"
        for name, file in weights.items()
        if file != RANDOM and not Path(file).expanduser().is_file()
    ]
    if missing:
        raise DataError("; ".join(missing))
    inits = {}
    for name, file in weights.items():
        path = Path(file).expanduser()
        inits[name] = (
            Init(RANDOM, None) if file == RANDOM else Init(str(path.resolve()), sha256_file(path))
        )
    return inits


def asked(
    suite: Suite,
    inits: Mapping[str, Init],
    trials: int | None,
    engines: Sequence[str],
    gpus: int | None,
    version: str,
    data: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What `suite.json` holds, for `SuiteFolder.agree`.

    Args:
        data: task → digest of its own folders of data; empty: it has none.
    """
    tasks = {
        task.name: {
            "config": task.config.name,
            "program": task.program,
            "keys": without_places(dict(task.overrides)),
            "random_keys": without_places(dict(task.random_overrides)),
            "engines": list(task.engines),
            "without": list(task.without),
            **({"data": data[task.name]} if data and data[task.name] else {}),
        }
        for task in suite.tasks
    }
    return {
        "suite": suite.name,
        "version": version,
        "trials": trials_of(suite, trials),
        "engines": list(engines),
        "gpus_per_run": gpus,
        "inits": {name: init.sha256 or RANDOM for name, init in inits.items()},
        "tasks": tasks,
    }


def check_agreement(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Raise UserError for the first thing in which a later call differs from the first.

    Trials, inits and engines may become more; what is there must stay.
    """
    for key, value in now.items():
        old: Any = before.get(key)
        if old == value:
            continue
        if key == "trials":
            fewer = [name for name, number in old.items() if value.get(name, 0) < number]
            change = f"trials of {fewer[0]}: {old[fewer[0]]} before" if fewer else ""
        elif key == "engines":
            change = "" if set(old) <= set(value) else f"engines: {old} before, {value} now"
        elif isinstance(value, Mapping) and isinstance(old, Mapping):
            change = _changed(key, old, value)
        else:
            change = f"{key}: {old!r} before, {value!r} now"
        if change:
            raise UserError(
                f"{where} was made by another call ({change}); repeat that one, or choose another "
                "--output"
            )


def remove_stale(folder: Path) -> None:
    """Remove what a killed process had not finished writing; only under the suite's lock."""
    for stale in folder.glob(f"{TEMPORARY_PREFIX}*"):
        stale.unlink(missing_ok=True)


def project_version() -> str:
    """Of the installed package; `source` for a tree that was not installed."""
    try:
        return importlib.metadata.version("moco-transfer")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file that is written atomically; empty if there is none.

    Raises:
        UserError: it is damaged.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping, got {type(content).__name__}")
    return content


def _changed(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in new:
            return f"{key}: {name} is missing"
        if name not in old:
            if key in MAY_GROW:
                continue
            return f"{key}: {name} is new"
        if old[name] == new[name]:
            continue
        if isinstance(old[name], Mapping) and isinstance(new[name], Mapping):
            inner = _changed(f"{key}: {name}", old[name], new[name])
            if inner:
                return inner
            continue
        return f"{key}: {name} was {_short(old[name])}, is {_short(new[name])}"
    return ""


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:12]}..."


def _described(spec: RunSpec) -> dict[str, Any]:
    fields = asdict(spec)
    fields["config"] = str(spec.config)
    fields["overrides"] = [list(pair) for pair in spec.overrides]
    return fields


def _spec(fields: Mapping[str, Any]) -> RunSpec:
    pairs = tuple((key, value) for key, value in fields["overrides"])
    return RunSpec(**{**fields, "config": Path(fields["config"]), "overrides": pairs})


def _ending(name: str) -> str:
    return next((ending for ending in WEIGHT_ENDINGS if name.endswith(ending)), "")
