"""Semantic segmentation on PASCAL VOC: palette masks in the layout of voc.py.

    <root>/ImageSets/Segmentation/<split>.txt           one image id per line
    <root>/JPEGImages/<id>.jpg
    <root>/SegmentationClass/<id>.png                   class ids as palette indices, 255 ignored
    <root>/SegmentationClassAug/<id>.png                train_aug of VOC2012 (SBD's masks)

Detectron2 has no such dataset; the names are this project's own. A mask's labels are its palette
indices; converted to mode "L" it has gray values instead, which train without an error.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from detection.datasets.base import Split
from detection.datasets.download import fetch_hint
from detection.datasets.files import image_size, missing_files, read_ids, require_files
from detection.datasets.labels import semantic_record, semantic_split
from moco.common.errors import DataError

_AUGMENTED = "train_aug"
# Number of images of each split.
_COUNTS = {
    (2012, _AUGMENTED): 10582,
    (2007, "train"): 209,
    (2007, "val"): 213,
    (2007, "trainval"): 422,
    (2007, "test"): 210,
    (2012, "train"): 1464,
    (2012, "val"): 1449,
    (2012, "trainval"): 2913,
}
COUNTS = {f"voc_{year}_sem_seg_{split}": (n, 0) for (year, split), n in _COUNTS.items()}
# Names of the list in the original and in several copies.
_AUGMENTED_LISTS = ("train_aug.txt", "trainaug.txt")
# A common copy of it has lines of two paths instead of ids.
_TWO_COLUMNS = re.compile(r"/?JPEGImages/(\S+)\.jpg\s+/?SegmentationClass(?:Aug)?/\1\.png")


@dataclass(frozen=True)
class VOCSegmentationSource:
    """Location and reader of a split.

    Attributes:
        name: Name of the split in DATASETS.TRAIN and DATASETS.TEST.
        root: The folder VOC2007 or VOC2012.
        split: Name of the list.
        classes: Class names, the first one background.
    """

    name: str
    root: Path
    split: str
    classes: tuple[str, ...]

    def present(self) -> bool:
        """Return whether the list of the split exists."""
        return self._list() is not None

    def read(self) -> Split:
        """Read the split; train_aug also from copies with other names or a list of paths."""
        path = self._list()
        hint = fetch_hint("voc", self.name, self.root.parent)
        if path is None:
            missing = self.root / "ImageSets" / "Segmentation" / f"{self.split}.txt"
            raise DataError(f"{self.name}: {missing} is missing; {hint}")
        ids = read_ids(path, _TWO_COLUMNS)
        images = [str(self.root / "JPEGImages" / f"{image_id}.jpg") for image_id in ids]
        require_files(images, "images", hint)
        records = [
            semantic_record(image, mask, image_size(image), image_id=image_id)
            for image_id, image, mask in zip(ids, images, self._masks(ids), strict=True)
        ]
        return semantic_split(self.name, self.classes, records)

    def _list(self) -> Path | None:
        folder = self.root / "ImageSets" / "Segmentation"
        names = _AUGMENTED_LISTS if self.split == _AUGMENTED else (f"{self.split}.txt",)
        return next((folder / name for name in names if (folder / name).is_file()), None)

    def _masks(self, ids: Sequence[str]) -> list[str]:
        """Return the masks, all from one folder; train_aug's may be in that of the other splits."""
        folders = ["SegmentationClass"]
        if self.split == _AUGMENTED:
            folders.insert(0, "SegmentationClassAug")
        choices = [[str(self.root / folder / f"{i}.png") for i in ids] for folder in folders]
        for masks in choices:
            if not missing_files(masks):
                return masks
        require_files(choices[0], "masks", fetch_hint("voc", self.name, self.root.parent))
        return choices[0]


def sources(root: str, classes: tuple[str, ...]) -> list[VOCSegmentationSource]:
    """Return the splits in `root`, the folder that contains VOC2007 and VOC2012."""
    return [
        VOCSegmentationSource(name, Path(root) / f"VOC{year}", split, classes)
        for name, (year, split) in zip(COUNTS, _COUNTS, strict=True)
    ]
