"""The Detectron2 plugin. Importing it registers its backbones and heads.

In a custom train_net.py:

    from detection.d2 import add_transfer_config, apply_weights, register
    cfg = get_cfg()
    add_transfer_config(cfg)
    ...  # merge one of this project's YAML files, set MODEL.WEIGHTS
    apply_weights(cfg)
    register(cfg, (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST))
"""

from detection.config.task import add_transfer_config
from detection.d2.config import (
    apply_weights,
    check_transfer_config,
    transfer_defaults,
    with_builder,
)
from detection.d2.data import register
from detection.d2.fpn import build_convnext_fpn_backbone, build_timm_fpn_backbone
from detection.d2.resnet import (
    build_resnet_dilated_c5_backbone,
    build_transfer_resnet_backbone,
    build_transfer_resnet_fpn_backbone,
)
from detection.d2.roi_heads import Res5ROIHeadsExtraNorm
from detection.d2.semantic_seg import FCN16sHead
from detection.d2.vit import build_vit_fpn_backbone, build_vit_sfp_backbone
from detection.modeling.norms import with_process_norms

__all__ = [
    "FCN16sHead",
    "Res5ROIHeadsExtraNorm",
    "add_transfer_config",
    "apply_weights",
    "build_convnext_fpn_backbone",
    "build_resnet_dilated_c5_backbone",
    "build_timm_fpn_backbone",
    "build_transfer_resnet_backbone",
    "build_transfer_resnet_fpn_backbone",
    "build_vit_fpn_backbone",
    "build_vit_sfp_backbone",
    "check_transfer_config",
    "register",
    "transfer_defaults",
    "with_builder",
    "with_process_norms",
]
