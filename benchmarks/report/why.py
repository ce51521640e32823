"""Why a row is better: error types and corrupted images, from files beside the runs.

`moco-transfer errors` and `moco-transfer robustness` write them; a run without them has no number,
nor has one whose files were made of an earlier run in its folder.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.report.aggregate import Cell, Table, mean_cell
from benchmarks.report.cells import Grid, init_rows
from benchmarks.report.records import FinishedRun
from detection.data.corruptions import GROUPS, NAMES
from detection.evaluation.metrics import ERRORS_NAME, ROBUSTNESS_NAME, titles
from moco.common.errors import DataError, first_few

# TIDE's types, as hotcoco and tidecv call them.
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


def error_types(run: FinishedRun) -> Numbers:
    """Type → points of AP50 that are gained without its errors; raises DataError: damaged."""
    return _read(run, ERRORS_NAME, lambda content: _finite(content["delta"])) or {}


def robustness(run: FinishedRun, metric: str) -> Numbers:
    """Of one metric P, mPC, rPC (%) and the mean of each group of corruptions.

    mPC is there only where all 15 corruptions have a number, a group where all of its own have.

    Raises:
        DataError: damaged.
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


def reasons(table: Table) -> list[Grid]:
    """What is known: error types, and numbers on corrupted images."""
    metric, found = table.metrics[0], list[Grid]()
    if cells := _cells(table, error_types, ERROR_TYPES):
        title = "Points of AP50 (COCO's) that a row gains without its errors of one type (TIDE)"
        found.append(Grid(title, ["pre-train", *ERROR_TYPES.values()], init_rows(table, cells)))
    if cells := _cells(table, lambda run: robustness(run, metric), MEASURES):
        known = {_read(run, ROBUSTNESS_NAME, lambda x: f"{x['severity']:d}") for run in table.runs}
        severity = ", ".join(sorted(filter(None, known)))
        title = f"{titles(table.metrics)[0]} on clean (P) and corrupted images (mPC, the mean over "
        title += f"15), rPC = mPC / P in %, severity {severity}"
        found.append(Grid(title, ["pre-train", *MEASURES], init_rows(table, cells)))
    return found


def unread(table: Table) -> list[str]:
    """Say which of these files are not of the runs beside them, so that no number is theirs."""
    found = []
    for name, command in {ERRORS_NAME: "errors", ROBUSTNESS_NAME: "robustness"}.items():
        which = [
            f"{run.record.init}, seed {run.record.seed}"
            for run in table.runs
            if _made_of(run, name) not in (None, run.digest)
        ]
        if which:
            found.append(
                f"{name} of {first_few(which, 3)}, does not name this run and is not read: "
                f"moco-transfer {command} makes it again"
            )
    return found


def _made_of(run: FinishedRun, name: str) -> Any:
    """Return the digest of the run that a file was made of; None: no file."""
    return _parsed(run, name, lambda content: content["run"])


def _read(run: FinishedRun, name: str, part: Callable[[Any], Any]) -> Any:
    """None: the run has no such file, or one that was made of another run."""
    return _parsed(run, name, part) if _made_of(run, name) == run.digest else None


def _parsed(run: FinishedRun, name: str, part: Callable[[Any], Any]) -> Any:
    """None: the run has no such file."""
    content = run.read(name)
    try:
        return None if content is None else part(json.loads(content))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        where = run.folder / name
        raise DataError(f"{where}: not what its command writes, or damaged ({error})") from error


def _finite(numbers: Mapping[str, Any]) -> Numbers:
    known = {str(name): float(x) for name, x in numbers.items() if x is not None}
    return {name: x for name, x in known.items() if math.isfinite(x)}


def _cells(
    table: Table, read: Callable[[FinishedRun], Numbers], keys: Iterable[str]
) -> dict[str, list[Cell | None]]:
    """Init → a cell per key; {} where no run has such a file."""
    numbers = {run.folder: read(run) for run in table.runs}
    found = {
        row.init: [
            mean_cell([numbers[run.folder].get(key) for run in unit] for unit in row.units)
            for key in keys
        ]
        for row in table.rows
    }
    return found if any(cell for cells in found.values() for cell in cells) else {}
