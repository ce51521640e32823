"""COCO files with one fault each: what is changed in a good one, and what the message must say.

`BROKEN[case] = (edit, message)`: `edit` gets the file's content and changes it in place, or
returns text to write instead; `message` is a regular expression. `COUNTED` are oddities that
are kept or left out as Detectron2 does, with the note that counts them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

Edit = Callable[[dict[str, Any]], Any]

WIDTH, HEIGHT = 60, 40


def write_good(folder: Path, edit: Edit | None = None) -> Path:
    """Two images of 60x40 px and three objects; returns the JSON file, edited."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("1.jpg", "2.jpg"):
        Image.new("RGB", (WIDTH, HEIGHT)).save(folder / name)
    content: dict[str, Any] = {
        "images": [
            {"id": 1, "file_name": "1.jpg", "width": WIDTH, "height": HEIGHT},
            {"id": 2, "file_name": "2.jpg", "width": WIDTH, "height": HEIGHT},
        ],
        "annotations": [
            annotation(11, 1, [5, 5, 20, 10]),
            annotation(12, 1, [30, 5, 20, 10]),
            annotation(13, 2, [5, 5, 20, 10], category_id=7),
        ],
        "categories": [{"id": 7, "name": "blue"}, {"id": 3, "name": "red"}],
    }
    text = edit(content) if edit else None
    path = folder / "objects.json"
    path.write_text(text if isinstance(text, str) else json.dumps(content))
    return path


def annotation(
    annotation_id: int, image_id: int, box: list[float], category_id: int = 3
) -> dict[str, Any]:
    x, y, w, h = box
    return {
        "id": annotation_id,
        "image_id": image_id,
        "category_id": category_id,
        "bbox": box,
        "area": w * h,
        "iscrowd": 0,
        "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
    }


def second(**fields: Any) -> Edit:
    """Fields of annotation 12; None removes one."""

    def edit(content: dict[str, Any]) -> None:
        row = content["annotations"][1]
        for key, value in fields.items():
            if value is None:
                del row[key]
            else:
                row[key] = value

    return edit


def image(**fields: Any) -> Edit:
    """Fields of the second image; None removes one."""

    def edit(content: dict[str, Any]) -> None:
        row = content["images"][1]
        for key, value in fields.items():
            if value is None:
                del row[key]
            else:
                row[key] = value

    return edit


def without(key: str) -> Edit:
    return lambda content: content.pop(key) and None


BROKEN: dict[str, tuple[Edit, str]] = {
    "cut off": (lambda c: json.dumps(c)[:-40], "not valid JSON"),
    "a list": (lambda c: "[]", "expected an object, got a list"),
    "no images": (without("images"), "'images' is missing"),
    "no annotations": (without("annotations"), "'annotations' is missing"),
    "no categories": (without("categories"), "'categories' is missing"),
    "annotations by id": (
        lambda c: c.update(annotations={"11": {}}),
        "'annotations': expected a list of objects",
    ),
    "image twice": (image(id=1), "image 1: there are two with this id"),
    "category twice": (
        lambda c: c["categories"].append({"id": 3, "name": "red"}),
        "category 3: there are two with this id",
    ),
    "annotation twice": (second(id=11), "annotation 11: there are two with this id"),
    "no id": (second(id=None), "an annotation without a whole-number id"),
    "orphan image": (second(image_id=9), "annotation 12: image 9 is not in the file"),
    "orphan category": (second(category_id=1), "annotation 12: category 1 is not in the file"),
    "lists of ids": (second(image_id=[1]), r"annotation 12: image \[1\] is not in the file"),
    "category by name": (second(category_id="red"), "annotation 12: category 'red' is not in"),
    "image id as text": (image(id="2"), "image with id '2', expected a number"),
    "no width": (image(width=None), "image 2: width is None, expected a whole number"),
    "zero height": (image(height=0), "image 2: height is 0, expected a whole number"),
    "inverted": (second(bbox=[30, 5, -20, 10]), "annotation 12: bbox .* is inverted"),
    "outside": (
        second(bbox=[61, 5, 20, 10]),
        r"annotation 12: bbox \[61, 5, 20, 10\] is outside the 60x40 image",
    ),
    "left of the image": (second(bbox=[-20, 5, 20, 10]), "annotation 12: .* is outside"),
    "not a number": (
        second(bbox=[30, float("nan"), 20, 10]),
        "annotation 12: bbox .* is not of finite numbers",
    ),
    "infinite": (second(bbox=[30, 5, float("inf"), 10]), "annotation 12: .* finite numbers"),
    "text in the box": (second(bbox=[30, 5, "20", 10]), "annotation 12: .* finite numbers"),
    "half a box": (second(bbox=[30, 5]), r"annotation 12: bbox is \[30, 5\], expected"),
    "empty box": (second(bbox=[]), r"annotation 12: bbox is \[\], expected"),
    "no box": (second(bbox=None), "annotation 12: bbox is None, expected"),
    "polygon of text": (second(segmentation=[["a"] * 6]), "annotation 12: a polygon is not a list"),
    "polygon with NaN": (
        second(segmentation=[[float("nan")] * 6]),
        "annotation 12: a polygon is not a list of finite numbers",
    ),
    "flat polygon": (second(segmentation=[1, 2, 3, 4, 5, 6]), "annotation 12: a polygon is not"),
    "RLE of another size": (
        second(segmentation={"size": [60, 40], "counts": [2400]}, iscrowd=1),
        r"annotation 12: RLE size \[60, 40\] is not that of its image, \[40, 60\]",
    ),
    "RLE too short": (
        second(segmentation={"size": [40, 60], "counts": [100, 20]}, iscrowd=1),
        "annotation 12: RLE counts add up to 120, expected 2400",
    ),
    "RLE without counts": (
        second(segmentation={"size": [40, 60]}, iscrowd=1),
        "annotation 12: RLE counts is not a list",
    ),
    "odd crowd": (second(iscrowd="yes"), "annotation 12: iscrowd is 'yes', expected 0 or 1"),
    "ignored": (second(ignore=1), "annotation 12: 'ignore' is not supported"),
    "traversal": (
        image(file_name="../../etc/passwd"),
        "image 2: file_name: '../../etc/passwd' leads out of the dataset's folder",
    ),
    "absolute path": (
        image(file_name="/etc/passwd"),
        "image 2: file_name: '/etc/passwd' leads out of the dataset's folder",
    ),
    "no file name": (image(file_name=None), "image 2: file_name: got '', expected the name"),
    "missing image": (
        image(file_name="3.jpg"),
        r"3.jpg: missing \(1 of the 2 images that .*objects.json lists\)",
    ),
    "no name": (lambda c: c["categories"][0].pop("name") and None, "category 7: 'name'"),
}

COUNTED: dict[str, tuple[Edit, str]] = {
    "over the border": (second(bbox=[50, 30, 20, 20]), "boxes over the border, clipped: 1"),
    "no width": (second(bbox=[30, 5, 0, 10]), "boxes without area, left out in training: 1"),
    "no height at the border": (
        second(bbox=[30, 40, 5, 0]),
        "boxes without area, left out in training: 1",
    ),
    "a polygon of two points": (
        second(segmentation=[[1, 2, 3, 4], [30, 5, 50, 5, 50, 15]]),
        "polygons of fewer than 3 points or half a point, left out: 1",
    ),
    "only a polygon of two points": (
        second(segmentation=[[1, 2, 3, 4]]),
        "objects without another polygon, left out: 1",
    ),
    "a polygon of seven numbers": (
        second(segmentation=[[1, 2, 3, 4, 5, 6, 7]]),
        "objects without another polygon, left out: 1",
    ),
}
