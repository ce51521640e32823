"""A metric over the schedule: how much of a run it takes to tell rows apart."""

from benchmarks.report.aggregate import Cell, Row, Table, mean_cell
from benchmarks.report.cells import Grid, init_rows
from benchmarks.report.plots import read_curves
from benchmarks.report.records import FinishedRun
from detection.evaluation.metrics import titles

SHARES = (0.1, 0.25, 0.5, 1.0)  # of the schedule


def convergence(table: Table) -> dict[str, list[Cell | None]]:
    """Init → its first metric at each of `SHARES` of the schedule, where it was evaluated there.

    What a run has at the end is in its record, the rest in its `metrics.json`.

    Raises:
        UserError: a line of `metrics.json` that is not JSON.
    """
    return {row.init: _of_row(row, table.metrics[0]) for row in table.rows}


def convergence_grid(table: Table) -> list[Grid]:
    """One, or none where nothing but the end is known."""
    found = convergence(table)
    if not any(cell for cells in found.values() for cell in cells[:-1]):
        return []
    head = [f"{titles(table.metrics)[0]} at", *(f"{share:.0%} of the schedule" for share in SHARES)]
    return [Grid("Convergence", head, init_rows(table, found))]


def _of_row(row: Row, metric: str) -> list[Cell | None]:
    curves = {
        run.folder: dict(zip(x.tolist(), y.tolist(), strict=True))
        for run in row.runs
        for x, y in read_curves([run], [metric])
    }

    def at(run: FinishedRun, share: float) -> float | None:
        if share == 1:
            return run.record.metrics.get(metric)
        done = round(share * run.record.iterations)  # logged as `done - 1`
        return curves.get(run.folder, {}).get(done - 1)

    return [mean_cell([at(run, share) for run in unit] for unit in row.units) for share in SHARES]
