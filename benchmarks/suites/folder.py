"""Folder of a suite: the requested content, copies of the weights, and the runs.

suite.json               requested content; every later call on this folder has to agree with it
reachable.json           scores of perfect predictions on the tests, by `metric_sha256`
inits/<name>.pth         copies of the weights, named after their inits
inits/converted/<key>/<name>.pth    the same, converted for the detection runs of some tasks
inits/<name>.knn.json    kNN accuracy during the pre-training whose checkpoints are inits
runs/<task>/<init>/seed<k>-<id>/    see benchmarks/suites/runs.py
features/                maps of frozen backbones, until the runs are over
grid/                    runs of the grids of --tune, and the files of the tuned tasks
tables/                  written at the end
"""

import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from benchmarks.report.along import KNN_METRIC, epoch_of
from benchmarks.report.records import PLAN, SCORES_NAME, SUITE_NAME, knn_name
from benchmarks.suites import locks
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import Run, holder_info, read_json
from benchmarks.suites.suite import (
    CHOOSE,
    DETECTION,
    GRID_POINT,
    Init,
    RunSpec,
    Suite,
    are_texts,
    row_of,
    without_places,
)
from moco.common.cfgnode import flatten
from moco.common.command import RANDOM
from moco.common.errors import DataError, LockedError, UserError, format_value
from moco.common.files import (
    TEMPORARY_PREFIX,
    atomic_write,
    atomic_write_json,
    atomic_write_text,
    expand_home,
    open_file,
    read_text,
    sha256_file,
)
from moco.common.pretrained import (
    ENDINGS,
    ORIGIN,
    SIDECARS,
    LocalWeights,
    sidecar,
    similar_names_hint,
)
from moco.common.run import metrics_lines
from moco.common.sharded import list_files

LOCK_NAME = ".suite.lock"
SCHEMA = 1
# A later call may add to these, but neither remove from them nor change them.
MAY_GROW = ("trials", "inits", "engines")


class SuiteFolder:
    """Paths and content of a suite's folder.

    Args:
        path: Folder, which need not exist.
        marker: Name of a file that marks a folder with files of other programs; empty: no such
            folder is accepted.
    """

    def __init__(self, path: Path, marker: str = "") -> None:
        self.path = path = expand_home(path)
        self._marker = marker
        self.runs, self.grid, self.tables = path / "runs", path / "grid", path / "tables"
        self.converted, self.features = path / "inits" / "converted", path / "features"

    def run(self, spec: RunSpec, argv: Sequence[str] = ()) -> Run:
        """Return the run of a spec; a run without `argv` can be inspected, but not started."""
        expected = {
            "kind": spec.program,
            "engine": spec.engine,
            "seed": spec.seed,
            "init": spec.init,
            "weights_sha256": spec.weights_sha256,
        }
        if spec.program == GRID_POINT:
            expected["kind"] = DETECTION
        elif spec.program == CHOOSE:
            expected = {"kind": spec.program}
        return Run(
            name=spec.name,
            title=spec.title,
            folder=self.folder_of(spec),
            argv=argv,
            speed_key=(spec.task, spec.engine, spec.gpus),
            gpus=spec.gpus,
            iterations=spec.iterations,
            seconds_per_iteration=spec.seconds_per_iteration,
            after=spec.after,
            product=self.tuned_file(spec) if spec.program == CHOOSE else None,
            expected=expected,
            in_grid=spec.in_grid,
        )

    def folder_of(self, spec: RunSpec) -> Path:
        """Return the folder of a run; the tables read the folders below `runs`."""
        return (self.grid if spec.in_grid else self.runs) / spec.name

    def tuned_file(self, choice: RunSpec) -> Path:
        """Return the path of the task file that a choice writes."""
        return self.folder_of(choice) / choice.config.name

    def task_file(self, spec: RunSpec) -> Path:
        """Return the task file of a run; a choice writes the task file of a tuned run."""
        if spec.program == CHOOSE or not spec.after:
            return spec.config
        [choice] = spec.after
        return self.grid / choice / spec.config.name

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the folder, as its only runner.

        Raises:
            LockedError: If another process holds the lock; names the process and the host.
        """
        path = self.path / LOCK_NAME
        lock = Lock.acquire(path)
        if lock is None:
            holder = locks.read_holder(path)
            raise LockedError(
                f"{self.path}: process {holder.get('runner', '?')} on {holder.get('host', '?')} "
                f"has computed it since {holder.get('utc', '?')}; --status shows its progress"
            )
        lock.write(holder_info())
        try:
            yield
        finally:
            lock.release()

    def recorded(self) -> dict[str, Any]:
        """Read the content that earlier calls requested; empty for a new folder.

        Raises:
            UserError: If the path is no folder, cannot be written, or holds other files; or if
                `suite.json` is damaged.
        """
        path = self.path.absolute()
        nearest = next(place for place in (path, *path.parents) if place.exists())
        if not nearest.is_dir():
            raise UserError(f"{nearest}: is a file; expected a folder, choose another --output")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(f"{nearest}: cannot be written; choose another --output")
        content = _read(self.path / SUITE_NAME)
        if nearest == path and not content:
            others = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
            if others and self._marker not in others:
                raise UserError(
                    f"{self.path} holds other files ({others[0]}); choose another --output"
                )
        return content

    def check(self, content: Mapping[str, Any]) -> None:
        """Check that the folder is new or belongs to this suite.

        Args:
            content: Result of `suite_content`.

        Raises:
            UserError: If the folder holds other files, or a suite with other content.
        """
        if before := self.recorded():
            check_agreement(before, content, str(self.path))

    def write(
        self, content: Mapping[str, Any], specs: Sequence[RunSpec], scores: Mapping[str, Any]
    ) -> None:
        """Check the folder, and write `suite.json` and the scores; the caller holds the lock."""
        remove_stale(self.path)
        self.check(content)
        runs = json.loads(json.dumps([asdict(spec) for spec in specs], default=str))
        after = {**content, "schema": SCHEMA, "runs": runs}
        if after != self.recorded():
            atomic_write_json(self.path / SUITE_NAME, after)
        if scores:
            atomic_write_json(self.path / SCORES_NAME, {**self.scores(), **scores})

    def read(self) -> tuple[dict[str, Any], tuple[RunSpec, ...]]:
        """Read the content and the runs of `suite.json`.

        Raises:
            UserError: If the file is missing or of another version.
        """
        path = self.path / SUITE_NAME
        content = _read(path)
        if not content:
            raise UserError(f"{path}: no suite was started here; give the --output of one that was")
        if content.get("schema") != SCHEMA:
            raise UserError(f"{path}: schema: got {content.get('schema')}, expected {SCHEMA}")
        try:
            specs = tuple(map(_spec, content["runs"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: runs: not those of a suite ({error})") from error
        return content, specs

    def scores(self) -> dict[str, Any]:
        """Return the scores of perfect predictions that earlier calls have computed."""
        return read_json(self.path / SCORES_NAME)

    def recorded_data(self) -> dict[str, str] | None:
        """Return task → recorded digest of its custom data; None if the folder is new."""
        if not (before := self.recorded()):
            return None
        return {name: str(each.get("data", "")) for name, each in before["tasks"].items()}

    def copy_weights(self, inits: Mapping[str, Init]) -> dict[str, str]:
        """Copy the weights into the folder, named after their inits.

        Links to the weights would be broken on other machines.

        Returns:
            Init → weights of the runs: `random`, or the path of the copy.
        """
        weights = {name: init.weights for name, init in inits.items() if init.sha256 is None}
        for name in [name for name in inits if name not in weights]:
            source, sha256 = Path(inits[name].weights), inits[name].sha256
            ending = next((end for end in ENDINGS if source.name.endswith(end)), "")
            copy = self.path / "inits" / f"{name}{ending}"
            if copy.is_symlink() or not copy.is_file() or sha256_file(copy) != sha256:
                with open_file(source) as file:
                    atomic_write(copy, partial(shutil.copyfileobj, file))
            if inits[name].origin:
                atomic_write_text(f"{copy}{ORIGIN}", inits[name].origin)
            for each in SIDECARS:
                if (metadata := sidecar(source, each)).is_file():
                    atomic_write_text(f"{copy}.{each}", read_text(metadata))
            weights[name] = str(copy)
        self._copy_knn(inits)
        return weights

    def _copy_knn(self, inits: Mapping[str, Init]) -> None:
        """Copy the kNN accuracies that pre-trainings have logged next to their checkpoints."""
        found = {name: epoch_of(name) for name, init in inits.items() if init.sha256}
        folders = {at[0]: Path(inits[name].weights).parent for name, at in found.items() if at}
        for pretraining, folder in folders.items():
            lines = [line for line in metrics_lines(folder) or () if KNN_METRIC in line]
            if lines:
                text = "".join(f"{json.dumps(line)}\n" for line in lines)
                atomic_write_text(self.path / knn_name(pretraining), text)


def _is_named(kind: type) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, dict) and all(isinstance(each, kind) for each in value.values())
    )


def _are_tasks(value: Any) -> bool:
    return _is_named(dict)(value) and all(
        isinstance(each.get("keys"), dict) for each in value.values()
    )


# Part of `suite.json` that is read again → check of the value.
_SHAPE: dict[str, Callable[[Any], bool]] = {
    "suite": lambda value: isinstance(value, str),
    "trials": _is_named(int),
    "engines": are_texts,
    "inits": _is_named(str),
    "tasks": _are_tasks,
}


def _read(path: Path) -> dict[str, Any]:
    """Read `suite.json`, which may be a file of another program; empty if there is none.

    Raises:
        UserError: If the file is damaged, or not of a suite.
    """
    content = read_json(path)
    for key, is_valid in _SHAPE.items() if content else ():
        if not is_valid(content.get(key)):
            got = format_value(content[key]) if key in content else "nothing"
            raise UserError(f"{path}: not of a suite ({key}: got {got}); choose another --output")
    return content


def _spec(run: Mapping[str, Any]) -> RunSpec:
    """Make a run from an untrusted part of `suite.json`; raise an error for another shape.

    Suites of earlier versions have further fields.
    """
    tuples: dict[str, Any] = {
        "overrides": tuple((str(key), str(value)) for key, value in run["overrides"])
    }
    tuples |= {
        name: tuple(map(str, run.get(name, ()))) for name in ("after", "arguments", "points")
    }
    kinds = get_type_hints(RunSpec)
    known = {name: value for name, value in run.items() if name in kinds}
    spec = RunSpec(**{**known, "config": Path(run["config"]), **tuples})
    for name, kind in kinds.items():
        if isinstance(kind, type) and not isinstance(value := getattr(spec, name), kind):
            raise TypeError(f"{name}: got {format_value(value)}")
    return spec


def hash_inits(weights: Mapping[str, LocalWeights | None]) -> dict[str, Init]:
    """Hash the files of the inits.

    Args:
        weights: Init → file; None stands for random initialization.

    Raises:
        DataError: If files do not exist; one line names all of them.
        UserError: If a checkpoint is in parts, or two pre-trainings of one row have the same bytes.
    """
    missing = [
        f"--init {name}={found.path}: no such file{similar_names_hint(str(found.path))}"
        for name, found in weights.items()
        if found and not found.path.is_file()
    ]
    if missing:
        raise DataError("; ".join(missing))
    for name, found in weights.items():
        if found and list_files(found.path):
            raise UserError(
                f"--init {name}={found.path}: is a checkpoint in parts, of which a suite would "
                "copy the index alone; convert it first, and give the converted file"
            )
    inits = {
        name: Init(str(found.path.resolve()), sha256_file(found.path), found.origin)
        if found
        else Init(RANDOM, None)
        for name, found in weights.items()
    }
    seen: dict[tuple[str, str | None], str] = {}
    for name, init in inits.items():
        if (other := seen.setdefault((row_of(name), init.sha256), name)) != name:
            raise UserError(
                f"--init: {other} and {name} are the same weights; expected two pre-trainings"
            )
    return inits


def suite_content(
    suite: Suite,
    inits: Mapping[str, Init],
    engines: Sequence[str],
    *,
    version: str,
    gpus: int | None = None,
    data: Mapping[str, str] | None = None,
    plan: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of `suite.json`, for `SuiteFolder.write`.

    Args:
        suite: Suite with the options of the command line.
        inits: Name → init.
        engines: Detection engines.
        version: Version of this project.
        gpus: Value of --gpus-per-run, if given.
        data: Task → digest of custom data; empty if there is none.
        plan: Plan of the looks after which seeds are added, or None.
    """
    tasks: dict[str, dict[str, Any]] = {
        task.name: {
            "config": task.config.name,
            "program": task.program,
            "keys": without_places(dict(task.overrides)),
            "random_keys": without_places(dict(task.random_overrides)),
            "engines": list(task.engines),
            "without": list(task.without),
        }
        for task in suite.tasks
    }
    for name, digest in (data or {}).items():
        if digest:
            tasks[name]["data"] = digest
    return {
        "suite": suite.name,
        "version": version,
        "trials": {task.name: task.trials for task in suite.tasks},
        "engines": list(engines),
        "gpus_per_run": gpus,
        "inits": {name: init.sha256 or init.weights for name, init in inits.items()},
        "tasks": tasks,
        PLAN: plan,
    }


def check_agreement(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Check that a call requests what the first call did, or more trials, inits or engines.

    Raises:
        UserError: If they differ; names the first difference.
    """
    # New tasks are fine, e.g. tuned ones, but the content of a task may not change.
    known = {name: task for name, task in now["tasks"].items() if name in before["tasks"]}
    old, new = (
        flatten({**call, "tasks": {name: _without_grid(task) for name, task in tasks.items()}})
        for call, tasks in ((before, before["tasks"]), (now, known))
    )
    for key in dict.fromkeys((*new, *old)):
        part, was, is_ = key.partition(".")[0], old.get(key), new.get(key)
        if part not in now or was == is_:
            continue
        grows = part in MAY_GROW and was is None
        grows |= part == "trials" and (is_ or 0) > (was or 0)
        grows |= part == "engines" and set(was or ()) <= set(is_ or ())
        if not grows:
            was, is_ = (t if len(t) <= 60 else f"{t[:12]}..." for t in (str(was), str(is_)))
            raise UserError(
                f"{where} was made by another command ({key}: {was} before, {is_} now); repeat "
                "that command, or choose another --output"
            )


def _without_grid(task: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the grid of a task, which may change: the points of a wider grid are further runs."""
    keys = {key: value for key, value in task["keys"].items() if key != "SOLVER.TUNED"}
    return {**task, "keys": keys}


def remove_stale(folder: Path) -> None:
    """Remove the unfinished files of a killed process; the caller holds the suite's lock."""
    for stale in folder.glob(f"{TEMPORARY_PREFIX}*"):
        stale.unlink(missing_ok=True)


def project_version() -> str:
    """Return the version of the installed package, or `source` if it is not installed."""
    try:
        return importlib.metadata.version("moco-transfer")
    except importlib.metadata.PackageNotFoundError:
        return "source"
