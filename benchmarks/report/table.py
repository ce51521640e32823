"""Aggregation of runs into tables: mean, standard deviation, n and gap to a baseline per init.

A row averages runs that differ only in their seed. If it has several pre-trainings (inits `moco@1`,
`moco@2`, ...), the mean over the seeds of each is one value of the row. All rows of a table share
the task, the dataset, the engine and the protocol (the hash of the configuration without seed,
weights, folders and devices), so a gap between two rows is due to the weights. Runs that differ in
any of these are an error.

A task is named after its file, and files in different folders may have the same name (configs/coco,
configs/lvis), so tables are also grouped by test dataset. Some files are for any network
(faster_rcnn_timm_small, frozen_small), so that each has its table, which names it.

`TextCell` and `Grid` are formatted: their texts are plain, and renderers escape them.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.report.published import tables_for
from benchmarks.report.records import TASK_KEYS, FinishedRun
from benchmarks.report.style import (
    MINUS,
    MISSING,
    STRONG_FROM,
    UNTESTED,
    file_names,
    format_gap,
    format_interval,
    format_p,
    is_strong,
)
from detection.evaluation.metrics import LOGME, headline_names, titles
from detection.modeling.backbones import backbone_type
from moco.common.command import RANDOM, SEVERAL
from moco.common.errors import UserError, first_few
from moco.common.keys import NOT_PROTOCOL, names_of

CONFIDENCE = 0.95
ROUNDING = 1e-9  # points; a smaller standard deviation is rounding error
FLOOR = 1.0  # AP or mIoU (0..100); two detectors below it are not compared
_PRETRAINING = re.compile(rf"(.+){SEVERAL}([1-9]\d{{0,2}})")
LOGME_TITLE = "LogME"
LOGME_NOTE = (
    "LogME: log evidence, per box, of a linear model that tells the classes of boxes and "
    "background apart by the features of the initial backbone, without training; higher is better "
    "(You et al., arXiv 2102.11005; for detectors arXiv 2403.09432); mean of the runs, not tested"
)
EPOCHS = "SOLVER.MAX_EPOCHS"  # length of classification runs; detection counts iterations
# Family → key by which its task files differ (`Family.task_key`).
NETWORK_KEYS = {
    "convnext": "MODEL.CONVNEXT.DIMS",
    "resnet": "MODEL.RESNETS.DEPTH",
    "swin": "MODEL.SWIN.EMBED_DIM",
    "timm": "MODEL.TIMM.NAME",
    "vit": "MODEL.VIT.EMBED_DIM",
}


@dataclass(frozen=True)
class Cell:
    """One metric of one row: a value per trial, in the order of `Row.units`."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        """Number of trials that have the metric."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Mean over the trials."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Sample standard deviation (ddof 1), or None for a single trial."""
        return statistics.stdev(self.values) if self.n > 1 else None


@dataclass(frozen=True)
class Gap:
    """Difference between the mean of a row and the mean of the baseline.

    Attributes:
        value: Difference of the unrounded means.
        printed: Difference of the means rounded to one decimal, as the paper computes its gaps.
        low: Lower end of the gap's 95% interval, without assuming equal variances (Welch).
        high: Upper end of that interval.
        p_value: P-value of Welch's two-sided test of equal means, None like the interval without a
            test.
        untested: Reason why there is no test, empty if there is one.
    """

    value: float
    printed: float
    low: float | None
    high: float | None
    p_value: float | None
    untested: str = ""


@dataclass(frozen=True)
class Row:
    """Trials of one init, or of several pre-trainings of one name.

    Attributes:
        init: Name of the row, without the number of a pre-training.
        units: Independent trials: one run each or, if the row has several pre-trainings, all runs
            of one pre-training.
        cells: Metric → cell, or None if no trial has the metric.
        gaps: Metric → gap to the baseline, or None if either side has no number, or if both are at
            the floor.
    """

    init: str
    units: tuple[tuple[FinishedRun, ...], ...]
    cells: dict[str, Cell | None]
    gaps: dict[str, Gap | None]

    @property
    def runs(self) -> tuple[FinishedRun, ...]:
        """Runs of all units."""
        return tuple(run for unit in self.units for run in unit)

    @property
    def n(self) -> int:
        """Number of trials."""
        return len(self.units)

    @property
    def several(self) -> bool:
        """True if the row has several pre-trainings."""
        return len({run.record.init for run in self.runs}) > 1


@dataclass(frozen=True)
class Resampled:
    """Bootstrap interval of one gap (benchmarks/report/bootstrap.py).

    Attributes:
        images: Ends of the 95% interval over the test images alone, its p-value, and the p-value
            after Holm's correction over all such gaps of the table.
        both: The same four numbers over runs and test images, or None if a row has a single run.
        bound: True if all resamples lie on one side of 0, so the p-value of `images` is the
            smallest that the number of resamples can give.
    """

    images: tuple[float, float, float, float]
    both: tuple[float, float, float, float] | None
    bound: bool = False


@dataclass(frozen=True)
class Resamples:
    """Bootstrap intervals of a table's gaps.

    Attributes:
        number: Number of resamples.
        gaps: (row, metric) → interval.
        missing: Row → reason why its gaps have no interval.
    """

    number: int
    gaps: Mapping[tuple[str, str], Resampled]
    missing: Mapping[str, str]


@dataclass(frozen=True)
class Table:
    """Results of one task on one engine, with a row per init.

    Attributes:
        task: Name of the task's file, with the network if its runs have several.
        title: Name of the task in the suite if all runs are from one suite task, else `task`.
        tested_on: DATASETS.TEST of the runs, empty for classification.
        engine: Engine of the runs.
        iterations: Number of iterations of each run.
        baseline: Name of the row that gaps refer to, or None if the table has no such row.
        metrics: Canonical names of the columns.
        rows: Rows, random initialization first, then the baseline.
        margin: Largest gap, in points, that counts as equivalence; None skips that test.
        resamples: Bootstrap over the test images, or None if it was not computed.
        looks: Number of times that its gaps may have been tested, each at 0.05 / `looks`.
        notes: Notes on the choice of the number of seeds.
        grids: Grids on the choice of the number of seeds.
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
    looks: int = 1
    notes: tuple[str, ...] = ()
    grids: tuple[Any, ...] = ()

    @property
    def runs(self) -> tuple[FinishedRun, ...]:
        """Runs of all rows."""
        return tuple(run for row in self.rows for run in row.runs)

    @property
    def base(self) -> Row | None:
        """The baseline's row, if there is one."""
        return next((row for row in self.rows if row.init == self.baseline), None)


def row_of(init: str) -> tuple[str, int]:
    """Split an init into the name of the row and the number of the pre-training, 0 without one.

    For example, `moco@2` is the second pre-training of row `moco`.
    """
    found = _PRETRAINING.fullmatch(init)
    return (found[1], int(found[2])) if found else (init, 0)


def stems(tables: Sequence[Table]) -> list[str]:
    """Return a unique name for each table, for use in file names and anchors.

    The name is the task, followed by test datasets and engine if tables differ in them.
    """
    engine = len({table.engine for table in tables}) > 1
    keys = []
    for table in tables:
        data = {other.tested_on for other in tables if other.task == table.task}
        parts = (table.task, *(table.tested_on if len(data) > 1 else ()))
        keys.append((*parts, table.engine) if engine else parts)
    return file_names(keys)


def aggregate(runs: Sequence[FinishedRun], baseline: str | None = None) -> list[Table]:
    """Group runs into one table per task, network and test dataset, in alphabetical order.

    Args:
        runs: Finished runs of any tasks.
        baseline: Name of the row that gaps refer to. None selects `random` if there is such a row.

    Raises:
        UserError: If no task has the baseline, or if the runs of one task differ in engine,
            protocol or iterations, have different weights under one name, or share a seed.
    """
    inits = sorted({row_of(run.record.init)[0] for run in runs})
    if baseline is not None and baseline not in inits:
        raise UserError(f"--baseline {baseline}: no such init; choices are {', '.join(inits)}")
    names = _named_tasks(runs)
    groups = _groups(runs, lambda run: (names[run.record.task, _network(run)], run.tested_on))
    for (task, _), members in groups.items():
        _require_comparable(task, members)
    return [
        _table(task, members, baseline or RANDOM) for (task, _), members in sorted(groups.items())
    ]


def without_tuned(task: str) -> str:
    """Return the name of the original of a tuned task; other names are returned as they are."""
    name, bracket, network = task.partition(" (")
    return name.removesuffix("_tuned") + bracket + network


def _network(run: FinishedRun) -> str:
    """Return what distinguishes the network of a run among those of one task file."""
    config = run.record.config
    family = backbone_type(str(config.get("MODEL.BACKBONE.NAME"))).family
    return f"{family} {config.get(NETWORK_KEYS.get(family, ''))}"


def _named_tasks(runs: Iterable[FinishedRun]) -> dict[tuple[str, str], str]:
    """Name each task and network: after the task alone, unless its runs have several networks."""
    found = {(run.record.task, _network(run)) for run in runs}
    networks: dict[str, set[str]] = {}
    for task, network in found:
        networks.setdefault(without_tuned(task), set()).add(network)
    return {
        (task, network): f"{task} ({network})" if len(networks[without_tuned(task)]) > 1 else task
        for task, network in found
    }


def untuned(table: Table, tables: Iterable[Table]) -> Table | None:
    """Return the table of a tuned task's untuned original, or None if there is none."""
    if not table.runs[0].record.config.get("SOLVER.TUNED"):
        return None
    name, found = without_tuned(table.task), (table.tested_on, table.engine)
    same = (other for other in tables if other.task == name and other is not table)
    return next((other for other in same if (other.tested_on, other.engine) == found), None)


def mean_cell(of_units: Iterable[Iterable[float | None]]) -> Cell | None:
    """Average the values within each unit, leaving out units with a missing value.

    Returns:
        One mean per remaining unit, or None if no unit remains.
    """
    means = []
    for values in map(list, of_units):
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            means.append(statistics.fmean(known))
    return Cell(tuple(means)) if means else None


def varies(values: Sequence[float]) -> bool:
    """Check whether two or more values differ by more than rounding errors."""
    return statistics.stdev(values) >= ROUNDING


def untested(gap: Gap | None, reason: str) -> Gap | None:
    """Return a gap without its test."""
    return gap and replace(gap, low=None, high=None, p_value=None, untested=reason)


def gap(cell: Cell | None, base: Cell | None, looks: int = 1) -> Gap | None:
    """Return `cell` minus `base` with Welch's interval and test, or None if either is missing.

    Args:
        cell: Cell of a row.
        base: Cell of the baseline.
        looks: Number of times that the gap may have been tested, for which interval and p-value
            are corrected (Bonferroni).
    """
    if cell is None or base is None:
        return None
    value = cell.mean - base.mean
    printed = round(round(cell.mean, 1) - round(base.mean, 1), 1)
    if min(cell.n, base.n) < 2:
        return Gap(value, printed, None, None, None, untested="n = 1")
    if not (varies(cell.values) or varies(base.values)):
        return Gap(value, printed, None, None, None, untested="the values do not vary")
    from scipy import stats  # takes a second to import

    test = stats.ttest_ind(cell.values, base.values, equal_var=False)
    interval = test.confidence_interval(1 - (1 - CONFIDENCE) / looks)
    p_value = min(1.0, looks * float(test.pvalue))
    return Gap(value, printed, float(interval.low), float(interval.high), p_value)


def is_floor(kind: str, cells: Mapping[str, Cell | None]) -> bool:
    """Check whether a row of detectors has learned nothing, by AP or else the first metric.

    Args:
        kind: Kind of the runs, as in `RunRecord`; only detectors have a floor.
        cells: Cells of the row by metric.
    """
    if kind != "detection":
        return False
    name = next((name for name in cells if name.endswith("/AP")), next(iter(cells)))
    cell = cells[name]
    return cell is not None and cell.mean < FLOOR


def listed_differences(groups: Sequence[Sequence[FinishedRun]]) -> str:
    """Format the protocol keys that differ between groups: `SOLVER.BASE_LR (0.02 / 0.01), …`.

    Only keys that are constant within each group are listed, with one value per group, or None if
    the records of the group lack the key.
    """
    configs = [[run.record.config for run in group] for group in groups]
    keys = {key for group in configs for config in group for key in config}
    parts = []
    for key in sorted(keys - {*names_of(TASK_KEYS, *NOT_PROTOCOL)}):
        values = [[config.get(key) for config in group] for group in configs]
        constant = all(all(value == group[0] for value in group) for group in values)
        if constant and any(group[0] != values[0][0] for group in values):
            parts.append(f"{key} ({' / '.join(repr(group[0]) for group in values)})")
    return first_few(parts, 6) if parts else "keys that their records do not contain"


def _table(task: str, runs: list[FinishedRun], baseline: str) -> Table:
    first, tested_on = runs[0].record, runs[0].tested_on
    # The columns are in the order of the paper's table if it has one for this task.
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
    floors = {init for init in cells if is_floor(first.kind, cells[init])}
    rows = []
    for init in sorted(by_init, key=lambda name: (name != RANDOM, name != baseline, name)):
        compared = init != baseline and not {init, baseline} <= floors
        base = cells.get(baseline, {}) if compared else {}
        gaps = {name: gap(cell, base.get(name)) for name, cell in cells[init].items()}
        rows.append(Row(init, by_init[init], cells[init], gaps))
    titles = {run.suite_task for run in runs}
    return Table(
        task=task,
        title=(titles.pop() if len(titles) == 1 else None) or task,
        tested_on=tested_on,
        engine=first.engine,
        iterations=first.iterations,
        baseline=baseline if baseline in by_init else None,
        metrics=tuple(metrics),
        rows=tuple(rows),
    )


def _units(runs: Sequence[FinishedRun]) -> tuple[tuple[FinishedRun, ...], ...]:
    """Group the runs of one row by pre-training, or one run each if there is only one."""
    groups = list(_groups(runs, lambda run: run.record.init).values())
    if len(groups) == 1:
        groups = [[run] for run in runs]
    return tuple(tuple(group) for group in groups)


def _require_comparable(task: str, runs: list[FinishedRun]) -> None:
    if engines := _differing(runs, "engine"):
        raise UserError(
            f"{task}: cannot average runs of different engines: {engines}; "
            "choose one with --engine, or use --engine each for one table per engine"
        )
    if protocols := _differing(runs, "config_sha256"):
        groups = [*_groups(runs, lambda run: run.record.config_sha256).values()]
        raise UserError(
            f"{task}: cannot average runs of different protocols: {protocols}; "
            f"they differ in {listed_differences(groups)}"
        )
    if lengths := _differing(runs, "iterations"):
        raise UserError(f"{task}: cannot average runs of different iterations: {lengths}")
    for name, members in _groups(runs, lambda run: row_of(run.record.init)[0]).items():
        _require_several(task, name, members)
    for init, members in _groups(runs, lambda run: run.record.init).items():
        if weights := _differing(members, "weights_sha256"):
            raise UserError(
                f"{task}: init {init!r} has different weights: {weights}; "
                "give each file its own name"
            )
        for seed, same in _groups(members, lambda run: run.record.seed).items():
            if len(same) > 1:
                folders = ", ".join(str(run.folder) for run in same)
                raise UserError(
                    f"{task}: init {init!r} has seed {seed} more than once ({folders}); "
                    "a repetition is not a trial: leave out all but one"
                )


def _require_several(task: str, name: str, runs: Sequence[FinishedRun]) -> None:
    """Check that the pre-trainings of one row are not the same file."""
    for sha256, same in _groups(runs, lambda run: run.record.weights_sha256).items():
        if len(inits := sorted({run.record.init for run in same})) > 1:
            raise UserError(
                f"{task}: {first_few(inits)} are the same weights ({str(sha256)[:10]}); expected "
                f"another pre-training each, as they are the trials of row {name}"
            )


def _differing(runs: list[FinishedRun], field: str) -> str:
    """Format the values of a record's field with their runs, or "" if all runs have the same."""
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


@dataclass(frozen=True)
class TextCell:
    """Formatted cell of a table.

    Attributes:
        text: Text of the cell.
        value: Sort key of the cell, or None to sort by the text.
        points: Gap to the baseline after rounding, or None.
        significant: True if the gap's p-value is below 0.05 after Holm's correction.
        untested: True if the gap was measured without a test.
        strong: True if the gap is green.
        best: True if no other row has a higher number after rounding.
        versus: Row whose gap to the baseline the cell names, or empty.
    """

    text: str
    value: float | None = None
    points: float | None = None
    significant: bool = False
    untested: bool = False
    strong: bool = False
    best: bool = False
    versus: str = ""

    @property
    def gap(self) -> str:
        """Gap as text, empty if there is none."""
        if self.points is None:
            return ""
        return format_gap(self.points) + (f", {UNTESTED}" if self.untested else "")


@dataclass(frozen=True)
class Grid:
    """Supplementary table below a table; the HTML page collapses it if `folded`."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[TextCell]]
    folded: bool = False


def printed(value: float | None, gap: float | None = None) -> TextCell:
    """Format one number, or a dash, as a cell; a printed gap is green where the paper's is."""
    text = MISSING if value is None else f"{value:.1f}"
    return TextCell(text, value, gap, strong=gap is not None and is_strong(gap))


def has_logme(table: Table) -> bool:
    """Return whether a run of a table has a LogME."""
    return any(run.record.metrics.get(LOGME) is not None for run in table.runs)


def logme_cell(row: Row) -> TextCell:
    """Format the mean LogME of a row's runs as a cell."""
    cell = mean_cell((run.record.metrics.get(LOGME) for run in unit) for unit in row.units)
    if cell is None:
        return TextCell(MISSING)
    return TextCell(f"{cell.mean:.3f}".replace("-", MINUS), cell.mean)


def evidence(gap: Gap | None) -> TextCell:
    """Format a gap with its 95% interval and p-value: `+18.4 [15.0, 21.8], p = 0.002`."""
    if gap is None:
        return TextCell(MISSING)
    text = format_gap(gap.printed)
    if gap.low is None or gap.high is None or gap.p_value is None:
        return TextCell(f"{text} ({UNTESTED}: {gap.untested})", gap.value)
    interval = format_interval(gap.low, gap.high)
    return TextCell(f"{text} {interval}, {format_p(gap.p_value)}", gap.value)


def gap_name(table: Table, init: str, metric: str = "") -> TextCell:
    """Return the cell that names the gap of a row to the baseline, of one metric if given."""
    what = f", {titles(table.metrics)[table.metrics.index(metric)]}" if metric else ""
    return TextCell(f"{init} {MINUS} {table.baseline}{what}", versus=init)


def init_rows(table: Table, cells: Mapping[str, Iterable[Cell | None]]) -> list[list[TextCell]]:
    """Return rows of formatted cells: the init of each row of a table, then its `cells`."""
    return [
        [
            TextCell(row.init),
            *(TextCell(format_cell(c, row.n), c.mean if c else None) for c in cells[row.init]),
        ]
        for row in table.rows
    ]


def format_cell(cell: Cell | None, n_of_row: int) -> str:
    """Format a cell: `26.5 ± 1.2`, `26.5` for one trial; `(n = 2 of 3)` if numbers are missing."""
    if cell is None:
        return MISSING
    text = f"{cell.mean:.1f}" if cell.std is None else f"{cell.mean:.1f} ± {cell.std:.1f}"
    return text if cell.n == n_of_row else f"{text} (n = {cell.n} of {n_of_row})"


def legend(gaps: Sequence[Gap], baseline: str | None) -> str:
    """Return the legend of a table's cells, the same in every format.

    Args:
        gaps: All gaps of the table.
        baseline: Name of the row that they refer to.
    """
    text = "underlined: best of its column"
    if gaps:
        text += f"; in brackets: gap to {baseline}"
    if any(not gap.untested for gap in gaps):
        text += "; bold: p < 0.05 in Welch's test after Holm's correction for all gaps of the table"
        text += f"; green, where there is color: bold and at least +{STRONG_FROM}"
    if reasons := dict.fromkeys(gap.untested for gap in gaps if gap.untested):
        text += f"; {UNTESTED}: {', or '.join(reasons)}"
    return text


def format_plus_minus(gap: Gap, interval: Sequence[float]) -> str:
    """Format a gap with half of an interval that is symmetric about it: `+1.4 ± 1.7`."""
    return f"{format_gap(gap.printed)} ± {(interval[1] - interval[0]) / 2:.1f}"


def heading(table: Table, tables: Sequence[Table]) -> str:
    """Return the title of a table, with dataset and engine if others of that title differ in it."""
    same = [other for other in tables if other.title == table.title]
    text = table.title
    if len({other.tested_on for other in same}) > 1:
        text += f" on {', '.join(table.tested_on)}"
    if len({other.engine for other in same}) > 1:
        text += f", {table.engine} engine"
    return text


def setting(table: Table) -> str:
    """Format the setting of a table: `embedded engine, 300 iterations, tested on voc_2007_test`."""
    config = table.runs[0].record.config
    parts = [table.task] if table.title != table.task else []
    parts.append(f"{table.engine} engine")
    if table.iterations:
        epochs = f" ({config[EPOCHS]} epochs)" if EPOCHS in config else ""
        parts.append(f"{table.iterations} iterations{epochs}")
    if table.tested_on:
        metric = f" ({name})" if (name := voc_metric(table)) else ""
        parts.append(f"tested on {', '.join(table.tested_on)}{metric}")
    return ", ".join(parts)


def voc_metric(table: Table) -> str:
    """Return the name of VOC's metric if a table's AP is by it, `VOC07, 11-point`, else ""."""
    record = table.runs[0].record
    if not any(name.startswith("bbox/AP50-") for name in record.metrics):
        return ""
    published = any(name.startswith("voc_2012_") for name in table.tested_on)
    year = 2012 if published else record.config.get("DATASETS.VOC_YEAR", 2007)
    return "VOC12, area under the curve" if year == 2012 else "VOC07, 11-point"


def seeds(table: Table) -> str:
    """Return the kind of seeds that the trials of a row differ in."""
    kind = table.runs[0].record.kind
    return "seeds of the linear classifier" if kind == "linear" else "fine-tuning seeds"
