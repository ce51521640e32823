"""Checks of a recipe's values. Each names the key, what it got and what it may be."""

import math
from collections.abc import Sequence
from typing import Any

from fvcore.common.config import CfgNode

from moco.common.errors import UserError


def get(cfg: CfgNode, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = cfg
    for part in key.split("."):
        value = value[part]
    return value


def check_choice(cfg: CfgNode, key: str, choices: Sequence[str]) -> None:
    """One of `choices`, else UserError."""
    if get(cfg, key) not in choices:
        raise UserError(f"{key}: got {get(cfg, key)!r}, choices are {', '.join(choices)}")


def check_range(cfg: CfgNode, key: str, low: float, high: float | None = None) -> None:
    """`low` to `high`, both included, else UserError; NaN and infinity are refused."""
    value = get(cfg, key)
    if not (low <= value < math.inf and (high is None or value <= high)):
        expected = f">= {low} and finite" if high is None else f"{low} to {high}"
        raise UserError(f"{key}: got {value}, expected {expected}")


def check_numbers(cfg: CfgNode, key: str, count: int) -> list[float]:
    """N finite numbers, else UserError."""
    value = list(get(cfg, key))
    if len(value) != count or not all(
        isinstance(v, int | float) and -math.inf < v < math.inf for v in value
    ):
        raise UserError(f"{key}: got {tuple(value)}, expected {count} numbers, finite")
    return value


def check_interval(cfg: CfgNode, key: str, high: float | None = None) -> None:
    """`(a, b)` with 0 < a <= b <= `high`, else UserError."""
    a, b = check_numbers(cfg, key, 2)
    if not 0 < a <= b or (high is not None and b > high):
        below = "" if high is None else f" <= {high}"
        raise UserError(f"{key}: got ({a}, {b}), expected (low, high) with 0 < low <= high{below}")


def check_milestones(cfg: CfgNode, max_epochs: float | None) -> None:
    """SOLVER.MILESTONES_EPOCHS rise and are below `max_epochs`, else UserError.

    Args:
        max_epochs: None where the length of the run in epochs is not known yet.
    """
    if cfg.SOLVER.SCHEDULE != "step":
        return
    milestones = tuple(cfg.SOLVER.MILESTONES_EPOCHS)
    if list(milestones) != sorted(set(milestones)) or any(
        isinstance(m, bool) or not isinstance(m, int) or m < 1 for m in milestones
    ):
        raise UserError(
            f"SOLVER.MILESTONES_EPOCHS: got {milestones}, expected rising whole numbers >= 1"
        )
    if max_epochs is not None and milestones and milestones[-1] >= max_epochs:
        raise UserError(
            f"SOLVER.MILESTONES_EPOCHS: {milestones[-1]} is never reached in "
            f"{max_epochs:g} epochs; lower it, set () for none, or set SOLVER.SCHEDULE cosine"
        )
