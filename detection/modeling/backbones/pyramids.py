"""Backbones of families with maps for a pyramid, plain and under one, for both engines.

Each family of convert/families with a `Pyramid` gets builders such as `build_convnext_backbone`,
with the maps res2 to res5, `build_convnext_fpn_backbone`, and, for networks with one map,
`build_timm_sfp_backbone`.
"""

from collections.abc import Callable
from typing import Any

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from convert.families.base import Family, families
from detection.modeling.backbones.base import BACKBONE_TYPES, BackboneType
from detection.modeling.backbones.vit import STAGES, check_simple_norm, pyramid_maps, stages
from moco.common.errors import UserError
from moco.common.keys import check_keys

_STAGED = [family for family in families() if family.pyramid]


def network_arguments(family: Family, model: CfgNode) -> dict[str, Any]:
    """Return the constructor arguments of a family's network from the keys of MODEL.

    Raises:
        UserError: If a key of the family is invalid.
    """
    assert family.pyramid
    check_keys({"MODEL": model}, family.keys)
    arguments = family.pyramid.arguments(model[family.name.upper()], model.BACKBONE)
    return arguments


def freeze_unused_norms(net: Any, model: CfgNode) -> None:
    """Freeze the norms of the maps that the pyramid over a network does not use (in place)."""
    for stage, norm in zip(STAGES, getattr(net, "norms", ()), strict=False):
        if stage not in stages(model):
            net.get_submodule(norm).requires_grad_(False)


def _type(family: Family, kind: str) -> BackboneType:
    assert family.pyramid
    pyramid = family.pyramid

    def maps(cfg: CfgNode) -> list[str]:
        network_arguments(family, cfg.MODEL)
        strides = pyramid.features(cfg.MODEL[family.name.upper()])
        if not kind:
            return [*strides]
        has_one = len(strides) == 1
        if has_one != (kind == "_sfp"):
            which, other = ("one map", "sfp") if has_one else (f"the maps {[*STAGES]}", "fpn")
            raise UserError(
                f"MODEL.BACKBONE.NAME {cfg.MODEL.BACKBONE.NAME}: "
                f"{cfg.MODEL[family.name.upper()].NAME} has {which}; set "
                f"build_{family.name}_{other}_backbone"
            )
        if has_one:
            _check_simple(cfg, next(iter(strides.values())))
        return pyramid_maps(cfg.MODEL)

    def options(cfg: CfgNode) -> dict[str, str]:
        """Return the family and, unless the file is to name it, the network."""
        scheme, _, model = cfg.MODEL.WEIGHTS.partition("://")
        keys = cfg.MODEL[family.name.upper()]
        named = model if scheme == family.name else keys.NAME
        found = {family.named_by: named, "timm_arguments": keys.ARGUMENTS}
        return {"family": family.name, **{name: value for name, value in found.items() if value}}

    prefixes = {"": "backbone.", "_fpn": "backbone.bottom_up.", "_sfp": "backbone.net."}
    return BackboneType(
        family.name,
        (prefixes[kind],),
        maps,
        num_parts=lambda cfg: pyramid.num_parts(cfg.MODEL[family.name.upper()]),
        freezes_whole=pyramid.freezes_whole,
        pyramid=bool(kind),
        options=options if family.named_by else lambda cfg: {},
    )


def _check_simple(cfg: CfgNode, stride: int) -> None:
    """Raise UserError unless a simple pyramid can be built on a map of this stride."""
    check_simple_norm(cfg)
    if stride < 4 or stride & (stride - 1):
        raise UserError(
            f"MODEL.TIMM.PATCH_SIZE: a map of stride {stride}, but a pyramid halves from map to "
            "map, which needs 4, 8, 16 or another power of two"
        )


def register_pyramids(registry: Registry, make: Callable[..., Any]) -> None:
    """Register the builders of each family with a pyramid, one of each kind that it has.

    Args:
        registry: Where the builders are registered.
        make: Function that a builder calls with its family, its kind (`Pyramid.kinds`), and its
            own arguments.
    """
    for family in _STAGED:
        assert family.pyramid
        for kind in family.pyramid.kinds:

            def build(*args: Any, family: Family = family, kind: str = kind) -> Any:
                return make(family, kind, *args)

            build.__name__ = f"build_{family.name}{kind}_backbone"
            registry.register(build)


register_pyramids(BACKBONE_TYPES, _type)
