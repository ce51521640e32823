"""ConvNeXt under an FPN; the network is convert/families/convnext_network.py's."""

from fvcore.common.config import CfgNode

from convert.families.convnext_network import ConvNeXt
from detection.embedded.backbone import BACKBONES, FPN, build_fpn
from detection.modeling.backbones.convnext import build_convnext


@BACKBONES.register()
def build_convnext_fpn_backbone(model: CfgNode) -> FPN:
    return build_fpn(model, build_convnext(model, ConvNeXt))
