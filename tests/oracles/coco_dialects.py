"""COCO's format as exporters write it: the same five objects in each of their dialects."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from detection.evaluation.evaluators import build_evaluator
from detection.evaluation.reachable import doctor_config
from tests.oracles.tiny_instances import rectangle, rle

WIDTH, HEIGHT = 60, 40
# Of each object its image, class and box XYWH.
OBJECTS = (
    (0, 0, [5, 5, 20, 10]),
    (0, 1, [30, 5, 20, 10]),
    (1, 0, [5, 5, 20, 20]),
    (2, 1, [2, 3, 40, 30]),
    (3, 0, [10, 10, 30, 20]),
)


def images(start=1, **fields):
    return [
        {"id": i + start, "file_name": f"{i}.png", "width": WIDTH, "height": HEIGHT, **fields}
        for i in range(4)
    ]


def polygon(box):
    x, y, w, h = box
    return [x, y, x + w, y, x + w, y + h, x, y + h]


def annotations(start=1, image=1, category=1, *, drop=(), **fields):
    """Objects with ids from `start`, of images and categories from the others; `fields` on top."""
    rows = []
    for number, (image_index, class_index, box) in enumerate(OBJECTS):
        row = {"id": number + start, "image_id": image_index + image}
        row |= {"category_id": class_index + category, "bbox": box, "area": box[2] * box[3]}
        row |= {"iscrowd": 0, "segmentation": [polygon(box)], **fields}
        rows.append({key: value for key, value in row.items() if key not in drop})
    return rows


def categories(start=1, **fields):
    return [{"id": i + start, "name": name, **fields} for i, name in enumerate(("cat", "dog"))]


def roboflow():
    dummy = {"id": 0, "name": "pets", "supercategory": "none"}
    info = {"year": "2022", "version": "1", "description": "Exported from roboflow.com"}
    return {
        "info": info,
        "licenses": [{"id": 1, "url": "", "name": "CC BY 4.0"}],
        "categories": [dummy, *categories(supercategory="pets")],
        "images": images(0, license=1, date_captured="2022-01-01T00:00:00+00:00"),
        "annotations": annotations(0, 0, segmentation=[]),
    }


def cvat():
    return {
        "licenses": [{"name": "", "id": 0, "url": ""}],
        "info": dict.fromkeys(("contributor", "date_created", "version", "year"), ""),
        "categories": categories(supercategory=""),
        "images": images(license=0, flickr_url="", coco_url="", date_captured=0),
        "annotations": annotations(attributes={"occluded": False}),
    }


def label_studio():
    return {
        "images": images(0),
        "categories": categories(0),
        "annotations": annotations(0, 0, 0, segmentation=[], ignore=0),
        "info": {"year": 2022, "version": "1.0", "contributor": "Label Studio"},
    }


def labelme2coco():
    return {"images": images(), "annotations": annotations(category=0), "categories": categories(0)}


def fiftyone():
    return {
        "info": {"year": "", "version": "", "date_created": "2022-01-01T00:00:00"},
        "licenses": [],
        "categories": categories(0, supercategory=None),
        "images": images(license=None, coco_url=None),
        "annotations": annotations(category=0, drop=("segmentation",)),
    }


def ultralytics():
    rows = annotations(0, drop=("area", "iscrowd"), segmentation=[[]], score=None)
    return {"info": None, "licenses": None, "images": images(), "categories": categories()} | {
        "annotations": rows
    }


def spreadsheet():
    """Turn numbers into fractions and text, as a spreadsheet exports them."""
    rows = annotations(iscrowd=False)
    for row in rows:
        row |= {"id": str(row["id"]), "category_id": float(row["category_id"])}
        row |= {"image_id": str(row["image_id"]), "area": str(row["area"])}
    return {
        "images": [
            {**row, "id": str(row["id"]), "width": 60.0, "license": "1"} for row in images()
        ],
        "categories": [{**row, "id": float(row["id"])} for row in categories()],
        "annotations": rows,
    }


DIALECTS = {
    each.__name__: each
    for each in (roboflow, cvat, label_studio, labelme2coco, fiftyone, ultralytics, spreadsheet)
}


def write(folder, content):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(4):
        Image.new("RGB", (WIDTH, HEIGHT)).save(folder / f"{i}.png")
    file = folder / "test.json"
    file.write_text(json.dumps(content))
    return file


def scores(split, folder, package, *, left_out=()):
    """Return the metrics of correct predictions, without the objects in `left_out`."""
    pytest.importorskip(package)
    evaluator = build_evaluator(split, doctor_config(split), folder)
    evaluator = dataclasses.replace(evaluator, package=package)
    for number, record in enumerate(split.records):
        objects = [
            (split.classes.index(("cat", "dog")[class_index]), [x, y, x + w, y + h])
            for i, (image, class_index, (x, y, w, h)) in enumerate(OBJECTS)
            if image == number and i not in left_out
        ]
        prediction = {
            "boxes": np.array([box for _, box in objects], np.float32).reshape(-1, 4),
            "scores": np.ones(len(objects), np.float32),
            "classes": np.array([class_id for class_id, _ in objects], np.int64),
            "masks": [rle(rectangle(HEIGHT, WIDTH, np.array(box))) for _, box in objects],
        }
        evaluator.add(record, prediction)
    return evaluator.evaluate()
