"""ConvNeXt under Detectron2's FPN; the network is convert/families/convnext_network.py's."""

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, FPN

from convert.families.convnext_network import ConvNeXt
from detection.d2.resnet import build_fpn
from detection.d2.shapes import WithShapes
from detection.modeling.backbones.convnext import build_convnext


class ConvNeXtBackbone(ConvNeXt, WithShapes):
    """The same as a backbone of Detectron2."""


@BACKBONE_REGISTRY.register()
def build_convnext_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """MODEL.CONVNEXT with norms after its stages, and MODEL.FPN."""
    return build_fpn(cfg, build_convnext(cfg.MODEL, ConvNeXtBackbone))
