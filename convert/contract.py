"""The input contract: how pixels must reach a backbone, and which backbone it is.

It is saved in the converted file, so that no configuration has to be chosen to fit the weights:
`d2_keys` turns it into Detectron2's keys.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from convert.families.base import Architecture, Family, family_named
from moco.common.errors import DataError, UserError, shown
from moco.engine import config
from moco.modeling.soundness import CHANNEL_ORDERS, Triple

VERSION = 2
# Of pixels 0..255; rounded because 255 * 0.485 is not 123.675 in floating point.
IMAGENET_MEAN, IMAGENET_STD = (
    (round(255 * r, 3), round(255 * g, 3), round(255 * b, 3))
    for r, g, b in (config.IMAGENET_MEAN, config.IMAGENET_STD)
)
# End of the source's name where batch norm was folded into scale and bias.
FOLDED = " (BN folded)"


@dataclasses.dataclass(frozen=True)
class Pixels:
    """How pixels are normalized; raises UserError when a value is out of its range."""

    mean: Triple  # 0..255, in channel order
    std: Triple  # > 0, same units and order
    channel_order: str  # "RGB" or "BGR"

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, _three(f"pixel_{name}", getattr(self, name)))
        if not all(0 <= value <= 255 for value in self.mean):
            raise UserError(f"pixel_mean: got {list(self.mean)}, expected 0..255")
        if 0 < max(self.mean) <= 1:
            raise UserError(
                f"pixel_mean: got {list(self.mean)}, which looks like the scale 0..1; "
                "expected 0..255 (multiply mean and std by 255)"
            )
        if not all(0 < value <= 255 for value in self.std):
            raise UserError(f"pixel_std: got {list(self.std)}, expected more than 0, at most 255")
        if self.channel_order not in CHANNEL_ORDERS:
            raise UserError(
                f"channel_order: got {shown(self.channel_order)}, expected one of "
                f"{list(CHANNEL_ORDERS)}"
            )

    def in_order(self, channel_order: str) -> Pixels:
        """The same in another channel order: a mean stays with its color."""
        if channel_order == self.channel_order:
            return self
        (a, b, c), (d, e, f) = self.mean, self.std
        return Pixels((c, b, a), (f, e, d), channel_order)

    def __str__(self) -> str:
        mean, std = numbers(self.mean), numbers(self.std)
        return f"{self.channel_order}, scale 0..255, mean {mean}, std {std}"


@dataclasses.dataclass(frozen=True)
class Given:
    """What the caller knows better than the file; None: the file's or the project's own.

    Attributes:
        encoder: one of the file's networks, e.g. "query", "key", "teacher".
        mean, std: 0..255 in the order of `channel_order`.
        channel_order: "RGB" or "BGR"; a mean and std that are not given stay with their colors.
        options: values of the family's own options, by their names.
    """

    encoder: str | None = None
    mean: Triple | None = None
    std: Triple | None = None
    channel_order: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, **values: Any) -> Given:
        """Make it from fields and values of any family's options; None: not given."""
        fields = {field.name for field in dataclasses.fields(cls)} - {"options"}
        own = {name: values.pop(name) for name in fields & values.keys()}
        options = {name: value for name, value in values.items() if value is not None}
        return cls(**own, options=options)

    def missing_pixels(self) -> list[str]:
        """Options that would have to be given for pixels of which nobody wrote down."""
        fields = ("mean", "std", "channel_order")
        return [f"--{name.replace('_', '-')}" for name in fields if getattr(self, name) is None]

    def missing_convention(self, family: Family) -> list[str]:
        """Return the same for weights whose whole convention nobody wrote down."""
        missing = [o for o in family.options if o.convention and o.name not in self.options]
        return self.missing_pixels() + [option.flag for option in missing]

    def pixels(self, source: Pixels, where: str) -> Pixels:
        """Return how pixels reach the network: as in the source, unless given; raises UserError."""
        try:
            source = source.in_order(self.channel_order or source.channel_order)
            return Pixels(self.mean or source.mean, self.std or source.std, source.channel_order)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error


@dataclasses.dataclass(frozen=True)
class InputContract:
    """What a detector has to do to feed and to build this backbone.

    Attributes:
        pixels: how the backbone sees images.
        family: of the backbone.
        architecture: the family's own.
        source: the project whose file the weights were found in.
        source_sha256: of the file that was converted.
        encoder: "query", "key", or "single" where the source has only one network.

    Raises UserError when a value is out of its range.
    """

    pixels: Pixels
    family: Family
    architecture: Architecture
    source: str
    source_sha256: str
    encoder: str

    def __post_init__(self) -> None:
        for name in ("source", "source_sha256", "encoder"):
            value = getattr(self, name)
            if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
                raise UserError(f"{name}: got {shown(value)}, expected a text of one line")

    @classmethod
    def of(cls, **values: Any) -> InputContract:
        """The contract of the fields that files have.

        Raises UserError naming what is missing, unknown or wrong.
        """
        pixels = ("pixel_mean", "pixel_std", "channel_order")
        origin = ("source", "source_sha256", "encoder")
        _check_names(values, {*pixels, *origin, "family", "architecture"})
        family = family_named(str(values["family"])[:80])
        network = tuple(field.name for field in dataclasses.fields(family.architecture))
        own = values["architecture"]
        if not isinstance(own, Mapping):
            raise UserError(f"architecture: got {type(own).__name__}, expected a dict")
        _check_names(own, set(network), "architecture: ")
        return cls(
            Pixels(*(values[name] for name in pixels)),
            family,
            family.architecture(**{name: own[name] for name in network}),
            *(values[name] for name in origin),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and texts; `from_dict` is the inverse."""
        return {
            "version": VERSION,
            "pixel_mean": list(self.pixels.mean),
            "pixel_std": list(self.pixels.std),
            "channel_order": self.pixels.channel_order,
            "family": self.family.name,
            "architecture": dataclasses.asdict(self.architecture),
            "source": self.source,
            "source_sha256": self.source_sha256,
            "encoder": self.encoder,
        }

    @classmethod
    def from_dict(cls, values: Any) -> InputContract:
        """Read `to_dict`'s result; raises DataError naming what is missing, unknown or wrong."""
        if not isinstance(values, Mapping):
            raise DataError(f"contract: got {type(values).__name__}, expected a dict")
        version = values.get("version")
        if type(version) is not int or version != VERSION:
            raise DataError(
                f"contract: version {shown(version)}, this program reads {VERSION}; convert the "
                "checkpoint again"
            )
        try:
            fields = {str(name): value for name, value in values.items() if name != "version"}
            contract = cls.of(**fields)
        except UserError as error:
            raise DataError(f"contract: {error}") from error
        if not re.fullmatch("[0-9a-f]{64}", contract.source_sha256):
            raise DataError(
                f"contract: source_sha256: got {shown(contract.source_sha256)}, expected 64 "
                "hexadecimal digits"
            )
        return contract

    @property
    def bn_folded(self) -> bool:
        """Whether the statistics were folded away: BN starts at mean 0 and variance 1."""
        return self.source.endswith(FOLDED)

    def d2_keys(self) -> dict[str, Any]:
        """Keys of Detectron2's configuration, and this project's own ones of the architecture."""
        return {
            "INPUT.FORMAT": self.pixels.channel_order,
            "MODEL.PIXEL_MEAN": list(self.pixels.mean),
            "MODEL.PIXEL_STD": list(self.pixels.std),
            **self.architecture.d2_keys(),
        }

    def convention(self) -> str:
        """For people: how pixels must come, and what else a user has to know."""
        return f"{self.pixels}, {self.architecture.details()}"


def numbers(values: Sequence[float]) -> str:
    """For people, e.g. "[123.675, 116.28, 103.53]"."""
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


def _check_names(values: Mapping[Any, Any], expected: set[str], what: str = "") -> None:
    if values.keys() != expected:
        raise UserError(
            f"{what}missing {sorted(expected - values.keys())}, "
            f"unknown {sorted(map(shown, values.keys() - expected))[:6]}"
        )


def _three(name: str, values: Any) -> Triple:
    if not (
        isinstance(values, list | tuple)
        and len(values) == 3
        and all(type(v) in (int, float) and abs(v) < 1e9 for v in values)
    ):
        got = [shown(v) for v in values[:3]] if isinstance(values, list | tuple) else shown(values)
        raise UserError(f"{name}: got {got}, expected three finite numbers")
    return (float(values[0]), float(values[1]), float(values[2]))
