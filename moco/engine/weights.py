"""Weights that a training or an evaluation starts from; convert/initial_weights.py reads files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from moco.common.command import RANDOM
from moco.common.errors import UserError
from moco.common.pretrained import without_ending
from moco.engine.config import IMAGENET_MEAN, IMAGENET_STD
from moco.modeling.archs import ARCHS, VITS, Spec, spec_of


@dataclass(frozen=True)
class InitialWeights:
    """A backbone with its input, and what a file has beside it."""

    init: str  # name in a table
    spec: Spec
    # Without a head, torchvision's or timm's names; None: random.
    state: dict[str, Tensor] | None = None
    # Heads, key encoder and queue as far as the file has them, by a mechanism's names.
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    mean: tuple[float, ...] = IMAGENET_MEAN  # what pixels of 0..1 are normalized by, RGB
    std: tuple[float, ...] = IMAGENET_STD
    sha256: str | None = None  # of the file
    source: str | None = None  # its layout
    notes: tuple[str, ...] = ()  # what a reader of the result has to know
    # Of the run that wrote the file, where this project did.
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


# `convert.initial_weights.read_initial_weights`, which is above this package: handed down to it.
Reader = Callable[..., InitialWeights]


def random_weights(
    arch: str, stem: str, width: float, init: str, image_size: int
) -> InitialWeights:
    """What the word `random` means; `""` and 0 for stem, width, init: `imagenet`, 1, `random`."""
    if not arch:
        raise UserError(
            f"MODEL.ARCH is not set; {RANDOM} weights need a network, e.g. -a resnet50 "
            f"(choices are {', '.join((*ARCHS, *VITS))})"
        )
    spec = spec_of(arch, stem or "imagenet", width or 1.0, image_size)
    return InitialWeights(init or RANDOM, spec)


def init_name(path: Path) -> str:
    """The name in a table: the file's without its ending, `folder_checkpoint_*` for checkpoints."""
    name, folder = without_ending(path.name), path.resolve().parent.name
    name = f"{folder}_{name}" if name.startswith("checkpoint_") and folder else name
    if name == RANDOM:
        raise UserError(f"{path}: would be called {RANDOM!r} in a table; give it another --init")
    return name
