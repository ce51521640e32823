"""Formatted cells of a report, and grids of them. Texts are plain: renderers escape them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report.aggregate import Cell, Gap, Table
from benchmarks.report.style import (
    MINUS,
    MISSING,
    UNTESTED,
    format_cell,
    format_evidence,
    format_gap,
    is_strong,
)
from detection.evaluation.metrics import titles


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


def evidence(gap: Gap | None) -> TextCell:
    """Format a gap with its interval and p-value as a cell."""
    return TextCell(format_evidence(gap), None if gap is None else gap.value)


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
