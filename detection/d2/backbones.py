"""Backbones registered in Detectron2: ResNets, families with a pyramid, vision transformers.

ResNets are plain, under an FPN, or dilated (R50-dilated-C5). Detectron2's own builder makes every
ResNet that it can. It lacks stems other than 7x7, ResNet-10, and other widths of ResNet-18 and 34;
those are built here from Detectron2's blocks. With the same seed, their initial weights equal those
of convert/modeling/resnet.py, which the embedded engine trains.

The other networks are those of convert/modeling, under Detectron2's FPN or simple feature pyramid
with maps named by stage. Detectron2's own vision transformers need LazyConfig, and its simple
pyramid does not pad batches to whole cells, because it misspells a key.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.layers import CNNBlockBase, Conv2d, ShapeSpec, get_norm
from detectron2.modeling import BACKBONE_REGISTRY, FPN, Backbone, build_resnet_backbone
from detectron2.modeling.backbone import ResNet
from detectron2.modeling.backbone.fpn import LastLevelMaxPool, build_resnet_fpn_backbone
from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem, BottleneckBlock
from detectron2.modeling.backbone.vit import SimpleFeaturePyramid
from fvcore.nn.weight_init import c2_msra_fill, c2_xavier_fill
from torch import Tensor

from convert.families.base import Family
from convert.families.vit import FEATURE
from convert.modeling.resnet import NUM_BLOCKS, STAGES, STEMS, is_bottleneck
from convert.modeling.vit import ViT
from detection.modeling.backbones.pyramids import (
    freeze_unused_norms,
    network_arguments,
    register_pyramids,
)
from detection.modeling.backbones.vit import (
    build_plain,
    build_vit,
    ends_of_quarters,
    pyramid_maps,
    simple_scales,
    stages,
)
from detection.modeling.vit_maps import FourMaps
from moco.common.errors import UserError


class WithShapes(Backbone):
    """Mixin that makes a network with `strides` and `stage_channels` a Detectron2 backbone."""

    strides: Mapping[str, int]
    stage_channels: Mapping[str, int]

    def output_shape(self) -> dict[str, ShapeSpec]:
        """Return channels and stride by feature-map name."""
        return {
            name: ShapeSpec(channels=self.stage_channels[name], stride=stride)
            for name, stride in self.strides.items()
        }


class StageFPN(FPN):
    """Detectron2's FPN with maps named by their stage (res2 -> p2), whatever the stem's stride.

    The task files name p2..p6. Detectron2 names a map by its stride, so on a stem of stride 1 the
    same maps would be p0..p4. With a stem of stride 4 both names agree. The reported strides are
    the true ones. The last map is max-pooled once more, as in `build_resnet_fpn_backbone`.

    The arguments are those of Detectron2's FPN; `square_pad` is MODEL.BACKBONE.SQUARE_PAD.
    """

    def __init__(
        self,
        bottom_up: Backbone,
        in_features: list[str],
        channels: int,
        norm: str,
        fuse_type: str,
        square_pad: int,
    ) -> None:
        super().__init__(
            bottom_up, in_features, channels, norm, fuse_type=fuse_type, square_pad=square_pad
        )
        strides = [shape.stride for shape in self.output_shape().values()]
        stages = [int(name.removeprefix("res")) for name in in_features]
        self.top_block = LastLevelMaxPool()
        self.top_block.in_feature = f"p{stages[-1]}"
        self._out_features = [f"p{stage}" for stage in (*stages, stages[-1] + 1)]
        self._out_feature_strides = dict(
            zip(self._out_features, [*strides, 2 * strides[-1]], strict=True)
        )
        self._out_feature_channels = dict.fromkeys(self._out_features, channels)


class SimplePyramid(SimpleFeaturePyramid):
    """Detectron2's simple feature pyramid with maps p2..p6 for any patch size."""

    def __init__(self, net: Backbone, model: CfgNode) -> None:
        fpn, square_pad = model.FPN, model.BACKBONE.SQUARE_PAD
        super().__init__(
            net,
            FEATURE,
            fpn.OUT_CHANNELS,
            simple_scales(model),
            LastLevelMaxPool(),
            norm=fpn.NORM,
            square_pad=square_pad,
        )
        strides = [shape.stride for shape in self.output_shape().values()]
        self._out_features = pyramid_maps(model)
        self._out_feature_strides = dict(zip(self._out_features, strides, strict=True))
        self._out_feature_channels = dict.fromkeys(self._out_features, fpn.OUT_CHANNELS)

    @property
    def size_divisibility(self) -> int:
        """Stride of p5; batches are padded to whole cells of p5."""
        # Deviation: Detectron2's pads to whole cells only if it pads to a square.
        return self._out_feature_strides["p5"]


def build_fpn(cfg: CfgNode, bottom_up: Backbone, in_features: list[str] | None = None) -> StageFPN:
    """Build MODEL.FPN over maps of a network, by default those in MODEL.FPN.IN_FEATURES."""
    fpn, square_pad = cfg.MODEL.FPN, cfg.MODEL.BACKBONE.SQUARE_PAD
    names = fpn.IN_FEATURES if in_features is None else in_features
    return StageFPN(bottom_up, names, fpn.OUT_CHANNELS, fpn.NORM, fpn.FUSE_TYPE, square_pad)


def _build_pyramid(family: Family, kind: str, cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
    assert family.pyramid
    network = family.pyramid.network()
    # A subclass of the network that is also a Detectron2 backbone.
    backbone = type(f"{network.__name__}Backbone", (network, WithShapes), {})
    net: Backbone = backbone(**network_arguments(family, cfg.MODEL))
    if kind == "_sfp":
        return SimplePyramid(net, cfg.MODEL)
    if not kind:
        return net
    freeze_unused_norms(net, cfg.MODEL)
    return build_fpn(cfg, net, stages(cfg.MODEL))


register_pyramids(BACKBONE_REGISTRY, _build_pyramid)


_C5, _C5_CHANNELS = "c5", 512  # map of a dilated ResNet

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

    def __init__(self, bottom_up: Backbone, norm: str, channels: int = _C5_CHANNELS) -> None:
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
        return {_C5: self.reduce(self.bottom_up(images)["res5"])}

    def output_shape(self) -> dict[str, ShapeSpec]:
        """Return channels and stride of "c5"."""
        return {_C5: self._shape}


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


class ViTBackbone(ViT, WithShapes):
    """`ViT` as a Detectron2 backbone."""


class _Maps(FourMaps, WithShapes):
    """`FourMaps` as a Detectron2 backbone."""


class ViTFPN(Backbone):
    """FPN over maps of four blocks: (N, 3, H, W) -> {"p2": (N, C, H/4, W/4), ..., "p6"}."""

    def __init__(self, net: ViTBackbone, fpn: StageFPN) -> None:
        super().__init__()
        self.net, self.fpn = net, fpn

    @property
    def size_divisibility(self) -> int:
        """Number of pixels that divides both sides of a batch, as the FPN needs it."""
        divisor: int = self.fpn.size_divisibility
        return divisor

    @property
    def padding_constraints(self) -> dict[str, int]:
        """Padding constraints of the FPN."""
        constraints: dict[str, int] = self.fpn.padding_constraints
        return constraints

    def output_shape(self) -> dict[str, ShapeSpec]:
        """Return channels and strides of the FPN's maps."""
        shape: dict[str, ShapeSpec] = self.fpn.output_shape()
        return shape

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Map images to the FPN's maps."""
        maps: dict[str, Tensor] = self.fpn(self.net(images))
        return maps


class PlainViT(ViTBackbone):
    """`ViT` without a pyramid."""

    @property
    def size_divisibility(self) -> int:
        """Number of pixels that divides both sides of a batch: the patch size."""
        return next(iter(self.strides.values()))


@BACKBONE_REGISTRY.register()
def build_vit_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> PlainViT:
    """Build a plain vision transformer."""
    return build_plain(PlainViT, cfg.MODEL)


@BACKBONE_REGISTRY.register()
def build_vit_sfp_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> SimplePyramid:
    """Build ViTDet's simple feature pyramid (arXiv 2203.16527)."""
    return SimplePyramid(build_vit(ViTBackbone, cfg.MODEL), cfg.MODEL)


@BACKBONE_REGISTRY.register()
def build_vit_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> ViTFPN:
    """Build a feature pyramid network over the maps of four blocks (arXiv 2111.11429)."""
    keys = cfg.MODEL.VIT
    net = build_vit(ViTBackbone, cfg.MODEL, ends_of_quarters(keys.DEPTH))
    maps = _Maps(keys.EMBED_DIM, keys.PATCH_SIZE)
    return ViTFPN(net, build_fpn(cfg, maps, list(maps.strides)))
