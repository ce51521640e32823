"""COCO files with one fault each: what is changed in a good one, and what the message must name.

`BROKEN[case] = (edit, named)`: `edit` gets the file's content and changes it in place, or
returns text to write instead; `named` is a regular expression. `COUNTED` are oddities that
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
    """Write two images of 60x40 px with three objects and return their JSON file, edited."""
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


def _changed(kind: str, fields: dict[str, Any]) -> Edit:
    """Fields of the second row of a list; None removes one."""

    def edit(content: dict[str, Any]) -> None:
        row = content[kind][1]
        row.update(fields)
        for key in [key for key, value in fields.items() if value is None]:
            del row[key]

    return edit


def second(**fields: Any) -> Edit:
    """Fields of annotation 12; None removes one."""
    return _changed("annotations", fields)


def image(**fields: Any) -> Edit:
    """Fields of the second image; None removes one."""
    return _changed("images", fields)


def without(key: str) -> Edit:
    return lambda content: content.pop(key) and None


def _crowd(**rle: Any) -> Edit:
    return second(segmentation=rle, iscrowd=1)


_NAN = float("nan")
_OF_12 = "annotation 12: "

BROKEN: dict[str, tuple[Edit, str]] = {
    "cut off": (lambda c: json.dumps(c)[:-40], "JSON"),
    "a list": (lambda c: "[]", "list"),
    "no images": (without("images"), "'images'"),
    "no annotations": (without("annotations"), "'annotations'"),
    "no categories": (without("categories"), "'categories'"),
    "annotations by id": (lambda c: c.update(annotations={"11": {}}), "'annotations'"),
    "image twice": (image(id=1), "image 1: .*two"),
    "category twice": (
        lambda c: c["categories"].append({"id": 3, "name": "red"}),
        "category 3: .*two",
    ),
    "annotation twice": (second(id=11), "annotation 11: .*two"),
    "no id": (second(id=None), "annotation has no integer id"),
    "orphan image": (second(image_id=9), _OF_12 + "image_id 9"),
    "orphan category": (second(category_id=1), _OF_12 + "category_id 1"),
    "lists of ids": (second(image_id=[1]), _OF_12 + r"image_id \[1\]"),
    "category by name": (second(category_id="red"), _OF_12 + "category_id 'red'"),
    "image id as a name": (image(id="two"), "image with id 'two'"),
    "image id below 0": (image(id=-2), "image with id -2"),
    "image id beyond 2^53": (image(id=2**70), "image with id 1180591620717411303424"),
    "annotation id beyond 2^53": (second(id=2**70), "annotation 1180591620717411303424: the id"),
    "two categories of one name": (
        lambda c: c["categories"].append({"id": 5, "name": "red"}),
        "categories 3 and 5 are both named 'red'",
    ),
    "null": (lambda c: "null", "holds null, expected .* images, annotations, categories"),
    "no width": (image(width=None), "image 2: width is None"),
    "zero height": (image(height=0), "image 2: height is 0"),
    "inverted": (second(bbox=[30, 5, -20, 10]), _OF_12 + "bbox .* inverted"),
    "outside": (second(bbox=[61, 5, 20, 10]), _OF_12 + r"bbox \[61, 5, 20, 10\] .*60x40"),
    "left of the image": (second(bbox=[-20, 5, 20, 10]), _OF_12 + "bbox .*60x40"),
    "not a number": (second(bbox=[30, _NAN, 20, 10]), _OF_12 + "bbox"),
    "infinite": (second(bbox=[30, 5, float("inf"), 10]), _OF_12 + "bbox"),
    "text in the box": (second(bbox=[30, 5, "20", 10]), _OF_12 + "bbox"),
    "half a box": (second(bbox=[30, 5]), _OF_12 + r"bbox is \[30, 5\]"),
    "no box": (second(bbox=None), _OF_12 + "bbox is None"),
    "polygon of text": (second(segmentation=[["a"] * 6]), _OF_12 + "a polygon"),
    "polygon with NaN": (second(segmentation=[[_NAN] * 6]), _OF_12 + "a polygon"),
    "flat polygon": (second(segmentation=[1, 2, 3, 4, 5, 6]), _OF_12 + "a polygon"),
    "far away": (second(bbox=[30, 5, 2 * 10**6, 10]), _OF_12 + "bbox is .* up to 1000000"),
    "beyond any float": (second(bbox=[10**400, 5, 20, 10]), _OF_12 + "bbox is "),
    # The first crashes pycocotools, the second takes 2 GB of memory.
    "polygon beyond 32 bits": (second(segmentation=[[3e9] * 6]), _OF_12 + "a polygon .*beyond 240"),
    "polygon far away": (second(segmentation=[[1, 1, 1e8, 1, 1, 9]]), _OF_12 + "a polygon .*240"),
    "huge image": (image(width=10**400), "image 2: width is 1000"),
    "RLE of another size": (_crowd(size=[60, 40], counts=[2400]), _OF_12 + "RLE size"),
    "RLE too short": (_crowd(size=[40, 60], counts=[100, 20]), _OF_12 + "RLE .*120.*2400"),
    "RLE without counts": (_crowd(size=[40, 60]), _OF_12 + "RLE counts"),
    "RLE of negative runs": (_crowd(size=[40, 60], counts=[2401, -1]), _OF_12 + "RLE counts"),
    "RLE of another code": (
        _crowd(size=[40, 60], counts="junk!!"),
        _OF_12 + "RLE counts are neither",
    ),
    "RLE text too short": (_crowd(size=[40, 60], counts="~~~~~~~~0"), _OF_12 + "RLE counts"),
    "odd crowd": (second(iscrowd="yes"), _OF_12 + "iscrowd is 'yes'"),
    "ignored": (second(ignore=1), _OF_12 + "'ignore'"),
    "traversal": (image(file_name="../../etc/passwd"), "image 2: file_name: '../../etc/passwd'"),
    "absolute path": (image(file_name="/etc/passwd"), "image 2: file_name: '/etc/passwd'"),
    "no file name": (image(file_name=None), "image 2: file_name"),
    "missing image": (image(file_name="3.jpg"), r"3\.jpg: .*1 of the 2 images .*objects\.json"),
    "no name": (lambda c: c["categories"][0].pop("name") and None, "category 7: 'name'"),
}

_FIRST = " (the first: annotation 12)"
COUNTED: dict[str, tuple[Edit, str]] = {
    "over the border": (
        second(bbox=[50, 30, 20, 20]),
        "boxes over the border, clipped: 1" + _FIRST,
    ),
    "no width": (second(bbox=[30, 5, 0, 10]), "boxes without area, left out in training: 1"),
    "no height at the border": (
        second(bbox=[30, 40, 5, 0]),
        "boxes without area, left out in training: 1",
    ),
    "a polygon of two points": (
        second(segmentation=[[1, 2, 3, 4], [30, 5, 50, 5, 50, 15]]),
        "polygons of fewer than 3 points or an odd number of coordinates, left out: 1" + _FIRST,
    ),
    "a polygon of seven numbers": (
        second(segmentation=[[1, 2, 3, 4, 5, 6, 7]]),
        "objects without any other polygon, whose boxes count, and which training and test of "
        "masks leave out: 1" + _FIRST,
    ),
}
