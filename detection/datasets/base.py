"""Interfaces of datasets for both engines: formats, sources of splits, validated splits, parts.

A part of a split is a subset for low-data protocols, or a tenth that is held out for tuning. It is
named by a suffix of the split's name:

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
import gc
import hashlib
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from detection.datasets.files import read_json
from moco.common.command import program, quote
from moco.common.errors import DataError, UserError, plural
from moco.common.files import sha256_file

# Detectron2's standard dict of one image ("file_name", "image_id", "height", "width",
# "annotations" or "sem_seg_file_name"), equal to what Detectron2's own reader of the format gives.
Record = dict[str, Any]

# COCO's metric takes 400 kB of memory for each class, and a detector's head a row of weights.
MAX_CLASSES = 10_000
XYXY_ABS, XYWH_ABS = 0, 1  # Detectron2's BoxMode
_VAL = ("val", "valid", "validation")  # Roboflow writes valid
SPLITS = ("trainval", "train", "test", *_VAL)
_FEW_IMAGES, _FEW_OBJECTS = 30, 50

TUNE = "tune"  # DATASETS.PART: train on `kept`, test on `held`
KEPT, HELD = "kept", "held"
HELD_SHARE = 0.1
FOLDS = 5  # as in STAC, arXiv 2005.04757, and Unbiased Teacher
_SUBSET = re.compile(r"(?P<percent>\d{1,3}(\.\d{1,4})?)%(\.(?P<number>\d{1,4}))?", re.ASCII)


@dataclass(frozen=True, eq=False)
class Split:
    """A validated split.

    Attributes:
        name: Name of the split in DATASETS.TRAIN and DATASETS.TEST.
        evaluator_type: Detectron2's name of the metric: pascal_voc, coco, lvis,
            cityscapes_instance, sem_seg, densepose.
        classes: Class names in the order of their contiguous ids; things, or all classes for
            sem_seg.
        annotations_sha256: Hex digest of the images' names and annotations, independent of their
            location: two folders of the same name are different datasets if it differs.
        notes: What was clipped or left out, with counts.
        metadata: Detectron2's metadata of the split (MetadataCatalog).
        truth: Ground truth of the metric if it is neither in `metadata` nor in the records: for
            VOC `GroundTruth` by image id, for Cityscapes' instances a file by `file_name`.
        has_masks: True if every annotation has a segmentation, except those that `with_masks`
            leaves out.
        has_keypoints: True if every object has keypoints, and the file names them.
        unused_keypoints: Reason why the keypoints in the file are not used, or "".
        from_catalog: True if the split comes from Detectron2's DatasetCatalog and is evaluated by
            Detectron2 itself.
        images: Image ids of a part; None for a whole split.
    """

    name: str
    evaluator_type: str
    classes: tuple[str, ...]
    records: tuple[Record, ...]
    annotations_sha256: str
    notes: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    truth: Any = None
    has_masks: bool = False
    has_keypoints: bool = False
    unused_keypoints: str = ""
    from_catalog: bool = False
    images: frozenset[str] | None = None

    def __post_init__(self) -> None:
        """Check the number of classes.

        Raises:
            DataError: If there are more than `MAX_CLASSES`.
        """
        if len(self.classes) > MAX_CLASSES:
            raise DataError(
                f"{self.name}: got {len(self.classes)} classes, expected at most {MAX_CLASSES}; "
                "leave out those without objects"
            )


def image_key(record: Mapping[str, Any]) -> int | str:
    """Return the image's id, or its file name in a format without ids.

    A COCO file may list one image file under two ids, so the file name alone is not unique.
    """
    key: int | str = record.get("image_id", record["file_name"])
    return key


def object_counts(split: Split, *, measured: bool = False) -> Counter[str]:
    """Count the objects of each class in a split of instances; crowds never count.

    Args:
        split: Split of instances.
        measured: Leave out VOC's difficult objects, which are trained on but not tested on.

    Returns:
        Number of objects by class name, without classes that have none.
    """
    if _has_difficult(split, measured):
        ids = (i for truth in split.truth.values() for i in truth.classes[~truth.difficult])
    else:
        objects = (item for record in split.records for item in record.get("annotations", ()))
        ids = (item["category_id"] for item in objects if not item.get("iscrowd", 0))
    return Counter(split.classes[i] for i in ids)


def why_unusable(split: Split, *, measured: bool = False) -> str:
    """Return why no object of a split of instances counts, or "" if one does.

    Args:
        split: Split of instances.
        measured: Leave out VOC's difficult objects, which are trained on but not tested on.
    """
    reasons: Counter[str] = Counter()
    for record in split.records:
        truth = split.truth[record["image_id"]] if _has_difficult(split, measured) else None
        for number, item in enumerate(record.get("annotations", ())):
            if item.get("iscrowd", 0):
                reasons["crowds (iscrowd 1)"] += 1
            elif truth.difficult[number] if truth else measured and item.get("difficult", False):
                reasons["difficult"] += 1
            elif _is_empty(item):
                reasons["without area"] += 1
            else:
                return ""
    if not reasons:
        return "no annotated objects"
    return f"all of its {plural(reasons.total(), 'object')} are {' or '.join(reasons)}"


def _has_difficult(split: Split, measured: bool) -> bool:
    """Return whether the metric leaves out objects that are trained on."""
    return measured and split.truth is not None and split.evaluator_type == "pascal_voc"


def _is_empty(item: Mapping[str, Any]) -> bool:
    left, top, right, bottom = item["bbox"]
    if item["bbox_mode"] == XYWH_ABS:
        left, top = 0, 0
    return bool(right <= left or bottom <= top)


def small_test_warning(split: Split) -> str:
    """Return a warning about a test split of few images or objects, or ""."""
    images, objects = len(split.records), object_counts(split, measured=True).total()
    semantic = split.evaluator_type == "sem_seg"
    if images >= _FEW_IMAGES and (semantic or objects >= _FEW_OBJECTS):
        return ""
    return (
        f"small test split: {split.name} has {plural(images, 'image')} and "
        f"{plural(objects, 'object')}, fewer than {_FEW_IMAGES} or {_FEW_OBJECTS}; AP depends on "
        "a few of them, so small gaps mean nothing"
    )


def with_objects(records: Sequence[Record]) -> list[Record]:
    """Return the records that have a non-crowd object (DATALOADER.FILTER_EMPTY_ANNOTATIONS)."""
    return [r for r in records if any(not item.get("iscrowd", 0) for item in r["annotations"])]


def with_masks(split: Split) -> Split:
    """Return the split without the objects that have no usable mask; `has_masks` must be True."""
    objects = [[one for one in r["annotations"] if "segmentation" in one] for r in split.records]
    if all(len(a) == len(r["annotations"]) for a, r in zip(objects, split.records, strict=True)):
        return split
    records = zip(split.records, objects, strict=True)
    return dataclasses.replace(split, records=tuple({**r, "annotations": a} for r, a in records))


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


def choose_splits(names: Collection[str], needed: Sequence[str]) -> dict[str, str]:
    """Choose a custom dataset's splits for TRAIN and TEST; empty if a `needed` one is absent."""
    for train, test in (("trainval", "test"), *(("train", each) for each in ("test", *_VAL))):
        chosen = {"TRAIN": train, "TEST": test}
        if all(chosen[key] in names for key in needed):
            return chosen
    return {}


def splits_expected(where: str, names: Sequence[str], place: str | Path) -> str:
    """Format the error about a dataset without the splits that `choose_splits` needs.

    Args:
        where: Start of the message, which names the place of the splits.
        names: Names of the existing splits.
        place: Folder or file of the dataset.
    """
    named = "or name the splits in DATASETS.TRAIN and DATASETS.TEST"
    return (
        f"{where} has {', '.join(names) or 'no split'}; expected trainval or train, and test or "
        f"val ({named if len(names) > 1 else f'to divide it: {split_command(place)}'})"
    )


def doctor_command() -> str:
    """Return the command that starts the doctor."""
    return program("doctor")


def split_command(place: str | Path) -> str:
    """Return the command that divides a dataset without splits."""
    command = program("datasets split")
    return f"{command} {quote(place)}"


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection, which would traverse millions of new objects repeatedly."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def require_package(module: str, extra: str, needs: str) -> None:
    """Raise UserError if a package of an extra is not installed.

    Args:
        module: Name of the package that is imported.
        extra: Extra of this project that installs it.
        needs: Start of the message.
    """
    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"{needs} the package {module}; install it with: pip install 'moco-transfer[{extra}]'"
        )


class Source(Protocol):
    """Location and reader of a split; implementations are frozen and hashable."""

    @property
    def name(self) -> str:
        """Name of the split in DATASETS.TRAIN and DATASETS.TEST."""

    def present(self) -> bool:
        """Return whether the annotations exist, valid or not."""

    def read(self) -> Split:
        """Read and validate the whole split.

        Raises:
            DataError: If anything cannot be used; the message names file, object and reason.
        """


# The states of a finding.
OK, PART, NOTE, ABSENT, WRONG = "ok", "part", "note", "absent", "WRONG"


@dataclass(frozen=True)
class Finding:
    """Result of the doctor on one split or folder; `state` is one of the five above."""

    name: str
    state: str
    text: str = ""


@dataclass(frozen=True)
class Custom:
    """Support of a format for custom datasets.

    Attributes:
        flag: Command-line flag of the doctor, for example --voc-dir.
        options: Arguments of argparse's `add_argument` for the flag.
        task: (readable splits, keys from `parse`) → the file of a task that can train on them, and
            its further keys. Raises DataError if a split is missing, UserError if the user has to
            name one.
        sources: Node DATASETS of a configuration → the splits that its keys name.
        parse: (value of the flag, --root) → the splits, and the keys of DATASETS for them.
        arguments: Node DATASETS → the doctor's arguments, one list per call.
        find: Folder → the keys of DATASETS for each dataset in it in this format.
        check: Readable split → further findings.
    """

    flag: str
    options: Mapping[str, Any]
    task: Callable[[Sequence[Split], Mapping[str, str]], list[str]]
    sources: Callable[[CfgNode], Sequence[Source]]
    parse: Callable[[Any, str], tuple[Sequence[Source], dict[str, str]]]
    arguments: Callable[[CfgNode], list[list[str]]]
    find: Callable[[Path], list[dict[str, Path]]]
    check: Callable[[Any], Iterable[Finding]] = lambda source: ()


@dataclass(frozen=True)
class Format:
    """A dataset format: its published splits, and its part of the doctor.

    Attributes:
        sources: Folder of all datasets → the published splits in it.
        counts: Name of a published split → its (images, objects); 0 if not published.
        tree: The expected files, as text.
        tasks: Task file → the splits that it needs; the doctor proposes the first that can run.
        download: Instructions to download the files into `{root}`, for datasets that are not in
            archives.yaml.
        check_folders: (folder of all datasets, state of each split) → findings on its folders.
        private: Names of splits without public annotations.
        custom: Support for custom datasets; None if there is none.
    """

    sources: Callable[[str], Sequence[Source]]
    counts: Mapping[str, tuple[int, int]]
    tree: str
    tasks: Mapping[str, tuple[str, ...]]
    download: str = ""
    check_folders: Callable[[str, Mapping[str, str]], Iterable[Finding]] = lambda root, states: ()
    private: tuple[str, ...] = ()
    custom: Custom | None = None


# The format's name on the doctor's command line → function that returns its `Format`.
FORMATS = Registry("dataset format")


def formats() -> dict[str, Format]:
    """Return all registered formats by name."""
    return {name: make() for name, make in FORMATS}


def published_formats() -> dict[str, Format]:
    """Return the registered formats that have published splits, by name."""
    return {name: format_ for name, format_ in formats().items() if format_.counts}


def official_counts(name: str) -> tuple[int, int]:
    """Return the numbers of images and objects of a published split; 0 if unknown."""
    return next((f.counts[name] for f in formats().values() if name in f.counts), (0, 0))


def base_name(name: str) -> str:
    """Return the name of the split without the part."""
    return name.partition("@")[0]


def apply_part(train: Sequence[str], test: Sequence[str], part: str) -> tuple[list[str], list[str]]:
    """Apply DATASETS.PART to DATASETS.TRAIN and DATASETS.TEST; keep names that are parts already.

    For tuning, a tenth of the first training split is held out and replaces the test splits.

    Raises:
        UserError: If there is no such part.
    """
    if part != TUNE:
        parse_subset(part)
        return [name if "@" in name else f"{name}@{part}" for name in train], list(test)
    first, *others = train
    if "@" in first:
        return list(train), list(test)
    return [f"{first}@{KEPT}", *others], [f"{first}@{HELD}"]


def parse_subset(part: str) -> tuple[float, int | None]:
    """Parse a subset such as 10%.3 into its percent, 0..100, and number.

    The number is None if the seed of a run chooses it.

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
            held = choose_by_hash(split.records, HELD_SHARE * len(split.records), "held out")
            return [r for r in split.records if (_id(r) in held) == (self.part == HELD)]
        percent, number = parse_subset(self.part)
        number = 1 + self.seed % FOLDS if number is None else number
        whole = split.records
        if split.evaluator_type != "sem_seg":
            whole = tuple(with_objects(whole))
        if self.index:
            return [whole[i] for i in read_positions(self.index, percent, number, len(whole))]
        images = choose_by_hash(whole, percent / 100 * len(whole), str(number))
        return [record for record in whole if _id(record) in images]


def choose_by_hash(records: Sequence[Record], count: float, salt: str) -> frozenset[str]:
    """Return the ids of the `count` images (rounded down, at least 1) with the lowest hashes.

    The hash is the SHA-256 of `salt` and the id.
    """
    ids = sorted(map(_id, records), key=lambda i: hashlib.sha256(f"{salt} {i}".encode()).digest())
    return frozenset(ids[: max(int(count), 1)])


def read_positions(file: str, percent: float, number: int, count: int) -> list[int]:
    """Read the published positions of a subset, in ascending order.

    Args:
        file: Index file in the format of Unbiased Teacher.
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
