"""VOC2007's average precision: a plain transcription of the official Python code (voc_eval.py).

One class and one IoU threshold at a time, over result files and a Python loop over the detections.
Detectron2 calls it 200 times for the AP over ten thresholds
(detectron2/evaluation/pascal_voc_evaluation.py).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# Of one image: "name", "difficult" and "bbox" (x1, y1, x2, y2), 1-based and inclusive.
Objects = Sequence[Mapping[str, Any]]


def evaluate(
    lines: Mapping[str, Sequence[str]], truth: Mapping[str, Objects], folder: Path
) -> dict[str, float]:
    """AP, AP50 and AP75 in 0..100.

    Args:
        lines: of each class's result file: image, score and box, separated by spaces.
        truth: the objects of every image.
        folder: for the result files.
    """
    per_threshold: dict[int, list[float]] = {}
    for name, content in lines.items():
        path = folder / f"{name}.txt"
        path.write_text("\n".join(content))
        for percent in range(50, 100, 5):
            ap = average_precision(path, truth, name, percent / 100.0)
            per_threshold.setdefault(percent, []).append(ap * 100)
    means = {percent: np.mean(aps) for percent, aps in per_threshold.items()}
    values = {"AP": np.mean(list(means.values())), "AP50": means[50], "AP75": means[75]}
    return {name: float(value) for name, value in values.items()}


def result_lines(
    image_id: str, boxes: NDArray[np.float32], scores: Sequence[float], classes: Sequence[int]
) -> list[tuple[int, str]]:
    """Class and line of every detection of one image; boxes (N, 4) 0-based and half-open."""
    found = []
    for box, score, label in zip(boxes, scores, classes, strict=True):
        x1, y1, x2, y2 = box
        x1 += 1
        y1 += 1
        found.append((label, f"{image_id} {score:.3f} {x1:.1f} {y1:.1f} {x2:.1f} {y2:.1f}"))
    return found


def average_precision(
    path: Path, truth: Mapping[str, Objects], name: str, threshold: float
) -> float:
    """AP in 0..1 of one class at one IoU threshold; `path` is its result file."""
    mine: dict[str, dict[str, Any]] = {}
    num_objects = 0
    for image_id, objects in truth.items():
        own = [item for item in objects if item["name"] == name]
        difficult = np.array([item["difficult"] for item in own], dtype=bool)
        num_objects += int(sum(~difficult))
        boxes = np.array([item["bbox"] for item in own], dtype=float)
        mine[image_id] = {"boxes": boxes, "difficult": difficult, "taken": [False] * len(own)}

    rows = [line.split(" ") for line in path.read_text().splitlines()]
    image_ids = [row[0] for row in rows]
    confidence = np.array([float(row[1]) for row in rows])
    found = np.array([[float(number) for number in row[2:]] for row in rows]).reshape(-1, 4)
    order = np.argsort(-confidence)
    found = found[order]
    image_ids = [image_ids[index] for index in order]

    true_positive, false_positive = np.zeros(len(image_ids)), np.zeros(len(image_ids))
    for d, image_id in enumerate(image_ids):
        of_image = mine[image_id]
        best, overlap = -1, -np.inf
        if of_image["boxes"].size:
            overlaps = overlaps_with(found[d], of_image["boxes"])
            best, overlap = int(np.argmax(overlaps)), float(np.max(overlaps))
        if overlap <= threshold:
            false_positive[d] = 1.0
        elif of_image["difficult"][best]:
            continue
        elif of_image["taken"][best]:
            false_positive[d] = 1.0
        else:
            true_positive[d] = 1.0
            of_image["taken"][best] = True

    fp, tp = np.cumsum(false_positive), np.cumsum(true_positive)
    with np.errstate(invalid="ignore"):
        recall = tp / float(num_objects)
    precision = tp / np.maximum(tp + fp, np.finfo(np.float64).eps)
    return curve_11_points(recall, precision)


def overlaps_with(box: Array, boxes: Array) -> Array:
    """IoU (G,) of one box with boxes (G, 4) whose last row and column belong to them."""
    width = np.maximum(np.minimum(boxes[:, 2], box[2]) - np.maximum(boxes[:, 0], box[0]) + 1.0, 0.0)
    height = np.maximum(
        np.minimum(boxes[:, 3], box[3]) - np.maximum(boxes[:, 1], box[1]) + 1.0, 0.0
    )
    shared = width * height
    area = (box[2] - box[0] + 1.0) * (box[3] - box[1] + 1.0)
    areas = (boxes[:, 2] - boxes[:, 0] + 1.0) * (boxes[:, 3] - boxes[:, 1] + 1.0)
    overlaps: Array = shared / (area + areas - shared)
    return overlaps


def curve_11_points(recall: Array, precision: Array) -> float:
    """VOC 2007."""
    ap = 0.0
    for point in np.arange(0.0, 1.1, 0.1):
        reached = precision[recall >= point]
        ap += (np.max(reached) if len(reached) else 0.0) / 11.0
    return float(ap)
