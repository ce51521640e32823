"""Datasets of the user's own code: names in Detectron2's DatasetCatalog that this project has not.

Their records and their metric are Detectron2's own. What registers them is imported first, by
`--import` of train_net.py.
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
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

from detection.datasets import provide
from detection.datasets.base import Split
from moco.common.errors import DataError, UserError


@dataclass(frozen=True)
class CatalogSource:
    """A name in DatasetCatalog."""

    name: str

    def present(self) -> bool:
        return self.name in DatasetCatalog

    def read(self) -> Split:
        """Call the registered function; the records are taken as they are.

        Raises:
            DataError: it fails, or gives no records. UserError: no class names.
        """
        try:
            records = DatasetCatalog.get(self.name)
        except Exception as error:  # of the user's code
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(f"{self.name}: its function in DatasetCatalog failed ({reason})") from (
                error
            )
        if not records or not all(isinstance(r, dict) and "file_name" in r for r in records):
            raise DataError(f"{self.name}: DatasetCatalog gives no list of dicts with 'file_name'")
        metadata = MetadataCatalog.get(self.name)
        kind = metadata.get("evaluator_type", "")
        key = "stuff_classes" if kind == "sem_seg" else "thing_classes"
        classes = metadata.get(key, ())
        if not classes:
            raise UserError(f"{self.name}: MetadataCatalog has no {key}; set the class names there")
        objects = [item for record in records for item in record.get("annotations", ())]
        content = json.dumps(records, sort_keys=True, default=_plain)
        return Split(
            name=self.name,
            evaluator_type=kind,
            classes=tuple(classes),
            records=tuple(records),
            annotations_sha256=hashlib.sha256(content.encode()).hexdigest(),
            notes=("read and measured by Detectron2's own code, as DatasetCatalog has it",),
            metadata=metadata.as_dict(),
            has_masks=bool(objects) and all(item.get("segmentation") for item in objects),
            has_keypoints=bool(objects) and all(item.get("keypoints") for item in objects),
            from_catalog=True,
        )


def import_modules(names: Iterable[str]) -> list[str]:
    """Import the user's modules; returns a line about each.

    Raises:
        UserError: one cannot be imported.
    """
    lines = []
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # of the user's code
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"--import {name}: {reason}; its folder has to be in PYTHONPATH"
            ) from error
        lines.append(f"import: {name} ({getattr(module, '__file__', None) or 'built in'})")
    return lines


def offer(cfg: CfgNode) -> None:
    """Let the names in DATASETS.TRAIN and TEST be those of DatasetCatalog, where they are in it."""
    for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST):
        if name in DatasetCatalog:
            provide(CatalogSource(name))


def check_evaluator(split: Split) -> None:
    """Raise UserError where the metadata's evaluator_type is none of those that are known."""
    if split.evaluator_type not in _EVALUATORS:
        raise UserError(
            f"{split.name}: evaluator_type in MetadataCatalog is {split.evaluator_type!r}, choices "
            f"are {', '.join(_EVALUATORS)}"
        )


def build_evaluator(split: Split, cfg: CfgNode, folder: Path) -> DatasetEvaluator:
    """Detectron2's own evaluator of a split of its catalog."""
    return _EVALUATORS[split.evaluator_type](split.name, cfg, str(folder))


def _coco(name: str, cfg: CfgNode, folder: str) -> DatasetEvaluator:
    sigmas = cfg.TEST.KEYPOINT_OKS_SIGMAS
    return COCOEvaluator(name, output_dir=folder, kpt_oks_sigmas=sigmas)


_EVALUATORS: dict[str, Callable[[str, CfgNode, str], DatasetEvaluator]] = {
    "coco": _coco,
    "pascal_voc": lambda name, cfg, folder: PascalVOCDetectionEvaluator(name),
    "lvis": lambda name, cfg, folder: LVISEvaluator(name, output_dir=folder),
    "sem_seg": lambda name, cfg, folder: SemSegEvaluator(name, output_dir=folder),
    "cityscapes_instance": lambda name, cfg, folder: CityscapesInstanceEvaluator(name),
}


def _plain(value: Any) -> Any:
    """What JSON lacks, as text that is the same in every process."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
