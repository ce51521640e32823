"""Semantic segmentation on PASCAL VOC: 20 classes and background, palette masks.

    <root>/ImageSets/Segmentation/<split>.txt           one image id per line
    <root>/JPEGImages/<id>.jpg
    <root>/SegmentationClass/<id>.png                   class ids as palette indices, 255 ignored
    <root>/SegmentationClassAug/<id>.png                train_aug of VOC2012 (SBD's masks)

Detectron2 has no such dataset; the names are this project's own. A mask's labels are its palette
indices. Whoever opens it with mode "L" gets gray values instead, which train without complaint.

Reading a split looks at every mask's header, and at the labels of a sample;
`check_labels(records, ..., everything=True)` looks at all.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fvcore.common.config import CfgNode

from detection.datasets.base import Record, Split
from detection.datasets.labels import read_labels
from detection.datasets.layout import DATASETS_VARIABLE, absent, datasets_root, image_size
from detection.datasets.voc import VOC_CLASSES, read_ids
from moco.common.errors import DataError

CLASSES = ("background", *VOC_CLASSES)
IGNORED = 255
_SAMPLE = 32  # masks whose labels are looked at before training

_SPLITS = {2007: ("train", "val", "trainval", "test"), 2012: ("train", "val", "trainval")}
_AUGMENTED = "train_aug"
# As its authors and several copies of it call the list.
_AUGMENTED_LISTS = ("train_aug.txt", "trainaug.txt")
# A copy of it in use has lines of two paths instead of ids.
_TWO_COLUMNS = re.compile(r"/?JPEGImages/(\S+)\.jpg\s+/?SegmentationClass(?:Aug)?/\1\.png")


@dataclass(frozen=True)
class VOCSegmentationSource:
    """Where a split lies; `root` is the folder VOC2007 or VOC2012."""

    name: str
    root: Path
    split: str

    def present(self) -> bool:
        """Whether its annotations are there at all, right or wrong."""
        return self._list() is not None

    def read(self) -> Split:
        """Read and check the whole split.

        Raises:
            DataError: anything that cannot be used; names file and reason.
        """
        path = self._list()
        if path is None:
            missing = self.root / "ImageSets" / "Segmentation" / f"{self.split}.txt"
            raise DataError(f"{self.name}: {missing} is missing; {self.expected()}")
        ids = read_ids(path, _TWO_COLUMNS)
        images = [str(self.root / "JPEGImages" / f"{image_id}.jpg") for image_id in ids]
        lacking = absent(images)
        if lacking:
            raise DataError(
                f"{lacking[0]}: missing ({len(lacking)} of the {len(ids)} images); "
                f"{self.expected()}"
            )
        masks = self._masks(ids)
        records = []
        for image_id, image, mask in zip(ids, images, masks, strict=True):
            width, height = image_size(image)
            records.append(
                {
                    "file_name": image,
                    "image_id": image_id,
                    "height": height,
                    "width": width,
                    "sem_seg_file_name": mask,
                }
            )
        sha256 = digest_labels(records)
        check_labels(records, len(CLASSES), IGNORED)
        return Split(
            name=self.name,
            evaluator_type="sem_seg",
            classes=CLASSES,
            records=tuple(records),
            annotations_sha256=sha256,
            metadata={"stuff_classes": list(CLASSES), "ignore_label": IGNORED},
        )

    def expected(self) -> str:
        """What should be where, for the end of a message."""
        folder, where = "SegmentationClass", "http://host.robots.ox.ac.uk/pascal/VOC/"
        if self.split == _AUGMENTED:
            folder = "SegmentationClassAug"
            where += " and the masks of SBD (http://home.bharathh.info/pubs/codes/SBD/) as PNG"
        return (
            f"expected {self.root.name}/ImageSets/Segmentation/{self.split}.txt, "
            f"{self.root.name}/{folder}/*.png and {self.root.name}/JPEGImages/*.jpg in "
            f"${DATASETS_VARIABLE} (now {datasets_root()}); get them from {where}"
        )

    def _list(self) -> Path | None:
        folder = self.root / "ImageSets" / "Segmentation"
        names = _AUGMENTED_LISTS if self.split == _AUGMENTED else (f"{self.split}.txt",)
        return next((folder / name for name in names if (folder / name).is_file()), None)

    def _masks(self, ids: Sequence[str]) -> list[str]:
        folders = ["SegmentationClass"]
        if self.split == _AUGMENTED:
            folders = ["SegmentationClassAug", "SegmentationClass"]
        first: list[str] = []
        for folder in folders:
            masks = [str(self.root / folder / f"{image_id}.png") for image_id in ids]
            missing = absent(masks)
            if not missing:
                return masks
            first = first or missing
        raise DataError(
            f"{first[0]}: missing ({len(first)} of the {len(ids)} masks); {self.expected()}"
        )


def sources(cfg: CfgNode) -> dict[str, VOCSegmentationSource]:
    """This project's names."""
    root = Path(datasets_root())
    splits = [(2012, _AUGMENTED)] + [(year, s) for year, names in _SPLITS.items() for s in names]
    return {
        name: VOCSegmentationSource(name, root / f"VOC{year}", split)
        for year, split in splits
        for name in (f"voc_{year}_sem_seg_{split}",)
    }


def digest_labels(records: Sequence[Record]) -> str:
    """Hex SHA-256 of which images there are and of their masks, whose headers are checked.

    Raises:
        DataError: a mask that is no image, has another size than its image, or colors.
    """
    digest = hashlib.sha256()
    for record in records:
        path = record["sem_seg_file_name"]
        try:
            raw = Path(path).read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        size, wanted = image_size(raw, path), (record["width"], record["height"])
        if size != wanted:
            raise DataError(
                f"{path}: {size[0]}x{size[1]} contradicts {os.path.basename(record['file_name'])}, "
                f"which is {wanted[0]}x{wanted[1]}"
            )
        digest.update(f"{os.path.basename(record['file_name'])} {size}\n".encode())
        digest.update(hashlib.sha256(raw).digest())
    return digest.hexdigest()


def check_labels(
    records: Sequence[Record], num_classes: int, ignored: int, *, everything: bool = False
) -> None:
    """The labels are 0..num_classes - 1 or `ignored`, in an evenly spread sample or in all masks.

    Raises:
        DataError: names the first mask with another label, or with colors instead of labels.
    """
    step = 1 if everything else max(1, len(records) // _SAMPLE)
    for record in records[::step]:
        path = record["sem_seg_file_name"]
        values = np.unique(read_labels(path))
        odd = [int(v) for v in values if v >= num_classes and v != ignored]
        if odd:
            raise DataError(
                f"{path}: label {odd[0]}, expected 0..{num_classes - 1} or {ignored}; labels are "
                "palette indices, not colors or gray values"
            )
