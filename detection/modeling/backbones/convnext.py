"""ConvNeXts under an FPN."""

from collections.abc import Callable
from typing import TypeVar

from fvcore.common.config import CfgNode

from convert.families.convnext import FEATURES, ConvNeXtArchitecture
from detection.modeling.backbones.base import BACKBONE_TYPES, BackboneType, maps_of_four_stages
from moco.common.errors import UserError

Network = TypeVar("Network")


def build_convnext(model: CfgNode, network: Callable[..., Network]) -> Network:
    """MODEL.CONVNEXT with the norms after the stages, its first parts frozen.

    `network`: convert.modeling.convnext.ConvNeXt, or an engine's own kind of it.
    """
    net = network(
        _architecture(model),
        drop_path=model.CONVNEXT.DROP_PATH,
        output_norms=True,
        freeze_at=model.BACKBONE.FREEZE_AT,
    )
    return net


def _architecture(model: CfgNode) -> ConvNeXtArchitecture:
    c = model.CONVNEXT
    return ConvNeXtArchitecture(c.DEPTHS, c.DIMS, c.LAYER_SCALE, c.GRN, c.LAYER_NORM_EPS)


def _maps(cfg: CfgNode) -> list[str]:
    model = cfg.MODEL
    try:
        _architecture(model)
    except UserError as error:
        raise UserError(f"MODEL.CONVNEXT: {error}") from error
    if not 0 <= model.CONVNEXT.DROP_PATH < 1:
        raise UserError(
            f"MODEL.CONVNEXT.DROP_PATH: got {model.CONVNEXT.DROP_PATH}, expected 0 to below 1"
        )
    return maps_of_four_stages(cfg)


@BACKBONE_TYPES.register()
def build_convnext_fpn_backbone() -> BackboneType:
    """Feature pyramid network over the four stages; the stem is a part that can be frozen, too."""
    return BackboneType(
        "convnext",
        ("backbone.bottom_up.",),
        _maps,
        num_parts=lambda cfg: 1 + len(FEATURES),
        pyramid=True,
    )
