"""A file in timm's names, of the network that the caller names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convert.contract import InputContract, Pixels
from convert.families.base import LEFT_AT_INIT, family_named, first_rule
from convert.families.timm import TimmArchitecture
from convert.files import is_array, names, to_tensor, unwrapped
from convert.recorded import to_255
from convert.sources import Given, Recognized
from moco.common.errors import DataError, UserError

# Where timm/models/_helpers.py, load_state_dict, looks for a network, in its order.
_CONTAINERS = {
    "ema": ("state_dict_ema", "model_ema"),
    "model": ("state_dict", "model"),
}


def recognize(raw: Any, where: str, given: Given, sha256: str) -> Recognized:
    """The backbone of a file of timm's network `given.timm_model`, a name with or without a tag.

    Pixels are those of timm's `pretrained_cfg`, which the tag is of.

    Raises:
        DataError: the file holds no such network, or more than it.
        UserError: timm has no such network, or none with a pyramid.
    """
    from timm.models import get_pretrained_cfg

    from convert.modeling.timm_features import own_names, usual_names

    model = given.timm_model or ""
    architecture = TimmArchitecture(model.partition(".")[0])
    own = own_names(architecture.name)
    encoder, found = _network(raw, given.encoder, where)
    missing = {key for key in own if not key.endswith("num_batches_tracked")} - found.keys()
    unknown = found.keys() - set(usual_names(architecture.name))
    for what, keys in (("missing", missing), ("unknown", unknown)):
        if keys:
            raise DataError(
                f"{where}: not a {architecture} in timm's names; {what}: {names(sorted(keys))}"
            )
    every: Any = get_pretrained_cfg(model) or get_pretrained_cfg(architecture.name)
    pixels = Pixels(to_255(every.mean), to_255(every.std), "RGB")
    state = {own[key]: to_tensor(key, found[key], where) for key in own if key in found}
    counters = [key for key in state if first_rule(key, LEFT_AT_INIT)]
    state = {
        key: value.float() if value.is_floating_point() else value
        for key, value in state.items()
        if key not in counters
    }
    usual = {name: key for key, name in own.items()}
    heads = found.keys() - own.keys()
    tag = f".{every.tag}" if every.tag else ""
    return Recognized(
        contract=InputContract(
            given.pixels(pixels, where), family_named("timm"), architecture, "timm", sha256, encoder
        ),
        state=state,
        encoders=(encoder,),
        named=lambda name: usual.get(name, name),
        dropped={"head": len(heads), "batch counter": len(counters)},
        head="with a head" if heads else "no head",
        notes=[f"pixels are those of timm's {architecture.name}{tag}"],
    )


def _network(raw: Any, encoder: str | None, where: str) -> tuple[str, dict[str, Any]]:
    """What `--encoder` calls a network of the file, and its tensors by timm's names."""
    raw = raw if isinstance(raw, Mapping) else {}
    found = {
        name: raw[key]
        for name, keys in _CONTAINERS.items()
        for key in keys
        if isinstance(raw.get(key), Mapping)
    } or {"single": raw}
    if encoder is not None and encoder not in found:
        raise UserError(f"--encoder {encoder}: {where} has {', '.join(found)}")
    name = encoder or next(iter(found))
    return name, {unwrapped(key): value for key, value in found[name].items() if is_array(value)}
