"""Data sets and evaluators for Detectron2, from the same validated reader as the other engine."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm

from detection.datasets import VOCSplit, ground_truth, read_split, records, resolve
from detection.predictions import rows, write
from detection.voc_eval import VOCDetections, evaluate
from moco.errors import DataError, UserError


def register(cfg: CfgNode, names: Iterable[str]) -> None:
    """Register splits of DATASETS.VOC_DIR; Detectron2's own names are only checked.

    Raises:
        UserError: a name that Detectron2 uses for something else; DataError: what the reader finds.
    """
    for name in dict.fromkeys(names):
        source = resolve(name, cfg)
        if source.builtin:
            if len(read_split(source).images) == 1:
                raise DataError(
                    f"{name}: one image only, which Detectron2's reader cannot list; "
                    "set DATASETS.VOC_DIR to the folder instead"
                )
            continue
        if name in DatasetCatalog:
            if not MetadataCatalog.get(name).get("voc_dir"):
                raise UserError(
                    f"Detectron2 has a data set named {name} already; rename the folder "
                    f"{cfg.DATASETS.VOC_DIR}"
                )
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)
        split = read_split(source)
        DatasetCatalog.register(name, lambda split=split: records(split))
        MetadataCatalog.get(name).set(
            thing_classes=list(source.classes),
            dirname=str(source.root),
            split=source.split,
            year=source.year,
            evaluator_type="pascal_voc",
            voc_dir=True,
        )


def build_evaluator(cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
    """The evaluator that the data set's metadata ask for by ``evaluator_type``."""
    kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
    if kind != "pascal_voc":
        raise UserError(f"{dataset_name}: no evaluator for evaluator_type {kind!r}")
    split = read_split(resolve(dataset_name, cfg))
    return VOCEvaluator(split, Path(cfg.OUTPUT_DIR) / "inference")


class VOCEvaluator(DatasetEvaluator):
    """The VOC metric of detection/voc_eval.py behind Detectron2's interface.

    Same numbers as Detectron2's ``PascalVOCDetectionEvaluator``; also per class, and for
    annotations that its reader refuses (no pose, fractional coordinates).
    """

    def __init__(self, split: VOCSplit, folder: Path) -> None:
        self._split, self._folder = split, folder
        self.reset()

    def reset(self) -> None:
        self._detections = VOCDetections(len(self._split.classes))
        self._predictions: list[dict[str, Any]] = []

    def process(self, inputs: Sequence[dict[str, Any]], outputs: Sequence[dict[str, Any]]) -> None:
        for picture, output in zip(inputs, outputs, strict=True):
            instances = output["instances"].to("cpu")
            found = (
                instances.pred_boxes.tensor.numpy(),
                instances.scores.numpy(),
                instances.pred_classes.numpy(),
            )
            self._detections.add(picture["image_id"], *found)
            self._predictions += rows(picture["image_id"], *found)

    def evaluate(self) -> OrderedDict[str, dict[str, float]] | None:
        """``{"bbox": {"AP": …}}`` on the main process, None on the others."""
        gathered = comm.gather((self._detections, self._predictions), dst=0)
        if not comm.is_main_process():
            return None
        everything, predictions = VOCDetections(len(self._split.classes)), []
        for detections, its_predictions in gathered:
            everything.extend(detections)
            predictions += its_predictions
        write(self._folder, self._split.name, self._split.classes, predictions)
        metrics = evaluate(
            everything, ground_truth(self._split), self._split.classes, self._split.source.year
        )
        return OrderedDict(bbox={k.removeprefix("bbox/"): v for k, v in metrics.items()})
