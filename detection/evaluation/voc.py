"""PASCAL VOC average precision at all ten IoU thresholds in one pass.

Equal to Detectron2's `PascalVOCDetectionEvaluator` (detectron2/evaluation/
pascal_voc_evaluation.py) on the same predictions, including ties, except for classes without
objects in the split (see `evaluate`): scores are rounded to 3 decimals and coordinates to 1, as in
its result files, and detections are ranked by the same sort. Overlaps are computed once for all
thresholds.

The "AP" is the mean over IoU .50:.05:.95 of the VOC AP, not COCO's 101-point AP.

D: detections of one class over the split, ranked. G: objects of one class over the split. P: pairs
of a detection and an object of the same image. T: the 10 thresholds. Boxes are 1-based and
inclusive, in pixels of the original image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from fvcore.common.config import CfgNode
from numpy.typing import NDArray

from detection.datasets.base import Record
from detection.datasets.voc import GroundTruth
from detection.evaluation.base import EVALUATORS, Metric, Prediction
from detection.evaluation.matches import VOC, Matches, MatchFile, join, write_matches
from detection.evaluation.predictions import Row, voc_rows, write_voc

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

IOU_THRESHOLDS = np.array([percent / 100.0 for percent in range(50, 100, 5)])
# The same expression as Detectron2's, for the same rounding: 0.30000000000000004 and so on.
RECALL_POINTS = np.arange(0.0, 1.1, 0.1)
_MEANS = ("bbox/AP", "bbox/AP50", "bbox/AP75")
DETECTRON2_MEANS = tuple(f"{name}_detectron2" for name in _MEANS)


class VOCDetections:
    """Collection of detections, rounded as in VOC result files."""

    def __init__(self, num_classes: int) -> None:
        self._image_ids: list[list[str]] = [[] for _ in range(num_classes)]
        self._rows: list[list[Array]] = [[] for _ in range(num_classes)]

    def add(
        self,
        image_id: str,
        boxes: NDArray[np.floating],
        scores: NDArray[np.floating],
        classes: NDArray[np.integer],
    ) -> None:
        """Add one image's detections.

        Args:
            image_id: Id of the image.
            boxes: (N, 4) XYXY, 0-based, half-open.
            scores: (N,) scores in 0..1.
            classes: (N,) contiguous ids.
        """
        # float32 first: result files are formatted from the detector's float32 numbers, and a
        # float32 times 10 or 1000 is exact in float64, so rint rounds as the formatting does.
        corners = np.asarray(boxes, dtype=np.float32).reshape(-1, 4)
        corners = corners + np.array([1, 1, 0, 0], dtype=np.float32)
        confidence = np.asarray(scores, dtype=np.float32).astype(np.float64)
        rows = np.column_stack(
            [np.rint(confidence * 1000) / 1000, np.rint(corners.astype(np.float64) * 10) / 10]
        )
        class_ids = np.asarray(classes)
        for class_id in np.unique(class_ids):
            chosen = rows[class_ids == class_id]
            self._rows[class_id].append(chosen)
            self._image_ids[class_id].extend([image_id] * len(chosen))

    def extend(self, other: "VOCDetections") -> None:
        """Append the detections of another process."""
        for mine, theirs in zip(self._image_ids, other._image_ids, strict=True):
            mine.extend(theirs)
        for my_rows, their_rows in zip(self._rows, other._rows, strict=True):
            my_rows.extend(their_rows)

    def of_class(self, class_id: int) -> tuple[list[str], Array, Array]:
        """Return image ids (D), scores (D,) and boxes (D, 4) of a class, in the order of adding."""
        rows = np.concatenate([np.empty((0, 5)), *self._rows[class_id]])
        return self._image_ids[class_id], rows[:, 0], rows[:, 1:]


@dataclass
class VOCEvaluator:
    """Evaluator of VOC's metric, which writes predictions to `folder/<split>.json`.

    Attributes:
        split: Name of the split.
        class_names: Class names by contiguous id.
        truth: Ground truth by image id.
        year: Year of the metric: 2007 = 11 points, 2012 = area.
        folder: Folder of the prediction file.
    """

    split: str
    class_names: Sequence[str]
    truth: Mapping[str, GroundTruth]
    year: int
    folder: Path

    def __post_init__(self) -> None:
        self._detections = VOCDetections(len(self.class_names))
        self._rows: list[Row] = []

    def add(self, record: Record, prediction: Prediction) -> None:
        """Add the detections of one image."""
        image_id = str(record["image_id"])
        found = prediction["boxes"], prediction["scores"], prediction["classes"]
        self._detections.add(image_id, *found)
        self._rows += voc_rows(image_id, *found)

    def extend(self, other: Self) -> None:
        """Append the detections that another process collected."""
        self._detections.extend(other._detections)
        self._rows += other._rows

    def evaluate(self) -> dict[str, float]:
        """Write predictions and matches; return metrics as the function `evaluate`."""
        write_voc(self.folder, self.split, self.class_names, self._rows)
        matches = match(self._detections, self.truth, len(self.class_names))
        stored = MatchFile(f"{VOC}{self.year}", tuple(self.truth), {"bbox": matches})
        write_matches(self.folder, stored)
        return summarize(matches, self.class_names, self.year)


@EVALUATORS.register()
def pascal_voc(cfg: CfgNode) -> Metric:
    """Return VOC's metric: the AP of boxes."""
    return Metric(
        ("bbox",),
        lambda split, folder: VOCEvaluator(
            split.name, split.classes, split.truth, split.metadata["year"], folder
        ),
    )


def match(
    detections: VOCDetections, ground_truth: Mapping[str, GroundTruth], num_classes: int
) -> Matches:
    """Match detections with objects at every threshold; images keep `ground_truth`'s order."""
    image_index = {image_id: index for index, image_id in enumerate(ground_truth)}
    truths = list(ground_truth.values())
    boxes = np.concatenate([truth.boxes for truth in truths] + [np.empty((0, 4))])
    classes = np.concatenate([truth.classes for truth in truths] + [np.empty(0, np.int64)])
    difficult = np.concatenate([truth.difficult for truth in truths] + [np.empty(0, bool)])
    owner = np.repeat(np.arange(len(truths)), [len(truth.classes) for truth in truths])
    parts = []
    for class_id in range(num_classes):
        ids, scores, found = detections.of_class(class_id)
        mine, order = classes == class_id, np.argsort(-scores)
        images = np.array([image_index[image_id] for image_id in ids], dtype=np.int64)[order]
        best = best_matches(images, found[order], owner[mine], boxes[mine])
        true, false = count(*best, difficult[mine])
        part = {"images": images, "scores": scores[order], "true": true, "ignored": ~true & ~false}
        parts.append({**part, "object_images": owner[mine & ~difficult]})
    return join(parts)


def summarize(matches: Matches, class_names: Sequence[str], year: int) -> dict[str, float]:
    """Compute metrics by canonical name (detection/evaluation/metrics.py), 0..100, from matches.

    Deviation: AP, AP50 and AP75 are means over the classes that have an object that is not
    difficult, as COCO's are; the AP of the other classes is NaN. Detectron2 counts such a class as
    0, and under the 2012 metric as NaN once it is detected. If there is such a class, Detectron2's
    means are added (`DETECTRON2_MEANS`).

    Args:
        matches: Matches of the split.
        class_names: Class names by contiguous id.
        year: 2007 = 11 points, 2012 = area under the curve.
    """
    curve = ap_11_points if year == 2007 else ap_area
    ap = np.zeros((len(class_names), len(IOU_THRESHOLDS)))
    objects = np.bincount(matches.object_classes, minlength=len(class_names))
    for class_id in range(len(class_names)):
        tp, fp = matches.counts(class_id)  # (D, T)
        with np.errstate(invalid="ignore"):  # no object of this class: 0 / 0
            recall = tp / np.float64(objects[class_id])
        precision = tp / np.maximum(tp + fp, np.finfo(np.float64).eps)
        ap[class_id] = [curve(*rows) for rows in zip(recall.T, precision.T, strict=True)]
    ap *= 100
    present = objects > 0
    metrics = dict(zip(_MEANS, _means(ap[present]), strict=True))
    if not present.all():
        metrics |= zip(DETECTRON2_MEANS, _means(ap), strict=True)
        ap[~present] = np.nan
    for name, values in zip(class_names, ap, strict=True):
        metrics[f"bbox/AP-{name}"] = float(values.mean())
        metrics[f"bbox/AP50-{name}"] = float(values[0])
    return metrics


def _means(ap: Array) -> tuple[float, float, float]:
    """Return AP, AP50 and AP75 from (classes, T); NaN if there is no class."""
    if not len(ap):
        return (np.nan,) * 3
    # A mean over the axis would add in another order than Detectron2 does.
    per_threshold = np.array([np.mean(values) for values in ap.T])
    return float(per_threshold.mean()), float(per_threshold[0]), float(per_threshold[5])


def best_matches(
    images: Ints, boxes: Array, truth_images: Ints, truth_boxes: Array
) -> tuple[Ints, Array]:
    """Find the object of its image that every detection overlaps most.

    Returns:
        best: (D,) index of the object, the first one among ties; -1 if the image has none.
        overlap: (D,) its IoU; -inf if the image has none.
    """
    D = len(images)
    best = np.full(D, -1, dtype=np.int64)
    overlap = np.full(D, -np.inf)
    first = np.searchsorted(truth_images, images, side="left")
    per_detection = np.searchsorted(truth_images, images, side="right") - first
    has_truth = np.flatnonzero(per_detection)
    if len(has_truth) == 0:
        return best, overlap
    lengths = per_detection[has_truth]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    detection = np.repeat(has_truth, lengths)  # (P,)
    truth = np.arange(lengths.sum()) - np.repeat(starts, lengths) + first[detection]  # (P,)
    iou = inclusive_iou(boxes[detection], truth_boxes[truth])
    highest = np.maximum.reduceat(iou, starts)
    overlap[has_truth] = highest
    # The first pair of each detection with its maximum.
    winners = np.flatnonzero(iou == np.repeat(highest, lengths))
    _, first_winner = np.unique(detection[winners], return_index=True)
    best[has_truth] = truth[winners[first_winner]]
    return best, overlap


def inclusive_iou(a: Array, b: Array) -> Array:
    """Return the IoU (P,) of boxes (P, 4) and (P, 4) with inclusive corners."""
    top_left = np.maximum(a[:, :2], b[:, :2])
    bottom_right = np.minimum(a[:, 2:], b[:, 2:])
    sides = np.maximum(bottom_right - top_left + 1.0, 0.0)
    intersection = sides[:, 0] * sides[:, 1]
    area_a = (a[:, 2] - a[:, 0] + 1.0) * (a[:, 3] - a[:, 1] + 1.0)
    area_b = (b[:, 2] - b[:, 0] + 1.0) * (b[:, 3] - b[:, 1] + 1.0)
    return intersection / (area_a + area_b - intersection)


def count(best: Ints, overlap: Array, truth_difficult: Bools) -> tuple[Bools, Bools]:
    """Return true and false positives at every threshold, (D, T) each, for ranked detections.

    The first detection of an object is true and further ones are false; a detection of a difficult
    object is neither.
    """
    matched = overlap[:, None] > IOU_THRESHOLDS  # (D, T)
    true_positive = np.zeros_like(matched)
    on_difficult = np.zeros(len(best), dtype=bool)
    on_difficult[best >= 0] = truth_difficult[best[best >= 0]]
    for t in range(len(IOU_THRESHOLDS)):
        candidates = np.flatnonzero(matched[:, t] & ~on_difficult)
        _, first = np.unique(best[candidates], return_index=True)
        true_positive[candidates[first], t] = True
    return true_positive, ~true_positive & ~(matched & on_difficult[:, None])


def ap_11_points(recall: Array, precision: Array) -> float:
    """Return VOC 2007's AP: mean over recall 0, .1, … 1 of the highest precision from there on."""
    ap = 0.0
    for point in RECALL_POINTS:
        reached = recall >= point
        ap += (precision[reached].max() if reached.any() else 0.0) / 11.0
    return float(ap)


def ap_area(recall: Array, precision: Array) -> float:
    """Return the AP of VOC 2010 and later: the area under the precision envelope."""
    recall = np.concatenate([[0.0], recall, [1.0]])
    precision = np.concatenate([[0.0], precision, [0.0]])
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    steps = np.flatnonzero(recall[1:] != recall[:-1])
    return float(np.sum((recall[steps + 1] - recall[steps]) * envelope[steps + 1]))
