"""Suite: the tasks and inits of a table, and the runs to which they expand.

`expand` is pure: it maps a suite and inits to runs. The id of a run is a hash of everything that
determines the numbers: the keys of the task, the content of custom data, the bytes of the weights,
the choice of a tuned task, the engine, the seed and the version of this project.
"""

import ast
import fnmatch
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.report.records import TASK_KEYS
from moco.common.cfgnode import flatten, read_yaml
from moco.common.command import RANDOM, SEVERAL
from moco.common.errors import UserError
from moco.common.keys import Role, names_of

VOC_METRIC = "DATASETS.VOC_METRIC"
_PART_INDEX = "DATASETS.PART_INDEX"
_JSON_FILES = ("DATASETS.COCO_TRAIN_JSON", "DATASETS.COCO_TEST_JSON")
DETECTION, LINEAR, FINETUNE = "detection", "linear", "finetune"
PROGRAMS = (DETECTION, LINEAR, FINETUNE)
GRID_POINT, CHOOSE = "point", "choose"  # the training of a grid's point, the choice of the best
DETECTRON2, EMBEDDED, MOCO = "detectron2", "embedded", "moco"
DETECTION_ENGINES = (DETECTRON2, EMBEDDED)


@dataclass(frozen=True)
class SuiteTask:
    """Configuration of one task of a suite.

    Attributes:
        name: Name of the folder and in messages; by default the stem of the config file.
        config: YAML file of the task.
        program: `detection` (detection/train_net.py), `linear` or `finetune` (of moco/).
        overrides: `KEY VALUE` pairs on top of the file.
        random_overrides: Further pairs for random initialization only, e.g. the architecture, which
            otherwise follows from the weights.
        gpus: Number of GPUs for which the task is meant.
        engines: Detection engines that can run it.
        without: Patterns of inits for which the task is not run.
        trials: Number of seeds per row.
        seeds: The seeds; empty: 0, 1, ... below `trials`.
        paper: Tables of the paper that the task reproduces.
        seconds_per_iteration: Speed on `gpus` GPUs that the suite states; None if unknown.
        seconds_here: Speed on this machine that the command line states; None if not given.
        point_of: Name of the task to whose grid the point belongs; empty for other tasks.
        point: Pairs of the point, which end `overrides`; the untuned values if the task is tuned.
        tunes: Name of the task that a tuned task repeats with the values chosen for each init.
    """

    name: str
    config: Path
    program: str
    overrides: tuple[tuple[str, str], ...] = ()
    random_overrides: tuple[tuple[str, str], ...] = ()
    gpus: int = 1
    engines: tuple[str, ...] = DETECTION_ENGINES
    without: tuple[str, ...] = ()
    trials: int = 5
    seeds: tuple[int, ...] = ()
    paper: tuple[str, ...] = ()
    seconds_per_iteration: float | None = None
    seconds_here: float | None = None
    point_of: str = ""
    point: tuple[tuple[str, str], ...] = ()
    tunes: str = ""

    def keys(self, init: str) -> tuple[tuple[str, str], ...]:
        """Return the overrides of a run from `init`."""
        return (*self.overrides, *(self.random_overrides if init == RANDOM else ()))

    def seconds_of(self, gpus: int) -> float | None:
        """Return the stated seconds per iteration of a run on `gpus` GPUs, or None."""
        if self.seconds_here is not None:
            return self.seconds_here
        return self.seconds_per_iteration if gpus == self.gpus else None


@dataclass(frozen=True)
class Suite:
    """Content of a suite's file, with defaults that the command line may change.

    Attributes:
        name: Name of its folder and in messages.
        title: Title of the page.
        tasks: Tasks in the order of the tables.
        baseline: Row that gaps refer to; None: `random`, if there is such a row.
        inits: Name → weights, unless the command line names inits. `moco@1`, `moco@2` and so on
            are pre-trainings of the row `moco`.
        tune: Grid of `--tune`; None: the one of benchmarks/suites/tuning.yaml.
    """

    name: str
    title: str
    tasks: tuple[SuiteTask, ...]
    baseline: str | None
    inits: dict[str, str]
    tune: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Init:
    """Initial weights of a row.

    Attributes:
        weights: `random`, or the path of a file.
        sha256: Hash of the file; None for `random`.
        origin: Address from which the file was downloaded.
    """

    weights: str
    sha256: str | None
    origin: str = ""


@dataclass(frozen=True)
class RunSpec:
    """Specification of one run: one trial of one task from one init on one engine, or a choice.

    Attributes:
        id: 10 hex digits, see `run_id`.
        name: `<task>/<init>/seed<k>-<id>`, the folder of the run below `runs/`.
        task: Name of the task.
        program: One of `PROGRAMS`, `GRID_POINT` and `CHOOSE`.
        config: YAML file of the task.
        overrides: `KEY VALUE` pairs on top of `config`.
        init: Name of the init.
        weights: `random`, or the path of a file; empty for a choice.
        weights_sha256: Hash of the file; None for the others.
        seed: Seed of the run, which is the number of the trial.
        engine: Detection engine, or `moco`.
        gpus: Number of GPUs; 0: on the CPU.
        iterations: Iterations of the whole run; 0 if not known yet.
        seconds_per_iteration: Stated speed, or None.
        after: Names of the runs on which the run depends.
        arguments: Arguments of a choice, except for the points.
        points: Points among which a choice is made, in the order of `after`.
        in_grid: Whether the run is a point of a grid or the choice of a point.
    """

    id: str
    name: str
    task: str
    program: str
    config: Path
    overrides: tuple[tuple[str, str], ...]
    init: str
    weights: str
    weights_sha256: str | None
    seed: int
    engine: str
    gpus: int
    iterations: int = 0
    seconds_per_iteration: float | None = None
    after: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    points: tuple[str, ...] = ()
    in_grid: bool = False

    @property
    def title(self) -> str:
        """Human-readable name, e.g. `faster_rcnn_R_50_C4_24k mine seed 0 (detectron2)`."""
        if self.program == CHOOSE:
            return f"{self.task} {self.init}"
        engine = f" ({self.engine})" if self.engine != MOCO else ""
        return f"{self.task} {self.init} seed {self.seed}{engine}"


def row_of(init: str) -> str:
    """Return the row of an init in the tables."""
    return init.partition(SEVERAL)[0]


def task_keys(task: SuiteTask, init: str) -> dict[str, Any]:
    """Return the keys of `all_keys` as plain JSON values, without paths."""
    keys = all_keys(task, init).items()
    return without_places({key: to_plain(value) for key, value in keys})


def all_keys(task: SuiteTask, init: str = "") -> dict[str, Any]:
    """Return the keys of a task file with its bases and overrides as a flat dict."""
    keys = flatten(read_yaml(task.config))
    return keys | {key: parse_value(value) for key, value in task.keys(init)}


def with_metric(suite: Suite, before: Mapping[str, Any]) -> tuple[Suite, list[str]]:
    """Set the metric of tasks on custom folders in VOC's layout that name no metric.

    COCO's metric, the choice of `resolve_metric` (detection/config/resolve.py), thereby enters the
    ids of the runs. A suite that was begun with VOC's metric keeps that.

    Args:
        suite: Suite with the options of the command line.
        before: Content of `suite.json` of an earlier call; empty for a new folder.

    Returns:
        The suite, and a note for each task that keeps VOC's metric.
    """
    tasks, notes = [], []
    for task in suite.tasks:
        keys = all_keys(task)
        if keys.get("DATASETS.VOC_DIR") and not {VOC_METRIC, "DATASETS.VOC_YEAR"} & keys.keys():
            begun = before.get("tasks", {}).get(task.name)
            metric = "coco" if begun is None else begun["keys"].get(VOC_METRIC, "voc")
            task = replace(task, overrides=((VOC_METRIC, metric), *task.overrides))
            if metric == "voc":
                notes.append(
                    f"{task.name}: its runs were begun with VOC's 11-point metric, and keep it"
                )
        tasks.append(task)
    return replace(suite, tasks=tuple(tasks)), notes


def without_places(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that enter the id of a run, without paths, which differ between machines.

    The names of COCO's JSON files are kept. VOC's metric is left out, as it was once the metric of
    every folder in VOC's layout, without a key.
    """
    left_out = {*names_of(TASK_KEYS, Role.PLACE, Role.RUN)} - {_PART_INDEX, *_JSON_FILES}
    return {
        key: Path(str(value)).name if key in _JSON_FILES else value
        for key, value in keys.items()
        if key not in left_out and (key, value) != (VOC_METRIC, "voc")
    }


def parse_value(text: str) -> Any:
    """Parse VALUE of `KEY VALUE` as a Python literal, or return the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def to_plain(value: Any) -> Any:
    """Convert a value to plain JSON types: tuples to lists, 1.0 to 1."""
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


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
        digits = run_id(task, name, init.sha256, engine, seed, version, of_data, keys_of)
        spec = RunSpec(
            id=digits,
            name=f"{task.name}/{name}/seed{seed}-{digits}",
            task=task.name,
            program=GRID_POINT if task.point_of else task.program,
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


def are_texts(value: Any) -> bool:
    """Return whether a value of a file is a list of texts."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
