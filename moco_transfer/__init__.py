"""Python interface: load a backbone from any checkpoint or module, and evaluate backbones.

    import moco_transfer as mt

    backbone = mt.load_backbone("my_r50.pth.tar")
    task = "faster_rcnn_R_50_C4_24k"
    result = mt.evaluate({"mine": backbone, "random": None}, task=task, seeds=3, out="runs/mine")
    print(result)

The functions do what the commands `moco-transfer convert` and `moco-transfer suite` do; see
docs/guides/python.md. They import torch and other large packages only when they are called.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from moco.common.errors import DataError, UserError
from moco.common.files import read_text

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from benchmarks.report.report import Report
    from convert.backbone import Backbone
    from moco.common.run import RunRecord

__all__ = ["DataError", "Result", "UserError", "evaluate", "load_backbone", "rank"]

_PAGE_PX = 720  # height of the page in a notebook


def load_backbone(source: str | os.PathLike[str] | nn.Module, **options: Any) -> Backbone:
    """Return the backbone in a checkpoint or a module, converted and verified.

    The result is a `torch.nn.Module` in eval mode. It maps RGB images (N, 3, H, W) in 0..1 to a
    dict of feature maps (N, C, h, w), named as in the backbone's family: `stem`, `res2` to `res5`,
    or `last_feat`. Images are normalized by the attribute `contract`. The attributes `strides` and
    `channels` describe the maps. H and W must be multiples of `size_divisibility`, else a
    ValueError is raised.

    Args:
        source: File, folder or name that `moco-transfer convert` accepts, or a `torch.nn.Module`
            of such a network, e.g. of torchvision, timm or transformers, which is not changed.
        options: Options of `moco-transfer convert` for facts that the source does not record:
            `encoder`, `mean` and `std` (0..255, in channel order), `channel_order`, `stem`, ...

    Raises:
        UserError: If an option is needed or does not fit, or the source cannot be downloaded.
        DataError: If the network is of no known family or damaged, or the verification fails.
    """
    from convert.backbone import load_backbone

    return load_backbone(source, **options)


@dataclass(frozen=True)
class Result:
    """Result of `evaluate` or `rank`, printed as the table, and shown in a notebook as the page.

    Attributes:
        folder: Folder of the evaluation.
        report: Tables and the runs behind them.
    """

    folder: Path
    report: Report = field(repr=False)

    def __str__(self) -> str:
        from benchmarks.report.export import format_paths, to_terminal

        return f"{to_terminal(self.report, color=False)}\n{format_paths([self.html])}"

    def _repr_html_(self) -> str:
        page = escape(read_text(self.html))  # in a frame, for its own style
        return f'<iframe srcdoc="{page}" width="100%" height="{_PAGE_PX}"></iframe>'

    @property
    def html(self) -> Path:
        """Path of the page: tables, figures, sample predictions, every run."""
        from benchmarks.report.style import PAGE_NAME

        return self.folder / "tables" / PAGE_NAME

    @property
    def runs(self) -> list[RunRecord]:
        """Records of the runs, as in `run.json`, in the order of the tables."""
        return [run.record for table in self.report.tables for run in table.runs]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the tables as a frame: one row per task, engine, init and metric.

        Columns are `task`, `engine`, `init`, `metric`, `n`, `mean`, `std` (NaN for one seed) and
        `gap`, the difference of the mean to the baseline's mean (NaN without a baseline).

        Raises:
            UserError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_pandas: pandas is not installed; pip install pandas") from error
        rows = [
            {
                "task": table.title,
                "engine": table.engine,
                "init": row.init,
                "metric": metric,
                "n": cell.n,
                "mean": cell.mean,
                "std": cell.std,
                "gap": gap.value if (gap := row.gaps.get(metric)) else None,
            }
            for table in self.report.tables
            for row in table.rows
            for metric, cell in row.cells.items()
            if cell is not None
        ]
        return pandas.DataFrame(rows).astype({"mean": float, "std": float, "gap": float})


def evaluate(
    inits: Mapping[str, str | os.PathLike[str] | nn.Module | None],
    *,
    out: str | os.PathLike[str],
    task: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    data: str | os.PathLike[str] | None = None,
    seeds: int | Sequence[int] = 3,
    options: Mapping[str, object] | None = None,
    baseline: str | None = None,
    engine: str = "auto",
    executor: str = "auto",
    workers: int = 0,
    gpus_per_run: int | None = None,
) -> Result:
    """Fine-tune every task from every init with several seeds, and return the tables.

    The call is equivalent to `moco-transfer suite`, or with `data` to `moco-transfer evaluate`,
    with the same checks, child processes and progress. After an interruption, the same call
    continues: finished runs are kept, and failed runs are repeated.

    Args:
        inits: Name of a row → weights: any value of `MODEL.WEIGHTS` (a file, a name, an address), a
            backbone from `load_backbone`, or a module that `load_backbone` accepts. None is random
            initialization, whose row is named `random`.
        out: Folder of the runs and tables.
        task: Task file or its shipped name (`moco-transfer configs` lists them), or several. None
            is the example task for the first weights' backbone, if `data` is given.
        data: Folder of a dataset, whose layout is found; the length of the task follows from its
            classes and images, unless `options` has `SOLVER.MAX_ITER`.
        seeds: Number of seeds, 0, 1, ..., or the seeds.
        options: Keys of the tasks and their values, e.g. `{"DATASETS.VOC_DIR": "scenes"}`.
        baseline: Init that gaps refer to (default: `random`, if present).
        engine: `detectron2`, `embedded`, `each`, or `auto`: Detectron2 if it can be imported.
        executor: `local` (GPUs), `cpu`, `slurm`, or `auto`: the GPUs if there are any.
        workers: Parallel runs on the CPU (default: one per core).
        gpus_per_run: GPUs of one run (default: 1).

    Raises:
        UserError: Before any run starts, if an argument is invalid, a run would fail, or the call
            is not in the main thread; after all runs, if some failed; after Ctrl-C or SIGTERM, once
            the runs have saved their state.
        DataError: If weights or data are missing or damaged, or a module is of no known family.
    """
    return _evaluate("evaluate", locals())


def rank(
    inits: Mapping[str, str | os.PathLike[str] | nn.Module | None],
    *,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    seeds: int | Sequence[int] = 3,
    options: Mapping[str, object] | None = None,
    baseline: str | None = None,
    engine: str = "auto",
    executor: str = "auto",
    workers: int = 0,
    gpus_per_run: int | None = None,
) -> Result:
    """Rank frozen backbones on a dataset by a small detector on their cached maps, and by LogME.

    The call is equivalent to `moco-transfer rank`; all backbones are of one architecture.

    Args:
        inits: As for `evaluate`.
        data: Folder of a dataset, whose layout is found.
        out: Folder of the runs and tables.
        seeds: As for `evaluate`, as are the other arguments.
        options: Keys of the tasks and their values.
        baseline: Init that gaps refer to.
        engine: Detection engine.
        executor: Place of the runs.
        workers: Number of simultaneous runs.
        gpus_per_run: GPUs of each run.

    Raises:
        UserError: If an argument is invalid, all rows are random, or a run failed.
        DataError: If weights or data are missing or damaged, or a module is of no known family.
    """
    return _evaluate("rank", locals())


def _evaluate(name: str, given: dict[str, Any]) -> Result:
    """Run the suite of `evaluate` or `rank`, whose arguments are `given`."""
    from benchmarks import run_suite
    from benchmarks.evaluate import chosen_suite
    from benchmarks.rank import ranked_suite
    from benchmarks.run_suite import ENGINES, SuiteOptions
    from benchmarks.suites.checks import option_pairs
    from benchmarks.suites.executors.base import EXECUTORS
    from benchmarks.suites.folder import SuiteFolder
    from benchmarks.suites.runs import Programs
    from benchmarks.suites.suite_file import TRIALS, check, read_suite, with_options
    from benchmarks.suites.tables import write_report
    from moco.common.errors import lookup
    from moco.common.files import expand_home
    from moco.common.shipped import resolve

    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            f"{name}: got another thread, expected the main one, which alone can handle Ctrl-C; "
            "start a process for each evaluation"
        )
    _check_arguments(given)
    if (engine := given["engine"]) not in ENGINES:
        raise UserError(f"engine: got {engine!r}, expected one of {', '.join(ENGINES)}")
    lookup(EXECUTORS, given["executor"], "executor")
    inits, data, options, seeds = (given[key] for key in ("inits", "data", "options", "seeds"))
    task = given.get("task")
    files = [task] if isinstance(task, str | os.PathLike) else (task or [])
    if data is None and not files:
        raise UserError(
            "evaluate: got no task and no data; give task=NAME (moco-transfer configs lists them), "
            "or data=DIR, for which a task is chosen"
        )
    if data is not None and len(files) > 1:
        raise UserError(f"task: got {len(files)} tasks, expected at most one with data")
    passed = {key: given[key] for key in ("baseline", "executor", "workers", "gpus_per_run")}
    own = SuiteOptions(engine=engine, retry_failed=True, **passed)
    numbers = range(seeds) if isinstance(seeds, SupportsIndex) else tuple(map(index, seeds))
    pairs = [text for key, value in (options or {}).items() for text in (key, str(value))]
    folder = SuiteFolder(Path(given["out"]))
    with tempfile.TemporaryDirectory() as modules:
        weights = {
            row: _weights(init, f"inits: {row}", Path(modules, f"{number}.pth"))
            for number, (row, init) in enumerate(inits.items())
        }
        trials = check("seeds", len(numbers), TRIALS)
        rows = [f"{row}={text}" for row, text in weights.items()]
        if name == "rank":
            suite = ranked_suite(expand_home(data), rows, pairs, trials)
        elif data is not None:
            chosen = os.fspath(files[0]) if files else None
            suite = chosen_suite(expand_home(data), rows, chosen, pairs, trials)
        else:
            tasks = [{"config": str(resolve(file).absolute())} for file in files]
            content = {"tasks": tasks, "trials": trials, "inits": weights}
            suite = read_suite(content, Path("evaluate"))
        suite = with_options(suite, option_pairs(suite.tasks, pairs, "options"), {})
        seeded = tuple(replace(each, seeds=tuple(numbers)) for each in suite.tasks)
        suite = replace(suite, tasks=seeded)
        timing = data is not None
        report, _ = run_suite.run(
            suite, folder, own, Programs(), timing=timing, finish=write_report
        )
    return Result(folder.path, report)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _are_paths(value: Any) -> bool:
    several = isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_path, value))
    return several or _is_path(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)


def _are_seeds(value: Any) -> bool:
    if _is_integer(value):
        return index(value) < 1 << 31
    if isinstance(value, str | bytes) or not isinstance(value, Collection):
        return False
    numbers = [index(each) if _is_integer(each) else -1 for each in value]
    return len(set(numbers)) == len(numbers) and all(0 <= each < 1 << 31 for each in numbers)


def _are_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


# Argument of `evaluate` or `rank` → predicate of values of a fitting type, and their description.
_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "inits": (_are_named, "a mapping of names to weights"),
    "out": (_is_path, "a folder"),
    "task": (lambda v: v is None or _are_paths(v), "a task file or its name, or a list of them"),
    "data": (lambda v: v is None or _is_path(v), "the folder of a dataset"),
    "seeds": (_are_seeds, "a number of seeds, or different integers from 0 to 2147483647"),
    "options": (lambda v: v is None or _are_named(v), "a mapping of keys to values"),
    "baseline": (lambda v: v is None or isinstance(v, str), "the name of an init"),
    "engine": (lambda v: isinstance(v, str), "a text"),
    "executor": (lambda v: isinstance(v, str), "a text"),
    "workers": (_is_integer, "a number"),
    "gpus_per_run": (lambda v: v is None or _is_integer(v), "a number"),
}


def _check_arguments(values: Mapping[str, Any]) -> None:
    """Raise UserError for an argument of a wrong type."""
    from moco.common.errors import format_values

    for name, (is_valid, expected) in _ARGUMENTS.items():
        if name in values and not is_valid(value := values[name]):
            raise UserError(f"{name}: got {format_values(value)}, expected {expected}")


def _weights(init: Any, where: str, file: Path) -> str:
    """Return the value of MODEL.WEIGHTS for an init; a module is saved in `file`."""
    if init is None:
        return "random"
    if isinstance(init, str | os.PathLike):
        return os.fspath(init)
    from torch import nn

    from convert.backbone import Backbone, load_backbone

    if not isinstance(init, nn.Module):
        raise UserError(
            f"{where}: got a {type(init).__name__}, expected a file, a name, a torch.nn.Module, or "
            "None for random initialization"
        )
    backbone = init if isinstance(init, Backbone) else load_backbone(init)
    backbone.save(file)
    return str(file)
