"""Networks of timm under an FPN."""

from fvcore.common.config import CfgNode

from detection.modeling.backbones.base import BACKBONE_TYPES, BackboneType, maps_of_four_stages
from moco.common.errors import UserError


def _maps(cfg: CfgNode) -> list[str]:
    keys = cfg.MODEL.TIMM
    if not keys.NAME:
        raise UserError("MODEL.TIMM.NAME: set it to timm's name of the network, e.g. regnety_004")
    if not 0 <= keys.DROP_PATH < 1:
        raise UserError(f"MODEL.TIMM.DROP_PATH: got {keys.DROP_PATH}, expected 0 to below 1")
    from convert.modeling.timm_features import probe  # imports torch and timm

    try:
        probe(keys.NAME)
    except UserError as error:
        raise UserError(f"MODEL.TIMM.NAME: {error}") from error
    return maps_of_four_stages(cfg)


def _timm_model(cfg: CfgNode) -> str | None:
    """The network that MODEL.WEIGHTS are of, which no file says."""
    scheme, _, model = cfg.MODEL.WEIGHTS.partition("://")
    return model if scheme == "timm" else cfg.MODEL.TIMM.NAME or None


@BACKBONE_TYPES.register()
def build_timm_fpn_backbone() -> BackboneType:
    """Feature pyramid network over timm's maps of strides 4 to 32; no part can be frozen, because
    which tensors are before which map differs from network to network."""
    return BackboneType(
        "timm",
        ("backbone.bottom_up.",),
        _maps,
        num_parts=lambda cfg: 0,
        pyramid=True,
        timm_model=_timm_model,
    )
