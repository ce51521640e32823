"""Choice of a dataset's metric by its `evaluator_type`, the same for both engines."""

from pathlib import Path

from fvcore.common.config import CfgNode

from detection.datasets.base import Split
from detection.evaluation import cityscapes, coco, sem_seg, voc  # noqa: F401  # register their metrics
from detection.evaluation.base import EVALUATORS, Evaluator, Metric
from moco.common.errors import UserError, lookup


def metric_kinds(split: Split, cfg: CfgNode) -> tuple[str, ...]:
    """Return the kinds that the task measures on `split`, keys of `metrics.HEADLINE`."""
    return _metric(split, cfg).kinds


def metric_package(split: Split, cfg: CfgNode) -> str:
    """Return the package that computes the metric of `split`; "" for this one or Detectron2."""
    return "" if split.from_catalog else _metric(split, cfg).package


def build_evaluator(split: Split, cfg: CfgNode, folder: Path) -> Evaluator:
    """Build the evaluator of `split`, which writes predictions to `folder/<split>.json`.

    Call it before training, because it checks that the split can be evaluated.

    Raises:
        UserError: If the split cannot be evaluated (`Metric.build`).
    """
    return _metric(split, cfg).build(split, folder)


def _metric(split: Split, cfg: CfgNode) -> Metric:
    return lookup(EVALUATORS, split.evaluator_type, f"{split.name}: evaluator_type")(cfg)


@EVALUATORS.register()
def densepose(cfg: CfgNode) -> Metric:
    """Return DensePose's metric; Detectron2's project computes it (detection/d2/densepose.py)."""

    def build(split: Split, folder: Path) -> Evaluator:
        raise UserError(
            f"{split.name}: DensePose is evaluated through Detectron2's DensePose project only; "
            "use --engine detectron2 where it is installed"
        )

    return Metric(("bbox", "densepose"), build)
