"""Reader of a suite's YAML file, of `--init` and of `--data`; a mistake is an error of one line.

--init 'mine=runs/ckpt_*.pth.tar'       the rows mine-epoch0100, mine-epoch0200, ...

With `--data`, a suite whose only task has the value `$DATASET` among its overrides gets one task
per dataset; runs, ids, resuming, tuning and plans are the same as for any suite. A dataset
is never left out without a line that says so: one that cannot be read is refused by the checks
before the runs.

<folder>/<dataset>/{train,valid,test}/              as DATASETS.COCO_DIR, which names the files
<folder>/<domain>/<dataset>/{train,valid,test}/     the same, in domains
"""

import csv
import difflib
import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report.datasets import DOMAIN, reach
from benchmarks.report.records import TASK_KEYS
from benchmarks.suites import forkserver
from benchmarks.suites.suite import (
    DETECTION,
    DETECTION_ENGINES,
    PROGRAMS,
    Suite,
    SuiteTask,
    are_texts,
)
from moco.common import shipped
from moco.common.cfgnode import flatten, read_yaml
from moco.common.command import EPOCH, RANDOM, SEVERAL
from moco.common.errors import DataError, UserError, echo, plural
from moco.common.files import PathLike, expand_home
from moco.common.keys import Role, names_of
from moco.common.pretrained import ENDINGS, init_name

MAX_TRIALS = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Predicate of valid values, and their description for the error.
Check = tuple[Callable[[Any], bool], str]


def _is_grid(value: Any) -> bool:
    def are_numbers(axis: Any) -> bool:
        return isinstance(axis, list) and bool(axis) and all(type(v) in (int, float) for v in axis)

    if not isinstance(value, Mapping) or not set(value) <= {"share", "values"}:
        return False
    share, axes = value.get("share", 1), flatten(value.get("values", {}))
    fits = all(_is_tunable(key) and are_numbers(axis) for key, axis in axes.items())
    return type(share) in (int, float) and 0 < share <= 1 and fits


def _is_tunable(key: str) -> bool:
    return key in TASK_KEYS and TASK_KEYS[key].tunable


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
    "tune": (
        _is_grid,
        f"share: 0 to 1, and values: KEY: numbers for {', '.join(filter(_is_tunable, TASK_KEYS))}",
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
        lambda v: are_texts(v) and v and set(v) <= set(DETECTION_ENGINES),
        f"a list of {', '.join(DETECTION_ENGINES)}",
    ),
    "without": (are_texts, "a list of names"),
    "trials": TRIALS,
    "paper": (are_texts, "a list of names"),
    "seconds_per_iteration": SECONDS,
}


def as_name(folder: str) -> str:
    """Turn the name of a folder into a valid name of a suite or a task.

    Invalid characters are replaced, and `--`, which separates a domain from a dataset.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", folder).lstrip("._-") or "dataset"
    name = re.sub("-{2,}", "-", name).rstrip("-")
    return f"{name}_" if name.endswith(ENDINGS) else name


def load_suite(path: PathLike) -> Suite:
    """Read the YAML file of a suite; `config` is a path relative to the file, or a shipped name.

    Raises:
        UserError: If the file is unreadable, or its content is invalid.
    """
    path = expand_home(path)
    return read_suite(read_yaml(path), path)


def read_suite(content: Any, path: Path) -> Suite:
    """Parse the content of a suite file at `path`, which need not exist.

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
    return Suite(
        name=check(f"{where}: name", tree.get("name", path.stem), _NAMED),
        title=tree.get("title", ""),
        tasks=tasks,
        baseline=tree.get("baseline"),
        inits=parse_inits(inits, where),
        tune=tree.get("tune"),
    )


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
            along = name_checkpoints(
                name, order_by_epoch(match_files(files[0]), f"{where} {argument}")
            )
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
    """Check the keys and values of a mapping, and return the keys that have a value.

    Raises:
        UserError: If the tree is no mapping, a key is unknown, a value is invalid, or `required` is
            missing.
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
    if key in names_of(TASK_KEYS, Role.RUN):
        raise UserError(f"{where}: {key} is set for each run; leave it out")


_SIGNS = re.compile(r"[*?\[]")
# `checkpoint_0099`, `ckpt-99`, `epoch=99` or `99ep`, but not `step=99`.
_CHECKPOINT = re.compile(
    r"(?<![a-z])(?:epochs?|ep|checkpoint|ckpt)[-_=]?(\d{1,6})(?!\d)"
    r"|(?<!\d)(\d{1,6})ep(?:ochs?)?(?![a-z\d=])",
    re.IGNORECASE,
)
_Version = tuple[Path, int, int]
_known: dict[_Version, int | None] = {}  # epochs of files that this process has read


def is_pattern(weights: str) -> bool:
    """Return whether a weights argument is a pattern of file names, such as `runs/ckpt_*.pth`."""
    is_file = "://" in weights or expand_home(weights).exists()
    return bool(_SIGNS.search(weights)) and not is_file


def match_files(pattern: str) -> list[Path]:
    """Return the files that a pattern matches, in alphabetical order."""
    paths = map(Path, glob.glob(os.path.expanduser(pattern)))
    return sorted(path for path in paths if path.is_file())


def order_by_epoch(files: Sequence[Path], where: str) -> dict[int, Path]:
    """Order checkpoints by the recorded epoch, or else by the epoch in their names.

    Args:
        files: Files of one pre-training.
        where: Argument that names them, for messages.

    Raises:
        DataError: If there are none, one has no epoch, or two have the same.
    """
    if not files:
        raise DataError(f"{where}: no file has such a name; expected checkpoints")
    versions = [(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    if unread := [version for version in versions if version not in _known]:
        epochs = forkserver.call(_recorded_epochs, [path for path, *_ in unread])
        _known.update(zip(unread, epochs, strict=True))
    found: dict[int, Path] = {}
    for version in versions:
        path, epoch = version[0], _known[version]
        if epoch is None:
            epoch = _named_epoch(path.name)
        if epoch is None:
            raise DataError(
                f"{where}: {path} records no epoch, and its name has none; expected a name such "
                "as epoch0100.pth"
            )
        if epoch in found:
            raise DataError(
                f"{where}: {found[epoch].name} and {path.name} are both of epoch {epoch}; expected "
                "one checkpoint of each, so give a narrower pattern"
            )
        found[epoch] = path
    return dict(sorted(found.items()))


def name_checkpoints(name: str, files: Mapping[int, Path]) -> dict[str, str]:
    """Return the inits of checkpoints by epoch: `mine-epoch0100` → file."""
    return {f"{name}{EPOCH}{epoch:04d}": str(path) for epoch, path in files.items()}


def _recorded_epochs(files: Sequence[Path]) -> list[int | None]:
    return [_recorded_epoch(path) for path in files]


def _recorded_epoch(path: Path) -> int | None:
    """Return the `epoch` of a checkpoint or of mmengine's `meta` in it, or None."""
    from convert.read import read_file

    raw: Any = None
    with suppress(DataError):  # the checks before the first run name what cannot be read
        raw = read_file(path)
    for content in (raw, raw.get("meta") if isinstance(raw, Mapping) else None):
        epoch = content.get("epoch") if isinstance(content, Mapping) else None
        if type(epoch) is int and epoch >= 0:
            return epoch
    return None


def _named_epoch(name: str) -> int | None:
    found = _CHECKPOINT.search(name)
    return int(found[1] or found[2]) if found else None


DATASET = "$DATASET"  # placeholder of a dataset's folder
SPLITS = ("train", "valid", "val", "test")
_LAYOUT = "folders of datasets with train/, valid/ and test/, as Roboflow exports COCO's format"


def expand_datasets(suite: Suite, data: Path | None, config: str | None = None) -> Suite:
    """Return a suite with one task per dataset; other suites are returned unchanged.

    Args:
        suite: Suite as its file defines it.
        data: Folder of the datasets (`--data`).
        config: Task file for all of them, or its shipped name (`--task`); None: the suite's.

    Raises:
        UserError: If the suite and the options do not belong together.
        DataError: If the folder does not hold several datasets.
    """
    own = [task for task in suite.tasks if any(DATASET in value for _, value in task.overrides)]
    if not own:
        if data is not None or config is not None:
            raise UserError(
                f"{'--data' if data else '--task'}: suite {suite.name} has no task with {DATASET} "
                "in its overrides; the shipped ones are many and many_small"
            )
        return suite
    if data is None:
        raise UserError(f"suite {suite.name}: runs on a folder of datasets; give --data FOLDER")
    if len(suite.tasks) > 1:
        raise UserError(
            f"suite {suite.name}: has {len(suite.tasks)} tasks; expected the one with {DATASET}, "
            "because one task and one budget are for all datasets"
        )
    task = own[0] if config is None else replace(own[0], config=shipped.resolve(config).resolve())
    tasks = tuple(
        replace(
            task,
            name=name,
            overrides=tuple((k, v.replace(DATASET, str(folder))) for k, v in task.overrides),
        )
        for name, folder in find_datasets(data).items()
    )
    return replace(suite, tasks=tasks)


def find_datasets(folder: Path) -> dict[str, Path]:
    """Return the datasets of a folder by the names of their tasks, `[<domain>--]<dataset>`.

    Raises:
        DataError: If there are fewer than two, or two have the same name.
    """
    root = expand_home(folder).resolve()
    if not root.is_dir():
        raise DataError(f"--data {folder}: no such folder; expected {_LAYOUT}")
    if _is_dataset(root):
        raise DataError(f"--data {folder}: is one dataset; expected the folder of several")
    found: dict[str, Path] = {}
    for each in _folders(root):
        paths = [each] if _is_dataset(each) else list(filter(_is_dataset, _folders(each)))
        others = [path for path in _folders(each) if path not in paths] if each not in paths else []
        for path in others if paths else [each]:
            echo(f"left out: {path}, which is no dataset")
        for path in paths:
            parts = path.relative_to(root).parts
            name = DOMAIN.join(map(as_name, parts))
            # Tables call a dataset by its own folder, so that two domains cannot share a name.
            for other in (o for known, o in found.items() if known == name or o.name == path.name):
                raise DataError(f"--data: {other} and {path} have the same name; rename one")
            found[name] = path
    if len(found) < 2:
        raise DataError(f"--data {folder}: got {plural(len(found), 'dataset')}, expected {_LAYOUT}")
    return found


def describe_datasets(suite: Suite, rows: int) -> list[str]:
    """Return lines about the datasets of a suite, and the smallest p-value that they allow."""
    names = [task.name for task in suite.tasks]
    return [f"{plural(len(names), 'dataset')}: {', '.join(names)}", reach(len(names), rows)]


def _is_dataset(folder: Path) -> bool:
    return any((folder / split).is_dir() for split in SPLITS)


def _folders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
