"""Parts of a split: subsets for low-data protocols, and a tenth that is held out for tuning.

A part is named by a suffix of the split's name:

    coco_2017_train@10%.3     the third subset of a tenth of the images that have an object
    coco_2017_train@10%       one of the first five of these subsets, chosen by the run's seed
    coco_2017_train@kept      all images except those of `held`
    coco_2017_train@held      a tenth, fixed by a hash

The images of a subset are determined by the SHA-256 of their ids alone, so they are the same
everywhere; subsets of the same number are nested (1% is in 2%). A published index file may be used
instead (DATASETS.PART_INDEX), in the format of Unbiased Teacher's `dataseed/COCO_supervision.txt`
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
    """Return the name of the split without the part."""
    return name.partition("@")[0]


def with_part(train: Sequence[str], test: Sequence[str], part: str) -> tuple[list[str], list[str]]:
    """Apply DATASETS.PART to DATASETS.TRAIN and DATASETS.TEST; keep names that are parts already.

    For tuning, a tenth of the first training split is held out and replaces the test splits.

    Raises:
        UserError: If there is no such part.
    """
    if part != TUNE:
        subset(part)
        return [name if "@" in name else f"{name}@{part}" for name in train], list(test)
    first, *others = train
    if "@" in first:
        return list(train), list(test)
    return [f"{first}@{KEPT}", *others], [f"{first}@{HELD}"]


def subset(part: str) -> tuple[float, int | None]:
    """Parse a subset such as 10%.3 into its percent, 0..100, and number; None if by the seed.

    Raises:
        UserError: If there is no such part.
    """
    match = _SUBSET.fullmatch(part)
    if match is None or not 0 < (percent := float(match["percent"])) <= 100:
        raise UserError(
            f"DATASETS.PART: got {part!r}, expected {TUNE}, a percentage such as 10%, or a "
            "percentage and the number of a subset such as 10%.3"
        )
    return percent, int(match["number"]) if match["number"] else None


@dataclass(frozen=True)
class PartSource:
    """A part of another source.

    Attributes:
        whole: The other source.
        part: Suffix of the name, without the @.
        seed: Seed of the run; it chooses the subset if `part` does not.
        index: DATASETS.PART_INDEX, or "".
    """

    whole: Source
    part: str
    seed: int
    index: str = ""

    @property
    def name(self) -> str:
        """Name of the split in DATASETS.TRAIN and DATASETS.TEST."""
        return f"{self.whole.name}@{self.part}"

    def present(self) -> bool:
        """Return whether the annotations of the whole split exist."""
        return self.whole.present()

    def read(self) -> Split:
        """Read the whole split and keep the part.

        Raises:
            UserError: If there is no such part, or the split does not support parts.
            DataError: If the whole split cannot be used.
        """
        split = self.whole.read()
        if split.from_catalog or split.evaluator_type == "densepose":
            raise UserError(
                f"DATASETS.PART {self.part}: {split.name} is read by Detectron2's own code, which "
                "has no parts; leave the key out"
            )
        records = self._chosen(split)
        if not records:
            raise UserError(f"{self.name}: selects none of {len(split.records)} images")
        images = frozenset(map(_id, records))
        # Runs whose seeds choose their subsets belong to one experiment, so they share a hash.
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
    """Return the ids of the `count` (rounded down, at least 1) images of lowest salted hash."""
    ids = sorted(map(_id, records), key=lambda i: hashlib.sha256(f"{salt} {i}".encode()).digest())
    return frozenset(ids[: max(int(count), 1)])


def positions(file: str, percent: float, number: int, count: int) -> list[int]:
    """Read the published positions of a subset, in ascending order.

    Args:
        file: Index file, see above.
        percent: Percentage of the images, 0..100.
        number: Number of the subset.
        count: Number of images that have an object.

    Raises:
        DataError: If the file has another format, lacks the subset, or belongs to another split.
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
    """Return an image's id independent of its folder; its file name in semantic segmentation."""
    return str(record.get("image_id", os.path.basename(record["file_name"])))


def _truth_of(truth: Any, records: Sequence[Record]) -> Any:
    """Keep the ground truth of `records`; see `Split.truth` for its keys."""
    if truth is None:
        return None
    names = {*map(_id, records), *(record["file_name"] for record in records)}
    return {name: value for name, value in truth.items() if name in names}
