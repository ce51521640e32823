"""What a dataset is to both engines: validated records, and what its metric compares with."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

# Detectron2's standard data-set dict of one image ("file_name", "image_id", "height", "width",
# "annotations" or "sem_seg_file_name"), equal to what Detectron2's own reader of the format gives.
Record = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Split:
    """A validated split.

    Attributes:
        name: as in DATASETS.TRAIN and TEST.
        evaluator_type: Detectron2's word for the metric: pascal_voc, coco, lvis,
            cityscapes_instance, sem_seg, densepose.
        classes: in the order of their contiguous ids; things, or all classes for sem_seg.
        records: one per image.
        annotations_sha256: hex digest of which images there are and what is annotated, not of
            where they lie: two folders of one name are two datasets when it differs.
        notes: what was clipped or left out, with counts.
        metadata: what Detectron2's MetadataCatalog holds about the split.
        truth: what the metric compares with, where that is not in `metadata` or the records.
        from_catalog: read and measured by Detectron2 itself, from its DatasetCatalog.
        has_masks: every annotation has a segmentation; has_keypoints: every person has keypoints.
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


def object_counts(split: Split, *, measured: bool = False) -> Counter[str]:
    """Class → number of its objects in a split of instances, without the classes that have none.

    Args:
        measured: only what the metric asks for. Crowds never count; for VOC's metric, difficult
            objects do not either, although they are trained on.
    """
    if measured and split.truth is not None and split.evaluator_type == "pascal_voc":
        ids = (i for truth in split.truth.values() for i in truth.classes[~truth.difficult])
    else:
        ids = (
            item["category_id"]
            for record in split.records
            for item in record.get("annotations", ())
            if not item.get("iscrowd", 0)
        )
    return Counter(split.classes[i] for i in ids)


class Source(Protocol):
    """Where a split lies and how it is read; frozen and hashable."""

    @property
    def name(self) -> str: ...

    def present(self) -> bool:
        """Whether its annotations are there at all, right or wrong."""
        ...

    def read(self) -> Split:
        """Read and check the whole split.

        Raises:
            DataError: anything that cannot be used; the message names file, object and reason.
        """
        ...
