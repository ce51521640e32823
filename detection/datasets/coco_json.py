"""Reader of COCO's JSON format: {"images": [...], "annotations": [...], "categories": [...]}.

A file is parsed, repaired in memory (`repair`), and checked (`AnnotationFile`). The records equal
those of Detectron2's reader (detectron2/data/datasets/coco.py): boxes XYWH in pixels, category ids
contiguous in the order of the file's ids, keypoints moved by half a pixel, polygons of fewer than
three points left out.

Flaws of exporters that have only one possible correction are repaired and counted. A file that
contradicts itself otherwise is refused with the annotation's id. The file itself is never changed,
and the recorded hash is that of the file. COCO's and LVIS's published files need no repair.

Deviation: plain Detectron2 reads and evaluates such files unrepaired. pycocotools counts a match
with the object of id 0 as none, assigns objects to size ranges by the stored `area`, counts objects
that training leaves out, and compares with boxes beyond the border, which no detector outputs.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr  # short, for messages
from typing import Any, NoReturn, TypeGuard

from detection.datasets.base import XYWH_ABS, Record, Split
from detection.datasets.files import check_relative, read_json, require_files
from moco.common.errors import DataError

Json = dict[str, Any]

FARTHEST_PX = 10**6  # largest coordinate, and largest side of an image
LARGEST_ID = 2**53  # larger ids are not exact as floats, which some tools use
TABLES = ("images", "annotations", "categories")
MOST = 0.9  # share of the boxes that determines their format
_BEYOND_PX, _BEYOND_SHARE = 2.0, 0.1  # tolerated extent of a mask outside its box

# Key → text of a finding.
FINDINGS = {
    # Repaired, noted by trainings and the doctor.
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
    # Accepted, noted by trainings and the doctor.
    "empty": "boxes without area, left out in training",
    "twice": "annotations with the id of another one, which the minival files of 2014 contain",
    # Suspicious but possibly intended, reported by the doctor only.
    "copies": "objects with the image, category and box of another one, which no detector finds",
    "relative": "boxes that look relative (0 to 1), but COCO's format has pixels",
    "corners": "boxes beyond the image that look like [x1, y1, x2, y2], but COCO's format has "
    "[x, y, width, height]",
    "integers": "boxes of integers, which lose up to a pixel when training resizes them, as in "
    "Detectron2",
    "beyond": "masks that extend beyond their boxes",
}
_WHOLE = {
    "images": ("id", "height", "width"),
    "annotations": ("id", "image_id", "category_id", "iscrowd"),
    "categories": ("id",),
}


class FindingCounter:
    """Counts of findings in a file, by keys of `FINDINGS`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(
        self, key: str, row: Json | None = None, what: str = "annotation", number: int = 1
    ) -> None:
        """Count a finding `number` times; notes name the first `row` of each key, if given."""
        self.counts[key] += number
        if row is not None and key not in self._first:
            self._first[key] = f" (the first: {what} {row.get('id')!r:.40})"

    def notes(self) -> tuple[str, ...]:
        """Format one note per key: its text, its count, and the first row."""
        return tuple(
            f"{text}: {self.counts[key]}{self._first.get(key, '')}"
            for key, text in FINDINGS.items()
            if self.counts[key]
        )


@dataclass(frozen=True)
class Annotations:
    """Repaired content of a file.

    Attributes:
        content: Content; equal to the file's if nothing was repaired.
        notes: One note per kind of repair, with its number and the first annotation.
        file_ids: The annotations' ids in the file, in order; empty if they are unchanged.
        shapeless: Number of objects that lost all of their polygons.
        sha256: SHA-256 of the file on disk, in hex.
    """

    content: Any
    notes: tuple[str, ...] = ()
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
    return replace(repair(content), sha256=sha256)


def repair(content: Json) -> Annotations:
    """Return a repaired copy of the decoded content of a file with three lists of objects."""
    found = FindingCounter()
    tables = {kind: [_repair_numbers(row, kind, found) for row in content[kind]] for kind in TABLES}
    images = {i["id"]: i for i in tables["images"] if type(i.get("id")) is int}
    # LVIS has only polygons of three or more points, and no crowds.
    lvis = any("neg_category_ids" in image for image in tables["images"])
    rows: list[Json] = []
    for row in tables["annotations"]:
        image = images.get(image_id) if type(image_id := row.get("image_id")) is int else None
        changes = {} if lvis else _repair_polygons(row, found)
        if not lvis and row.get("iscrowd") is None:
            found.add("iscrowd", row)
            changes["iscrowd"] = 0
        if image is not None and _has_size(image) and _is_box(row.get("bbox")):
            changes |= _repair_box({**row, **changes}, image, found)
        changes |= _repair_num_keypoints(row, found)
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
    return Annotations(
        {**content, **tables, "annotations": rows} if found.counts else content,
        found.notes(),
        tuple(ids) if numbered else (),
        found.counts["shapeless"],
    )


def _without_dummy(categories: list[Json], rows: list[Json], found: FindingCounter) -> list[Json]:
    """Return the categories without the one by which Roboflow groups all others."""
    roots = [row for row in categories if row.get("supercategory") == "none"]
    if len(roots) != 1 or len(categories) == 1 or roots[0].get("id") != 0:
        return categories
    if any(row.get("category_id") == 0 for row in rows):
        return categories
    found.add("dummy", roots[0], "category")
    return [row for row in categories if row is not roots[0]]


def are_finite(numbers: Sequence[Any]) -> bool:
    """Return whether all values are finite numbers within the range of a float."""
    # A sum is the fastest check, and a dataset has tens of millions of numbers.
    try:
        return math.isfinite(sum(numbers))
    except (TypeError, OverflowError):
        return False


def are_coordinates(numbers: Sequence[Any], farthest_px: int = FARTHEST_PX) -> bool:
    """Return whether all values are finite numbers of at most `farthest_px`."""
    return are_finite(numbers) and (
        not numbers or (max(numbers) <= farthest_px and min(numbers) >= -farthest_px)
    )


def farthest_polygon_px(image: Json) -> int:
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


def _repair_numbers(row: Json, kind: str, found: FindingCounter) -> Json:
    """Return a row whose ids, sizes and flags are integers where possible."""
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


def _repair_polygons(row: Json, found: FindingCounter) -> Json:
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


def _is_box(box: Any) -> TypeGuard[list[float]]:
    """Return whether a value is a list of four numbers that could be coordinates."""
    return (
        isinstance(box, list)
        and len(box) == 4
        and are_coordinates(box)
        and not any(isinstance(side, bool) for side in box)
    )


def _has_size(image: Json) -> bool:
    sides = [image.get("width"), image.get("height")]
    return all(type(side) is int and 0 < side <= FARTHEST_PX for side in sides)


def _repair_box(row: Json, image: Json, found: FindingCounter) -> Json:
    """Return the changes to a box and its area."""
    changes: Json = {}
    x, y, w, h = row["bbox"]
    if w < 0 or h < 0:
        return changes
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
    area = _plausible_area(stated, w, h, row, image)
    if area is not stated:
        # Deviation: Detectron2's metric takes the area, of whatever size and sign, as it is.
        found.add("area", row)
        changes["area"] = area
    return changes


def _plausible_area(stated: Any, w: float, h: float, row: Json, image: Json) -> Any:
    """Return the `stated` area if it is plausible, else the area of the mask or box.

    An area is plausible from a tenth of the mask (or box) up to the size of the box (or 1.1 times
    the mask).
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
    return type(value) in (int, float) and are_finite([value])


def _mask_area(shape: Any, image: Json) -> float:
    """Count the pixels of polygons or run lengths; return 0 without a valid mask."""
    size = [image["height"], image["width"]]
    if not shape:
        return 0.0
    if isinstance(shape, dict):
        runs = run_lengths(shape.get("counts"))
        valid = shape.get("size") == size and runs is not None and sum(runs) == math.prod(size)
        return float(sum(runs[1::2])) if runs and valid else 0.0
    farthest = farthest_polygon_px(image)
    if not isinstance(shape, list) or not all(
        isinstance(part, list) and are_coordinates(part, farthest) for part in shape
    ):
        return 0.0
    import pycocotools.mask  # here, because few objects need it

    codes = pycocotools.mask.frPyObjects(shape, *size)
    return float(pycocotools.mask.area(pycocotools.mask.merge(codes)))


def _repair_num_keypoints(row: Json, found: FindingCounter) -> Json:
    points = row.get("keypoints")
    if not isinstance(points, list) or not points or len(points) % 3 or not are_finite(points):
        return {}
    number = sum(visible > 0 for visible in points[2::3])
    if type(stated := row.get("num_keypoints")) is int and stated == number:
        return {}
    found.add("num_keypoints", row)
    return {"num_keypoints": number}


def suspicious(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes on suspicious contents, which only the user can correct.

    Args:
        content: Decoded content of a file that `AnnotationFile` can read, not repaired.
    """
    found, rows = FindingCounter(), content["annotations"]
    sizes = {
        as_integer(i["id"]): (as_integer(i["width"]) or 0, as_integer(i["height"]) or 0)
        for i in content["images"]
    }
    seen: set[tuple[Any, ...]] = set()
    relative, beyond, corners = [], [], 0
    for row in rows:
        x, y, w, h = row["bbox"]
        key = (row["image_id"], row["category_id"], x, y, w, h)
        if key in seen:
            found.add("copies", row)
        seen.add(key)
        width, height = sizes[as_integer(row["image_id"])]
        fits = x < w <= width + 1 and y < h <= height + 1
        corners += fits
        if fits and (x + w > width + 1 or y + h > height + 1):
            beyond.append(row)
        if max(x, y, w, h) <= 1:
            relative.append(row)
        if all(type(value) is int for value in row["bbox"]):
            found.add("integers", row)
        if _mask_elsewhere(row):
            found.add("beyond", row)
    if len(relative) >= MOST * len(rows):
        for row in relative:
            found.add("relative", row)
    elif corners >= MOST * len(rows):
        for row in beyond:
            found.add("corners", row)
    return found.notes()


def _mask_elsewhere(row: Json) -> bool:
    x, y, w, h = row["bbox"]
    shape = row.get("segmentation")
    if isinstance(shape, list):
        polygons = [part for part in shape if len(part) >= 6]  # repairs leave out shorter ones
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


class AnnotationFile:
    """Validated images, annotations and categories of a file; ids are unique.

    Attributes:
        path: Path of the file.
        images: Images by id, in the order of the ids; each has `height` and `width` > 0, and a file
            name inside the root.
        categories: Categories in the order of their ids.
        contiguous: Category id → index in `categories`.
        annotations: Annotations by image id, in the order of the file.
        file_name: (image, start of errors) → the image's path below the root.

    Raises:
        DataError: If anything is missing, duplicated, or of the wrong type.
    """

    def __init__(
        self,
        path: str,
        *,
        file_name: Callable[[Json, str], Any] = lambda image, where: image.get("file_name", ""),
        tolerant: bool = False,
    ) -> None:
        """Read the file.

        Args:
            path: Path of the file.
            file_name: (image, start of errors) → the image's path below the root.
            tolerant: Count annotations with equal ids instead of refusing them.
        """
        self.path, self.file_name = path, file_name
        self._found = FindingCounter()
        self._file = read_annotations(path)
        content = self._file.content
        for key in ("images", "categories"):
            if not content[key]:
                raise DataError(f"{path}: has no {key}")
        categories = self._by_id(content["categories"], "category")
        for category_id, category in categories.items():
            if not isinstance(category.get("name"), str):
                raise DataError(
                    f"{path}: category {category_id}: 'name' is missing or not a string"
                )
        self._refuse_equal_names(categories)
        self.categories = list(categories.values())
        self.contiguous = {category_id: index for index, category_id in enumerate(categories)}
        self.images = self._by_id(content["images"], "image")
        for image_id, image in self.images.items():
            where = f"{path}: image {image_id}: "
            for key in ("height", "width"):
                value = image.get(key)
                if type(value) is not int or not 0 < value <= FARTHEST_PX:
                    expected = f"an integer from 1 to {FARTHEST_PX}"
                    raise DataError(f"{where}{key} is {repr(value)}, expected {expected}")
            check_relative(file_name(image, where + "file_name"), where + "file_name")
        self.annotations = self._by_image(content["annotations"], tolerant)

    def _by_id(self, rows: Iterable[Json], what: str) -> dict[int, Json]:
        table: dict[int, Json] = {}
        for row in rows:
            key = row.get("id")
            if type(key) is not int or not 0 <= key <= LARGEST_ID:
                expected = f"expected an integer from 0 to {LARGEST_ID}"
                raise DataError(f"{self.path}: {what} with id {repr(key)}, {expected}")
            if key in table:
                raise DataError(f"{self.path}: {what} {key}: two rows have this id")
            table[key] = row
        return dict(sorted(table.items()))

    def _refuse_equal_names(self, categories: Mapping[int, Json]) -> None:
        """Raise DataError for categories of equal names, which per-class metrics would merge."""
        seen: dict[str, int] = {}
        for category_id, category in categories.items():
            other = seen.setdefault(category["name"], category_id)
            if other != category_id:
                raise DataError(
                    f"{self.path}: categories {other} and {category_id} are both named "
                    f"{repr(category['name'])}; rename one of them, or give both one id"
                )

    def _by_image(self, annotations: Iterable[Json], tolerant: bool) -> dict[int, list[Json]]:
        seen: set[int] = set()
        groups: dict[int, list[Json]] = {}
        for annotation in annotations:
            annotation_id = annotation.get("id")
            if type(annotation_id) is not int:
                raise DataError(f"{self.path}: an annotation has no integer id")
            if abs(annotation_id) > LARGEST_ID:
                self.refuse(annotation, f"the id is above {LARGEST_ID}")
            for key, known in (("image_id", self.images), ("category_id", self.contiguous)):
                value = annotation.get(key)
                if not isinstance(value, int) or value not in known:
                    self.refuse(annotation, f"{key} {repr(value)} is not in the file")
            if annotation_id in seen:
                if not tolerant:
                    self.refuse(annotation, "two annotations have this id")
                self._found.add("twice")
            seen.add(annotation_id)
            groups.setdefault(annotation["image_id"], []).append(annotation)
        return groups

    def refuse(self, annotation: Json, reason: str) -> NoReturn:
        """Raise DataError with the annotation's id in the file."""
        number = repr(self._file.file_id(annotation))
        raise DataError(f"{self.path}: annotation {number}: {reason}")

    def split(
        self,
        name: str,
        evaluator_type: str,
        classes: Sequence[str],
        root: str,
        missing: str,
        metadata: Json,
        *,
        keys: Sequence[str],
        image_keys: Sequence[str] = (),
    ) -> Split:
        """Build the split, with Detectron2's records and metadata; all image files must exist.

        Args:
            name: Name of the split.
            evaluator_type: See `Split`.
            classes: Class names by contiguous id.
            root: Folder of the images.
            missing: Hint of the error about missing images.
            metadata: Metadata in addition to that of every file in this format.
            keys: Keys of annotations that are copied unchanged.
            image_keys: Keys of images that are copied unchanged.
        """
        num_keypoints = len(metadata.get("keypoint_names", ()))
        records: list[Record] = [
            {
                "file_name": os.path.join(root, self.file_name(image, "")),
                "height": image["height"],
                "width": image["width"],
                **{key: image.get(key, []) for key in image_keys},
                "image_id": image_id,
                "annotations": self._objects(image_id, keys, num_keypoints),
            }
            for image_id, image in self.images.items()
        ]
        images = [record["file_name"] for record in records]
        require_files(images, f"images that {self.path} lists", missing)
        objects = [obj for record in records for obj in record["annotations"]]
        unmasked = sum(not obj.get("segmentation") for obj in objects)
        return Split(
            name=name,
            evaluator_type=evaluator_type,
            classes=tuple(classes),
            records=tuple(records),
            annotations_sha256=self._file.sha256,
            notes=(*self._file.notes, *self._found.notes()),
            metadata={
                "json_file": self.path,
                "image_root": root,
                "thing_classes": list(classes),
                "thing_dataset_id_to_contiguous_id": self.contiguous,
                **metadata,
            },
            has_masks=unmasked < len(objects) and unmasked == self._file.shapeless,
            has_keypoints=(
                bool(objects and num_keypoints) and all(obj.get("keypoints") for obj in objects)
            ),
        )

    def has_keypoints(self) -> bool:
        """Return whether an object has keypoints."""
        return any(row.get("keypoints") for rows in self.annotations.values() for row in rows)

    def _objects(self, image_id: int, keys: Sequence[str], num_keypoints: int) -> list[Json]:
        """Return the annotations of one image as Detectron2's dicts."""
        image = self.images[image_id]
        rows = []
        for annotation in self.annotations.get(image_id, ()):
            self._check_box(annotation, image)
            self._check_flags(annotation)
            row = {key: annotation[key] for key in keys if key in annotation}
            shape = annotation.get("segmentation")
            if shape:
                convert = self._mask if isinstance(shape, dict) else self._polygons
                row["segmentation"] = convert(annotation, shape, image)
            if annotation.get("keypoints"):
                row["keypoints"] = self._keypoints(annotation, num_keypoints)
            row["bbox_mode"] = XYWH_ABS
            row["category_id"] = self.contiguous[annotation["category_id"]]
            rows.append(row)
        return rows

    def _check_box(self, annotation: Json, image: Json) -> None:
        """Check that a box, XYWH in pixels, overlaps the image; count boxes without area."""
        box = annotation.get("bbox")
        if not _is_box(box):
            expected = f"[x, y, width, height] of finite numbers up to {FARTHEST_PX}"
            self.refuse(annotation, f"bbox is {repr(box)}, expected {expected}")
        x, y, w, h = box
        if w < 0 or h < 0:
            self.refuse(annotation, f"bbox {box} is inverted: width and height are below 0")
        width, height = image["width"], image["height"]
        if w == 0 or h == 0:
            self._found.add("empty")
        elif x >= width or y >= height or x + w <= 0 or y + h <= 0:
            self.refuse(annotation, f"bbox {box} is outside the {width}x{height} image")

    def _check_flags(self, annotation: Json) -> None:
        if annotation.get("iscrowd", 0) not in (0, 1):
            self.refuse(annotation, f"iscrowd is {repr(annotation['iscrowd'])}, expected 0 or 1")
        if annotation.get("ignore"):
            self.refuse(annotation, "'ignore' is not supported; remove it or set it 0")

    def _numbers(self, annotation: Json, numbers: Any, what: str) -> list[Any]:
        if not isinstance(numbers, list) or not are_finite(numbers):
            self.refuse(annotation, f"{what} is not a list of finite numbers")
        return numbers

    def _coordinates(
        self, annotation: Json, numbers: Any, what: str, farthest_px: int = FARTHEST_PX
    ) -> list[Any]:
        if not are_coordinates(self._numbers(annotation, numbers, what), farthest_px):
            self.refuse(annotation, f"{what} has a coordinate beyond {farthest_px}")
        return numbers

    def _polygons(self, annotation: Json, polygons: Any, image: Json) -> list[list[float]]:
        if not isinstance(polygons, list):
            self.refuse(annotation, "segmentation is neither a list of polygons nor an RLE")
        for polygon in polygons:
            self._coordinates(annotation, polygon, "a polygon", farthest_polygon_px(image))
        return polygons

    def _mask(self, annotation: Json, rle: Json, image: Json) -> Json:
        """Check a run-length encoding, and compress it as Detectron2 does."""
        size, counts = rle.get("size"), rle.get("counts")
        wanted = [image["height"], image["width"]]
        if size != wanted:
            self.refuse(annotation, f"RLE size {repr(size)} is not that of its image, {wanted}")
        runs = run_lengths(counts)
        if runs is None:
            self.refuse(
                annotation, "RLE counts are neither a list of run lengths nor pycocotools' text"
            )
        if sum(runs) != math.prod(wanted):
            reason = f"RLE counts add up to {sum(runs)}, expected {math.prod(wanted)} pixels"
            self.refuse(annotation, reason)
        if isinstance(counts, str):
            return rle
        import pycocotools.mask  # here, because only crowds need it

        return pycocotools.mask.frPyObjects(rle, *wanted)

    def _keypoints(self, annotation: Json, number: int) -> list[float]:
        """Convert keypoints (x, y, v) from COCO's pixel indices to Detectron2's coordinates."""
        points = self._coordinates(annotation, annotation["keypoints"], "keypoints")
        number = number or len(points) // 3
        if len(points) != 3 * number or any(v not in (0, 1, 2) for v in points[2::3]):
            expected = f"{number} keypoints of (x, y, v), v = 0, 1 or 2"
            self.refuse(annotation, f"expected {expected}, got {len(points)} numbers")
        return [v if index % 3 == 2 else v + 0.5 for index, v in enumerate(points)]
