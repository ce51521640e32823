"""Initial weights of a training or evaluation; convert/initial_weights.py reads the files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moco.engine.keys import IMAGENET_MEAN, IMAGENET_STD
from moco.modeling.archs import Spec


@dataclass(frozen=True)
class InitialWeights:
    """Weights of a backbone, their input contract, and further contents of the file."""

    init: str  # name in a table
    spec: Spec
    # Backbone without head, by torchvision's or timm's names; None for random initialization.
    state: dict[str, Tensor] | None = None
    # Heads, key encoder and queue, if the file has them, by the names of a mechanism.
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    mean: tuple[float, ...] = IMAGENET_MEAN  # RGB, for values in 0..1
    std: tuple[float, ...] = IMAGENET_STD
    sha256: str | None = None  # of the file
    source: str | None = None  # layout of the file
    notes: tuple[str, ...] = ()  # facts that a reader of the result needs
    # Configuration and seed of the run that wrote the file, if it is one of this project.
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


# `convert.initial_weights.read_initial_weights`, which this package must not import.
Reader = Callable[..., InitialWeights]
