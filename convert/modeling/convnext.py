"""The ConvNeXt backbone with timm's names, and its reference.

Both engines train this `ConvNeXt`, as Detectron2 has none. The reference is torchvision's own
class; of version 2, which torchvision lacks, with a block of this file. They share nothing with
`ConvNeXt`.

Shapes: N images, C channels, H W pixels or cells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convert.families.base import stochastic_depth
from convert.families.convnext import FEATURES, ConvNeXtArchitecture

if TYPE_CHECKING:
    from torchvision.models import convnext as tv


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of a map, (N, C, H, W) -> same."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GRN(nn.Module):
    """Global response normalization, (N, H, W, C) -> same (arXiv:2301.00808, algorithm 1)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        norm = x.norm(p=2, dim=(1, 2), keepdim=True)
        response = norm / (norm.mean(dim=-1, keepdim=True) + 1e-6)
        return x + (self.bias + self.weight * (x * response))


class Block(nn.Module):
    """A depthwise convolution and an MLP, and a shortcut around them: (N, C, H, W) -> same."""

    def __init__(self, a: ConvNeXtArchitecture, dim: int, drop_path: float) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=a.layer_norm_eps)
        self.mlp = nn.Sequential()
        self.mlp.add_module("fc1", nn.Linear(dim, 4 * dim))
        self.mlp.add_module("act", nn.GELU())
        if a.grn:
            self.mlp.add_module("grn", GRN(4 * dim))
        self.mlp.add_module("fc2", nn.Linear(4 * dim, dim))
        self.gamma = nn.Parameter(torch.ones(dim)) if a.layer_scale else None
        self.drop_path = stochastic_depth(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1)))
        y = y if self.gamma is None else y * self.gamma
        return x + self.drop_path(y.permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):
    """(N, 3, H, W) normalized pixels -> {"res2", .. "res5": (N, C, H / stride, W / stride)}.

    Args:
        drop_path: of the last block, 0..1; it grows from 0 with the blocks before, as in the
            official object_detection/mmdet/models/backbones/convnext.py.
        output_norms: whether every feature has a LayerNorm (`norm0` .. `norm3`), which no
            classifier has: the official detectors learn them.
        freeze_at: how many parts, of the stem and the four stages, are not trained.

    Attributes: `strides` and `stage_channels` of the features, by name.

    Initialized as the official detectors: LayerScale starts at 1 there.
    """

    size_divisibility = 32
    strides: Mapping[str, int]
    stage_channels: Mapping[str, int]

    def __init__(
        self,
        architecture: ConvNeXtArchitecture,
        *,
        drop_path: float = 0.0,
        output_norms: bool = False,
        freeze_at: int = 0,
    ) -> None:
        super().__init__()
        a = architecture
        norm = partial(LayerNorm2d, eps=a.layer_norm_eps)
        rates = torch.linspace(0, drop_path, sum(a.depths), device="cpu").tolist()
        self.stem = nn.Sequential(nn.Conv2d(3, a.dims[0], 4, stride=4), norm(a.dims[0]))
        self.stages = nn.ModuleList()
        for i, (depth, dim) in enumerate(zip(a.depths, a.dims, strict=True)):
            stage = nn.Sequential()
            if i:
                smaller = nn.Conv2d(a.dims[i - 1], dim, 2, stride=2)
                stage.add_module("downsample", nn.Sequential(norm(a.dims[i - 1]), smaller))
            blocks = (Block(a, dim, rates.pop(0)) for _ in range(depth))
            stage.add_module("blocks", nn.Sequential(*blocks))
            self.stages.append(stage)
        self.norms: Sequence[str] = [f"norm{i}" for i in range(4)] if output_norms else []
        for name, dim in zip(self.norms, a.dims, strict=False):
            self.add_module(name, norm(dim))
        self.strides = {name: 4 * 2**i for i, name in enumerate(FEATURES)}
        self.stage_channels = dict(zip(FEATURES, a.dims, strict=True))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear) and not module.weight.is_meta:
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.get_parameter("bias"))
        for part in (self.stem, *self.stages)[:freeze_at]:
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = {}
        x = self.stem(x)
        for i, (name, stage) in enumerate(zip(FEATURES, self.stages, strict=True)):
            x = stage(x)
            features[name] = self.get_submodule(self.norms[i])(x) if self.norms else x
        return features


class TranscribedBlockV2(nn.Module):
    """A block of facebookresearch/ConvNeXt-V2@2553895 models/convnextv2.py, its order of sums."""

    def __init__(self, dim: int, layer_scale: float, probability: float, eps: float) -> None:
        super().__init__()
        conv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        wide = 4 * dim
        layers = [conv, nn.LayerNorm(dim, eps), nn.Linear(dim, wide), nn.Linear(wide, dim)]
        self.block = nn.ModuleDict(dict(zip("0235", layers, strict=True)))
        self.gamma, self.beta = (nn.Parameter(torch.zeros(wide)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.block["2"](self.block["0"](x).movedim(1, -1))
        y = F.gelu(self.block["3"](y))
        length = (y * y).sum(dim=(1, 2), keepdim=True).sqrt()
        y = self.gamma * (y * (length / (length.mean(dim=-1, keepdim=True) + 1e-6))) + self.beta + y
        y = self.block["5"](y).movedim(-1, 1)
        return x + y


def reference(architecture: ConvNeXtArchitecture) -> tv.ConvNeXt:
    """torchvision's own ConvNeXt without classifier, which takes timm's names when it loads."""
    from torchvision.models import convnext as tv

    a = architecture
    last = partial(nn.LayerNorm, eps=a.layer_norm_eps)
    block: Any = partial(tv.CNBlock, norm_layer=last)
    if a.grn:
        block = partial(TranscribedBlockV2, eps=a.layer_norm_eps)
    settings = [
        tv.CNBlockConfig(dim, following, depth)
        for dim, following, depth in zip(a.dims, (*a.dims[1:], None), a.depths, strict=True)
    ]
    first = partial(tv.LayerNorm2d, eps=a.layer_norm_eps)
    net = tv.ConvNeXt(settings, block=block, norm_layer=first)
    net.classifier = nn.Identity()
    net.register_load_state_dict_pre_hook(_take_timms_names)
    return net


# timm's parts of a block -> torchvision's; of version 2 `TranscribedBlockV2`'s.
_PARTS = {
    "conv_dw": "block.0",
    "norm": "block.2",
    "mlp.fc1": "block.3",
    "mlp.fc2": "block.5",
    "mlp.grn.weight": "gamma",
    "mlp.grn.bias": "beta",
    "gamma": "layer_scale",
}


def _take_timms_names(module: nn.Module, state: dict[str, Tensor], *_: Any) -> None:
    for key in list(state):
        value = state.pop(key)
        if match := re.fullmatch(r"stages\.(\d)\.blocks\.(\d+)\.(.+)", key):
            part = match[3]
            old = next(old for old in _PARTS if part.startswith(old))
            name = f"features.{2 * int(match[1]) + 1}.{match[2]}.{part.replace(old, _PARTS[old])}"
            value = value[:, None, None] if part == "gamma" else value
        else:
            name = re.sub(r"^stem", "features.0", key)
            name = re.sub(r"^stages\.(\d)\.downsample", lambda m: f"features.{2 * int(m[1])}", name)
        state[name] = value
