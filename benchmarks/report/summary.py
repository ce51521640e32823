"""Inits over all tasks of a report with their mean rank, and over the schedule of one task.

A rank is among a task's means as printed, the highest is 1, and equal ones share the mean of their
places. The mean rank is over the tasks that every init has a number of: over others, a low rank
could say no more than that the better ones were not run.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.report.aggregate import Cell, Row, Table
from benchmarks.report.content import Report, Section, Shown, printed
from benchmarks.report.plots import Curve, read_curve
from benchmarks.report.style import MISSING, format_cell
from moco.common.run import METRICS_NAME

SHARES = (0.1, 0.25, 0.5, 1.0)  # of the schedule


@dataclass(frozen=True)
class Summary:
    """The first metric of every table.

    Attributes:
        tasks: a column each: the table's title with the metric's.
        means: init → per task its mean; None: it has none.
    """

    tasks: tuple[str, ...]
    means: Mapping[str, tuple[float | None, ...]]

    @cached_property
    def ranks(self) -> dict[str, tuple[float | None, ...]]:
        """Init → per task its rank; None where it has no mean."""
        columns = [ranks(column) for column in zip(*self.means.values(), strict=True)]
        return dict(zip(self.means, zip(*columns, strict=True), strict=True))

    @cached_property
    def ranked(self) -> tuple[int, ...]:
        """The tasks, counted from 0, that every init has a number of."""
        columns = zip(*self.means.values(), strict=True)
        return tuple(i for i, column in enumerate(columns) if None not in column)

    def mean_rank(self, init: str) -> float | None:
        """Over the tasks of `ranked`; None where there is none."""
        found = [rank for i in self.ranked if (rank := self.ranks[init][i]) is not None]
        return statistics.fmean(found) if found else None

    @property
    def head(self) -> list[str]:
        return ["pre-train", *self.tasks, "mean rank"]

    @property
    def rows(self) -> list[list[Shown]]:
        """Per init, the lowest mean rank first: its means with their ranks, and the mean rank."""
        order = {init: self.mean_rank(init) for init in self.means}
        return [
            [
                Shown(init),
                *map(_ranked, self.means[init], self.ranks[init]),
                Shown(MISSING if order[init] is None else f"{order[init]:.2f}", order[init]),
            ]
            for init in sorted(self.means, key=lambda init: (order[init] or 0, init))
        ]

    @property
    def note(self) -> str:
        of = f"{len(self.ranked)} of {len(self.tasks)} tasks"
        text = f"the mean of each row, its rank in brackets, and its mean rank over {of}"
        if len(self.ranked) < len(self.tasks):
            left = [task for i, task in enumerate(self.tasks) if i not in self.ranked]
            text += f", those that all rows have a number of (not {'; '.join(left)})"
        return f"{text}; equal means share the mean of their ranks; no uncertainty is in a rank"


def summary(report: Report) -> Summary | None:
    """Of a report with two tables or more."""
    if len(report.sections) < 2:
        return None
    inits = dict.fromkeys(row.init for table in report.tables for row in table.rows)
    found = [
        {row.init: row.cells[table.metrics[0]] for row in table.rows} for table in report.tables
    ]
    means = {
        init: tuple(cell.mean if (cell := column.get(init)) else None for column in found)
        for init in inits
    }
    return Summary(tuple(f"{s.heading}: {s.titles[0]}" for s in report.sections), means)


def ranks(means: Sequence[float | None]) -> list[float | None]:
    """1 for the highest mean as printed; equal ones share the mean of their places."""
    values = [None if mean is None else round(mean, 1) for mean in means]
    known = [value for value in values if value is not None]
    return [
        None
        if value is None
        else 1 + sum(other > value for other in known) + (known.count(value) - 1) / 2
        for value in values
    ]


def convergence(table: Table) -> dict[str, tuple[Cell | None, ...]]:
    """Init → its first metric at each of `SHARES` of the schedule, where it was evaluated there.

    What a run has at the end is in its record, the rest in its `metrics.json`.

    Raises:
        UserError: a line of `metrics.json` that is not JSON.
    """
    return {row.init: _converged(row, table.metrics[0]) for row in table.rows}


def convergence_rows(section: Section) -> list[list[Shown]]:
    """Per init its name and a cell per share; empty where nothing but the end is known."""
    found = convergence(section.table)
    if not any(cell for cells in found.values() for cell in cells[:-1]):
        return []
    return [
        [
            Shown(row.init),
            *(Shown(format_cell(c, row.n), c.mean if c else None) for c in found[row.init]),
        ]
        for row in section.table.rows
    ]


def convergence_head(section: Section) -> list[str]:
    """Titles of `convergence_rows`."""
    return [f"{section.titles[0]} at", *(f"{share:.0%} of the schedule" for share in SHARES)]


def _ranked(mean: float | None, rank: float | None) -> Shown:
    shown = printed(mean)
    return shown if rank is None else Shown(f"{shown.text} ({rank:g})", mean)


def _curve(path: Path, metric: str) -> Curve:
    empty = np.empty(0)
    return read_curve(path, [metric]) if path.is_file() else (empty, empty)


def _converged(row: Row, metric: str) -> tuple[Cell | None, ...]:
    curves = {run.folder: _curve(run.folder / METRICS_NAME, metric) for run in row.runs}
    cells = []
    for share in SHARES:
        numbers = []
        for unit in row.units:
            at = [
                run.record.metrics.get(metric)
                if share == 1
                else value_at(curves[run.folder], round(share * run.record.iterations))
                for run in unit
            ]
            if known := [value for value in at if value is not None]:
                numbers.append(statistics.fmean(known))
        cells.append(Cell(tuple(numbers)) if numbers else None)
    return tuple(cells)


def value_at(curve: Curve, done: int) -> float | None:
    """The value after `done` iterations, which are logged as `done - 1`."""
    return next((float(y) for x, y in zip(*curve, strict=True) if x == done - 1), None)
