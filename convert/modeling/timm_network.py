"""Networks of timm as backbones: their own modules, maps and tensors, by `forward_intermediates`.

timm computes every block, with tokens, windows and positions. This module chooses the maps, the
size of the image, and the parameters that a detector freezes.

Shapes: N images, C channels, H W pixels.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import math
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from convert.families.base import LEFT_AT_INIT, STRIDES, Family, first_rule
from convert.families.timm import format_arguments, in_timm, parse_arguments
from convert.families.vit import FEATURE
from convert.modeling.reference import (
    TOLERANCE,
    WithoutInitialValues,
    module_outputs,
    on_meta_device,
)
from moco.common.errors import DataError, UserError, first_few, format_value
from moco.modeling import soundness

# Ways in which a network takes images of other sizes.
ANY_SIZE, DYNAMIC, FIXED = "any", "dynamic", "fixed"
# timm warns of a head in the file, which a rule drops.
logging.getLogger("timm.models._builder").setLevel(logging.ERROR)
# Networks that look positions up in a table, whose bounds the meta device does not check.
_INDEXED = ("MultiScaleVit",)
# Vision transformers on a whole ResNet, whose published weights timm loads first.
_FETCHES = re.compile(r"_resnet(26|50)d_")
_PROBE_CELLS = (9, 11)  # of the coarsest map; odd, so that no window divides them
_VERIFICATION_CELLS = 16  # of a network with one map for images of any size
# Attributes of timm's transformers, and the classes of their activations.
_FACTS = {
    "timm": "blocks.0.attn.num_heads",
    "activation": "blocks.0.mlp.act",
    "layer_norm_eps": "blocks.0.norm1.eps",
    "dynamic_img_size": "dynamic_img_size",
}
_ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu"}
# Errors of timm's constructors and networks for unsupported arguments and images.
NOT_BUILT = (
    *(AssertionError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError),
    *(TypeError, ValueError),
)


@dataclasses.dataclass(frozen=True)
class Maps:
    """Maps that a detector takes from a network of timm.

    Attributes:
        indices: Indices of the maps in `forward_intermediates`.
        strides, channels: Strides and channels, by the name of the map: the last of each stride
            of 4 to 32, or the map of the last block if all have one stride.
        sizes: `ANY_SIZE`, `DYNAMIC` (with timm's `dynamic_img_size`) or `FIXED` (`img_size`).
        image_size: Height and width of the images that the network was made for, px.
    """

    indices: tuple[int, ...]
    strides: Mapping[str, int]
    channels: Mapping[str, int]
    sizes: str
    image_size: tuple[int, int]


class TimmNetwork(nn.Module):
    """Network of timm: (N, 3, H, W) normalized pixels -> {"res2", …, "res5"} or {"last_feat"}.

    The parts after the last map are removed. The maps are taken before a final norm, without
    tokens.

    Args:
        name: timm's model name without a tag.
        arguments: Arguments of `timm.create_model` as text.
        image_size: Side of the images, px, if the network takes one size alone; 0 for its own.
        patch_size: Side of a patch, px; 0 for the network's own.
        drop_path: timm's `drop_path_rate`; 0 uses the network's default.
        freeze_at: Number of leading parts that are frozen, see `parts`; -1: the whole network.
        checkpoint_blocks: Recompute activations in the backward pass, as timm does it.

    Attributes:
        strides: Strides of the maps, by name.
        stage_channels: Channels of the maps, by name.

    Raises:
        UserError: If timm has no such network, or the network lacks maps or an argument.
    """

    strides: Mapping[str, int]
    stage_channels: Mapping[str, int]

    def __init__(
        self,
        name: str,
        arguments: str = "",
        *,
        image_size: int = 0,
        patch_size: int = 0,
        drop_path: float = 0.0,
        freeze_at: int = 0,
        checkpoint_blocks: bool = False,
    ) -> None:
        super().__init__()
        maps = network_maps(name, arguments)
        options = size_arguments(maps, image_size, patch_size)
        if drop_path:
            options["drop_path_rate"] = drop_path
        self.net = _pruned(_create(name, arguments, **options), maps)
        if checkpoint_blocks:
            self._checkpoint_blocks(name, arguments)
        self.indices = list(maps.indices)
        self.strides = maps.strides
        if patch_size:
            self.strides = dict.fromkeys(maps.strides, patch_size)
        self.stage_channels = maps.channels
        self.is_frozen = freeze_at < 0
        leading = parts(name, arguments)[:freeze_at] if freeze_at > 0 else ()
        frozen = {key for part in leading for key in part}
        for key, parameter in self.net.named_parameters():
            if self.is_frozen or key in frozen:
                parameter.requires_grad_(False)

    @property
    def size_divisibility(self) -> int:
        """Largest stride; both sides of a batch are padded to a multiple of it."""
        return max(self.strides.values())

    def _checkpoint_blocks(self, name: str, arguments: str) -> None:
        net: Any = self.net
        try:
            net.set_grad_checkpointing()
        except NOT_BUILT as error:
            what = f"cannot recompute activations ({_first(error)})"
            raise _refusal(name, arguments, what) from error

    def train(self, mode: bool = True) -> TimmNetwork:
        """Set the mode; batch norm and drop path of frozen parts stay in eval mode."""
        super().train(mode)
        for module in self.net.modules():
            parameters = list(module.parameters())
            if self.is_frozen or (parameters and not any(p.requires_grad for p in parameters)):
                module.eval()
        return self

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the maps."""
        net: Any = self.net
        maps = net.forward_intermediates(x, indices=self.indices, intermediates_only=True)
        return dict(zip(self.strides, maps, strict=True))


def size_arguments(maps: Maps, image_size: int, patch_size: int) -> dict[str, Any]:
    """Return the arguments of `timm.create_model` for a size of the images and the patches."""
    options: dict[str, Any] = {}
    if maps.sizes == DYNAMIC:
        options["dynamic_img_size"] = True
    if patch_size:
        # As many patches as the source has, so that its positions need not be resampled.
        own = max(maps.strides.values())
        options["patch_size"] = patch_size
        if maps.sizes != ANY_SIZE:
            options["img_size"] = tuple(px // own * patch_size for px in maps.image_size)
    if maps.sizes == FIXED and image_size:
        options["img_size"] = image_size
    return options


@functools.cache
def network_maps(name: str, arguments: str = "") -> Maps:
    """Return the maps of a network of timm.

    The strides are those that timm states. A run on the meta device shows whether they are right,
    and which sizes of images the network takes.

    Raises:
        UserError: If timm has no such network, or the network has no maps for a pyramid or takes
            images of a single size.
    """
    net = whole_network(name, arguments)
    if not hasattr(net, "forward_intermediates"):
        raise _refusal(name, arguments, "the installed timm has no maps of it")
    its: Any = getattr(net.feature_info, "info", net.feature_info)
    last = {row["reduction"]: (i, row["num_chs"]) for i, row in enumerate(its)}
    if {*STRIDES.values()} <= last.keys():
        chosen = STRIDES
    elif len(last) == 1:
        chosen = {FEATURE: next(iter(last))}
    else:
        expected = f"expected {[*STRIDES.values()]}, or one"
        raise _refusal(name, arguments, f"its maps have strides {[*last]}, {expected}")
    size = _own_size(net, arguments)
    maps = Maps(
        tuple(last[stride][0] for stride in chosen.values()),
        chosen,
        {feature: last[stride][1] for feature, stride in chosen.items()},
        ANY_SIZE,
        size,
    )
    other = tuple(max(chosen.values()) * cells for cells in _PROBE_CELLS)
    reason = _difference(net, maps, other)
    if type(net).__name__ in _INDEXED:
        reason = "its tables are for one size"
    if not reason:
        return maps
    for sizes, options, images in (
        (DYNAMIC, {"dynamic_img_size": True}, other),
        (FIXED, {"img_size": 2 * size[0]}, (2 * size[0], 2 * size[0])),
    ):
        try:
            changed = whole_network(name, arguments, **options)
        except UserError:
            continue
        if not _difference(changed, maps, images):
            return dataclasses.replace(maps, sizes=sizes)
    what = "does not take images of another size, as detectors do"
    raise _refusal(name, arguments, f"{what} ({reason})")


def _own_size(net: Any, arguments: str) -> tuple[int, int]:
    size = parse_arguments(arguments).get("img_size") or net.pretrained_cfg["input_size"][1:]
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _difference(net: Any, maps: Maps, size: tuple[int, ...]) -> str:
    """Describe how the maps of an image of a size differ from the expected ones, or return ""."""
    try:
        with torch.device("meta"), torch.no_grad():
            image = torch.empty(1, 3, *size)
            made = net.forward_intermediates(
                image, indices=list(maps.indices), intermediates_only=True
            )
    except NOT_BUILT as error:
        return _first(error)
    for value, (name, stride) in zip(made, maps.strides.items(), strict=True):
        expected = [1, maps.channels[name], *(px // stride for px in size)]
        if list(value.shape) != expected:
            return f"a map of shape {list(value.shape)} for {size[0]} x {size[1]} px"
    return ""


def verification_size(architecture: Any) -> tuple[int, int]:
    """Return height and width of the image that verifies a conversion; see `Family.image_size`."""
    maps = network_maps(architecture.name, architecture.arguments)
    if maps.sizes != ANY_SIZE:
        return maps.image_size
    if len(maps.strides) > 1:
        return soundness.IMAGE_SIZE_PX
    side = _VERIFICATION_CELLS * max(maps.strides.values())
    return side, side


@functools.cache
def size_problem(name: str, arguments: str, image_size: int, patch_size: int) -> str:
    """Return why a network does not take images or patches of a size, px, or "".

    0 stands for the size of the network.
    """
    maps = network_maps(name, arguments)
    try:
        net = whole_network(name, arguments, **size_arguments(maps, image_size, patch_size))
    except UserError as error:
        return str(error)
    if patch_size:
        maps = dataclasses.replace(maps, strides=dict.fromkeys(maps.strides, patch_size))
    side = image_size or _VERIFICATION_CELLS * max(maps.strides.values())
    return _difference(net, maps, (side, side))


@functools.cache
def parts(name: str, arguments: str = "") -> tuple[tuple[str, ...], ...]:
    """Return the names of the parameters of each part that can be frozen, from stem to last stage.

    The parts are timm's coarse groups; a network without groups has none.
    """
    return _groups(name, arguments, coarse=True)


@functools.cache
def layers(name: str, arguments: str = "") -> dict[str, int]:
    """Return the layer of each parameter, for layer-wise decay of learning rates.

    Raises:
        UserError: If timm has no groups of layers for this network.
    """
    groups = _groups(name, arguments, coarse=False)
    if not groups:
        raise _refusal(name, arguments, "timm has no groups of its layers")
    return {key: i for i, group in enumerate(groups) for key in group}


def _groups(name: str, arguments: str, *, coarse: bool) -> tuple[tuple[str, ...], ...]:
    from timm.models import group_parameters

    net = _pruned(whole_network(name, arguments), network_maps(name, arguments))
    try:
        groups = group_parameters(net, net.group_matcher(coarse=coarse))
    except NOT_BUILT:
        return ()
    return tuple(tuple(groups[i]) for i in sorted(groups))


@functools.cache
def own_names(name: str, arguments: str = "") -> dict[str, str]:
    """Map timm's names of the tensors of a backbone to the names in `TimmNetwork`.

    Raises:
        UserError: If the network has no maps for a pyramid, or timm builds another network for
            published weights.
    """
    if _FETCHES.search(name):
        raise _refusal(name, arguments, "timm downloads a part of it whenever it loads weights")
    net = whole_network(name, arguments)
    published = whole_network(name, arguments, pretrained=True)
    if str(net) != str(published):
        raise _refusal(
            name,
            arguments,
            "timm builds another network for its published weights than for others (e.g. another "
            "eps), and no file says which it has; it is not supported",
        )
    return {key: f"net.{key}" for key in _pruned(net, network_maps(name, arguments)).state_dict()}


@functools.cache
def meta_tensors(name: str, arguments: str = "") -> dict[str, Tensor]:
    """Return the tensors of timm's whole network on the meta device, by timm's names."""
    state: dict[str, Tensor] = whole_network(name, arguments).state_dict()
    return state


def whole_network(name: str, arguments: str = "", pretrained: bool = False, **options: Any) -> Any:
    """Return timm's whole network on the meta device.

    With `pretrained`, the network is the one that timm builds for published weights.
    """
    if pretrained:
        overlay = {"state_dict": dict(meta_tensors(name, arguments))}
        options |= {"pretrained": True, "pretrained_cfg_overlay": overlay}
    with on_meta_device():
        return _create(name, arguments, **options).eval()


def load_network(
    name: str, arguments: str, tensors: Mapping[str, Tensor], **options: Any
) -> nn.Module:
    """Return timm's network filled by timm's own loader, which resamples tables of other sizes.

    Args:
        name: timm's model name.
        arguments: Arguments of `timm.create_model` of the source.
        tensors: Tensors by timm's names; missing ones, such as those of a head, are zero.
        options: Further arguments of the network.

    Raises:
        UserError: If timm cannot load them.
    """
    usual = meta_tensors(name, arguments)
    zeros = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in usual.items()}
    overlay = {"state_dict": {**zeros, **tensors}}
    with WithoutInitialValues():
        net: nn.Module = _create(
            name, arguments, pretrained=True, pretrained_cfg_overlay=overlay, **options
        )
    return net


def resample_tensors(
    name: str, arguments: str, state: Mapping[str, Tensor], image_size: int, patch_size: int
) -> dict[str, Tensor]:
    """Return the tensors of a `TimmNetwork` for images and patches of other sizes, as timm loads.

    Args:
        name: timm's model name.
        arguments: Arguments of the source.
        state: Tensors of the source by the names in `TimmNetwork`.
        image_size: Side of the images, px; 0 for the network's own.
        patch_size: Side of a patch, px; 0 for the network's own.

    Raises:
        UserError: If timm does not resample the tensors.
    """
    maps = network_maps(name, arguments)
    options = size_arguments(maps, image_size, patch_size)
    tensors = {key.removeprefix("net."): value for key, value in state.items()}
    try:
        net = load_network(name, arguments, tensors, **options)
    except UserError:  # the loaders of some networks do not resample positions
        changed = whole_network(name, arguments, **options).state_dict()
        try:
            net = load_network(name, arguments, _with_positions(tensors, changed), **options)
        except UserError as error:
            raise _refusal(
                name,
                arguments,
                f"timm's loader does not resample its tables of {maps.image_size[0]} px; set "
                "MODEL.BACKBONE.SQUARE_PAD to that, with images of at most that size",
            ) from error
    made = _pruned(net, maps).state_dict()
    return {key: made[key.removeprefix("net.")] for key in state}


def _with_positions(
    tensors: Mapping[str, Tensor], changed: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Resample the added positions, (1, h w, C), among tensors by timm's function."""
    from timm.layers import resample_abs_pos_embed

    made = dict(tensors)
    for key, value in tensors.items():
        other = changed[key].shape
        if key.rpartition(".")[2] == "pos_embed" and value.shape != other and value.dim() == 3:
            old, new = (math.isqrt(shape[1]) for shape in (value.shape, other))
            if (old**2, new**2) == (value.shape[1], other[1]):
                made[key] = resample_abs_pos_embed(value, [new, new], num_prefix_tokens=0)
    return made


def rename_with_timm(
    name: str, arguments: str, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """Rename tensors of another project by timm's own loader.

    Returns:
        The tensors by timm's names, or None if timm has no loader for them.
    """
    import timm

    module = sys.modules[timm.model_entrypoint(name).__module__]
    converters = (getattr(module, each, None) for each in ("checkpoint_filter_fn", "_filter_fn"))
    usual, own = meta_tensors(name, arguments), own_names(name, arguments)
    net = whole_network(name, arguments)
    for convert in filter(None, converters):
        takes = len(inspect.signature(convert).parameters)
        try:
            made = convert(dict(tensors), *([net] if takes > 1 else []))
        except Exception:  # the converter was written for other files
            continue
        needed = {key for key in own if not first_rule(key, LEFT_AT_INIT)}
        if made.keys() <= usual.keys() and needed <= made.keys() != tensors.keys():
            return dict(made)
    return None


class LoadedByTimm(nn.Module):
    """Reference implementation: timm's whole network, filled by timm's own loader.

    The maps pass through identities that have their names.
    """

    def __init__(self, name: str, arguments: str = "") -> None:
        super().__init__()
        self.name, self.arguments = name, arguments
        for feature in (*STRIDES, FEATURE):
            self.add_module(feature, nn.Identity())

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Load tensors by the names of `TimmNetwork`."""
        tensors = {key.removeprefix("net."): value for key, value in state_dict.items()}
        self.net = load_network(self.name, self.arguments, tensors)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Compute the maps and pass them through the identities."""
        maps, net = network_maps(self.name, self.arguments), self.net
        made: Any = net.forward_intermediates(x, indices=list(maps.indices))  # type: ignore[operator]
        return [
            self.get_submodule(feature)(value)
            for feature, value in zip(maps.strides, made[1], strict=True)
        ]


def _pruned(net: Any, maps: Maps) -> Any:
    """Remove the parts after the last map, in place."""
    net.prune_intermediate_layers(list(maps.indices), prune_norm=True, prune_head=True)
    return net


def _create(name: str, arguments: str, **options: Any) -> Any:
    """Create timm's network, without a download."""
    import timm

    if not timm.is_model(name):
        near = first_few(timm.list_models(f"{name.partition('_')[0]}*"), 3) or "timm.list_models()"
        raise _refusal(name, "", f"the installed timm has no such network; e.g. {near}")
    its = parse_arguments(arguments)
    try:
        return timm.create_model(name, **{**its, **options})
    except NOT_BUILT as error:
        added = options.keys() - {"pretrained", "pretrained_cfg_overlay"}
        what = f" with {', '.join(sorted(added))}" if added else ""
        text = f"timm does not build it{what} ({_first(error)})"
        raise _refusal(name, arguments, text) from error


def _refusal(name: str, arguments: str, reason: str) -> UserError:
    """Return the error about a network of timm."""
    its = parse_arguments(arguments).items()
    built = ", ".join(f"{key}={format_value(value)}" for key, value in its)
    return UserError(f"timm {name}{f' with {built}' if built else ''}: {reason}")


def _first(error: BaseException) -> str:
    """Return the first line of an error, shortened."""
    return format_value((str(error).splitlines() or [type(error).__name__])[0], 160)


def named_facts(
    names: Mapping[str, str], arguments: Mapping[str, Mapping[str, Any]], tag: str = ""
) -> dict[str, Any]:
    """Return facts that no tensor holds, of the first of these transformers that timm has.

    They are the number of heads (as "timm"), the activation, and the epsilon of the norms. Weights
    of some tags were trained with another activation, for which timm has a second network.

    Args:
        names: Recorded names of the network by place.
        arguments: Recorded arguments of `timm.create_model` by place.
        tag: Tag of the weights, or "".
    """
    import timm

    place = next((place for place, name in names.items() if in_timm(name)), None)
    if place is None:
        return {}
    name = names[place]
    try:
        net = whole_network(name, format_arguments(arguments.get(place, {})))
    except UserError:  # `compare_named_networks` reports the arguments
        return {}
    found = {}
    for fact, path in _FACTS.items():
        with suppress(AttributeError):
            found[fact] = attrgetter(path)(net)
    if "activation" in found:
        found["activation"] = _ACTIVATIONS.get(type(found["activation"]).__name__)
    second = name.replace("_clip_", "_clip_quickgelu_")
    if tag and second != name and timm.is_model_pretrained(f"{second}.{tag}"):
        found["trained_with"] = "quick_gelu"
    return {fact: value for fact, value in found.items() if value}


def compare_named_networks(
    names: Mapping[str, str],
    arguments: Mapping[str, Mapping[str, Any]],
    family: Family,
    source: tuple[Mapping[str, Tensor], Any],
    tokens: Mapping[str, Tensor],
    requested: Mapping[str, Any],
    where: str,
) -> list[str]:
    """Compare features with those of timm's network of each recorded name.

    Args:
        names: Result of `convert.families.timm.check_names`.
        arguments: Recorded arguments of `timm.create_model`, by the places of `names`.
        family: Family of the recognized network.
        source: Tensors and architecture of the recognized network.
        tokens: Class token and registers of the recognized network.
        requested: Values of the family's options, which take precedence over the name's.
        where: Name of the file, for messages.

    Returns:
        A note for each name.

    Raises:
        DataError: If timm's network computes other features from these tensors.
    """
    options = {o.in_timm: requested[o.name] for o in family.options if o.name in requested}
    options.pop("", None)
    notes = []
    for place, name in names.items():
        own = arguments.get(place, {})
        built = f" with {', '.join(sorted(own))}" if own else ""
        if difference := _difference_from(name, {**own, **options}, family, *source, tokens):
            raise DataError(
                f"{where}: {place} names {format_value(name)}{built}, which is not a plain "
                f"{source[1]}: {difference}"
            )
        notes.append(f"{place} names {name}{built}: timm's own network of that name agrees")
    return notes


def _difference_from(
    name: str,
    changed: Mapping[str, Any],
    family: Family,
    state: Mapping[str, Tensor],
    architecture: Any,
    tokens: Mapping[str, Tensor],
) -> str:
    """Return how timm's network of a name differs from the recognized one, or ""."""
    import timm

    size = family.image_size(architecture)
    options = {"num_classes": 0, **({"img_size": size[0]} if family.tokens else {}), **changed}
    if family.is_windowed:
        options["img_size"] = size  # windows are for any size, but timm's network takes one
    rules = {**family.dropped, **LEFT_AT_INIT}
    try:
        with on_meta_device():  # the name may be that of a network of gigabytes
            whole = timm.create_model(name, **options).state_dict()
    except NOT_BUILT as error:
        return f"timm does not build it ({' '.join(str(error).split())[:100]})"
    try:
        tensors = family.tensors_in_timm(architecture, {**state, **tokens}, whole.keys())
        needed = {key for key in whole if not first_rule(key, rules)}
        if others := sorted((needed - tensors.keys()) | (tensors.keys() - whole.keys())):
            return f"timm's has other tensors ({others[0]})"
        # timm's small ConvNeXts compute linear layers as convolutions.
        tensors = {key: value.reshape(whole[key].shape) for key, value in tensors.items()}
        net = timm.create_model(name, **options)
        net.load_state_dict(tensors, strict=False)
    except NOT_BUILT:
        return "timm's has tensors of other shapes"
    image = soundness.fixed_image(size)
    with torch.no_grad():
        modules, expected = family.source_features(architecture, state, tokens, image)
        try:
            actual = module_outputs(net.eval(), modules, image)
        except AttributeError:
            return "timm's has other modules"
        except NOT_BUILT as error:
            return f"timm's does not take its image ({' '.join(str(error).split())[:100]})"
    largest = 0.0
    for feature, value in expected.items():
        other = actual[feature]
        if other.shape != value.shape:
            return f"timm's has maps of other sizes at {feature}"
        scale = max(1.0, float(value.abs().max()))
        largest = max(largest, float((other - value).abs().max()) / scale)
    # Operations that timm fuses round differently; GELU by tanh differs by 5e-4 and more.
    return f"its features differ from timm's by up to {largest:.2g}" if largest > TOLERANCE else ""


def module_size(module: Any) -> Any:
    """Return the height and width in the configuration of timm's module, or None."""
    config = getattr(module, "pretrained_cfg", None)
    return (config.get("input_size") or [None])[1:] if isinstance(config, Mapping) else None


def module_configuration(module: Any) -> dict[str, Any]:
    """Return what timm would save next to the weights of its module, or {} for other modules."""
    config = getattr(module, "pretrained_cfg", None)
    if not isinstance(config, Mapping):
        return {}
    # Arguments that are classes are left out: the module itself is run.
    arguments = getattr(module, "_model_args", {})
    return {
        "architecture": config.get("architecture"),
        "model_args": {name: value for name, value in arguments.items() if _is_json(value)},
        "pretrained_cfg": {name: config.get(name) for name in ("mean", "std")},
    }


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
