"""Mean intersection over union from a confusion matrix, at the size of the label maps.

Where every class occurs, equal to mmsegmentation's `IoUMetric`, to Detectron2's `SemSegEvaluator`
(detectron2/evaluation/sem_seg_evaluation.py) and to the average IoU of cityscapesscripts. A class
that is absent from the ground truth but predicted has an IoU of 0, as in mmsegmentation; one that
is neither has NaN and is excluded from the means. No prediction file is written.
"""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from fvcore.common.config import CfgNode
from numpy.typing import NDArray
from PIL import Image

from detection.datasets.labels import read_record_labels
from detection.evaluation.base import EVALUATORS, Metric, Prediction
from detection.evaluation.metrics import DETECTRON2_MEAN
from moco.common.errors import DataError


class SemSegEvaluator:
    """Evaluator of semantic segmentation: a confusion matrix of the K classes.

    Args:
        class_names: Names of the K classes.
        ignore_label: Label of the pixels that do not count.
        reduced_px: If > 0, label maps and predictions are reduced to squares of this side first.
    """

    def __init__(self, class_names: Sequence[str], ignore_label: int, reduced_px: int = 0) -> None:
        self._names, self._ignore_label = tuple(class_names), ignore_label
        self._reduced_px = reduced_px
        K = len(self._names)
        self._pixels = np.zeros((K, K), dtype=np.int64)  # [predicted, true]

    def add(self, record: dict[str, Any], prediction: Prediction) -> None:
        """Compare `sem_seg` (H, W) with the label map `record["sem_seg_file_name"]`.

        Raises:
            DataError: If the label map has another size, or a value that is no class.
        """
        path = record["sem_seg_file_name"]
        truth: NDArray[Any] = read_record_labels(record)
        predicted = np.asarray(prediction["sem_seg"])
        if truth.shape != predicted.shape:
            (H, W), (h, w) = truth.shape, predicted.shape
            expected = f"the size of {record['file_name']}, {w}x{h}"
            raise DataError(f"{path}: got {W}x{H}, expected {expected}")
        if self._reduced_px:
            truth, predicted = (_reduced(labels, self._reduced_px) for labels in (truth, predicted))
        counted = truth != self._ignore_label
        predicted, truth = predicted[counted], truth[counted].astype(np.int64)
        K = len(self._names)
        if truth.size and truth.max() >= K:
            expected = f"0 to {K - 1} or {self._ignore_label} (ignored)"
            raise DataError(f"{path}: class id {truth.max()}, expected {expected}")
        self._pixels += np.bincount(K * predicted + truth, minlength=K * K).reshape(K, K)

    def extend(self, other: Self) -> None:
        """Add the counts of another process."""
        self._pixels += other._pixels

    def evaluate(self) -> dict[str, float]:
        """Return sem_seg/mIoU, fwIoU, mACC, pACC and IoU-<class>, 0..100; NaN if undefined.

        Deviation: Detectron2's mIoU is the mean over the classes of the ground truth. If one of the
        classes is absent from it, that mean is added as mIoU_detectron2.
        """
        hit = self._pixels.diagonal().astype(np.float64)  # (K,)
        true = self._pixels.sum(axis=0).astype(np.float64)
        predicted = self._pixels.sum(axis=1).astype(np.float64)
        present = true > 0
        with np.errstate(invalid="ignore", divide="ignore"):
            accuracy = np.where(present, hit / true, np.nan)
            iou = np.where(true + predicted > 0, hit / (true + predicted - hit), np.nan)
            share = true / true.sum()
            means = {
                "mIoU": np.nansum(iou) / (~np.isnan(iou)).sum(),
                "fwIoU": (iou[present] * share[present]).sum() if present.any() else np.nan,
                "mACC": accuracy[present].sum() / present.sum(),
                "pACC": hit.sum() / true.sum(),
            }
            if not present.all():
                means[DETECTRON2_MEAN] = iou[present].sum() / present.sum()
        means |= {f"IoU-{name}": value for name, value in zip(self._names, iou, strict=True)}
        return {f"sem_seg/{name}": float(100 * value) for name, value in means.items()}


def _reduced(labels: NDArray[Any], side: int) -> NDArray[Any]:
    image = Image.fromarray(labels.astype(np.uint8))
    return np.asarray(image.resize((side, side), Image.Resampling.NEAREST)).astype(np.int64)


@EVALUATORS.register()
def sem_seg(cfg: CfgNode) -> Metric:
    """Return the metric of semantic segmentation: the mean IoU."""
    return Metric(
        ("sem_seg",),
        lambda split, folder: SemSegEvaluator(
            split.classes, split.metadata["ignore_label"], cfg.TEST.SEM_SEG_REDUCED_SIZE
        ),
    )
