"""How far the ranking of frozen backbones agrees with that of fine-tuned ones on the same data.

A task whose whole backbone is frozen is cheap, and its ranking of initializations is used in place
of that of a fine-tuned task. Where a report has both on the same data, with the same engine and
metric, this part has their rank correlations over the initializations (Kendall's tau-b and
Spearman's rho) with intervals of the percentile bootstrap, and the pair of initializations by whose
order one would have lost most.

Each architecture has tasks of its own: a point is an init of an architecture, with the mean of the
frozen and of the fine-tuned task of this architecture. Two tasks are of the same architecture if
both have a row of the same weights. If there are several, the one with the longest schedule counts.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report.along import ap_of
from benchmarks.report.style import MINUS, MISSING
from benchmarks.report.table import Cell, Grid, Row, Table, TextCell, format_cell, voc_metric
from detection.evaluation.metrics import titles
from detection.modeling.backbones import is_frozen
from moco.common.errors import plural

FEWEST, RESAMPLES, SEED = 4, 2000, 0
KENDALL, SPEARMAN = "Kendall's τ-b", "Spearman's ρ"
FREEZE_AT = "MODEL.BACKBONE.FREEZE_AT"
Values = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Point:
    """Init with its cells in a frozen and in a fine-tuned task of its architecture."""

    init: str
    frozen_task: str
    frozen: Cell
    tuned_task: str
    tuned: Cell


@dataclass(frozen=True)
class Trust:
    """Frozen and fine-tuned table of each architecture, on the same data."""

    pairs: Sequence[tuple[Table, Table]]

    @property
    def table(self) -> Table:
        """Table with the engine, the test dataset and the metric of all."""
        return self.pairs[0][0]

    @property
    def metric(self) -> str:
        """Canonical name of the metric."""
        return ap_of(self.table)

    @cached_property
    def points(self) -> list[Point]:
        """Inits that both tasks of an architecture have numbers of."""
        found = []
        for frozen, tuned in self.pairs:
            rows = {(row.init, _weights(row)): row for row in tuned.rows}
            for row in frozen.rows:
                other = rows.get((row.init, _weights(row)))
                mine, theirs = row.cells[self.metric], other and other.cells[self.metric]
                if mine and theirs:
                    found.append(Point(row.init, frozen.title, mine, tuned.title, theirs))
        return found

    @cached_property
    def correlations(self) -> dict[str, tuple[float, float, float]]:
        """Name → rank correlation and the ends of its 95% interval; empty for few points."""
        if len(self.points) < FEWEST:
            return {}
        x = np.array([point.frozen.mean for point in self.points])
        y = np.array([point.tuned.mean for point in self.points])
        found = {name: with_interval(own, x, y) for name, own in _CORRELATIONS.items()}
        return {name: own for name, own in found.items() if np.isfinite(own).all()}

    @property
    def heading(self) -> str:
        """Title of the section."""
        return f"Frozen and fine-tuned backbones: {', '.join(self.table.tested_on)}"

    @property
    def grids(self) -> list[Grid]:
        """Grids of the inits, and of the correlations if there are enough."""
        what = titles([self.metric])[0]
        rows = [
            [
                TextCell(p.init),
                TextCell(p.frozen_task),
                TextCell(format_cell(p.frozen, p.frozen.n), p.frozen.mean),
                TextCell(p.tuned_task),
                TextCell(format_cell(p.tuned, p.tuned.n), p.tuned.mean),
            ]
            for p in self.points
        ]
        head = ["pre-train", "frozen task", f"{what} frozen", "fine-tuned task"]
        grids = [Grid(f"{what} of each init", [*head, f"{what} fine-tuned"], rows)]
        if len(self.points) >= FEWEST:
            title = f"Does {what} of the frozen backbones order the inits as fine-tuning does"
            head = ["measure", "inits", "correlation", "95% interval"]
            grids.append(Grid(title, head, [self._line(name) for name in _CORRELATIONS]))
        return grids

    def _line(self, name: str) -> list[TextCell]:
        number = TextCell(str(len(self.points)), len(self.points))
        if (found := self.correlations.get(name)) is None:
            return [TextCell(name), number, TextCell(MISSING), TextCell(MISSING)]
        value, low, high = (f"{x:.2f}".replace("-", MINUS) for x in found)
        return [TextCell(name), number, TextCell(value, found[0]), TextCell(f"[{low}, {high}]")]

    @property
    def notes(self) -> list[str]:
        """The largest inversion, and what the numbers mean."""
        if len(self.points) < FEWEST:
            few = plural(len(self.points), "init")
            return [f"a rank correlation of {few} says nothing, so none is shown"]
        about = (
            f"interval: middle 95% of {RESAMPLES} bootstrap samples of the inits; it is about "
            "other inits of this kind on the same data, not about other data or seeds"
        )
        if (found := inversion(self.points)) is None:
            return ["no two inits are ordered the other way by the frozen ranking", about]
        (above, below), what = found, titles([self.metric])[0]
        return [
            f"largest inversion: frozen, {self._name(above)} is above {self._name(below)} "
            f"({what} {above.frozen.mean:.1f} and {below.frozen.mean:.1f}), fine-tuned it is "
            f"{below.tuned.mean - above.tuned.mean:.1f} below ({above.tuned.mean:.1f} and "
            f"{below.tuned.mean:.1f})",
            about,
        ]

    def _name(self, point: Point) -> str:
        return f"{point.init} of {point.frozen_task}" if len(self.pairs) > 1 else point.init


def frozen_against_tuned(tables: Sequence[Table]) -> list[Trust]:
    """Return a part for each dataset with two or more inits in frozen and fine-tuned tasks."""
    groups: dict[str, list[Table]] = {}
    for table in tables:
        if table.runs[0].record.kind == "detection":
            groups.setdefault(_identity(table), []).append(table)
    parts = [Trust(pairs) for group in groups.values() if (pairs := _pairs(group))]
    return [part for part in parts if len(part.points) > 1]


def inversion(points: Sequence[Point]) -> tuple[Point, Point] | None:
    """Return the two inits of opposite orders with the largest gap after fine-tuning, or None.

    The first one is above when frozen, and below when fine-tuned.
    """
    inverted = [
        (a, b)
        for a, b in permutations(points, 2)
        if a.frozen.mean > b.frozen.mean and a.tuned.mean < b.tuned.mean
    ]
    return max(inverted, key=lambda pair: pair[1].tuned.mean - pair[0].tuned.mean, default=None)


def kendall(x: Values, y: Values) -> float:
    """Return Kendall's tau-b of two vectors; NaN if one does not vary."""
    return _cosine(*(np.sign(np.subtract.outer(v, v)) for v in (x, y)))


def spearman(x: Values, y: Values) -> float:
    """Return Spearman's rho of two vectors; NaN if one does not vary."""
    from scipy.stats import rankdata  # takes a second to import

    return _cosine(*(ranks - ranks.mean() for ranks in map(rankdata, (x, y))))


def _cosine(a: Values, b: Values) -> float:
    with np.errstate(invalid="ignore"):
        return float((a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()))


_CORRELATIONS: Mapping[str, Callable[[Values, Values], float]] = {
    KENDALL: kendall,
    SPEARMAN: spearman,
}


def with_interval(
    correlation: Callable[[Values, Values], float], x: Values, y: Values
) -> tuple[float, float, float]:
    """Return a correlation and the ends of its 95% percentile-bootstrap interval over pairs.

    Samples in which a side does not vary have no correlation, and are left out.
    """
    x, y = np.round(x, 9), np.round(y, 9)  # means that differ by rounding are equal
    if min(np.ptp(x), np.ptp(y)) == 0:
        return (np.nan,) * 3
    samples = np.random.default_rng(SEED).integers(len(x), size=(RESAMPLES, len(x)))
    low, high = np.nanpercentile([correlation(x[i], y[i]) for i in samples], [2.5, 97.5])
    return correlation(x, y), float(low), float(high)


def _identity(table: Table) -> str:
    """Return what a frozen and a fine-tuned table have to share."""
    data = table.runs[0].record.provenance.get("data")
    return json.dumps([table.tested_on, table.engine, ap_of(table), voc_metric(table), data])


def _weights(row: Row) -> frozenset[str | None]:
    return frozenset(run.record.weights_sha256 for run in row.runs)


def _known_weights(table: Table) -> set[str]:
    return {w for row in table.rows for w in _weights(row) if w is not None}


def _is_frozen(table: Table) -> bool:
    with suppress(AttributeError, LookupError, TypeError):  # an edited record may hold anything
        return is_frozen(table.runs[0].record.config)
    return False


def _pairs(tables: Sequence[Table]) -> list[tuple[Table, Table]]:
    """Return the frozen and the fine-tuned table of each architecture."""
    depths = [table.runs[0].record.config.get(FREEZE_AT) for table in tables]
    if all(depth == depths[0] for depth in depths):  # imports nothing
        return []
    frozen = [table for table in tables if _is_frozen(table)]
    others = [table for table in tables if table not in frozen]
    pairs, seen = [], set[str]()
    for table in sorted(frozen, key=lambda t: -t.iterations):
        own = _known_weights(table)
        tuned = [other for other in others if _known_weights(other) & own]
        if tuned and not own & seen:
            pairs.append((table, max(tuned, key=lambda t: t.iterations)))
            seen |= own
    return pairs
