"""Expansion of a suite's task over a folder of datasets, with one task file and budget for all.

<folder>/<dataset>/{train,valid,test}/              as DATASETS.COCO_DIR, which names the files
<folder>/<domain>/<dataset>/{train,valid,test}/     the same, in domains

A suite whose only task has the value `$DATASET` among its overrides gets one task per dataset, so
that runs, their ids, resuming, tuning and plans are those of any suite. A dataset is never left
out without a line that says so: one that cannot be read is refused by the checks before the runs.
"""

from dataclasses import replace
from pathlib import Path

from benchmarks.report.datasets import DOMAIN, reach
from benchmarks.suites.suite import Suite
from benchmarks.suites.suite_file import as_name
from moco.common import shipped
from moco.common.errors import DataError, UserError, plural, say
from moco.common.files import expanded

DATASET = "$DATASET"  # placeholder of a dataset's folder
SPLITS = ("train", "valid", "val", "test")
_LAYOUT = "folders of datasets with train/, valid/ and test/, as Roboflow exports COCO's format"


def over_datasets(suite: Suite, data: Path | None, config: str | None = None) -> Suite:
    """Return a suite with one task per dataset; a suite of other tasks is returned unchanged.

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
    root = expanded(folder).resolve()
    if not root.is_dir():
        raise DataError(f"--data {folder}: no such folder; expected {_LAYOUT}")
    if _is_dataset(root):
        raise DataError(f"--data {folder}: is one dataset; expected the folder of several")
    found: dict[str, Path] = {}
    for each in _folders(root):
        paths = [each] if _is_dataset(each) else list(filter(_is_dataset, _folders(each)))
        others = [path for path in _folders(each) if path not in paths] if each not in paths else []
        for path in others if paths else [each]:
            say(f"left out: {path}, which is no dataset")
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


def announce(suite: Suite, rows: int) -> list[str]:
    """Return the datasets of a suite, and what they can show at best, before the first run."""
    names = [task.name for task in suite.tasks]
    return [f"{plural(len(names), 'dataset')}: {', '.join(names)}", reach(len(names), rows)]


def _is_dataset(folder: Path) -> bool:
    return any((folder / split).is_dir() for split in SPLITS)


def _folders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
