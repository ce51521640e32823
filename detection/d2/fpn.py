"""Detectron2's FPN over networks that are not Detectron2's."""

from collections.abc import Mapping

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import FPN, Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool


class WithShapes(Backbone):
    """What Detectron2 asks a backbone for, from what those of the embedded engine have.

    To be inherited beside a network with `strides` and `stage_channels` by the features' names.
    """

    strides: Mapping[str, int]
    stage_channels: Mapping[str, int]

    def output_shape(self) -> dict[str, ShapeSpec]:
        return {
            name: ShapeSpec(channels=self.stage_channels[name], stride=stride)
            for name, stride in self.strides.items()
        }


def build_fpn(cfg: CfgNode, bottom_up: Backbone) -> FPN:
    """MODEL.FPN over a network, with p6 by max-pooling and MODEL.BACKBONE.SQUARE_PAD."""
    fpn = cfg.MODEL.FPN
    return FPN(
        bottom_up,
        fpn.IN_FEATURES,
        fpn.OUT_CHANNELS,
        fpn.NORM,
        LastLevelMaxPool(),
        fuse_type=fpn.FUSE_TYPE,
        square_pad=cfg.MODEL.BACKBONE.SQUARE_PAD,
    )
