"""Run folders → validated records. Only a finished run has numbers; the others are listed by name.

A record (`run.json`) is written last by the run itself, so a folder with other traces of a run
but without it is unfinished. Nothing is read from logs.
"""

import contextlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from detection.evaluation.metrics import HEADLINE
from moco.common.errors import UserError
from moco.common.files import PathLike
from moco.common.run import METRICS_NAME, RECORD_NAME, RunRecord, read_record

# What reading predictions, or naming a dataset, that somebody else wrote may raise.
_NOT_PREDICTIONS = (
    *(ValueError, TypeError, LookupError, AttributeError, AssertionError, OSError),
    *(OverflowError, RecursionError),
)
SAME_AP = 0.05  # points; another machine's last digits are no other dataset


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and its record.

    The folder is where the record was found, maybe on another machine than it was made on: no table
    needs what the paths within the record lead to.
    """

    folder: Path
    record: RunRecord

    @property
    def label(self) -> str:
        """`as in the paper (…)` or the like, then every deviation; empty if nothing was said."""
        recipe = self.record.recipe or {}
        parts = [str(recipe.get("label") or ""), *map(str, recipe.get("deviations") or ())]
        return "; ".join(part for part in parts if part)

    @property
    def versions(self) -> str:
        """`python 3.11.4, torch 2.5.1, …`: what was installed, and the project's revision."""
        made = self.record.provenance
        parts = [f"{k} {v}" for k, v in (made.get("versions") or {}).items() if v is not None]
        return ", ".join([*parts, *([f"git {made['git'][:12]}"] if made.get("git") else [])])

    @property
    def hardware(self) -> str:
        """`8 x NVIDIA V100` or the processor's name, with its number of threads."""
        hardware = self.record.provenance.get("hardware") or {}
        if gpus := list(hardware.get("gpus") or ()):
            return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
        if not hardware.get("cpu"):
            return ""
        return f"{hardware['cpu']}, {hardware.get('cpu_threads')} threads"

    @property
    def finished(self) -> str:
        """When it was, in UTC whatever the zone it was noted in; empty if that is not known."""
        try:
            noted = datetime.fromisoformat(str(self.record.provenance.get("utc")))
            if noted.tzinfo is None:  # provenance() writes UTC
                noted = noted.replace(tzinfo=UTC)
            return noted.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        except (ValueError, OverflowError):
            return ""


@dataclass(frozen=True)
class Unusable:
    """A run that has no numbers, and why."""

    folder: Path
    reason: str


@dataclass(frozen=True)
class Results:
    """What a set of folders holds."""

    transfer: tuple[Run, ...]  # everything but pre-training: what tables are made of
    pretraining: tuple[Run, ...]
    unusable: tuple[Unusable, ...]


def collect(paths: Sequence[PathLike]) -> Results:
    """Read every run below `paths` (run folders, folders of run folders, or `run.json` files).

    A folder reached twice counts once. The order is that of the folders' names.

    Raises:
        UserError: a path that does not exist, no run below any of them, or an invalid record.
    """
    folders: set[Path] = set()
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path}: no such run folder")
        if path.is_file():
            folders.add(path.parent.resolve())
        else:
            folders.update(_run_folders(path.resolve()))
    transfer, pretraining, unusable = [], [], []
    for folder in sorted(folders):
        if not (folder / RECORD_NAME).is_file():
            unusable.append(Unusable(folder, f"unfinished: it has no {RECORD_NAME} yet"))
            continue
        record = _validated(folder)
        if record.status != "done":
            reason = record.notes[-1] if record.notes else "no reason recorded"
            unusable.append(Unusable(folder, f"failed: {reason}"))
        elif record.kind == "pretrain":
            pretraining.append(Run(folder, record))
        else:
            transfer.append(Run(folder, record))
    if not folders:
        raise UserError(
            f"no runs below {', '.join(map(str, paths))}; expected folders with a {RECORD_NAME}, "
            "as detection/train_net.py, moco.linear and moco.finetune write them into OUTPUT_DIR"
        )
    return Results(tuple(transfer), tuple(pretraining), tuple(unusable))


def sample_images(run: Run) -> dict[str, Path]:
    """Predictions drawn by `--visualize`: file name → file; empty if there are none."""
    folder = run.folder / "inference" / "visualize"
    return {path.name: path for path in sorted(folder.glob("*.jpg"))}


def precision_recall(run: Run) -> tuple[Any, Any]:
    """Recall 0, 0.01, … 1 and the boxes' precision there at IoU 0.5, the mean over the classes.

    Made of the predictions in the run's folder and of the dataset on this machine, which together
    have to give the run's AP50. Precision at a recall is the highest at that recall or above.

    Raises:
        UserError: no predictions, or the dataset is not on this machine or another one.
    """
    from detection.datasets import read_split
    from moco.common.cfgnode import CfgNode

    config = run.record.config
    name = " ".join(config.get("DATASETS.TEST") or ())
    folder = run.folder / "inference"
    path = folder / f"{name}.json"
    datasets = {key: value for key, value in config.items() if key.startswith("DATASETS.")}
    tree = {key.removeprefix("DATASETS."): value for key, value in datasets.items()}
    try:
        if path.parent != folder or not path.is_file():
            raise UserError(f"no predictions ({path.name}) in the run's inference folder")
        split = read_split(name, CfgNode({"DATASETS": CfgNode(tree)}))
        if split.evaluator_type == "pascal_voc":
            recall, precision, ap50 = _voc_curve(path, split)
        elif "json_file" in split.metadata and split.evaluator_type == "coco":
            recall, precision, ap50 = _coco_curve(path, split.metadata["json_file"])
        else:
            raise UserError(f"not drawn for the metric {split.evaluator_type}")
    except _NOT_PREDICTIONS as error:
        raise UserError(f"{path}: no predictions on the {name} of this machine") from error
    noted = run.record.metrics.get("bbox/AP50")
    if noted is None or abs(noted - ap50) > SAME_AP:
        raise UserError(
            f"the predictions give AP50 {ap50:.1f} on the {name} of this machine, the run's record "
            f"has {'none' if noted is None else f'{noted:.1f}'}"
        )
    return recall, precision


def _voc_curve(path: Path, split: Any) -> tuple[Any, Any, float]:
    import numpy as np

    from detection.evaluation import voc as voc_eval

    detections = voc_eval.VOCDetections(len(split.classes))
    by_image: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(path.read_text())["predictions"]:
        by_image.setdefault(str(row["image_id"]), []).append(row)
    for image_id, rows in by_image.items():
        columns = ([row[key] for row in rows] for key in ("bbox", "score", "category_id"))
        boxes, scores, classes = map(np.array, columns)
        detections.add(image_id, boxes, scores, classes)
    index = {image_id: i for i, image_id in enumerate(split.truth)}
    truths = list(split.truth.values())
    owner = np.concatenate([np.full(len(t.classes), i, np.int64) for i, t in enumerate(truths)])
    of_all = [np.concatenate([getattr(t, k) for t in truths]) for k in ("boxes", "difficult")]
    classes = np.concatenate([t.classes for t in truths])
    recalls = np.linspace(0, 1, 101)
    curves = []
    for number in range(len(split.classes)):
        ids, scores, found = detections.of_class(number)
        order = np.argsort(-scores)
        images = np.array([index[image_id] for image_id in ids], np.int64)
        boxes, difficult = (values[classes == number] for values in of_all)
        if not np.any(~difficult):
            continue
        matches = voc_eval.best_matches(
            images[order], found[order], owner[classes == number], boxes
        )
        true, false = (np.cumsum(x[:, 0]) for x in voc_eval.count(*matches, difficult))
        recall = true / np.count_nonzero(~difficult)
        precision = true / np.maximum(true + false, 1)
        curves.append([max(precision[recall >= r - 1e-9], default=0.0) for r in recalls])
    year = split.metadata["year"]
    metrics = voc_eval.evaluate(detections, split.truth, split.classes, year)
    return recalls, np.mean(curves, axis=0), metrics["bbox/AP50"]


def _coco_curve(path: Path, annotations: str) -> tuple[Any, Any, float]:
    import numpy as np
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    found = [row for row in json.loads(path.read_text()) if "bbox" in row]
    if not found:
        raise UserError(f"{path}: no boxes were predicted")
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(annotations)
        evaluation = COCOeval(truth, truth.loadRes(found), "bbox")
        evaluation.params.iouThrs = np.array([0.5])
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][0, :, :, 0, -1]  # recall x class, all areas
    mean = precision[:, (precision > -1).all(axis=0)].mean(axis=1)
    return evaluation.params.recThrs, mean, float(100 * mean.mean())


def _run_folders(root: Path) -> list[Path]:
    """Folders below `root` with a record or, as traces of an unfinished run, metrics.

    What lies inside a run's folder belongs to that run: `--eval-only` leaves the record of an
    evaluation in `inference/`, which is not another trial.
    """
    found = []
    for folder, below, files in os.walk(root):
        if RECORD_NAME in files or METRICS_NAME in files:
            found.append(Path(folder))
            below.clear()
    return found


def _validated(folder: Path) -> RunRecord:
    path = folder / RECORD_NAME
    record = read_record(path)
    for name, value in record.metrics.items():
        if value is None or name.split("/", 1)[0] not in HEADLINE:
            continue
        if not 0 <= value <= 100:
            raise UserError(f"{path}: metric {name}: got {value}, expected 0 to 100")
    return record
