"""The metric of a dataset, chosen by its `evaluator_type`; the same objects for both engines."""

from collections.abc import Sequence
from pathlib import Path

from fvcore.common.config import CfgNode

from detection.datasets.base import Split
from detection.evaluation import cityscapes, coco, sem_seg, voc  # noqa: F401  # register themselves
from detection.evaluation.base import EVALUATORS, Evaluator, Metric
from moco.common.errors import UserError
from moco.common.registry import lookup


def evaluate_together(evaluators: Sequence[Evaluator]) -> dict[str, float]:
    """Metrics of what all processes collected, by rank."""
    whole, *others = evaluators
    for other in others:
        whole.extend(other)
    return whole.evaluate()


def metric_kinds(split: Split, cfg: CfgNode) -> tuple[str, ...]:
    """What the task measures on `split`: keys of `detection.evaluation.metrics.HEADLINE`."""
    return _metric(split, cfg).kinds


def metric_package(split: Split, cfg: CfgNode) -> str:
    """The package that computes the metric of `split`; empty: this one, or Detectron2."""
    return "" if split.from_catalog else _metric(split, cfg).package


def build_evaluator(split: Split, cfg: CfgNode, folder: Path) -> Evaluator:
    """The evaluator of `split`; predictions go to `folder/<split>.json`.

    Raises:
        UserError: the split cannot be measured (`Metric.build`). Build it before training.
    """
    return _metric(split, cfg).build(split, folder)


def _metric(split: Split, cfg: CfgNode) -> Metric:
    return lookup(EVALUATORS, split.evaluator_type, f"{split.name}: evaluator_type")(cfg)


@EVALUATORS.register()
def densepose(cfg: CfgNode) -> Metric:
    """DensePose's AP, which Detectron2's DensePose project computes (detection/d2/densepose.py)."""

    def build(split: Split, folder: Path) -> Evaluator:
        raise UserError(
            f"{split.name}: DensePose is evaluated through Detectron2's DensePose project only; "
            "use --engine detectron2 where it is installed"
        )

    return Metric(("bbox", "densepose"), build)
