"""Embedded engine; implements `detection.config.engines.Engine`.

Checking a task does not import torchvision, which takes longer to import than torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from detection.config.task import default_task
from detection.datasets.base import Record, Split
from detection.embedded.supported import check_supported as check_config
from detection.evaluation.evaluators import build_evaluator
from moco.common.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from detection.data.sample import Sample
    from detection.embedded.model import Model

__all__ = ["check_config"]

loggers = ()
open_url = None


def default_config(*, dense_pose: bool) -> CfgNode:
    """Return the default task; raises UserError for DensePose, which this engine does not have."""
    if dense_pose:
        raise UserError(
            "MODEL.DENSEPOSE_ON: the embedded engine has no DensePose; use --engine detectron2 "
            "with Detectron2's DensePose project installed"
        )
    return default_task()


def provide_datasets(cfg: CfgNode) -> None:
    """Do nothing, because detection/datasets has every dataset that this engine can read."""


def check_evaluator(split: Split, cfg: CfgNode) -> None:
    build_evaluator(split, cfg, Path(cfg.OUTPUT_DIR))


def session() -> AbstractContextManager[None]:
    return nullcontext()


def build_model(cfg: CfgNode) -> Model:
    from detection.embedded.model import build_model

    return build_model(cfg)


def to_model(samples: Sequence[Sample]) -> Sequence[Sample]:
    return samples


def to_predictions(outputs: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return outputs


def evaluator(split: Split, cfg: CfgNode, folder: Path) -> None:
    return None


def step_scope(iteration: int) -> AbstractContextManager[Mapping[str, tuple[float, bool]]]:
    return nullcontext({})


def mapper(
    cfg: CfgNode, *, training: bool
) -> tuple[Sequence[Record], Callable[[Record], Any]] | None:
    return None


def augmented(cfg: CfgNode, model: nn.Module) -> nn.Module | None:
    return None
