"""Detection engines by name, and their interface to commands, training loop and data."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode
    from torch import Tensor, nn

    from detection.data.sample import Sample
    from detection.datasets.base import Record, Split

_MODULES = {"detectron2": "detection.d2.engine", "embedded": "detection.embedded.engine"}


class OwnEvaluator(Protocol):
    """Interface of an engine's own evaluator, which itself gathers predictions from the ranks."""

    def process(self, records: Sequence[Record], outputs: Sequence[Any]) -> None:
        """Process the model's outputs for the images of `records`."""

    def evaluate(self) -> Mapping[str, float]:
        """Return the metrics as kind/name on the main process; every rank has to call it."""


class Engine(Protocol):
    """Interface that the module of an engine implements.

    Attributes:
        loggers: Names of the loggers whose messages go to a run's log.txt.
        open_url: Function that opens a path with `://` in it; None: the engine has no such paths.
    """

    loggers: tuple[str, ...]
    open_url: Callable[[str], BinaryIO] | None

    def default_config(self, *, dense_pose: bool) -> CfgNode:
        """Return the defaults of every key of the engine; only Detectron2 has DensePose's keys."""
        ...

    def check_config(self, cfg: CfgNode) -> None:
        """Raise UserError for the first key, or pair of keys, that the engine does not support."""
        ...

    def provide_datasets(self, cfg: CfgNode) -> None:
        """Register the datasets that only this engine can read."""
        ...

    def check_evaluator(self, split: Split, cfg: CfgNode) -> None:
        """Raise UserError for a metric that cannot be computed at the end of the training."""
        ...

    def session(self) -> AbstractContextManager[None]:
        """Set up the engine's own process groups while the processes are connected."""
        ...

    def build_model(self, cfg: CfgNode) -> nn.Module:
        """Build the network of a configuration, randomly initialized."""
        ...

    def to_model(self, samples: Sequence[Sample]) -> Any:
        """Convert a batch to the model's input format."""
        ...

    def to_predictions(self, outputs: Any) -> list[dict[str, Tensor]]:
        """Convert the model's outputs to one dict of tensors per image.

        Detectors: `boxes` (D, 4), `scores` and `classes` (D,), and if predicted, `masks` (D, H, W)
        bool and `keypoints` (D, number, 3), in pixels of the original image. Semantic
        segmentation: `sem_seg` (K, H, W), the score of each class.
        """
        ...

    def evaluator(self, split: Split, cfg: CfgNode, folder: Path) -> OwnEvaluator | None:
        """Return the engine's own evaluator of a split; None: this project's evaluator is used."""
        ...

    def step_scope(
        self, iteration: int
    ) -> AbstractContextManager[Mapping[str, tuple[float, bool]]]:
        """Collect the scalars that the model logs during an iteration.

        Yields a mapping that is filled at the end: name → value, and whether metrics.json is
        smoothed over several values.
        """
        ...

    def mapper(
        self, cfg: CfgNode, *, training: bool
    ) -> tuple[Sequence[Record], Callable[[Record], Sample]] | None:
        """Return records and a mapper for a configuration that `detection.data` does not support.

        The mapper may sample from the random streams of its process. None: `detection.data`
        supports the configuration.
        """
        ...

    def augmented(self, cfg: CfgNode, model: nn.Module) -> nn.Module | None:
        """Return the model with test-time augmentation (TEST.AUG); None if that is disabled."""
        ...


def detectron2_installed() -> bool:
    """Return whether Detectron2 is installed; importing it may still fail."""
    return importlib.util.find_spec("detectron2") is not None


def find_engine(name: str) -> Engine:
    """Return the engine called `name`; Detectron2 is imported here and not before.

    Raises:
        ImportError: If the engine or one of its requirements is not installed.
    """
    return cast(Engine, importlib.import_module(_MODULES[name]))
