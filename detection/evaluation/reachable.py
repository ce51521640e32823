"""Score of perfect predictions: the highest score that the metric of a test split can give.

The evaluator gets the split's objects, clipped to what a detector can output, as predictions of
score 1, and then no prediction at all. The first must reach 100, the second 0, and all installed
packages must agree. Otherwise the test file or the metric's limits cost points that no backbone can
gain, and the result has their number and the reason.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from fvcore.common.config import CfgNode

from detection.datasets.base import (
    XYWH_ABS,
    Record,
    Split,
    doctor_command,
    object_counts,
    with_masks,
)
from detection.datasets.labels import read_record_labels
from detection.evaluation.base import Evaluator, Prediction
from detection.evaluation.coco import COCO_MAX_KEYPOINTS, COCOEvaluator, installed_packages
from detection.evaluation.evaluators import build_evaluator, metric_kinds, metric_package
from detection.evaluation.metrics import HEADLINE
from moco.common.errors import DataError, UserError, first_few, plural

_TOLERANCE = 0.01  # points; the weights of VOC's 11 points do not add up to 1 exactly
_WORST_CLASSES = 5  # number of classes that a message names
BoxedObject = tuple[Record, tuple[float, ...]]  # a record's object and its clipped box
MAX_SECONDS = 60  # for `score_of_perfect`
MEASURED_TYPES = ("pascal_voc", "coco", "lvis", "cityscapes_instance", "sem_seg")


@dataclass(frozen=True)
class Reachable:
    """Scores of perfect predictions on a split.

    Attributes:
        highest: Headline metric → score of perfect predictions, 0..100; the lowest one of several
            packages.
        faults: Reasons why it is not 100, and other contradictions, one clause each.
    """

    highest: dict[str, float]
    faults: tuple[str, ...]

    def __str__(self) -> str:
        """Format the scores and the faults as one line."""
        scores = ", ".join(f"{name} {score:.1f}" for name, score in self.highest.items())
        if not self.faults:
            return f"perfect predictions score {scores}"
        return f"highest reachable score {scores or 'none'}: {'; '.join(self.faults)}"


def doctor_config(split: Split) -> CfgNode:
    """Return the keys that a metric reads, for a split without a task."""
    limit = 300 if split.evaluator_type == "lvis" else 100
    return CfgNode(
        {
            "MODEL": {"MASK_ON": split.has_masks, "KEYPOINT_ON": split.has_keypoints},
            "TEST": {
                "DETECTIONS_PER_IMAGE": limit,
                "COCO_MAX_DETECTIONS": 100,
                "KEYPOINT_OKS_SIGMAS": [],
                "SEM_SEG_REDUCED_SIZE": 0,
            },
        }
    )


def expected_seconds(split: Split, cfg: CfgNode) -> float:
    """Estimate the duration of `evaluate_perfect`, from timings on two cores.

    It grows with the pairs of image and class for pycocotools, with the objects, which are one PNG
    each, for Cityscapes, and with the pixels for semantic segmentation.
    """
    images, kinds = len(split.records), len(metric_kinds(split, cfg))
    if split.evaluator_type == "coco":
        return 35e-6 * images * len(split.classes) * kinds
    if split.evaluator_type == "cityscapes_instance":
        return 0.05 * sum(object_counts(split).values())
    if split.evaluator_type == "sem_seg":
        return 2e-8 * sum(record["height"] * record["width"] for record in split.records)
    return 1e-4 * sum(object_counts(split).values())


def is_measurable(split: Split) -> bool:
    """Return whether this project computes the metric of a split; False for catalogs, DensePose."""
    return not split.from_catalog and split.evaluator_type in MEASURED_TYPES


def evaluate_perfect(split: Split, cfg: CfgNode) -> Reachable:
    """Evaluate perfect predictions, and none, by the metric of a task.

    Args:
        split: A split that `is_measurable`.
        cfg: The task's configuration, or `doctor_config`.

    Raises:
        UserError: If the split cannot be evaluated under this configuration.
        DataError: If the metric fails on the split's own objects, or a label map cannot be used.
    """
    try:
        return _reachable(split, cfg)
    except UserError:
        raise
    except Exception as error:  # the metrics' packages raise many types
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{split.name}: its metric fails on its own objects ({why})") from error


def score_of_perfect(split: Split, cfg: CfgNode) -> tuple[Reachable | None, str]:
    """Score perfect predictions if that takes at most `MAX_SECONDS`.

    Returns:
        The scores, or None; and a line with the scores or the reason, "" if no metric is computed.

    Raises:
        UserError: As `evaluate_perfect`.
        DataError: As `evaluate_perfect`.
    """
    if not is_measurable(split):
        return None, ""
    if (seconds := expected_seconds(split, cfg)) > MAX_SECONDS:
        note = f"score of perfect predictions: not computed, as it takes about {seconds:.0f} s"
        return None, "; ".join(
            [note, f"{doctor_command()} computes it", *count_unreachable(split, cfg)]
        )
    scored = evaluate_perfect(split, cfg)
    return scored, f"{split.name}: {scored}"


def _reachable(split: Split, cfg: CfgNode) -> Reachable:
    if cfg.MODEL.MASK_ON and split.has_masks:
        split = with_masks(split)
    with TemporaryDirectory(prefix="reachable-") as name:
        folder = Path(name)
        evaluators = _evaluators(split, cfg, folder)
        for record, prediction in _perfect(split, cfg):
            for evaluator in evaluators.values():
                evaluator.add(record, prediction)
        perfect = {package: one.evaluate() for package, one in evaluators.items()}
        none = _score_of_none(split, cfg, folder)
    headline = [
        f"{kind}/{metric}" for kind in metric_kinds(split, cfg) for metric in HEADLINE[kind]
    ]
    by_metric = {
        metric: {
            package: scores[metric]
            for package, scores in perfect.items()
            if np.isfinite(scores.get(metric, np.nan))
        }
        for metric in headline
    }
    highest = {m: float(min(scores.values())) for m, scores in by_metric.items() if scores}
    faults = [
        f"packages differ in {metric}: "
        + ", ".join(f"{package} {score:.1f}" for package, score in scores.items())
        for metric, scores in by_metric.items()
        if scores and max(scores.values()) - min(scores.values()) > _TOLERANCE
    ]
    faults += [
        f"no prediction at all scores {metric} {none[metric]:.1f}"
        for metric in headline
        if none.get(metric, 0) > _TOLERANCE
    ]
    if not highest:
        faults.append("no object to test on")
    if any(score < 100 - _TOLERANCE for score in highest.values()):
        faults += [*count_unreachable(split, cfg), *_worst_classes(perfect)]
    return Reachable({m: round(score, 3) for m, score in highest.items()}, tuple(faults))


def _evaluators(split: Split, cfg: CfgNode, folder: Path) -> dict[str, Evaluator]:
    """Build one evaluator for each installed package that can compute the metric."""
    evaluator = build_evaluator(split, cfg, folder)
    if isinstance(evaluator, COCOEvaluator):
        return {
            package: dataclasses.replace(evaluator, package=package, rows=[])
            for package in installed_packages()
        }
    return {metric_package(split, cfg): evaluator}


def _score_of_none(split: Split, cfg: CfgNode, folder: Path) -> dict[str, float]:
    evaluator = build_evaluator(split, cfg, folder)
    if split.evaluator_type == "sem_seg":
        return {}  # every pixel has a label, so there always is a prediction
    empty = {"boxes": np.empty((0, 4)), "scores": np.empty(0), "classes": np.empty(0, np.int64)}
    for record in split.records:
        evaluator.add(record, empty)
    return evaluator.evaluate()


def _worst_classes(perfect: dict[str, dict[str, float]]) -> list[str]:
    """Name the classes on which perfect predictions score lowest."""
    lowest: dict[str, float] = {}
    for metrics in perfect.values():
        for name, score in metrics.items():
            kind, _, rest = name.partition("/")
            if rest.startswith(("AP-", "IoU-")) and score < 100 - _TOLERANCE:
                label = f"{kind} {rest.partition('-')[2]}"
                lowest[label] = min(score, lowest.get(label, score))
    worst = sorted(lowest.items(), key=lambda item: item[1])
    named = [f"{label} {score:.1f}" for label, score in worst]
    return [f"classes below 100: {first_few(named, _WORST_CLASSES)}"] if named else []


def count_unreachable(split: Split, cfg: CfgNode) -> list[str]:
    """Count the objects that no detector can output or that the metric does not count, by cause."""
    if split.evaluator_type == "sem_seg":
        return []
    limit = cfg.TEST.DETECTIONS_PER_IMAGE
    counted = (
        {cfg.TEST.COCO_MAX_DETECTIONS: "COCO's metric"} if split.evaluator_type == "coco" else {}
    )
    if cfg.MODEL.KEYPOINT_ON:
        counted[COCO_MAX_KEYPOINTS] = "COCO's metric of keypoints"
    objects: Counter[str] = Counter()
    images: Counter[str] = Counter()
    for record in split.records:
        found, lost = _detectable(record)
        lost[f"objects beyond TEST.DETECTIONS_PER_IMAGE {limit}"] = len(found[limit:])
        classes = Counter(item["category_id"] for item, _ in found[:limit])
        for most, metric in counted.items():
            lost[f"objects beyond the {most} of a class in an image that {metric} counts"] = sum(
                max(0, number - most) for number in classes.values()
            )
        objects += lost
        images += Counter(cause for cause, number in lost.items() if number)
    return [f"{cause}: {objects[cause]} in {plural(images[cause], 'image')}" for cause in objects]


def _perfect(split: Split, cfg: CfgNode) -> Iterator[tuple[Record, Prediction]]:
    """Yield each record with the objects that a detector can output as predictions."""
    for record in split.records:
        if split.evaluator_type == "sem_seg":
            labels = read_record_labels(record)
            known = labels != split.metadata["ignore_label"]
            yield record, {"sem_seg": np.where(known, labels, 0).astype(np.int64)}
        else:
            objects, _ = _detectable(record)
            yield record, _prediction(record, objects[: cfg.TEST.DETECTIONS_PER_IMAGE], cfg)


def _detectable(record: Record) -> tuple[list[BoxedObject], Counter[str]]:
    """Return the objects that a detector can output, with clipped XYXY boxes; count the others."""
    found: list[BoxedObject] = []
    lost: Counter[str] = Counter()
    seen = set()
    width, height = record["width"], record["height"]
    for item in record["annotations"]:
        if item.get("iscrowd", 0):
            continue
        left, top, right, bottom = item["bbox"]
        if item["bbox_mode"] == XYWH_ABS:
            right, bottom = left + right, top + bottom
        box = (max(left, 0.0), max(top, 0.0), min(right, width), min(bottom, height))
        if box[2] <= box[0] or box[3] <= box[1]:
            lost["objects without area inside the image"] += 1
        elif (item["category_id"], box) in seen:  # suppressed by any detector's NMS
            lost["objects with the class and box of another one"] += 1
        else:
            found.append((item, box))
            seen.add((item["category_id"], box))
    return found, lost


def _prediction(record: Record, objects: list[BoxedObject], cfg: CfgNode) -> Prediction:
    prediction: dict[str, Any] = {
        "boxes": np.array([box for _, box in objects], dtype=np.float32).reshape(-1, 4),
        "scores": np.ones(len(objects), dtype=np.float32),
        "classes": np.array([item["category_id"] for item, _ in objects], dtype=np.int64),
    }
    if cfg.MODEL.MASK_ON:
        prediction["masks"] = [_mask(item["segmentation"], record) for item, _ in objects]
    if cfg.MODEL.KEYPOINT_ON:
        points = [item["keypoints"] for item, _ in objects]
        number = max(map(len, points), default=0) // 3
        prediction["keypoints"] = np.array(points, dtype=np.float32).reshape(len(points), number, 3)
    return prediction


def _mask(segmentation: Any, record: Record) -> dict[str, Any]:
    """Encode polygons or a run-length encoding as COCO's compressed RLE."""
    import pycocotools.mask as mask_util

    rle = segmentation
    if isinstance(segmentation, list):
        rle = mask_util.frPyObjects(segmentation, record["height"], record["width"])
        rle = mask_util.merge(rle)
    counts = rle["counts"]
    return {"size": rle["size"], "counts": counts.decode() if isinstance(counts, bytes) else counts}
