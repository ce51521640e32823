"""A backbone family as one file: a toy transformer of four stages, in names of its own.

Importing it registers it; then files of it are recognized and converted, and both engines have
`build_toy_fpn_backbone`. The test next to it does that from outside, as a file in convert/families/
would.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from convert.families.base import (
    PLAIN,
    USUAL,
    Architecture,
    Family,
    Hints,
    Names,
    Pyramid,
    Scheme,
    register,
)
from moco.common.errors import UserError
from moco.common.keys import Key, Keys

if TYPE_CHECKING:
    from torch import Tensor, nn

FEATURES = ("res2", "res3", "res4", "res5")
HEADS = 2
# The project's own names -> the family's, which are those of the network above.
_NAMES = re.compile(r"level(\d)/(embed|mix|norm)/(.+)".replace("/", r"\."))
_PARTS = {"embed": "merge", "mix": "attention", "norm": "norm"}
TENSORS = (
    *(f"{part}.{tensor}" for part in ("merge", "norm") for tensor in ("weight", "bias")),
    *(f"attention.{name}" for name in ("in_proj_weight", "in_proj_bias")),
    *(f"attention.out_proj.{tensor}" for tensor in ("weight", "bias")),
)
# Of a detector's configuration.
TASK_KEYS: Keys = {
    "MODEL.TOY.DIMS": Key([8, 16, 16, 32], "Channels of the four stages, as the weights have them.")
}


@dataclasses.dataclass(frozen=True)
class ToyArchitecture(Architecture):
    """Four stages of these channels, each a multiple of two."""

    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.dims) != len(FEATURES) or any(dim % HEADS for dim in self.dims):
            raise UserError(f"dims: got {list(self.dims)}, expected four even numbers")
        object.__setattr__(self, "dims", tuple(self.dims))

    def __str__(self) -> str:
        return f"Toy of widths {self.dims}"

    def d2_keys(self) -> dict[str, Any]:
        return {"MODEL.TOY.DIMS": list(self.dims)}

    def details(self) -> str:
        return f"{HEADS} heads"

    def task_key(self) -> tuple[str, str]:
        return "MODEL.TOY.DIMS", "Toy of widths {}"

    def example_task(self) -> tuple[str, dict[str, Any], str]:
        return "tests/example_family/toy_small.yaml", self.d2_keys(), ""


def _rename(name: str) -> str | None:
    match = _NAMES.fullmatch(name)
    return f"stages.{int(match[1]) - 1}.{_PARTS[match[2]]}.{match[3]}" if match else None


def _original(name: str) -> str:
    _, stage, part, tensor = name.split(".", 3)
    theirs = next(theirs for theirs, own in _PARTS.items() if own == part)
    return f"level{int(stage) + 1}.{theirs}.{tensor}"


def _network() -> type[nn.Module]:
    """Return the network that the engines train: attention by torch's function."""
    import torch.nn.functional as F
    from torch import nn

    class Stage(nn.Module):
        def __init__(self, before: int, dim: int, stride: int) -> None:
            super().__init__()
            self.merge = nn.Conv2d(before, dim, stride, stride=stride)
            self.norm = nn.LayerNorm(dim)
            self.attention = nn.MultiheadAttention(dim, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.merge(x)
            n, c, h, w = x.shape
            tokens = self.norm(x.flatten(2).transpose(1, 2))
            qkv = F.linear(tokens, self.attention.in_proj_weight, self.attention.in_proj_bias)
            q, k, v = (
                part.view(n, h * w, HEADS, c // HEADS).transpose(1, 2)
                for part in qkv.chunk(3, dim=-1)
            )
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return x + self.attention.out_proj(y).transpose(1, 2).view(n, c, h, w)

    class Toy(nn.Module):
        size_divisibility = 32

        def __init__(self, architecture: ToyArchitecture) -> None:
            super().__init__()
            dims = (3, *architecture.dims)
            self.stages = nn.ModuleList(
                Stage(before, dim, 2 if i else 4)
                for i, (before, dim) in enumerate(itertools.pairwise(dims))
            )
            self.strides = {name: 4 * 2**i for i, name in enumerate(FEATURES)}
            self.stage_channels = dict(zip(FEATURES, architecture.dims, strict=True))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            features = {}
            for name, stage in zip(FEATURES, self.stages, strict=True):
                features[name] = x = stage(x)
            return features

    return Toy


@register
class ToyFamily(Family):
    """Toys of any widths."""

    name = "toy"
    networks = "toys"
    architecture = ToyArchitecture
    schemes = MappingProxyType(
        {
            USUAL: Scheme(
                ("level1.embed.weight", "level4.mix.in_proj_weight"),
                _rename,
                re.compile(r"level\d\."),
                _original,
                PLAIN,
            )
        }
    )
    dropped = MappingProxyType({"head": "classify.*"})
    heads = MappingProxyType({"classify.weight": "linear head", "": "no head"})
    owner = "torch's MultiheadAttention"
    features = MappingProxyType({f"stages.{i}": name for i, name in enumerate(FEATURES)})
    detectron2 = Names([(name, name) for name in (f"stages.*.{tensor}" for tensor in TENSORS)])
    norms = r"norm\.weight$"
    keys = TASK_KEYS
    pyramid = Pyramid(
        _network,
        lambda keys, backbone: {"architecture": ToyArchitecture(tuple(keys.DIMS))},
        num_parts=lambda keys: 0,
    )
    assumes = "two heads"

    def recognize(self, state: Mapping[str, Tensor], hints: Hints) -> ToyArchitecture:
        keys = [f"stages.{i}.merge.weight" for i in range(len(FEATURES))]
        return ToyArchitecture(tuple(hints.shape(state, key, 4, "not a Toy")[0] for key in keys))

    def build(self, architecture: ToyArchitecture) -> nn.Module:
        return _network()(architecture)

    def reference(self, architecture: ToyArchitecture) -> nn.Module:
        """Return another's network, which attends by torch's own module."""
        net: Any = _network()(architecture)

        def forward(stage: Any, x: Tensor) -> Tensor:
            x = stage.merge(x)
            tokens = stage.norm(x.flatten(2).transpose(1, 2))
            y = stage.attention(tokens, tokens, tokens, need_weights=False)[0]
            return x + y.transpose(1, 2).reshape(x.shape)

        for stage in net.stages:
            stage.forward = functools.partial(forward, stage)
        module: nn.Module = net
        return module
