"""ResNet backbones: plain, with a feature pyramid, and the dilated C5.

The network is convert/families/resnet_network.py's.

Shapes: N images, H W pixels.
"""

from __future__ import annotations

from typing import Any

from fvcore.common.config import CfgNode
from fvcore.nn.weight_init import c2_xavier_fill
from torch import Tensor, nn

from convert.families.resnet_network import ConvNorm, NormLayer, ResNet, make_stage
from detection.embedded.backbone import BACKBONES
from detection.embedded.fpn import FPN
from detection.embedded.layers import NORMS, freeze_stages, norm_layer

DILATED_CHANNELS = 512


@BACKBONES.register()
def build_resnet_backbone(model: CfgNode) -> ResNet:
    """MODEL.RESNETS, frozen as MODEL.BACKBONE says."""
    resnets = model.RESNETS
    resnet = ResNet(
        resnets.DEPTH,
        stem=resnets.STEM,
        stem_out_channels=resnets.STEM_OUT_CHANNELS,
        res5_dilation=resnets.RES5_DILATION,
        out_features=resnets.OUT_FEATURES,
        **stage_arguments(model),
    )
    freeze_stages(resnet, model.BACKBONE.FREEZE_AT)
    return resnet


@BACKBONES.register()
def build_resnet_fpn_backbone(model: CfgNode) -> FPN:
    """A feature pyramid above it."""
    return FPN.from_config(model, build_resnet_backbone(model))


@BACKBONES.register()
def build_resnet_dilated_c5_backbone(model: CfgNode) -> DilatedC5:
    """Equal to detection/d2's."""
    return DilatedC5(build_resnet_backbone(model), NORMS[model.RESNETS.NORM])


def stage_arguments(model: CfgNode) -> dict[str, Any]:
    """What the stages of a backbone and the res5 of a C4 head have in common."""
    return {
        "res2_out_channels": model.RESNETS.RES2_OUT_CHANNELS,
        "num_groups": model.RESNETS.NUM_GROUPS,
        "width_per_group": model.RESNETS.WIDTH_PER_GROUP,
        "stride_in_1x1": model.RESNETS.STRIDE_IN_1X1,
        "norm_layer": norm_layer(model.RESNETS.NORM),
    }


def build_res5(model: CfgNode, channels: int) -> nn.Sequential:
    """The box head of C4, a ResNet's last stage on regions of res4."""
    blocks = stage_arguments(model)
    res5 = make_stage(model.RESNETS.DEPTH, "res5", in_channels=channels, **blocks)
    if model.ROI_HEADS.NAME == "Res5ROIHeadsExtraNorm":
        # Deviation: "the conv5 stage (including global pooling) followed by a BN layer" (MoCo,
        # appendix A.1) reads as BN after the pooling; the official code normalizes the map
        # before it (detection/train_net.py), and so do we.
        res5.add_module("norm", blocks["norm_layer"](8 * model.RESNETS.RES2_OUT_CHANNELS))
    return res5


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
