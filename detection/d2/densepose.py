"""COCO DensePose through Detectron2's own DensePose project, which is installed separately."""

from typing import Any

from detectron2.config import CfgNode
from detectron2.evaluation import DatasetEvaluator

from moco.errors import UserError

INSTALL = (
    "python -m pip install --no-build-isolation "
    "'git+https://github.com/facebookresearch/detectron2.git#subdirectory=projects/DensePose'"
)


def add_keys(cfg: CfgNode) -> None:
    """DensePose's keys (in place); importing the project registers its heads and data sets.

    Raises:
        UserError: the project is not installed.
    """
    try:
        from densepose import add_densepose_config
    except ImportError as error:
        raise UserError(
            f"MODEL.DENSEPOSE_ON needs Detectron2's DensePose project ({error}): {INSTALL}"
        ) from error
    add_densepose_config(cfg)


def build_mapper(cfg: CfgNode, *, training: bool) -> Any:
    """DensePose's own mapper; it fetches the symmetries of the body's charts on first use."""
    from densepose.data import DatasetMapper

    return DatasetMapper(cfg, training)


def build_evaluator(cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
    """Box AP and DensePose AP (GPS), by DensePose's own evaluators."""
    from densepose.engine import Trainer

    return Trainer.build_evaluator(cfg, dataset_name)
