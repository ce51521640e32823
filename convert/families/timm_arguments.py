"""Arguments of `timm.create_model` that a record, an option or a key states."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from moco.common.errors import DataError, UserError, shown

# Arguments of timm's `create_model` that name files or other code, or ask for another kind of
# module. A record that sets one is no description of a network.
NOT_OF_A_NETWORK = (
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"),
    *("features_only", "out_indices", "feature_cls", "scriptable", "exportable", "no_jit"),
    *("device", "dtype", "pretrained_strict", "pretrained_filter_fn"),
)
# Arguments that change no feature; all others are given to timm, whose signatures decide.
WITHOUT_EFFECT = frozenset(
    (
        *("num_classes", "drop_rate", "drop_path_rate", "attn_drop_rate", "proj_drop_rate"),
        *("pos_drop_rate", "patch_drop_rate", "weight_init", "head_init_scale"),
        *("strict_img_size",),
    )
)
_MAX_NUMBER, _MAX_DEPTH = 2**16, 256  # a network of more blocks takes long to describe


def network_arguments(recorded: Any, where: str) -> dict[str, Any]:
    """Return the recorded arguments of `timm.create_model` that may change features.

    They are given to timm, whose signatures decide which ones there are, so they may hold numbers,
    truth values, texts and lists of them alone.

    Args:
        recorded: Value in the record; None if there is none.
        where: Name of the record, for messages.

    Raises:
        DataError: If it is no mapping, or an argument is not one of a network.
    """
    if recorded is None:
        return {}
    if not isinstance(recorded, Mapping):
        raise DataError(f"{where}: got {shown(recorded)}, expected arguments by name")
    found = {}
    for name, value in recorded.items():
        if (name in NOT_OF_A_NETWORK and not value) or name in WITHOUT_EFFECT:
            continue
        limit = _MAX_DEPTH if "depth" in str(name) or "layers" in str(name) else _MAX_NUMBER
        is_text = isinstance(name, str) and name not in NOT_OF_A_NETWORK
        if not (is_text and _is_plain_value(value, limit)):
            raise DataError(f"{where} has {shown(name)}, which is not supported as it is set there")
        found[name] = value
    return found


def _is_plain_value(value: Any, limit: int) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 64 and all(_is_plain_value(item, limit) for item in value)
    if isinstance(value, int | float):
        return math.isfinite(value) and abs(value) <= limit
    return value is None or (isinstance(value, str) and len(value) <= 100)


def as_text(arguments: Mapping[str, Any]) -> str:
    """Return arguments as text in one form, e.g. `act_layer="relu" depth=2`, "" for none.

    A text of JSON would be read as a dict on a command line.
    """
    values = {name: json.dumps(value, separators=(",", ":")) for name, value in arguments.items()}
    return " ".join(f"{name}={values[name]}".replace(" ", r"\u0020") for name in sorted(values))


def from_text(text: str, where: str = "arguments") -> dict[str, Any]:
    """Return arguments from their text; a value that is no JSON is a text itself.

    Raises:
        UserError: If they are no arguments of a network.
    """
    found: dict[str, Any] = {}
    for word in text.split():
        name, mark, value = word.partition("=")
        if not (mark and name.isidentifier()):
            raise UserError(f"{where}: got {shown(text)}, expected e.g. img_size=384 depth=2")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return network_arguments(found, where)
