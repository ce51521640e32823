"""Detectron2's catalogs: reading datasets that the user registered, and registering this project's.

A name in DatasetCatalog that this project does not know was registered by the user's code, which
`--import` of train_net.py imports first. Such a dataset is evaluated by Detectron2's own metric.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import (
    CityscapesInstanceEvaluator,
    COCOEvaluator,
    DatasetEvaluator,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
    SemSegEvaluator,
)
from detectron2.structures import BoxMode
from detectron2.utils.file_io import PathManager

from detection.d2 import densepose
from detection.datasets import read_split, register_source
from detection.datasets.base import Record, Split
from detection.datasets.coco_json import read_annotations
from detection.datasets.files import image_size
from detection.evaluation.coco import metric_annotations
from detection.evaluation.evaluators import metric_kinds
from moco.common.errors import DataError, UserError

open_url = partial(PathManager.open, mode="rb")
_OURS = "registered_by_moco_transfer"  # in MetadataCatalog


@dataclass(frozen=True)
class CatalogSource:
    """Dataset that the user's code registered in DatasetCatalog."""

    name: str

    def present(self) -> bool:
        """Return whether the name is registered."""
        return self.name in DatasetCatalog

    def read(self) -> Split:
        """Call the registered function and complete its records.

        A missing size is read from the image header. Boxes in a mode other than XYXY_ABS and
        XYWH_ABS are converted, as Detectron2's mapper does.

        Raises:
            DataError: If the function fails or returns no records, if a box cannot be converted, or
                if an image cannot be read.
            UserError: If the metadata has no class names.
        """
        try:
            records = DatasetCatalog.get(self.name)
        except Exception as error:  # the user's code may raise any kind
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(
                f"{self.name}: the function registered in DatasetCatalog failed ({reason})"
            ) from error
        if not records or not all(isinstance(r, dict) and "file_name" in r for r in records):
            raise DataError(
                f"{self.name}: DatasetCatalog returned no list of dicts with the key 'file_name'"
            )
        metadata = MetadataCatalog.get(self.name)
        kind = metadata.get("evaluator_type", "")
        key = "stuff_classes" if kind == "sem_seg" else "thing_classes"
        classes = metadata.get(key, ())
        if not classes:
            raise UserError(f"{self.name}: MetadataCatalog has no {key}; set the class names there")
        objects = [item for record in records for item in record.get("annotations", ())]
        is_coco_file = kind in ("coco", "lvis") and "json_file" in metadata.as_dict()
        repaired = read_annotations(metadata.json_file).notes if is_coco_file else ()
        content = json.dumps(records, sort_keys=True, default=_plain)
        return Split(
            name=self.name,
            evaluator_type=kind,
            classes=tuple(classes),
            records=tuple(_complete(record) for record in records),
            annotations_sha256=hashlib.sha256(content.encode()).hexdigest(),
            notes=(
                "records come from DatasetCatalog, and the metric is Detectron2's own",
                *(f"annotation file of the metric: {note}" for note in repaired),
            ),
            metadata=metadata.as_dict(),
            has_masks=bool(objects) and all(item.get("segmentation") for item in objects),
            has_keypoints=bool(objects) and all(item.get("keypoints") for item in objects),
            from_catalog=True,
        )


def provide_user_datasets(cfg: CfgNode) -> None:
    """Register the user's datasets that DATASETS names in `detection.datasets`."""
    for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST):
        if name in DatasetCatalog and not MetadataCatalog.get(name).get(_OURS):
            register_source(CatalogSource(name))


def register(cfg: CfgNode, names: Iterable[str]) -> None:
    """Register `names` in Detectron2's catalogs with this project's readers.

    They replace Detectron2's readers of its builtin datasets. Where those work, the records are
    equal (tests/detection); those of LVIS and Cityscapes fail with current package versions.
    """
    for name in dict.fromkeys(names):
        split = read_split(name, cfg)
        if split.from_catalog:
            continue
        if split.evaluator_type == "densepose":
            densepose.register(split)  # its records hold classes of the DensePose project
            continue
        if name in DatasetCatalog:
            DatasetCatalog.remove(name)
        if name in MetadataCatalog.list():
            MetadataCatalog.remove(name)
        DatasetCatalog.register(name, lambda name=name: list(read_split(name, cfg).records))
        # The keys of Detectron2's own registrations.
        metadata = {**split.metadata, "evaluator_type": split.evaluator_type, _OURS: True}
        MetadataCatalog.get(name).set(**metadata)


def check_evaluator(split: Split) -> None:
    """Raise UserError if the metadata's `evaluator_type` is unknown."""
    if split.evaluator_type not in _EVALUATORS:
        raise UserError(
            f"{split.name}: got evaluator_type {split.evaluator_type!r} in MetadataCatalog, "
            f"choices are {', '.join(_EVALUATORS)}"
        )


def build_evaluator(split: Split, cfg: CfgNode, folder: Path) -> DatasetEvaluator:
    """Build Detectron2's own evaluator of a split that comes from its catalog."""
    evaluator = _EVALUATORS[split.evaluator_type](split, cfg, str(folder))
    has_objects = any(record.get("annotations") for record in split.records)
    return _ZeroIfNothingDetected(evaluator) if has_objects else evaluator


class _ZeroIfNothingDetected(DatasetEvaluator):
    """Evaluator of a split with objects whose AP is 0 if the model detects nothing.

    Deviation: Detectron2's COCO and LVIS metrics are NaN then (detection/evaluation/coco.py).
    """

    def __init__(self, evaluator: DatasetEvaluator) -> None:
        self._evaluator = evaluator
        self.reset, self.process = evaluator.reset, evaluator.process

    def evaluate(self) -> dict[str, dict[str, float]]:
        results: dict[str, dict[str, float]] = self._evaluator.evaluate() or {}
        for kind, values in results.items():
            if all(map(math.isnan, values.values())):
                results[kind] = values | dict.fromkeys(values.keys() & {"AP", "AP50", "AP75"}, 0.0)
        return results


def _coco(split: Split, cfg: CfgNode, folder: str) -> DatasetEvaluator:
    test = cfg.TEST
    with _repaired(split.name, cfg) as name:
        return COCOEvaluator(
            name,
            metric_kinds(split, cfg),
            output_dir=folder,
            kpt_oks_sigmas=test.KEYPOINT_OKS_SIGMAS,
            max_dets_per_image=test.COCO_MAX_DETECTIONS,
        )


def _lvis(split: Split, cfg: CfgNode, folder: str) -> DatasetEvaluator:
    with _repaired(split.name, cfg) as name:
        return LVISEvaluator(name, output_dir=folder)


def _complete(record: Record) -> Record:
    """Return a copy of the record with its size and with boxes in a mode that `Mapper` supports."""
    record = dict(record)
    if not {"height", "width"} <= record.keys():
        size = image_size(record["file_name"], open_url=open_url)
        record["width"], record["height"] = size
    if "annotations" in record:
        name = record["file_name"]
        record["annotations"] = [{**item, **_box(item, name)} for item in record["annotations"]]
    return record


def _box(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return `bbox` as Python numbers in a supported mode, and its `bbox_mode`."""
    try:
        mode = BoxMode(item["bbox_mode"])
        box = [value.item() if hasattr(value, "item") else value for value in item["bbox"]]
        if mode not in (BoxMode.XYXY_ABS, BoxMode.XYWH_ABS):
            box, mode = BoxMode.convert(box, mode, BoxMode.XYXY_ABS), BoxMode.XYXY_ABS
        if len(box) != 4:
            raise ValueError(f"{len(box)} numbers")
    except (AssertionError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        raise DataError(
            f"{name}: cannot convert the box {item.get('bbox')} of bbox_mode "
            f"{item.get('bbox_mode')} to XYXY_ABS ({error!r})"
        ) from error
    return {"bbox": box, "bbox_mode": int(mode)}


@contextmanager
def _repaired(name: str, cfg: CfgNode) -> Iterator[str]:
    """Provide a name in MetadataCatalog whose `json_file` is repaired, until the context exits.

    Deviation: Detectron2 evaluates files as they are (detection/datasets/coco_json.py).
    """
    content = MetadataCatalog.get(name).as_dict()
    if "json_file" not in content:  # Detectron2 writes one from the records
        yield name
        return
    if not read_annotations(content["json_file"]).notes:
        yield name
        return
    with TemporaryDirectory() as folder:
        file, repaired = Path(folder, "annotations.json"), f"{name} (repaired)"
        annotations = metric_annotations(content["json_file"], masked=cfg.MODEL.MASK_ON)
        file.write_text(json.dumps(annotations), encoding="utf-8")
        MetadataCatalog.get(repaired).set(**{**content, "name": repaired, "json_file": str(file)})
        try:
            yield repaired
        finally:
            MetadataCatalog.remove(repaired)


_EVALUATORS: dict[str, Callable[[Split, CfgNode, str], DatasetEvaluator]] = {
    "coco": _coco,
    "pascal_voc": lambda split, cfg, folder: PascalVOCDetectionEvaluator(split.name),
    "lvis": _lvis,
    "sem_seg": lambda split, cfg, folder: SemSegEvaluator(split.name, output_dir=folder),
    "cityscapes_instance": lambda split, cfg, folder: CityscapesInstanceEvaluator(split.name),
}


def _plain(value: Any) -> Any:
    """Convert what JSON cannot hold into lists or text that do not depend on the process."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
