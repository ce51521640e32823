"""Analysis of why a row is better: convergence, error types and corrupted images.

All of it is read from files next to the runs. `metrics.json` has the evaluations during a run, and
`moco-transfer errors` and `moco-transfer robustness` write the others. Runs without these files, or
with those of an earlier run in the same folder, have no numbers.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from benchmarks.report.aggregate import Cell, Table, mean_cell
from benchmarks.report.cells import Grid, init_rows
from benchmarks.report.plots import read_curves
from benchmarks.report.records import FinishedRun
from detection.data.corruptions import GROUPS, NAMES
from detection.evaluation.metrics import ERRORS_NAME, ROBUSTNESS_NAME, titles
from moco.common.errors import DataError, first_few

SHARES = (0.1, 0.25, 0.5, 1.0)  # fractions of the schedule
# TIDE's error types, by their names in hotcoco and tidecv.
ERROR_TYPES = {
    "Cls": "class",
    "Loc": "localization",
    "Both": "both",
    "Dupe": "duplicate",
    "Bkg": "background",
    "Miss": "missed",
}
MEASURES = ("P", "mPC", "rPC", *GROUPS)

Numbers = dict[str, float]
_Key = TypeVar("_Key")


def convergence(run: FinishedRun, metric: str) -> dict[float, float]:
    """Return a metric at those of `SHARES` of the schedule at which a run was evaluated.

    The final value is from the record, the others are from `metrics.json`.

    Raises:
        UserError: If a line of `metrics.json` is not JSON.
    """
    found = {1.0: run.record.metrics.get(metric)}
    for x, y in read_curves([run], [metric]):
        curve = dict(zip(x.tolist(), y.tolist(), strict=True))
        # The evaluation after n iterations is logged as iteration n - 1.
        found = {s: curve.get(round(s * run.record.iterations) - 1) for s in SHARES[:-1]} | found
    return {share: value for share, value in found.items() if value is not None}


def error_types(run: FinishedRun) -> Numbers:
    """Return the points of AP50 that a run would gain without the errors of each type.

    Raises:
        DataError: If the file is damaged.
    """
    return _read(run, ERRORS_NAME, lambda content: _finite(content["delta"])) or {}


def robustness(run: FinishedRun, metric: str) -> Numbers:
    """Return P, mPC, rPC (%) and the mean of each group of corruptions for one metric.

    mPC requires numbers for all 15 corruptions, the mean of a group those of its own.

    Raises:
        DataError: If the file is damaged.
    """

    def part(content: Any) -> tuple[Numbers, dict[str, Numbers]]:
        corrupted = {n: _finite(content["corrupted"].get(n, {})) for n in NAMES}
        return _finite(content["clean"]), corrupted

    content: tuple[Numbers, dict[str, Numbers]] = _read(run, ROBUSTNESS_NAME, part) or ({}, {})
    clean, corrupted = content[0].get(metric), content[1]
    values = {name: of[metric] for name, of in corrupted.items() if metric in of}
    found = {} if clean is None else {"P": clean}
    for name, members in {"mPC": NAMES, **GROUPS}.items():
        if values.keys() >= set(members):
            found[name] = statistics.fmean(values[member] for member in members)
    return {**found, "rPC": 100 * found["mPC"] / clean} if clean and "mPC" in found else found


def analysis_grids(table: Table) -> list[Grid]:
    """Return the grids of convergence, error types and corrupted images that have numbers."""
    metric, grids = table.metrics[0], list[Grid]()
    title = titles(table.metrics)[0]
    cells = row_cells(table, lambda run: convergence(run, metric), SHARES)
    if any(cell for row in cells.values() for cell in row[:-1]):
        head = [f"{title} at", *(f"{share:.0%} of the schedule" for share in SHARES)]
        grids.append(Grid("Convergence", head, init_rows(table, cells)))
    cells = row_cells(table, error_types, ERROR_TYPES)
    if any(cell for row in cells.values() for cell in row):
        text = "Points of AP50 (COCO's) that a row gains without its errors of one type (TIDE)"
        grids.append(Grid(text, ["pre-train", *ERROR_TYPES.values()], init_rows(table, cells)))
    cells = row_cells(table, lambda run: robustness(run, metric), MEASURES)
    if any(cell for row in cells.values() for cell in row):
        known = {_read(run, ROBUSTNESS_NAME, lambda x: f"{x['severity']:d}") for run in table.runs}
        severity = ", ".join(sorted(filter(None, known)))
        text = f"{title} on clean (P) and corrupted images (mPC, the mean over 15), "
        text += f"rPC = mPC / P in %, severity {severity}"
        grids.append(Grid(text, ["pre-train", *MEASURES], init_rows(table, cells)))
    return grids


def row_cells(
    table: Table, read: Callable[[FinishedRun], Mapping[_Key, float]], keys: Iterable[_Key]
) -> dict[str, list[Cell | None]]:
    """Return a cell per key for each init, from the numbers that `read` returns for a run."""
    numbers = {run.folder: read(run) for run in table.runs}
    return {
        row.init: [
            mean_cell([numbers[run.folder].get(key) for run in unit] for unit in row.units)
            for key in keys
        ]
        for row in table.rows
    }


def unread(table: Table) -> list[str]:
    """Return notes on files that were ignored because they belong to an earlier run."""
    found = []
    for name, command in {ERRORS_NAME: "errors", ROBUSTNESS_NAME: "robustness"}.items():
        which = [
            f"{run.record.init}, seed {run.record.seed}"
            for run in table.runs
            if _made_of(run, name) not in (None, run.digest)
        ]
        if which:
            found.append(
                f"{name} of {first_few(which, 3)}, belongs to another run and is ignored: "
                f"run moco-transfer {command} again"
            )
    return found


def _made_of(run: FinishedRun, name: str) -> Any:
    """Return the digest of the run that a file was made of, or None without a file."""
    return _parsed(run, name, lambda content: content["run"])


def _read(run: FinishedRun, name: str, part: Callable[[Any], Any]) -> Any:
    """Parse a file of a run, or return None if it is absent or was made of another run."""
    return _parsed(run, name, part) if _made_of(run, name) == run.digest else None


def _parsed(run: FinishedRun, name: str, part: Callable[[Any], Any]) -> Any:
    """Parse a file of a run, or return None if it is absent."""
    content = run.read(name)
    try:
        return None if content is None else part(json.loads(content))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        where = run.folder / name
        raise DataError(f"{where}: damaged, or not written by moco-transfer ({error})") from error


def _finite(numbers: Mapping[str, Any]) -> Numbers:
    known = {str(name): float(x) for name, x in numbers.items() if x is not None}
    return {name: x for name, x in known.items() if math.isfinite(x)}
