"""Backbones of families with maps of strides 4 to 32, plain and under an FPN, for both engines.

Each family of convert/families with a `Pyramid` gets two builders, such as
`build_convnext_backbone`, with the maps res2 to res5, and `build_convnext_fpn_backbone`.
"""

import itertools
from collections.abc import Callable
from typing import Any

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from convert.families.base import Family, families
from detection.modeling.backbones.base import BACKBONE_TYPES, BackboneType
from moco.common.errors import UserError
from moco.common.keys import Keys

STAGES = ["res2", "res3", "res4", "res5"]
_STAGED = [family for family in families() if family.pyramid]


def network_arguments(family: Family, model: CfgNode) -> dict[str, Any]:
    """Return the constructor arguments of a family's network from the keys of MODEL.

    Raises:
        UserError: If a key of the family is invalid.
    """
    assert family.pyramid
    Keys(family.keys).check({"MODEL": model})
    arguments = family.pyramid.arguments(model[family.name.upper()], model.BACKBONE.FREEZE_AT)
    return arguments


def _type(family: Family, has_fpn: bool) -> BackboneType:
    def maps(cfg: CfgNode) -> list[str]:
        network_arguments(family, cfg.MODEL)
        if not has_fpn:
            return STAGES
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
        ("backbone.bottom_up.",) if has_fpn else ("backbone.",),
        maps,
        num_parts=lambda cfg: parts,
        pyramid=has_fpn,
        timm_model=timm_model if family.named_by else lambda cfg: None,
    )


def register_pyramids(registry: Registry, make: Callable[..., Any]) -> None:
    """Register two builders for each family with a pyramid, without and with an FPN.

    Args:
        registry: Where the builders are registered.
        make: Function that a builder calls with its family, whether it has an FPN, and its own
            arguments.
    """
    for family, has_fpn in itertools.product(_STAGED, (False, True)):

        def build(*args: Any, family: Family = family, has_fpn: bool = has_fpn) -> Any:
            return make(family, has_fpn, *args)

        build.__name__ = f"build_{family.name}{'_fpn' if has_fpn else ''}_backbone"
        registry.register(build)


register_pyramids(BACKBONE_TYPES, _type)
