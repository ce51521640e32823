"""Suspicious but possibly intended contents of COCO files, which only the doctor reports."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from detection.datasets.coco_repair import Json, as_integer

_BEYOND_PX, _BEYOND_SHARE = 2.0, 0.1  # tolerated extent of a mask outside its box
MOST = 0.9  # share of the boxes that determines their format


def oddities(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on duplicated objects, suspicious boxes, masks outside boxes.

    Args:
        content: Decoded content of a file that `AnnotationFile` can read.
    """
    rows = content["annotations"]
    yield from _twice(rows)
    yield from _formats(content["images"], rows)
    yield from _counted(
        [row for row in rows if all(type(value) is int for value in row["bbox"])],
        "boxes of integers, which lose up to a pixel when training resizes them, as in Detectron2",
    )
    elsewhere = [row for row in rows if _mask_elsewhere(row)]
    yield from _counted(elsewhere, "masks that extend beyond their boxes")


def _counted(rows: Sequence[Json], text: str) -> Iterator[str]:
    if rows:
        yield f"{text}: {len(rows)} (the first: annotation {rows[0]['id']!r})"


def _twice(rows: Sequence[Json]) -> Iterator[str]:
    seen: Counter[tuple[Any, ...]] = Counter()
    again = []
    for row in rows:
        key = (row["image_id"], row["category_id"], *row["bbox"])
        if seen[key]:
            again.append(row)
        seen[key] += 1
    yield from _counted(
        again, "objects with the image, category and box of another one, which no detector finds"
    )


def _formats(images: Sequence[Json], rows: Sequence[Json]) -> Iterator[str]:
    sizes = {
        as_integer(i["id"]): (as_integer(i["width"]) or 0, as_integer(i["height"]) or 0)
        for i in images
    }
    relative, corners, beyond = [], 0, []
    for row in rows:
        x, y, w, h = row["bbox"]
        width, height = sizes[as_integer(row["image_id"])]
        fits = x < w <= width + 1 and y < h <= height + 1
        corners += fits
        if fits and (x + w > width + 1 or y + h > height + 1):
            beyond.append(row)
        if max(x, y, w, h) <= 1:
            relative.append(row)
    if len(relative) >= MOST * len(rows):
        yield from _counted(
            relative, "boxes that look relative (0 to 1), but COCO's format has pixels"
        )
    elif corners >= MOST * len(rows):
        yield from _counted(
            beyond,
            "boxes beyond the image that look like [x1, y1, x2, y2], but COCO's format has "
            "[x, y, width, height]",
        )


def _mask_elsewhere(row: Json) -> bool:
    x, y, w, h = row["bbox"]
    shape = row.get("segmentation")
    if isinstance(shape, list):
        polygons = [
            part for part in shape if len(part) >= 6
        ]  # shorter ones are dropped by the reader
        across = [value for part in polygons for value in part[::2]]
        down = [value for part in polygons for value in part[1::2]]
        if not across or not down:
            return False
        left, top, right, bottom = min(across), min(down), max(across), max(down)
    elif isinstance(shape, dict) and isinstance(shape.get("counts"), str):
        import pycocotools.mask  # here, because few files have run lengths

        left, top, right, bottom = pycocotools.mask.toBbox(shape).tolist()
        right, bottom = left + right, top + bottom
    else:
        return False
    most_x, most_y = _BEYOND_PX + _BEYOND_SHARE * w, _BEYOND_PX + _BEYOND_SHARE * h
    return bool(
        left < x - most_x or top < y - most_y or right > x + w + most_x or bottom > y + h + most_y
    )
