"""Inits over all tasks of a report with their mean rank.

A rank is among a task's means as printed, the highest is 1, and equal ones share the mean of their
places. The mean rank is over the tasks that every init has a number of: over others, a low rank
could say no more than that the better ones were not run. The tuned rows of a task that is there
itself are not counted a second time.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.report.aggregate import Table
from benchmarks.report.captions import heading
from benchmarks.report.cells import Shown, printed
from benchmarks.report.style import MISSING
from detection.evaluation.metrics import titles


@dataclass(frozen=True)
class Summary:
    """The first metric of every table.

    Attributes:
        tasks: a column each: the table's title with the metric's.
        means: init → per task its mean; None: it has none.
        again: those, counted from 0, that are another one with tuned values.
    """

    tasks: tuple[str, ...]
    means: Mapping[str, tuple[float | None, ...]]
    again: tuple[int, ...] = ()

    @cached_property
    def ranks(self) -> dict[str, tuple[float | None, ...]]:
        """Init → per task its rank; None where it has no mean."""
        columns = [ranks(column) for column in zip(*self.means.values(), strict=True)]
        return dict(zip(self.means, zip(*columns, strict=True), strict=True))

    @cached_property
    def ranked(self) -> tuple[int, ...]:
        """The tasks, counted from 0, that every init has a number of, each once."""
        columns = enumerate(zip(*self.means.values(), strict=True))
        return tuple(i for i, column in columns if None not in column and i not in self.again)

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
        counted = {*self.ranked, *self.again}
        if left := [task for i, task in enumerate(self.tasks) if i not in counted]:
            text += f", those that all rows have a number of (not {'; '.join(left)})"
        if again := [self.tasks[i] for i in self.again]:
            text += f", each task once (not {'; '.join(again)}, which is another task's with tuned "
            text += "values)"
        return f"{text}; equal means share the mean of their ranks; no uncertainty is in a rank"


def summarize(tables: Sequence[Table]) -> Summary | None:
    """Of two tables or more."""
    if len(tables) < 2:
        return None
    columns = [{row.init: row.cells[table.metrics[0]] for row in table.rows} for table in tables]
    means = {
        init: tuple(cell.mean if (cell := column.get(init)) else None for column in columns)
        for init in dict.fromkeys(init for column in columns for init in column)
    }
    tasks = (f"{heading(table, tables)}: {titles(table.metrics)[0]}" for table in tables)
    known = {(table.task, table.tested_on, table.engine) for table in tables}
    again = [
        i
        for i, table in enumerate(tables)
        if table.task.endswith("_tuned")
        and (table.task.removesuffix("_tuned"), table.tested_on, table.engine) in known
        and table.runs[0].record.config.get("SOLVER.TUNED")
    ]
    return Summary(tuple(tasks), means, tuple(again))


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


def _ranked(mean: float | None, rank: float | None) -> Shown:
    shown = printed(mean)
    return shown if rank is None else Shown(f"{shown.text} ({rank:g})", mean)
