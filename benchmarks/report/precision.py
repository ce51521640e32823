"""Precision-recall curves at IoU 0.5 from a run's predictions and the local dataset."""

import contextlib
import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report.plots import Curve
from benchmarks.report.records import FinishedRun
from detection.evaluation import voc
from detection.evaluation.coco import MAX_DETECTIONS
from detection.evaluation.predictions import read_voc
from moco.common.errors import UserError
from moco.common.files import read_text

if TYPE_CHECKING:
    from detection.datasets.base import Split

SAME_AP = 0.05  # points; other hardware changes the last digits


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
    """Find the test split of a run on this machine and the file of the run's predictions on it.

    Raises:
        UserError: If there are no predictions, or no such dataset on this machine.
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
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    from detection.datasets.coco_json import annotations_of
    from detection.datasets.coco_repair import annotation_file

    found = [row for row in json.loads(read_text(path)) if "bbox" in row]
    if not found:
        raise UserError(f"{path}: no boxes were predicted")
    config = run.record.config
    annotations = annotation_file(
        annotations_of(split), split.images, masked=config.get("MODEL.MASK_ON", False)
    )
    with contextlib.redirect_stdout(io.StringIO()), annotations as (json_file, _):
        truth = COCO(json_file)
        evaluation = COCOeval(truth, truth.loadRes(found), "bbox")
        evaluation.params.iouThrs = np.array([0.5])
        evaluation.params.maxDets = [config.get("TEST.COCO_MAX_DETECTIONS", MAX_DETECTIONS)]
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][0, :, :, 0, -1]  # recall x class, all areas
    mean = precision[:, (precision > -1).all(axis=0)].mean(axis=1)
    return evaluation.params.recThrs, mean, float(100 * mean.mean())
