"""LVIS v0.5 and v1: COCO's images, over a thousand classes, not exhaustively annotated.

    lvis/lvis_{v0.5,v1}_{train,val}.json
    coco/{train2017,val2017}/         by the last two parts of each image's `coco_url`

The records equal those of Detectron2's reader (detectron2/data/datasets/lvis.py), which needs the
`lvis` package; this one does not. Classes are named by their first synonym, as there.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from detection.datasets.base import ABSENT, FORMATS, WRONG, Finding, Format, Split
from detection.datasets.coco_json import AnnotationFile, Json
from detection.datasets.download import fetch_hint
from detection.datasets.files import check_relative
from moco.common.errors import DataError

CATEGORIES = {"v0.5": 1230, "v1": 1203}  # their number, which distinguishes the versions

# (images, objects) of the published splits; 0 where not published.
_COUNTS = {
    ("v0.5", "train"): (57263, 0),
    ("v0.5", "val"): (5000, 0),
    ("v0.5", "val_rand_100"): (0, 0),
    ("v1", "train"): (100170, 1270141),
    ("v1", "val"): (19809, 244707),
}
_CATEGORY_IDS = ("not_exhaustive_category_ids", "neg_category_ids")  # of an image


@dataclass(frozen=True)
class LVISSource:
    """Location and reader of a split; `root` is the folder that contains lvis/ and coco/."""

    version: str
    split: str
    root: str

    @property
    def name(self) -> str:
        """Name of the split in DATASETS.TRAIN and DATASETS.TEST."""
        return f"lvis_{self.version}_{self.split}"

    @property
    def json_file(self) -> str:
        """Path of the annotations."""
        return os.path.join(self.root, f"lvis/{self.name}.json")

    def present(self) -> bool:
        """Return whether the annotations exist."""
        return os.path.isfile(self.json_file)

    def read(self) -> Split:
        """Read the split; raise DataError also if the file belongs to LVIS's other version."""
        hint = fetch_hint("lvis", self.name, self.root)
        if not self.present():
            raise DataError(f"{self.name}: {self.json_file} is missing; {hint}")
        file = AnnotationFile(self.json_file, file_name=_file_name)
        classes = self._classes(file)
        for image_id, image in file.images.items():
            for key in _CATEGORY_IDS:
                ids = image.get(key)
                if not isinstance(ids, list) or not all(i in file.contiguous for i in ids):
                    where = f"{self.json_file}: image {image_id}"
                    raise DataError(f"{where}: {key}: expected category ids")
        for annotations in file.annotations.values():
            for annotation in annotations:
                _check_polygons(file, annotation)
        metadata: Json = {}
        counts = [
            {"id": category["id"], "image_count": category["image_count"]}
            for category in file.categories
            if "image_count" in category
        ]
        if (self.version, self.split) == ("v1", "train") and len(counts) == len(classes):
            metadata["class_image_count"] = counts
        image_root = os.path.join(self.root, "coco/")  # with the slash, as in Detectron2's metadata
        return file.split(
            self.name,
            "lvis",
            classes,
            image_root,
            hint,
            metadata,
            keys=("bbox", "category_id"),
            image_keys=_CATEGORY_IDS,
        )

    def _classes(self, file: AnnotationFile) -> tuple[str, ...]:
        """Return the class names, or raise DataError if the file is not of this version.

        The other version's file would train without error, and its results would be meaningless.
        """
        number, version = len(file.categories), self.version
        if number != CATEGORIES[version]:
            other = next((f" (LVIS {v} has {n})" for v, n in CATEGORIES.items() if n == number), "")
            raise DataError(
                f"{file.path}: {number} categories, but LVIS {version} has "
                f"{CATEGORIES[version]}{other}; put LVIS {version}'s file there"
            )
        for index, category in enumerate(file.categories, start=1):
            where = f"{file.path}: category {index}: "
            if category["id"] != index:
                raise DataError(f"{file.path}: category ids are not 1..{number}")
            if not isinstance(category.get("synonyms"), list) or not category["synonyms"]:
                raise DataError(where + "'synonyms' is missing")
            if category.get("frequency") not in ("r", "c", "f"):
                raise DataError(where + "'frequency' is not r, c or f")
        return tuple(str(category["synonyms"][0]) for category in file.categories)


def _file_name(image: Json, where: str) -> str:
    """Return `train2017/000000000009.jpg` from the URL.

    v1 has no file_name, and that of v0.5 lacks the folder.
    """
    url = image.get("coco_url")
    if not isinstance(url, str) or url.count("/") < 1:
        raise DataError(f"{where.removesuffix('file_name')}coco_url is missing or not a URL")
    folder, name = url.split("/")[-2:]
    return check_relative(folder, where) + "/" + check_relative(name, where)


def _check_polygons(file: AnnotationFile, annotation: Json) -> None:
    """Check that masks are polygons of three points or more, as Detectron2 asserts."""
    polygons = annotation.get("segmentation")
    if not isinstance(polygons, list) or not polygons:
        file.refuse(annotation, "segmentation is missing or not a list of polygons")
    for polygon in polygons:
        if not isinstance(polygon, list) or len(polygon) % 2 or len(polygon) < 6:
            file.refuse(annotation, "expected polygons of 6 numbers or more, in pairs")


@FORMATS.register()
def lvis() -> Format:
    """Return the format of LVIS's JSON files."""
    return Format(
        sources=lambda root: [LVISSource(*version, root) for version in _COUNTS],
        counts={f"lvis_{version}_{split}": n for (version, split), n in _COUNTS.items()},
        tree="""\
lvis/
  lvis_v0.5_{train,val}.json     (1230 classes)
  lvis_v1_{train,val}.json       (1203 classes)
coco/
  {train,val}2017/000000000009.jpg ...""",
        tasks={"configs/lvis/mask_rcnn_R_50_FPN_1x.yaml": ("lvis_v0.5_train", "lvis_v0.5_val")},
        check_folders=_check_folders,
        private=("lvis_v0.5_test", "lvis_v1_test_dev", "lvis_v1_test_challenge"),
    )


def _check_folders(root: str, states: Mapping[str, str]) -> Iterator[Finding]:
    if os.path.isdir(os.path.join(root, "lvis")) and set(states.values()) == {ABSENT}:
        yield Finding("lvis/", WRONG, "exists, but has none of the files")
