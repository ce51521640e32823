"""What a file, or its configuration, says of its network: is its name that of the recognized one?

Networks that pool, normalize or place their tokens in other ways can have exactly the tensors of a
plain one. Nothing in these tells them apart, but a name does. A name is text of unknown origin:
compared, and looked up among timm's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from convert.contract import Pixels, numbers
from convert.families.base import LEFT_AT_INIT, Family, first_rule
from convert.files import at
from convert.recorded import Recorded
from moco.common.errors import DataError, shown

if TYPE_CHECKING:
    from torch import Tensor, nn

    from convert.networks import Network

_HOLDERS = ((), ("args",), ("hyper_parameters",), ("hyper_parameters", "backbone"))
_KEYS = ("arch", "architecture", "model", "model_name", "backbone", "encoder", "name")
_WORDS = re.compile(r"[a-z]+")


def recorded(
    network: Network,
    raw: Any,
    missing: Sequence[str],
    where: str,
    beside: Callable[[], Recorded | None],
) -> tuple[Recorded, dict[str, str]]:
    """What the file says of its network, and where it names it.

    Args:
        missing: options of the network's convention that are not given.
        beside: reads the configuration beside the file.

    Raises:
        DataError: It is damaged, or another than the layout's where these options are needed.
    """
    layout = network.layout
    anonymous = layout.plain or layout.any_network
    try:
        said = layout.recorded(raw) if layout.recorded else Recorded()
        its = beside() if anonymous else None
        if its is not None and not said.mean:
            said = its
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if said.other and missing:
        raise DataError(
            f"{where}: its configuration says {', '.join(said.other)}, which is not the "
            f"convention of {layout.name}; give {' '.join(missing)} as its training had them"
        )
    return said, {} if layout.is_own else recorded_names(raw, its.arch if its else None)


def heads(backbone: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Any]:
    """The attention heads that timm's network of a name has, as a family's `recognize` takes it."""
    positions = backbone.get("pos_embed")
    found = None if positions is None else _heads_in_timm(names)
    return {} if positions is None or not found else {"num_heads": {positions.shape[-1]: found}}


def assumed(
    network: Network, names: Mapping[str, str], said: Recorded, pixels: Pixels, *, given: bool
) -> str:
    """What a file of unknown origin does not tell and the proof takes for granted.

    Args:
        given: the command line says the pixels.
    """
    layout, family = network.layout, network.family
    if not (layout.plain or layout.any_network):
        return ""
    named_so = any(word in name for name in names.values() for word in family.words)
    known = named_so or "hidden_act" in said.says
    parts = [] if known or not family.assumes else [family.assumes]
    if not (said.mean or given):
        parts.append(f"mean {numbers(pixels.mean)}, std {numbers(pixels.std)}")
    return ", ".join(parts)


def recorded_names(raw: Any, beside: str | None) -> dict[str, str]:
    """Return where a network is named → the name without owner and tag, in small letters.

    Args:
        beside: as a configuration beside the file has it.
    """
    found = {} if beside is None else {"config.json beside it": beside}
    for holder in _HOLDERS:
        for key in _KEYS if holder else _KEYS[:2]:
            if isinstance(name := at(raw, (*holder, key)), str):
                found[".".join((*holder, key))] = name
    return {
        where: name.strip().lower().rpartition("/")[2].partition(".")[0]
        for where, name in found.items()
    }


def check_names(names: Mapping[str, str], family: Family, where: str) -> dict[str, str]:
    """Return the names of which only timm's own network can tell whether they are plain.

    Raises:
        DataError: A name of this family that is not known.
    """
    unclear = {}
    for place, name in names.items():
        if set(_WORDS.findall(name)) <= family.plain_names:
            continue
        if _in_timm(name):
            unclear[place] = name
        elif any(word in name for word in family.words):
            raise DataError(
                f"{where}: {place} names {shown(name)}, which is not known to be a plain "
                f"{family.name}; give its state dict alone if you know it computes the same"
            )
    return unclear


def _heads_in_timm(names: Mapping[str, str]) -> int | None:
    """Return the attention heads of timm's vision transformer of one of these names."""
    import torch

    for name in names.values():
        if _in_timm(name):
            with torch.device("meta"):
                blocks = getattr(_create(name), "blocks", None)
            heads = getattr(getattr(blocks[0], "attn", None), "num_heads", None) if blocks else None
            return heads if type(heads) is int else None
    return None


def compare_with_timm(
    names: Mapping[str, str],
    family: Family,
    source: tuple[Mapping[str, Tensor], Any],
    tokens: Mapping[str, Tensor],
    where: str,
) -> list[str]:
    """Show one image to timm's own network of each name that is not clear; returns notes.

    Args:
        names: from `check_names`.
        source: tensors and architecture of the recognized network.
        tokens: its class token and registers.

    Raises:
        DataError: timm's computes something else from these tensors.
    """
    for place, name in names.items():
        if difference := _difference(name, family, *source, tokens):
            raise DataError(
                f"{where}: {place} names {shown(name)}, which is no plain {source[1]}: "
                f"{difference}; --timm-model {name} takes it where it has maps of strides 4 to 32"
            )
    return [
        f"{place} names {n}: timm's own network of that name agrees" for place, n in names.items()
    ]


def _difference(
    name: str,
    family: Family,
    state: Mapping[str, Tensor],
    architecture: Any,
    tokens: Mapping[str, Tensor],
) -> str:
    """How timm's network of a name differs from the recognized one; "": it does not."""
    import torch

    from convert import verify
    from moco.modeling.soundness import fixed_image

    tensors, size = {**state, **tokens}, family.image_size(architecture)
    options = {"num_classes": 0, **({"img_size": size[0]} if family.tokens else {})}
    rules = {**family.dropped, **LEFT_AT_INIT}
    try:
        with torch.device("meta"):  # a name may be that of a network of gigabytes
            its = _create(name, **options).state_dict()
        needed = {key for key in its if not first_rule(key, rules)}
        if others := sorted((needed - tensors.keys()) | (tensors.keys() - its.keys())):
            return f"timm's has other tensors ({others[0]})"
        # Small ConvNeXts have linear layers as convolutions.
        tensors = {key: value.reshape(its[key].shape) for key, value in tensors.items()}
        net = _create(name, **options)
        net.load_state_dict(tensors, strict=False)
    except (RuntimeError, TypeError, AssertionError, ValueError):
        return "timm's has tensors of other shapes"
    image = fixed_image(size)
    with torch.no_grad():
        modules: Mapping[str, str] = family.in_timm
        if family.source_features is not None:
            modules, expected = family.source_features(architecture, state, tokens, image)
        else:
            expected = verify.reference_features(family, architecture, state, image)
        try:
            actual = _outputs(net.eval(), modules, image)
        except (AttributeError, RuntimeError):
            return "timm's has other modules"
    largest = 0.0
    for feature, value in expected.items():
        other = actual[feature]
        if other.shape != value.shape:
            return f"timm's has maps of other sizes at {feature}"
        scale = max(1.0, float(value.abs().max()))
        largest = max(largest, float((other - value).abs().max()) / scale)
    # timm may fuse operations, which rounds otherwise.
    return f"its features differ from timm's by up to {largest:.2g}" if largest > 1e-3 else ""


def _outputs(net: nn.Module, modules: Mapping[str, str], image: Tensor) -> dict[str, Tensor]:
    """Outputs of modules by the names of their features."""
    outputs: dict[str, Tensor] = {}

    def keep(feature: str) -> Callable[..., None]:
        return lambda module, inputs, output: outputs.update({feature: output})

    for module, feature in modules.items():
        net.get_submodule(module).register_forward_hook(keep(feature))
    net(image)
    return outputs


def _in_timm(name: str) -> bool:
    import timm

    return bool(timm.is_model(name))


def _create(name: str, **options: Any) -> Any:
    """timm's network with random weights: nothing is ever downloaded."""
    import timm

    return timm.create_model(name, pretrained=False, **options)
