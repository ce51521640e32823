"""A suite's folder: what was requested, the copies of its weights, and its runs.

suite.json               what was requested, agreed on by every call on this folder
inits/<name>.pth         copies of the weights, so that a run is named after its init
runs/<task>/<init>/seed<k>-<id>/    see benchmarks/suites/runs.py
tables/                  made at the end
"""

import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.suites import locks
from benchmarks.suites.runs import Run, read_json
from benchmarks.suites.suite import (
    Init,
    RunSpec,
    Suite,
    row_of,
    without_places,
)
from moco.common.cfgnode import flatten
from moco.common.command import RANDOM
from moco.common.errors import DataError, UserError
from moco.common.files import (
    TEMPORARY_PREFIX,
    atomic_write,
    atomic_write_json,
    atomic_write_text,
    sha256_file,
)
from moco.common.pretrained import ENDINGS, ORIGIN, LocalWeights, like

SUITE_NAME, LOCK_NAME = "suite.json", ".suite.lock"
SCHEMA = 1
# A later call may request more of these, never less or something else.
MAY_GROW = ("trials", "inits", "engines")


class SuiteFolder:
    """The paths of a suite's folder, and what its calls agree on."""

    def __init__(self, path: Path) -> None:
        self.path, self.runs, self.tables = path, path / "runs", path / "tables"

    def run(self, spec: RunSpec, argv: Callable[[], Sequence[str]] = tuple) -> Run:
        """A run in its folder; without `argv`, only to be looked at."""
        return make_run(spec, self.runs / spec.name, argv)

    def lock(self) -> AbstractContextManager[None]:
        """For what two runners must not do at the same time; held for moments."""
        return locks.exclusive(self.path / LOCK_NAME)

    def before(self) -> dict[str, Any]:
        """What earlier calls requested; empty for a new folder.

        Raises:
            UserError: the folder is none, cannot be written, or holds something else.
        """
        path = self.path.absolute()
        nearest = next(place for place in (path, *path.parents) if place.exists())
        if not nearest.is_dir():
            raise UserError(f"{nearest}: is a file; expected a folder, choose another --output")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(f"{nearest}: cannot be written; choose another --output")
        content = read_json(self.path / SUITE_NAME)
        if nearest == path and not content:
            others = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
            if others:
                raise UserError(
                    f"{self.path} holds other files ({others[0]}); choose another --output"
                )
        return content

    def check(self, content: Mapping[str, Any]) -> None:
        """Check that the folder is this suite's, or new.

        Args:
            content: from `requested`.

        Raises:
            UserError: the folder holds something else, or was made with something else.
        """
        if before := self.before():
            check_agreement(before, content, str(self.path))

    def agree(self, content: Mapping[str, Any], specs: Sequence[RunSpec]) -> None:
        """Make the folder this suite's, after the checks of `check`."""
        with self.lock():
            remove_stale(self.path)
            self.check(content)
            runs = json.loads(json.dumps([asdict(spec) for spec in specs], default=str))
            after = {**content, "schema": SCHEMA, "runs": runs}
            if after != self.before():
                atomic_write_json(self.path / SUITE_NAME, after)

    def read(self) -> tuple[dict[str, Any], tuple[RunSpec, ...]]:
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
        specs = []
        for run in content["runs"]:
            pairs = tuple((key, value) for key, value in run["overrides"])
            specs.append(RunSpec(**run | {"config": Path(run["config"]), "overrides": pairs}))
        return content, tuple(specs)

    def data_before(self) -> dict[str, str] | None:
        """Task → digest of its own folders of data, as the folder was made; None: it is new."""
        tasks = self.before().get("tasks")
        return tasks and {name: str(task.get("data", "")) for name, task in tasks.items()}

    def copy_weights(self, inits: Mapping[str, Init]) -> dict[str, str]:
        """Init → what its runs are given: `random`, or a copy called after the init.

        A copy, since a link to where the weights are on one machine leads nowhere on another.
        """
        given = {name: RANDOM for name, init in inits.items() if init.weights == RANDOM}
        with self.lock():
            for name in [name for name in inits if name not in given]:
                source, sha256 = Path(inits[name].weights), inits[name].sha256
                ending = next((end for end in ENDINGS if source.name.endswith(end)), "")
                copy = self.path / "inits" / f"{name}{ending}"
                if copy.is_symlink() or not copy.is_file() or sha256_file(copy) != sha256:
                    with open(source, "rb") as file:
                        atomic_write(copy, partial(shutil.copyfileobj, file))
                if inits[name].origin:
                    atomic_write_text(f"{copy}{ORIGIN}", inits[name].origin)
                given[name] = str(copy)
        return given


def make_run(spec: RunSpec, folder: Path, argv: Callable[[], Sequence[str]]) -> Run:
    """What a suite wants to be computed as a run on disk."""
    return Run(
        name=spec.name,
        title=spec.title,
        folder=folder,
        argv=argv,
        speed_key=(spec.task, spec.engine, spec.gpus),
        gpus=spec.gpus,
        iterations=spec.iterations,
        seconds_per_iteration=spec.seconds_per_iteration,
        expected={
            "kind": spec.program,
            "engine": spec.engine,
            "seed": spec.seed,
            "init": spec.init,
            "weights_sha256": spec.weights_sha256,
        },
    )


def identify(weights: Mapping[str, LocalWeights | None]) -> dict[str, Init]:
    """Name → init, known by the hash of the file's bytes; None is random.

    Raises:
        DataError: a file that does not exist; one line for all of them.
        UserError: two pre-trainings of one row are the same bytes.
    """
    missing = [
        f"--init {name}={found.path}: no such file{like(str(found.path))}"
        for name, found in weights.items()
        if found and not found.path.is_file()
    ]
    if missing:
        raise DataError("; ".join(missing))
    from convert.read import parts_of  # imports numpy

    for name, found in weights.items():
        if found and parts_of(found.path):
            raise UserError(
                f"--init {name}={found.path}: a network in parts, of which a suite would copy the "
                "index alone; convert it first, and give what that writes"
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
            raise UserError(f"--init: {other} and {name} are the same weights, not two trainings")
    return inits


def requested(
    suite: Suite,
    inits: Mapping[str, Init],
    engines: Sequence[str],
    *,
    version: str,
    gpus: int | None = None,
    data: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What `suite.json` holds, for `SuiteFolder.agree`.

    Args:
        data: task → digest of its own folders of data; empty: it has none.
    """
    tasks: dict[str, dict[str, Any]] = {
        task.name: {
            "config": task.config.name,
            "program": task.program,
            "keys": without_places(dict(task.overrides)),
            "random_keys": without_places(dict(task.random_overrides)),
            **(
                {"init_keys": own}
                if (own := {i: dict(p) for i, p in task.init_overrides.items()})
                else {}
            ),
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
        "inits": {name: init.sha256 or RANDOM for name, init in inits.items()},
        "tasks": tasks,
    }


def check_agreement(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Check that a later call requests what the first did; trials, inits and engines may become
    more.

    Raises:
        UserError: the first thing in which it differs.
    """
    # A whole task may be new, as the tuned ones are; what is in a task may not change.
    known = {name: task for name, task in now["tasks"].items() if name in before["tasks"]}
    old, new = (
        flatten({**call, "tasks": {name: _but_tuned(task) for name, task in tasks.items()}})
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
                f"{where} was made by another call ({key}: {was} before, {is_} now); repeat that "
                "one, or choose another --output"
            )


def _but_tuned(task: Mapping[str, Any]) -> dict[str, Any]:
    """A task without its grid and what was chosen from it: a wider grid makes other runs."""
    keys = {key: value for key, value in task["keys"].items() if key != "SOLVER.TUNED"}
    return {name: keys if name == "keys" else x for name, x in task.items() if name != "init_keys"}


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
