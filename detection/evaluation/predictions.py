"""Predictions of a model: in memory the same from both engines, on disk one file per split.

A `Prediction` holds numpy arrays in pixels of the original image (N instances, K keypoints):

    boxes (N, 4) float32 XYXY, 0-based, half-open; scores (N,) float32 in 0..1;
    classes (N,) int64, contiguous ids; optionally masks: N compressed COCO RLE dicts
    ("size" [H, W], "counts" str), keypoints (N, K, 3) float32: x, y and score, x = 0.5 in the
    center of the first pixel;
    or, for semantic segmentation, sem_seg (H, W) int64, contiguous ids, which is not stored.

On disk, `OUTPUT_DIR/inference/<split>.json`, numbers with as many digits as float32 has:

    VOC: {"classes": [names], "predictions": [{"image_id", "category_id", "bbox", "score"}, …]} with
    `bbox` XYXY as above and `category_id` counting `classes` from 0;
    COCO, LVIS, Cityscapes instances: COCO's results format, a list of {"image_id", "category_id",
    "bbox" (XYWH), "score", "segmentation", "keypoints"}, `category_id` that of the annotations.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detection.evaluation.base import Prediction
from moco.common.files import atomic_write_json, atomic_write_text, read_text

Row = dict[str, Any]


def voc_rows(
    image_id: str,
    boxes: NDArray[np.float32],
    scores: NDArray[np.float32],
    classes: NDArray[np.integer],
) -> list[Row]:
    """Return one dict per detection of an image: boxes (N, 4), scores (N,), classes (N,)."""
    return [
        {
            "image_id": image_id,
            "category_id": int(category),
            "bbox": _digits(box),
            "score": _digits([score])[0],
        }
        for box, score, category in zip(boxes, scores, classes, strict=True)
    ]


def write_voc(folder: Path, split: str, class_names: Sequence[str], predictions: list[Row]) -> None:
    """Write `folder/<split>.json`."""
    content = {"classes": list(class_names), "predictions": predictions}
    atomic_write_json(folder / f"{split}.json", content)


def read_voc(path: Path) -> defaultdict[str, list[Row]]:
    """Read a file of `write_voc`: image id → its detections, empty for other images.

    Raises:
        ValueError: If a number is not finite.
    """
    found = defaultdict(list)
    for row in json.loads(read_text(path))["predictions"]:
        if not np.isfinite([row["score"], *row["bbox"]]).all():
            raise ValueError(f"{path}: image {row['image_id']}: a score or box is not finite")
        found[str(row["image_id"])].append(row)
    return found


def coco_rows(
    image_id: int | str, prediction: Prediction, category_ids: Mapping[int, int]
) -> list[Row]:
    """Return one dict per instance of an image in COCO's results format, in full precision.

    Keypoints are shifted by half a pixel to COCO's pixel indices, as in Detectron2's
    `instances_to_coco_json`.

    Args:
        image_id: Id of the image.
        prediction: Its instances.
        category_ids: Contiguous id → the annotations' id.
    """
    boxes = np.array(prediction["boxes"], dtype=np.float32).reshape(-1, 4)
    boxes[:, 2:] -= boxes[:, :2]
    scores = np.asarray(prediction["scores"], dtype=np.float32).tolist()
    found = [
        {"image_id": image_id, "category_id": category_ids[int(c)], "bbox": box, "score": score}
        for c, box, score in zip(prediction["classes"], boxes.tolist(), scores, strict=True)
    ]
    if "masks" in prediction:
        for row, mask in zip(found, prediction["masks"], strict=True):
            row["segmentation"] = mask
    if "keypoints" in prediction and found:
        points = np.array(prediction["keypoints"], dtype=np.float32)
        points[:, :, :2] -= 0.5
        for row, numbers in zip(found, points.reshape(len(found), -1).tolist(), strict=True):
            row["keypoints"] = numbers
    return found


def encode_mask(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Encode a mask (H, W) as COCO's run lengths, with `counts` as text for JSON."""
    import pycocotools.mask

    rle = pycocotools.mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {"size": rle["size"], "counts": rle["counts"].decode()}


def write_coco(folder: Path, split: str, found: Sequence[Row]) -> None:
    """Write `folder/<split>.json` in COCO's results format, one instance per line."""
    numbers = ("bbox", "keypoints")
    short = (
        {
            **row,
            **{key: _digits(row[key]) for key in numbers if key in row},
            "score": _digits([row["score"]])[0],
        }
        for row in found
    )
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in short)
    atomic_write_text(folder / f"{split}.json", f"[\n{lines}\n]\n" if found else "[]\n")


def _digits(numbers: Sequence[float] | NDArray[np.float32]) -> list[float]:
    """Return the numbers with the fewest digits that are equal in float32."""
    return [float(str(number)) for number in np.array(numbers, dtype=np.float32)]
