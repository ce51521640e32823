"""Transfer along pre-training: AP against epochs, and cheaper measures of the same checkpoints.

The rows `mine-epoch0100`, `mine-epoch0200`, ... of a table are checkpoints of the pre-training
`mine`. Cheap measures are the kNN accuracy that the pre-training logged, and the kNN and linear
accuracies in other tables of the report, found by the hash of the weights.

Spearman's rank correlation of the means tells whether a cheap measure orders the checkpoints as AP
does. The two-sided p-value is from a permutation test, exact if all orders can be listed, otherwise
over random orders. Fewer than five checkpoints can never reach p < .05.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.report.plots import new_figure, parse_curve, pretty
from benchmarks.report.records import knn_name
from benchmarks.report.style import GRAY, MISSING, colors, figure_label, format_p
from benchmarks.report.table import Grid, Row, Table, TextCell, format_cell, printed
from detection.evaluation.metrics import titles
from moco.common.command import EPOCH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KNN_METRIC = "knn/top1"  # of moco/pretraining/run.py and moco/knn.py
LOGGED = "kNN during pre-training"
CHEAP = ("knn", "linear")  # kinds of runs, from the cheapest
FEWEST, RESAMPLES, SEED = 5, 50_000, 0
# The name is part of a path, which a record must not choose.
_CHECKPOINT = re.compile(rf"([^/\\]+){EPOCH}(\d+)")


@dataclass(frozen=True)
class Series:
    """Checkpoints of one pre-training in one table.

    Attributes:
        name: Name of the pre-training.
        rows: Epoch → row that has the metric, in ascending order.
        cheap: Cheap measure → epoch → mean accuracy, 0 to 100.
    """

    name: str
    rows: Mapping[int, Row]
    cheap: Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class TransferCurves:
    """AP, or else the first metric, of a table's rows against the epochs of their pre-trainings.

    Attributes:
        table: Table of the rows.
        stem: Unique name of the table.
        title: Heading of the table.
        series: Pre-trainings with at least two checkpoints.
    """

    table: Table
    stem: str
    title: str
    series: Sequence[Series]

    @property
    def heading(self) -> str:
        """Title of the section."""
        return f"Along pre-training: {self.title}"

    @property
    def figure(self) -> str:
        """Name of the figure in `Report.plots`."""
        return f"along-{self.stem}"

    @property
    def metric(self) -> str:
        """Canonical name of the metric."""
        return ap_of(self.table)

    @property
    def what(self) -> str:
        """Title of the metric."""
        metrics = self.table.metrics
        return titles(metrics)[metrics.index(self.metric)]

    @property
    def measures(self) -> list[str]:
        """Names of the measures that need no fine-tuning."""
        return list(dict.fromkeys(name for each in self.series for name in each.cheap))

    def mean(self, series: Series, epoch: int) -> float:
        """Return the mean of the metric of a checkpoint."""
        cell = series.rows[epoch].cells[self.metric]
        assert cell is not None
        return cell.mean

    @property
    def grids(self) -> list[Grid]:
        """Grids of the checkpoints, and of the rank correlations if there are any."""
        points = [
            [
                TextCell(series.name),
                TextCell(str(epoch), epoch),
                TextCell(format_cell(row.cells[self.metric], row.n), self.mean(series, epoch)),
                *(printed(series.cheap.get(name, {}).get(epoch)) for name in self.measures),
            ]
            for series in self.series
            for epoch, row in series.rows.items()
        ]
        head = ["pre-training", "epoch", self.what, *self.measures]
        found = [Grid(f"{self.what} of each checkpoint", head, points)]
        correlations = [
            [TextCell(series.name), TextCell(name), *self._correlation(series, name)]
            for series in self.series
            for name in series.cheap
        ]
        if correlations:
            head = ["pre-training", "measure", "checkpoints", "Spearman's correlation", "p-value"]
            title = f"Does a cheap measure order the checkpoints as {self.what} does"
            found.append(Grid(title, head, correlations))
        return found

    @property
    def notes(self) -> list[str]:
        """Notes on the numbers."""
        found = ["epochs are those that each checkpoint records; ± is over the trials of a row"]
        if self.measures:
            found.append(
                "Spearman's rank correlation is over means, its p-value by permutations; fewer "
                f"than {FEWEST} checkpoints have none, as it could not be below .05; two measures "
                "that both grow with training agree in order whatever they measure, so this is no "
                "evidence that one can replace the other"
            )
        return found

    def _correlation(self, series: Series, name: str) -> list[TextCell]:
        shared = [epoch for epoch in series.rows if epoch in series.cheap[name]]
        means = [self.mean(series, epoch) for epoch in shared]
        rho, p = rank_correlation(means, [series.cheap[name][epoch] for epoch in shared])
        return [
            TextCell(str(len(shared)), len(shared)),
            TextCell(MISSING if rho is None else f"{rho:.2f}", rho),
            TextCell(MISSING if p is None else format_p(p), p),
        ]


def transfer_figure(along: TransferCurves) -> "Figure":
    """Plot the metric and the cheap measures of each pre-training against epochs."""
    measures = along.measures
    figure, axes = new_figure(2 if measures else 1, width=5.2, height=3.4, title=along.title)
    palette = colors([each.name for each in along.series])
    for series in along.series:
        color, label = palette[series.name], figure_label(series.name)
        means = [along.mean(series, epoch) for epoch in series.rows]
        cells = [row.cells[along.metric] for row in series.rows.values()]
        spread = [(cell and cell.std) or 0.0 for cell in cells]
        style: dict[str, Any] = {"color": color, "label": label, "marker": "o", "capsize": 3}
        axes[0].errorbar(list(series.rows), means, spread, **style)
        for measure, values in series.cheap.items():
            number = measures.index(measure)
            look: dict[str, Any] = {"marker": "osD^v"[number % 5]}
            look["linestyle"] = ("-", "--", ":", "-.")[number % 4]
            label = figure_label(f"{series.name}, {measure}")
            x, y = list(values), list(values.values())
            axes[1].plot(x, y, color=color, label=label, markersize=4, **look)
    base = along.table.base
    if base and not epoch_of(base.init) and (cell := base.cells[along.metric]):
        line: dict[str, Any] = {"color": GRAY, "linestyle": "--", "linewidth": 1}
        axes[0].axhline(cell.mean, label=figure_label(base.init), **line)
    for axis, what in zip(axes, (pretty(along.what), "top-1 accuracy"), strict=False):
        axis.set(xlabel="epochs of pre-training", ylabel=what)
        axis.legend(frameon=False, fontsize=8)
    return figure


def epoch_of(init: str) -> tuple[str, int] | None:
    """Split `mine-epoch0100` into `mine` and 100; return None for an init of another form."""
    found = _CHECKPOINT.fullmatch(init)
    return (found[1], int(found[2])) if found else None


def transfer_curves(
    table: Table, stem: str, title: str, tables: Sequence[Table]
) -> TransferCurves | None:
    """Return the section of a table, or None without two checkpoints of one pre-training.

    Args:
        table: Table of any task; tables of kNN have no section.
        stem: Unique name of the table.
        title: Heading of the table.
        tables: All tables of the report.
    """
    kind = table.runs[0].record.kind
    rows: dict[str, dict[int, Row]] = {}
    for row in table.rows:
        if (at := epoch_of(row.init)) and row.cells[ap_of(table)] is not None:
            rows.setdefault(at[0], {})[at[1]] = row
    cheaper = CHEAP[: CHEAP.index(kind)] if kind in CHEAP else CHEAP
    others = [other for other in tables if other.runs[0].record.kind in cheaper]
    found = [
        Series(name, ordered, _logged(name, ordered) | _recorded(ordered, others))
        for name, of in rows.items()
        if len(of) > 1 and (ordered := dict(sorted(of.items())))
    ]
    return TransferCurves(table, stem, title, found) if found and kind != CHEAP[0] else None


def ap_of(table: Table) -> str:
    """Return the name of AP if the table has it, else of the first metric."""
    return next((name for name in table.metrics if name.endswith("/AP")), table.metrics[0])


def _recorded(rows: Mapping[int, Row], tables: Sequence[Table]) -> dict[str, dict[int, float]]:
    """Return table → epoch → mean of the table's metric, for the weights of the rows."""
    found: dict[str, dict[int, float]] = {}
    for table in tables:
        cells = {
            run.record.weights_sha256: row.cells[ap_of(table)]
            for row in table.rows
            for run in row.runs
        }
        for epoch, row in rows.items():
            if cell := cells.get(row.runs[0].record.weights_sha256):
                found.setdefault(table.title, {})[epoch] = cell.mean
    return found


def _logged(name: str, rows: Mapping[int, Row]) -> dict[str, dict[int, float]]:
    """Return the kNN accuracies that the pre-training logged, by epoch."""
    for run in (run for row in rows.values() for run in row.runs):
        if (content := run.read_knn(name)) is not None:
            text, where = content.decode(errors="replace"), f"{run.folder}: {knn_name(name)}"
            epochs, values = parse_curve(text, where, (KNN_METRIC,), x="epoch")
            pairs = zip(epochs.tolist(), values.tolist(), strict=True)
            return {LOGGED: {round(epoch): value for epoch, value in pairs}}
    return {}


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> tuple[float | None, float | None]:
    """Return Spearman's rank correlation and its two-sided p-value.

    The correlation is None for fewer than three pairs, or if a side does not vary; the p-value is
    also None for fewer than `FEWEST` pairs.
    """
    if len(x) < 3 or min(len(set(x)), len(set(y))) < 2:
        return None, None
    from scipy import stats  # takes a second to import

    rx, ry = stats.rankdata(np.round(x, 9)), stats.rankdata(np.round(y, 9))
    rho = float(np.corrcoef(rx, ry)[0, 1])
    if len(x) < FEWEST:
        return rho, None
    test = stats.permutation_test(
        (rx,),
        lambda ranks, axis: np.sum(ranks * ry, axis=axis),
        permutation_type="pairings",
        vectorized=True,
        n_resamples=min(RESAMPLES, math.factorial(len(x))),
        random_state=np.random.default_rng(SEED),
    )
    return rho, float(test.pvalue)
