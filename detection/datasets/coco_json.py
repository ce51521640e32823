"""Files in COCO's JSON format: {"images": [...], "annotations": [...], "categories": [...]}.

The records equal those of Detectron2's reader (detectron2/data/datasets/coco.py): boxes XYWH in
pixels, category ids contiguous in the order of the file's ids, keypoints moved by half a pixel,
polygons of fewer than three points left out.

What exporters write otherwise is repaired before (detection/datasets/coco_repair.py). A file that
contradicts itself is refused with the annotation's id. Boxes without area are only counted: both
engines leave them out in training.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from reprlib import repr  # short, for messages
from typing import Any, NoReturn

from detection.datasets.base import XYWH_ABS, Record, Split
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
    "twice": "annotations with the id of another one, as known of the minival files of 2014",
}


class AnnotationFile:
    """The three lists of a file, each id once, with what every use of them needs.

    Attributes:
        images: by id, in the order of the ids; each has `height` and `width` > 0, and a file name
            inside the root.
        categories: in the order of their ids; `contiguous`: their id → index.
        annotations: by image id, in the order of the file.
        file_name: (image, where) → its path under the root.

    Raises:
        DataError: what is missing, twice, or of the wrong type.
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
            file_name: (image, where) → its path under the root.
            tolerant: an annotation twice is counted and not refused.
        """
        self.path, self.file_name = path, file_name
        self._found: Counter[str] = Counter()
        self._file = read_annotations(path)
        content = self._file.content
        for key in ("images", "categories"):
            if not content[key]:
                raise DataError(f"{path}: no {key} in it")
        categories = self._by_id(content["categories"], "category")
        for category_id, category in categories.items():
            if not isinstance(category.get("name"), str):
                raise DataError(f"{path}: category {category_id}: 'name' is missing or no text")
        self._refuse_equal_names(categories)
        self.categories = list(categories.values())
        self.contiguous = {category_id: index for index, category_id in enumerate(categories)}
        self.images = self._by_id(content["images"], "image")
        for image_id, image in self.images.items():
            where = f"{path}: image {image_id}: "
            for key in ("height", "width"):
                value = image.get(key)
                if type(value) is not int or not 0 < value <= FARTHEST_PX:
                    expected = f"a whole number of 1 to {FARTHEST_PX}"
                    raise DataError(f"{where}{key} is {repr(value)}, expected {expected}")
            inside(file_name(image, where + "file_name"), where + "file_name")
        self.annotations = self._by_image(content["annotations"], tolerant)

    def _by_id(self, rows: Iterable[Json], what: str) -> dict[int, Json]:
        table: dict[int, Json] = {}
        for row in rows:
            key = row.get("id")
            if type(key) is not int or not 0 <= key <= LARGEST_ID:
                expected = f"expected a number of 0 to {LARGEST_ID}"
                raise DataError(f"{self.path}: {what} with id {repr(key)}, {expected}")
            if key in table:
                raise DataError(f"{self.path}: {what} {key}: there are two with this id")
            table[key] = row
        return dict(sorted(table.items()))

    def _refuse_equal_names(self, categories: Mapping[int, Json]) -> None:
        """The table of results and the metrics of each class would show one of the two."""
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
                raise DataError(f"{self.path}: an annotation without a whole-number id")
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
        """Raise DataError with the annotation's id."""
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
        """The split of all images, whose files exist, with Detectron2's records and metadata.

        Args:
            root: of the images; missing: the end of the message where there is none.
            metadata: beyond what every file in this format has.
            keys: of annotations that are copied as they are; image_keys: of images.
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
            has_keypoints=bool(objects) and all(obj.get("keypoints") for obj in objects),
        )

    def _objects(self, image_id: int, keys: Sequence[str], num_keypoints: int) -> list[Json]:
        """One image's annotations as Detectron2's dicts."""
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
        """XYWH in pixels, at least in part inside; counts boxes without area."""
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
        """A run-length encoding, compressed as Detectron2 keeps it."""
        size, counts = rle.get("size"), rle.get("counts")
        wanted = [image["height"], image["width"]]
        if size != wanted:
            self.refuse(annotation, f"RLE size {repr(size)} is not that of its image, {wanted}")
        runs = run_lengths(counts)
        if runs is None:
            self.refuse(annotation, "RLE counts are no run lengths, as lists or pycocotools' texts")
        if sum(runs) != math.prod(wanted):
            reason = f"RLE counts add up to {sum(runs)}, expected {math.prod(wanted)} pixels"
            self.refuse(annotation, reason)
        if isinstance(counts, str):
            return rle
        import pycocotools.mask  # here, because only crowds need it

        return pycocotools.mask.frPyObjects(rle, *wanted)

    def _keypoints(self, annotation: Json, number: int) -> list[float]:
        """(x, y, v) each; COCO's are pixel indices, Detectron2's are coordinates."""
        points = self._coordinates(annotation, annotation["keypoints"], "keypoints")
        number = number or len(points) // 3
        if len(points) != 3 * number or any(v not in (0, 1, 2) for v in points[2::3]):
            expected = f"{number} keypoints of (x, y, v), v = 0, 1 or 2"
            self.refuse(annotation, f"expected {expected}, got {len(points)} numbers")
        return [v if index % 3 == 2 else v + 0.5 for index, v in enumerate(points)]


def masks_in_run_lengths(split: Split) -> int:
    """Return how many masks that a training learns from are run lengths, not polygons."""
    return sum(_in_run_lengths(item) for one in split.records for item in one["annotations"])


def require_polygons(split: Split) -> None:
    """Every mask that INPUT.MASK_FORMAT polygon would learn from is one; a crowd's never is.

    Raises:
        DataError: how many are run lengths, and the first annotation in the file.
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
    """Of a file's annotation or of a record's; no crowd."""
    return isinstance(annotation.get("segmentation"), dict) and not annotation.get("iscrowd", 0)


def _all_numbers(values: Sequence[Any]) -> bool:
    return within(values) and not any(isinstance(value, bool) for value in values)
