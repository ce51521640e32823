"""What both engines know of a value of MODEL.BACKBONE.NAME: its family, its maps, its tensors.

A backbone is registered as a function of its builder's name that returns a `BackboneType`. The
network itself is each engine's own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from convert.families.base import DEFAULT_FAMILY
from moco.common.errors import UserError

BACKBONE_TYPES = Registry("backbone types")
# Box heads that are the last stage of a ResNet (C4).
_RES5_HEADS = ("Res5ROIHeads", "Res5ROIHeadsExtraNorm")


@dataclass(frozen=True)
class BackboneType:
    """What one builder makes.

    Attributes:
        family: whose weights it takes, a name in `convert.families`.
        prefixes: where a converted tensor is in a detector: after the first of these with which
            the whole name is one of the detector's. No name is matched by its end.
        maps: configuration -> names of the feature maps, from fine to coarse. Raises UserError for
            keys of the backbone that cannot be honored together.
        num_parts: configuration -> how many parts MODEL.BACKBONE.FREEZE_AT can hold fixed.
        pyramid: whether the maps are p2, p3, ..., each of half the size of the one before.
        timm_model: configuration -> timm's name of the network that MODEL.WEIGHTS are of; None:
            the file tells.
    """

    family: str
    prefixes: tuple[str, ...]
    maps: Callable[[CfgNode], list[str]]
    num_parts: Callable[[CfgNode], int]
    pyramid: bool = False
    timm_model: Callable[[CfgNode], str | None] = lambda cfg: None


# Of builders that are registered with Detectron2 alone: its own, and users'.
_UNREGISTERED = BackboneType(
    DEFAULT_FAMILY,
    ("backbone.", "backbone.bottom_up.", "roi_heads."),
    maps=lambda cfg: [],
    num_parts=lambda cfg: cfg.MODEL.BACKBONE.FREEZE_AT,
)


def backbone_type(name: str) -> BackboneType:
    """The type of the builder in MODEL.BACKBONE.NAME; a ResNet's, of which nothing is checked,
    where none is registered."""
    if name not in BACKBONE_TYPES:
        return _UNREGISTERED
    found: BackboneType = BACKBONE_TYPES.get(name)()
    return found


def frozen_random(config: Mapping[str, Any]) -> list[str]:
    """Note which layers of a random initialization are never trained.

    Deviation: the paper freezes nothing of a row from scratch, Detectron2's defaults do.

    Args:
        config: flat, of a task or of a record.
    """
    notes = []
    if at := config.get("MODEL.BACKBONE.FREEZE_AT"):
        notes.append(
            f"MODEL.BACKBONE.FREEZE_AT {at}: the first layers stay at the random weights they "
            "start from; set it to 0 to train them"
        )
    is_resnet = backbone_type(config.get("MODEL.BACKBONE.NAME", "")).family == DEFAULT_FAMILY
    if is_resnet and config.get("MODEL.RESNETS.NORM") == "FrozenBN":
        notes.append("MODEL.RESNETS.NORM FrozenBN: the norms of random weights are not trained")
    return notes


def check_backbone(cfg: CfgNode) -> list[str]:
    """Names of the feature maps of MODEL.BACKBONE.

    Raises:
        UserError: a key of the backbone, or of a head that not every backbone can have.
    """
    name, keys = cfg.MODEL.BACKBONE.NAME, cfg.MODEL.BACKBONE
    kind = backbone_type(name)
    maps, parts = kind.maps(cfg), kind.num_parts(cfg)
    if not 0 <= keys.FREEZE_AT <= parts:
        raise UserError(
            f"MODEL.BACKBONE.FREEZE_AT {keys.FREEZE_AT}: {name} has 0 (nothing is frozen) to "
            f"{parts} (all of it)"
        )
    heads = cfg.MODEL.ROI_HEADS.NAME
    is_detector = cfg.MODEL.META_ARCHITECTURE == "GeneralizedRCNN"
    if is_detector and heads in _RES5_HEADS and kind.family != DEFAULT_FAMILY:
        raise UserError(
            f"MODEL.ROI_HEADS.NAME {heads}: its box head is the res5 of a ResNet, which {name} "
            "does not have; set StandardROIHeads"
        )
    if keys.SQUARE_PAD:
        _check_square_pad(cfg, kind)
    return maps


def _check_square_pad(cfg: CfgNode, kind: BackboneType) -> None:
    side, given = cfg.MODEL.BACKBONE.SQUARE_PAD, cfg.INPUT
    if not kind.pyramid:
        raise UserError(
            f"MODEL.BACKBONE.SQUARE_PAD {side}: only backbones with a pyramid pad images to a "
            f"square, and {cfg.MODEL.BACKBONE.NAME} has none; set it to 0"
        )
    train = "LSJ.SIZE" if given.LSJ.ENABLED else "MAX_SIZE_TRAIN"
    for key, longest in (
        (train, given.LSJ.SIZE if given.LSJ.ENABLED else given.MAX_SIZE_TRAIN),
        ("MAX_SIZE_TEST", given.MAX_SIZE_TEST),
    ):
        if longest > side:
            raise UserError(
                f"MODEL.BACKBONE.SQUARE_PAD {side}: images have up to {longest} px; set "
                f"INPUT.{key} to at most {side}"
            )


def require_maps(key: str, names: Sequence[str], given: Sequence[str]) -> None:
    """Raise UserError unless `names`, the value of a key, are some of the maps `given`."""
    if not names or not set(names) <= set(given):
        raise UserError(f"{key} {list(names)}: expected one or more of {', '.join(given)}")
