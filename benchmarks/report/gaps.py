"""Grids of a table's gaps: intervals, corrected p-values, power, bootstrap over test images."""

from collections.abc import Sequence

from benchmarks.report.aggregate import Gap, Resamples, Table
from benchmarks.report.captions import seeds
from benchmarks.report.cells import Grid, TextCell, evidence, gap_name
from benchmarks.report.looks import looks_grid
from benchmarks.report.significance import POWER, Significance
from benchmarks.report.style import (
    MAX_RUNS,
    MISSING,
    UNTESTED,
    format_interval,
    format_p,
    format_plus_minus,
    format_runs,
)
from detection.evaluation.metrics import titles
from moco.common.errors import plural


def gap_grids(table: Table, found: Sequence[Significance]) -> list[Grid]:
    """Return the grids of a table's gaps that have at least one row.

    Args:
        table: Table that the gaps belong to.
        found: Tests of all gaps that have an interval.
    """
    grids = [looks_grid(table)] if table.looks else [_welch(table), _corrected(table, found)]
    grids += [_resampled(table, table.resamples)] if table.resamples else []
    return [grid for grid in grids if grid.rows]


def _welch(table: Table) -> Grid:
    """Return the grid of gaps, with Welch's intervals: a line per row other than the baseline."""
    tested = any(gap and not gap.untested for row in table.rows for gap in row.gaps.values())
    how = f"95% interval over {seeds(table)}, Welch's test" if tested else UNTESTED
    rows = [
        [gap_name(table, row.init), *map(evidence, row.gaps.values())]
        for row in table.rows
        if any(row.gaps.values())
    ]
    return Grid(f"Gap to {table.baseline}, {how}", ["", *titles(table.metrics)], rows)


def _corrected(table: Table, found: Sequence[Significance]) -> Grid:
    """Return the grid of the tests of benchmarks/report/significance.py."""
    columns = {
        "": [gap_name(table, each.row.init, each.metric) for each in found],
        f"Holm ({plural(len(found), 'gap')})": [
            TextCell(format_p(each.holm), each.holm) for each in found
        ],
        "paired by seed": [
            _interval(each.paired, f"not possible: {each.unpaired}") for each in found
        ],
    }
    if any(each.smallest is not None for each in found):
        columns[f"smallest gap found {POWER:.0%} of the time"] = [
            TextCell(MISSING if each.smallest is None else f"{each.smallest:.2f}", each.smallest)
            for each in found
        ]
    if any(each.runs is not None for each in found):
        columns["runs needed for this gap"] = [_runs(each) for each in found]
    if table.margin is not None:
        columns[f"within ±{table.margin:g}"] = [
            TextCell(format_p(*each.same), each.same[0]) for each in found if each.same
        ]
    title = "The same gaps: corrected for their number, and paired"
    return Grid(title, [*columns], [*zip(*columns.values(), strict=True)], folded=True)


def _runs(each: Significance) -> TextCell:
    if each.runs is None:
        return TextCell(MISSING)
    return TextCell(format_runs(each.runs, each.n), min(each.runs, MAX_RUNS + 1))


def _resampled(table: Table, resamples: Resamples) -> Grid:
    """Return the grid of both bootstraps, the one over runs and images first."""
    gaps = {row.init: row.gaps for row in table.rows}
    rows = [
        [
            gap_name(table, init, metric),
            _plus_minus(gaps[init][metric], each.both),
            _interval(each.images, "", each.bound),
        ]
        for (init, metric), each in resamples.gaps.items()
    ]
    runs = "pre-trainings" if any(row.several for row in table.rows) else "seeds"
    many = f"{resamples.number} bootstrap resamples, the same of every row"
    head = ["", f"over {runs} and images: the recommended ±"]
    head += ["over test images (these very models, not other seeds)"]
    return Grid(f"The same gaps with other test images: {many}", head, rows)


def _plus_minus(gap: Gap | None, numbers: tuple[float, float, float, float] | None) -> TextCell:
    """Format a gap with half of its symmetric interval, its p-value and corrected p-value."""
    if gap is None or numbers is None:
        return TextCell("not known: n = 1")
    p, corrected = numbers[2:]
    return TextCell(f"{format_plus_minus(gap, numbers)}, {format_p(p, corrected)}", p)


def _interval(
    numbers: tuple[float, float, float, float] | None, otherwise: str, bound: bool = False
) -> TextCell:
    """Format an interval with its p-value and corrected p-value, or `otherwise` if it is None."""
    if numbers is None:
        return TextCell(otherwise)
    low, high, p, corrected = numbers
    return TextCell(f"{format_interval(low, high)}, {format_p(p, corrected, bound)}", p)
