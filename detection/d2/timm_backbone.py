"""A network of timm under Detectron2's FPN; it is convert/families/timm_network.py's."""

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, FPN

from convert.families.timm_network import TimmFeatures
from detection.d2.resnet import build_fpn
from detection.d2.shapes import WithShapes


class TimmBackbone(TimmFeatures, WithShapes):
    """The same as a backbone of Detectron2."""


@BACKBONE_REGISTRY.register()
def build_timm_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """MODEL.TIMM and MODEL.FPN."""
    keys = cfg.MODEL.TIMM
    return build_fpn(cfg, TimmBackbone(keys.NAME, keys.DROP_PATH))
