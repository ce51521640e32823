"""Feature maps above a ResNet: the pyramid (FPN) and the dilated C5.

Equal to detectron2/modeling/backbone/fpn.py and to detection/d2/resnet.py; the ResNet itself is
convert/families/resnet_network.py's. Like it, each has `strides` and `stage_channels` by name of
its maps, and
`size_divisibility` if images must be padded to multiples. torchvision's FeaturePyramidNetwork
names its layers otherwise and knows no other fusion than the sum.

Shapes: N images, C channels, H W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from fvcore.nn.weight_init import c2_xavier_fill
from torch import Tensor, nn

from convert.families.resnet_network import ConvNorm, NormLayer, ResNet
from detection.embedded.layers import conv

DILATED_CHANNELS = 512


class FPN(nn.Module):
    """(N, 3, H, W) -> {"p2": (N, C, H/4, W/4), ...}: a map for each of `in_features` and one more.

    Maps are named by their stage (res2 -> p2), layers by their stride (fpn_lateral2: stride 4).

    Args:
        fuse_type: "sum" or "avg" of what comes from above and from the side.
    """

    def __init__(
        self,
        bottom_up: ResNet,
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


class DilatedC5(nn.Module):
    """(N, 3, H, W) -> {"c5": (N, 512, H/16, W/16)}: res5 of stride 1, dilated, and a convolution.

    "the backbone includes the ResNet conv5 stage with a dilation of 2 and stride 1, followed by a
    3x3 convolution (with BN) that reduces dimension to 512" (A.1).
    """

    size_divisibility = 1

    def __init__(self, bottom_up: ResNet, norm: NormLayer) -> None:
        super().__init__()
        self.bottom_up = bottom_up
        self.reduce = ConvNorm(bottom_up.stage_channels["res5"], DILATED_CHANNELS, 3, norm)
        c2_xavier_fill(self.reduce)
        self.strides = {"c5": bottom_up.strides["res5"]}
        self.stage_channels = {"c5": DILATED_CHANNELS}

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"c5": self.reduce(self.bottom_up(images)["res5"])}


Backbone = ResNet | FPN | DilatedC5
