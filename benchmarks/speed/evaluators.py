"""The evaluators against the official ones, on the same generated predictions."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed import scenes
from benchmarks.speed.measure import Contenders, interleaved
from benchmarks.speed.results import Result, compare
from detection.datasets.coco import COCO_CATEGORIES
from detection.datasets.voc import VOC_CLASSES
from detection.evaluation import voc as voc_eval
from detection.evaluation.base import Prediction
from detection.evaluation.coco import COCOEvaluator

METRICS = ("AP", "AP50", "AP75")


class VOCPredictions:
    """A whole test split with its predictions, for both evaluators.

    Args:
        num_images: VOC2007's test has 4952.
        num_false: false alarms per image.
        folder: for the files of the official evaluator.
    """

    def __init__(self, num_images: int, num_false: int, folder: Path) -> None:
        rng = np.random.default_rng(0)
        self.folder = folder
        self.truth: dict[str, voc_eval.GroundTruth] = {}
        self.predictions: dict[str, Prediction] = {}
        for image_id in (f"{number:06d}" for number in range(num_images)):
            scene = scenes.random_scene(rng, len(VOC_CLASSES), mean_objects=3.0)
            inclusive = scene.boxes + np.array([1, 1, 0, 0])
            self.truth[image_id] = voc_eval.GroundTruth(inclusive, scene.classes, scene.difficult)
            found = scenes.random_prediction(rng, scene, len(VOC_CLASSES), num_false)
            self.predictions[image_id] = found
            scenes.write_voc_annotation(folder / f"{image_id}.xml", scene)
        (folder / "images.list").write_text("\n".join(self.truth), encoding="utf-8")

    def ours(self) -> dict[str, float]:
        """AP, AP50, AP75 by detection/evaluation/voc.py, over all classes as the official code."""
        detections = voc_eval.VOCDetections(len(VOC_CLASSES))
        for image_id, found in self.predictions.items():
            detections.add(image_id, found["boxes"], found["scores"], found["classes"])
        metrics = voc_eval.evaluate(detections, self.truth, VOC_CLASSES, 2007)
        own = {name: metrics[f"bbox/{name}"] for name in METRICS}
        return {name: metrics.get(f"bbox/{name}_detectron2", own[name]) for name in METRICS}

    def official(self) -> dict[str, float]:
        """The same by `voc_eval` of VOC's devkit, which Detectron2 has, called as its evaluator."""
        from detection.d2.measured import voc_eval as official

        lines: dict[str, list[str]] = {name: [] for name in VOC_CLASSES}
        for image_id, found in self.predictions.items():
            columns = (found["boxes"], found["scores"].tolist(), found["classes"].tolist())
            for (x1, y1, x2, y2), score, label in zip(*columns, strict=True):
                box = f"{x1 + 1:.1f} {y1 + 1:.1f} {x2:.1f} {y2:.1f}"
                lines[VOC_CLASSES[label]].append(f"{image_id} {score:.3f} {box}")
        paths = [str(self.folder / name) for name in ("{}.txt", "{}.xml", "images.list")]
        aps = np.empty((10, len(VOC_CLASSES)))  # threshold x class
        for k, (name, content) in enumerate(lines.items()):
            (self.folder / f"{name}.txt").write_text("\n".join(content), encoding="utf-8")
            for t, percent in enumerate(range(50, 100, 5)):
                _, _, ap = official(*paths, name, percent / 100.0, True)
                aps[t, k] = ap * 100
        means = [np.mean(row) for row in aps]
        values = (np.mean(means), means[0], means[5])
        return {name: float(value) for name, value in zip(METRICS, values, strict=True)}


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

        return self._others(COCO, "loadRes", COCOeval)

    def compiled(self) -> dict[str, float]:
        """The same by hotcoco."""
        import hotcoco

        return self._others(hotcoco.COCO, "load_res", hotcoco.COCOeval)

    def _others(self, dataset: Any, load: str, evaluator: Any) -> dict[str, float]:
        """Means as in detection/evaluation/coco.py, which takes them from Detectron2."""
        rows = [dict(row) for row in self.evaluator.rows]  # pycocotools writes into them
        with contextlib.redirect_stdout(io.StringIO()):
            truth = dataset(str(self.path))
            evaluation = evaluator(truth, getattr(truth, load)(rows), "bbox")
            evaluation.evaluate()
            evaluation.accumulate()
        precision = np.asarray(evaluation.eval["precision"])[:, :, :, [0], [2]]  # (T, R, K, 1)
        parts = zip(METRICS, (precision, precision[:1], precision[5:6]), strict=True)
        return {name: float(np.mean(part[part > -1]) * 100) for name, part in parts}


def voc_row(num_images: int, num_false: int, folder: Path, rounds: int) -> Result:
    """From predictions in memory to the AP over ten thresholds."""
    given = VOCPredictions(num_images, num_false, folder)
    contenders: Contenders = {"ours": given.ours, "official": given.official}
    count = sum(len(found["scores"]) for found in given.predictions.values())
    differs = given.ours() != given.official()
    seconds = interleaved(contenders, rounds)
    sizes = f"{num_images} images, {count} detections"
    return compare("evaluation voc", seconds, "ours", "official", sizes, differs)


def coco_rows(num_images: int, num_false: int, folder: Path, rounds: int) -> list[Result]:
    """From predictions in COCO's format in memory to AP."""
    given = COCOPredictions(num_images, num_false, folder)
    contenders = {"ours": given.ours, "official": given.official}
    if importlib.util.find_spec("hotcoco"):
        contenders["compiled"] = given.compiled
    metrics = {name: run() for name, run in contenders.items()}
    official = metrics["official"]
    seconds = interleaved(contenders, rounds)
    sizes = f"{num_images} images, {len(given.evaluator.rows)} detections"
    return [
        compare(goal, seconds, side, "official", sizes, metrics.get(side, official) != official)
        for goal, side in (("evaluation coco", "ours"), ("hotcoco", "compiled"))
    ]
