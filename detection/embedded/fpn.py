"""The feature pyramid (FPN) above a backbone, equal to detectron2/modeling/backbone/fpn.py.

torchvision's FeaturePyramidNetwork names its layers otherwise and has no fusion but the sum.

Shapes: N images, C channels, H W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from fvcore.common.config import CfgNode
from fvcore.nn.weight_init import c2_xavier_fill
from torch import Tensor, nn

from convert.families.resnet_network import NormLayer
from detection.embedded.layers import conv, norm_layer


class FPN(nn.Module):
    """(N, 3, H, W) -> {"p2": (N, C, H/4, W/4), ...}: a map for each of `in_features` and one more.

    Maps are named by their stage (res2 -> p2), layers by their stride (fpn_lateral2: stride 4).

    Args:
        bottom_up: a backbone, see detection/embedded/backbone.py.
        fuse_type: "sum" or "avg" of what comes from above and from the side.
    """

    def __init__(
        self,
        bottom_up: Any,
        in_features: Sequence[str],
        channels: int,
        norm: NormLayer | None,
        fuse_type: str,
    ) -> None:
        super().__init__()
        self.in_features, self.fuse_type = tuple(in_features), fuse_type
        strides = [bottom_up.strides[name] for name in in_features]
        self.layers = [int(math.log2(stride)) for stride in strides]
        for layer, name in zip(self.layers, in_features, strict=True):
            lateral = conv(bottom_up.stage_channels[name], channels, 1, norm)
            output = conv(channels, channels, 3, norm)
            c2_xavier_fill(lateral)
            c2_xavier_fill(output)
            self.add_module(f"fpn_lateral{layer}", lateral)
            self.add_module(f"fpn_output{layer}", output)
        self.bottom_up = bottom_up
        stages = [int(name.removeprefix("res")) for name in in_features]
        self.names = [f"p{stage}" for stage in (*stages, stages[-1] + 1)]
        self.strides = dict(zip(self.names, [*strides, 2 * strides[-1]], strict=True))
        self.stage_channels = dict.fromkeys(self.names, channels)
        self.size_divisibility = strides[-1]

    @classmethod
    def from_config(cls, model: CfgNode, bottom_up: Any) -> FPN:
        """MODEL.FPN."""
        fpn = model.FPN
        norm = norm_layer(fpn.NORM)
        return cls(bottom_up, fpn.IN_FEATURES, fpn.OUT_CHANNELS, norm, fpn.FUSE_TYPE)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features = self.bottom_up(images)
        maps: list[Tensor] = []
        above: Tensor | None = None
        for layer, name in zip(reversed(self.layers), reversed(self.in_features), strict=True):
            x = self.get_submodule(f"fpn_lateral{layer}")(features[name])
            if above is not None:
                x = x + F.interpolate(above, scale_factor=2.0, mode="nearest")
                if self.fuse_type == "avg":
                    x = x / 2
            above = x
            maps.insert(0, self.get_submodule(f"fpn_output{layer}")(x))
        maps.append(F.max_pool2d(maps[-1], kernel_size=1, stride=2))
        return dict(zip(self.names, maps, strict=True))
