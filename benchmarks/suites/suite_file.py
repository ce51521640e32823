"""Reader of a suite's YAML file and of `--init`, with a one-line error for each mistake."""

import csv
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report.keys import names_where
from benchmarks.suites.checkpoints import by_epoch, is_pattern, matching, series
from benchmarks.suites.suite import (
    DETECTION,
    DETECTION_ENGINES,
    PRETRAIN,
    PROGRAMS,
    RECORDED,
    STEPS,
    Step,
    Suite,
    SuiteTask,
    steps_in,
)
from moco.common import shipped
from moco.common.cfgnode import flatten, read_yaml
from moco.common.command import RANDOM, SEVERAL
from moco.common.errors import UserError
from moco.common.files import PathLike, expanded
from moco.common.pretrained import ENDINGS, init_name

MAX_TRIALS = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Predicate of valid values, and their description for the error.
Check = tuple[Callable[[Any], bool], str]


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_grid(value: Any) -> bool:
    def are_numbers(axis: Any) -> bool:
        return isinstance(axis, list) and bool(axis) and all(type(v) in (int, float) for v in axis)

    if not isinstance(value, Mapping) or not set(value) <= {"share", "values"}:
        return False
    share, axes = value.get("share", 1), flatten(value.get("values", {}))
    fits = all(key in names_where(tunable=True) and are_numbers(axis) for key, axis in axes.items())
    return type(share) in (int, float) and 0 < share <= 1 and fits


TRIALS: Check = (lambda v: type(v) is int and 1 <= v <= MAX_TRIALS, f"1 to {MAX_TRIALS}")
SECONDS: Check = (lambda v: type(v) in (int, float) and 0 < v < 1e6, "seconds above 0")
_PAIRS: Check = (lambda v: isinstance(v, Mapping), "KEY: VALUE lines")
_NAMED: Check = (
    lambda v: isinstance(v, str) and bool(_NAME.fullmatch(v)) and not v.endswith(ENDINGS),
    "a name of letters, digits, '.', '_' and '-', without a file's ending",
)
# Keys of a suite's file.
_SUITE_KEYS: dict[str, Check] = {
    "name": _NAMED,
    "title": (lambda v: isinstance(v, str), "a text"),
    "trials": TRIALS,
    "baseline": (lambda v: isinstance(v, str), "the name of an init"),
    "inits": (lambda v: isinstance(v, Mapping), "NAME: weights lines, or NAME: [weights, ...]"),
    "steps": (lambda v: isinstance(v, list), "a list of steps"),
    "tune": (
        _is_grid,
        f"share: 0 to 1, and values: KEY: numbers for {', '.join(names_where(tunable=True))}",
    ),
    "tasks": (lambda v: isinstance(v, list) and len(v) > 0, "a list of at least one task"),
}
_TASK_KEYS: dict[str, Check] = {
    "config": (lambda v: isinstance(v, str), "a task's YAML file"),
    "name": _NAMED,
    "program": (lambda v: v in PROGRAMS, f"one of {', '.join(PROGRAMS)}"),
    "overrides": _PAIRS,
    "random_overrides": _PAIRS,
    "gpus": (lambda v: type(v) is int and v >= 0, "a number; 0: on the CPU"),
    "engines": (
        lambda v: _are_texts(v) and v and set(v) <= set(DETECTION_ENGINES),
        f"a list of {', '.join(DETECTION_ENGINES)}",
    ),
    "without": (_are_texts, "a list of names"),
    "trials": TRIALS,
    "paper": (_are_texts, "a list of names"),
    "seconds_per_iteration": SECONDS,
}


_STEP_KEYS: dict[str, Check] = {
    "name": _NAMED,
    "program": (lambda v: v in STEPS, f"one of {', '.join(STEPS)}"),
    "config": (lambda v: isinstance(v, str), "a recipe's YAML file"),
    "overrides": _PAIRS,
    "arguments": (
        lambda v: isinstance(v, list) and all(type(item) in (str, int, float) for item in v),
        "a list of texts and numbers",
    ),
    "makes": (
        lambda v: isinstance(v, str) and all(map(_NAME.fullmatch, v.split("/"))),
        "a path below the suite's folder",
    ),
    "gpus": _TASK_KEYS["gpus"],
    "seconds": SECONDS,
    "seconds_per_iteration": SECONDS,
}


def as_name(folder: str) -> str:
    """Return the name of a folder as that of a suite or a task.

    It replaces what such a name cannot have, and `--`, which separates a domain from its datasets.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", folder).lstrip("._-") or "dataset"
    name = re.sub("-{2,}", "-", name).rstrip("-")
    return f"{name}_" if name.endswith(ENDINGS) else name


def load_suite(path: PathLike) -> Suite:
    """Read a suite's YAML file, in which `config` is a path relative to it, or a shipped name.

    Raises:
        UserError: If the file is unreadable, or its content is invalid.
    """
    path = expanded(path)
    return read_suite(read_yaml(path), path)


def read_suite(content: Any, path: Path) -> Suite:
    """Read the content of a suite's file at `path`, which need not exist.

    Raises:
        UserError: If a key is unknown or missing, a value is invalid, a name is used twice, or a
            config does not exist.
    """
    tree, where = _checked(str(path), content, _SUITE_KEYS, "tasks"), str(path)
    tasks = tuple(_task(path, number, tree) for number in range(1, len(tree["tasks"]) + 1))
    names = [task.name for task in tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"{where}: two tasks are called {twice[0]}; give one of them another 'name'"
        )
    inits = [
        f"{name}={','.join(map(str, files)) if isinstance(files, list) else files}"
        for name, files in (tree.get("inits") or {}).items()
    ]
    suite = Suite(
        name=check(f"{where}: name", tree.get("name", path.stem), _NAMED),
        title=tree.get("title", ""),
        tasks=tasks,
        baseline=tree.get("baseline"),
        inits=parse_inits(inits, where),
        tune=tree.get("tune"),
        steps=tuple(_step(path, number, tree) for number in range(len(tree.get("steps") or ()))),
    )
    check_references(suite, where)
    return suite


def check_references(suite: Suite, where: str) -> None:
    """Check that every placeholder `${name}` in a value names an earlier step.

    Raises:
        UserError: If one does not, or two steps or tasks have the same name.
    """
    known: list[str] = []
    values = [(f"step {step.name}", step.after, step.name) for step in suite.steps]
    values += [
        (f"task {task.name}", steps_in(v for _, v in (*task.overrides, *task.random_overrides)), "")
        for task in suite.tasks
    ]
    values += [(f"init {name}", steps_in([text]), "") for name, text in suite.inits.items()]
    for who, after, name in values:
        for other in after:
            if other not in known:
                choices = ", ".join(known) or "none"
                raise UserError(
                    f"{where}: {who}: ${{{other}}} is no earlier step, choices are {choices}; "
                    "variables of a shell are not expanded here"
                )
        if name in (*known, *(task.name for task in suite.tasks)):
            raise UserError(
                f"{where}: two steps or tasks are called {name}; give one of them another 'name'"
            )
        known += [name] if name else []


def parse_inits(arguments: Sequence[str], where: str = "--init") -> dict[str, str]:
    """Parse `NAME=WEIGHTS`, `WEIGHTS` (which is named after its file) or `random`.

    `NAME=WEIGHTS,WEIGHTS,...` are several pre-trainings of one row: `NAME@1`, `NAME@2` and so on.
    A file whose path has a comma is in double quotes, as in CSV. `NAME=PATTERN` is a row for each
    checkpoint that it matches: `NAME-epoch0100` and so on.

    Raises:
        UserError: If a name is empty or invalid, a name or a file is given twice, or `random` is
            given another name.
        DataError: If a pattern matches no file, or files whose epochs are unknown or the same.
    """
    inits: dict[str, str] = {}
    for argument in arguments:
        name, equals, weights = argument.partition("=")
        if not equals or "://" in name:  # an address may contain `=`
            name, equals, weights = init_name(argument), "", argument
        if not equals and is_pattern(weights):
            raise UserError(
                f"{where} {argument}: a pattern needs a name; expected 'NAME={argument}'"
            )
        check(where, name, _NAMED)
        if not weights:
            raise UserError(
                f"{where} {argument}: has no weights; expected {name}=FILE or the word random"
            )
        files = next(csv.reader([weights])) if equals else [weights]
        if (name == RANDOM) != (RANDOM in files):
            raise UserError(
                f"{where} {argument}: the name random is for random initialization, which has no "
                "other name"
            )
        numbered = [f"{name}{SEVERAL}{i}" for i in range(1, len(files) + 1)]
        along = {}
        if is_pattern(files[0]):
            along = series(name, by_epoch(matching(files[0]), f"{where} {argument}"))
        if {name, numbered[0], *along} & inits.keys():
            raise UserError(f"{where} {argument}: {name} is given twice; one name, one row")
        if len(set(files)) < len(files) or not all(files) or len(files) > MAX_TRIALS:
            raise UserError(
                f"{where} {argument}: expected 1 to {MAX_TRIALS} files, each of another "
                "pre-training"
            )
        inits |= along or zip(numbered if len(files) > 1 else [name], files, strict=True)
    return inits


def parse_stated(arguments: Sequence[str]) -> dict[str, float]:
    """Parse stated speeds: `0.3` for every task (named `""`), `TASK=0.3` for one.

    Raises:
        UserError: If a value is not a number.
    """
    stated = {}
    for argument in arguments:
        name, _, number = argument.rpartition("=")
        try:
            stated[name] = float(number)
        except ValueError:
            raise UserError(
                f"--seconds-per-iteration: got {argument!r}, expected a number, or TASK=number"
            ) from None
    return stated


def without_tasks(suite: Suite, names: Sequence[str]) -> Suite:
    """Return the suite without these tasks.

    Raises:
        UserError: If it has no such task, or no task is left.
    """
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
    """Return the suite with the command line's options in its tasks.

    Args:
        suite: Suite as its file defines it.
        opts: Program → `KEY VALUE` pairs, which take precedence over those of the file.
        stated: Task → seconds per iteration; `""` is for all tasks.
        trials: Seeds per row; None: those of the file.

    Raises:
        UserError: If a speed names no task of the suite, or a number is out of range.
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


def _step(path: Path, number: int, tree: Mapping[str, Any]) -> Step:
    where = f"{path}: step {number + 1}"
    entry = _checked(where, tree["steps"][number], _STEP_KEYS, "program")
    program = entry["program"]
    name = check(f"{where}: name", entry.get("name", program), _NAMED)
    if (program == PRETRAIN) != ("config" in entry):
        raise UserError(
            f"{where}: config: program {PRETRAIN} needs it, and no other program has it"
        )
    if (program in RECORDED) == ("makes" in entry):
        raise UserError(
            f"{where}: makes: every program but {PRETRAIN} and knn needs the path of its product"
        )
    overrides = flatten(entry.get("overrides", {})).items()
    pairs = tuple((str(key), str(value)) for key, value in overrides)
    for key, _ in pairs:
        if key == "OUTPUT_DIR":
            refuse_per_run(f"{where}: overrides", key)
    values = {
        **entry,
        "name": name,
        "overrides": pairs,
        "arguments": tuple(map(str, entry.get("arguments", ()))),
        "config": _config(path, where, entry["config"]) if "config" in entry else None,
    }
    return Step(**values)


def _config(path: Path, where: str, name: str) -> Path:
    """Find the file of `config`: next to the suite's file, or shipped.

    Raises:
        UserError: If there is none.
    """
    config = path.parent / name
    found = config if config.is_file() else shipped.find(name)
    if found is None:
        raise UserError(f"{where}: config {name}: no such file next to {path}, and none is shipped")
    return found.resolve()


def _task(path: Path, number: int, tree: Mapping[str, Any]) -> SuiteTask:
    where = f"{path}: task {number}"
    entry = _checked(where, tree["tasks"][number - 1], _TASK_KEYS, "config")
    config = _config(path, where, entry["config"])
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
        "config": config,
    }
    return SuiteTask(**values)


def _checked(where: str, tree: Any, keys: Mapping[str, Check], required: str) -> dict[str, Any]:
    """Check the keys and values of a mapping, and return it without the keys that have no value.

    Raises:
        UserError: If it is no mapping, a key is unknown, a value invalid, or `required` is missing.
    """
    found = dict(check(where, tree, _PAIRS))
    for key, value in found.items():
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1, cutoff=0.5)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise UserError(f"{where}: unknown key {key!r}, choices are {', '.join(keys)}{hint}")
        if value is not None:
            check(f"{where}: {key}", value, keys[key])
    if found.get(required) is None:
        raise UserError(f"{where}: {required}: got no value, expected {keys[required][1]}")
    return {key: value for key, value in found.items() if value is not None}


def check(where: str, value: Any, check: Check) -> Any:
    """Return a value that passes a check; raise UserError for any other."""
    is_valid, expected = check
    if not is_valid(value):
        raise UserError(f"{where}: got {value!r}, expected {expected}")
    return value


def refuse_per_run(where: str, key: str) -> None:
    """Raise UserError for a key that the suite sets for every run."""
    if key in names_where(per_run=True):
        raise UserError(f"{where}: {key} is set for each run; leave it out")
