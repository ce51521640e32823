"""Index of timm's networks by the names and shapes of their tensors.

    python -m tests.golden.regenerate_timm_index

builds each network of the installed timm, and of torchvision, on the meta device, and writes
convert/families/timm_index.txt, in about ten minutes. Run it for each version of timm.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable
from typing import Any

import timm
import torch
import torchvision
from timm.models import get_pretrained_cfg
from torch import nn
from torch.overrides import TorchFunctionMode

from convert.families.timm_index import (
    FILE,
    MAPS,
    NO_MAPS,
    TORCHVISION,
    Row,
    Shapes,
    digests,
    without_counters,
)
from convert.modeling.timm_network import own_names, whole_network
from moco.common.errors import UserError

# Attributes of modules that change no feature. Sizes of the image are in the tensors where they do.
_NO_EFFECT = {
    *("training", "num_classes", "pretrained_cfg", "default_cfg", "grad_checkpointing"),
    *("global_pool", "init_values", "img_size", "grid_size", "feature_size", "num_patches"),
}


def classifiers(torchvisions: Iterable[Shapes]) -> list[str]:
    """Return the names of the classifiers of all networks of timm and torchvision."""
    found: set[str] = set()
    for name in timm.list_models():
        its: Any = get_pretrained_cfg(name).classifier
        found.update([its] if isinstance(its, str) else its or [])
    for shapes in torchvisions:
        *_, last = shapes
        found.add(last.rpartition(".")[0])
    return sorted(found)


def shapes_of(net: nn.Module) -> Shapes:
    """Return the shapes of a network's tensors by name."""
    return {name: tuple(value.shape) for name, value in net.state_dict().items()}


def has_maps(name: str) -> bool:
    """Return whether the converter takes a network by its name."""
    try:
        own_names(name)
    except UserError:
        return False
    return True


def operations(net: nn.Module, heads: Iterable[str]) -> str:
    """Describe the classes, the attributes and the constants of all modules but the classifiers.

    Networks of equal tensors with equal descriptions have equal features.
    """
    lines = []
    for name, module in net.named_modules():
        if name in heads:
            continue
        own = {k: v for k, v in vars(module).items() if k[0] != "_" and k not in _NO_EFFECT}
        own |= dict(module.named_buffers(recurse=False))
        lines.append(f"{name} {type(module)} {module.extra_repr()} {_text(own)}")
    return "\n".join(lines)


def _text(value: Any) -> str:
    """Describe an attribute without addresses in memory."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, functools.partial):
        return _text([value.func, value.args, value.keywords])
    if isinstance(value, torch.Tensor):
        return str(tuple(value.shape))
    if isinstance(value, str | int | float | torch.dtype | None):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


class _WithoutMemory(TorchFunctionMode):
    """Allocate no tensors; torchvision's RegNets compute with some while they are built."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, "device": "meta"} if func is torch.empty else kwargs))


def of_torchvision() -> dict[str, Shapes]:
    """Return the shapes of torchvision's classifiers by name, in the order of their tensors."""
    found = {}
    for name in torchvision.models.list_models(torchvision.models):
        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        with _WithoutMemory():
            found[name] = shapes_of(torchvision.models.get_model(name, **options))
    return found


def alike(name: str, others: list[str]) -> list[str]:
    """Return those of timm's networks with the layers of a network of torchvision.

    `name:bn_eps=0.001` is one with that argument.
    """
    if not others:
        return []
    with _WithoutMemory():
        own = layers(torchvision.models.get_model(name))
    found = []
    for other in others:
        for arguments in ("", "bn_eps=0.001"):
            try:
                net = whole_network(other, arguments)
            except UserError:
                continue
            # Both libraries have a last convolution as a linear layer in some networks.
            if own in (layers(net), layers(net, without="conv_head")):
                found.append(f"{other}:{arguments}".rstrip(":"))
                break
    return found


def layers(net: nn.Module, without: str = "") -> collections.Counter[Any]:
    """Return what the tensors of convolutions and norms do not determine."""
    return collections.Counter(
        module.eps if isinstance(module, nn.BatchNorm2d) else (module.stride, module.padding)
        for name, module in net.named_modules()
        if isinstance(module, nn.BatchNorm2d | nn.Conv2d) and name != without
    )


def every_shape(shapes: Shapes) -> tuple[str, ...]:
    """Return the shapes of all tensors, sorted, of a 1x1 convolution as of a linear layer."""
    kept = without_counters(shapes).values()
    return tuple(sorted(str(tuple(n for n in shape if n > 1)) for shape in kept))


def lines() -> Iterable[str]:
    """Yield the lines of the index."""
    torchvisions = of_torchvision()
    heads, shapes, described = classifiers(torchvisions.values()), {}, {}
    for name in timm.list_models():
        net = whole_network(name)
        shapes[name], described[name] = shapes_of(net), operations(net, heads)
    yield f"# timm {timm.__version__}"
    yield f"# classifiers {' '.join(heads)}"
    first: dict[tuple[str, str], str] = {}
    exact, sorted_shapes = set(), {}
    for name, its in shapes.items():
        found = digests(its, heads)
        exact.add(found.exact)
        sorted_shapes[name] = every_shape(its)
        stands_for = first.setdefault((found.exact, described[name]), name)
        yield " ".join((name, *Row(*found, MAPS if has_maps(name) else NO_MAPS, stands_for)))
    for name, its in torchvisions.items():
        found = digests(its, heads)
        if found.exact not in exact:
            own = every_shape(its)
            others = alike(name, [n for n, shapes in sorted_shapes.items() if shapes == own])
            yield " ".join((TORCHVISION, name, found.exact, *others))


if __name__ == "__main__":
    torch.set_num_threads(1)
    FILE.write_text("".join(f"{line}\n" for line in lines()))
