"""What a dataset is to both engines: formats, sources of splits, validated splits."""

import dataclasses
import gc
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from moco.common.errors import UserError

# Detectron2's standard dict of one image ("file_name", "image_id", "height", "width",
# "annotations" or "sem_seg_file_name"), equal to what Detectron2's own reader of the format gives.
Record = dict[str, Any]

XYXY_ABS, XYWH_ABS = 0, 1  # Detectron2's BoxMode


@dataclass(frozen=True, eq=False)
class Split:
    """A validated split.

    Attributes:
        name: as in DATASETS.TRAIN and TEST.
        evaluator_type: Detectron2's word for the metric: pascal_voc, coco, lvis,
            cityscapes_instance, sem_seg, densepose.
        classes: in the order of their contiguous ids; things, or all classes for sem_seg.
        annotations_sha256: hex digest of the images' names and annotations, not of their
            location: two folders of one name are two datasets when it differs.
        notes: what was clipped or left out, with counts.
        metadata: what Detectron2's MetadataCatalog holds about the split.
        truth: what the metric compares with, where that is not in `metadata` or the records:
            of VOC `GroundTruth` by image id, of Cityscapes' instances a file by `file_name`.
        from_catalog: from Detectron2's DatasetCatalog, and measured by Detectron2 itself.
        images: ids of the images of a part (detection/datasets/parts.py); None: it is whole.
        has_masks: every annotation has a segmentation, but for those that `with_masks` leaves out.
        has_keypoints: every person has keypoints.
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
    from_catalog: bool = False
    images: frozenset[str] | None = None


def image_key(record: Mapping[str, Any]) -> int | str:
    """Return its id, since a COCO file may list a file under two; its file in a format without."""
    key: int | str = record.get("image_id", record["file_name"])
    return key


def object_counts(split: Split, *, measured: bool = False) -> Counter[str]:
    """Class → number of its objects in a split of instances, without the classes that have none.

    Crowds never count. `measured`: nor do VOC's difficult objects, although they are trained on.
    """
    if measured and split.truth is not None and split.evaluator_type == "pascal_voc":
        ids = (i for truth in split.truth.values() for i in truth.classes[~truth.difficult])
    else:
        objects = (item for record in split.records for item in record.get("annotations", ()))
        ids = (item["category_id"] for item in objects if not item.get("iscrowd", 0))
    return Counter(split.classes[i] for i in ids)


def with_objects(records: Sequence[Record]) -> list[Record]:
    """The records with an object that is no crowd (DATALOADER.FILTER_EMPTY_ANNOTATIONS)."""
    return [r for r in records if any(not item.get("iscrowd", 0) for item in r["annotations"])]


def with_masks(split: Split) -> Split:
    """Return a split that `has_masks` without the objects whose masks could not be used."""
    objects = [[one for one in r["annotations"] if "segmentation" in one] for r in split.records]
    if all(len(a) == len(r["annotations"]) for a, r in zip(objects, split.records, strict=True)):
        return split
    records = zip(split.records, objects, strict=True)
    return dataclasses.replace(split, records=tuple({**r, "annotations": a} for r, a in records))


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection, which goes through millions of new objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def require_package(module: str, extra: str, needs: str) -> None:
    """Raise UserError where the package of an extra is not installed; begins with `needs`."""
    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"{needs} the package {module}; install it with: pip install 'moco-transfer[{extra}]'"
        )


class Source(Protocol):
    """Where a split is and how it is read; frozen and hashable."""

    @property
    def name(self) -> str: ...

    def present(self) -> bool:
        """Whether its annotations exist, right or wrong."""

    def read(self) -> Split:
        """Read and check the whole split.

        Raises:
            DataError: anything that cannot be used; the message names file, object and reason.
        """


# States of a finding.
OK, PART, NOTE, ABSENT, WRONG = "ok", "part", "note", "absent", "WRONG"


@dataclass(frozen=True)
class Finding:
    """The doctor's result on one split or folder; `state` is one of the five above."""

    name: str
    state: str
    text: str = ""


@dataclass(frozen=True)
class Custom:
    """How the user names a custom dataset of a format.

    Attributes:
        flag: of the doctor, for example --voc-dir; `options`: argparse's for it.
        task: (splits that can be read, `parse`'s keys) → the file of a task that can train on them,
            and its further keys. Raises DataError where there is a part missing; UserError where
            the user has to name one.
        sources: node DATASETS of a configuration → the splits that its keys name.
        parse: (the flag's value, --root) → the splits, and the keys of DATASETS for them.
        arguments: node DATASETS → the doctor's arguments, one list for each call.
        check: a split that can be read → what else a user should know of it.
    """

    flag: str
    options: Mapping[str, Any]
    task: Callable[[Sequence[Split], Mapping[str, str]], list[str]]
    sources: Callable[[CfgNode], Sequence[Source]]
    parse: Callable[[Any, str], tuple[Sequence[Source], dict[str, str]]]
    arguments: Callable[[CfgNode], list[list[str]]]
    check: Callable[[Any], Iterable[Finding]] = lambda source: ()


@dataclass(frozen=True)
class Format:
    """A dataset format: its published splits, and what the doctor knows about it.

    Attributes:
        sources: folder of all datasets → the published splits in it.
        counts: name of a published split → its (images, objects); 0 where not published.
        tree: the expected files.
        tasks: task file → the splits that it needs; the doctor proposes the first that can run.
        download: how to get them into `{root}` where archives.yaml does not know them.
        check_folders: (folder of all datasets, state of each split) → findings on whole folders.
        private: names of splits without public annotations.
        custom: for custom datasets; None: not supported.
    """

    sources: Callable[[str], Sequence[Source]]
    counts: Mapping[str, tuple[int, int]]
    tree: str
    tasks: Mapping[str, tuple[str, ...]]
    download: str = ""
    check_folders: Callable[[str, Mapping[str, str]], Iterable[Finding]] = lambda root, states: ()
    private: tuple[str, ...] = ()
    custom: Custom | None = None


# The doctor's word for a format → function without arguments that makes its `Format`.
FORMATS = Registry("dataset format")


def formats() -> dict[str, Format]:
    """All registered formats by name."""
    return {name: make() for name, make in FORMATS}


def official_counts(name: str) -> tuple[int, int]:
    """Images and objects of a published split; 0 where unknown."""
    return next((f.counts[name] for f in formats().values() if name in f.counts), (0, 0))
