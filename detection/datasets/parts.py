"""Parts of a split: few images for low-data protocols, and a tenth that is held out for tuning.

A part has a name of its own, which any split may be followed by:

    coco_2017_train@10%.3     the third subset of a tenth of the images that have an object
    coco_2017_train@10%       one of the first five of these subsets, by the run's seed
    coco_2017_train@kept      all but those of `held`
    coco_2017_train@held      a tenth, fixed by a hash

Which images a subset has follows from their ids alone, by SHA-256, so it is the same everywhere;
those of one number are nested (1% is in 2%). A published index file may say it instead
(DATASETS.PART_INDEX), in the format of Unbiased Teacher's `dataseed/COCO_supervision.txt`
(https://github.com/facebookresearch/unbiased-teacher, arXiv 2102.09480): JSON, percent as "10.0" →
number as "3" → positions in the list of the images that have an object.
"""

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detection.datasets.base import Record, Source, Split, with_objects
from detection.datasets.layout import read_json
from moco.common.errors import DataError, UserError
from moco.common.files import sha256_file

TUNE = "tune"  # DATASETS.PART: train on `kept`, test on `held`
KEPT, HELD = "kept", "held"
HELD_SHARE = 0.1
FOLDS = 5  # as in STAC, arXiv 2005.04757, and Unbiased Teacher
_SUBSET = re.compile(r"(?P<percent>\d{1,3}(\.\d{1,4})?)%(\.(?P<number>\d{1,4}))?", re.ASCII)


def base_name(name: str) -> str:
    """The split that a part is of."""
    return name.partition("@")[0]


def with_part(train: Sequence[str], test: Sequence[str], part: str) -> tuple[list[str], list[str]]:
    """DATASETS.TRAIN and TEST under DATASETS.PART; names that are parts already stay.

    For tuning a tenth of the first training split is held out and tested on; the test split is in
    neither list.

    Raises:
        UserError: no such part.
    """
    if part != TUNE:
        subset(part)
        return [name if "@" in name else f"{name}@{part}" for name in train], list(test)
    first, *others = train
    if "@" in first:
        return list(train), list(test)
    return [f"{first}@{KEPT}", *others], [f"{first}@{HELD}"]


def subset(part: str) -> tuple[float, int | None]:
    """Percent, 0..100, and number of a subset such as 10%.3; None: by the seed.

    Raises:
        UserError: no such part.
    """
    match = _SUBSET.fullmatch(part)
    if match is None or not 0 < (percent := float(match["percent"])) <= 100:
        raise UserError(
            f"DATASETS.PART: got {part!r}, expected {TUNE}, a percentage as 10%, or one with the "
            "number of its subset as 10%.3"
        )
    return percent, int(match["number"]) if match["number"] else None


@dataclass(frozen=True)
class PartSource:
    """A part of another source.

    Attributes:
        seed: of the run; it chooses the subset where `part` does not.
        index: DATASETS.PART_INDEX or empty.
    """

    whole: Source
    part: str
    seed: int
    index: str = ""

    @property
    def name(self) -> str:
        return f"{self.whole.name}@{self.part}"

    def present(self) -> bool:
        return self.whole.present()

    def read(self) -> Split:
        """Read the whole split and keep the part.

        Raises:
            UserError: no such part, or a split that has none. DataError: as the whole split's.
        """
        split = self.whole.read()
        if split.from_catalog or split.evaluator_type == "densepose":
            raise UserError(
                f"DATASETS.PART {self.part}: {split.name} is read by Detectron2's own code, which "
                "has no parts; leave the key out"
            )
        records = self._chosen(split)
        if not records:
            raise UserError(f"{self.name}: no image of {len(split.records)} is in it")
        images = frozenset(map(_id, records))
        # Runs whose seeds choose their subsets are trials of one experiment.
        by_seed = self.part.endswith("%")
        what = (
            f"{self.part} {self.index and sha256_file(self.index)}" if by_seed else sorted(images)
        )
        content = f"{split.annotations_sha256} {what}"
        return dataclasses.replace(
            split,
            name=self.name,
            records=tuple(records),
            truth=_truth_of(split.truth, records),
            images=images,
            annotations_sha256=hashlib.sha256(content.encode()).hexdigest(),
            notes=(*split.notes, f"{len(records)} of {len(split.records)} images"),
        )

    def _chosen(self, split: Split) -> list[Record]:
        if self.part in (KEPT, HELD):
            held = lowest(split.records, HELD_SHARE * len(split.records), "held out")
            return [r for r in split.records if (_id(r) in held) == (self.part == HELD)]
        percent, number = subset(self.part)
        number = 1 + self.seed % FOLDS if number is None else number
        whole = split.records
        if split.evaluator_type != "sem_seg":
            whole = tuple(with_objects(whole))
        if self.index:
            return [whole[i] for i in positions(self.index, percent, number, len(whole))]
        images = lowest(whole, percent / 100 * len(whole), str(number))
        return [record for record in whole if _id(record) in images]


def lowest(records: Sequence[Record], count: float, salt: str) -> frozenset[str]:
    """Ids of the `count` images (rounded down, at least 1) whose salted hashes are lowest."""
    ids = sorted(map(_id, records), key=lambda i: hashlib.sha256(f"{salt} {i}".encode()).digest())
    return frozenset(ids[: max(int(count), 1)])


def positions(file: str, percent: float, number: int, count: int) -> list[int]:
    """The published positions of a subset, in order.

    Args:
        count: images that have an object; the positions are below it.

    Raises:
        DataError: the file is none of the format, lacks the subset, or is of other images.
    """
    content, _ = read_json(file)
    chosen = content.get(str(percent)) if isinstance(content, Mapping) else None
    found = chosen.get(str(number)) if isinstance(chosen, Mapping) else None
    if not isinstance(found, list) or not all(type(i) is int for i in found):
        raise DataError(f"{file}: has no list of positions under {str(percent)!r}, {str(number)!r}")
    wanted = int(percent / 100 * count)
    if len(set(found)) != len(found) or len(found) != wanted:
        raise DataError(
            f"{file}: {len(found)} positions, expected {wanted} different ones: {percent:g}% of "
            f"{count} images with an object; is it of another split?"
        )
    if found and not (min(found) >= 0 and max(found) < count):
        raise DataError(f"{file}: position {max(found)}, but there are {count} images")
    return sorted(found)


def _id(record: Record) -> str:
    """Of an image, wherever it is: semantic segmentation's have only their file's name."""
    return str(record.get("image_id", os.path.basename(record["file_name"])))


def _truth_of(truth: Any, records: Sequence[Record]) -> Any:
    """Of VOC by image id, of Cityscapes by file; see `Split.truth`."""
    if truth is None:
        return None
    names = {*map(_id, records), *(record["file_name"] for record in records)}
    return {name: value for name, value in truth.items() if name in names}
