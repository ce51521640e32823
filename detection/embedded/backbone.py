"""Backbones by Detectron2's names of MODEL.BACKBONE.NAME: ResNet, dilated C5, FPN, ViT, pyramids.

A backbone maps images (N, 3, H, W) to feature maps by name. `strides` and `stage_channels` have the
same names as keys, and images are padded to multiples of `size_divisibility`. The networks under an
FPN or a simple feature pyramid are those of convert/modeling.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch.nn.functional as F
from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry
from fvcore.nn.weight_init import c2_xavier_fill
from torch import Tensor, nn

from convert.families.base import Family
from convert.modeling.resnet import FEATURES, ConvNorm, NormLayer, ResNet, make_stage
from convert.modeling.vit import ViT
from detection.embedded.layers import NORMS, conv, freeze, norm_layer
from detection.modeling.backbones.pyramids import (
    freeze_unused_norms,
    network_arguments,
    register_pyramids,
)
from detection.modeling.backbones.vit import (
    MAPS,
    build_plain,
    build_vit,
    ends_of_quarters,
    simple_scales,
    stages,
)
from detection.modeling.vit_maps import FourMaps

BACKBONES = Registry("embedded backbones")
DILATED_CHANNELS = 512


class BottomUp(Protocol):
    """Interface of the network under an FPN, which takes images or another network's maps."""

    strides: Mapping[str, int]
    stage_channels: Mapping[str, int]

    def __call__(self, x: Any) -> dict[str, Tensor]:
        """Return the feature maps by name."""
        ...


class Backbone(BottomUp, Protocol):
    """Interface of a backbone; see the module's docstring."""

    size_divisibility: int


class LastLevelP6P7(nn.Module):
    """Top of RetinaNet's pyramid: res5 (N, C', H, W) -> [(N, C, H/2, W/2), (N, C, H/4, W/4)].

    Equal to detectron2/modeling/backbone/fpn.py.
    """

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.p6 = nn.Conv2d(in_channels, channels, 3, stride=2, padding=1)
        self.p7 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        c2_xavier_fill(self.p6)
        c2_xavier_fill(self.p7)

    def forward(self, res5: Tensor) -> list[Tensor]:
        """Return p6 and p7."""
        p6 = self.p6(res5)
        return [p6, self.p7(F.relu(p6))]


class FPN(nn.Module):
    """Feature pyramid network: (N, 3, H, W) -> {"p2": (N, C, H/4, W/4), ...}.

    Equal to detectron2/modeling/backbone/fpn.py; torchvision's FPN has other names and only sums.
    Maps are named by their stage (res2 -> p2), layers by log2 of their stride (fpn_lateral2: 4 px).

    Args:
        bottom_up: Network whose maps the pyramid is built on.
        in_features: Names of these maps, from fine to coarse.
        channels: C.
        norm: Norm of every convolution; without one it has a bias.
        fuse_type: "sum" or "avg" of the top-down and the lateral map.
        top_block: Makes two more maps of res5; by default one more, by max pooling the last one.
    """

    def __init__(
        self,
        bottom_up: BottomUp,
        in_features: Sequence[str],
        channels: int,
        norm: NormLayer | None,
        fuse_type: str,
        top_block: LastLevelP6P7 | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.fuse_type = tuple(in_features), fuse_type
        strides = [bottom_up.strides[name] for name in in_features]
        self.layers = [stride.bit_length() - 1 for stride in strides]
        for layer, name in zip(self.layers, in_features, strict=True):
            lateral = conv(bottom_up.stage_channels[name], channels, 1, norm)
            output = conv(channels, channels, 3, norm)
            c2_xavier_fill(lateral)
            c2_xavier_fill(output)
            self.add_module(f"fpn_lateral{layer}", lateral)
            self.add_module(f"fpn_output{layer}", output)
        self.top_block, self.bottom_up = top_block, bottom_up
        stages = [int(name.removeprefix("res")) for name in in_features]
        for _ in range(2 if top_block else 1):
            stages.append(stages[-1] + 1)
            strides.append(2 * strides[-1])
        names = [f"p{stage}" for stage in stages]
        self.strides = dict(zip(names, strides, strict=True))
        self.stage_channels = dict.fromkeys(names, channels)
        self.size_divisibility = bottom_up.strides[in_features[-1]]

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the maps by name, from fine to coarse."""
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
        if self.top_block is None:
            maps.append(F.max_pool2d(maps[-1], kernel_size=1, stride=2))
        else:
            maps += self.top_block(features["res5"])
        return dict(zip(self.strides, maps, strict=True))


def scaling(scale: float, dim: int, norm: NormLayer) -> tuple[list[nn.Module], int]:
    """Return layers that scale a map of `dim` channels, and the number of their output channels."""
    if scale == 4:
        first = nn.ConvTranspose2d(dim, dim // 2, kernel_size=2, stride=2)
        second = nn.ConvTranspose2d(dim // 2, dim // 4, kernel_size=2, stride=2)
        return [first, norm(dim // 2), nn.GELU(), second], dim // 4
    if scale == 2:
        return [nn.ConvTranspose2d(dim, dim // 2, kernel_size=2, stride=2)], dim // 2
    return [nn.MaxPool2d(kernel_size=2, stride=2)] if scale == 0.5 else [], dim


class SimplePyramid(nn.Module):
    """Simple feature pyramid of one map: (N, 3, H, W) -> {"p2": (N, C, H/4, W/4), ..., "p6"}.

    With fewer `scales` of the map, the finest maps are missing.

    Equal to SimpleFeaturePyramid in detectron2/modeling/backbone/vit.py, which names its layers by
    log2 of their stride (simfp_2: 4 px); p6 is max-pooled.
    """

    def __init__(self, net: Any, channels: int, norm: NormLayer, scales: Sequence[float]) -> None:
        super().__init__()
        self.net = net
        ((name, stride),) = net.strides.items()
        dim = net.stage_channels[name]
        strides = [int(stride / scale) for scale in scales]
        for scale, own in zip(scales, strides, strict=True):
            layers, out = scaling(scale, dim, norm)
            layers += [conv(out, channels, 1, norm), conv(channels, channels, 3, norm)]
            self.add_module(f"simfp_{own.bit_length() - 1}", nn.Sequential(*layers))
        names = MAPS[-len(strides) - 1 :]
        self.strides = dict(zip(names, [*strides, 2 * strides[-1]], strict=True))
        self.stage_channels = dict.fromkeys(names, channels)
        self.size_divisibility = strides[-1]

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Map images to p2..p6."""
        (x,) = self.net(images).values()
        maps = [layers(x) for name, layers in self.named_children() if name != "net"]
        maps.append(F.max_pool2d(maps[-1], kernel_size=1, stride=2))
        return dict(zip(self.strides, maps, strict=True))


class DilatedC5(nn.Module):
    """Dilated res5 of stride 1 and a convolution: (N, 3, H, W) -> {"c5": (N, 512, H/16, W/16)}.

    "the backbone includes the ResNet conv5 stage with a dilation of 2 and stride 1, followed by a
    3x3 convolution (with BN) that reduces dimension to 512" (A.1). Equal to the one of
    detection/d2/backbones.py.
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
        """Map images to "c5"."""
        return {"c5": self.reduce(self.bottom_up(images)["res5"])}


@BACKBONES.register()
def build_resnet_backbone(model: CfgNode) -> ResNet:
    """Build the ResNet of MODEL.RESNETS, its first MODEL.BACKBONE.FREEZE_AT stages frozen."""
    resnets = model.RESNETS
    resnet = ResNet(
        resnets.DEPTH,
        stem=resnets.STEM,
        stem_out_channels=resnets.STEM_OUT_CHANNELS,
        res5_dilation=resnets.RES5_DILATION,
        out_features=resnets.OUT_FEATURES,
        **stage_arguments(model),
    )
    for name in FEATURES[: model.BACKBONE.FREEZE_AT]:
        if hasattr(resnet, name):
            freeze(resnet.get_submodule(name))
    return resnet


@BACKBONES.register()
def build_resnet_fpn_backbone(model: CfgNode) -> FPN:
    """Build MODEL.FPN over the ResNet of MODEL.RESNETS."""
    return build_fpn(model, build_resnet_backbone(model))


def build_fpn(
    model: CfgNode,
    bottom_up: BottomUp,
    in_features: Sequence[str] | None = None,
    top_block: LastLevelP6P7 | None = None,
) -> FPN:
    """Build MODEL.FPN over maps of a network, by default those in MODEL.FPN.IN_FEATURES."""
    fpn, norm = model.FPN, norm_layer(model.FPN.NORM)
    names = fpn.IN_FEATURES if in_features is None else in_features
    return FPN(bottom_up, names, fpn.OUT_CHANNELS, norm, fpn.FUSE_TYPE, top_block)


def _build_pyramid(family: Family, kind: str, model: CfgNode) -> nn.Module:
    assert family.pyramid
    net: Any = family.pyramid.network()(**network_arguments(family, model))
    if kind == "_sfp":
        return _simple_pyramid(model, net)
    if not kind:
        module: nn.Module = net
        return module
    freeze_unused_norms(net, model)
    return build_fpn(model, net, stages(model))


def _simple_pyramid(model: CfgNode, net: Any) -> SimplePyramid:
    fpn = model.FPN
    return SimplePyramid(net, fpn.OUT_CHANNELS, NORMS[fpn.NORM], simple_scales(model))


register_pyramids(BACKBONES, _build_pyramid)


@BACKBONES.register()
def build_retinanet_resnet_fpn_backbone(model: CfgNode) -> FPN:
    """Build RetinaNet's backbone: an FPN over a ResNet, with p6 and p7 convolved from res5."""
    bottom_up = build_resnet_backbone(model)
    top_block = LastLevelP6P7(bottom_up.stage_channels["res5"], model.FPN.OUT_CHANNELS)
    return build_fpn(model, bottom_up, top_block=top_block)


@BACKBONES.register()
def build_resnet_dilated_c5_backbone(model: CfgNode) -> DilatedC5:
    """Build the backbone of the dilated-C5 tasks (appendix A.1)."""
    return DilatedC5(build_resnet_backbone(model), NORMS[model.RESNETS.NORM])


def stage_arguments(model: CfgNode) -> dict[str, Any]:
    """Return the arguments that the backbone's stages share with the res5 of a C4 head."""
    return {
        "res2_out_channels": model.RESNETS.RES2_OUT_CHANNELS,
        "num_groups": model.RESNETS.NUM_GROUPS,
        "width_per_group": model.RESNETS.WIDTH_PER_GROUP,
        "stride_in_1x1": model.RESNETS.STRIDE_IN_1X1,
        "norm_layer": norm_layer(model.RESNETS.NORM),
    }


def build_res5(model: CfgNode, channels: int) -> nn.Sequential:
    """Build the box head of C4: a ResNet's last stage, applied to regions of res4."""
    blocks = stage_arguments(model)
    res5 = make_stage(model.RESNETS.DEPTH, "res5", in_channels=channels, **blocks)
    if model.ROI_HEADS.NAME == "Res5ROIHeadsExtraNorm":
        # Deviation: "the conv5 stage (including global pooling) followed by a BN layer" (MoCo,
        # appendix A.1) reads as BN after the pooling; the official code normalizes the map
        # before it (detection/train_net.py), and so do we.
        res5.add_module("norm", blocks["norm_layer"](8 * model.RESNETS.RES2_OUT_CHANNELS))
    return res5


class ViTFPN(nn.Module):
    """FPN over maps of four blocks: (N, 3, H, W) -> {"p2": (N, C, H/4, W/4), ..., "p6"}."""

    def __init__(self, net: ViT, fpn: FPN) -> None:
        super().__init__()
        self.net, self.fpn = net, fpn
        self.strides, self.stage_channels = fpn.strides, fpn.stage_channels
        self.size_divisibility = fpn.size_divisibility

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Map images to p2..p6."""
        maps: dict[str, Tensor] = self.fpn(self.net(images))
        return maps


class PlainViT(ViT):
    """Vision transformer without a pyramid."""

    @property
    def size_divisibility(self) -> int:
        """Number of pixels that divides both sides of a batch: the patch size."""
        return next(iter(self.strides.values()))


@BACKBONES.register()
def build_vit_backbone(model: CfgNode) -> PlainViT:
    """Build a plain vision transformer."""
    return build_plain(PlainViT, model)


@BACKBONES.register()
def build_vit_sfp_backbone(model: CfgNode) -> SimplePyramid:
    """Build ViTDet's simple feature pyramid (arXiv 2203.16527)."""
    return _simple_pyramid(model, build_vit(ViT, model))


@BACKBONES.register()
def build_vit_fpn_backbone(model: CfgNode) -> ViTFPN:
    """Build a feature pyramid network over the maps of four blocks (arXiv 2111.11429)."""
    net = build_vit(ViT, model, ends_of_quarters(model.VIT.DEPTH))
    maps = FourMaps(model.VIT.EMBED_DIM, model.VIT.PATCH_SIZE)
    return ViTFPN(net, build_fpn(model, maps, list(maps.strides)))
