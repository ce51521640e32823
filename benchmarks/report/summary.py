"""Summary of all tasks of a report: means and mean rank per init.

Ranks are by a task's rounded means: the highest has rank 1, and equal ones share the mean of their
ranks. The mean rank is over the tasks for which every init has a number, since elsewhere a low rank
may only mean that better inits were not run. If a task and its tuned variant are both there, only
the task itself counts.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.report.aggregate import Table, untuned
from benchmarks.report.captions import heading
from benchmarks.report.cells import TextCell, printed
from benchmarks.report.style import MISSING
from detection.evaluation.metrics import titles


@dataclass(frozen=True)
class Summary:
    """First metric of every table, by init.

    Attributes:
        tasks: Column heads: the title of each table and of its metric.
        means: Init → mean per task, None where it has no number.
        tuned: Indices of tasks that are tuned variants of another task.
    """

    tasks: tuple[str, ...]
    means: Mapping[str, tuple[float | None, ...]]
    tuned: tuple[int, ...] = ()

    @cached_property
    def ranks(self) -> dict[str, tuple[float | None, ...]]:
        """Init → rank per task, None where it has no number."""
        columns = [ranks(column) for column in zip(*self.means.values(), strict=True)]
        return dict(zip(self.means, zip(*columns, strict=True), strict=True))

    @cached_property
    def ranked(self) -> tuple[int, ...]:
        """Indices of the tasks that count in the mean rank."""
        columns = enumerate(zip(*self.means.values(), strict=True))
        return tuple(i for i, column in columns if None not in column and i not in self.tuned)

    def mean_rank(self, init: str) -> float | None:
        """Average the ranks of an init over the tasks of `ranked`, or return None without any."""
        found = [rank for i in self.ranked if (rank := self.ranks[init][i]) is not None]
        return statistics.fmean(found) if found else None

    @property
    def head(self) -> list[str]:
        """Column heads of `rows`."""
        return ["pre-train", *self.tasks, "mean rank"]

    @property
    def rows(self) -> list[list[TextCell]]:
        """Formatted cells per init, lowest mean rank first: means with ranks, and mean rank."""
        order = {init: self.mean_rank(init) for init in self.means}
        return [
            [
                TextCell(init),
                *map(_ranked, self.means[init], self.ranks[init]),
                TextCell(MISSING if order[init] is None else f"{order[init]:.2f}", order[init]),
            ]
            for init in sorted(self.means, key=lambda init: (order[init] or 0, init))
        ]

    @property
    def note(self) -> str:
        """Legend of `rows`."""
        of = f"{len(self.ranked)} of {len(self.tasks)} tasks"
        text = f"the mean of each row, its rank in brackets, and its mean rank over {of}"
        counted = {*self.ranked, *self.tuned}
        if left := [task for i, task in enumerate(self.tasks) if i not in counted]:
            text += f", those that all rows have a number of (not {'; '.join(left)})"
        if tuned := [self.tasks[i] for i in self.tuned]:
            text += f", each task once (not {'; '.join(tuned)}, which is another task's with tuned "
            text += "values)"
        return f"{text}; equal means share the mean of their ranks; no uncertainty is in a rank"


def summarize(tables: Sequence[Table]) -> Summary | None:
    """Summarize two or more tables, or return None for fewer."""
    if len(tables) < 2:
        return None
    columns = [{row.init: row.cells[table.metrics[0]] for row in table.rows} for table in tables]
    means = {
        init: tuple(cell.mean if (cell := column.get(init)) else None for column in columns)
        for init in dict.fromkeys(init for column in columns for init in column)
    }
    tasks = (f"{heading(table, tables)}: {titles(table.metrics)[0]}" for table in tables)
    tuned = [i for i, table in enumerate(tables) if untuned(table, tables)]
    return Summary(tuple(tasks), means, tuple(tuned))


def ranks(means: Sequence[float | None]) -> list[float | None]:
    """Rank rounded means, 1 for the highest; equal means share the mean of their ranks."""
    values = [None if mean is None else round(mean, 1) for mean in means]
    known = [value for value in values if value is not None]
    return [
        None
        if value is None
        else 1 + sum(other > value for other in known) + (known.count(value) - 1) / 2
        for value in values
    ]


def _ranked(mean: float | None, rank: float | None) -> TextCell:
    shown = printed(mean)
    return shown if rank is None else TextCell(f"{shown.text} ({rank:g})", mean)
