"""What the converter has to know of a backbone family, and the registry of families.

A family is registered as a function of its name that returns a `Family`. Sources name their
tensors in several ways; inside the converter a tensor has the family's own name, in a converted
file Detectron2's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

from fvcore.common.registry import Registry

from moco.common.registry import lookup

if TYPE_CHECKING:
    from torch import Tensor, nn

FAMILIES = Registry("backbone families")
# The family of input contracts that name none.
DEFAULT_FAMILY = "resnet"

# What a plain state dict is called as a source, by whose names its tensors have.
PLAIN = "state dict"
PLAIN_DETECTRON2 = "Detectron2's names"
# The scheme that a row of convert/layouts.py has unless it says another.
USUAL = "usual"

# Rule -> patterns of Detectron2's names that no source fills. The counter only matters to a
# BatchNorm with momentum None, which neither engine uses.
LEFT_AT_INIT = {"batch counter": "*.num_batches_tracked"}


class Architecture(Protocol):
    """One network of a family: a frozen dataclass whose fields are saved in the input contract.

    Raises UserError when a value is out of its range. As a text: for people, e.g. "ResNet-50".
    """

    def d2_keys(self) -> dict[str, Any]:
        """Detectron2's keys that describe it."""

    def details(self) -> str:
        """For people: what else a user of its weights has to know."""

    def lost_options(self) -> list[str]:
        """Options of the converter that say again what a plain state dict does not."""

    def in_torchvision(self) -> str:
        """Why torchvision has no such network; "": it has."""

    def example_task(self) -> tuple[str, dict[str, Any], str]:
        """A task file that fine-tunes a detector, the keys of `d2_keys` that it sets, and
        arguments for its data."""

    def classification_stem(self) -> str:
        """MODEL.STEM of moco.linear; "" where it need not be given."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One way in which files name a family's tensors.

    Attributes:
        first: two tensors that show that the network is in a file.
        rename: a name in the file -> the family's own; None: no part of the backbone.
        original: the inverse of `rename`, for messages.
        own: how names of the backbone's parts begin. If `rename` does not know such a name, the
            network is another one.
        plain: what a plain state dict with these names is called; "": it is not recognized.
        without: a tensor beside `first` that only another network has, in a plain state dict.
    """

    first: tuple[str, str]
    rename: Callable[[str], str | None]
    own: re.Pattern[str]
    original: Callable[[str], str] = str
    plain: str = ""
    without: str = "\0"


@dataclasses.dataclass(frozen=True)
class Hints:
    """What is known of a network beside its tensors; None: nothing.

    Attributes:
        arch, stem, width: as the file records them.
        asked_stem: --stem of the command line.
        stride_in_1x1: of the layout, or --stride-in-1x1.
        assumed_pixels: the layout whose usual pixels are assumed; "": they are known.
        no_3x3_stem: why a 3x3 stem of this source is refused; "": it is not.
    """

    arch: Any = None
    stem: str | None = None
    width: float | None = None
    asked_stem: str | None = None
    stride_in_1x1: bool = False
    assumed_pixels: str = ""
    no_3x3_stem: str = ""


@dataclasses.dataclass(frozen=True)
class Family:
    """A backbone family.

    Attributes:
        networks: which it has, for messages.
        architecture: its class of `Architecture`.
        schemes: how its tensors are named, by the name that rows of convert/layouts.py use.
        dropped: rule -> patterns of names inside a network that are no part of the backbone.
        heads: a head's tensor -> what a report calls the head; "": there is none.
        to_detectron2, from_detectron2: the family's names and Detectron2's; None for unknown ones.
        recognize: (tensors by the family's names, hints, file's name, what the names are called in
            the file, notes, warnings) -> architecture, from the shapes; notes and warnings for
            people are appended. Raises DataError: not this family, or not what the file says;
            UserError: options that do not fit.
        with_options: (converted architecture, --stem, --stride-in-1x1, file's name) -> the same
            under these options; None: not given. Raises UserError where they contradict it.
        build: the backbone as Detectron2 has it, with all features; random weights. It returns the
            features of an image by name, and its `strides` are theirs.
        reference: the reference implementation, which shares no code with `build`'s and has the
            family's names; and the modules whose outputs are the features, by Detectron2's names.
    """

    name: str
    networks: str
    architecture: type[Any]
    schemes: Mapping[str, Scheme]
    dropped: Mapping[str, str]
    heads: Mapping[str, str]
    to_detectron2: Callable[[str], str | None]
    from_detectron2: Callable[[str], str | None]
    recognize: Callable[
        [Mapping[str, Tensor], Hints, str, Callable[[str], str], list[str], list[str]], Any
    ]
    with_options: Callable[[Any, str | None, bool | None, str], Any]
    build: Callable[[Any], nn.Module]
    reference: Callable[[Any], tuple[nn.Module, Mapping[str, str]]]

    def __reduce__(self) -> tuple[Callable[[str], Family], tuple[str]]:
        """Another process that is handed a contract looks its family up."""
        return family_named, (self.name,)


def family_named(name: str) -> Family:
    """A registered family; raises UserError."""
    family: Family = lookup(FAMILIES, name, "family")()
    return family


def families() -> list[Family]:
    """Every registered family."""
    return [make() for _, make in FAMILIES]


def first_rule(key: str, rules: Mapping[str, str]) -> str | None:
    """Name of the first of `rules` (name -> patterns between spaces) that a key falls under."""
    for rule, patterns in rules.items():
        if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
            return rule
    return None
