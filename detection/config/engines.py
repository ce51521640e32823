"""The two detection engines by name, and the interface that commands, loop and data use."""

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
    """An evaluator that belongs to an engine and gathers from the ranks by itself."""

    def process(self, records: Sequence[Record], outputs: Sequence[Any]) -> None:
        """Take the model's outputs for the images of `records`."""

    def evaluate(self) -> Mapping[str, float]:
        """Return the metrics as kind/name on the main process; called on every rank."""


class Engine(Protocol):
    """Interface that the module of an engine implements.

    Attributes:
        loggers: names of the loggers whose messages belong into a run's log.txt.
        open_url: opens a file whose path contains `://`; None: there are no such paths.
    """

    loggers: tuple[str, ...]
    open_url: Callable[[str], BinaryIO] | None

    def default_config(self, *, dense_pose: bool) -> CfgNode:
        """Return every key that the engine knows; DensePose's are known to Detectron2 only."""
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

    def session(self) -> AbstractContextManager[None]:
        """Keep what the engine knows of the connected processes for as long as they are."""
        ...

    def build_model(self, cfg: CfgNode) -> nn.Module:
        """Build the network of a configuration, at random weights."""
        ...

    def to_model(self, samples: Sequence[Sample]) -> Any:
        """Return a batch as the model takes it."""
        ...

    def to_predictions(self, outputs: Any) -> list[dict[str, Tensor]]:
        """Return the model's answer for each image.

        Of instances `boxes` (D, 4), `scores` and `classes` (D,), and where the model has them
        `masks` (D, H, W) bool and `keypoints` (D, number, 3), in pixels of the original image; of a
        segmenter `sem_seg` (K, H, W), the score of each class.
        """
        ...

    def evaluator(self, split: Split, cfg: CfgNode, folder: Path) -> OwnEvaluator | None:
        """Return the engine's own evaluator of a split; None: this project measures it."""
        ...

    def step_scope(
        self, iteration: int
    ) -> AbstractContextManager[Mapping[str, tuple[float, bool]]]:
        """Open what the model logs to during an iteration, and give what it has logged at the end.

        That is name → value, and whether metrics.json is smoothed over several of them.
        """
        ...

    def mapper(
        self, cfg: CfgNode, *, training: bool
    ) -> tuple[Sequence[Record], Callable[[Record], Sample]] | None:
        """Return records and a mapper for a configuration that `detection.data` cannot map.

        The mapper may sample from the random streams of its process. None: `detection.data` can.
        """
        ...

    def augmented(self, cfg: CfgNode, model: nn.Module) -> nn.Module | None:
        """Return the model under TEST.AUG; None where that is off."""
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
