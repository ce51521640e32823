"""Made-up instance data for the tests of the evaluators: annotations, and answers near them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from detection.datasets.base import Split

Array = np.ndarray[Any, Any]


def rle(mask: Array) -> dict[str, Any]:
    """Encode a mask (H, W) as a compressed COCO run-length code."""
    from pycocotools import mask as mask_util

    code = mask_util.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {"size": list(code["size"]), "counts": code["counts"].decode()}


def rectangle(H: int, W: int, box: Array) -> Array:
    """Return a mask (H, W) of the inside of a box XYXY."""
    x1, y1, x2, y2 = np.round(box).astype(int)
    mask = np.zeros((H, W), dtype=np.uint8)
    mask[max(y1, 0) : y2, max(x1, 0) : x2] = 1
    return mask


def coco_annotations(
    seed: int, classes: int, keypoints: int, num_images: int = 5
) -> dict[str, Any]:
    """Return the content of a COCO file with gaps in its ids; the last class has no object.

    Objects are of all sizes; some are crowds, some have no keypoint that is labeled.
    """
    rng = np.random.default_rng(seed)
    H, W = 200, 260
    category_ids = [3 * i + 2 for i in range(classes)]
    images, annotations = [], []
    for image in range(num_images):
        images.append({"id": 7 * image + 1, "file_name": f"{image}.jpg", "height": H, "width": W})
        for _ in range(rng.integers(1, 7)):
            w, h = (int(n) for n in rng.integers(8, 150, 2))
            x, y = int(rng.integers(0, W - w)), int(rng.integers(0, H - h))
            crowd = int(rng.random() < 0.15)
            area = rectangle(H, W, np.array([x, y, x + w, y + h]))
            annotation = {
                "id": len(annotations) + 1,
                "image_id": images[-1]["id"],
                "category_id": category_ids[int(rng.integers(0, max(classes - 1, 1)))],
                "bbox": [x, y, w, h],
                "area": 0.8 * w * h,
                "iscrowd": crowd,
                "segmentation": rle(area)
                if crowd
                else [[x, y, x + w, y, x + w, y + h, x + 0.4 * w, y + 0.7 * h]],
            }
            if keypoints:
                points = np.column_stack(
                    [
                        rng.integers(x, x + w, keypoints),
                        rng.integers(y, y + h, keypoints),
                        rng.integers(0, 3, keypoints) * (rng.random() > 0.1),
                    ]
                )
                points[points[:, 2] == 0] = 0
                annotation["keypoints"] = points.ravel().tolist()
                annotation["num_keypoints"] = int((points[:, 2] > 0).sum())
            annotations.append(annotation)
    return {
        "info": {},
        "licenses": [],
        "images": images,
        "annotations": annotations,
        "categories": [{"id": id_, "name": f"class{id_}"} for id_ in category_ids],
    }


def coco_split(path: Path, content: dict[str, Any], evaluator_type: str = "coco") -> Split:
    """Write `content` to `path` and describe it as the reader does, as far as metrics care."""
    path.write_text(json.dumps(content), encoding="utf-8")
    categories = sorted(content["categories"], key=lambda category: category["id"])
    ids = {category["id"]: index for index, category in enumerate(categories)}
    names = tuple(category["name"] for category in categories)
    annotations = content["annotations"]
    first = annotations[0] if annotations else {}
    count = len(first.get("keypoints", [])) // 3
    return Split(
        name=path.stem,
        evaluator_type=evaluator_type,
        classes=names,
        records=tuple(
            {
                "file_name": image["file_name"],
                "image_id": image["id"],
                "height": image["height"],
                "width": image["width"],
            }
            for image in content["images"]
        ),
        annotations_sha256="0" * 64,
        metadata={
            "json_file": str(path),
            "thing_classes": list(names),
            "thing_dataset_id_to_contiguous_id": ids,
            "keypoint_names": [f"k{i}" for i in range(count)],
        },
        has_masks=all("segmentation" in a for a in annotations),
        has_keypoints=all("keypoints" in a for a in annotations),
    )


def answers(
    split: Split, content: dict[str, Any], seed: int, keypoints: int = 0, extra: int = 3
) -> list[dict[str, Any]]:
    """Return a prediction per record: shifted objects, some twice, some missing, some wrong."""
    rng = np.random.default_rng(seed)
    ids = split.metadata["thing_dataset_id_to_contiguous_id"]
    predictions = []
    for record in split.records:
        H, W = record["height"], record["width"]
        boxes, classes, points, masks = [], [], [], []
        of_image = [a for a in content["annotations"] if a["image_id"] == record["image_id"]]
        for annotation in of_image * 2:
            if rng.random() < 0.3:
                continue
            x, y, w, h = annotation["bbox"]
            box = np.array([x, y, x + w, y + h]) + rng.normal(0, 3, 4)
            boxes.append(box)
            classes.append(ids[annotation["category_id"]])
            masks.append(rle(rectangle(H, W, box)))
            if keypoints:
                points.append(
                    np.array(annotation["keypoints"], dtype=float).reshape(-1, 3)
                    + rng.normal(0, 2, (keypoints, 3))
                )
        for _ in range(extra):
            corner, size = rng.uniform(0, 100, 2), rng.uniform(5, 90, 2)
            boxes.append(np.concatenate([corner, corner + size]))
            classes.append(int(rng.integers(0, len(split.classes))))
            masks.append(rle(rectangle(H, W, boxes[-1])))
            points.append(rng.uniform(0, 200, (keypoints, 3)))
        prediction = {
            "boxes": np.array(boxes, dtype=np.float32).reshape(-1, 4),
            # Two digits, so that there are ties.
            "scores": rng.uniform(0, 1, len(boxes)).round(2).astype(np.float32),
            "classes": np.array(classes, dtype=np.int64),
            "masks": masks,
        }
        if keypoints:
            prediction["keypoints"] = np.array(points, dtype=np.float32)
        predictions.append(prediction)
    return predictions


def empty_prediction(keypoints: int = 0) -> dict[str, Any]:
    """Return the prediction of a model that finds nothing."""
    return {
        "boxes": np.empty((0, 4), dtype=np.float32),
        "scores": np.empty(0, dtype=np.float32),
        "classes": np.empty(0, dtype=np.int64),
        "masks": [],
        "keypoints": np.empty((0, keypoints, 3), dtype=np.float32),
    }


def instances(*found: tuple[Any, float, int]) -> dict[str, Any]:
    """Return a prediction of (box, score, class) triples, possibly none, without masks."""
    return {
        "boxes": np.array([box for box, _, _ in found], dtype=np.float32).reshape(-1, 4),
        "scores": np.array([score for _, score, _ in found], dtype=np.float32),
        "classes": np.array([class_id for _, _, class_id in found], dtype=np.int64),
    }


def with_masks(prediction: dict[str, Any], H: int, W: int) -> dict[str, Any]:
    """Return the prediction with a mask for each box, which fills it."""
    return {**prediction, "masks": [rle(rectangle(H, W, box)) for box in prediction["boxes"]]}


def detectron2_instances(prediction: dict[str, Any], H: int, W: int) -> Any:
    """Return the prediction as Detectron2's structure of an image (H, W)."""
    import torch
    from detectron2.structures import Boxes, Instances
    from pycocotools import mask as mask_util

    found = Instances((H, W))
    found.pred_boxes = Boxes(torch.from_numpy(prediction["boxes"].copy()))
    found.scores = torch.from_numpy(prediction["scores"].copy())
    found.pred_classes = torch.from_numpy(prediction["classes"].copy())
    if "masks" in prediction:
        masks = np.array([mask_util.decode(mask) for mask in prediction["masks"]])
        found.pred_masks = torch.from_numpy(masks.reshape(-1, H, W))
    if "keypoints" in prediction:
        found.pred_keypoints = torch.from_numpy(prediction["keypoints"].copy())
    return found
