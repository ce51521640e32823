"""What looks wrong in a file of COCO's format, but may be meant: only the doctor says it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from detection.datasets.coco_repair import Json, whole

_BEYOND_PX, _BEYOND_SHARE = 2.0, 0.1  # how far a mask may reach out of its box
_MOST = 0.9  # the share of all boxes that tells their format


def oddities(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on equal objects, odd boxes, masks elsewhere and dummy classes.

    Args:
        content: Of a file, as decoded, that `AnnotationFile` can read.
    """
    rows = content["annotations"]
    yield from _twice(rows)
    yield from _formats(content["images"], rows)
    yield from _counted(
        [row for row in rows if all(type(value) is int for value in row["bbox"])],
        "boxes of whole numbers, which lose up to a pixel where training resizes them, as in "
        "Detectron2",
    )
    elsewhere = [row for row in rows if _mask_elsewhere(row)]
    yield from _counted(elsewhere, "masks that reach out of their boxes")
    used = {whole(row["category_id"]) for row in rows}
    for category in content["categories"]:
        if category.get("supercategory") == "none" and whole(category["id"]) not in used:
            yield (
                f"category {category['id']}, {category['name']!r}, has the supercategory none and "
                "no object, as in files of Roboflow; it stays a class, which no AP counts, and is "
                "no class once it is deleted from all files"
            )


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
    sizes = {whole(i["id"]): (whole(i["width"]) or 0, whole(i["height"]) or 0) for i in images}
    relative, corners, beyond = [], 0, []
    for row in rows:
        x, y, w, h = row["bbox"]
        width, height = sizes[whole(row["image_id"])]
        fits = x < w <= width + 1 and y < h <= height + 1
        corners += fits
        if fits and (x + w > width + 1 or y + h > height + 1):
            beyond.append(row)
        if max(x, y, w, h) <= 1:
            relative.append(row)
    if len(relative) >= _MOST * len(rows):
        yield from _counted(
            relative, "boxes that look relative (0 to 1), where COCO's format has pixels"
        )
    elif corners >= _MOST * len(rows):
        yield from _counted(
            beyond,
            "boxes beyond the image that look like [x1, y1, x2, y2], where COCO's format has "
            "[x, y, width, height]",
        )


def _mask_elsewhere(row: Json) -> bool:
    x, y, w, h = row["bbox"]
    shape = row.get("segmentation")
    if isinstance(shape, list):
        polygons = [part for part in shape if len(part) >= 6]  # the others are no masks
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
