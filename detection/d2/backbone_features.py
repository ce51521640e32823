"""What Detectron2's own backbone makes of the verification's image."""

import torch
from detectron2.modeling import Backbone, build_backbone
from torch import Tensor

from convert.contract import InputContract
from convert.families.resnet_network import FEATURES
from convert.verify import fixed_image, read_converted
from detection.config.weights import apply_contract
from detection.d2 import transfer_defaults, with_builder
from detection.d2.checkpoint import SafeCheckpointer
from moco.common.files import PathLike


def features(path: PathLike) -> dict[str, Tensor]:
    """Features of the image of convert/verify.py, on the CPU, eval mode: stem, res2 .. res5.

    Raises:
        DataError: unreadable, damaged, or not a converted file.
    """
    backbone = build(read_converted(path).contract)
    SafeCheckpointer(backbone).load(str(path))
    with torch.no_grad():
        return dict(backbone.eval()(fixed_image()))


def build(contract: InputContract) -> Backbone:
    """The plugin's backbone for a contract, with all features and plain batch norm."""
    cfg = transfer_defaults()
    apply_contract(cfg, contract, explicit=())
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.RESNETS.OUT_FEATURES = list(FEATURES)
    return build_backbone(with_builder(cfg))
