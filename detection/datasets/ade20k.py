"""ADE20k in the layout of the Scene Parsing Challenge 2016 (SceneParsing-150).

    ADEChallengeData2016/images/{training,validation}/<id>.jpg
    ADEChallengeData2016/annotations/{training,validation}/<id>.png    1..150, 0 is ignored
    ADEChallengeData2016/objectInfo150.txt                             class names

The names of the splits are Detectron2's. Its own reader needs copies of the label maps with 1
subtracted (annotations_detectron2/); this one reads the published ones. Classes are named by their
first synonym. The full ADE20K (ADE20K_2016_07_26, ADE20K_2021_17_01) is another dataset, with
thousands of classes in colors.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from detection.datasets.base import ABSENT, FORMATS, WRONG, Finding, Format, Split
from detection.datasets.download import fetch_hint
from detection.datasets.files import image_size, list_names, read_lines, require_files
from detection.datasets.labels import semantic_record, semantic_split
from moco.common.errors import DataError

NUM_CLASSES = 150

_FOLDER, _NAMES = "ADEChallengeData2016", "objectInfo150.txt"
# Split → folder, number of images (README of github.com/CSAILVision/sceneparsing).
_SPLITS = {"train": ("training", 20210), "val": ("validation", 2000)}
_FULL = "the full ADE20K, whose masks are colors of thousands of classes"


@dataclass(frozen=True)
class ADE20kSource:
    """Location and reader of a split; `root` is the folder of all datasets."""

    split: str
    root: str

    @property
    def name(self) -> str:
        """Name of the split in DATASETS.TRAIN and DATASETS.TEST."""
        return f"ade20k_sem_seg_{self.split}"

    def present(self) -> bool:
        """Return whether the folder of the label maps exists."""
        return os.path.isdir(self._folder("annotations"))

    def read(self) -> Split:
        """Read the split; DataError names the full ADE20K if that is there instead."""
        hint = fetch_hint("ade20k", self.name, self.root)
        if full := _full_dataset(self.root):
            hint = f"{full} is {_FULL}; {hint}"
        images = self._folder("images")
        names = sorted(name for name in list_names(images) if name.endswith(".jpg"))
        if not names:
            raise DataError(f"{self.name}: {images} has no .jpg images; {hint}")
        labels = [f"{self._folder('annotations')}/{name[:-4]}.png" for name in names]
        require_files(labels, "label maps", hint)
        classes = read_classes(Path(self.root) / _FOLDER / _NAMES, hint)
        records = [
            semantic_record(image, label, image_size(image), image_id=name[:-4], first_label=1)
            for name, label in zip(names, labels, strict=True)
            for image in [f"{images}/{name}"]
        ]
        return semantic_split(self.name, classes, records)

    def _folder(self, kind: str) -> str:
        return os.path.join(self.root, _FOLDER, kind, _SPLITS[self.split][0])


def read_classes(path: Path, hint: str) -> tuple[str, ...]:
    """Read the names of the 150 classes: tab-separated columns, the first an index, the last names.

    Args:
        path: objectInfo150.txt.
        hint: End of the message if the file is missing.

    Raises:
        DataError: If the file is missing or has other lines.
    """
    if not path.is_file():
        raise DataError(f"{path} is missing; {hint}")
    rows = [line.split("\t") for line in read_lines(path)[1:] if line.strip()]
    if [row[0].strip() for row in rows] != [str(i + 1) for i in range(NUM_CLASSES)]:
        raise DataError(
            f"{path}: expected a header and {NUM_CLASSES} lines with the indices 1..{NUM_CLASSES} "
            "in the first column"
        )
    classes = tuple(row[-1].split(",")[0].strip() for row in rows)
    if len(set(classes)) < NUM_CLASSES or "" in classes:
        raise DataError(f"{path}: two classes have the same name, or one has none")
    return classes


def _full_dataset(root: str) -> str:
    """Return the folder of the full ADE20K if it is in place of, or next to, SceneParsing-150."""
    found = [name for name in list_names(root) if name.startswith("ADE20K_20")]
    inside = list_names(os.path.join(root, _FOLDER))
    if any(name.startswith("index_ade20k.") for name in inside):
        found.append(_FOLDER)
    return os.path.join(root, min(found)) if found else ""


@FORMATS.register()
def ade20k() -> Format:
    """Return the format of SceneParsing-150."""
    return Format(
        sources=lambda root: [ADE20kSource(split, root) for split in _SPLITS],
        counts={f"ade20k_sem_seg_{split}": (n, 0) for split, (_, n) in _SPLITS.items()},
        tree="""\
ADEChallengeData2016/
  images/{training,validation}/*.jpg
  annotations/{training,validation}/*.png     (0 ignored, classes 1..150)
  objectInfo150.txt                           (class names)""",
        tasks={
            "configs/ade20k/linear_ViT_B_40k.yaml": (
                "ade20k_sem_seg_train",
                "ade20k_sem_seg_val",
            ),
        },
        check_folders=_check_folders,
        private=("ade20k_sem_seg_test",),
    )


def _check_folders(root: str, states: Mapping[str, str]) -> Iterator[Finding]:
    full = _full_dataset(root)
    if full and set(states.values()) == {ABSENT}:
        text = f"{_FULL}; SceneParsing-150 is needed: ADEChallengeData2016.zip"
        yield Finding(f"{os.path.basename(full)}/", WRONG, text)
