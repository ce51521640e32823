"""Features of a family's reference implementation, and the networks that give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from convert.families.base import LEFT_AT_INIT, Family, first_rule

# Relative to the largest feature. Both networks do the same operations in the same order, so their
# features are expected to be bitwise equal, but a nondeterministic backend may round differently.
TOLERANCE = 1e-5


_KAIMING = {"kaiming_normal_", "kaiming_uniform_"}
# torch redraws values outside of bounds, in a loop that needs the values; on the meta device not.
_OTHERS = {"normal_", "uniform_", "clamp_", "erfinv_", "mul_", "add_"}


class WithoutInitialValues(TorchFunctionMode):
    """Mode without most initial values, the slowest part of building a network to be filled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, name = kwargs or {}, func.__name__
        if name in _KAIMING or name in _OTHERS:
            target = args[0] if args else named["tensor"]
            if name in _KAIMING or target.is_meta:
                return target
        return func(*args, **named)


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Build networks on the meta device, without their initial values."""
    with torch.device("meta"), WithoutInitialValues():
        yield


def fill_network(build: Callable[[], nn.Module], state: Mapping[str, Tensor]) -> nn.Module:
    """Build a network with the tensors of `state`, in eval mode."""
    with on_meta_device():
        net = build()
    targets = net.state_dict()
    if any(name not in targets and value.is_meta for name, value in net.named_buffers()):
        with WithoutInitialValues():
            net = build()  # no state has these buffers, e.g. the filters of timm's BlurPool2d
    left = [key for key in targets if first_rule(key, LEFT_AT_INIT)]
    counters = {key: torch.zeros((), dtype=torch.int64) for key in left}
    net.load_state_dict({**state, **counters}, strict=True, assign=True)
    return net.eval()


def reference_features(
    family: Family, architecture: Any, state: Mapping[str, Tensor], image: Tensor
) -> dict[str, Tensor]:
    """Compute features with the reference implementation, by Detectron2's names."""
    # The import computes tensors, which fails on the meta device.
    import torchvision.models  # noqa: F401

    net = fill_network(lambda: family.reference(architecture), state)
    return module_outputs(net, family.features, image)


def module_outputs(net: nn.Module, modules: Mapping[str, str], image: Tensor) -> dict[str, Tensor]:
    """Run a network and return the outputs of modules by the names of their features."""
    outputs: dict[str, Tensor] = {}

    def keep(feature: str) -> Callable[..., None]:
        return lambda module, inputs, output: outputs.update({feature: output})

    for module, feature in modules.items():
        net.get_submodule(module).register_forward_hook(keep(feature))
    net(image)
    return outputs
