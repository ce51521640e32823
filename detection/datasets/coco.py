"""COCO's JSON format: instances, person keypoints, DensePose, and a dataset of the user's own.

    <json>          {"images": [...], "annotations": [...], "categories": [...]}
    <image root>/   the images, by the `file_name` of each image

The records equal those of Detectron2's reader (detectron2/data/datasets/coco.py): boxes XYWH in
pixels, category ids contiguous in the order of the file's ids, keypoints moved by half a pixel,
polygons of fewer than three points left out.

A file that contradicts itself is refused with the annotation's id. A box over the border or without
area is not an error: both engines clip the first and leave out the second, so they are counted.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from fvcore.common.config import CfgNode

from detection.datasets.base import Record, Split
from detection.datasets.layout import (
    DATASETS_VARIABLE,
    absent,
    alike,
    datasets_root,
    image_size,
    inside,
    read_json,
)
from moco.common.errors import DataError, UserError

Json = dict[str, Any]

XYWH_ABS = 1  # Detectron2's BoxMode

# (id, name) of the 80 categories that COCO annotates; the ids have gaps.
COCO_CATEGORIES = (
    (1, "person"), (2, "bicycle"), (3, "car"), (4, "motorcycle"), (5, "airplane"), (6, "bus"),
    (7, "train"), (8, "truck"), (9, "boat"), (10, "traffic light"), (11, "fire hydrant"),
    (13, "stop sign"), (14, "parking meter"), (15, "bench"), (16, "bird"), (17, "cat"), (18, "dog"),
    (19, "horse"), (20, "sheep"), (21, "cow"), (22, "elephant"), (23, "bear"), (24, "zebra"),
    (25, "giraffe"), (27, "backpack"), (28, "umbrella"), (31, "handbag"), (32, "tie"),
    (33, "suitcase"), (34, "frisbee"), (35, "skis"), (36, "snowboard"), (37, "sports ball"),
    (38, "kite"), (39, "baseball bat"), (40, "baseball glove"), (41, "skateboard"),
    (42, "surfboard"), (43, "tennis racket"), (44, "bottle"), (46, "wine glass"), (47, "cup"),
    (48, "fork"), (49, "knife"), (50, "spoon"), (51, "bowl"), (52, "banana"), (53, "apple"),
    (54, "sandwich"), (55, "orange"), (56, "broccoli"), (57, "carrot"), (58, "hot dog"),
    (59, "pizza"), (60, "donut"), (61, "cake"), (62, "chair"), (63, "couch"), (64, "potted plant"),
    (65, "bed"), (67, "dining table"), (70, "toilet"), (72, "tv"), (73, "laptop"), (74, "mouse"),
    (75, "remote"), (76, "keyboard"), (77, "cell phone"), (78, "microwave"), (79, "oven"),
    (80, "toaster"), (81, "sink"), (82, "refrigerator"), (84, "book"), (85, "clock"), (86, "vase"),
    (87, "scissors"), (88, "teddy bear"), (89, "hair drier"), (90, "toothbrush"),
)  # fmt: skip

_PERSON = ((1, "person"),)
_SIDES = ("eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
PERSON_KEYPOINTS = ("nose", *(f"{side}_{part}" for part in _SIDES for side in ("left", "right")))
# Keypoints that are exchanged when an image is flipped.
PERSON_FLIP_MAP = tuple((f"left_{part}", f"right_{part}") for part in _SIDES)
# Lines that a drawing has between keypoints, and their RGB colors.
PERSON_LINES = (
    ("left_ear", "left_eye", (102, 204, 255)),
    ("right_ear", "right_eye", (51, 153, 255)),
    ("left_eye", "nose", (102, 0, 204)),
    ("nose", "right_eye", (51, 102, 255)),
    ("left_shoulder", "right_shoulder", (255, 128, 0)),
    ("left_shoulder", "left_elbow", (153, 255, 204)),
    ("right_shoulder", "right_elbow", (128, 229, 255)),
    ("left_elbow", "left_wrist", (153, 255, 153)),
    ("right_elbow", "right_wrist", (102, 255, 224)),
    ("left_hip", "right_hip", (255, 102, 0)),
    ("left_hip", "left_knee", (255, 255, 77)),
    ("right_hip", "right_knee", (153, 255, 204)),
    ("left_knee", "left_ankle", (191, 255, 128)),
    ("right_knee", "right_ankle", (255, 195, 77)),
)

DENSEPOSE_KEYS = ("dp_masks", "dp_x", "dp_y", "dp_I", "dp_U", "dp_V")
_DENSEPOSE_FILES = "https://dl.fbaipublicfiles.com/densepose/data/"
_DENSEPOSE_ANNOTATIONS = "https://dl.fbaipublicfiles.com/densepose/annotations/coco/"


def _names() -> dict[str, tuple[str, str, str]]:
    """Detectron2's names (builtin.py and the DensePose project) → kind, images, annotations."""
    table = {}
    for kind, prefix, file, folds in (
        ("instances", "coco", "instances", ("2017_train", "2017_val", "2017_val_100")),
        ("keypoints", "keypoints_coco", "person_keypoints", ("2017_train", "2017_val",
                                                             "2017_val_100")),
        ("instances", "coco", "instances", ("2014_train", "2014_val", "2014_minival",
                                            "2014_valminusminival")),
        ("keypoints", "keypoints_coco", "person_keypoints", ("2014_train", "2014_val",
                                                             "2014_minival",
                                                             "2014_valminusminival")),
        ("densepose", "densepose_coco", "densepose", ("2014_train", "2014_minival",
                                                      "2014_minival_100", "2014_valminusminival")),
    ):  # fmt: skip
        for fold in folds:
            year, _, split = fold.partition("_")
            split, _, number = split.partition("_")
            images = f"{'train' if split == 'train' else 'val'}{year}"
            annotations = f"{file}_{split}{year}{'_' + number if number else ''}.json"
            table[f"{prefix}_{fold}"] = (
                kind,
                f"coco/{images}",
                f"coco/annotations/{annotations}",
            )
    return table


BUILTIN = _names()


@dataclass(frozen=True)
class COCOSource:
    """Where a split lies and how it is read.

    Attributes:
        name: as in DATASETS.TRAIN and TEST.
        json_file: the annotations.
        image_root: folder of the images; empty: looked for beside `json_file`.
        kind: instances, keypoints or densepose for Detectron2's own names, else own.
        role: TRAIN or TEST for a dataset of one's own, as in DATASETS.COCO_TRAIN_JSON.
    """

    name: str
    json_file: str
    image_root: str
    kind: str
    role: str = ""

    def present(self) -> bool:
        """Whether its annotations are there at all, right or wrong."""
        return os.path.isfile(self.json_file)

    def read(self) -> Split:
        """Read and check the whole split.

        Raises:
            DataError: anything that cannot be used; names file, annotation id, reason.
        """
        if not self.present():
            raise DataError(f"{self.name}: {self.json_file} is missing; {self.expected()}")
        content, sha256 = read_json(self.json_file)
        file = AnnotationFile(self.json_file, content)
        metadata = self._metadata(file)
        root = self.image_root or _find_images(self, file)
        # The minival files of 2014 hold some annotations twice, and Detectron2 lets them pass.
        tolerant = self.kind != "own" and "minival" in os.path.basename(self.json_file)
        found: Counter[str] = Counter()
        groups = file.annotations_by_image(tolerant, found)
        extra = DENSEPOSE_KEYS if self.kind == "densepose" else ()
        reader = _Reader(file, metadata, extra, found, measured=self.role == "TEST")
        records = [
            {
                "file_name": os.path.join(root, image["file_name"]),
                "height": image["height"],
                "width": image["width"],
                "image_id": image_id,
                "annotations": reader.objects(groups.get(image_id, ()), image),
            }
            for image_id, image in file.sorted_images()
        ]
        self._require_images(records)
        objects = [obj for record in records for obj in record["annotations"]]
        return Split(
            name=self.name,
            evaluator_type="densepose" if self.kind == "densepose" else "coco",
            classes=tuple(metadata["thing_classes"]),
            records=tuple(records),
            annotations_sha256=sha256,
            notes=count_notes(found),
            metadata={"json_file": self.json_file, "image_root": root, **metadata},
            has_masks=bool(objects) and all(obj.get("segmentation") for obj in objects),
            has_keypoints=bool(objects) and all(obj.get("keypoints") for obj in objects),
        )

    def expected(self) -> str:
        """What should be where, for the end of a message."""
        if self.kind == "own":
            return (
                f"set DATASETS.COCO_{self.role}_JSON to a file in COCO's format and "
                f"DATASETS.COCO_{self.role}_ROOT to the folder of its images"
            )
        annotations, images = (os.path.basename(p) for p in (self.json_file, self.image_root))
        where = "https://cocodataset.org/#download"
        if self.kind == "densepose":
            where = f"{_DENSEPOSE_ANNOTATIONS}{annotations} and {where}"
        return (
            f"expected coco/annotations/{annotations} and coco/{images}/*.jpg in "
            f"${DATASETS_VARIABLE} (now {datasets_root()}); get them from {where}, or set "
            "DATASETS.COCO_TRAIN_JSON and COCO_TEST_JSON to files of your own"
        )

    def _metadata(self, file: "AnnotationFile") -> Json:
        """What Detectron2 knows about the dataset once it is loaded."""
        if self.kind in ("instances", "keypoints"):
            wanted = COCO_CATEGORIES if self.kind == "instances" else _PERSON
            given = tuple((category["id"], category["name"]) for category in file.categories)
            if given != wanted:
                what = "COCO's 80" if self.kind == "instances" else "person alone"
                raise DataError(
                    f"{file.path}: the categories are not {what}; for a dataset of your own set "
                    "DATASETS.COCO_TRAIN_JSON and DATASETS.COCO_TEST_JSON"
                )
        metadata: Json = {
            "thing_classes": [category["name"] for category in file.categories],
            "thing_dataset_id_to_contiguous_id": {
                category["id"]: index for index, category in enumerate(file.categories)
            },
        }
        if self.kind == "keypoints":
            metadata |= {
                "keypoint_names": PERSON_KEYPOINTS,
                "keypoint_flip_map": PERSON_FLIP_MAP,
                "keypoint_connection_rules": list(PERSON_LINES),
            }
        elif self.kind == "own":
            metadata |= _own_keypoints(file)
        elif self.kind == "densepose":
            metadata |= {
                "categories": {category["id"]: category["name"] for category in file.categories},
                "densepose_transform_src": _DENSEPOSE_FILES + "UV_symmetry_transforms.mat",
                "densepose_smpl_subdiv": _DENSEPOSE_FILES + "SMPL_subdiv.mat",
                "densepose_smpl_subdiv_transform": _DENSEPOSE_FILES + "SMPL_SUBDIV_TRANSFORM.mat",
            }
        return metadata

    def _require_images(self, records: Sequence[Record]) -> None:
        require_images(records, self.json_file, self.expected())
        for record in records:
            # A JPEG never has more than 8 bits, and COCO's are too many to open.
            if not record["file_name"].lower().endswith((".jpg", ".jpeg")):
                image_size(record["file_name"])


def sources(cfg: CfgNode) -> dict[str, COCOSource]:
    """Detectron2's names and those of DATASETS.COCO_TRAIN_JSON and COCO_TEST_JSON."""
    root = datasets_root()
    table = {
        name: COCOSource(name, os.path.join(root, annotations), os.path.join(root, images), kind)
        for name, (kind, images, annotations) in BUILTIN.items()
    }
    own = _own_sources(cfg)
    if len({source.name for source in own.values()}) < len(
        {(source.json_file, source.image_root) for source in own.values()}
    ):
        raise UserError(
            f"DATASETS.COCO_TRAIN_JSON and DATASETS.COCO_TEST_JSON would both be named "
            f"{own['TRAIN'].name}; rename one of the files"
        )
    return table | {source.name: source for source in own.values()}


def custom_names(cfg: CfgNode) -> dict[str, str]:
    """{"TRAIN": name, "TEST": name} of a COCO-JSON of the user's own; only of those that are set.

    The name is `<folder of the file>_<file without ending>`.
    """
    return {role: source.name for role, source in _own_sources(cfg).items()}


def _own_sources(cfg: CfgNode) -> dict[str, COCOSource]:
    own = {}
    for role in ("TRAIN", "TEST"):
        file = cfg.DATASETS.get(f"COCO_{role}_JSON", "")
        root = cfg.DATASETS.get(f"COCO_{role}_ROOT", "")
        if file:
            own[role] = own_source(file, root, role)
        elif root:
            raise UserError(
                f"DATASETS.COCO_{role}_ROOT belongs to DATASETS.COCO_{role}_JSON; set both or none"
            )
    return own


def own_source(file: str, root: str, role: str) -> COCOSource:
    """Of a file of the user's own; `root` "": the images are near it."""
    path = Path(file).expanduser()
    name = f"{path.resolve().parent.name}_{path.stem}"
    return COCOSource(name, str(path), os.path.expanduser(root), "own", role)


class AnnotationFile:
    """The three lists of a file, each id once, with what every use of them needs.

    Attributes:
        images: by id; each has `height` and `width` > 0, and `file_name` inside the root.
        annotations: as they stand; each is an object.
        categories: in the order of their ids.

    Raises:
        DataError: what is missing, twice, or of the wrong type.
    """

    def __init__(
        self,
        path: str,
        content: Any,
        *,
        file_name: Callable[[Json, str], str] | None = None,
    ) -> None:
        """`file_name`: (image, where) → its path under the root; by default its file_name."""
        self.path = path
        if not isinstance(content, dict):
            raise DataError(f"{path}: expected an object, got {_kind(content)}")
        for key in ("images", "annotations", "categories"):
            if key not in content:
                raise DataError(f"{path}: {key!r} is missing; it is not COCO's instances format")
            rows = content[key]
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise DataError(f"{path}: {key!r}: expected a list of objects")
        if not content["images"]:
            raise DataError(f"{path}: no images in it")
        self.annotations: list[Json] = content["annotations"]
        categories = self._by_id(content["categories"], "category")
        for category_id, category in categories.items():
            if not isinstance(category.get("name"), str):
                raise DataError(f"{path}: category {category_id}: 'name' is missing or no text")
        if not categories:
            raise DataError(f"{path}: no categories in it, so no classes to learn")
        self.categories = [categories[key] for key in sorted(categories)]
        self.images = self._by_id(content["images"], "image")
        name = file_name or (lambda image, where: image.get("file_name", ""))
        for image_id, image in self.images.items():
            for key in ("height", "width"):
                value = image.get(key)
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise DataError(
                        f"{path}: image {image_id}: {key} is {_shown(value)}, expected a whole "
                        "number above 0"
                    )
            where = f"{path}: image {image_id}: file_name"
            inside(name(image, where), where)

    def sorted_images(self) -> list[tuple[int, Json]]:
        return sorted(self.images.items())

    def annotations_by_image(self, tolerant: bool, found: Counter[str]) -> dict[int, list[Json]]:
        """In the order of the file. `tolerant` counts in `found` what is there twice."""
        known = {category["id"] for category in self.categories}
        seen: set[int] = set()
        groups: dict[int, list[Json]] = {}
        for annotation in self.annotations:
            annotation_id = annotation.get("id")
            if not isinstance(annotation_id, int):
                raise DataError(f"{self.path}: an annotation without a whole-number id")
            image_id = annotation.get("image_id")
            if not isinstance(image_id, int) or image_id not in self.images:
                if tolerant:
                    found["orphans"] += 1
                    continue
                self.refuse(annotation, f"image {_shown(image_id)} is not in the file")
            if annotation_id in seen:
                if not tolerant:
                    self.refuse(annotation, "there are two with this id")
                found["twice"] += 1
            seen.add(annotation_id)
            category_id = annotation.get("category_id")
            if not isinstance(category_id, int) or category_id not in known:
                self.refuse(annotation, f"category {_shown(category_id)} is not in the file")
            groups.setdefault(image_id, []).append(annotation)
        return groups

    def refuse(self, annotation: Json, reason: str) -> NoReturn:
        raise DataError(f"{self.path}: annotation {annotation['id']}: {reason}")

    def check_box(self, annotation: Json, image: Json, found: Counter[str]) -> None:
        """XYWH in pixels, at least in part inside; counts boxes over the border, without area."""
        box = annotation.get("bbox")
        if not isinstance(box, list) or len(box) != 4:
            self.refuse(annotation, f"bbox is {_shown(box)}, expected [x, y, width, height]")
        if not _all_numbers(box):
            self.refuse(annotation, f"bbox {_shown(box)} is not of finite numbers")
        x, y, w, h = box
        if w < 0 or h < 0:
            self.refuse(annotation, f"bbox {box} is inverted: width and height must not be below 0")
        width, height = image["width"], image["height"]
        if w == 0 or h == 0:
            found["empty"] += 1
        elif x >= width or y >= height or x + w <= 0 or y + h <= 0:
            self.refuse(annotation, f"bbox {box} is outside the {width}x{height} image")
        elif min(x, y) < -1 or x + w > width + 1 or y + h > height + 1:  # not by rounding alone
            found["border"] += 1

    def check_numbers(self, annotation: Json, numbers: Any, what: str) -> None:
        """`numbers` is a list of finite numbers."""
        if not isinstance(numbers, list) or not _finite(numbers):
            self.refuse(annotation, f"{what} is not a list of finite numbers")

    def _by_id(self, rows: Iterable[Json], what: str) -> dict[int, Json]:
        table: dict[int, Json] = {}
        for row in rows:
            key = row.get("id")
            if not isinstance(key, int) or isinstance(key, bool):
                raise DataError(f"{self.path}: {what} with id {_shown(key)}, expected a number")
            if key in table:
                raise DataError(f"{self.path}: {what} {key}: there are two with this id")
            table[key] = row
        return table


_NOTES = {
    "border": "boxes over the border, clipped",
    "empty": "boxes without area, left out in training",
    "polygons": "polygons of fewer than 3 points or half a point, left out",
    "shapeless": "objects without another polygon, left out",
    "twice": "annotations with the id of another one, as known of the minival files of 2014",
    "orphans": "annotations of images that are not in the file, left out",
}


def count_notes(found: Mapping[str, int]) -> tuple[str, ...]:
    """What was clipped or left out, in words."""
    return tuple(f"{text}: {found[what]}" for what, text in _NOTES.items() if found.get(what))


class _Reader:
    """One file's annotations → Detectron2's dicts."""

    def __init__(
        self,
        file: AnnotationFile,
        metadata: Json,
        extra: Sequence[str],
        found: Counter[str],
        *,
        measured: bool,
    ) -> None:
        """`measured`: the metric will read the file, and it needs more than training does."""
        self._file, self._found, self._measured = file, found, measured
        self._keys = ("iscrowd", "bbox", "keypoints", "category_id", *extra)
        self._contiguous: Mapping[int, int] = metadata["thing_dataset_id_to_contiguous_id"]
        self._keypoints = 3 * len(metadata.get("keypoint_names", ()))

    def objects(self, annotations: Iterable[Json], image: Json) -> list[Json]:
        rows = (self._object(annotation, image) for annotation in annotations)
        return [row for row in rows if row is not None]

    def _object(self, annotation: Json, image: Json) -> Json | None:
        file = self._file
        file.check_box(annotation, image, self._found)
        if annotation.get("iscrowd", 0) not in (0, 1):
            file.refuse(annotation, f"iscrowd is {_shown(annotation['iscrowd'])}, expected 0 or 1")
        if self._measured:
            needed = ("area", "iscrowd") + ("num_keypoints",) * ("keypoints" in annotation)
            for key in needed:
                if key not in annotation or not _all_numbers([annotation[key]]):
                    value = _shown(annotation.get(key))
                    file.refuse(annotation, f"{key} is {value}, and COCO's metric needs the number")
        if annotation.get("ignore", 0) != 0:
            file.refuse(annotation, "'ignore' is not supported; remove the annotation, or set it 0")
        row = {key: annotation[key] for key in self._keys if key in annotation}
        shape = annotation.get("segmentation")
        if shape:
            if isinstance(shape, dict):
                shape = self._mask(annotation, shape, image)
            else:
                shape = self._polygons(annotation, shape)
                if not shape:
                    self._found["shapeless"] += 1
                    return None
            row["segmentation"] = shape
        if annotation.get("keypoints"):
            row["keypoints"] = self._moved(annotation)
        row["bbox_mode"] = XYWH_ABS
        row["category_id"] = self._contiguous[annotation["category_id"]]
        return row

    def _polygons(self, annotation: Json, polygons: Any) -> list[list[float]]:
        if not isinstance(polygons, list):
            self._file.refuse(annotation, "segmentation is neither a list of polygons nor an RLE")
        for polygon in polygons:
            self._file.check_numbers(annotation, polygon, "a polygon")
        kept = [polygon for polygon in polygons if len(polygon) % 2 == 0 and len(polygon) >= 6]
        self._found["polygons"] += len(polygons) - len(kept)
        return kept

    def _mask(self, annotation: Json, rle: Json, image: Json) -> Json:
        """A run-length encoding, compressed as Detectron2 keeps it."""
        size, counts = rle.get("size"), rle.get("counts")
        wanted = [image["height"], image["width"]]
        if size != wanted:
            self._file.refuse(
                annotation, f"RLE size {_shown(size)} is not that of its image, {wanted}"
            )
        if isinstance(counts, str) and counts:
            return rle
        self._file.check_numbers(annotation, counts, "RLE counts")
        assert isinstance(counts, list)
        if any(not isinstance(run, int) or run < 0 for run in counts) or sum(counts) != math.prod(
            wanted
        ):
            self._file.refuse(
                annotation,
                f"RLE counts add up to {sum(counts)}, expected {math.prod(wanted)} pixels",
            )
        import pycocotools.mask  # here, because only crowds need it

        return pycocotools.mask.frPyObjects(rle, *wanted)

    def _moved(self, annotation: Json) -> list[float]:
        """(x, y, v) each; COCO's are pixel indices, Detectron2's are coordinates."""
        points = annotation["keypoints"]
        self._file.check_numbers(annotation, points, "keypoints")
        wanted = self._keypoints or len(points) // 3 * 3
        if len(points) != wanted or any(v not in (0, 1, 2) for v in points[2::3]):
            self._file.refuse(
                annotation,
                f"expected {wanted // 3} keypoints of (x, y, v), v = 0, 1 or 2, got "
                f"{len(points)} numbers",
            )
        return [v if index % 3 == 2 else v + 0.5 for index, v in enumerate(points)]


def require_polygons(split: Split) -> None:
    """Every mask that INPUT.MASK_FORMAT polygon would learn from is one; a crowd's never is.

    Raises:
        DataError: how many are run lengths, and the first annotation in the file.
    """
    number = sum(_in_run_lengths(item) for one in split.records for item in one["annotations"])
    if not number:
        return
    file = split.metadata["json_file"]
    rows = read_json(file)[0]["annotations"]
    first = next(row["id"] for row in rows if _in_run_lengths(row))
    raise DataError(
        f"{file}: masks in run lengths, not in polygons: {number}, the first of annotation "
        f"{first}; set INPUT.MASK_FORMAT bitmask"
    )


def _in_run_lengths(annotation: Mapping[str, Any]) -> bool:
    """Of a file's annotation or of a record's; no crowd."""
    return isinstance(annotation.get("segmentation"), dict) and not annotation.get("iscrowd", 0)


def require_images(records: Sequence[Record], json_file: str, expected: str) -> None:
    """Every record's file is there; folders are listed, files not opened.

    Raises:
        DataError: how many are missing, and the first.
    """
    missing = absent(record["file_name"] for record in records)
    if missing:
        raise DataError(
            f"{missing[0]}: missing ({len(missing)} of the {len(records)} images that "
            f"{json_file} lists){alike(missing[0]) or '; ' + expected}"
        )


def _find_images(source: COCOSource, file: AnnotationFile) -> str:
    """The folder with the images of a file of one's own, near it.

    Its own folder, folders in it, and folders beside it; among several that hold the first
    image the one whose name is part of the file's, as in instances_train2017.json.
    """
    here = Path(file.path).resolve().parent
    first = file.sorted_images()[0][1]["file_name"]
    nearby = [here, here.parent]
    for folder in (here, here.parent):
        nearby += _folders_in(folder)
        for name in ("images", "data"):  # images/train2017 and the like
            nearby += _folders_in(folder / name)
    nearby += [path / "images" for path in nearby]
    holding = [path for path in dict.fromkeys(nearby) if (path / first).is_file()]
    # Both what lies with the file itself and what bears its name is beyond doubt.
    sure = [path for path in holding if path == here] or [
        path for path in holding if path.name in Path(file.path).stem
    ]
    chosen = sure or holding
    if len(chosen) == 1:
        return str(chosen[0])
    key = f"DATASETS.COCO_{source.role}_ROOT"
    if not chosen:
        there = next(filter(None, (alike(str(path / first)) for path in nearby)), "")
        raise DataError(
            f"{file.path}: {first} is not near it{there}; set {key} to the images' folder"
        )
    raise DataError(
        f"{file.path}: {first} is in {', '.join(str(path) for path in chosen)}; set {key} to one"
    )


def _folders_in(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def _own_keypoints(file: AnnotationFile) -> Json:
    """Names, left-right pairs and lines from the categories, where they have keypoints."""
    described = [category for category in file.categories if category.get("keypoints")]
    if not described:
        return {}
    names = described[0]["keypoints"]
    if any(category.get("keypoints") != names for category in file.categories):
        raise DataError(f"{file.path}: categories have different keypoints; one set is supported")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{file.path}: 'keypoints' of a category: expected a list of names")
    pairs = [
        (name, other)
        for name in names
        if "left" in name and (other := name.replace("left", "right")) in names
    ]
    lines = []
    for edge in described[0].get("skeleton") or ():
        if not isinstance(edge, list) or not all(
            isinstance(end, int) and 1 <= end <= len(names) for end in edge
        ):
            raise DataError(f"{file.path}: 'skeleton': expected pairs of 1..{len(names)}")
        lines += [(names[a - 1], names[b - 1], (102, 204, 255)) for a, b in pairwise(edge)]
    return {
        "keypoint_names": tuple(names),
        "keypoint_flip_map": tuple(pairs),
        "keypoint_connection_rules": lines,
    }


def _finite(numbers: Sequence[Any]) -> bool:
    # The sum is what is fast: a dataset has tens of millions of these.
    try:
        return math.isfinite(sum(numbers))
    except TypeError:
        return False


def _all_numbers(values: Sequence[Any]) -> bool:
    return _finite(values) and not any(isinstance(value, bool) for value in values)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", type(None): "null"}.get(type(value), "a number")
