"""Summaries over tasks: of all tasks of a report, and of one task on many datasets.

`Summary` has means and mean ranks. Ranks are by a task's rounded means: the highest has rank 1, and
equal means share the mean of their ranks. The mean rank is over the tasks for which every init has
a number, since elsewhere a low rank may only mean that better inits were not run. If both a task
and a tuned variant are present, only the task itself counts.

`Collection` has means, ranks, wins and Wilcoxon's test across datasets. A trial is a dataset, not a
seed. Numbers of a row are over the datasets for which every row has all runs, and the number of
these datasets is given: without failed runs, the means of two rows would be over different
datasets, and runs fail most often with the worst weights.

Intervals are percentiles of a bootstrap over datasets and, in each of them, over the seeds (or
pre-trainings) of a row. Between two rows the datasets are the same and the seeds independent. The
spread of the datasets already contains that of their seeds, so the intervals are rather too wide.

Wilcoxon's signed-rank test (Demšar, JMLR 7, 2006) is exact, also with ties, whose ranks are
averaged; datasets without a difference are left out. Of n datasets its smallest two-sided p-value
is 2 / 2^n.
"""

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.report.records import Results
from benchmarks.report.stats import holm
from benchmarks.report.style import (
    MINUS,
    MISSING,
    file_names,
    format_gap,
    format_interval,
    format_p,
)
from benchmarks.report.table import (
    CONFIDENCE,
    ROUNDING,
    Cell,
    Grid,
    Table,
    TextCell,
    format_cell,
    heading,
    printed,
    row_of,
    untuned,
    without_tuned,
)
from detection.config.keys import OURS
from detection.evaluation.metrics import titles
from moco.common.command import RANDOM
from moco.common.errors import first_few, plural

DOMAIN = "--"  # between the domain and the dataset in the name of a task
RESAMPLES, SEED = 4000, 0
# Keys that name the files of a custom dataset, in any layout.
_OWN_DATA = [
    name
    for name, key in OURS.items()
    if name.startswith("DATASETS.") and key.data and name != "DATASETS.PART_INDEX"
]
_RUN = re.compile(r"seed(\d+)-[0-9a-f]+")
Trials = Sequence[Sequence[float]]  # dataset → value of each trial


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


@dataclass(frozen=True)
class Pair:
    """Comparison of two rows over the same datasets.

    Attributes:
        a: Name of the first row.
        b: Name of the second row.
        differences: Mean of `a` minus mean of `b` on each dataset.
        wins: Datasets on which `a` is better after rounding to one decimal.
        losses: Datasets on which `b` is.
        interval: Ends of the 95% interval of the mean difference, None for a single dataset.
        p_value: Wilcoxon's two-sided p-value.
        holm: The same after Holm's correction over all pairs of rows.
    """

    a: str
    b: str
    differences: tuple[float, ...]
    wins: int
    losses: int
    interval: tuple[float, float] | None
    p_value: float
    holm: float


@dataclass(frozen=True)
class Collection:
    """First metric of one task on many datasets, on one engine.

    Attributes:
        task: Name of the task's file.
        engine: Engine of the runs.
        metric: Canonical name of the metric.
        values: Row → dataset → value of each trial, without those that have no number.
        datasets: Names of all datasets, those without any number too.
        absent: (row, dataset) → reason why a run has no number, `failed: …` or `unfinished: …`.
        baseline: Row that the plot compares with.
    """

    task: str
    engine: str
    metric: str
    values: Mapping[str, Mapping[str, tuple[float, ...]]]
    datasets: tuple[str, ...]
    absent: Mapping[tuple[str, str], str]
    baseline: str

    @cached_property
    def complete(self) -> tuple[str, ...]:
        """Datasets of which every row has all its numbers."""
        return tuple(
            name
            for name in self.datasets
            if all(
                of.get(name) and (row, name) not in self.absent for row, of in self.values.items()
            )
        )

    def trials(self, row: str) -> Trials:
        """Return the values of a row on each dataset of `complete`."""
        return [self.values[row][name] for name in self.complete]

    def means(self, row: str, datasets: Sequence[str] | None = None) -> list[float]:
        """Return the means of a row on each dataset of `complete`, or of `datasets`."""
        names = self.complete if datasets is None else datasets
        return [statistics.fmean(self.values[row][name]) for name in names]

    @cached_property
    def mean_ranks(self) -> dict[str, float]:
        """Row → mean over `complete` of its rank, 1 for the highest rounded mean."""
        columns = zip(*(self.means(row) for row in self.values), strict=True)
        by_row = zip(*(ranks(column) for column in columns), strict=True)
        found = zip(self.values, by_row, strict=True)
        return {row: statistics.fmean(r for r in of if r is not None) for row, of in found}

    @cached_property
    def pairs(self) -> list[Pair]:
        """Comparison of every two rows over `complete`."""
        two = list(itertools.combinations(reversed(list(self.values)), 2))
        means = {row: self.means(row) for row in self.values}
        found = {
            (a, b): tuple(x - y for x, y in zip(means[a], means[b], strict=True)) for a, b in two
        }
        p_values = {pair: signed_rank(differences) for pair, differences in found.items()}
        corrected = holm(p_values)
        pairs = []
        for (a, b), differences in found.items():
            shown = [round(x, 1) - round(y, 1) for x, y in zip(means[a], means[b], strict=True)]
            ends = interval([self.trials(a), self.trials(b)])
            wins, losses = sum(x > 0 for x in shown), sum(x < 0 for x in shown)
            numbers = p_values[a, b], corrected[a, b]
            pairs.append(Pair(a, b, differences, wins, losses, ends, *numbers))
        return pairs

    @cached_property
    def domains(self) -> dict[str, list[str]]:
        """Domain → its datasets of `complete`; empty if the datasets have no domains."""
        found: dict[str, list[str]] = {}
        for name in self.complete:
            found.setdefault(name.rpartition(DOMAIN)[0], []).append(name)
        return found if any(found) else {}

    @property
    def heading(self) -> str:
        """Title of the summary."""
        return f"All datasets: {self.task}, {self.engine} engine"

    @property
    def figure(self) -> str:
        """Name of the figure in `Report.plots`."""
        [name] = file_names([("differences", self.task, self.engine)])
        return name

    @property
    def over(self) -> str:
        """Name of what means are over: `mean over 6 datasets`, or over how many of them and why."""
        k, n = len(self.complete), len(self.datasets)
        if k == n:
            return f"mean over {plural(n, 'dataset')}"
        kinds: dict[str, dict[str, None]] = {}
        for (_, name), why in self.absent.items():
            kinds.setdefault(why.partition(":")[0], {})[name] = None
        known = {name for names in kinds.values() for name in names}
        if others := [name for name in self.datasets if name not in {*known, *self.complete}]:
            kinds["not run"] = dict.fromkeys(others)
        why = "; ".join(f"{kind}: {first_few(list(names))}" for kind, names in kinds.items())
        return f"mean over {k} of {n}, {why}"

    @cached_property
    def grids(self) -> list[Grid]:
        """Grids of the datasets, the rows, the domains, and the pairs of rows."""
        title = titles([self.metric])[0]
        found = [Grid(f"{title} of each dataset", ["dataset", *self.values], self._by_dataset())]
        if not self.complete:
            return found
        head = ["pre-train", self.over, "95% interval"]
        head += ["mean of domain means"] if self.domains else []
        what = f"{title} over datasets"
        found.append(Grid(what, [*head, "mean rank"], [self._of_row(row) for row in self.values]))
        if self.domains:
            domains = [
                [
                    TextCell(f"{domain or MISSING} ({plural(len(names), 'dataset')})"),
                    *(printed(statistics.fmean(self.means(row, names))) for row in self.values),
                ]
                for domain, names in self.domains.items()
            ]
            found.append(Grid(f"{title} of each domain", ["domain", *self.values], domains))
        if self.pairs:
            head = ["", "wins / ties / losses", "mean difference", "Wilcoxon", "Holm"]
            rows = [self._of_pair(pair) for pair in self.pairs]
            found.append(Grid(f"Two rows over {plural(len(self.complete), 'dataset')}", head, rows))
        return found

    @property
    def notes(self) -> list[str]:
        """Notes on the coverage of the numbers, the reach of the test, and missing numbers."""
        text = "means, ranks and tests are over the datasets of which every row has all its runs; "
        text += "intervals are over datasets and seeds, as if these were drawn from many of their "
        text += "kind; wins and ranks compare rounded means"
        return [text, reach(len(self.complete), len(self.values))] + [
            f"{dataset}, {row}: {why}" for (row, dataset), why in self.absent.items()
        ]

    def _by_dataset(self) -> list[list[TextCell]]:
        rows = []
        for name in self.datasets:
            cells = [TextCell(name)]
            for row, of in self.values.items():
                cell = Cell(of[name]) if of.get(name) else None
                text = format_cell(cell, cell.n) if cell else MISSING
                if why := self.absent.get((row, name)):
                    kind = why.partition(":")[0]
                    text = f"{text} ({kind} in part)" if cell else kind
                cells.append(TextCell(text, cell.mean if cell else None))
            rows.append(cells)
        return rows

    def _of_row(self, row: str) -> list[TextCell]:
        means, ends = self.means(row), interval([self.trials(row)])
        cells = [TextCell(row), printed(statistics.fmean(means))]
        cells.append(TextCell(format_interval(*ends) if ends else MISSING))
        if self.domains:
            of_domains = [statistics.fmean(self.means(row, each)) for each in self.domains.values()]
            cells.append(printed(statistics.fmean(of_domains)))
        rank = self.mean_ranks[row]
        return [*cells, TextCell(f"{rank:.2f}", rank)]

    @staticmethod
    def _of_pair(pair: Pair) -> list[TextCell]:
        mean = statistics.fmean(pair.differences)
        text = format_gap(mean) + (f" {format_interval(*pair.interval)}" if pair.interval else "")
        ties = len(pair.differences) - pair.wins - pair.losses
        return [
            TextCell(f"{pair.a} {MINUS} {pair.b}"),
            TextCell(f"{pair.wins} / {ties} / {pair.losses}", pair.wins),
            TextCell(text, mean),
            TextCell(format_p(pair.p_value), pair.p_value),
            TextCell(format_p(pair.holm), pair.holm, significant=pair.holm < 1 - CONFIDENCE),
        ]


def collections(tables: Sequence[Table], results: Results) -> list[Collection]:
    """Return the summaries of suites whose tasks are one task file on several custom datasets.

    Args:
        tables: Tables of the report.
        results: Runs of the tables, and those without numbers.
    """
    groups: dict[tuple[Path, str, str], list[Table]] = {}
    tasks: dict[Path, set[str]] = {}  # task files of each suite, whose tuned tasks are the same
    for table in tables:
        first = table.runs[0]
        for root in {run.folder.parents[2] for run in table.runs if run.suite_task}:
            tasks.setdefault(root, set()).add(without_tuned(table.task))
            if any(first.record.config.get(key) for key in _OWN_DATA):
                groups.setdefault((root, table.task, table.engine), []).append(table)
    found = [
        _collection(members, results, root)
        for (root, _, _), members in groups.items()
        if len(tasks[root]) == 1
    ]
    return [each for each in found if len(each.datasets) > 1]


def _collection(tables: Sequence[Table], results: Results, root: Path) -> Collection:
    """Return the summary of the tables of one task, with the runs in `root` without numbers."""
    first, metric = tables[0], tables[0].metrics[0]
    tuned = bool(first.runs[0].record.config.get("SOLVER.TUNED"))
    values: dict[str, dict[str, tuple[float, ...]]] = {}
    absent: dict[tuple[str, str], str] = {}
    done = set()
    for table in tables:
        for row in table.rows:
            done |= {(table.title, run.record.init, run.record.seed) for run in row.runs}
            cell = row.cells.get(metric)
            values.setdefault(row.init, {})[table.title] = cell.values if cell else ()
            if cell is None or cell.n < row.n:
                absent[row.init, table.title] = "failed: a run is done without this number"
    names = {table.title for table in tables}
    for each in results.unusable:
        name, init = each.folder.parent.parent.name, each.folder.parent.name
        seed = _RUN.fullmatch(each.folder.name)
        if not seed or each.folder.parent.parent.parent != root or name.endswith("_tuned") != tuned:
            continue
        if (name, init, int(seed[1])) not in done:
            values.setdefault(row_of(init)[0], {})
            absent[row_of(init)[0], name] = each.reason
            names.add(name)
    baseline = first.baseline or next(iter(values))
    values = {
        row: values[row] for row in sorted(values, key=lambda r: (r != RANDOM, r != baseline, r))
    }
    datasets = tuple(sorted(names))
    return Collection(first.task, first.engine, metric, values, datasets, absent, baseline)


def interval(rows: Sequence[Trials]) -> tuple[float, float] | None:
    """Compute the percentile 95% interval of a mean over datasets and seeds.

    Args:
        rows: Values of one row; or of two, for the interval of the first minus the second. Their
            datasets are the same.

    Returns:
        Lower and upper end, or None for a single dataset.
    """
    n = len(rows[0])
    if n < 2:
        return None
    random = np.random.default_rng(SEED)
    chosen = random.integers(n, size=(RESAMPLES, n))
    total = np.zeros((RESAMPLES, n))
    for sign, row in zip((1, -1), rows, strict=False):
        numbers = np.array([len(values) for values in row])
        most = int(numbers.max())
        padded = np.array([[*values, *(0.0,) * (most - len(values))] for values in row])
        of = numbers[chosen][..., None]
        trial = (random.random((RESAMPLES, n, most)) * of).astype(int)
        drawn = padded[chosen[..., None], trial] * (np.arange(most) < of)
        total += sign * drawn.sum(axis=2) / of[..., 0]
    ends = np.quantile(total.mean(axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(ends[0]), float(ends[1])


def signed_rank(differences: Sequence[float]) -> float:
    """Return the exact two-sided p-value of Wilcoxon's signed-rank test; 1 without a difference.

    With ties, scipy's `wilcoxon` approximates it, and reaches p < 0.05 with five datasets, or lists
    all signs, which takes too long for more than twenty.
    """
    from scipy import stats

    known = np.array([value for value in differences if abs(value) >= ROUNDING])
    if not len(known):
        return 1.0
    # Averaged ranks are multiples of 1/2.
    doubled = np.rint(2 * stats.rankdata(np.round(np.abs(known), 9))).astype(int)
    share = np.zeros(doubled.sum() + 1)  # of all signs, by the sum of the positive ranks
    share[0] = 1.0
    for rank in doubled:
        share[rank:] = (share[rank:] + share[:-rank]) / 2
        share[:rank] /= 2
    positive = int(doubled[known > 0].sum())
    tail = min(positive, len(share) - 1 - positive)
    return min(1.0, float(2 * share[: tail + 1].sum()))


def datasets_needed(pairs: int) -> int:
    """Return the fewest datasets with which the smallest of `pairs` p-values can be below 0.05."""
    return next(n for n in itertools.count(1) if pairs * 2 / 2**n < 1 - CONFIDENCE)


def reach(datasets: int, rows: int) -> str:
    """Describe which p-values so many datasets can reach in Wilcoxon's two-sided test."""
    pairs = max(rows * (rows - 1) // 2, 1)
    least, needed = 2 / 2 ** max(datasets, 1), datasets_needed(pairs)
    text = f"Wilcoxon's two-sided test across {plural(datasets, 'dataset')} reaches "
    text += f"p = {least:.2g} at best"
    if datasets < datasets_needed(1):
        text += "; fewer than six datasets can never reach p < .05"
    if pairs > 1:
        text += f"; after Holm's correction for {pairs} pairs of rows, p < .05 takes at least "
        text += plural(needed, "dataset")
    return text
