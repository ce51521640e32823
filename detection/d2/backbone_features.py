"""What Detectron2's own backbone makes of the verification's image."""

from collections.abc import Callable

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone, build_backbone
from torch import Tensor

from convert.contract import InputContract
from convert.families.resnet_network import FEATURES
from convert.verify import proof_image, read_converted
from detection.d2 import transfer_defaults, with_builder
from detection.d2.checkpoint import SafeCheckpointer
from detection.d2.vit import build_vit
from moco.common.files import PathLike


def features(path: PathLike) -> dict[str, Tensor]:
    """Features of the image of convert/verify.py, on the CPU, eval mode: by Detectron2's names.

    Raises:
        DataError: unreadable, damaged, or not a converted file.
    """
    converted = read_converted(path)
    backbone = build(converted.contract)
    SafeCheckpointer(backbone).load(str(path))
    with torch.no_grad():
        return dict(backbone.eval()(proof_image(converted.contract)))


def build(contract: InputContract) -> Backbone:
    """The plugin's backbone for a contract, without a pyramid: its parts are as pre-trained."""
    cfg = transfer_defaults()
    cfg.merge_from_list([item for pair in contract.d2_keys().items() for item in pair])
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    return _BARE[contract.family.name](cfg)


def _resnet(cfg: CfgNode) -> Backbone:
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.RESNETS.OUT_FEATURES = list(FEATURES)
    return build_backbone(with_builder(cfg))


def _vit(cfg: CfgNode) -> Backbone:
    cfg.MODEL.VIT.WINDOW_SIZE = 0
    cfg.MODEL.VIT.REL_POS = False
    return build_vit(cfg.MODEL)


_BARE: dict[str, Callable[[CfgNode], Backbone]] = {"resnet": _resnet, "vit": _vit}
