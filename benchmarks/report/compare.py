"""Two sets of tables → what changed between them, per task, init and metric. Pure.

The two are results of two times, two machines or two versions; a difference of means has Welch's
95% interval. Where they are not of one protocol or of the same weights, that is said beside the
difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report.aggregate import Cell, Gap, Row, Table, gap, listed_differences
from benchmarks.report.content import Shown, evidence, setting
from benchmarks.report.style import MISSING, format_cell
from detection.evaluation.metrics import titles


@dataclass(frozen=True)
class Change:
    """One row that both sides have.

    Attributes:
        pairs: metric → the two cells; None where a side has no number.
        gaps: metric → second minus first.
        doubts: what else differs between the two: protocol, length, weights.
        sizes: trials of the two.
        same: whether both have the same seeds with the same numbers.
    """

    init: str
    pairs: dict[str, tuple[Cell | None, Cell | None]]
    gaps: dict[str, Gap | None]
    doubts: tuple[str, ...]
    sizes: tuple[int, int]
    same: bool

    @property
    def rows(self) -> list[list[Shown]]:
        found = []
        for metric, title in zip(self.pairs, titles(list(self.pairs)), strict=True):
            sides = [_side(*side) for side in zip(self.pairs[metric], self.sizes, strict=True)]
            said = Shown("same numbers") if self.same else evidence(self.gaps[metric])
            found.append([*map(Shown, (self.init, title, *sides)), said])
        return found


@dataclass(frozen=True)
class Difference:
    """Of one task on one engine; an init that one side lacks is only named."""

    task: str
    setting: str
    changes: tuple[Change, ...]
    vanished: tuple[str, ...]
    appeared: tuple[str, ...]

    @property
    def rows(self) -> list[list[Shown]]:
        """Per init and metric: both names, both means and their difference."""
        return [row for change in self.changes for row in change.rows]

    @property
    def notes(self) -> list[str]:
        """What is not comparable or only on one side."""
        return [
            *(f"not comparable, {c.init}: {doubt}" for c in self.changes for doubt in c.doubts),
            *(f"only in A: {init}" for init in self.vanished),
            *(f"only in B: {init}" for init in self.appeared),
        ]


@dataclass(frozen=True)
class Comparison:
    """Tasks that both sides have, and the names of those that one lacks."""

    both: tuple[Difference, ...]
    vanished: tuple[str, ...]
    appeared: tuple[str, ...]


def compare(first: Sequence[Table], second: Sequence[Table]) -> Comparison:
    """What changed from `first` to `second`; tables of one task, dataset and engine meet."""
    a, b = ({(t.task, t.tested_on, t.engine): t for t in tables} for tables in (first, second))
    return Comparison(
        both=tuple(_difference(a[key], b[key]) for key in a if key in b),
        vanished=tuple(_named(table) for key, table in a.items() if key not in b),
        appeared=tuple(_named(table) for key, table in b.items() if key not in a),
    )


def _named(table: Table) -> str:
    return f"{table.task}: {setting(table)}"


def _difference(a: Table, b: Table) -> Difference:
    rows_a, rows_b = ({row.init: row for row in table.rows} for table in (a, b))
    metrics = tuple(dict.fromkeys((*a.metrics, *b.metrics)))
    return Difference(
        task=a.task,
        setting=" → ".join(dict.fromkeys((setting(a), setting(b)))),
        changes=tuple(_change(rows_a[i], rows_b[i], metrics) for i in rows_a if i in rows_b),
        vanished=tuple(init for init in rows_a if init not in rows_b),
        appeared=tuple(init for init in rows_b if init not in rows_a),
    )


def _change(a: Row, b: Row, metrics: Sequence[str]) -> Change:
    pairs = {metric: (a.cells.get(metric), b.cells.get(metric)) for metric in metrics}
    numbers = [{run.record.seed: run.record.metrics for run in row.runs} for row in (a, b)]
    return Change(
        init=a.init,
        pairs=pairs,
        gaps={metric: gap(later, earlier) for metric, (earlier, later) in pairs.items()},
        doubts=tuple(_doubts(a, b)),
        sizes=(a.n, b.n),
        same=numbers[0] == numbers[1],
    )


def _doubts(a: Row, b: Row) -> list[str]:
    first, second = a.runs[0].record, b.runs[0].record
    found = []
    if first.config_sha256 != second.config_sha256:
        found.append(f"protocols differ in {listed_differences([a.runs, b.runs])}")
    if first.iterations != second.iterations:
        found.append(f"iterations: {first.iterations} / {second.iterations}")
    if first.weights_sha256 != second.weights_sha256:
        named = [(record.weights_sha256 or "none")[:8] for record in (first, second)]
        found.append(f"weights: {' / '.join(named)}")
    return found


def _side(cell: Cell | None, n: int) -> str:
    if cell is None:
        return MISSING
    return f"{format_cell(cell, cell.n)} (n = {cell.n}{'' if cell.n == n else f' of {n}'})"
