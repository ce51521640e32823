"""A generated dataset in COCO's layout: shapes whose class shows by color, as polygons.

Under `$DETECTRON2_DATASETS`: coco/<split>/, coco/annotations/{instances,person_keypoints,
densepose}_<split>.json. Classes in use: person (red), car (blue), dog (green).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from detection.datasets.coco import COCO_CATEGORIES, PERSON_KEYPOINTS
from tests.oracles.shapes import Shape, paint, save_jpeg

KINDS = (1, 3, 18)  # category ids of person, car, dog, in the order of shapes.COLORS


def write_coco(
    folder: Path,
    splits: dict[str, int],
    *,
    keypoints: bool = False,
    densepose: bool = False,
    crowd: bool = True,
    seed: int = 0,
    size: int = 96,
    one_large: bool = False,
) -> Path:
    """Write `splits` = {"train2017": number of images, ...}; returns `folder`.

    The first image of each split also has a crowd as uncompressed RLE. With `keypoints` or
    `densepose` every image has a person. `one_large`: one object per image, half of it.
    """
    rng = np.random.RandomState(seed)
    number = 0
    for split, count in splits.items():
        images, annotations = [], []
        for index in range(count):
            number += 1
            first = 0 if keypoints or densepose else number % 3
            image, shapes = paint(rng, first, size, one_large=one_large)
            name = f"{number:012d}.jpg"
            if split.endswith("2014"):
                name = f"COCO_{split}_{name}"
            save_jpeg(image, folder / "coco" / _images(split) / name)
            width, height = image.size
            # Ids neither contiguous nor in the order of the file.
            image_id = 1000 - 7 * number
            images.append({"id": image_id, "file_name": name, "height": height, "width": width})
            for shape in shapes:
                annotations.append(_annotation(10 * len(annotations) + 5, image_id, shape))
            if crowd and index == 0:
                annotations.append(_crowd(10 * len(annotations) + 5, image_id, height, width))
        write_annotations(folder, f"instances_{split}", images, annotations, _categories())
        if keypoints:
            people = [_with_keypoints(a) for a in annotations if a["category_id"] == KINDS[0]]
            write_annotations(folder, f"person_keypoints_{split}", images, people, [_person()])
        if densepose:
            people = [
                _with_densepose(_with_keypoints(a), rng)
                for a in annotations
                if a["category_id"] == KINDS[0] and not a["iscrowd"]
            ]
            write_annotations(folder, f"densepose_{split}", images, people, [_person()])
    return folder


def _images(split: str) -> str:
    return split if split.startswith(("train", "val2")) else "val2014"


def write_annotations(
    folder: Path, name: str, images: list, annotations: list, categories: list
) -> None:
    path = folder / "coco" / "annotations" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"images": images, "annotations": annotations, "categories": categories}
    path.write_text(json.dumps({"info": {}, "licenses": [], **content}))


def _annotation(annotation_id: int, image_id: int, shape: Shape) -> dict[str, Any]:
    return {
        "id": annotation_id,
        "image_id": image_id,
        "category_id": KINDS[shape.kind],
        "iscrowd": 0,
        "bbox": list(shape.box),
        "area": shape.area,
        "segmentation": [shape.polygon],
    }


def _crowd(annotation_id: int, image_id: int, height: int, width: int) -> dict[str, Any]:
    """Return a strip along the lower border, 4 px high; runs go down the columns."""
    counts = [height - 4, 4] * width
    return {
        "id": annotation_id,
        "image_id": image_id,
        "category_id": KINDS[0],
        "iscrowd": 1,
        "bbox": [0, height - 4, width, 4],
        "area": 4 * width,
        "segmentation": {"size": [height, width], "counts": counts},
    }


def _with_keypoints(annotation: dict[str, Any]) -> dict[str, Any]:
    """17 points at the same places of every box, all visible; a crowd has none."""
    x, y, w, h = annotation["bbox"]
    points: list[int] = []
    for index in range(len(PERSON_KEYPOINTS)):
        if annotation["iscrowd"]:
            points += [0, 0, 0]
        else:
            across, down = (index % 4 + 1) / 5, (index // 4 + 1) / 6
            points += [int(x + across * w), int(y + down * h), 2]
    visible = 0 if annotation["iscrowd"] else len(PERSON_KEYPOINTS)
    return {**annotation, "keypoints": points, "num_keypoints": visible}


def _with_densepose(annotation: dict[str, Any], rng: np.random.RandomState) -> dict[str, Any]:
    """Return the least that DensePose trains on: 14 part masks of 256x256 px and some points.

    Masks and points are in coordinates of the box, 0..255; parts 1..24, U and V in 0..1.
    """
    import pycocotools.mask

    masks: list[Any] = []
    for part in range(14):
        mask = np.zeros((256, 256), np.uint8, order="F")
        mask[16 * part : 16 * part + 16, 32:224] = 1
        rle = pycocotools.mask.encode(mask)
        masks.append({"size": rle["size"], "counts": rle["counts"].decode()})
    number = 20
    return {
        **annotation,
        "dp_masks": masks,
        "dp_x": rng.uniform(32, 224, number).round(2).tolist(),
        "dp_y": rng.uniform(8, 216, number).round(2).tolist(),
        "dp_I": rng.randint(1, 25, number).astype(float).tolist(),
        "dp_U": rng.uniform(0, 1, number).round(4).tolist(),
        "dp_V": rng.uniform(0, 1, number).round(4).tolist(),
    }


def _categories() -> list[dict[str, Any]]:
    return [{"id": i, "name": name, "supercategory": "x"} for i, name in COCO_CATEGORIES]


def _person() -> dict[str, Any]:
    return {
        "id": 1,
        "name": "person",
        "supercategory": "person",
        "keypoints": list(PERSON_KEYPOINTS),
        "skeleton": [[16, 14], [14, 12]],
    }
