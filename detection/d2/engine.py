"""Detectron2 as the commands see it; see `detection.config.engines.Engine`."""

from pathlib import Path

from detectron2.config import CfgNode
from torch import nn

from detection.d2 import catalog, densepose
from detection.d2.config import check_transfer_config as check_config
from detection.d2.config import transfer_defaults as default_config
from detection.d2.config import with_builder
from detection.d2.trainer import Trainer, run
from detection.datasets.base import Split
from detection.evaluation.evaluators import build_evaluator
from detection.modeling.norms import with_process_norms

__all__ = [
    "build_model",
    "check_config",
    "check_evaluator",
    "default_config",
    "provide_datasets",
    "run",
]

provide_datasets = catalog.offer


def build_model(cfg: CfgNode) -> nn.Module:
    return Trainer.build_model(with_builder(with_process_norms(cfg, 1)))


def check_evaluator(split: Split, cfg: CfgNode) -> None:
    if split.evaluator_type == "densepose":
        densepose.fetch_surface()
    elif split.from_catalog:
        catalog.check_evaluator(split)
    else:
        build_evaluator(split, cfg, Path(cfg.OUTPUT_DIR))
