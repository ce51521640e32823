"""Reader of COCO's JSON format: {"images": [...], "annotations": [...], "categories": [...]}.

The records equal those of Detectron2's reader (detectron2/data/datasets/coco.py): boxes XYWH in
pixels, category ids contiguous in the order of the file's ids, keypoints moved by half a pixel,
polygons of fewer than three points left out.

Common flaws of exporters are repaired before (detection/datasets/coco_repair.py). A file that
contradicts itself is refused with the annotation's id. Boxes without area are only counted: both
engines leave them out in training.
"""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from reprlib import repr  # short, for messages
from typing import Any, NoReturn

from detection.datasets.base import XYWH_ABS, XYXY_ABS, Record, Split
from detection.datasets.coco_repair import (
    FARTHEST_PX,
    LARGEST_ID,
    farthest_of_polygons,
    finite,
    read_annotations,
    run_lengths,
    within,
)
from detection.datasets.layout import inside, require_files
from moco.common.errors import DataError

Json = dict[str, Any]

_NOTES = {
    "empty": "boxes without area, left out in training",
    "twice": "annotations with the id of another one, which the minival files of 2014 contain",
}


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
        self._found: Counter[str] = Counter()
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
            inside(file_name(image, where + "file_name"), where + "file_name")
        self.annotations = self._by_image(content["annotations"], tolerant)

    def _by_id(self, rows: Iterable[Json], what: str) -> dict[int, Json]:
        table: dict[int, Json] = {}
        for row in rows:
            key = row.get("id")
            if type(key) is not int or not 0 <= key <= LARGEST_ID:
                expected = f"expected an integer from 0 to {LARGEST_ID}"
                raise DataError(f"{self.path}: {what} with id {repr(key)}, {expected}")
            if key in table:
                raise DataError(f"{self.path}: {what} {key}: there are two with this id")
            table[key] = row
        return dict(sorted(table.items()))

    def _refuse_equal_names(self, categories: Mapping[int, Json]) -> None:
        """Raise DataError for equal names of categories, since per-class metrics would show one."""
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
                    self.refuse(annotation, "there are two with this id")
                self._found["twice"] += 1
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
            notes=(
                *self._file.notes,
                *(f"{_NOTES[key]}: {self._found[key]}" for key in _NOTES if self._found[key]),
            ),
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
        if not isinstance(box, list) or len(box) != 4 or not _all_numbers(box):
            expected = f"[x, y, width, height] of finite numbers up to {FARTHEST_PX}"
            self.refuse(annotation, f"bbox is {repr(box)}, expected {expected}")
        x, y, w, h = box
        if w < 0 or h < 0:
            self.refuse(annotation, f"bbox {box} is inverted: width and height are below 0")
        width, height = image["width"], image["height"]
        if w == 0 or h == 0:
            self._found["empty"] += 1
        elif x >= width or y >= height or x + w <= 0 or y + h <= 0:
            self.refuse(annotation, f"bbox {box} is outside the {width}x{height} image")

    def _check_flags(self, annotation: Json) -> None:
        if annotation.get("iscrowd", 0) not in (0, 1):
            self.refuse(annotation, f"iscrowd is {repr(annotation['iscrowd'])}, expected 0 or 1")
        if annotation.get("ignore"):
            self.refuse(annotation, "'ignore' is not supported; remove it or set it 0")

    def _numbers(self, annotation: Json, numbers: Any, what: str) -> list[Any]:
        if not isinstance(numbers, list) or not finite(numbers):
            self.refuse(annotation, f"{what} is not a list of finite numbers")
        return numbers

    def _coordinates(
        self, annotation: Json, numbers: Any, what: str, farthest_px: int = FARTHEST_PX
    ) -> list[Any]:
        if not within(self._numbers(annotation, numbers, what), farthest_px):
            self.refuse(annotation, f"{what} has a coordinate beyond {farthest_px}")
        return numbers

    def _polygons(self, annotation: Json, polygons: Any, image: Json) -> list[list[float]]:
        if not isinstance(polygons, list):
            self.refuse(annotation, "segmentation is neither a list of polygons nor an RLE")
        for polygon in polygons:
            self._coordinates(annotation, polygon, "a polygon", farthest_of_polygons(image))
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


def with_coco_metric(split: Split) -> Split:
    """Return a split that COCO's metric evaluates; images and categories are numbered from 1.

    Objects that VOC's metric leaves out are marked as difficult, and count as the others.
    """
    records = []
    for number, record in enumerate(split.records, start=1):
        objects = record["annotations"]
        if split.truth is not None:
            marks = split.truth[record["image_id"]].difficult.tolist()
            objects = [
                {**item, "difficult": True} if mark else item
                for item, mark in zip(objects, marks, strict=True)
            ]
        records.append({**record, "image_id": number, "annotations": objects})
    return dataclasses.replace(
        split,
        evaluator_type="coco",
        records=tuple(records),
        metadata={
            "thing_classes": list(split.classes),
            "thing_dataset_id_to_contiguous_id": {i + 1: i for i in range(len(split.classes))},
        },
        truth=None,
    )


def annotations_of(split: Split) -> str | Json:
    """Return what COCO's metric reads: the path of the file, or content made of the records."""
    if "json_file" in split.metadata:
        return str(split.metadata["json_file"])
    categories = split.metadata["thing_dataset_id_to_contiguous_id"].items()
    ids = {index: category_id for category_id, index in categories}
    objects = [(record, item) for record in split.records for item in record["annotations"]]
    return {
        "images": [
            {
                "id": record["image_id"],
                # A package refuses a name that is not UTF-8, and none opens the file.
                "file_name": os.fsencode(record["file_name"]).decode("utf-8", "replace"),
                "height": record["height"],
                "width": record["width"],
            }
            for record in split.records
        ],
        "annotations": [
            {
                "id": number,
                "image_id": record["image_id"],
                "category_id": ids[item["category_id"]],
                "bbox": _xywh(item),
                "segmentation": item.get("segmentation", []),
                "iscrowd": item.get("iscrowd", 0),
            }
            for number, (record, item) in enumerate(objects, start=1)
        ],
        "categories": [{"id": ids[i], "name": name} for i, name in enumerate(split.classes)],
    }


def _xywh(item: Mapping[str, Any]) -> list[float]:
    left, top, right, bottom = box = list(item["bbox"])
    return [left, top, right - left, bottom - top] if item["bbox_mode"] == XYXY_ABS else box


def masks_in_run_lengths(split: Split) -> int:
    """Count the non-crowd masks that are run lengths instead of polygons."""
    return sum(_in_run_lengths(item) for one in split.records for item in one["annotations"])


def require_polygons(split: Split) -> None:
    """Check that all non-crowd masks are polygons, as INPUT.MASK_FORMAT polygon requires.

    Raises:
        DataError: If masks are run lengths; has their number and the first annotation.
    """
    if not (number := masks_in_run_lengths(split)):
        return
    file = split.metadata["json_file"]
    annotations = read_annotations(file)
    rows = annotations.content["annotations"]
    first = next(annotations.file_id(row) for row in rows if _in_run_lengths(row))
    raise DataError(
        f"{file}: masks in run lengths, not in polygons: {number}, the first of annotation "
        f"{first}; set INPUT.MASK_FORMAT bitmask"
    )


def _in_run_lengths(annotation: Mapping[str, Any]) -> bool:
    """Return whether an annotation (of a file or a record) is a non-crowd mask in run lengths."""
    return isinstance(annotation.get("segmentation"), dict) and not annotation.get("iscrowd", 0)


def _all_numbers(values: Sequence[Any]) -> bool:
    return within(values) and not any(isinstance(value, bool) for value in values)
