"""Why a row is better: error types and corrupted images, from files beside the runs.

`moco-transfer errors` and `moco-transfer robustness` write them; a run without them has no number.
"""

import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report.aggregate import Cell, Row, Table
from benchmarks.report.content import Section, Shown
from benchmarks.report.style import format_cell
from moco.common.errors import DataError

ERRORS_NAME = "error_types.json"
ROBUSTNESS_NAME = "robustness.json"
# TIDE's types, as hotcoco and tidecv call them.
ERROR_TYPES = {
    **{"Cls": "class", "Loc": "localization", "Both": "both"},
    **{"Dupe": "duplicate", "Bkg": "background", "Miss": "missed"},
}
MAX_BYTES = 1 << 20


def read_numbers(path: Path, part: str) -> dict[str, float]:
    """The finite numbers of one part of such a file, and nothing else; {} where there is no file.

    Raises:
        DataError: unreadable or damaged.
    """
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
        content: Any = json.loads(path.read_text())
        numbers: Mapping[str, Any] = content[part]
        return {
            str(name): float(value)
            for name, value in numbers.items()
            if value is not None and math.isfinite(value)
        }
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not what its command writes, or damaged ({error})") from error


def error_cells(table: Table) -> dict[str, list[Cell | None]]:
    """Init → per type the points that AP50 gains without these errors; {} where no run has any."""
    return _cells(table, ERRORS_NAME, "delta", list(ERROR_TYPES))


def reasons(section: Section) -> list[tuple[str, list[str], list[list[Shown]]]]:
    """Title, head and rows of what is known: error types, and numbers on corrupted images."""
    found = [
        (
            "Points of AP50 (COCO's) that a row gains without its errors of one type (TIDE)",
            ["pre-train", *ERROR_TYPES.values()],
            error_cells(section.table),
        ),
    ]
    return [(title, head, _shown(section, cells)) for title, head, cells in found if cells]


def _shown(section: Section, cells: Mapping[str, list[Cell | None]]) -> list[list[Shown]]:
    return [
        [
            Shown(row.init),
            *(Shown(format_cell(c, row.n), c.mean if c else None) for c in cells[row.init]),
        ]
        for row in section.table.rows
    ]


def _cells(table: Table, name: str, part: str, keys: list[str]) -> dict[str, list[Cell | None]]:
    found = {row.init: _of_row(row, name, part, keys) for row in table.rows}
    return found if any(cell for cells in found.values() for cell in cells) else {}


def _of_row(row: Row, name: str, part: str, keys: list[str]) -> list[Cell | None]:
    """Per key a value of each unit (run, or pre-training) that has one."""
    numbers = {run.folder: read_numbers(run.folder / name, part) for run in row.runs}
    cells: list[Cell | None] = []
    for key in keys:
        of_units = ([numbers[run.folder].get(key) for run in unit] for unit in row.units)
        known = ([value for value in values if value is not None] for values in of_units)
        means = tuple(statistics.fmean(values) for values in known if values)
        cells.append(Cell(means) if means else None)
    return cells
