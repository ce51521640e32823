"""Backbones of families with maps of strides 4 to 32, under an FPN, for both engines.

Each family of convert/families with a `Pyramid` gets one builder, such as
`build_convnext_fpn_backbone`.
"""

from collections.abc import Callable
from typing import Any

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from convert.families.base import Family, families
from detection.modeling.backbones.base import BACKBONE_TYPES, BackboneType
from moco.common.errors import UserError
from moco.common.keys import Keys

STAGES = ["res2", "res3", "res4", "res5"]
PYRAMIDS = {f"build_{family.name}_fpn_backbone": family for family in families() if family.pyramid}


def network_arguments(family: Family, model: CfgNode) -> dict[str, Any]:
    """Return the constructor arguments of a family's network from the keys of MODEL.

    Raises:
        UserError: If a key of the family is invalid.
    """
    assert family.pyramid
    Keys(family.keys).check({"MODEL": model})
    arguments = family.pyramid.arguments(model[family.name.upper()], model.BACKBONE.FREEZE_AT)
    return arguments


def _type(family: Family) -> BackboneType:
    def maps(cfg: CfgNode) -> list[str]:
        network_arguments(family, cfg.MODEL)
        if (names := list(cfg.MODEL.FPN.IN_FEATURES)) != STAGES:
            raise UserError(f"MODEL.FPN.IN_FEATURES {names}: expected {STAGES}")
        return ["p2", "p3", "p4", "p5", "p6"]

    def timm_model(cfg: CfgNode) -> str | None:
        scheme, _, model = cfg.MODEL.WEIGHTS.partition("://")
        keys = cfg.MODEL[family.name.upper()]
        return model if scheme == family.name else keys.NAME or None

    assert family.pyramid
    parts = family.pyramid.num_parts
    return BackboneType(
        family.name,
        ("backbone.bottom_up.",),
        maps,
        num_parts=lambda cfg: parts,
        pyramid=True,
        timm_model=timm_model if family.named_by else lambda cfg: None,
    )


def register_pyramids(registry: Registry, make: Callable[..., Any]) -> None:
    """Register one builder for each family with a pyramid.

    Args:
        registry: Where the builders are registered.
        make: Function that a builder calls with its family and its own arguments.
    """
    for name, family in PYRAMIDS.items():

        def build(*args: Any, family: Family = family) -> Any:
            return make(family, *args)

        build.__name__ = name
        registry.register(build)


register_pyramids(BACKBONE_TYPES, _type)
