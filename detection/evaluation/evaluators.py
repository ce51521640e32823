"""The metric of a dataset, chosen by its `evaluator_type`; the same objects for both engines.

An evaluator takes the predictions of its process image by image. At the end the main process
extends its own with those of the others and evaluates.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from fvcore.common.config import CfgNode

from detection.datasets.base import Record, Split
from detection.evaluation import voc as voc_eval
from detection.evaluation.predictions import Prediction, Row, rows, write
from moco.common.errors import UserError

__all__ = ["Evaluator", "Prediction", "build_evaluator", "evaluate_together", "metric_kinds"]

_COCO_KEYPOINTS = 17


class Evaluator(Protocol):
    """Picklable, small before the first image."""

    def add(self, record: Record, prediction: Prediction) -> None:
        """Take what the model says about one image."""
        ...

    def extend(self, other: Self) -> None:
        """Append what another process collected."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Metrics in canonical names (detection/evaluation/metrics.py), 0..100 or NaN; writes
        predictions."""
        ...


def evaluate_together(evaluators: Sequence[Evaluator]) -> dict[str, float]:
    """Metrics of what all processes collected, by rank."""
    whole, *others = evaluators
    for other in others:
        whole.extend(other)
    return whole.evaluate()


def metric_kinds(split: Split, cfg: CfgNode) -> tuple[str, ...]:
    """What the task measures on `split`: keys of `detection.evaluation.metrics.HEADLINE`."""
    if split.evaluator_type == "sem_seg":
        return ("sem_seg",)
    if split.evaluator_type == "cityscapes_instance":
        return ("segm",)
    if split.evaluator_type == "densepose":
        return ("bbox", "densepose")
    kinds = ["bbox"]
    if split.evaluator_type in ("coco", "lvis") and cfg.MODEL.MASK_ON:
        kinds.append("segm")
    if split.evaluator_type == "coco" and cfg.MODEL.KEYPOINT_ON:
        kinds.append("keypoints")
    return tuple(kinds)


def build_evaluator(split: Split, cfg: CfgNode, folder: Path) -> Evaluator:
    """The evaluator of `split`; predictions go to `folder/<split>.json`.

    Raises:
        UserError: the model cannot give what the metric needs, the annotations do not have it, or
            the package that computes it is missing. Build it before training.
    """
    build = _BUILDERS.get(split.evaluator_type)
    if build is None:
        raise UserError(
            f"{split.name}: no evaluator for evaluator_type {split.evaluator_type!r}; choices are "
            f"{', '.join(_BUILDERS)}"
        )
    return build(split, cfg, folder)


class VOCEvaluator:
    """The VOC metric (detection/evaluation/voc.py)."""

    def __init__(
        self,
        split: str,
        class_names: Sequence[str],
        truth: Mapping[str, voc_eval.GroundTruth],
        year: int,
        folder: Path,
    ) -> None:
        self._split, self._names, self._year = split, tuple(class_names), year
        self._truth, self._folder = truth, folder
        self._detections = voc_eval.VOCDetections(len(self._names))
        self._rows: list[Row] = []

    def add(self, record: Record, prediction: Prediction) -> None:
        image_id = str(record["image_id"])
        found = (
            np.asarray(prediction["boxes"], dtype=np.float32),
            np.asarray(prediction["scores"], dtype=np.float32),
            np.asarray(prediction["classes"]),
        )
        self._detections.add(image_id, *found)
        self._rows += rows(image_id, *found)

    def extend(self, other: Self) -> None:
        self._detections.extend(other._detections)
        self._rows += other._rows

    def evaluate(self) -> dict[str, float]:
        write(self._folder, self._split, self._names, self._rows)
        return voc_eval.evaluate(self._detections, self._truth, self._names, self._year)


def _voc(split: Split, cfg: CfgNode, folder: Path) -> Evaluator:
    return VOCEvaluator(split.name, split.classes, split.truth, split.metadata["year"], folder)


def _coco(split: Split, cfg: CfgNode, folder: Path) -> Evaluator:
    from detection.evaluation.coco import COCOEvaluator

    kinds = metric_kinds(split, cfg)
    _require_annotated(split, kinds)
    sigmas = tuple(cfg.TEST.KEYPOINT_OKS_SIGMAS) if "keypoints" in kinds else ()
    if "keypoints" in kinds:
        annotated = len(split.metadata["keypoint_names"])
        if annotated != (len(sigmas) or _COCO_KEYPOINTS):
            raise UserError(
                f"TEST.KEYPOINT_OKS_SIGMAS: got {len(sigmas) or 'the 17 of COCO'}, expected "
                f"{annotated}, one for each keypoint of {split.name}"
            )
    return COCOEvaluator(
        *_instances(split), class_names=split.classes, kinds=kinds, folder=folder, oks_sigmas=sigmas
    )


def _lvis(split: Split, cfg: CfgNode, folder: Path) -> Evaluator:
    from detection.evaluation.coco import LVISEvaluator

    kinds = metric_kinds(split, cfg)
    _require_annotated(split, kinds)
    _require_package("hotcoco", "lvis", split)
    return LVISEvaluator(*_instances(split), class_names=split.classes, kinds=kinds, folder=folder)


def _cityscapes(split: Split, cfg: CfgNode, folder: Path) -> Evaluator:
    if not cfg.MODEL.MASK_ON:
        raise UserError(f"{split.name} is evaluated by masks: MODEL.MASK_ON must be True")
    _require_package("cityscapesscripts", "cityscapes", split)
    from detection.evaluation.cityscapes import CityscapesEvaluator, ground_truth_files

    return CityscapesEvaluator(split.name, split.classes, ground_truth_files(split), folder)


def _sem_seg(split: Split, cfg: CfgNode, folder: Path) -> Evaluator:
    from detection.evaluation.sem_seg import SemSegEvaluator

    return SemSegEvaluator(split.classes, split.metadata["ignore_label"])


def _densepose(split: Split, cfg: CfgNode, folder: Path) -> Evaluator:
    raise UserError(
        f"{split.name}: DensePose is evaluated through Detectron2's DensePose project only; use "
        "--engine detectron2 where it is installed"
    )


_BUILDERS = {
    "pascal_voc": _voc,
    "coco": _coco,
    "lvis": _lvis,
    "cityscapes_instance": _cityscapes,
    "sem_seg": _sem_seg,
    "densepose": _densepose,
}


def _instances(split: Split) -> tuple[str, str, dict[int, int]]:
    contiguous = split.metadata["thing_dataset_id_to_contiguous_id"]
    category_ids = {own: given for given, own in contiguous.items()}
    return split.name, split.metadata["json_file"], category_ids


def _require_annotated(split: Split, kinds: Sequence[str]) -> None:
    for kind, key, annotated, what in (
        ("segm", "MODEL.MASK_ON", split.has_masks, "a segmentation"),
        ("keypoints", "MODEL.KEYPOINT_ON", split.has_keypoints, "keypoints"),
    ):
        if kind in kinds and not annotated:
            raise UserError(
                f"{split.name}: not every object has {what} to compare with; correct the "
                f"annotations or set {key} False"
            )


def _require_package(module: str, extra: str, split: Split) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"{split.name}: the metric needs the package {module}; "
            f"install it with: pip install -e '.[{extra}]'"
        )
