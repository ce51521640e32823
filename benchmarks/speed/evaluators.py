"""C9: the evaluators against the official ones, on the same generated predictions."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed import reference_voc, scenes
from benchmarks.speed.measure import interleaved
from benchmarks.speed.results import Result, compare
from detection.datasets.coco import COCO_CATEGORIES
from detection.datasets.voc import VOC_CLASSES
from detection.evaluation import voc as voc_eval
from detection.evaluation.base import Prediction
from detection.evaluation.coco import COCOEvaluator
from detection.evaluation.predictions import Row as Instance

METRICS = ("AP", "AP50", "AP75")


class VOCPredictions:
    """A whole test split with its predictions, for both evaluators.

    Args:
        num_images: VOC2007's test has 4952.
        num_false: false alarms per image.
    """

    def __init__(self, num_images: int, num_false: int) -> None:
        rng = np.random.default_rng(0)
        self.truth: dict[str, voc_eval.GroundTruth] = {}
        self.objects: dict[str, reference_voc.Objects] = {}
        self.predictions: dict[str, Prediction] = {}
        for number in range(num_images):
            image_id, num_classes = f"{number:06d}", len(VOC_CLASSES)
            scene = scenes.random_scene(rng, num_classes, mean_objects=3.0)
            inclusive = scene.boxes + np.array([1, 1, 0, 0])
            self.truth[image_id] = voc_eval.GroundTruth(inclusive, scene.classes, scene.difficult)
            parts = zip(inclusive.tolist(), scene.classes, scene.difficult, strict=True)
            self.objects[image_id] = [
                {"bbox": box, "name": VOC_CLASSES[label], "difficult": bool(difficult)}
                for box, label, difficult in parts
            ]
            self.predictions[image_id] = scenes.random_prediction(
                rng, scene, num_classes, num_false
            )

    def ours(self) -> dict[str, float]:
        """AP, AP50, AP75 by detection/evaluation/voc.py, over all classes as the official code."""
        detections = voc_eval.VOCDetections(len(VOC_CLASSES))
        for image_id, found in self.predictions.items():
            detections.add(image_id, found["boxes"], found["scores"], found["classes"])
        metrics = voc_eval.evaluate(detections, self.truth, VOC_CLASSES, 2007)
        own = {name: metrics[f"bbox/{name}"] for name in METRICS}
        return {name: metrics.get(f"bbox/{name}_detectron2", own[name]) for name in METRICS}

    def official(self, folder: Path) -> dict[str, float]:
        """The same by the transcription; `folder` is for its result files."""
        lines: dict[str, list[str]] = {name: [] for name in VOC_CLASSES}
        for image_id, found in self.predictions.items():
            scores, classes = found["scores"].tolist(), found["classes"].tolist()
            rows = reference_voc.result_lines(image_id, found["boxes"], scores, classes)
            for label, line in rows:
                lines[VOC_CLASSES[label]].append(line)
        return reference_voc.evaluate(lines, self.objects, folder)


class COCOPredictions:
    """Images in COCO's format with their predicted boxes; `folder` gets the files."""

    def __init__(self, num_images: int, num_false: int, folder: Path) -> None:
        rng = np.random.default_rng(0)
        ids = [str(number) for number in range(1, num_images + 1)]
        split = [scenes.random_scene(rng, len(COCO_CATEGORIES), 7.0) for _ in ids]
        self.path = folder / "truth.json"
        scenes.write_coco(self.path, ids, split, COCO_CATEGORIES)
        self.evaluator = COCOEvaluator(
            "predictions",
            str(self.path),
            {own: number for own, (number, _) in enumerate(COCO_CATEGORIES)},
            [name for _, name in COCO_CATEGORIES],
            ("bbox",),
            folder,
        )
        for image_id, scene in zip(ids, split, strict=True):
            found = scenes.random_prediction(rng, scene, len(COCO_CATEGORIES), num_false)
            self.evaluator.add({"image_id": int(image_id)}, found)

    def ours(self) -> dict[str, float]:
        """AP, AP50, AP75 by detection/evaluation/coco.py, which writes the predictions, too."""
        metrics = self.evaluator.evaluate()
        return {name: metrics[f"bbox/{name}"] for name in METRICS}

    def official(self) -> dict[str, float]:
        """The same by pycocotools."""
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        with contextlib.redirect_stdout(io.StringIO()):
            truth = COCO(str(self.path))
            return _coco_metrics(COCOeval(truth, truth.loadRes(self._rows()), "bbox"))

    def compiled(self) -> dict[str, float]:
        """The same by hotcoco, which this project uses for LVIS.

        Raises:
            ImportError: it is not installed.
        """
        import hotcoco

        with contextlib.redirect_stdout(io.StringIO()):
            truth = hotcoco.COCO(str(self.path))
            return _coco_metrics(hotcoco.COCOeval(truth, truth.load_res(self._rows()), "bbox"))

    def _rows(self) -> list[Instance]:
        return [dict(row) for row in self.evaluator.rows]  # pycocotools writes into them


def voc_row(num_images: int, num_false: int, folder: Path, rounds: int) -> Result:
    """From predictions in memory to the AP over ten thresholds."""
    given = VOCPredictions(num_images, num_false)
    contenders: dict[str, Callable[[], Any]] = {
        "ours": given.ours,
        "official": partial(given.official, folder),
    }
    differs = given.ours() != given.official(folder)
    count = sum(len(found["scores"]) for found in given.predictions.values())
    sizes = f"{num_images} images, {count} detections"
    seconds = interleaved(contenders, rounds)
    return compare("C9 voc", seconds, reference="official", sizes=sizes, differs=differs)


def coco_rows(num_images: int, num_false: int, folder: Path, rounds: int) -> list[Result]:
    """From predictions in COCO's format in memory to AP."""
    given = COCOPredictions(num_images, num_false, folder)
    contenders: dict[str, Callable[[], Any]] = {"ours": given.ours, "official": given.official}
    with contextlib.suppress(ImportError):
        given.compiled()
        contenders["compiled"] = given.compiled
    metrics = {name: run() for name, run in contenders.items()}
    seconds = interleaved(contenders, rounds)
    sizes = f"{num_images} images, {len(given.evaluator.rows)} detections"
    rows = []
    for goal, side in (("C9 coco", "ours"), ("hotcoco", "compiled")):
        differs = side in metrics and metrics[side] != metrics["official"]
        rows.append(compare(goal, seconds, side, "official", sizes, differs))
    return rows


def _coco_metrics(evaluation: Any) -> dict[str, float]:
    """Means as in detection/evaluation/coco.py, which takes them from Detectron2."""
    evaluation.evaluate()
    evaluation.accumulate()
    precision = np.asarray(evaluation.eval["precision"])[:, :, :, [0], [2]]  # (T, R, K, 1)
    parts = zip(METRICS, (precision, precision[:1], precision[5:6]), strict=True)
    return {name: float(np.mean(part[part > -1]) * 100) for name, part in parts}
