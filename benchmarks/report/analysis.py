"""Analysis of why a row is better: convergence, error types, corrupted images, precision.

All numbers are read from files in the folders of the runs: `metrics.json`, with the evaluations
during a run, and the files that `moco-transfer errors` and `moco-transfer robustness` write. Runs
without these files, or with files of an earlier run in the same folder, have no numbers.
Precision-recall curves are computed from a run's predictions and the local dataset.
"""

import contextlib
import io
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.report.plots import Curve, parse_curve
from benchmarks.report.records import FinishedRun
from benchmarks.report.style import format_gap
from benchmarks.report.table import FLOOR, Cell, Grid, Table, init_rows, is_floor, mean_cell
from detection.data.corruptions import GROUPS, NAMES
from detection.evaluation import voc
from detection.evaluation.coco import MAX_DETECTIONS
from detection.evaluation.metrics import ERRORS_NAME, ROBUSTNESS_NAME, titles
from detection.evaluation.predictions import read_voc
from moco.common.errors import DataError, UserError, first_few
from moco.common.files import read_text
from moco.common.run import METRICS_NAME

if TYPE_CHECKING:
    from detection.datasets.base import Split

SAME_AP = 0.05  # points; other hardware changes the last digits
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)  # fractions of the schedule
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
Cells = Mapping[str, Sequence[Cell | None]]  # by row
_Key = TypeVar("_Key")


def precision_recall(run: FinishedRun) -> Curve:
    """Compute the boxes' precision at recall 0, 0.01, … 1 and IoU 0.5, averaged over classes.

    The predictions in the run's folder and the dataset on this machine must reproduce the run's
    AP50. The precision at a recall is the highest at that recall or above.

    Raises:
        UserError: If there are no predictions, or no matching dataset on this machine.
    """
    split, path = find_predictions(run)
    name = split.name
    try:
        if split.evaluator_type == "pascal_voc":
            recall, precision, ap50 = _voc_curve(path, split)
        elif split.evaluator_type == "coco" and not split.from_catalog:
            recall, precision, ap50 = _coco_curve(path, split, run)
        else:
            raise UserError(f"not plotted for the metric {split.evaluator_type}")
    except (UserError, ImportError):
        raise
    except Exception as error:  # untrusted predictions may raise anything
        raise UserError(f"{path}: no predictions on the {name} of this machine") from error
    recorded = run.record.metrics.get("bbox/AP50")
    if recorded is None or abs(recorded - ap50) > SAME_AP:
        raise UserError(
            f"the predictions give AP50 {ap50:.1f} on the {name} of this machine, the run's record "
            f"has {'none' if recorded is None else f'{recorded:.1f}'}"
        )
    return recall, precision


def find_predictions(run: FinishedRun) -> tuple["Split", Path]:
    """Find a run's test split on this machine, and the file with the run's predictions.

    Raises:
        UserError: If the predictions or the dataset are not on this machine.
    """
    from detection.datasets import read_split
    from moco.common.cfgnode import CfgNode

    name, folder = " ".join(run.tested_on), run.folder / "inference"
    path = folder / f"{name}.json"
    datasets = {
        key.removeprefix("DATASETS."): value
        for key, value in run.record.config.items()
        if key.startswith("DATASETS.")
    }
    if path.parent != folder or not os.path.isfile(path):
        raise UserError(f"no predictions ({path.name}) in the run's inference folder")
    try:
        return read_split(name, CfgNode({"DATASETS": CfgNode(datasets)})), path
    except (UserError, ImportError):
        raise
    except Exception as error:  # the datasets of an untrusted record may be anything
        raise UserError(f"{path}: the {name} of this machine cannot be read") from error


def _voc_curve(path: Path, split: "Split") -> tuple[NDArray[Any], NDArray[Any], float]:
    """Compute recall (101), precision (101) and AP50 with VOC's metric."""
    detections = voc.VOCDetections(len(split.classes))
    for image_id, rows in read_voc(path).items():
        columns = ([row[key] for row in rows] for key in ("bbox", "score", "category_id"))
        detections.add(image_id, *map(np.array, columns))
    matches = voc.match(detections, split.truth, len(split.classes))
    objects = np.bincount(matches.object_classes, minlength=len(split.classes))
    recalls = np.linspace(0, 1, 101)
    curves = []
    for number in np.flatnonzero(objects).tolist():
        mine = matches.of_class(number)
        true, ignored = matches.true[mine, 0], matches.ignored[mine, 0]
        recall = np.cumsum(true) / objects[number]
        precision = np.cumsum(true) / np.maximum(np.cumsum(~ignored), 1)
        curves.append([max(precision[recall >= r - 1e-9], default=0.0) for r in recalls])
    metrics = voc.summarize(matches, split.classes, split.metadata["year"])
    return recalls, np.mean(curves, axis=0), metrics["bbox/AP50"]


def _coco_curve(
    path: Path, split: "Split", run: FinishedRun
) -> tuple[NDArray[Any], NDArray[Any], float]:
    """Compute recall (101), precision (101) and AP50 with COCO's metric."""
    from detection.evaluation.coco import (
        coco_eval,
        load_truth,
        metric_annotations,
        split_annotations,
    )

    found = [row for row in json.loads(read_text(path)) if "bbox" in row]
    if not found:
        raise UserError(f"{path}: no boxes were predicted")
    config = run.record.config
    masked = config.get("MODEL.MASK_ON", False)
    content = metric_annotations(split_annotations(split), split.images, masked=masked)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = load_truth("pycocotools", content)
        evaluation = coco_eval("pycocotools")(truth, truth.loadRes(found), "bbox")
        evaluation.params.iouThrs = np.array([0.5])
        evaluation.params.maxDets = [config.get("TEST.COCO_MAX_DETECTIONS", MAX_DETECTIONS)]
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][0, :, :, 0, -1]  # recall x class, all areas
    mean = precision[:, (precision > -1).all(axis=0)].mean(axis=1)
    return evaluation.params.recThrs, mean, float(100 * mean.mean())


def convergence(run: FinishedRun, metric: str) -> dict[float, float]:
    """Return a metric of a run at the fractions `SHARES` of the schedule, where evaluated.

    The final value is from the record, the others are from `metrics.json`.

    Raises:
        UserError: If a line of `metrics.json` is not JSON.
    """
    text = (run.read(METRICS_NAME) or b"").decode(errors="replace")
    x, y = parse_curve(text, f"{run.folder / METRICS_NAME}", [metric], "iteration")
    curve = dict(zip(x.tolist(), y.tolist(), strict=True))
    length = run.record.iterations
    # The evaluation after n iterations is logged as iteration n - 1, and the last is the record's.
    found = {s: curve.get(n - 1) for s in SHARES if (n := round(s * length)) < length}
    found[1.0] = run.record.metrics.get(metric)
    return {share: value for share, value in found.items() if value is not None}


def error_types(run: FinishedRun) -> Numbers:
    """Return the points of AP50 that a run would gain without the errors of each type.

    Raises:
        DataError: If the file is damaged.
    """
    return _read(run, ERRORS_NAME, lambda content: _finite(content["delta"])) or {}


def robustness(run: FinishedRun, metric: str) -> Numbers:
    """Return P, mPC, rPC (%) and the mean of each group of corruptions for one metric.

    mPC requires numbers for all 15 corruptions, the mean of a group for those of the group.

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


def convergence_cells(table: Table) -> Cells:
    """Return the first metric of each row at each of `SHARES`."""
    return row_cells(table, lambda run: convergence(run, table.metrics[0]), SHARES)


def analysis_grids(table: Table, converging: Cells) -> list[Grid]:
    """Return the grids of convergence, error types and corrupted images that have numbers.

    Args:
        table: Table whose rows the grids have.
        converging: The table's `convergence_cells`.
    """
    metric, grids = table.metrics[0], list[Grid]()
    title = titles(table.metrics)[0]
    found = [i for i in range(len(SHARES)) if any(row[i] for row in converging.values())]
    if len(found) > 1:
        head = [f"{title} at", *(f"{SHARES[i]:.0%} of the schedule" for i in found)]
        cells = {init: [row[i] for i in found] for init, row in converging.items()}
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


def floor(table: Table) -> list[str]:
    """Return a note on the rows that have learned nothing, as their baseline."""
    base, kind = table.base, table.runs[0].record.kind
    if base is None or not is_floor(kind, base.cells):
        return []
    names = [row.init for row in table.rows if row is not base and is_floor(kind, row.cells)]
    if not names:
        return []
    return [
        f"{first_few([base.init, *names])}: nothing is learned in {table.iterations} iterations "
        f"(below {FLOOR:g} of 100): this compares nothing"
    ]


def still_rising(table: Table, converging: Cells) -> list[str]:
    """Return a note on each row whose training ended before the answer is known.

    That is where the first metric of the row, or of the baseline, rose by more than their gap after
    the last evaluation before the end.

    Args:
        table: Table whose gaps are judged.
        converging: The table's `convergence_cells`.
    """
    metric, base = table.metrics[0], table.base
    found: list[str] = []
    for row in table.rows:
        if base is None or (gap := row.gaps[metric]) is None:
            continue
        points = [
            (share, mine, other)
            for share, mine, other in zip(
                SHARES, converging[row.init], converging[base.init], strict=True
            )
            if mine and other and (mine.n, other.n) == (row.n, base.n)
        ]
        if len(points) < 2:
            continue
        (share, *before), (_, *end) = points[-2:]
        mine, other = (last.mean - first.mean for first, last in zip(before, end, strict=True))
        if max(mine, other) > abs(gap.value):
            found.append(
                f"after {share:.0%} of the schedule {titles(table.metrics)[0]} still changed by "
                f"{format_gap(mine)} ({row.init}) and {format_gap(other)} ({base.init}), and the "
                f"gap is {format_gap(gap.value)}: more iterations may change the answer"
            )
    return found


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


def outdated_files(table: Table) -> list[str]:
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
    """Return the digest of the run from which a file was made; None without a file."""
    return _parsed(run, name, lambda content: content["run"])


def _read(run: FinishedRun, name: str, part: Callable[[Any], Any]) -> Any:
    """Parse a file of a run; None if it is absent or was made from another run."""
    return _parsed(run, name, part) if _made_of(run, name) == run.digest else None


def _parsed(run: FinishedRun, name: str, part: Callable[[Any], Any]) -> Any:
    """Parse a file of a run; None if it is absent."""
    content = run.read(name)
    try:
        return None if content is None else part(json.loads(content))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        where = run.folder / name
        raise DataError(f"{where}: damaged, or not written by moco-transfer ({error})") from error


def _finite(numbers: Mapping[str, Any]) -> Numbers:
    known = {str(name): float(x) for name, x in numbers.items() if x is not None}
    return {name: x for name, x in known.items() if math.isfinite(x)}
