"""Runs → mean, standard deviation, n and the gap to a baseline. Pure; refuses to mix what differs.

A row averages runs that differ in nothing but the seed. Where it has several pre-trainings (inits
`moco@1`, `moco@2`, ...), the mean over the seeds of each is one value of the row. All rows of a
table come from one task on one dataset, one engine and one protocol (the hash of everything but
seed, weights, folders and devices), so that a gap between two rows is the weights' doing.

A task is called after its file, and files of different folders may have one name (configs/coco,
configs/lvis): what tells them apart is what they are tested on.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report.escape import file_names
from benchmarks.report.paper import tables_for
from benchmarks.report.records import FinishedRun
from detection.config import keys as detection_keys
from detection.evaluation.metrics import headline_names
from moco.classification import config as classification_config
from moco.common.command import RANDOM, SEVERAL
from moco.common.errors import UserError, first_few

CONFIDENCE = 0.95
ROUNDING = 1e-9  # a standard deviation of points below this is none
_PRETRAINING = re.compile(rf"(.+){SEVERAL}([1-9]\d{{0,2}})")
NOT_PROTOCOL = {*detection_keys.NOT_PROTOCOL, *classification_config.NOT_PROTOCOL}


@dataclass(frozen=True)
class Cell:
    """One metric over the trials of one row: a value of each, in the order of `Row.units`."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Sample standard deviation (ddof 1), None for a single trial."""
        return statistics.stdev(self.values) if self.n > 1 else None


@dataclass(frozen=True)
class Gap:
    """Mean minus the baseline's mean.

    Attributes:
        value: of the means themselves, as are `low`, `high` and `p_value`.
        printed: of the means as tables print them, to one decimal, which is the paper's rule too.
        low, high: 95% interval of the gap, without assuming equal variances (Welch).
        p_value: of Welch's two-sided test that the means are equal. All three are None if either
            side has a single trial or neither side varies.
    """

    value: float
    printed: float
    low: float | None
    high: float | None
    p_value: float | None


@dataclass(frozen=True)
class Row:
    """All trials of one init, or of several pre-trainings; a metric that no trial has is None.

    Attributes:
        units: what varies independently: each run or, of several pre-trainings, the runs of each.
    """

    init: str
    units: tuple[tuple[FinishedRun, ...], ...]
    cells: dict[str, Cell | None]
    gaps: dict[str, Gap | None]

    @property
    def runs(self) -> tuple[FinishedRun, ...]:
        return tuple(run for unit in self.units for run in unit)

    @property
    def n(self) -> int:
        return len(self.units)

    @property
    def several(self) -> bool:
        """Whether the row has several pre-trainings."""
        return len({run.record.init for run in self.runs}) > 1


@dataclass(frozen=True)
class Resampled:
    """One gap over resampled test images (benchmarks/report/bootstrap.py).

    Attributes:
        images: both ends of the 95% interval over the test images alone, p-value, and this
            corrected by Holm over all such gaps of the table.
        both: the same over runs and test images; None where a row has one run.
        bound: whether no resample is on the other side of 0, so that the p-value of `images` is
            the lowest that their number can give.
    """

    images: tuple[float, float, float, float]
    both: tuple[float, float, float, float] | None
    bound: bool = False


@dataclass(frozen=True)
class Resamples:
    """The gaps of a table over resampled test images.

    Attributes:
        number: of resamples.
        gaps: by row and metric.
        missing: row → why it has none.
    """

    number: int
    gaps: Mapping[tuple[str, str], Resampled]
    missing: Mapping[str, str]


@dataclass(frozen=True)
class Table:
    """One task on one engine: a row per init, the baseline first.

    Attributes:
        title: the suite's name of the task where all runs are of one, else the task.
        tested_on: DATASETS.TEST of its runs; empty for a classification.
        margin: points within which two rows are called equal; None: nothing is.
        resamples: over test images; None: that was not computed.
    """

    task: str
    title: str
    tested_on: tuple[str, ...]
    engine: str
    iterations: int
    baseline: str | None
    metrics: tuple[str, ...]
    rows: tuple[Row, ...]
    margin: float | None = None
    resamples: Resamples | None = None

    @property
    def runs(self) -> tuple[FinishedRun, ...]:
        return tuple(run for row in self.rows for run in row.runs)

    @property
    def base(self) -> Row | None:
        """The row of the baseline, if there is one."""
        return next((row for row in self.rows if row.init == self.baseline), None)


def row_of(init: str) -> tuple[str, int]:
    """Name of the row that an init is in, and the number of its pre-training; 0: the only one."""
    found = _PRETRAINING.fullmatch(init)
    return (found[1], int(found[2])) if found else (init, 0)


def stems(tables: Sequence[Table]) -> list[str]:
    """A name for each table, for files and anchors: the task, then what tells it from others."""
    engine = len({table.engine for table in tables}) > 1
    keys = []
    for table in tables:
        data = {other.tested_on for other in tables if other.task == table.task}
        parts = (table.task, *(table.tested_on if len(data) > 1 else ()))
        keys.append((*parts, table.engine) if engine else parts)
    return file_names(keys)


def aggregate(runs: Sequence[FinishedRun], baseline: str | None = None) -> list[Table]:
    """One table per task and what it is tested on, in alphabetical order.

    Args:
        baseline: name of the row that gaps refer to; None takes `random` where there is one.

    Raises:
        UserError: a baseline that no task has; or, within a task, several engines,
            protocols, weights under one name, or two runs with one seed. The message says which
            runs differ in what.
    """
    inits = sorted({row_of(run.record.init)[0] for run in runs})
    if baseline is not None and baseline not in inits:
        raise UserError(f"baseline {baseline!r}: no such init; choices are {', '.join(inits)}")
    groups = _groups(runs, lambda run: (run.record.task, run.tested_on))
    for (task, _), members in groups.items():
        _require_comparable(task, members)
    return [_table(members, baseline or RANDOM) for _, members in sorted(groups.items())]


def mean_cell(of_units: Iterable[Iterable[float | None]]) -> Cell | None:
    """A value per unit whose runs all have one, their mean; None where there is no such unit."""
    means = []
    for values in map(list, of_units):
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            means.append(statistics.fmean(known))
    return Cell(tuple(means)) if means else None


def varies(values: Sequence[float]) -> bool:
    """Whether two or more values differ by more than rounding errors."""
    return statistics.stdev(values) >= ROUNDING


def gap(cell: Cell | None, base: Cell | None) -> Gap | None:
    """`cell` minus `base` with Welch's interval and test; None where a side has no number."""
    if cell is None or base is None:
        return None
    value = cell.mean - base.mean
    printed = round(round(cell.mean, 1) - round(base.mean, 1), 1)
    if min(cell.n, base.n) < 2 or not (varies(cell.values) or varies(base.values)):
        return Gap(value, printed, None, None, None)
    from scipy import stats  # takes a second to import

    test = stats.ttest_ind(cell.values, base.values, equal_var=False)
    interval = test.confidence_interval(CONFIDENCE)
    return Gap(value, printed, float(interval.low), float(interval.high), float(test.pvalue))


def listed_differences(groups: Sequence[Sequence[FinishedRun]]) -> str:
    """`SOLVER.BASE_LR (0.02 / 0.01), …`: the first few of the protocol's keys that differ.

    They are constant within every group of runs but not across them; values are in the order of
    the groups, None where a group's records do not hold the key.
    """
    configs = [[run.record.config for run in group] for group in groups]
    keys = {key for group in configs for config in group for key in config}
    parts = []
    for key in sorted(keys - NOT_PROTOCOL):
        values = [[config.get(key) for config in group] for group in configs]
        constant = all(all(value == group[0] for value in group) for group in values)
        if constant and any(group[0] != values[0][0] for group in values):
            parts.append(f"{key} ({' / '.join(repr(group[0]) for group in values)})")
    return first_few(parts, 6) if parts else "keys that their records do not hold"


def _table(runs: list[FinishedRun], baseline: str) -> Table:
    first, tested_on = runs[0].record, runs[0].tested_on
    # What its runs measured, in the order of the paper's table where it has one.
    shown = headline_names({name for run in runs for name in run.record.metrics})
    order = [name for paper in tables_for(first.task, tested_on) for name in paper.metrics]
    metrics = sorted(
        shown or headline_names(["bbox/"]),
        key=lambda name: order.index(name) if name in order else len(order),
    )
    ordered = sorted(runs, key=lambda run: (row_of(run.record.init)[1], run.record.seed))
    members = _groups(ordered, lambda run: row_of(run.record.init)[0])
    by_init = {init: _units(runs_of) for init, runs_of in members.items()}
    cells = {
        init: {
            name: mean_cell([run.record.metrics.get(name) for run in unit] for unit in units)
            for name in metrics
        }
        for init, units in by_init.items()
    }
    rows = []
    for init in sorted(by_init, key=lambda name: (name != RANDOM, name != baseline, name)):
        base = cells.get(baseline, {}) if init != baseline else {}
        gaps = {name: gap(cell, base.get(name)) for name, cell in cells[init].items()}
        rows.append(Row(init, by_init[init], cells[init], gaps))
    titles = {run.suite_task for run in runs}
    return Table(
        task=first.task,
        title=(titles.pop() if len(titles) == 1 else None) or first.task,
        tested_on=tested_on,
        engine=first.engine,
        iterations=first.iterations,
        baseline=baseline if baseline in by_init else None,
        metrics=tuple(metrics),
        rows=tuple(rows),
    )


def _units(runs: Sequence[FinishedRun]) -> tuple[tuple[FinishedRun, ...], ...]:
    """Of one row, see `Row`; each run alone where all have the same weights."""
    groups = list(_groups(runs, lambda run: run.record.init).values())
    if len(groups) == 1:
        groups = [[run] for run in runs]
    return tuple(tuple(group) for group in groups)


def _require_comparable(task: str, runs: list[FinishedRun]) -> None:
    if engines := _differing(runs, "engine"):
        raise UserError(
            f"{task}: runs of different engines are not averaged: {engines}; "
            "choose one with --engine, or --engine each for a table of each"
        )
    if protocols := _differing(runs, "config_sha256"):
        groups = [*_groups(runs, lambda run: run.record.config_sha256).values()]
        raise UserError(
            f"{task}: runs of different protocols are not averaged: {protocols}; "
            f"they differ in {listed_differences(groups)}"
        )
    if lengths := _differing(runs, "iterations"):
        raise UserError(f"{task}: runs of different iterations are not averaged: {lengths}")
    for init, members in _groups(runs, lambda run: run.record.init).items():
        if weights := _differing(members, "weights_sha256"):
            raise UserError(
                f"{task}: init {init!r} is of different weights: {weights}; "
                "give each file its own name"
            )
        for seed, same in _groups(members, lambda run: run.record.seed).items():
            if len(same) > 1:
                folders = ", ".join(str(run.folder) for run in same)
                raise UserError(
                    f"{task}: init {init!r} has seed {seed} more than once ({folders}); "
                    "a repetition is not a trial, leave one of them out"
                )


def _differing(runs: list[FinishedRun], field: str) -> str:
    """The values of a record's field with the runs that have each; empty where there is one."""
    groups = _groups(runs, lambda run: getattr(run.record, field))
    return " / ".join(
        f"{str(value)[:10]} ({first_few([str(run.folder) for run in members], 3)})"
        for value, members in groups.items()
        if len(groups) > 1
    )


def _groups(
    runs: Iterable[FinishedRun], key: Callable[[FinishedRun], Any]
) -> dict[Any, list[FinishedRun]]:
    groups: dict[Any, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups
