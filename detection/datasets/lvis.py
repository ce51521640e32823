"""LVIS v0.5 and v1: COCO's images, more than a thousand classes, not all annotated everywhere.

    lvis/lvis_{v0.5,v1}_{train,val}.json
    coco/{train2017,val2017}/         by the last two parts of each image's `coco_url`

The records equal those of Detectron2's reader (detectron2/data/datasets/lvis.py), which needs the
`lvis` package; this one does not. Classes are named by their first synonym, as there.
"""

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fvcore.common.config import CfgNode

from detection.datasets.base import Split
from detection.datasets.coco import XYWH_ABS, AnnotationFile, count_notes, require_images
from detection.datasets.layout import DATASETS_VARIABLE, datasets_root, inside, read_json
from moco.common.errors import DataError

CATEGORIES = {"v0.5": 1230, "v1": 1203}  # number of them, which tells the versions apart

_BUILTIN = {
    f"lvis_{version}_{split}": version
    for version, splits in (("v0.5", ("train", "val", "val_rand_100")), ("v1", ("train", "val")))
    for split in splits
}


@dataclass(frozen=True)
class LVISSource:
    """Where a split lies; `image_root` is the folder of train2017/ and val2017/."""

    name: str
    version: str
    json_file: str
    image_root: str

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
        self._check_version(content)
        file = AnnotationFile(self.json_file, content, file_name=_file_name)
        classes = self._classes(file)
        found: Counter[str] = Counter()
        groups = file.annotations_by_image(False, found)
        records = []
        for image_id, image in file.sorted_images():
            for key in ("neg_category_ids", "not_exhaustive_category_ids"):
                ids = image.get(key, [])
                if not isinstance(ids, list) or not all(
                    i in range(1, len(classes) + 1) for i in ids
                ):
                    raise DataError(
                        f"{self.json_file}: image {image_id}: {key}: expected category ids"
                    )
            objects = []
            for annotation in groups.get(image_id, ()):
                file.check_box(annotation, image, found)
                objects.append(
                    {
                        "bbox": annotation["bbox"],
                        "bbox_mode": XYWH_ABS,
                        "category_id": annotation["category_id"] - 1,
                        "segmentation": _polygons(file, annotation),
                    }
                )
            records.append(
                {
                    "file_name": os.path.join(self.image_root, _file_name(image, "")),
                    "height": image["height"],
                    "width": image["width"],
                    "not_exhaustive_category_ids": image.get("not_exhaustive_category_ids", []),
                    "neg_category_ids": image.get("neg_category_ids", []),
                    "image_id": image_id,
                    "annotations": objects,
                }
            )
        require_images(records, self.json_file, self.expected())
        metadata: dict[str, Any] = {
            "json_file": self.json_file,
            "image_root": self.image_root,
            "thing_classes": list(classes),
            # Detectron2 has it for other datasets only, and takes id - 1 here.
            "thing_dataset_id_to_contiguous_id": {i + 1: i for i in range(len(classes))},
        }
        counted = [category for category in file.categories if "image_count" in category]
        if self.version == "v1" and self.name.endswith("train") and len(counted) == len(classes):
            metadata["class_image_count"] = [
                {"id": category["id"], "image_count": category["image_count"]}
                for category in counted
            ]
        return Split(
            name=self.name,
            evaluator_type="lvis",
            classes=classes,
            records=tuple(records),
            annotations_sha256=sha256,
            notes=count_notes(found),
            metadata=metadata,
            has_masks=any(record["annotations"] for record in records),
        )

    def expected(self) -> str:
        """What should be where, for the end of a message."""
        return (
            f"expected lvis/{os.path.basename(self.json_file)} and "
            f"coco/{{train2017,val2017}}/*.jpg in ${DATASETS_VARIABLE} (now {datasets_root()}); "
            "get them from https://www.lvisdataset.org/dataset and https://cocodataset.org/#download"
        )

    def _check_version(self, content: Any) -> None:
        """One version's file under the other's name trains, and its numbers mean nothing."""
        categories = content.get("categories") if isinstance(content, dict) else None
        if not isinstance(categories, list):
            return  # refused in a moment, with a better message
        number = len(categories)
        if number != CATEGORIES[self.version]:
            other = next((f" (LVIS {v} has {n})" for v, n in CATEGORIES.items() if n == number), "")
            raise DataError(
                f"{self.json_file}: {number} categories, but LVIS {self.version} has "
                f"{CATEGORIES[self.version]}{other}; put LVIS {self.version}'s file there"
            )

    def _classes(self, file: AnnotationFile) -> tuple[str, ...]:
        names = []
        for index, category in enumerate(file.categories):
            if category["id"] != index + 1:
                raise DataError(f"{file.path}: category ids are not 1..{len(file.categories)}")
            synonyms = category.get("synonyms")
            if not isinstance(synonyms, list) or not synonyms:
                raise DataError(f"{file.path}: category {index + 1}: 'synonyms' is missing")
            if category.get("frequency") not in ("r", "c", "f"):
                raise DataError(
                    f"{file.path}: category {index + 1}: 'frequency' is "
                    f"{category.get('frequency')!r}, expected r, c or f"
                )
            names.append(str(synonyms[0]))
        return tuple(names)


def sources(cfg: CfgNode) -> dict[str, LVISSource]:
    """Detectron2's names."""
    root = datasets_root()
    return {
        name: LVISSource(
            name,
            version,
            os.path.join(root, f"lvis/{name}.json"),
            os.path.join(root, "coco/"),  # with the slash, as in Detectron2's metadata
        )
        for name, version in _BUILTIN.items()
    }


def _file_name(image: dict[str, Any], where: str) -> str:
    """`train2017/000000000009.jpg`: v1 has no file_name, and v0.5's lacks the folder."""
    url = image.get("coco_url")
    if not isinstance(url, str) or url.count("/") < 1:
        raise DataError(f"{where.removesuffix('file_name')}coco_url is missing or no URL")
    folder, name = url.split("/")[-2:]
    return inside(folder, where) + "/" + inside(name, where)


def _polygons(file: AnnotationFile, annotation: dict[str, Any]) -> list[list[float]]:
    polygons = annotation.get("segmentation")
    if not isinstance(polygons, list) or not polygons:
        file.refuse(annotation, "segmentation is missing or no list of polygons")
    for polygon in polygons:
        file.check_numbers(annotation, polygon, "a polygon")
        if len(polygon) % 2 or len(polygon) < 6:
            file.refuse(annotation, f"a polygon of {len(polygon)} numbers, expected 6 or more")
    return polygons
