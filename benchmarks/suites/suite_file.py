"""Reads what a suite's YAML file and `--init` say; whatever cannot be is a one-line error."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.suites.suite import (
    DETECTION,
    DETECTION_ENGINES,
    PROGRAMS,
    SET_PER_RUN,
    TUNABLE,
    Suite,
    SuiteTask,
)
from moco.common import shipped
from moco.common.cfgnode import flatten, read_yaml
from moco.common.command import RANDOM, SEVERAL
from moco.common.errors import UserError
from moco.common.files import PathLike
from moco.common.pretrained import ENDINGS, init_name

MAX_TRIALS = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Whether a value can be, and what is expected.
Check = tuple[Callable[[Any], bool], str]


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_grid(value: Any) -> bool:
    def are_numbers(axis: Any) -> bool:
        return isinstance(axis, list) and bool(axis) and all(type(v) in (int, float) for v in axis)

    if not isinstance(value, Mapping) or not set(value) <= {"share", "values"}:
        return False
    share, axes = value.get("share", 1), flatten(value.get("values", {}))
    fits = all(key in TUNABLE and are_numbers(axis) for key, axis in axes.items())
    return type(share) in (int, float) and 0 < share <= 1 and fits


TRIALS: Check = (lambda v: type(v) is int and 1 <= v <= MAX_TRIALS, f"1 to {MAX_TRIALS}")
SECONDS: Check = (lambda v: type(v) in (int, float) and 0 < v < 1e6, "seconds above 0")
_PAIRS: Check = (lambda v: isinstance(v, Mapping), "KEY: VALUE lines")
_NAMED: Check = (
    lambda v: isinstance(v, str) and bool(_NAME.fullmatch(v)) and not v.endswith(ENDINGS),
    "a name of letters, digits, '.', '_' and '-', without a file's ending",
)
# What a suite's file may say: key → whether a value can be, and what is expected.
_SUITE_KEYS: dict[str, Check] = {
    "name": _NAMED,
    "title": (lambda v: isinstance(v, str), "a text"),
    "trials": TRIALS,
    "baseline": (lambda v: isinstance(v, str), "the name of an init"),
    "inits": (lambda v: isinstance(v, Mapping), "NAME: weights lines, or NAME: [weights, ...]"),
    "tune": (_is_grid, f"share: 0 to 1, and values: KEY: numbers for {', '.join(TUNABLE)}"),
    "tasks": (lambda v: isinstance(v, list) and len(v) > 0, "a list of at least one task"),
}
_TASK_KEYS: dict[str, Check] = {
    "config": (lambda v: isinstance(v, str), "a task's YAML file"),
    "name": _NAMED,
    "program": (lambda v: v in PROGRAMS, f"one of {', '.join(PROGRAMS)}"),
    "overrides": _PAIRS,
    "random_overrides": _PAIRS,
    "gpus": (lambda v: type(v) is int and v >= 1, "a number from 1 on"),
    "engines": (
        lambda v: _are_texts(v) and v and set(v) <= set(DETECTION_ENGINES),
        f"a list of {', '.join(DETECTION_ENGINES)}",
    ),
    "without": (_are_texts, "a list of names"),
    "trials": TRIALS,
    "paper": (_are_texts, "a list of names"),
    "seconds_per_iteration": SECONDS,
}


def load_suite(path: PathLike) -> Suite:
    """Read a suite's YAML file; `config` in it is relative to it, or a shipped name.

    Raises:
        UserError: unreadable, an unknown or missing key, a value that cannot be, a name twice, a
            config that does not exist. One line each.
    """
    path = Path(path).expanduser()
    tree, where = _checked(str(path), read_yaml(path), _SUITE_KEYS, "tasks"), str(path)
    tasks = tuple(_task(path, number, tree) for number in range(1, len(tree["tasks"]) + 1))
    names = [task.name for task in tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{where}: two tasks are called {twice[0]}; give one another 'name'")
    inits = [
        f"{name}={','.join(map(str, files)) if isinstance(files, list) else files}"
        for name, files in (tree.get("inits") or {}).items()
    ]
    return Suite(
        name=check(f"{where}: name", tree.get("name", path.stem), _NAMED),
        title=tree.get("title", ""),
        tasks=tasks,
        baseline=tree.get("baseline"),
        inits=parse_inits(inits, where),
        tune=tree.get("tune"),
    )


def parse_inits(arguments: Sequence[str], where: str = "--init") -> dict[str, str]:
    """`NAME=WEIGHTS`, `WEIGHTS` (whose own name is the init's) or `random`.

    `NAME=WEIGHTS,WEIGHTS,...` are several pre-trainings of one row: `NAME@1`, `NAME@2` and so on.

    Raises:
        UserError: an empty or unusable name, a name or a pre-training twice, another name for
            `random`.
    """
    inits: dict[str, str] = {}
    for argument in arguments:
        name, equals, weights = argument.partition("=")
        if not equals or "://" in name:  # an address may have a = of its own
            name, equals, weights = init_name(argument), "", argument
        check(where, name, _NAMED)
        if not weights:
            raise UserError(
                f"{where} {argument}: no weights; expected {name}=FILE or the word random"
            )
        files = weights.split(",") if equals else [weights]
        if (name == RANDOM) != (RANDOM in files):
            raise UserError(
                f"{where} {argument}: random initialization is called random, and nothing else is"
            )
        numbered = [f"{name}{SEVERAL}{i}" for i in range(1, len(files) + 1)]
        if {name, numbered[0]} & inits.keys():
            raise UserError(f"{where} {argument}: {name} is given twice; one name, one row")
        if len(set(files)) < len(files) or not all(files) or len(files) > MAX_TRIALS:
            raise UserError(
                f"{where} {argument}: expected 1 to {MAX_TRIALS} files, each of another "
                "pre-training"
            )
        inits |= zip(numbered if len(files) > 1 else [name], files, strict=True)
    return inits


def without_tasks(suite: Suite, names: Sequence[str]) -> Suite:
    """The suite without these tasks; UserError: it has no such task, or no other."""
    tasks = {task.name: task for task in suite.tasks}
    for name in names:
        if tasks.pop(name, None) is None:
            choices = ", ".join(task.name for task in suite.tasks)
            raise UserError(f"--skip {name}: no such task; choices are {choices}")
    if not tasks:
        raise UserError(f"--skip: leaves no task of suite {suite.name}")
    return replace(suite, tasks=tuple(tasks.values()))


def with_options(
    suite: Suite,
    opts: Mapping[str, Sequence[tuple[str, str]]],
    stated: Mapping[str, float],
    trials: int | None = None,
) -> Suite:
    """The suite with the command line's overrides, stated speeds and trials in its tasks.

    Args:
        opts: program → pairs, last and so strongest.
        stated: task → seconds per iteration; `""` is for all tasks.

    Raises:
        UserError: a speed for a task that the suite does not have, or a number that cannot be.
    """
    if trials is not None:
        check("--trials", trials, TRIALS)
    names = [task.name for task in suite.tasks]
    for name, value in stated.items():
        if name not in ("", *names):
            raise UserError(
                f"--seconds-per-iteration {name}: no such task; choices are {', '.join(names)}"
            )
        check("--seconds-per-iteration", value, SECONDS)
    tasks = tuple(
        replace(
            task,
            trials=trials or task.trials,
            overrides=(*task.overrides, *opts.get(task.program, ())),
            seconds_here=stated.get(task.name, stated.get("")),
        )
        for task in suite.tasks
    )
    return replace(suite, tasks=tasks)


def _task(path: Path, number: int, tree: Mapping[str, Any]) -> SuiteTask:
    where = f"{path}: task {number}"
    entry = _checked(where, tree["tasks"][number - 1], _TASK_KEYS, "config")
    config = path.parent / entry["config"]
    if not config.is_file() and (config := shipped.find(entry["config"])) is None:
        raise UserError(
            f"{where}: config {entry['config']}: no such file beside {path}, or shipped"
        )
    lists: dict[str, Any] = {
        key: tuple(entry[key]) for key in ("engines", "without", "paper") if key in entry
    }
    for key in ("overrides", "random_overrides"):
        pairs = flatten(entry.get(key, {})).items()
        lists[key] = tuple((str(name), str(value)) for name, value in pairs)
        for name, _ in lists[key]:
            refuse_per_run(f"{where}: {key}", name)
    values = {
        "name": check(f"{where}: name", config.stem, _NAMED),
        "program": DETECTION,
        "trials": tree.get("trials", 5),
        **entry,
        **lists,
        "config": config.resolve(),
    }
    return SuiteTask(**values)


def _checked(where: str, tree: Any, keys: Mapping[str, Check], required: str) -> dict[str, Any]:
    """A mapping whose keys are known, and whose values can be; keys without a value are left out.

    Raises:
        UserError: it is none.
    """
    given = dict(check(where, tree, _PAIRS))
    for key, value in given.items():
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1, cutoff=0.5)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise UserError(f"{where}: unknown key {key!r}, choices are {', '.join(keys)}{hint}")
        if value is not None:
            check(f"{where}: {key}", value, keys[key])
    if given.get(required) is None:
        raise UserError(f"{where}: {required}: missing, expected {keys[required][1]}")
    return {key: value for key, value in given.items() if value is not None}


def check(where: str, value: Any, check: Check) -> Any:
    is_valid, expected = check
    if not is_valid(value):
        raise UserError(f"{where}: got {value!r}, expected {expected}")
    return value


def refuse_per_run(where: str, key: str) -> None:
    """Raise UserError for a key that every run sets by itself."""
    if key in SET_PER_RUN:
        raise UserError(f"{where}: {key} is set for each run; leave it out")
