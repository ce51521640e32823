"""Limits on values that were read from files of others: pickles, YAML, configs."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

MAX_DEPTH = 100
MAX_BITS = 1000  # float() of it does not overflow, and Python prints it


class Implausible(ValueError):
    """The file claims more than it can hold; the message says what."""


def check_parts(root: Any, limit: int) -> None:
    """Raise Implausible unless a walk through all parts of a value ends soon.

    Args:
        root: dictionaries, lists and tuples; anything else, a subclass among it, has no parts.
        limit: number of parts, each counted as often as it can be reached.
    """
    done: dict[int, tuple[int, int]] = {}

    def measure(value: Any, depth: int) -> tuple[int, int]:
        """Parts and levels of a value that is N levels below the root."""
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise Implausible(f"a whole number of {value.bit_length()} bits")
        if type(value) not in (dict, OrderedDict, list, tuple):
            return 1, 0
        count, levels = done.get(id(value), (1, 1))
        if id(value) not in done and depth <= MAX_DEPTH:
            for part in value.values() if isinstance(value, dict) else value:
                parts, below = measure(part, depth + 1)
                count, levels = count + parts, max(levels, below + 1)
            done[id(value)] = count, levels
        if depth + levels > MAX_DEPTH:
            raise Implausible(f"nested more than {MAX_DEPTH} levels deep")
        if count > limit:
            raise Implausible(f"more than {limit} parts, or one named again and again")
        return count, levels

    measure(root, 0)
