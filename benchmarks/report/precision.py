"""Precision against recall at IoU 0.5 from a run's predictions and the dataset on this machine."""

import contextlib
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report.plots import Curve
from benchmarks.report.records import Run
from detection.evaluation import voc
from detection.evaluation.predictions import read_voc
from moco.common.errors import UserError

if TYPE_CHECKING:
    from detection.datasets.base import Split

SAME_AP = 0.05  # points; another machine's last digits are no other dataset


def precision_recall(run: Run) -> Curve:
    """Recall 0, 0.01, … 1 and the boxes' precision there at IoU 0.5, the mean over the classes.

    Computed from the predictions in the run's folder and the dataset on this machine, which
    together must reproduce the run's AP50. Precision at a recall is the highest at that recall or
    above.

    Raises:
        UserError: no predictions, or the dataset is not on this machine or another one.
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
    try:
        if path.parent != folder or not path.is_file():
            raise UserError(f"no predictions ({path.name}) in the run's inference folder")
        split = read_split(name, CfgNode({"DATASETS": CfgNode(datasets)}))
        if split.evaluator_type == "pascal_voc":
            recall, precision, ap50 = _voc_curve(path, split)
        elif "json_file" in split.metadata and split.evaluator_type == "coco":
            recall, precision, ap50 = _coco_curve(path, split.metadata["json_file"])
        else:
            raise UserError(f"not plotted for the metric {split.evaluator_type}")
    except (UserError, ImportError):
        raise
    except Exception as error:  # whatever reading somebody else's predictions may raise
        raise UserError(f"{path}: no predictions on the {name} of this machine") from error
    noted = run.record.metrics.get("bbox/AP50")
    if noted is None or abs(noted - ap50) > SAME_AP:
        raise UserError(
            f"the predictions give AP50 {ap50:.1f} on the {name} of this machine, the run's record "
            f"has {'none' if noted is None else f'{noted:.1f}'}"
        )
    return recall, precision


def _voc_curve(path: Path, split: "Split") -> tuple[NDArray[Any], NDArray[Any], float]:
    """Recall (101), precision (101) and AP50."""
    detections = voc.VOCDetections(len(split.classes))
    for image_id, rows in read_voc(path).items():
        columns = ([row[key] for row in rows] for key in ("bbox", "score", "category_id"))
        detections.add(image_id, *map(np.array, columns))
    index = {image_id: i for i, image_id in enumerate(split.truth)}
    truths = list(split.truth.values())
    owner = np.concatenate([np.full(len(t.classes), i, np.int64) for i, t in enumerate(truths)])
    boxes, difficult, classes = (
        np.concatenate([getattr(t, name) for t in truths])
        for name in ("boxes", "difficult", "classes")
    )
    recalls = np.linspace(0, 1, 101)
    curves = []
    for number in range(len(split.classes)):
        ids, scores, found = detections.of_class(number)
        order = np.argsort(-scores)
        images = np.array([index[image_id] for image_id in ids], np.int64)
        mine = classes == number
        if not np.any(~difficult[mine]):
            continue
        matches = voc.best_matches(images[order], found[order], owner[mine], boxes[mine])
        true, false = (np.cumsum(x[:, 0]) for x in voc.count(*matches, difficult[mine]))
        recall = true / np.count_nonzero(~difficult[mine])
        precision = true / np.maximum(true + false, 1)
        curves.append([max(precision[recall >= r - 1e-9], default=0.0) for r in recalls])
    metrics = voc.evaluate(detections, split.truth, split.classes, split.metadata["year"])
    return recalls, np.mean(curves, axis=0), metrics["bbox/AP50"]


def _coco_curve(path: Path, annotations: str) -> tuple[NDArray[Any], NDArray[Any], float]:
    """Recall (101), precision (101) and AP50."""
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
