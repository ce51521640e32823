"""Converted backbone as a module that maps images to features and can be saved again.

Shapes: N images, C channels, H W pixels.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from convert import write
from convert.convert_to_d2 import convert_in_memory
from convert.families.base import LEFT_AT_INIT, TIMM, Option, families, first_rule
from convert.find import UnknownLayoutError
from convert.metadata import CONFIGURATION, is_known
from convert.modeling.timm_network import module_configuration
from convert.read import find_file
from convert.verify import Converted, filled_backbone
from moco.common.errors import UserError, format_value
from moco.common.files import PathLike, atomic_torch_save, atomic_write_text

# Predicate of valid values, and their description for the error.
Check = tuple[Callable[[Any], bool], str]
_TEXT: Check = (lambda value: isinstance(value, str), "a text")
_TRIPLE: Check = (
    lambda v: isinstance(v, list | tuple) and len(v) == 3 and all(isinstance(x, Real) for x in v),
    "three numbers",
)
_GENERAL: dict[str, Check] = {
    "encoder": _TEXT,
    "mean": _TRIPLE,
    "std": _TRIPLE,
    "channel_order": _TEXT,
    "family": (lambda value: value == TIMM, repr(TIMM)),
}
OWN_FAMILY = "a family of your own is one file, see docs/architecture.md and tests/example_family/"


class Backbone(nn.Module):
    """Backbone with its input contract: RGB images (N, 3, H, W), 0..1 -> maps (N, C, h, w) by name.

    The module normalizes the images, and starts in eval mode.

    Args:
        converted: Weights and input contract.

    Attributes:
        net: Network, which takes normalized images.
        contract: Input contract: pixels, architecture, source.
        notes: Facts about the conversion, one sentence each.
        strides: Strides of the maps, px, by name.
        channels: Channels of the maps, by name.
        size_divisibility: Number that H and W have to be multiples of.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, converted: Converted) -> None:
        super().__init__()
        self.contract, self.notes = converted.contract, converted.notes
        net: Any = filled_backbone(converted)
        self.net = net
        self.strides: dict[str, int] = dict(net.strides)
        self.channels: dict[str, int] = dict(net.stage_channels)
        largest = max(self.strides.values())
        self.size_divisibility: int = getattr(net, "size_divisibility", largest)
        pixels = self.contract.pixels.with_channel_order("RGB")
        for name, values in (("mean", pixels.mean), ("std", pixels.std)):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)
        self.eval()

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Compute the maps of RGB images, 0..1.

        Raises:
            ValueError: If the images have another shape or type.
        """
        size, number = tuple(images.shape[-2:]), self.size_divisibility
        if images.dim() != 4 or images.shape[1] != 3 or not images.is_floating_point():
            raise ValueError(
                f"images: got {images.dtype} of shape {list(images.shape)}, expected RGB images "
                "0..1 as floating-point numbers of shape (N, 3, H, W)"
            )
        if any(side % number for side in size):
            raise ValueError(f"images: got {size} px, expected multiples of {number}; pad them")
        x = (images * 255 - self.mean) / self.std
        is_bgr = self.contract.pixels.channel_order == "BGR"
        maps: dict[str, Tensor] = self.net(x.flip(1) if is_bgr else x)
        return maps

    def save(self, path: PathLike) -> None:
        """Write the present weights with the input contract, as `moco-transfer convert` does.

        Raises:
            UserError: If the file cannot be written.
        """
        state = self.net.state_dict()
        model = {
            name: value.detach().cpu().contiguous()
            for name, value in state.items()
            if not first_rule(name, LEFT_AT_INIT)
        }
        write.write(Path(path), Converted(model, self.contract), "detectron2")


def load_backbone(source: PathLike | nn.Module, **options: Any) -> Backbone:
    """Convert a checkpoint or a module, and return its backbone; see `moco_transfer`.

    Args:
        source: Source as for `convert_file`, or a module of a supported network.
        options: See `convert_file`.

    Raises:
        UserError: If an option is needed or does not fit, or if a module has other than ordinary
            tensors with values.
        DataError: If the network is unknown, damaged or fails verification.
    """
    check_options(options)
    if not isinstance(source, nn.Module):
        if not isinstance(source, str | os.PathLike):
            raise UserError(
                f"source: got {format_value(source)}, expected a file, a folder, a name, or a "
                "torch.nn.Module"
            )
        located = find_file(source)
        try:
            backbone = Backbone(convert_in_memory(located.path, **options))
        except UserError as error:
            raise type(error)(_as_arguments(str(error))) from None
        backbone.notes = (*located.notes, *backbone.notes)
        return backbone
    name = type(source).__name__
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.pth")
        state = {key: _plain(value, key, name) for key, value in source.state_dict().items()}
        atomic_torch_save(path, {"state_dict": state})
        if configuration := _configuration(source):
            atomic_write_text(path.with_name(CONFIGURATION), configuration)
        try:
            return Backbone(convert_in_memory(path, module=source, **options))
        except UserError as error:
            text = _as_arguments(str(error).replace(str(path), f"the {name}"))
            more = f"; {OWN_FAMILY}" if isinstance(error, UnknownLayoutError) else ""
            raise type(error)(f"{text}{more}") from None


def _as_arguments(text: str) -> str:
    """Replace options of the command line in a message by keyword arguments, e.g. `num_heads=`."""
    names = [*_GENERAL, *(option.name for family in families() for option in family.options)]
    for name in names:
        flag = "--as" if name == "family" else f"--{name.replace('_', '-')}"
        text = re.sub(rf"{flag}(?![\w-])", f"{name}=", text)
    return text


def check_options(options: Mapping[str, Any]) -> None:
    """Check the names and types of options of a conversion, whatever the network is.

    Raises:
        UserError: If there is no option of a name, or a value is not valid.
    """
    own = {option.name: option for family in families() for option in family.options}
    for name, value in options.items():
        if name not in own and name not in _GENERAL:
            choices = ", ".join([*_GENERAL, *own])
            raise UserError(f"{name}: no such option; choices are {choices}")
        is_valid, expected = _GENERAL.get(name) or _check_of(own[name])
        if value is not None and not is_valid(value):
            raise UserError(f"{name}: got {format_value(value)}, expected {expected}")


def _check_of(option: Option) -> Check:
    if option.choices is None:
        return _TEXT if option.is_text else (lambda value: type(value) is int, "an integer")
    values = list(option.choices.values())
    return (
        lambda value: any(type(value) is type(each) and value == each for each in values),
        f"one of {', '.join(map(repr, values))}",
    )


def _plain(value: Any, key: str, name: str) -> Tensor:
    """Return a value of a state dict on the CPU.

    Raises:
        UserError: If the value is no tensor, or a tensor without ordinary values: on the meta
            device, quantized, not initialized yet, in shards.
    """
    kind = "no tensor"
    if isinstance(value, Tensor):
        if is_lazy(value):
            kind = "not initialized yet"
        elif value.is_meta:
            kind = "on the meta device, without values"
        elif value.is_quantized:
            kind = "quantized"
        elif value.layout != torch.strided:
            kind = f"of the layout {value.layout}"
        elif type(plain := value.detach()) is not Tensor:
            kind = f"a {type(plain).__name__}"
        else:
            return plain.cpu()
    raise UserError(f"the {name}: {key} is {kind}; expected ordinary tensors with values")


def _configuration(module: Any) -> str:
    """Return the configuration that timm or transformers would save next to a module's weights."""
    if timms := module_configuration(module):
        return json.dumps(timms)
    config: Any = getattr(module, "config", None)
    # A configuration of an unknown kind is left out, because the module itself is run.
    has_one = hasattr(config, "model_type") and is_known(config.to_dict())
    return config.to_json_string(use_diff=False) if has_one else ""
