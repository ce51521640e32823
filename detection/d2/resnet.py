"""ResNet backbones as MODEL.RESNETS describes them, alone, under an FPN, and dilated
(R50-dilated-C5).

Detectron2's own builder makes every backbone that it can. It has the 7x7 stem only, no ResNet-10,
and no widths of ResNet-18 and 34; those are put together here, from its own blocks and its own
ResNet. Under the same seed they start as convert/modeling/resnet.py does, which the
embedded engine trains.
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

# Detectron2's builder -> this project's, for backbones that Detectron2's cannot make.
OWN_BUILDERS = {
    "build_resnet_backbone": "build_transfer_resnet_backbone",
    "build_resnet_fpn_backbone": "build_transfer_resnet_fpn_backbone",
    # Has Detectron2's backbone or ours in it.
    "build_resnet_dilated_c5_backbone": "build_resnet_dilated_c5_backbone",
}


class SmallStem(CNNBlockBase):
    """The 3x3 stems without max-pool: (N, 3, H, W) -> (N, C, H / stride, W / stride).

    Args:
        stride: 1 ("cifar") or 2 ("stride2").
        norm: as detectron2.layers.get_norm takes it.
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
        return F.relu_(self.conv1(x))


class DilatedC5(Backbone):
    """One feature map, "c5": (N, 512, H/16, W/16).

    "the backbone includes the ResNet conv5 stage with a dilation of 2 and stride 1, followed by a
    3x3 convolution (with BN) that reduces dimension to 512" (A.1). The text names a ReLU where
    there is one (A.5) and names none here, so there is none, as after the convolutions of an FPN.

    Args:
        bottom_up: a backbone whose one output is res5, at stride 16 (behind a 3x3 stem 4 or 8).
        norm: of the 3x3 convolution, as detectron2.layers.get_norm takes it.
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
        """(N, 3, H, W) → {"c5": (N, 512, H/16, W/16)}."""
        return {FEATURE: self.reduce(self.bottom_up(images)["res5"])}

    def output_shape(self) -> dict[str, ShapeSpec]:
        return {FEATURE: self._shape}


def detectron2_has(cfg: CfgNode) -> bool:
    """Whether Detectron2's own builder makes the backbone of MODEL.RESNETS."""
    resnets = cfg.MODEL.RESNETS
    if resnets.STEM != "imagenet" or resnets.DEPTH == 10:
        return False
    return is_bottleneck(resnets.DEPTH) or resnets.RES2_OUT_CHANNELS == 64


def builder_name(cfg: CfgNode) -> str:
    """MODEL.BACKBONE.NAME, or this project's builder of the same where Detectron2's has no such.

    Raises:
        UserError: the named builder makes Detectron2's own backbones only.
    """
    name: str = cfg.MODEL.BACKBONE.NAME
    square_pad = cfg.MODEL.BACKBONE.SQUARE_PAD and name == "build_resnet_fpn_backbone"
    if (detectron2_has(cfg) and not square_pad) or name in OWN_BUILDERS.values():
        return name
    if name not in OWN_BUILDERS:
        resnets = cfg.MODEL.RESNETS
        raise UserError(
            f"MODEL.BACKBONE.NAME {name}: cannot be of ResNet-{resnets.DEPTH} with the "
            f"{resnets.STEM} stem and {resnets.STEM_OUT_CHANNELS} channels; "
            f"choices are {', '.join(OWN_BUILDERS)}"
        )
    return OWN_BUILDERS[name]


@BACKBONE_REGISTRY.register()
def build_transfer_resnet_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> ResNet:
    """The ResNet of MODEL.RESNETS: Detectron2's where it has one, else made of its parts."""
    if detectron2_has(cfg):
        return build_resnet_backbone(cfg, input_shape)
    resnets = cfg.MODEL.RESNETS
    norm, channels = resnets.NORM, resnets.STEM_OUT_CHANNELS
    if resnets.STEM == "imagenet":
        stem: CNNBlockBase = BasicStem(input_shape.channels, channels, norm)
    else:
        stem = SmallStem(input_shape.channels, channels, STEMS[resnets.STEM][2], norm)
    stages = []
    # All four, also those that are not kept: as Detectron2, they consume random numbers.
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
    """An FPN over any ResNet of MODEL.RESNETS, its maps p2..p6 as the task files name them."""
    if detectron2_has(cfg) and not cfg.MODEL.BACKBONE.SQUARE_PAD:
        return build_resnet_fpn_backbone(cfg, input_shape)
    return build_fpn(cfg, build_transfer_resnet_backbone(cfg, input_shape))


@BACKBONE_REGISTRY.register()
def build_resnet_dilated_c5_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> DilatedC5:
    """MODEL.BACKBONE.NAME of the dilated-C5 tasks (appendix A.1).

    Raises:
        UserError: res5 is not the dilated one that the name promises.
    """
    resnets = cfg.MODEL.RESNETS
    if list(resnets.OUT_FEATURES) != ["res5"] or resnets.RES5_DILATION != 2:
        raise UserError(
            "build_resnet_dilated_c5_backbone: got MODEL.RESNETS.OUT_FEATURES "
            f"{list(resnets.OUT_FEATURES)}, RES5_DILATION {resnets.RES5_DILATION}; expected "
            "['res5'] and 2"
        )
    return DilatedC5(build_transfer_resnet_backbone(cfg, input_shape), resnets.NORM)
