"""ResNets: alone, under an FPN, and dilated."""

from fvcore.common.config import CfgNode

from convert.families.base import DEFAULT_FAMILY
from detection.modeling.backbones.base import BACKBONE_TYPES, BackboneType, require_maps
from moco.common.errors import UserError


def _num_parts(cfg: CfgNode) -> int:
    from convert.modeling.resnet import FEATURES  # imports torch

    return len(FEATURES)


def _stages(cfg: CfgNode) -> list[str]:
    from convert.modeling.resnet import FEATURES

    given = list(cfg.MODEL.RESNETS.OUT_FEATURES)
    require_maps("MODEL.RESNETS.OUT_FEATURES", given, FEATURES)
    return given


def _pyramid(cfg: CfgNode, above: int = 1) -> list[str]:
    """Maps of MODEL.FPN.IN_FEATURES, and `above` more on top of them."""
    from convert.modeling.resnet import STAGES

    names = list(cfg.MODEL.FPN.IN_FEATURES)
    require_maps("MODEL.FPN.IN_FEATURES", names, _stages(cfg))
    stages = [STAGES.index(name) if name in STAGES else -1 for name in names]
    if stages[0] < 0 or stages != list(range(stages[0], stages[0] + len(stages))):
        raise UserError(f"MODEL.FPN.IN_FEATURES {names}: expected stages in a row, as res2, res3")
    if cfg.MODEL.RESNETS.RES5_DILATION != 1 and "res5" in names:
        raise UserError("MODEL.RESNETS.RES5_DILATION: a pyramid needs maps of half the size; set 1")
    return [f"p{stage + 2}" for stage in range(stages[0], stages[-1] + 1 + above)]


def _retinanet_pyramid(cfg: CfgNode) -> list[str]:
    names = list(cfg.MODEL.FPN.IN_FEATURES)
    if names[-1:] != ["res5"]:
        raise UserError(
            f"MODEL.FPN.IN_FEATURES {names}: {cfg.MODEL.BACKBONE.NAME} makes its top maps of res5, "
            "which has to be the last one"
        )
    return _pyramid(cfg, above=2)


def _dilated(cfg: CfgNode) -> list[str]:
    given, dilation = _stages(cfg), cfg.MODEL.RESNETS.RES5_DILATION
    if given != ["res5"] or dilation != 2:
        raise UserError(
            f"MODEL.RESNETS.OUT_FEATURES {given}, RES5_DILATION {dilation}: "
            f"{cfg.MODEL.BACKBONE.NAME} needs ['res5'] and 2"
        )
    return ["c5"]


@BACKBONE_TYPES.register()
def build_resnet_backbone() -> BackboneType:
    """The stages themselves; the last one may be the box head (C4)."""
    return BackboneType(DEFAULT_FAMILY, ("backbone.", "roi_heads."), _stages, _num_parts)


@BACKBONE_TYPES.register()
def build_resnet_fpn_backbone() -> BackboneType:
    """Feature pyramid network over the stages."""
    return BackboneType(
        DEFAULT_FAMILY, ("backbone.bottom_up.",), _pyramid, _num_parts, pyramid=True
    )


@BACKBONE_TYPES.register()
def build_retinanet_resnet_fpn_backbone() -> BackboneType:
    """The same with two more maps, by convolutions of res5 (RetinaNet)."""
    return BackboneType(DEFAULT_FAMILY, ("backbone.bottom_up.",), _retinanet_pyramid, _num_parts)


@BACKBONE_TYPES.register()
def build_resnet_dilated_c5_backbone() -> BackboneType:
    """res5 of stride 1, and a 3x3 convolution (MoCo, appendix A.1)."""
    return BackboneType(DEFAULT_FAMILY, ("backbone.bottom_up.",), _dilated, _num_parts)
