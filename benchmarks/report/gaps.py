"""Grids of a table's gaps: intervals, corrected p-values, power, bootstrap over test images."""

from collections.abc import Sequence

from benchmarks.report.aggregate import Resamples, Table
from benchmarks.report.captions import seeds
from benchmarks.report.cells import Grid, TextCell, evidence
from benchmarks.report.looks import looks_grid
from benchmarks.report.significance import Significance
from benchmarks.report.style import (
    MAX_RUNS,
    MINUS,
    MISSING,
    format_interval,
    format_p,
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
    """Return the grid of Welch's intervals: a line per row other than the baseline."""
    title = f"Gap to {table.baseline}, 95% interval over {seeds(table)}, Welch's test"
    rows = [
        [TextCell(f"{row.init} {MINUS} {table.baseline}"), *map(evidence, row.gaps.values())]
        for row in table.rows
        if any(row.gaps.values())
    ]
    return Grid(title, ["", *titles(table.metrics)], rows)


def _corrected(table: Table, found: Sequence[Significance]) -> Grid:
    """Return the grid of the tests of benchmarks/report/significance.py."""
    head = ["", f"Holm ({plural(len(found), 'gap')})", "paired by seed"]
    head += ["detectable gap", "runs for this gap"]
    head += [f"within ±{table.margin:g}"] if table.margin is not None else []
    rows = []
    for each in found:
        row = [
            _name(table, each.row.init, each.metric),
            TextCell(format_p(each.holm), each.holm),
            _interval(each.paired, f"not possible: {each.unpaired}"),
            TextCell(MISSING if each.smallest is None else f"{each.smallest:.2f}", each.smallest),
            _runs(each),
        ]
        rows.append([*row, TextCell(format_p(*each.same), each.same[0])] if each.same else row)
    title = "The same gaps: corrected for their number, paired, and what this many runs can find"
    return Grid(title, head, rows, folded=True)


def _runs(each: Significance) -> TextCell:
    if each.runs is None:
        return TextCell(MISSING)
    return TextCell(format_runs(each.runs, each.n), min(each.runs, MAX_RUNS + 1))


def _resampled(table: Table, resamples: Resamples) -> Grid:
    rows = [
        [
            _name(table, init, metric),
            _interval(each.images, "", each.bound),
            _interval(each.both, "not over looks" if table.looks else "one run per row"),
        ]
        for (init, metric), each in resamples.gaps.items()
    ]
    many = f"{resamples.number} bootstrap resamples, the same of every row"
    title = f"The same gaps over test images: {many}"
    head = ["", "test images, for these models", "runs and test images"]
    return Grid(title, head, rows)


def _name(table: Table, init: str, metric: str) -> TextCell:
    title = titles(table.metrics)[table.metrics.index(metric)]
    return TextCell(f"{init} {MINUS} {table.baseline}, {title}")


def _interval(
    numbers: tuple[float, float, float, float] | None, otherwise: str, bound: bool = False
) -> TextCell:
    """Format an interval with its p-value and corrected p-value, or `otherwise` if it is None."""
    if numbers is None:
        return TextCell(otherwise)
    low, high, p, corrected = numbers
    return TextCell(f"{format_interval(low, high)}, {format_p(p, corrected, bound)}", p)
