"""Tables of configuration keys: name → `Key`, in the order of the documentation.

Documentation, checks and hashes are all made from a table.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any

from fvcore.common.config import CfgNode

from moco.common.cfgnode import flatten, same_value
from moco.common.errors import UserError


@dataclass(frozen=True)
class Range:
    """Valid values of a key.

    Attributes:
        fits: Function that returns whether a value of the default's type is in the range.
        expected: Description of the range, for messages and the reference.
        choices: All values, if they can be listed.
    """

    fits: Callable[[Any], bool]
    expected: str
    choices: tuple[Any, ...] = ()


def at_least(low: float) -> Range:
    """Return the range of numbers that are at least `low`."""
    return Range(lambda value: value >= low, f"at least {low}")


def finite(low: float) -> Range:
    """Return the range of finite numbers that are at least `low`."""
    return Range(lambda value: low <= value < math.inf, f">= {low} and finite")


def greater_than(low: float) -> Range:
    """Return the range of finite numbers above `low`."""
    return Range(lambda value: is_finite(value) and value > low, f"more than {low}")


def closed_interval(low: float, high: float) -> Range:
    """Return the range from `low` to `high`, both included."""
    return Range(lambda value: low <= value <= high, f"{low} to {high}")


def half_open_interval(low: float, high: float) -> Range:
    """Return the range from `low`, included, to `high`, excluded."""
    return Range(lambda value: low <= value < high, f"{low} to below {high}")


def one_of(*choices: Any) -> Range:
    """Return the range that consists of the given choices."""
    return Range(
        lambda value: any(same_value(value, choice) for choice in choices),
        ", ".join(map(str, choices)),
        choices,
    )


def numbers(
    count: int, expected: str = "", each: Callable[[float], bool] = lambda number: True
) -> Range:
    """Return the range of sequences of `count` finite numbers that all satisfy `each`."""

    def fits(value: Any) -> bool:
        return len(value) == count and all(is_finite(number) and each(number) for number in value)

    return Range(fits, expected or f"{count} numbers, finite")


def ordered_pair(high: float = math.inf, expected: str = "") -> Range:
    """Return the range of pairs (low, high) with 0 < low <= high."""
    below_high = f" <= {high}" if high < math.inf else ""
    return Range(
        lambda value: numbers(2).fits(value) and 0 < value[0] <= value[1] <= high,
        expected or f"(low, high) with 0 < low <= high{below_high}",
    )


def range_with(other: Any, range: Range) -> Range:
    """Return a range extended by a special value, which the key's documentation explains."""
    return Range(lambda value: same_value(value, other) or range.fits(value), range.expected)


def is_finite(value: Any) -> bool:
    """Return whether a value is a number other than infinity and NaN."""
    return isinstance(value, int | float) and math.isfinite(value)


class Role(Enum):
    """Part of a run that a key describes, which decides where it is hashed and compared."""

    PROTOCOL = "protocol"  # of the task; hashed into the protocol that comparable runs share
    WEIGHTS = "weights"  # of the file of weights, whose input contract sets it
    PLACE = "place"  # where data is or what computes; a resumed run may change it
    SPEED = "speed"  # only speed, memory or further files; a resumed run may change it
    RUN = "run"  # which run of a suite; the suite sets it


NOT_PROTOCOL = (Role.WEIGHTS, Role.PLACE, Role.SPEED, Role.RUN)


@dataclass(frozen=True)
class Key:
    """Definition of a configuration key, without the name.

    Attributes:
        default: Default, whose type every value must have, as yacs compares types; None allows any.
        doc: Meaning, unit, and the reason for the default where it is not obvious.
        range: Valid values; None if they are checked elsewhere or not at all.
        role: Part of a run that the key describes.
        embedded: Values that detection's embedded engine supports; empty for the whole range.
        resume: A resumed detection may change the key; moco/ decides by the role.
        model: The evaluation of a trained model needs the key besides the model's tensors, as it
            needs the keys of `Role.WEIGHTS`.
        tunable: The grid of `--tune` may vary the key.
        data: The key is the path of a file or folder of data, whose digest is part of a run's id.
    """

    default: Any
    doc: str = ""
    range: Range | None = None
    _: KW_ONLY
    role: Role = Role.PROTOCOL
    embedded: tuple[Any, ...] = ()
    resume: bool = True
    model: bool = False
    tunable: bool = False
    data: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise UserError if a value of the key, which has this name, is out of the range."""
        # yacs accepts None for a key of any type.
        is_missing = value is None and self.default is not None
        if self.range and (is_missing or not self.range.fits(value)):
            prefix = "choices are" if self.range.choices else "expected"
            raise UserError(f"{name}: got {value!r}, {prefix} {self.range.expected}")


Keys = Mapping[str, Key]


def names_of(keys: Keys, *roles: Role) -> tuple[str, ...]:
    """Return the names of the keys that have one of the roles."""
    return tuple(name for name, key in keys.items() if key.role in roles)


def defaults_of(keys: Keys) -> dict[str, Any]:
    """Return the defaults by name."""
    return {name: key.default for name, key in keys.items()}


def add_keys(cfg: CfgNode, keys: Keys) -> None:
    """Set the defaults in a configuration, creating nodes of the configuration's class."""
    for name, key in keys.items():
        *parents, last = name.split(".")
        node = cfg
        for parent in parents:
            # Detectron2 merges YAML only into nodes of Detectron2's class.
            node = node.setdefault(parent, type(cfg)())
        node[last] = copy.deepcopy(key.default)


def check_keys(cfg: Mapping[str, Any], keys: Keys) -> None:
    """Raise UserError for the first key in a configuration that is out of its range."""
    values = flatten(cfg)
    for name, key in keys.items():
        if name in values:
            key.check(name, values[name])
