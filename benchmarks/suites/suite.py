"""A suite: which tasks, inits and trials make a table, expanded into runs. Pure.

A run's id is a hash of what makes its numbers: the task's keys, what is in a custom folder of data,
the bytes of the weights, the engine, the seed and the version of this project.
"""

import ast
import fnmatch
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from moco.common.cfgnode import flatten, read_yaml
from moco.common.command import RANDOM, SEVERAL
from moco.common.errors import UserError

DETECTION, LINEAR, FINETUNE = "detection", "linear", "finetune"
PROGRAMS = (DETECTION, LINEAR, FINETUNE)
DETECTRON2, EMBEDDED, MOCO = "detectron2", "embedded", "moco"
DETECTION_ENGINES = (DETECTRON2, EMBEDDED)
# What a run sets by itself; neither a suite nor the command line may.
SET_PER_RUN = ("OUTPUT_DIR", "SEED", "MODEL.WEIGHTS")
# What the grid of `--tune` may vary.
TUNABLE = ("SOLVER.BASE_LR", "SOLVER.WEIGHT_DECAY", "SOLVER.LR_DECAY", "MODEL.VIT.DROP_PATH")
# Keys that say where data is or what computes: not what makes a number. Whatever is listed here is
# not in a run's id, so that a suite can be continued on another machine; what is in the folders is.
PLACES = (
    "MODEL.DEVICE",
    "DEVICE",
    "NUM_THREADS",
    "DIST_TIMEOUT_SECONDS",
    "DATASETS.VOC_DIR",
    "DATA.ROOT",
    "DATA.NUM_WORKERS",
    "DATA.WORKER_TIMEOUT_SECONDS",
    "DATA.CACHE_MIB",
    "DATALOADER.NUM_WORKERS",
    "LOG.LOGGERS",
    "DATASETS.COCO_TRAIN_ROOT",
    "DATASETS.COCO_TEST_ROOT",
)
# Of these the folder is a place; files side by side are different data.
FILES = ("DATASETS.COCO_TRAIN_JSON", "DATASETS.COCO_TEST_JSON")


@dataclass(frozen=True)
class SuiteTask:
    """One task of a suite.

    Attributes:
        name: of its folder and in messages; the config file's name without ending, unless given.
        config: the task's YAML file.
        program: `detection` (detection/train_net.py), `linear` or `finetune` (of moco/).
        overrides: `KEY VALUE` pairs on top of the file; `random_overrides` only for random
            initialization (a network that the weights would otherwise tell); `init_overrides`: for
            one init, by its name.
        gpus: the size of the group that the task is meant for.
        engines: which detection engines can run it.
        without: patterns of inits that this task is not run for.
        trials: seeds per row.
        paper: the tables of the paper that it feeds.
        seconds_per_iteration: stated by the suite, for a group of `gpus`; None: unknown.
        seconds_here: stated on the command line, for the machine at hand; None: not.
    """

    name: str
    config: Path
    program: str
    overrides: tuple[tuple[str, str], ...] = ()
    random_overrides: tuple[tuple[str, str], ...] = ()
    init_overrides: Mapping[str, tuple[tuple[str, str], ...]] = field(
        default_factory=dict, hash=False
    )
    gpus: int = 1
    engines: tuple[str, ...] = DETECTION_ENGINES
    without: tuple[str, ...] = ()
    trials: int = 5
    paper: tuple[str, ...] = ()
    seconds_per_iteration: float | None = None
    seconds_here: float | None = None

    def keys(self, init: str) -> tuple[tuple[str, str], ...]:
        """The overrides of a run from `init`."""
        special = self.random_overrides if init == RANDOM else ()
        return (*self.overrides, *special, *self.init_overrides.get(init, ()))

    def seconds_of(self, gpus: int) -> float | None:
        """What is stated for a run on this many GPUs, per iteration."""
        if self.seconds_here is not None:
            return self.seconds_here
        return self.seconds_per_iteration if gpus == self.gpus else None


@dataclass(frozen=True)
class Suite:
    """Tasks, and the defaults of what the command line may change.

    Attributes:
        baseline: the row that gaps refer to; None: `random`, where there is one.
        inits: name → weights, where the command line names none. `moco@1`, `moco@2` and so on are
            pre-trainings of the row `moco`.
        tune: what the file says of the grid of `--tune`; None: benchmarks/suites/tuning.yaml's.
    """

    name: str
    title: str
    tasks: tuple[SuiteTask, ...]
    baseline: str | None
    inits: dict[str, str]
    tune: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Init:
    """`random`, or a file, the hash of its bytes, and where they were downloaded from."""

    weights: str
    sha256: str | None
    origin: str = ""


@dataclass(frozen=True)
class RunSpec:
    """One run: one trial of one task from one init on one engine.

    Attributes:
        id: 10 hex digits, see `run_id`.
        name: `<task>/<init>/seed<k>-<id>`, its folder below `runs/`.
        overrides: `KEY VALUE` pairs on top of `config`.
        weights: `random` or the file's path; weights_sha256: None for random.
        gpus: of its group; 0: on the CPU.
        iterations: of the whole run; 0: not known yet.
        seconds_per_iteration: as stated, or None.
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

    @property
    def title(self) -> str:
        """For people: `faster_rcnn_R_50_C4_24k mine seed 0 (detectron2)`."""
        engine = f" ({self.engine})" if self.program == DETECTION else ""
        return f"{self.task} {self.init} seed {self.seed}{engine}"


def engines_of(task: SuiteTask, engines: Sequence[str]) -> tuple[str, ...]:
    """The engines that a task runs on when `engines` are requested.

    Raises:
        UserError: none of them.
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
    """Tasks x inits x trials x engines, in an order with a first trial of all first.

    Args:
        engines: for detection; a task takes those that it can run on.
        gpus: of one run; None: as many as its task is meant for, if there are that many.
        available: number of GPUs; 0: everything runs on the CPU.
        data: task → digest of its own folders of data, from benchmarks/suites/data_digest.py.

    Raises:
        UserError: no run at all, an engine that a task cannot run on, more GPUs than there are.
    """
    if gpus is not None and not 1 <= gpus <= max(available, 1):
        expected = f"1 to {available} (what is visible)" if available else "none, as on CPU cores"
        raise UserError(f"--gpus-per-run: got {gpus}, expected {expected}")
    wanted = [
        (seed, task, name, engine)
        for seed in range(max(task.trials for task in suite.tasks))
        for task in suite.tasks
        for name in inits
        if seed < task.trials
        and not any(fnmatch.fnmatchcase(row_of(name), pattern) for pattern in task.without)
        for engine in engines_of(task, engines)
    ]
    if not wanted:
        raise UserError(
            f"suite {suite.name}: nothing to run for {', '.join(inits) or 'no init'}; "
            "give --init NAME=FILE or --init random"
        )
    runs, keys_of = [], cache(task_keys)  # a file is read once, not for each of its runs
    for seed, task, name, engine in wanted:
        sha256, digest = inits[name].sha256, (data or {}).get(task.name, "")
        digits = run_id(task, name, sha256, engine, seed, version, digest, keys_of)
        size = min(gpus or task.gpus, available)
        runs.append(
            RunSpec(
                id=digits,
                name=f"{task.name}/{name}/seed{seed}-{digits}",
                task=task.name,
                program=task.program,
                config=task.config,
                overrides=task.keys(name),
                init=name,
                weights=inits[name].weights,
                weights_sha256=sha256,
                seed=seed,
                engine=engine,
                gpus=size,
                seconds_per_iteration=task.seconds_of(size),
            )
        )
    return tuple(runs)


def row_of(init: str) -> str:
    """The row of the tables that an init is in."""
    return init.partition(SEVERAL)[0]


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
    """The first 10 hex digits of the hash of everything that makes a run's numbers.

    Args:
        keys_of: `task_keys`, or what remembers them.
    """
    content = {
        "task": task.name,  # two tasks may differ in a folder of data alone
        "program": task.program,
        "config": (keys_of or task_keys)(task, init),
        "weights": sha256 or RANDOM,
        "engine": engine,
        "seed": seed,
        "version": version,
        **({"data": data} if data else {}),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def task_keys(task: SuiteTask, init: str) -> dict[str, Any]:
    """The keys of a task's file (and its bases) and overrides, flat, without places."""
    keys = all_keys(task, init).items()
    return without_places({key: _plain(value) for key, value in keys if key not in SET_PER_RUN})


def all_keys(task: SuiteTask, init: str = "") -> dict[str, Any]:
    """The keys of a task's file (and its bases) and overrides, flat."""
    keys = flatten(read_yaml(task.config))
    return keys | {key: parsed(value) for key, value in task.keys(init)}


def without_places(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys without `PLACES`, and of `FILES` the name: both may differ between machines."""
    return {
        key: Path(str(value)).name if key in FILES else value
        for key, value in keys.items()
        if key not in PLACES
    }


def parsed(text: str) -> Any:
    """The value that `KEY VALUE` means: a literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _plain(value: Any) -> Any:
    """As JSON has it: tuples as lists, 1.0 like 1."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
