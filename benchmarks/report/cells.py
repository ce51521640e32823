"""Cells of a report, and the small tables below a table. Texts here are plain: renderers escape."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report.aggregate import Cell, Gap, Table
from benchmarks.report.style import MISSING, format_cell, format_evidence, format_gap, is_strong


@dataclass(frozen=True)
class Shown:
    """A cell of a table.

    Attributes:
        value: what a column is sorted by; None: the text.
        points: the gap beside the text, as printed.
        significant: whether its p-value is below 0.05 after Holm's correction.
        best: whether no other row has a higher number, as printed.
    """

    text: str
    value: float | None = None
    points: float | None = None
    significant: bool = False
    best: bool = False

    @property
    def gap(self) -> str:
        return "" if self.points is None else format_gap(self.points)

    @property
    def strong(self) -> bool:
        return self.points is not None and is_strong(self.points)


@dataclass(frozen=True)
class Grid:
    """A table below a table; `folded`: a page shows only its title at first."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Shown]]
    folded: bool = False


def printed(value: float | None, gap: float | None = None) -> Shown:
    """The cell of one number."""
    return Shown(MISSING if value is None else f"{value:.1f}", value, gap)


def evidence(gap: Gap | None) -> Shown:
    """The cell of a gap with its interval and p-value."""
    return Shown(format_evidence(gap), None if gap is None else gap.value)


def init_rows(table: Table, cells: Mapping[str, Iterable[Cell | None]]) -> list[list[Shown]]:
    """Per row of a table its name and its `cells`."""
    return [
        [
            Shown(row.init),
            *(Shown(format_cell(c, row.n), c.mean if c else None) for c in cells[row.init]),
        ]
        for row in table.rows
    ]
