"""What an evaluator is to both engines, and the registry of the datasets' metrics."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from fvcore.common.registry import Registry

from detection.datasets.base import Record, Split

# A model's answer for one image, the same from both engines (predictions.py).
Prediction = dict[str, Any]


class Evaluator(Protocol):
    """Takes the predictions of its process image by image; picklable, small before the first.

    At the end the main process extends its own with those of the others and evaluates.
    """

    def add(self, record: Record, prediction: Prediction) -> None:
        """Take the prediction for one image."""

    def extend(self, other: Self) -> None:
        """Append what another process collected."""

    def evaluate(self) -> dict[str, float]:
        """Metrics in canonical names (metrics.py), 0..100 or NaN; writes the predictions."""


@dataclass(frozen=True)
class Metric:
    """A dataset's metric under one configuration.

    Attributes:
        kinds: what it measures: keys of `detection.evaluation.metrics.HEADLINE`.
        build: (split, folder of the prediction file) → the split's evaluator. Raises UserError
            where the model cannot give what the metric needs, the annotations do not have it, or
            the package that computes it is missing.
        package: the one that computes it, where it is not this one.
    """

    kinds: tuple[str, ...]
    build: Callable[[Split, Path], Evaluator]
    package: str = ""


# `Split.evaluator_type` → function of that name: configuration → `Metric`.
EVALUATORS = Registry("evaluator")
