"""Mean intersection over union from a confusion matrix, at the label maps' own size.

Equal to Detectron2's `SemSegEvaluator` (detectron2/evaluation/sem_seg_evaluation.py) and, where
every class occurs, to the average IoU of cityscapesscripts. A class that is absent from the ground
truth counts in no mean and has no IoU of its own (NaN). No prediction file is written.
"""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from fvcore.common.config import CfgNode
from numpy.typing import NDArray

from detection.datasets.labels import read_labels
from detection.evaluation.base import EVALUATORS, Metric, Prediction
from moco.common.errors import DataError


class SemSegEvaluator:
    """Counts pixels of the K classes, image by image; those of `ignore_label` do not count."""

    def __init__(self, class_names: Sequence[str], ignore_label: int) -> None:
        self._names, self._ignore_label = tuple(class_names), ignore_label
        K = len(self._names)
        self._pixels = np.zeros((K, K), dtype=np.int64)  # [predicted, true]

    def add(self, record: dict[str, Any], prediction: Prediction) -> None:
        """Compare `sem_seg` (H, W) with the label map `record["sem_seg_file_name"]`.

        Raises:
            DataError: the label map has another size, or a value that is no class.
        """
        path = record["sem_seg_file_name"]
        truth: NDArray[Any] = read_labels(path)
        predicted = np.asarray(prediction["sem_seg"])
        if truth.shape != predicted.shape:
            (H, W), (h, w) = truth.shape, predicted.shape
            expected = f"the size of {record['file_name']}, {w}x{h}"
            raise DataError(f"{path}: got {W}x{H}, expected {expected}")
        counted = truth != self._ignore_label
        predicted, truth = predicted[counted], truth[counted].astype(np.int64)
        K = len(self._names)
        if truth.size and truth.max() >= K:
            expected = f"0 to {K - 1} or {self._ignore_label} (ignored)"
            raise DataError(f"{path}: class id {truth.max()}, expected {expected}")
        self._pixels += np.bincount(K * predicted + truth, minlength=K * K).reshape(K, K)

    def extend(self, other: Self) -> None:
        """Add another process's counts."""
        self._pixels += other._pixels

    def evaluate(self) -> dict[str, float]:
        """sem_seg/mIoU, fwIoU, mACC, pACC and IoU-<class> in 0..100; NaN where undefined."""
        hit = self._pixels.diagonal().astype(np.float64)  # (K,)
        true = self._pixels.sum(axis=0).astype(np.float64)
        predicted = self._pixels.sum(axis=1).astype(np.float64)
        present = true > 0
        with np.errstate(invalid="ignore", divide="ignore"):
            accuracy = np.where(present, hit / true, np.nan)
            iou = np.where(present, hit / (true + predicted - hit), np.nan)
            share = true / true.sum()
            means = {
                "mIoU": iou[present].sum() / present.sum(),
                "fwIoU": (iou[present] * share[present]).sum() if present.any() else np.nan,
                "mACC": accuracy[present].sum() / present.sum(),
                "pACC": hit.sum() / true.sum(),
            }
        means |= {f"IoU-{name}": value for name, value in zip(self._names, iou, strict=True)}
        return {f"sem_seg/{name}": float(100 * value) for name, value in means.items()}


@EVALUATORS.register()
def sem_seg(cfg: CfgNode) -> Metric:
    """Mean IoU of labels."""
    return Metric(
        ("sem_seg",),
        lambda split, folder: SemSegEvaluator(split.classes, split.metadata["ignore_label"]),
    )
