"""Detectron2's FPN and simple feature pyramid, with maps named by stage, over convert/modeling.

A simple pyramid pads batches to whole cells, which a misspelled key prevents in Detectron2's own.
"""

from collections.abc import Mapping

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, FPN, Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.modeling.backbone.vit import SimpleFeaturePyramid

from convert.families.base import Family
from convert.families.vit import FEATURE
from detection.modeling.backbones.pyramids import network_arguments, register_pyramids
from detection.modeling.backbones.vit import MAPS, SCALES


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

    def __init__(self, net: Backbone, channels: int, norm: str, square_pad: int) -> None:
        top = LastLevelMaxPool()
        super().__init__(net, FEATURE, channels, SCALES, top, norm=norm, square_pad=square_pad)
        strides = [shape.stride for shape in self.output_shape().values()]
        self._out_features = list(MAPS)
        self._out_feature_strides = dict(zip(MAPS, strides, strict=True))
        self._out_feature_channels = dict.fromkeys(MAPS, channels)

    @property
    def size_divisibility(self) -> int:
        """Stride of p5, to whose whole cells a batch is padded."""
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
        fpn, square_pad = cfg.MODEL.FPN, cfg.MODEL.BACKBONE.SQUARE_PAD
        return SimplePyramid(net, fpn.OUT_CHANNELS, fpn.NORM, square_pad)
    return build_fpn(cfg, net) if kind == "_fpn" else net


register_pyramids(BACKBONE_REGISTRY, _build_pyramid)
