"""ConvNeXt backbone with timm's names, and its reference implementation.

Both engines train this `ConvNeXt`, because Detectron2 has none. The reference is timm's own class,
which shares no code with it.

Shapes: N images, C channels, H W pixels or cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from convert.families.base import FEATURES, stochastic_depth
from convert.families.convnext import ConvNeXtArchitecture


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of a map, (N, C, H, W) -> same."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the channels: (N, C, H, W) -> same."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GRN(nn.Module):
    """Global response normalization, (N, H, W, C) -> same (arXiv:2301.00808, algorithm 1)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Add the scaled response: (N, H, W, C) -> same."""
        norm = x.norm(p=2, dim=(1, 2), keepdim=True)
        response = norm / (norm.mean(dim=-1, keepdim=True) + 1e-6)
        return x + (self.bias + self.weight * (x * response))


class Block(nn.Module):
    """Depthwise convolution and MLP with a shortcut around both: (N, C, H, W) -> same."""

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
        """Apply the block: (N, C, H, W) -> same."""
        y = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1)))
        y = y if self.gamma is None else y * self.gamma
        return x + self.drop_path(y.permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):
    """ConvNeXt backbone: (N, 3, H, W) normalized pixels -> {"res2", …, "res5": (N, C, h, w)}.

    Initial weights are those of the official detectors, where LayerScale starts at 1.

    Args:
        architecture: Numbers of blocks and channels, and parts of the blocks.
        drop_path: Stochastic depth rate of the last block, 0..1, increasing linearly from 0, as in
            the official object_detection/mmdet/models/backbones/convnext.py.
        output_norms: Add a LayerNorm to every feature (`norm0` .. `norm3`). Classifiers have none;
            the official detectors learn them.
        freeze_at: Number of parts, of the stem and the four stages, that are not trained.

    Attributes:
        strides: Strides of the features, by name.
        stage_channels: Channels of the features, by name.
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
        """Compute the features of all stages."""
        features = self.stage_maps(x)
        for norm, name in zip(self.norms, FEATURES, strict=False):
            if name in features:
                features[name] = self.get_submodule(norm)(features[name])
        return features

    def stage_maps(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the features before their norms; a caller may replace it by some of them."""
        features = {}
        x = self.stem(x)
        for name, stage in zip(FEATURES, self.stages, strict=True):
            features[name] = x = stage(x)
        return features


def reference(architecture: ConvNeXtArchitecture) -> nn.Module:
    """Build timm's own class without its head."""
    from timm.models import convnext

    a = architecture
    net: Any = convnext.ConvNeXt(
        num_classes=0,
        global_pool="",
        depths=a.depths,
        dims=a.dims,
        ls_init_value=1.0 if a.layer_scale else None,
        use_grn=a.grn,
        norm_eps=a.layer_norm_eps,
    )
    net.head = nn.Identity()
    module: nn.Module = net
    return module
