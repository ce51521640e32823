"""The network of a folder of transformers as its own class computes it, for a comparison.

The class is the one of the configuration's `model_type`, and is given the file's tensors by
transformers' own loader. Of the configuration it gets the facts that were compared with the tensors
alone: no attribute that names files, code or a kernel, or asks for memory.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from convert.contract import Overrides
from convert.facts import NONE, TRANSFORMERS, facts_of
from convert.read import flatten, is_array, to_tensor
from convert.recognize import Recognized
from convert.source_module import ModuleCheck, check_module

# A verdict must not depend on the machine, so the limit is none of seconds. ViT-L has 304 million.
MAX_PARAMETERS = 350_000_000
# Tensors of parts after the blocks, which a file may lack.
_LATER = re.compile(
    r"(pooler|head|(post_)?layer_?norm|norm|decoder)\b|.*(mask_token|position_ids)$"
)


def check_source(
    module: nn.Module | None, raw: Any, found: Recognized, overrides: Overrides, where: str
) -> tuple[Recognized, ModuleCheck | None]:
    """Compare a network with the thing itself: the module that was handed over, or transformers'.

    Args:
        module: Module whose tensors were recognized, or None for a file.
        raw: Contents of the file.
        found: Recognized network.
        overrides: Options of the conversion.
        where: Name of the file or the module, for messages.

    Returns:
        The network, without what is no longer assumed, and the result; None for a file without a
        configuration of transformers.

    Raises:
        DataError, UserError: See `check_module`.
    """
    if module is None:
        if not found.configuration:
            return found, None
        made = _made(raw, found, where)
        if isinstance(made, str):
            text = f"not verified by the class of transformers: {made}"
            return found, ModuleCheck(text, verified=False)
        module, where = made, f"{where}: transformers' {type(made).__name__}"
    check = check_module(module, found, overrides, where)
    if check.verified:  # it determines everything but its pixels
        pixels = "" if check.pixels else found.assumed_pixels
        found = dataclasses.replace(found, assumed=pixels, assumed_pixels=pixels)
    return found, check


def _made(raw: Any, found: Recognized, where: str) -> nn.Module | str:
    """Return the network that transformers makes of a file, or why it makes none."""
    if not importlib.util.find_spec("transformers"):
        return "transformers is not installed"
    parameters = sum(value.numel() for value in found.source_network()[0].values())
    if parameters > MAX_PARAMETERS:
        return f"it has more than {MAX_PARAMETERS // 10**6} million parameters"
    names = {part for key in found.state for part in found.named(key).split(" + ")}
    entries = [entry for entry in flatten(raw, where) if is_array(entry.value)]
    inside = {entry.name.rpartition("/")[2]: entry.value for entry in entries
              if entry.keys[:-1] == found.keys}  # fmt: skip
    kind = found.configuration["model_type"]
    # Others, such as the width of a pooler, could ask for any amount of memory.
    own = facts_of(TRANSFORMERS, found.contract.family.name, kind)
    facts = {name: value for name, value in found.configuration.items()
             if own.get(name, NONE) is not NONE and value is not None}  # fmt: skip
    return _filled(kind, facts, inside, names, where)


def _filled(
    kind: str, facts: Mapping[str, Any], arrays: Mapping[str, Any], names: set[str], where: str
) -> nn.Module | str:
    import transformers
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        config = transformers.CONFIG_MAPPING[kind](**facts)
        make: Any = transformers.MODEL_MAPPING[type(config)]
        lost: set[str] = set()
        starts = itertools.accumulate(f"{part}." for part in min(names).split(".")[:-1])
        for prefix in ["", *starts]:  # the class may be inside another network
            if not all(name.startswith(prefix) for name in names):
                break
            tensors = {key.removeprefix(prefix): _tensor(key, value, where)
                       for key, value in arrays.items() if key.startswith(prefix)}  # fmt: skip
            net, info = make.from_pretrained(
                None, config=config, state_dict=tensors, output_loading_info=True
            )
            lost = {key for key in info["missing_keys"] if not _LATER.match(key)}
            if not lost:
                module: nn.Module = net.eval()
                return module
        return f"its {kind} lacks {len(lost)} of the tensors, such as {min(lost)}"
    except Exception as error:  # whatever a class raises for a record that it does not take
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _tensor(key: str, value: Any, where: str) -> Tensor:
    tensor = to_tensor(key, value, where)
    return tensor.float() if tensor.is_floating_point() else tensor
