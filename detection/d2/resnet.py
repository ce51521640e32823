"""ResNet backbones of MODEL.RESNETS: plain, under an FPN, and dilated (R50-dilated-C5).

Detectron2's own builder makes every backbone that it can. It lacks stems other than 7x7, ResNet-10,
and other widths of ResNet-18 and 34; those are built here from Detectron2's blocks. With the same
seed, their initial weights equal those of convert/modeling/resnet.py, which the embedded engine
trains.
"""

import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.layers import CNNBlockBase, Conv2d, ShapeSpec, get_norm
from detectron2.modeling import BACKBONE_REGISTRY, FPN, Backbone, build_resnet_backbone
from detectron2.modeling.backbone import ResNet
from detectron2.modeling.backbone.fpn import build_resnet_fpn_backbone
from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem, BottleneckBlock
from fvcore.nn.weight_init import c2_msra_fill, c2_xavier_fill
from torch import Tensor

from convert.modeling.resnet import NUM_BLOCKS, STAGES, STEMS, is_bottleneck
from detection.d2.fpn import build_fpn
from moco.common.errors import UserError

FEATURE = "c5"
CHANNELS = 512

# Detectron2's builder -> this project's, for backbones that Detectron2's cannot build.
OWN_BUILDERS = {
    "build_resnet_backbone": "build_transfer_resnet_backbone",
    "build_resnet_fpn_backbone": "build_transfer_resnet_fpn_backbone",
    # It wraps either Detectron2's backbone or ours.
    "build_resnet_dilated_c5_backbone": "build_resnet_dilated_c5_backbone",
}


class SmallStem(CNNBlockBase):
    """3x3 stem without max-pool: (N, 3, H, W) -> (N, C, H / stride, W / stride).

    Args:
        in_channels: Channels of the images.
        out_channels: C.
        stride: 1 ("cifar") or 2 ("stride2").
        norm: Name of the norm for `detectron2.layers.get_norm`.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: str) -> None:
        super().__init__(in_channels, out_channels, stride)
        self.conv1 = Conv2d(
            in_channels,
            out_channels,
            kernel_size=3,
            stride=stride,
            padding=1,
            bias=False,
            norm=get_norm(norm, out_channels),
        )
        c2_msra_fill(self.conv1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply convolution, norm and ReLU."""
        return F.relu_(self.conv1(x))


class DilatedC5(Backbone):
    """R50-dilated-C5 backbone with one feature map, "c5": (N, 512, H/16, W/16).

    "the backbone includes the ResNet conv5 stage with a dilation of 2 and stride 1, followed by a
    3x3 convolution (with BN) that reduces dimension to 512" (A.1). Where there is a ReLU, the paper
    names it (A.5); it names none here, so there is none, as after the convolutions of an FPN.

    Args:
        bottom_up: Backbone whose only output is res5, at stride 16 (4 or 8 with a 3x3 stem).
        norm: Norm of the 3x3 convolution, a name for `detectron2.layers.get_norm`.
        channels: Output channels of the 3x3 convolution.
    """

    def __init__(self, bottom_up: Backbone, norm: str, channels: int = CHANNELS) -> None:
        super().__init__()
        shape = bottom_up.output_shape()["res5"]
        self.bottom_up = bottom_up
        self.reduce = Conv2d(
            shape.channels,
            channels,
            kernel_size=3,
            padding=1,
            bias=False,
            norm=get_norm(norm, channels),
        )
        c2_xavier_fill(self.reduce)
        self._shape = ShapeSpec(channels=channels, stride=shape.stride)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Map images (N, 3, H, W) to {"c5": (N, 512, H/16, W/16)}."""
        return {FEATURE: self.reduce(self.bottom_up(images)["res5"])}

    def output_shape(self) -> dict[str, ShapeSpec]:
        """Return channels and stride of "c5"."""
        return {FEATURE: self._shape}


def detectron2_has(cfg: CfgNode) -> bool:
    """Return whether Detectron2's own builder can build the backbone of MODEL.RESNETS."""
    resnets = cfg.MODEL.RESNETS
    if resnets.STEM != "imagenet" or resnets.DEPTH == 10:
        return False
    return is_bottleneck(resnets.DEPTH) or resnets.RES2_OUT_CHANNELS == 64


def builder_name(cfg: CfgNode) -> str:
    """Return MODEL.BACKBONE.NAME, or this project's builder if Detectron2's lacks the network.

    Raises:
        UserError: If the named builder can build only Detectron2's own backbones.
    """
    name: str = cfg.MODEL.BACKBONE.NAME
    square_pad = cfg.MODEL.BACKBONE.SQUARE_PAD and name == "build_resnet_fpn_backbone"
    if (detectron2_has(cfg) and not square_pad) or name in OWN_BUILDERS.values():
        return name
    if name not in OWN_BUILDERS:
        resnets = cfg.MODEL.RESNETS
        raise UserError(
            f"MODEL.BACKBONE.NAME {name}: cannot build ResNet-{resnets.DEPTH} with the "
            f"{resnets.STEM} stem and {resnets.STEM_OUT_CHANNELS} channels; "
            f"choices are {', '.join(OWN_BUILDERS)}"
        )
    return OWN_BUILDERS[name]


@BACKBONE_REGISTRY.register()
def build_transfer_resnet_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> ResNet:
    """Build the ResNet of MODEL.RESNETS by Detectron2's builder if it can, else from its blocks."""
    if detectron2_has(cfg):
        return build_resnet_backbone(cfg, input_shape)
    resnets = cfg.MODEL.RESNETS
    norm, channels = resnets.NORM, resnets.STEM_OUT_CHANNELS
    if resnets.STEM == "imagenet":
        stem: CNNBlockBase = BasicStem(input_shape.channels, channels, norm)
    else:
        stem = SmallStem(input_shape.channels, channels, STEMS[resnets.STEM][2], norm)
    stages = []
    # Build all four stages, also unused ones: like Detectron2's, they consume random numbers.
    for index, num_blocks in enumerate(NUM_BLOCKS[resnets.DEPTH]):
        dilation = resnets.RES5_DILATION if STAGES[index] == "res5" else 1
        first_stride = 1 if index == 0 or dilation > 1 else 2
        kind = {
            "block_class": BottleneckBlock,
            "bottleneck_channels": resnets.NUM_GROUPS * resnets.WIDTH_PER_GROUP * 2**index,
            "stride_in_1x1": resnets.STRIDE_IN_1X1,
            "dilation": dilation,
            "num_groups": resnets.NUM_GROUPS,
        }
        out_channels = resnets.RES2_OUT_CHANNELS * 2**index
        stages.append(
            ResNet.make_stage(
                **(kind if is_bottleneck(resnets.DEPTH) else {"block_class": BasicBlock}),
                num_blocks=num_blocks,
                stride_per_block=[first_stride] + [1] * (num_blocks - 1),
                in_channels=channels,
                out_channels=out_channels,
                norm=norm,
            )
        )
        channels = out_channels
    return ResNet(
        stem,
        stages,
        out_features=resnets.OUT_FEATURES,
        freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT,
    )


@BACKBONE_REGISTRY.register()
def build_transfer_resnet_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Build an FPN over any ResNet of MODEL.RESNETS, with maps named as in the task files."""
    if detectron2_has(cfg) and not cfg.MODEL.BACKBONE.SQUARE_PAD:
        return build_resnet_fpn_backbone(cfg, input_shape)
    return build_fpn(cfg, build_transfer_resnet_backbone(cfg, input_shape))


@BACKBONE_REGISTRY.register()
def build_resnet_dilated_c5_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> DilatedC5:
    """Build the backbone of the dilated-C5 tasks (appendix A.1).

    Raises:
        UserError: If res5 is not the only output or is not dilated.
    """
    resnets = cfg.MODEL.RESNETS
    if list(resnets.OUT_FEATURES) != ["res5"] or resnets.RES5_DILATION != 2:
        raise UserError(
            "build_resnet_dilated_c5_backbone: got MODEL.RESNETS.OUT_FEATURES "
            f"{list(resnets.OUT_FEATURES)}, RES5_DILATION {resnets.RES5_DILATION}; expected "
            "['res5'] and 2"
        )
    return DilatedC5(build_transfer_resnet_backbone(cfg, input_shape), resnets.NORM)
