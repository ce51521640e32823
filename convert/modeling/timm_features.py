"""Backbones of four stages from timm's `features_only` networks, and the names of their tensors.

Shapes: N images, C channels, H W pixels.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from convert.families.stages import FEATURES
from moco.common.errors import UserError, first_few

STRIDES = (4, 8, 16, 32)
# It warns of a head in the file, which is dropped by a rule.
logging.getLogger("timm.models._builder").setLevel(logging.ERROR)
_PROBE_PX = (128, 160)  # height and width, multiples of the largest stride


class TimmFeatures(nn.Module):
    """timm backbone: (N, 3, H, W) normalized pixels -> {"res2", …, "res5": (N, C, h, w)}.

    Args:
        name: timm's model name without a tag.
        drop_path: timm's `drop_path_rate`; 0 uses the network's default.

    Attributes:
        strides: Strides of the features, by name.
        stage_channels: Channels of the features, by name.

    Raises:
        UserError: If timm has no such network, or it has no feature maps of strides 4 to 32.
    """

    size_divisibility = 32
    strides: Mapping[str, int]
    stage_channels: Mapping[str, int]

    def __init__(self, name: str, drop_path: float = 0.0) -> None:
        super().__init__()
        indices, channels = probe(name)
        options: dict[str, Any] = {"drop_path_rate": drop_path} if drop_path else {}
        self.net = _create(name, indices, **options)
        self.strides = dict(zip(FEATURES, STRIDES, strict=True))
        self.stage_channels = dict(zip(FEATURES, channels, strict=True))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the features of strides 4 to 32."""
        return dict(zip(FEATURES, self.net(x), strict=True))


@functools.cache
def probe(name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return timm's indices of a network's last maps of strides 4 to 32, and their channels.

    It runs the network on an image on the meta device, because timm's strides are not always exact:
    networks may have unpadded convolutions, a fixed image size, or channels last.

    Raises:
        UserError: If timm has no such network, or it has no feature maps of strides 4 to 32.
    """
    with torch.device("meta"):
        net = _create(name)
        info = net.feature_info
        last = {stride: i for i, stride in enumerate(info.reduction())}
        if not set(STRIDES) <= last.keys():
            raise UserError(
                f"timm {name}: its maps have strides {info.reduction()}, expected {list(STRIDES)}"
            )
        try:
            maps = net.eval()(torch.empty(1, 3, *_PROBE_PX))
        except (AssertionError, RuntimeError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"timm {name}: does not accept images of every size, as detectors need "
                f"({reason[:160]})"
            ) from error
    channels = []
    for stride in STRIDES:
        x, channel = maps[last[stride]], info.channels()[last[stride]]
        if list(x.shape) != [1, channel, *(px // stride for px in _PROBE_PX)]:
            raise UserError(
                f"timm {name}: its map of stride {stride} has shape {list(x.shape[1:])} for "
                f"an image of {_PROBE_PX[0]} x {_PROBE_PX[1]} px"
            )
        channels.append(channel)
    return tuple(info.out_indices[last[stride]] for stride in STRIDES), tuple(channels)


@functools.cache
def own_names(name: str) -> dict[str, str]:
    """Return the map from timm's usual tensor names to those of `TimmFeatures`, without the head.

    timm loads a state dict in which each tensor is filled with its index, which then identifies the
    tensors of the `features_only` model.

    Raises:
        UserError: If timm changes tensors of this network while it loads them, or has another
            network for its published weights.
    """
    indices, usual = probe(name)[0], usual_names(name)
    numbered = {
        key: torch.tensor(i).to(value.dtype).expand(value.shape)
        for i, (key, value) in enumerate(usual.items())
    }
    keys, names = list(usual), {}
    filled = _create(name, indices, numbered)
    with torch.device("meta"), _WithoutInitialValues():
        differs = str(_create(name, indices)) != str(filled)
    if differs:
        raise UserError(
            f"timm {name}: timm builds another network for its published weights than for others "
            "(e.g. another eps), and no file says which it has; it is not supported"
        )
    for own, value in filled.state_dict().items():
        number = int(value.flatten()[0])
        if not bool((value == number).all()) or value.shape != usual[keys[number]].shape:
            raise UserError(f"timm {name}: its tensor {own} is not a tensor of the whole network")
        names[keys[number]] = f"net.{own}"
    return names


_RANDOM = (Tensor.normal_, Tensor.uniform_, Tensor.clamp_, Tensor.erfinv_, Tensor.mul_, Tensor.add_)


@functools.cache
def usual_names(name: str) -> dict[str, Tensor]:
    """Return the tensors of timm's whole network on the meta device, by timm's usual names."""
    state: dict[str, Tensor] = whole_network(name).state_dict()
    return state


def whole_network(name: str) -> Any:
    """Return timm's whole network on the meta device."""
    import timm  # here: it takes longer to import than torch

    with torch.device("meta"), _WithoutInitialValues():
        return timm.create_model(name)


class _WithoutInitialValues(TorchFunctionMode):
    """Leave out initial values, whose operations on the meta device take most of the time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RANDOM and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


class LoadedByTimm(nn.Module):
    """Reference implementation: timm's `features_only` model, filled by timm's own loader.

    Its modules `res2` .. `res5` are identities that the feature maps pass through.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        for feature in FEATURES:
            self.add_module(feature, nn.Identity())

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Load tensors by the names of `TimmFeatures`."""
        usual = {own: key for key, own in own_names(self.name).items()}
        tensors = {usual[own]: value for own, value in state_dict.items()}
        self.net = _create(self.name, probe(self.name)[0], tensors)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Compute the feature maps and pass them through the identities."""
        maps = zip(FEATURES, self.net(x), strict=True)
        return [self.get_submodule(feature)(value) for feature, value in maps]


def _create(
    name: str,
    indices: tuple[int, ...] = (),
    state: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> Any:
    """Create timm's `features_only` model with all maps, or those of `indices`.

    It is filled from `state`, or randomly without one; nothing is downloaded.
    """
    import timm

    if not timm.is_model(name):
        near = first_few(timm.list_models(f"{name.partition('_')[0]}*"), 3) or "timm.list_models()"
        raise UserError(f"timm {name}: the installed timm has no such network; e.g. {near}")
    if indices:
        options["out_indices"] = indices
    if state is not None:
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": dict(state)}}
    try:
        return timm.create_model(name, features_only=True, **options)
    except (TypeError, RuntimeError, AttributeError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"timm {name}: does not support feature maps ({reason[:160]})") from error
