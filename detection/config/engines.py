"""The two detection engines by name, and the interface that commands and configuration use."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

    from detection.datasets.base import Split

_MODULES = {"detectron2": "detection.d2.engine", "embedded": "detection.embedded.engine"}


class Engine(Protocol):
    """What the module of an engine has."""

    # The network of a configuration, at random weights.
    build_model: Callable[[CfgNode], Any]
    # Do a detection.engine.job.Job; returns detection.engine.weights.EngineResult.
    run: Callable[..., Any]

    def default_config(self, *, dense_pose: bool) -> CfgNode:
        """Every key that the engine knows; DensePose's are known to Detectron2 only."""
        ...

    def check_config(self, cfg: CfgNode) -> None:
        """Raise UserError for the first key, or pair of keys, that the engine cannot honor."""
        ...

    def provide_datasets(self, cfg: CfgNode) -> None:
        """Make the datasets known that only this engine can read."""
        ...

    def check_evaluator(self, split: Split, cfg: CfgNode) -> None:
        """Raise UserError for a metric that could not be computed at the end of a training."""
        ...


def detectron2_installed() -> bool:
    """Whether there is a Detectron2; `find_engine` says whether it can be imported."""
    return importlib.util.find_spec("detectron2") is not None


def find_engine(name: str) -> Engine:
    """The engine called `name`; Detectron2 is imported here and not before.

    Raises:
        ImportError: it, or what it needs, is not installed.
    """
    return cast(Engine, importlib.import_module(_MODULES[name]))
