"""A network of timm under an FPN; the network is convert/families/timm_network.py's."""

from fvcore.common.config import CfgNode

from convert.families.timm_network import TimmFeatures
from detection.embedded.backbone import BACKBONES, FPN, build_fpn


@BACKBONES.register()
def build_timm_fpn_backbone(model: CfgNode) -> FPN:
    return build_fpn(model, TimmFeatures(model.TIMM.NAME, model.TIMM.DROP_PATH))
