"""What is beside a file of weights on the Hugging Face Hub: config.json, preprocessor_config.json.

Both are read as text of unknown origin: no name in them is imported, and no value chooses a path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.recorded import Recorded
from moco.common.errors import DataError, shown
from moco.common.pretrained import BESIDE

CONFIGURATION, PREPROCESSOR = BESIDE
MAX_BYTES = 1 << 20


def read_beside(weights: Path) -> Recorded | None:
    """What the configuration beside a file says of its network; None: there is none.

    It is transformers' (`model_type`) or timm's (`architecture`); another's is as if none.

    Raises DataError: damaged, or values of another kind.
    """
    config = _read(weights.with_name(CONFIGURATION))
    said = "config.json beside the file is taken"
    if "model_type" in config:
        heads, width = (_count(config, name) for name in ("num_attention_heads", "hidden_size"))
        names = ("hidden_size", "patch_size", "image_size", "hidden_act")
        says = {name: config[name] for name in names if name in config}
        if heads and width:
            says["num_heads"] = {width: heads}
        eps = config.get("layer_norm_eps")
        if eps is not None:
            if type(eps) is not float or not 0 < eps < 1:
                raise DataError(f"{CONFIGURATION}: layer_norm_eps: got {shown(eps)}, expected 0..1")
            says["layer_norm_eps"] = eps
        processor = _read(weights.with_name(PREPROCESSOR))
        pixels = _pixels(processor, "image_mean", "image_std", PREPROCESSOR)
        if pixels:
            said = "config.json and preprocessor_config.json beside the file are taken"
        return Recorded(says=says, **pixels, note=said)
    if isinstance(config.get("architecture"), str):
        its = config.get("pretrained_cfg")
        pixels = _pixels(its if isinstance(its, Mapping) else {}, "mean", "std", CONFIGURATION)
        return Recorded(arch=config["architecture"], **pixels, note=said)
    return None


def _read(path: Path) -> Mapping[str, Any]:
    """The object in a file of JSON, empty where there is no file."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path}: more than {MAX_BYTES} bytes, which no configuration has")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}); delete it or download it again") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: got a {type(value).__name__}, expected an object")
    return value


def _count(config: Mapping[str, Any], name: str) -> int:
    """A whole number, 0 where there is none."""
    value = config.get(name, 0)
    if type(value) is not int or not 0 <= value <= 2**16:
        raise DataError(f"{CONFIGURATION}: {name}: got {shown(value)}, expected a whole number")
    return value


def _pixels(values: Mapping[str, Any], mean: str, std: str, file: str) -> dict[str, Any]:
    """Fields of `Recorded`, 0..255, from numbers of 0..1; empty where there are none."""
    found = {}
    for field, name in (("mean", mean), ("std", std)):
        three = values.get(name)
        if three is None:
            return {}
        if not (
            isinstance(three, list)
            and len(three) == 3
            and all(type(v) in (int, float) and math.isfinite(v) for v in three)
        ):
            raise DataError(f"{file}: {name}: got {shown(three)}, expected three numbers")
        found[field] = tuple(round(255 * value, 6) for value in three)
    return found
