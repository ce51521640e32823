"""Files that are often taken for weights of a network, each with its sentence and the way out."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from convert.read import flatten, is_array
from moco.common.errors import shown
from moco.common.files import named_objects
from moco.common.unpickler import Inert

# torch.optim.Optimizer.state_dict.
_OPTIMIZER = {"state", "param_groups"}
# Names of tensors -> what they are, with "{}" for the first of them, and what to do.
_TENSORS = (
    # peft, tuners/lora/layer.py; kohya's and diffusers' older files.
    (
        re.compile(r"(^|[._])lora_(A|B|up|down|embedding_[AB]|magnitude_vector)\b"),
        "a LoRA adapter ({}), which changes a network that it does not hold: merge it into that "
        "network, with peft's merge_and_unload(), and give the state_dict() of the result",
    ),
    # torch/nn/utils/weight_norm.py; torch/nn/utils/parametrize.py.
    (
        re.compile(r"\.weight_(g|v)$|(^|\.)parametrizations\."),
        "a network whose weights are split by weight_norm or another parametrization ({}): join "
        "them with torch.nn.utils.remove_weight_norm, or parametrize.remove_parametrizations, and "
        "give its state_dict()",
    ),
    # bitsandbytes, nn/modules.py; GPTQ and AWQ; torch.ao.nn.quantized.
    (
        re.compile(
            r"\.(SCB|weight_format|absmax|quant_map|quant_state\..*|qweight|qzeros|g_idx"
            r"|zero_point|_packed_params(\..*)?)$"
        ),
        "quantized weights ({}), which do not hold the values of the network: give the "
        "floating-point weights that they were made from",
    ),
)


def mistaken(raw: Any) -> str:
    """Describe a file that holds something else than a network's weights, and the way out.

    Args:
        raw: Contents of a file that is refused.

    Returns:
        The text of a message, or "" if the file is none of these.
    """
    if isinstance(raw, Mapping) and not isinstance(raw, Inert) and set(raw) == _OPTIMIZER:
        return (
            "the state of an optimizer alone, without a network: give the checkpoint that has the "
            "model's state_dict()"
        )
    if found := _module(raw):
        return found
    keys = [str(e.keys[-1]) for e in flatten(raw, "") if e.keys] if _is_dict(raw) else []
    return next(filter(None, (_about(keys, *row) for row in _TENSORS)), "")


def _about(keys: Collection[str], pattern: re.Pattern[str], text: str) -> str:
    first = next((key for key in keys if pattern.search(key)), None)
    return "" if first is None else text.format(shown(first))


def _module(raw: Any) -> str:
    """Describe a module that was saved as an object, with its class; "" if there is none."""
    holders = {"": raw, **({f" in {shown(k, 30)}": raw[k] for k in raw} if _is_dict(raw) else {})}
    for place, value in holders.items():
        if isinstance(value, Inert) and not is_array(value) and "_modules" in value:
            return (
                f"a whole module{place}, of the class {named_objects([value.name])}, whose code is "
                "not run here: where the file is trusted, load it in its own project and "
                "torch.save its state_dict()"
            )
    return ""


def _is_dict(raw: Any) -> bool:
    return isinstance(raw, Mapping) and not isinstance(raw, Inert)
