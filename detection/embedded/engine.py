"""The embedded engine as the commands see it; see `detection.config.engines.Engine`.

A task is checked without torchvision, which takes longer to import than torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fvcore.common.config import CfgNode

from detection.config.task import default_task
from detection.datasets.base import Split
from detection.embedded.supported import check_supported as check_config
from detection.evaluation.evaluators import build_evaluator
from moco.common.errors import UserError

if TYPE_CHECKING:
    from detection.embedded.model import Model
    from detection.engine.job import Job
    from detection.engine.weights import EngineResult

__all__ = [
    "build_model",
    "check_config",
    "check_evaluator",
    "default_config",
    "provide_datasets",
    "run",
]


def default_config(*, dense_pose: bool) -> CfgNode:
    """Raise UserError for DensePose, which this engine does not have."""
    if dense_pose:
        raise UserError(
            "MODEL.DENSEPOSE_ON: the embedded engine has no DensePose; use --engine detectron2 "
            "with Detectron2's DensePose project installed"
        )
    return default_task()


def provide_datasets(cfg: CfgNode) -> None:
    """None: detection/datasets has all that this engine can read."""


def check_evaluator(split: Split, cfg: CfgNode) -> None:
    build_evaluator(split, cfg, Path(cfg.OUTPUT_DIR))


def build_model(cfg: CfgNode) -> Model:
    from detection.embedded.build import build_model

    return build_model(cfg)


def run(job: Job) -> EngineResult:
    from detection.engine.launch import run

    return run(job)
