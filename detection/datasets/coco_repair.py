"""In-memory repair of COCO files with the common flaws of exporters, shared by all readers.

Flaws with only one possible correction are repaired and counted. Others remain, and
`AnnotationFile` (detection/datasets/coco_json.py) refuses them. The file itself is never changed,
and the recorded hash is that of the file. COCO's and LVIS's published files need no repair.

Deviation: plain Detectron2 reads and evaluates such files unrepaired. pycocotools counts a match
with the object of id 0 as none, assigns objects to size ranges by the stored `area`, counts objects
that training leaves out, and compares with boxes beyond the border, which no detector outputs.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from detection.datasets.layout import read_json
from moco.common.errors import DataError
from moco.common.files import open_file

Json = dict[str, Any]

FARTHEST_PX = 10**6  # largest coordinate, and largest side of an image
LARGEST_ID = 2**53  # larger ids are not exact as floats, which some tools use
TABLES = ("images", "annotations", "categories")

_NOTES = {
    "numbers": "ids, sizes or flags stored as text, float or boolean, read as integers",
    "ids": "annotation ids below 1, whose matches the metric would count as misses; all are "
    "numbered from 1 in memory",
    "dummy": "category 0 of supercategory none, which groups the others in files from Roboflow and "
    "has no object, left out",
    "iscrowd": "objects without iscrowd, read as 0",
    "border": "boxes over the border, clipped",
    "area": "areas that are missing, not above 0, or contradict the mask or box, computed from it",
    "num_keypoints": "num_keypoints that are missing or contradict the keypoints, recounted",
    "polygons": "polygons of fewer than 3 points or an odd number of coordinates, left out",
    "shapeless": "objects without any other polygon, whose boxes count, and which training and "
    "test of masks leave out",
}
_WHOLE = {
    "images": ("id", "height", "width"),
    "annotations": ("id", "image_id", "category_id", "iscrowd"),
    "categories": ("id",),
}
# Keys that the metrics' packages need, which are the keys of a temporary file.
_NEEDED = {
    "images": (
        "id",
        "file_name",
        "height",
        "width",
        "neg_category_ids",
        "not_exhaustive_category_ids",
    ),
    "annotations": (
        "id",
        "image_id",
        "category_id",
        "bbox",
        "area",
        "iscrowd",
        "segmentation",
        "keypoints",
        "num_keypoints",
    ),
    "categories": ("id", "name", "frequency", "keypoints"),
}
# Keys whose types hotcoco requires, although no metric uses them.
_TEXTS = ("coco_url", "flickr_url", "date_captured", "supercategory", "name", "url", "frequency")
_INFO_TEXTS = ("description", "url", "version", "contributor", "date_created")


@dataclass(frozen=True)
class Annotations:
    """Repaired content of a file.

    Attributes:
        content: Content; equal to the file's if nothing was repaired.
        notes: What was repaired, with the number and the first one.
        changed: True if the metrics' packages must not read the file itself.
        file_ids: The annotations' ids in the file, in order; empty if they are unchanged.
        shapeless: Number of objects that lost all of their polygons.
        sha256: SHA-256 of the file on disk, in hex.
    """

    content: Any
    notes: tuple[str, ...] = ()
    changed: bool = False
    file_ids: tuple[int, ...] = ()
    shapeless: int = 0
    sha256: str = ""

    def file_id(self, annotation: Json) -> Any:
        """Return the id of an annotation in the file."""
        return self.file_ids[annotation["id"] - 1] if self.file_ids else annotation["id"]


def read_annotations(path: str | Path) -> Annotations:
    """Read and repair a file.

    Raises:
        DataError: If the file cannot be read, is not JSON, or lacks one of the three lists.
    """
    content, sha256 = read_json(path)
    if not isinstance(content, dict):
        lists = f"expected an object with lists {', '.join(TABLES)}"
        if content is None:  # rf100vl's clean-up does so, run a second time
            raise DataError(f"{path}: holds null, {lists}; a loader overwrote it: get it again")
        raise DataError(f"{path}: holds a {type(content).__name__}, {lists}")
    for key in TABLES:
        rows = content.get(key)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise DataError(f"{path}: {key!r}: expected a list of objects, as COCO has it")
    found = repair(content)
    with open_file(path) as file:
        # The metrics' packages fail on a byte order mark, and on other encodings than UTF-8.
        marked = file.read(1) not in (b"{", b" ", b"\t", b"\r", b"\n")
    return replace(found, sha256=sha256, changed=found.changed or marked)


@contextmanager
def annotation_file(
    source: str | Json, images: frozenset[str] | None = None, *, masked: bool = False
) -> Iterator[tuple[str, dict[str, list[Json]]]]:
    """Yield the path of the annotations for a metric's package, and their content.

    This is the file itself or, if it was repaired, a part is requested, or there is only content, a
    temporary file with the keys that metrics read.

    Args:
        source: Path of the annotations, or their content.
        images: Ids of the images of a part; None for all.
        masked: Leave out objects without a mask, as `with_masks` does.
    """
    annotations = read_annotations(source) if isinstance(source, str) else repair(source)
    if isinstance(source, str) and images is None and not annotations.changed:
        yield source, annotations.content
        return
    content = {
        kind: [{key: row[key] for key in keys if key in row} for row in annotations.content[kind]]
        for kind, keys in _NEEDED.items()
    }
    for row in content["categories"]:
        if not _are_names(row.get("keypoints", [])):
            del row["keypoints"]
    if masked:
        content["annotations"] = [a for a in content["annotations"] if a.get("segmentation")]
    if images is not None:
        content["images"] = [i for i in content["images"] if str(i["id"]) in images]
        content["annotations"] = [a for a in content["annotations"] if str(a["image_id"]) in images]
    with TemporaryDirectory() as folder:
        temporary = Path(folder, "annotations.json")
        temporary.write_text(json.dumps({"info": {}, "licenses": [], **content}), encoding="utf-8")
        yield str(temporary), content


def repair(content: Json) -> Annotations:
    """Repair the decoded JSON of a file with three lists of objects; a pure function."""
    found = _Found()
    tables = {kind: [_with_numbers(row, kind, found) for row in content[kind]] for kind in TABLES}
    images = {i["id"]: i for i in tables["images"] if type(i.get("id")) is int}
    # LVIS has only polygons of three or more points, and no crowds.
    lvis = any("neg_category_ids" in image for image in tables["images"])
    rows: list[Json] = []
    for row in tables["annotations"]:
        image = images.get(image_id) if type(image_id := row.get("image_id")) is int else None
        changes = {} if lvis else _shape(row, found)
        if not lvis and row.get("iscrowd") is None:
            found.add("iscrowd", row)
            changes["iscrowd"] = 0
        if _is_box(row.get("bbox")) and image is not None and _has_size(image):
            changes |= _measures({**row, **changes}, image, found)
        changes |= _num_keypoints(row, found)
        rows.append({**row, **changes} if changes else row)
    ids: list[Any] = [row.get("id") for row in rows]
    low = [row for row in rows if type(row.get("id")) is int and row["id"] < 1]
    numbered = bool(low) and all(type(i) is int for i in ids) and len(set(ids)) == len(ids)
    if numbered:
        # Deviation: Detectron2's metric counts a match with the object of id 0 as a miss.
        for row in low:
            found.add("ids", row)
        rows = [{**row, "id": number} for number, row in enumerate(rows, start=1)]
    tables["categories"] = _without_dummy(tables["categories"], rows, found)
    changed = bool(found.counts)
    return Annotations(
        {**content, **tables, "annotations": rows} if changed else content,
        found.notes(),
        changed or not _plain(content),
        tuple(ids) if numbered else (),
        found.counts["shapeless"],
    )


def _without_dummy(categories: list[Json], rows: list[Json], found: "_Found") -> list[Json]:
    """Return the categories without Roboflow's, which is the only one at the root of the others."""
    roots = [row for row in categories if row.get("supercategory") == "none"]
    if len(roots) != 1 or len(categories) == 1 or roots[0].get("id") != 0:
        return categories
    if any(row.get("category_id") == 0 for row in rows):
        return categories
    found.add("dummy", roots[0], "category")
    return [row for row in categories if row is not roots[0]]


class _Found:
    """Counts of the repairs."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, key: str, row: Json, what: str = "annotation", number: int = 1) -> None:
        """Count repairs of a row; `key` is one of `_NOTES`."""
        self.counts[key] += number
        if key not in self._first:
            self._first[key] = f"{what} {row.get('id')!r:.40}"

    def notes(self) -> tuple[str, ...]:
        """Format a note on each kind of repair, with the first row."""
        return tuple(
            f"{text}: {self.counts[key]} (the first: {self._first[key]})"
            for key, text in _NOTES.items()
            if self.counts[key]
        )


def finite(numbers: Sequence[Any]) -> bool:
    """Return whether all are numbers, none of them infinite, NaN, or beyond a float's range."""
    # A sum is the fastest check, and a dataset has tens of millions of numbers.
    try:
        return math.isfinite(sum(numbers))
    except (TypeError, OverflowError):
        return False


def within(numbers: Sequence[Any], farthest_px: int = FARTHEST_PX) -> bool:
    """Return whether all are finite and could be coordinates of an image."""
    return finite(numbers) and (
        not numbers or (max(numbers) <= farthest_px and min(numbers) >= -farthest_px)
    )


def farthest_of_polygons(image: Json) -> int:
    """Return the largest coordinate of a polygon.

    pycocotools allocates memory for every pixel along an edge, also outside the image, and above
    2^31 pixels it writes out of bounds.
    """
    return 4 * max(image["width"], image["height"])


def run_lengths(counts: Any) -> list[int] | None:
    """Return a mask's run lengths, decoded if they are compressed; None if they are invalid.

    The compressed form is that of rleFrString in pycocotools' maskApi.c, which accepts any text:
    each character has 6 bits, the lower 5 of which belong to a number; from the third number on
    (counting from 0), the difference to the one two before is stored.
    """
    if isinstance(counts, list):
        return counts if all(type(run) is int and run >= 0 for run in counts) else None
    if not isinstance(counts, str) or not counts:
        return None
    runs: list[int] = []
    number = shift = 0
    for char in counts:
        code = ord(char) - 48
        if not 0 <= code < 64 or shift > 30:
            return None
        number |= (code & 31) << shift
        shift += 5
        if code & 32:
            continue
        if code & 16:
            number -= 1 << shift
        runs.append(number + runs[-2] if len(runs) > 2 else number)
        number = shift = 0
    return runs if not shift and min(runs) >= 0 else None


def as_integer(value: Any) -> int | None:
    """Convert a number or text of digits to an integer; None if it is not an integer."""
    if type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and value.isascii():
        return int(value) if len(value) < 20 else None
    return None


def _with_numbers(row: Json, kind: str, found: _Found) -> Json:
    """Return the row with ids, sizes and flags converted to integers where possible."""
    changes = {}
    for key in _WHOLE[kind]:
        value = row.get(key)
        if type(value) is int or value is None:
            continue
        number = int(value) if key == "iscrowd" and isinstance(value, bool) else as_integer(value)
        if number is not None:
            changes[key] = number
    if not changes:
        return row
    what = {"images": "image", "annotations": "annotation", "categories": "category"}[kind]
    found.add("numbers", row, what, len(changes))
    return {**row, **changes}


def _is_polygon(part: list[Any]) -> bool:
    return len(part) % 2 == 0 and len(part) >= 6


def _shape(row: Json, found: _Found) -> Json:
    """Return the changes to an object's polygons."""
    shape = row.get("segmentation")
    if not shape:
        return {} if shape is None or shape == [] else {"segmentation": []}
    if not isinstance(shape, list) or not all(isinstance(part, list) for part in shape):
        return {}
    kept = [part for part in shape if _is_polygon(part)]
    if len(kept) == len(shape):
        return {}
    # Deviation: Detectron2 leaves an object without a polygon out of training only, also where
    # boxes alone are learned, and its metric fails on masks.
    if kept:
        found.add("polygons", row, number=len(shape) - len(kept))
    else:
        found.add("shapeless", row)
    return {"segmentation": kept}


def _is_box(box: Any) -> bool:
    return (
        isinstance(box, list)
        and len(box) == 4
        and not any(isinstance(side, bool) for side in box)
        and within(box)
        and min(box[2:]) >= 0
    )


def _has_size(image: Json) -> bool:
    sides = [image.get("width"), image.get("height")]
    return all(type(side) is int and 0 < side <= FARTHEST_PX for side in sides)


def _measures(row: Json, image: Json, found: _Found) -> Json:
    """Return the changes to a box and its area."""
    changes: Json = {}
    x, y, w, h = row["bbox"]
    stated, own = row.get("area"), w * h
    width, height = image["width"], image["height"]
    over = min(x, y) < -1 or x + w > width + 1 or y + h > height + 1  # more than rounding
    if over and own and x < width and y < height and x + w > 0 and y + h > 0:
        # Deviation: Detectron2 trains on the clipped box, but compares with the whole one.
        found.add("border", row)
        left, top = max(x, 0), max(y, 0)
        w, h = min(x + w, width) - left, min(y + h, height) - top
        changes["bbox"] = [left, top, w, h]
        if not row.get("segmentation") and _is_number(stated) and abs(stated - own) <= own / 100:
            changes["area"] = stated = w * h  # the stated area was that of the box
    area = _area(stated, w, h, row, image)
    if area is not stated:
        # Deviation: Detectron2's metric takes the area, of whatever size and sign, as it is.
        found.add("area", row)
        changes["area"] = area
    return changes


def _area(stated: Any, w: float, h: float, row: Json, image: Json) -> Any:
    """Return the `stated` area if it is plausible, else that of the mask or box.

    It is plausible up to the size of the box (or 1.1 times the mask), and from a tenth of the mask
    (or box) on.
    """
    number, most = _is_number(stated), (w + 2) * (h + 2)
    if not w or not h:
        return stated if number and stated >= 0 else 0
    if number and w * h / 10 <= stated <= most:
        return stated
    mask = _mask_area(row.get("segmentation"), image)
    most = max(most, 1.1 * mask)
    if number and 0 < stated <= most and stated >= (mask or w * h) / 10:
        return stated
    return mask or w * h


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and finite([value])


def _mask_area(shape: Any, image: Json) -> float:
    """Count the pixels of polygons or run lengths; 0 for none and for invalid ones."""
    size = [image["height"], image["width"]]
    if not shape:
        return 0.0
    if isinstance(shape, dict):
        runs = run_lengths(shape.get("counts"))
        valid = shape.get("size") == size and runs is not None and sum(runs) == math.prod(size)
        return float(sum(runs[1::2])) if runs and valid else 0.0
    farthest = farthest_of_polygons(image)
    if not isinstance(shape, list) or not all(
        isinstance(part, list) and within(part, farthest) for part in shape
    ):
        return 0.0
    import pycocotools.mask  # here, because few objects need it

    codes = pycocotools.mask.frPyObjects(shape, *size)
    return float(pycocotools.mask.area(pycocotools.mask.merge(codes)))


def _num_keypoints(row: Json, found: _Found) -> Json:
    points = row.get("keypoints")
    if not isinstance(points, list) or not points or len(points) % 3 or not finite(points):
        return {}
    number = sum(visible > 0 for visible in points[2::3])
    if type(stated := row.get("num_keypoints")) is int and stated == number:
        return {}
    found.add("num_keypoints", row)
    return {"num_keypoints": number}


def _plain(content: Json) -> bool:
    """Return whether a package that checks the types of all keys can read the file itself."""
    info, licenses = content.get("info") or {}, content.get("licenses", [])
    if not isinstance(info, dict) or not isinstance(licenses, list):
        return False
    if type(info.get("year", 0)) is not int or not 0 <= info.get("year", 0) < 2**31:
        return False
    rows = [*licenses, *content["images"], *content["categories"]]
    return (
        all(isinstance(info.get(key, ""), str) for key in _INFO_TEXTS)
        and all(isinstance(row, dict) and _plain_row(row) for row in rows)
        and all(type(row.get("id", 0)) is int for row in licenses)
        and not any({"score", "obb"} & row.keys() for row in content["annotations"])
    )


def _plain_row(row: Json) -> bool:
    number, lines = row.get("license", 0), row.get("skeleton", [])
    return (
        type(number) is int
        and number >= 0
        and all(isinstance(row[key], str) for key in _TEXTS if key in row)
        and isinstance(lines, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in lines)
        and _are_names(row.get("keypoints", []))
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
