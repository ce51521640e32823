"""ResNet backbones: plain, under an FPN, and dilated."""

from fvcore.common.config import CfgNode

from convert.families.base import DEFAULT_FAMILY
from detection.modeling.backbones.base import BACKBONE_TYPES, BackboneType, require_maps
from moco.common.errors import UserError


def _num_parts(cfg: CfgNode) -> int:
    from convert.modeling.resnet import FEATURES  # imports torch

    return len(FEATURES)


def _stages(cfg: CfgNode) -> list[str]:
    from convert.modeling.resnet import FEATURES

    names = list(cfg.MODEL.RESNETS.OUT_FEATURES)
    require_maps("MODEL.RESNETS.OUT_FEATURES", names, FEATURES)
    return names


def _pyramid(cfg: CfgNode, above: int = 1) -> list[str]:
    """Return the names of MODEL.FPN's maps: one per map of IN_FEATURES and `above` more on top."""
    from convert.modeling.resnet import STAGES

    names = list(cfg.MODEL.FPN.IN_FEATURES)
    require_maps("MODEL.FPN.IN_FEATURES", names, _stages(cfg))
    stages = [STAGES.index(name) if name in STAGES else -1 for name in names]
    if stages[0] < 0 or stages != list(range(stages[0], stages[0] + len(stages))):
        raise UserError(
            f"MODEL.FPN.IN_FEATURES {names}: expected consecutive stages, such as res2, res3"
        )
    if cfg.MODEL.RESNETS.RES5_DILATION != 1 and "res5" in names:
        raise UserError(
            "MODEL.RESNETS.RES5_DILATION: a pyramid halves from map to map; set it to 1"
        )
    return [f"p{stage + 2}" for stage in range(stages[0], stages[-1] + 1 + above)]


def _retinanet_pyramid(cfg: CfgNode) -> list[str]:
    names = list(cfg.MODEL.FPN.IN_FEATURES)
    if names[-1:] != ["res5"]:
        raise UserError(
            f"MODEL.FPN.IN_FEATURES {names}: {cfg.MODEL.BACKBONE.NAME} makes its top maps of res5; "
            "expected it last"
        )
    return _pyramid(cfg, above=2)


def _dilated(cfg: CfgNode) -> list[str]:
    names, dilation = _stages(cfg), cfg.MODEL.RESNETS.RES5_DILATION
    if names != ["res5"] or dilation != 2:
        raise UserError(
            f"MODEL.RESNETS.OUT_FEATURES {names}, RES5_DILATION {dilation}: "
            f"{cfg.MODEL.BACKBONE.NAME} needs ['res5'] and 2"
        )
    return ["c5"]


@BACKBONE_TYPES.register()
def build_resnet_backbone() -> BackboneType:
    """Return the type of a plain ResNet, whose last stage may be the box head (C4)."""
    return BackboneType(DEFAULT_FAMILY, ("backbone.", "roi_heads."), _stages, _num_parts)


@BACKBONE_TYPES.register()
def build_resnet_fpn_backbone() -> BackboneType:
    """Return the type of an FPN over a ResNet."""
    return BackboneType(
        DEFAULT_FAMILY, ("backbone.bottom_up.",), _pyramid, _num_parts, pyramid=True
    )


@BACKBONE_TYPES.register()
def build_retinanet_resnet_fpn_backbone() -> BackboneType:
    """Return the type of RetinaNet's FPN, with two more maps convolved from res5."""
    return BackboneType(DEFAULT_FAMILY, ("backbone.bottom_up.",), _retinanet_pyramid, _num_parts)


@BACKBONE_TYPES.register()
def build_resnet_dilated_c5_backbone() -> BackboneType:
    """Return the type of dilated C5: res5 of stride 1, and a 3x3 convolution (appendix A.1)."""
    return BackboneType(DEFAULT_FAMILY, ("backbone.bottom_up.",), _dilated, _num_parts)
