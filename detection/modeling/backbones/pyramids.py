"""The families whose networks have maps of strides 4 to 32, under an FPN of both engines.

`build_convnext_fpn_backbone` and its like: one builder for each family of convert/families/ that
says how its keys become its network.
"""

from collections.abc import Callable
from typing import Any

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from convert.families.base import Family, families
from detection.modeling.backbones.base import BACKBONE_TYPES, BackboneType
from moco.common.errors import UserError

STAGES = ["res2", "res3", "res4", "res5"]
PYRAMIDS = {f"build_{family.name}_fpn_backbone": family for family in families() if family.pyramid}


def network_arguments(family: Family, model: CfgNode) -> dict[str, Any]:
    """Return the arguments of a family's network from MODEL; raises UserError."""
    assert family.pyramid
    arguments = family.pyramid.arguments(model[family.name.upper()], model.BACKBONE.FREEZE_AT)
    return arguments


def _type(family: Family) -> BackboneType:
    def maps(cfg: CfgNode) -> list[str]:
        network_arguments(family, cfg.MODEL)
        if (given := list(cfg.MODEL.FPN.IN_FEATURES)) != STAGES:
            raise UserError(f"MODEL.FPN.IN_FEATURES {given}: expected {STAGES}")
        return ["p2", "p3", "p4", "p5", "p6"]

    def named(cfg: CfgNode) -> str | None:
        """The network that MODEL.WEIGHTS are of, where no file says."""
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
        timm_model=named if family.named_by else lambda cfg: None,
    )


def register_pyramids(registry: Registry, make: Callable[..., Any]) -> None:
    """Register a builder for each family, under its builder's name.

    Args:
        make: (family, what the registry's builders are called with) -> what these return.
    """
    for name, family in PYRAMIDS.items():

        def build(*args: Any, family: Family = family) -> Any:
            return make(family, *args)

        build.__name__ = name
        registry.register(build)


register_pyramids(BACKBONE_TYPES, _type)
