"""A generated dataset in LVIS's layout: three classes by color among all 1230 (or 1203).

Under `$DETECTRON2_DATASETS`: coco/{train2017,val2017}/, lvis/lvis_<version>_<split>.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles.shapes import paint, save_jpeg

NUMBER = {"v0.5": 1230, "v1": 1203}
# Category ids of red, blue and green, and how frequent the file says they are.
KINDS = {11: "f", 600: "c", 1200: "r"}


def write_lvis(
    folder: Path,
    splits: dict[str, int],
    *,
    version: str = "v0.5",
    categories: list[dict[str, Any]] | None = None,
    seed: int = 0,
    size: int = 96,
) -> Path:
    """Write `splits` = {"train": number of images, "val": ...}; returns `folder`.

    `categories`: of the file, 1..n in any order, by default named c0001, c0002, ...
    """
    rng = np.random.RandomState(seed)
    ids = list(KINDS)
    number = 0
    for split, count in splits.items():
        images, annotations = [], []
        folder_name = f"{split}2017"
        for _ in range(count):
            number += 1
            pixels, shapes = paint(rng, number % 3, size)
            name = f"{number:012d}.jpg"
            save_jpeg(pixels, folder / "coco" / folder_name / name)
            width, height = pixels.size
            present = {ids[shape.kind] for shape in shapes}
            image_id = 1000 - 7 * number
            image = {
                "id": image_id,
                "height": height,
                "width": width,
                "coco_url": f"http://images.cocodataset.org/{folder_name}/{name}",
                "neg_category_ids": [i for i in (*ids, 7) if i not in present],
                "not_exhaustive_category_ids": [9],
            }
            if version == "v0.5":
                image["file_name"] = name
            images.append(image)
            for shape in shapes:
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": image_id,
                        "category_id": ids[shape.kind],
                        "bbox": list(shape.box),
                        "area": shape.area,
                        "segmentation": [shape.polygon],
                    }
                )
        path = folder / "lvis" / f"lvis_{version}_{split}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "info": {},
            "licenses": [],
            "images": images,
            "annotations": annotations,
            "categories": categories or _categories(version),
        }
        path.write_text(json.dumps(content))
    return folder


def _categories(version: str) -> list[dict[str, Any]]:
    return [
        {
            "id": i,
            "name": f"c{i:04d}",
            "synonyms": [f"c{i:04d}", "x"],
            "synset": f"c{i:04d}.n.01",
            "def": "a shape",
            "frequency": KINDS.get(i, "rcf"[i % 3]),
            "image_count": 1 + i % 5,
            "instance_count": 1 + i % 7,
        }
        for i in range(1, NUMBER[version] + 1)
    ]
