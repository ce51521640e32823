"""Interface of evaluators for both engines, and the registry of the datasets' metrics."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from fvcore.common.registry import Registry

from detection.datasets.base import Record, Split

# A model's output for one image, the same from both engines (predictions.py).
Prediction = dict[str, Any]


class Evaluator(Protocol):
    """Picklable collector of the predictions of one process, image by image.

    At the end the main process extends its evaluator by those of the others and evaluates. An
    evaluator without predictions is small.
    """

    def add(self, record: Record, prediction: Prediction) -> None:
        """Add the prediction for one image."""

    def extend(self, other: Self) -> None:
        """Append the predictions that another process collected."""

    def evaluate(self) -> dict[str, float]:
        """Write the predictions; return metrics by canonical name (metrics.py), 0..100 or NaN."""


@dataclass(frozen=True)
class Metric:
    """A dataset's metric under one configuration.

    Attributes:
        kinds: Kinds of metrics, keys of `detection.evaluation.metrics.HEADLINE`.
        build: (split, folder of the prediction file) → the split's evaluator. Raises UserError if
            the model or the annotations lack what the metric needs, or its package is missing.
        package: Package that computes the metric; "" if it is computed here.
    """

    kinds: tuple[str, ...]
    build: Callable[[Split, Path], Evaluator]
    package: str = ""


# `Split.evaluator_type` → function (configuration → `Metric`) of that name.
EVALUATORS = Registry("evaluator")
