"""Table of configuration keys with one row per key.

Documentation, checks and hashes all read the table: the rows of places are
`KEYS.where(place=True)`, their names `KEYS.where(place=True).names`.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, overload

from fvcore.common.config import CfgNode

from moco.common.cfgnode import flatten, same_value
from moco.common.errors import UserError


@dataclass(frozen=True)
class Range:
    """Valid values of a key.

    Attributes:
        fits: Return whether a value of the default's type is in the range.
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


def above(low: float) -> Range:
    """Return the range of finite numbers above `low`."""
    return Range(lambda value: is_finite(value) and value > low, f"more than {low}")


def between(low: float, high: float) -> Range:
    """Return the range from `low` to `high`, both included."""
    return Range(lambda value: low <= value <= high, f"{low} to {high}")


def below(low: float, high: float) -> Range:
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


def interval(high: float = math.inf, expected: str = "") -> Range:
    """Return the range of pairs (low, high) with 0 < low <= high."""
    below_high = f" <= {high}" if high < math.inf else ""
    return Range(
        lambda value: numbers(2).fits(value) and 0 < value[0] <= value[1] <= high,
        expected or f"(low, high) with 0 < low <= high{below_high}",
    )


def also(other: Any, range: Range) -> Range:
    """Return a range extended by a special value, which the key's documentation explains."""
    return Range(lambda value: same_value(value, other) or range.fits(value), range.expected)


def is_finite(value: Any) -> bool:
    """Return whether a value is a number other than infinity and NaN."""
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass(frozen=True)
class Key:
    """A configuration key.

    Flags that are None are derived from the others.

    Attributes:
        name: Name with its sections, such as SOLVER.BASE_LR.
        default: Default, whose type every value must have, as yacs compares types; None allows any.
        doc: Meaning, unit, and the reason where it is not obvious.
        range: Valid values, checked on their own; None if checked elsewhere or not at all.
        embedded: Values that detection's embedded engine supports; empty for the whole range.
        program: Program of moco/ that has the key; "" for all.
        detectron2: The key is Detectron2's, not this project's.
        place: The key names where data is or what computes, which does not affect the result.
        speed: The key affects only the speed, or the files that a run keeps besides its result.
        weights: The key describes a file of weights (its input contract), not the task.
        per_run: Every run of a suite sets the key itself.
        protocol: The key is hashed into the protocol that comparable runs share. By default, unless
            it is a `place`, `speed`, `weights` or `per_run`.
        run_id: The key is part of the id of a suite's run, which another machine can continue;
            "name": only the last part of its path is, because files in one folder are different
            data. By default, unless it is a `place` or `per_run`.
        resume: A resumed run may change the key; by default, if it is a `place` or `speed`. moco/
            refuses to change any other key; detection warns of a change, but refuses it for False.
        sampling: Besides the protocol, the key affects which random numbers a seed yields, or the
            rounding of the values computed from them.
        tunable: The grid of `--tune` may vary the key.
        free: The key may be set although the recipe does not list it.
        model: A trained model needs the key besides its tensors to be evaluated.
        training: The key describes how a model was trained; an evaluation copies it from there to
            its record. By default, for protocol keys of SOLVER and DATALOADER.
        data: "folder" or "file" if data is read from there; a run's id contains a digest of it.
    """

    name: str
    default: Any
    doc: str = ""
    range: Range | None = None
    _: KW_ONLY
    embedded: tuple[Any, ...] = ()
    program: str = ""
    detectron2: bool = False
    place: bool = False
    speed: bool = False
    weights: bool = False
    per_run: bool = False
    protocol: bool | None = None
    run_id: bool | str | None = None
    resume: bool | None = None
    sampling: bool = False
    tunable: bool = False
    free: bool = False
    model: bool | None = None
    training: bool | None = None
    data: str = ""

    def __post_init__(self) -> None:
        in_protocol = not (self.place or self.speed or self.weights or self.per_run)
        in_protocol = in_protocol if self.protocol is None else self.protocol
        derived = {
            "protocol": in_protocol,
            "run_id": not (self.place or self.per_run),
            "resume": True if self.place or self.speed else None,
            "model": self.weights,
            "training": in_protocol and self.name.startswith(("SOLVER.", "DATALOADER.")),
        }
        for flag, value in derived.items():
            if getattr(self, flag) is None:
                object.__setattr__(self, flag, value)

    def check(self, value: Any) -> None:
        """Raise UserError if a value is out of the range."""
        # yacs accepts None for a key of any type.
        is_missing = value is None and self.default is not None
        if self.range and (is_missing or not self.range.fits(value)):
            prefix = "choices are" if self.range.choices else "expected"
            raise UserError(f"{self.name}: got {value!r}, {prefix} {self.range.expected}")


class Keys(Sequence[Key]):
    """Table of keys, in the order of its documentation.

    Attributes:
        rows: The keys; several of one name if their programs differ.
    """

    def __init__(self, rows: Iterable[Key]) -> None:
        self.rows: list[Key] = []
        self.add(*rows)

    @overload
    def __getitem__(self, index: int) -> Key: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Key]: ...
    def __getitem__(self, index: int | slice) -> Key | Sequence[Key]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the keys."""
        return tuple(row.name for row in self.rows)

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults by name."""
        return {row.name: row.default for row in self.rows}

    def where(self, **flags: Any) -> "Keys":
        """Return the keys whose attributes equal the given values."""
        return Keys(
            row
            for row in self.rows
            if all(getattr(row, flag) == value for flag, value in flags.items())
        )

    def of(self, program: str) -> "Keys":
        """Return the keys that a program has."""
        return Keys(row for row in self.rows if row.program in ("", program))

    def add(self, *rows: Key) -> None:
        """Append keys.

        Raises:
            ValueError: If a key is already in the table.
        """
        known = {(row.name, row.program) for row in self.rows}
        for row in rows:
            if (row.name, row.program) in known:
                raise ValueError(f"{row.name} is already in the table")
            known.add((row.name, row.program))
            self.rows.append(row)

    def add_to(self, cfg: CfgNode) -> None:
        """Set the defaults in a configuration, creating nodes of its own class."""
        for row in self.rows:
            *parents, name = row.name.split(".")
            node = cfg
            for parent in parents:
                # Detectron2 merges YAML only into nodes of its own class.
                node = node.setdefault(parent, type(cfg)())
            node[name] = copy.deepcopy(row.default)

    def check(self, cfg: Mapping[str, Any]) -> None:
        """Raise UserError for the first key in a configuration that is out of its range."""
        values = flatten(cfg)
        for row in self.rows:
            if row.name in values:
                row.check(values[row.name])
