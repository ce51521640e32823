"""Left-right pairs of keypoints, which horizontal flips swap, inferred from their names."""

import re
from collections.abc import Sequence

from detection.datasets.base import Split
from moco.common.errors import UserError, first_few

_MAX_SHOWN = 30  # pairs

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_SIDES = {"left": "left", "l": "left", "right": "right", "r": "right"}


def side_of(name: str) -> tuple[str, tuple[str, ...]]:
    """Return "left", "right" or "", and the words of a keypoint's name without its side.

    Names are split at non-letters and at capitals, case-insensitively: `Left_Eye`, `LEFT EYE`,
    `leftEye`, `eye.left`. A single L or R is a side only at the start or the end.
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    for place, word in enumerate(words):
        at_an_end = len(words) > 1 and place in (0, len(words) - 1)
        if word in ("left", "right") or (word in _SIDES and at_an_end):
            return _SIDES[word], (*words[:place], "", *words[place + 1 :])
    for side in ("left", "right"):  # lefteye
        if words and words[0].startswith(side):
            return side, ("", words[0].removeprefix(side), *words[1:])
    return "", tuple(words)


def flip_pairs(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the (left, right) pairs among the keypoint names."""
    sides = {side_of(name): name for name in names}
    return tuple(
        (name, sides["right", rest])
        for (side, rest), name in sides.items()
        if side == "left" and ("right", rest) in sides
    )


def unpaired(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return the names that have a side but are in no pair."""
    paired = {name for pair in pairs for name in pair}
    return [name for name in names if side_of(name)[0] and name not in paired]


def pairs_note(split: Split) -> str:
    """Format a note on the keypoints of a split that horizontal flips swap.

    Raises:
        UserError: If the names do not determine the pairs.
    """
    pairs = split.metadata["keypoint_flip_map"]
    lost = unpaired(split.metadata["keypoint_names"], pairs)
    if lost or not pairs:
        what = f"no opposite side of {first_few(lost)}" if lost else "no left and right keypoints"
        raise UserError(
            f"{split.name}: {what} in the names, so flipped images would be mislabeled; set "
            "DATASETS.KEYPOINT_FLIP_PAIRS to the pairs to swap, or INPUT.RANDOM_FLIP none"
        )
    shown = first_few([f"{left} and {right}" for left, right in pairs], _MAX_SHOWN)
    return f"{split.name}: keypoints that a horizontal flip swaps: {shown}"
