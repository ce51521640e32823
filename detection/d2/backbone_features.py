"""What Detectron2's own backbone makes of the verification's image."""

from fractions import Fraction
from functools import partial

import torch
from detectron2.modeling import Backbone, build_backbone
from detectron2.modeling.backbone.vit import ViT
from torch import Tensor, nn

from convert.contract import InputContract
from convert.families.resnet_network import FEATURES
from convert.families.vit_architecture import ViTArchitecture
from convert.verify import proof_image, read_converted
from detection.d2 import transfer_defaults, with_builder
from detection.d2.checkpoint import SafeCheckpointer
from moco.common.files import PathLike


def features(path: PathLike) -> dict[str, Tensor]:
    """Features of the image of convert/verify.py, on the CPU, eval mode: by Detectron2's names.

    Raises:
        DataError: unreadable, damaged, or not a converted file.
    """
    converted = read_converted(path)
    if isinstance(converted.contract.architecture, ViTArchitecture):
        backbone = build_vit(converted.contract.architecture)
        backbone.load_state_dict(converted.model, strict=True)
    else:
        backbone = build(converted.contract)
        SafeCheckpointer(backbone).load(str(path))
    with torch.no_grad():
        return dict(backbone.eval()(proof_image(converted.contract)))


def build_vit(a: ViTArchitecture) -> Backbone:
    """Detectron2's own ViT with global attention; it imports timm."""
    return ViT(
        img_size=a.image_size,
        patch_size=a.patch_size,
        embed_dim=a.embed_dim,
        depth=a.depth,
        num_heads=a.num_heads,
        mlp_ratio=Fraction(a.mlp_dim, a.embed_dim),
        qkv_bias=a.qkv_bias,
        norm_layer=partial(nn.LayerNorm, eps=a.layer_norm_eps),
        pretrain_img_size=a.image_size,
        pretrain_use_cls_token=a.class_position,
    )


def build(contract: InputContract) -> Backbone:
    """The plugin's backbone for a contract, with all features and plain batch norm."""
    cfg = transfer_defaults()
    cfg.merge_from_list([item for pair in contract.d2_keys().items() for item in pair])
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.RESNETS.OUT_FEATURES = list(FEATURES)
    return build_backbone(with_builder(cfg))
