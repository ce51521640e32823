"""The input contract: preprocessing and architecture metadata of a converted checkpoint.

The contract is saved with the weights, so that no configuration has to be chosen to fit them:
`d2_keys` turns it into Detectron2's keys.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from convert.families.base import Architecture, Family, family_named
from moco.common.errors import DataError, UserError, format_value, format_values
from moco.engine import keys
from moco.modeling.soundness import CHANNEL_ORDERS, Triple, is_triple

VERSION = 2
# For pixels 0..255; rounded, because 255 * 0.485 is not 123.675 in floating point.
IMAGENET_MEAN, IMAGENET_STD = (
    (round(255 * r, 3), round(255 * g, 3), round(255 * b, 3))
    for r, g, b in (keys.IMAGENET_MEAN, keys.IMAGENET_STD)
)
# Suffix of a source whose batch norm statistics are folded into scale and bias.
FOLDED = " (BN folded)"
_PART = re.compile(r"[\w.][\w.-]{0,200}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Pixels:
    """Pixel normalization of a backbone.

    Attributes:
        mean: Mean of each channel, 0..255, in channel order.
        std: Standard deviation of each channel, above 0, in the same units and order.
        channel_order: "RGB" or "BGR".

    Raises:
        UserError: If a value is out of its range.
    """

    mean: Triple
    std: Triple
    channel_order: str

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
                f"channel_order: got {format_value(self.channel_order)}, expected one of "
                f"{list(CHANNEL_ORDERS)}"
            )

    def with_channel_order(self, channel_order: str) -> Pixels:
        """Return the normalization with its channels permuted to another order."""
        if channel_order == self.channel_order:
            return self
        (a, b, c), (d, e, f) = self.mean, self.std
        return Pixels((c, b, a), (f, e, d), channel_order)

    def __str__(self) -> str:
        mean, std = format_numbers(self.mean), format_numbers(self.std)
        return f"{self.channel_order}, scale 0..255, mean {mean}, std {std}"


@dataclasses.dataclass(frozen=True)
class Overrides:
    """Options of a conversion that take precedence over the metadata of file and project.

    None keeps the value of the file or, if the file records none, of the project.

    Attributes:
        encoder: Name of a network in the file, e.g. "query", "key", "teacher".
        mean, std: Pixel statistics, 0..255, in the order of `channel_order`.
        channel_order: "RGB" or "BGR"; a mean and std without an override are permuted with it.
        family: "timm" to read the file as the timm network that it names, even if another family
            has that network.
        options: Values of the family's own options, by name.
    """

    encoder: str | None = None
    mean: Triple | None = None
    std: Triple | None = None
    channel_order: str | None = None
    family: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_options(cls, **values: Any) -> Overrides:
        """Build overrides from fields and options of any family; None leaves one unset."""
        fields = {field.name for field in dataclasses.fields(cls)} - {"options"}
        own = {name: values.pop(name) for name in fields & values.keys()}
        options = {name: value for name, value in values.items() if value is not None}
        return cls(**own, options=options)

    def missing_pixels(self) -> list[str]:
        """Return the options required when no preprocessing is known."""
        fields = ("mean", "std", "channel_order")
        return [f"--{name.replace('_', '-')}" for name in fields if getattr(self, name) is None]

    def missing_convention(self, family: Family) -> list[str]:
        """Return the options required when neither preprocessing nor stride placement is known."""
        missing = [o for o in family.options if o.convention and o.name not in self.options]
        return self.missing_pixels() + [option.flag for option in missing]

    def pixels(self, source: Pixels, where: str) -> Pixels:
        """Return the source's normalization with these overrides.

        Args:
            source: Normalization of the file or its project.
            where: Name of the file, for messages.

        Raises:
            UserError: If a value is out of its range.
        """
        try:
            source = source.with_channel_order(self.channel_order or source.channel_order)
            return Pixels(self.mean or source.mean, self.std or source.std, source.channel_order)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error


@dataclasses.dataclass(frozen=True)
class InputContract:
    """Metadata that a detector needs to build a backbone and to feed it.

    Attributes:
        pixels: Pixel normalization.
        family: Family of the backbone.
        architecture: Instance of the family's class of architectures.
        source: Project whose checkpoint was converted.
        source_sha256: SHA-256 of the converted file.
        encoder: "query", "key", …, or "single" if the source has one network.
        source_parts: SHA-256 of each file by name, if the source consists of several files; see
            `convert.read.digests`.

    Raises:
        UserError: If a value is out of its range.
    """

    pixels: Pixels
    family: Family
    architecture: Architecture
    source: str
    source_sha256: str
    encoder: str
    source_parts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("source", "source_sha256", "encoder"):
            value = getattr(self, name)
            if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
                raise UserError(f"{name}: got {format_value(value)}, expected one line of text")

    @classmethod
    def from_fields(cls, **values: Any) -> InputContract:
        """Build a contract from the fields that are saved in files.

        Raises:
            UserError: If a field is missing, unknown or invalid.
        """
        pixels = ("pixel_mean", "pixel_std", "channel_order")
        origin = ("source", "source_sha256", "encoder")
        parts = values.pop("source_parts", {})
        _check_names(values, {*pixels, *origin, "family", "architecture"})
        family = family_named(str(values["family"])[:80])
        own = values["architecture"]
        if not isinstance(own, Mapping):
            raise UserError(f"architecture: got {type(own).__name__}, expected a dict")
        # A field that was added later has a default, which files without it stand for.
        network = {**_defaults(family.architecture), **own}
        _check_names(network, _fields(family.architecture), "architecture: ")
        source, sha256, encoder = (values[name] for name in origin)
        return cls(
            Pixels(*(values[name] for name in pixels)),
            family,
            family.architecture(**network),
            source,
            sha256,
            encoder,
            source_parts=parts,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as numbers, lists and strings; `from_dict` is the inverse."""
        return {
            "version": VERSION,
            "pixel_mean": list(self.pixels.mean),
            "pixel_std": list(self.pixels.std),
            "channel_order": self.pixels.channel_order,
            "family": self.family.name,
            "architecture": {
                name: value
                for name, value in dataclasses.asdict(self.architecture).items()
                if value != _defaults(type(self.architecture)).get(name)
            },
            "source": self.source,
            "source_sha256": self.source_sha256,
            "encoder": self.encoder,
            **({"source_parts": dict(self.source_parts)} if self.source_parts else {}),
        }

    @classmethod
    def from_dict(cls, values: Any) -> InputContract:
        """Rebuild a contract from the result of `to_dict`.

        Raises:
            DataError: If a field is missing, unknown or invalid, or the version is another one.
        """
        if not isinstance(values, Mapping):
            raise DataError(f"contract: got {type(values).__name__}, expected a dict")
        version = values.get("version")
        if type(version) is not int or version != VERSION:
            raise DataError(
                f"contract: version {format_value(version)}, this program reads {VERSION}; convert "
                "the checkpoint again"
            )
        try:
            fields = {str(name): value for name, value in values.items() if name != "version"}
            contract = cls.from_fields(**fields)
        except UserError as error:
            raise DataError(f"contract: {error}") from error
        parts = contract.source_parts
        if not isinstance(parts, Mapping) or not all(map(_PART.fullmatch, map(str, parts))):
            raise DataError("contract: source_parts: expected the SHA-256 of each file by name")
        for sha256 in (contract.source_sha256, *parts.values()):
            if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
                raise DataError(
                    f"contract: source_sha256: got {format_value(sha256)}, expected 64 hexadecimal "
                    "digits"
                )
        return contract

    @property
    def bn_folded(self) -> bool:
        """True if BN statistics were folded into scale and bias, so they start at 0 and 1."""
        return self.source.endswith(FOLDED)

    def d2_keys(self) -> dict[str, Any]:
        """Return Detectron2's configuration keys, and this project's own of the architecture."""
        return {
            "INPUT.FORMAT": self.pixels.channel_order,
            "MODEL.PIXEL_MEAN": list(self.pixels.mean),
            "MODEL.PIXEL_STD": list(self.pixels.std),
            **self.architecture.d2_keys(),
        }

    def convention(self) -> str:
        """Describe the normalization and details of the architecture."""
        return f"{self.pixels}, {self.architecture.details()}"


def format_numbers(values: Sequence[float]) -> str:
    """Format numbers as text, e.g. "[123.675, 116.28, 103.53]"."""
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


def _fields(architecture: type[Architecture]) -> set[str]:
    return {field.name for field in dataclasses.fields(architecture)}


def _defaults(architecture: type[Architecture]) -> dict[str, Any]:
    """Return the default values of the fields that have one."""
    fields = dataclasses.fields(architecture)
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def _check_names(values: Mapping[Any, Any], expected: set[str], what: str = "") -> None:
    if values.keys() != expected:
        raise UserError(
            f"{what}missing {sorted(expected - values.keys())}, "
            f"unknown {sorted(map(format_value, values.keys() - expected))[:6]}"
        )


def _three(name: str, values: Any) -> Triple:
    if not is_triple(values):
        raise UserError(f"{name}: got {format_values(values)}, expected three finite numbers")
    return (float(values[0]), float(values[1]), float(values[2]))
