"""Plan of a suite: the runs and their dependencies.

`expand` is pure: it maps a suite and inits to runs. The id of a run is a hash of everything that
determines the numbers: the keys of the task, the content of custom data, the bytes of the weights,
the choice of a tuned task, the engine, the seed and the version of this project.
"""

import fnmatch
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.suites.forecast import Speeds, estimate
from benchmarks.suites.runs import Run
from benchmarks.suites.suite import (
    CHOOSE,
    DETECTION,
    MOCO,
    POINT,
    Init,
    RunSpec,
    Suite,
    SuiteTask,
    row_of,
    task_keys,
)
from moco.common.command import RANDOM
from moco.common.errors import Preempted, UserError
from moco.common.files import atomic_write_json
from moco.common.run import RECORD_NAME
from moco.common.shipped import own_modules

SCHEMA = 1


def engines_of(task: SuiteTask, engines: Sequence[str]) -> tuple[str, ...]:
    """Return the requested engines on which a task can run.

    Raises:
        UserError: If there are none.
    """
    if task.program != DETECTION:
        return (MOCO,)
    chosen = tuple(engine for engine in engines if engine in task.engines)
    if not chosen:
        raise UserError(
            f"{task.name} runs on {' and '.join(task.engines)} only; got --engine "
            f"{', '.join(engines)} (auto is detectron2 where it can be imported); --skip "
            f"{task.name} leaves it out"
        )
    return chosen


def expand(
    suite: Suite,
    inits: Mapping[str, Init],
    engines: Sequence[str],
    *,
    version: str,
    gpus: int | None = None,
    available: int = 0,
    data: Mapping[str, str] | None = None,
) -> tuple[RunSpec, ...]:
    """Expand a suite into runs: tasks x inits x trials x engines, ordered by trial.

    Args:
        suite: Suite with the options of the command line.
        inits: Name → init.
        engines: Detection engines; a task runs on those that support it.
        version: Version of this project.
        gpus: GPUs of one run; None: the number of the task, but at most `available`.
        available: Number of GPUs; 0: everything runs on the CPU.
        data: Task → digest of custom data, from benchmarks/suites/data_digest.py.

    Raises:
        UserError: If there is no run, a task supports none of the engines, or GPUs are missing.
    """
    if gpus is not None and not 1 <= gpus <= max(available, 1):
        expected = f"1 to {available} (what is visible)" if available else "none, as on CPU cores"
        raise UserError(f"--gpus-per-run: got {gpus}, expected {expected}")
    seeds = {task.name: task.seeds or range(task.trials) for task in suite.tasks}
    wanted = [
        (seed, task, name, engine)
        for seed in sorted(set().union(*seeds.values()))
        for task in suite.tasks
        for name in inits
        if seed in seeds[task.name]
        and not any(fnmatch.fnmatchcase(row_of(name), pattern) for pattern in task.without)
        for engine in engines_of(task, engines)
    ]
    if not wanted:
        raise UserError(
            f"suite {suite.name}: nothing to run for {', '.join(inits) or 'no init'}; "
            "give --init NAME=FILE or --init random"
        )
    runs: dict[str, RunSpec] = {}
    points: dict[tuple[str, str], list[tuple[SuiteTask, RunSpec]]] = defaultdict(list)
    keys_of = cache(task_keys)  # each file is read once instead of once per run
    for seed, task, name, engine in wanted:
        init, size = inits[name], min(gpus or task.gpus, available)
        of_data = (data or {}).get(task.name, "")
        after: tuple[str, ...] = ()
        if task.tunes:
            choice = _choice(task, name, points[task.tunes, name])
            runs[choice.name], after = choice, (choice.name,)
            of_data = ", ".join(filter(None, (of_data, f"chosen by {choice.id}")))
        digits = run_id(
            task,
            name,
            init.sha256,
            engine,
            seed,
            version,
            of_data,
            keys_of,
        )
        spec = RunSpec(
            id=digits,
            name=f"{task.name}/{name}/seed{seed}-{digits}",
            task=task.name,
            program=POINT if task.point_of else task.program,
            config=task.config,
            overrides=task.keys(name),
            init=name,
            weights=init.weights,
            weights_sha256=init.sha256,
            seed=seed,
            engine=engine,
            gpus=size,
            seconds_per_iteration=task.seconds_of(size),
            after=after,
            in_grid=bool(task.point_of),
        )
        runs[spec.name] = spec
        if task.point_of:
            points[task.point_of, name].append((task, spec))
    return tuple(runs.values())


def _choice(task: SuiteTask, init: str, points: Sequence[tuple[SuiteTask, RunSpec]]) -> RunSpec:
    """Return the run that chooses a point of a grid and writes the file of the tuned task."""
    grid = dict(task.overrides)["SOLVER.TUNED"]
    found = [(_pairs(each.point), run) for each, run in points]
    digits = _hash({"choose": [task.tunes, grid], "from": [run.id for _, run in found]})
    return RunSpec(
        id=digits,
        name=f"{task.tunes}.choose/{init}/{digits}",
        task=f"{task.tunes}.choose",
        program=CHOOSE,
        config=task.config,
        overrides=(),
        init=init,
        weights="",
        weights_sha256=None,
        seed=0,
        engine=MOCO,
        gpus=0,
        iterations=1,
        seconds_per_iteration=1.0,
        after=tuple(run.name for _, run in found),
        arguments=(
            f"--config={task.config}",
            f"--init={init}",
            f"--grid={grid}",
            f"--untuned={_pairs(task.point)}",
        ),
        points=tuple(point for point, _ in found),
        in_grid=True,
    )


def _pairs(point: Sequence[tuple[str, str]]) -> str:
    return ",".join(map("=".join, point))


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def run_id(
    task: SuiteTask,
    init: str,
    sha256: str | None,
    engine: str,
    seed: int,
    version: str,
    data: str = "",
    keys_of: Callable[[SuiteTask, str], dict[str, Any]] | None = None,
) -> str:
    """Return the first 10 hex digits of the hash of everything that determines the numbers.

    `data` is the digest of custom data, and `keys_of` a cached `task_keys`.
    """
    content = {
        "task": task.name,  # the folder of data may be the only difference of two tasks
        "program": task.program,
        "config": (keys_of or task_keys)(task, init),
        "weights": sha256 or RANDOM,
        "engine": engine,
        "seed": seed,
        "version": version,
        **({"data": data} if data else {}),
    }
    return _hash(content)


def write_plan(path: Path, suite: str, runs: Sequence[Run], measured: Speeds) -> None:
    """Write the runs as JSON: command, GPUs, dependencies, and the file that exists at the end.

    Args:
        path: File to write.
        suite: Name of the suite.
        runs: Runs of the suite.
        measured: Speeds of earlier runs, from which the seconds are estimated.
    """
    content = {
        "schema": SCHEMA,
        "suite": suite,
        "environment": own_modules(),
        "run_again_on_exit_code": Preempted.exit_code,
        "runs": [
            {
                "name": run.name,
                "title": run.title,
                "command": list(run.argv),
                "folder": str(run.folder.absolute()),
                "gpus": run.gpus,
                "after": list(run.after),
                "done": str((run.product or run.folder / RECORD_NAME).absolute()),
                "seconds": estimate(run, measured).seconds,
            }
            for run in runs
        ],
    }
    atomic_write_json(path, content)
