"""The input contract: how pixels must reach a backbone, and which backbone it is.

It travels inside the converted file, so that no configuration has to be chosen to fit the weights:
`d2_keys` turns it into Detectron2's keys.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from moco.common.errors import DataError, UserError, shown

VERSION = 1
DEPTHS = (10, 18, 34, 50, 101, 152)
STEMS = ("imagenet", "cifar", "stride2")
CHANNEL_ORDERS = ("RGB", "BGR")
# The ImageNet statistics of main_moco.py and of torchvision's references, times 255; RGB.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)
# End of the source's name where batch norm was folded into scale and bias.
FOLDED = " (BN folded)"


@dataclasses.dataclass(frozen=True)
class InputContract:
    """What a detector has to do to feed and to build this backbone.

    Raises UserError when a value is out of its range.
    """

    pixel_mean: tuple[float, float, float]  # 0..255, in channel order
    pixel_std: tuple[float, float, float]  # > 0, same units and order
    channel_order: str  # "RGB" or "BGR"
    stride_in_1x1: bool  # False: a bottleneck's stride is in its 3x3 (torchvision)
    depth: int  # 10, 18, 34, 50, 101 or 152
    stem: str  # "imagenet" 7x7/2 + max-pool, "cifar" 3x3/1, "stride2" 3x3/2
    stem_out_channels: int
    res2_out_channels: int
    num_groups: int
    width_per_group: int  # channels per group of res2's 3x3; 64 where there are no bottlenecks
    source: str  # which layout the weights were found in
    source_sha256: str  # of the file that was converted
    encoder: str  # "query", "key", or "single" where the source has only one network

    def __post_init__(self) -> None:
        object.__setattr__(self, "pixel_mean", _three("pixel_mean", self.pixel_mean))
        object.__setattr__(self, "pixel_std", _three("pixel_std", self.pixel_std))
        if not all(0 <= value <= 255 for value in self.pixel_mean):
            raise UserError(f"pixel_mean: got {list(self.pixel_mean)}, expected 0..255")
        if 0 < max(self.pixel_mean) <= 1:
            raise UserError(
                f"pixel_mean: got {list(self.pixel_mean)}, which looks like the scale 0..1; "
                "expected 0..255 (multiply mean and std by 255)"
            )
        if not all(0 < value <= 255 for value in self.pixel_std):
            raise UserError(
                f"pixel_std: got {list(self.pixel_std)}, expected more than 0, at most 255"
            )
        for name, choices in (
            ("channel_order", CHANNEL_ORDERS),
            ("depth", DEPTHS),
            ("stem", STEMS),
            ("stride_in_1x1", (False, True)),
        ):
            value = getattr(self, name)
            if not any(type(value) is type(c) and value == c for c in choices):
                raise UserError(f"{name}: got {shown(value)}, expected one of {list(choices)}")
        for name in ("stem_out_channels", "res2_out_channels", "num_groups", "width_per_group"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 2**16:
                raise UserError(f"{name}: got {shown(value)}, expected a whole number, 1..65536")
        if self.depth < 50 and self.num_groups != 1:
            raise UserError(
                f"num_groups: got {self.num_groups}, but ResNet-{self.depth} has basic blocks, "
                "which have no groups"
            )
        for name in ("source", "source_sha256", "encoder"):
            value = getattr(self, name)
            if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
                raise UserError(f"{name}: got {shown(value)}, expected a text of one line")

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and texts; `from_dict` is the inverse."""
        values = dataclasses.asdict(self)
        values["pixel_mean"] = list(self.pixel_mean)
        values["pixel_std"] = list(self.pixel_std)
        return {"version": VERSION, **values}

    @classmethod
    def from_dict(cls, values: Any) -> InputContract:
        """Read `to_dict`'s result; raises DataError naming what is missing, unknown or wrong."""
        if not isinstance(values, Mapping):
            raise DataError(f"contract: got {type(values).__name__}, expected a dict")
        if values.get("version") != VERSION:
            raise DataError(
                f"contract: version {shown(values.get('version'))}, this program reads {VERSION}; "
                "convert the checkpoint again"
            )
        expected = {field.name for field in dataclasses.fields(cls)}
        got = set(values) - {"version"}
        if got != expected:
            raise DataError(
                f"contract: missing {sorted(expected - got)}, "
                f"unknown {sorted(map(shown, got - expected))[:6]}"
            )
        if not re.fullmatch("'[0-9a-f]{64}'", shown(values["source_sha256"])):
            raise DataError(
                f"contract: source_sha256: got {shown(values['source_sha256'])}, expected 64 "
                "hexadecimal digits"
            )
        try:
            return cls(**{name: values[name] for name in expected})
        except UserError as error:
            raise DataError(f"contract: {error}") from error

    @property
    def bn_folded(self) -> bool:
        """Whether the statistics were folded away: BN starts at mean 0 and variance 1."""
        return self.source.endswith(FOLDED)

    def d2_keys(self) -> dict[str, Any]:
        """Keys of Detectron2's configuration; MODEL.RESNETS.STEM is this project's own."""
        return {
            "INPUT.FORMAT": self.channel_order,
            "MODEL.PIXEL_MEAN": list(self.pixel_mean),
            "MODEL.PIXEL_STD": list(self.pixel_std),
            "MODEL.RESNETS.STRIDE_IN_1X1": self.stride_in_1x1,
            "MODEL.RESNETS.DEPTH": self.depth,
            "MODEL.RESNETS.STEM": self.stem,
            "MODEL.RESNETS.STEM_OUT_CHANNELS": self.stem_out_channels,
            "MODEL.RESNETS.RES2_OUT_CHANNELS": self.res2_out_channels,
            "MODEL.RESNETS.NUM_GROUPS": self.num_groups,
            "MODEL.RESNETS.WIDTH_PER_GROUP": self.width_per_group,
        }

    def convention(self) -> str:
        """For people: how pixels must come, and where bottlenecks have their stride."""
        place = "1x1" if self.stride_in_1x1 else "3x3"
        return (
            f"{self.channel_order}, scale 0..255, mean {numbers(self.pixel_mean)}, "
            f"std {numbers(self.pixel_std)}, stride in the {place}"
        )

    def architecture(self) -> str:
        """For people, e.g. "ResNet-50" or "ResNet-18, cifar stem, 24 stem channels"."""
        text = f"ResNet-{self.depth}"
        if self.stem != "imagenet":
            text += f", {self.stem} stem"
        if self.stem_out_channels != 64:
            text += f", {self.stem_out_channels} stem channels"
        if self.num_groups != 1 or (self.depth >= 50 and self.width_per_group != 64):
            text += f", {self.num_groups} groups of {self.width_per_group}"
        return text


def numbers(values: Sequence[float]) -> str:
    """For people, e.g. "[123.675, 116.28, 103.53]"."""
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


def _three(name: str, values: Any) -> tuple[float, float, float]:
    if not (
        isinstance(values, list | tuple)
        and len(values) == 3
        and all(type(v) in (int, float) and abs(v) < 1e9 for v in values)
    ):
        texts = (
            [shown(v) for v in values[:3]] if isinstance(values, list | tuple) else shown(values)
        )
        raise UserError(f"{name}: got {texts}, expected three finite numbers")
    return (float(values[0]), float(values[1]), float(values[2]))
