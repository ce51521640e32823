"""Registry of what both engines share about a value of MODEL.BACKBONE.NAME: family, maps, tensors.

A backbone is registered as a function with the name of its builder that returns a `BackboneType`.
Each engine has its own builder of the network itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from convert.families.base import DEFAULT_FAMILY
from moco.common.errors import UserError

BACKBONE_TYPES = Registry("backbone types")
# RoI heads whose box head is the last stage of a ResNet (C4).
_RES5_HEADS = ("Res5ROIHeads", "Res5ROIHeadsExtraNorm")


@dataclass(frozen=True)
class BackboneType:
    """Properties of a registered backbone.

    Attributes:
        family: Family of its weights, a name in `convert.families`.
        prefixes: Possible prefixes of a converted tensor in a detector; the first one with which
            the whole name is one of the detector's is used. No name is matched by its end.
        maps: Config -> names of the feature maps, from fine to coarse. Raises UserError for keys of
            the backbone that contradict each other.
        num_parts: Config -> number of parts that MODEL.BACKBONE.FREEZE_AT can freeze.
        freezes_whole: Whether -1 freezes the whole network.
        pyramid: Whether the maps are p2, p3, ..., each of half the size of the one before.
        options: Config -> options with which MODEL.WEIGHTS is converted.
    """

    family: str
    prefixes: tuple[str, ...]
    maps: Callable[[CfgNode], list[str]]
    num_parts: Callable[[CfgNode], int]
    freezes_whole: bool = False
    pyramid: bool = False
    options: Callable[[CfgNode], dict[str, str]] = lambda cfg: {}


# For builders that are registered only with Detectron2: its own and users'.
_UNREGISTERED = BackboneType(
    DEFAULT_FAMILY,
    ("backbone.", "backbone.bottom_up.", "roi_heads."),
    maps=lambda cfg: [],
    num_parts=lambda cfg: cfg.MODEL.BACKBONE.FREEZE_AT,
)


def backbone_type(name: str) -> BackboneType:
    """Return the type of the builder in MODEL.BACKBONE.NAME.

    An unregistered builder is taken as a ResNet's, whose keys are not checked.
    """
    if name not in BACKBONE_TYPES:
        return _UNREGISTERED
    found: BackboneType = BACKBONE_TYPES.get(name)()
    return found


def frozen_random(config: Mapping[str, Any]) -> list[str]:
    """Return notes about randomly initialized layers that are never trained.

    Deviation: the paper freezes nothing from scratch, whereas Detectron2's defaults do.

    Args:
        config: Flat config of a task or of a record.
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


def is_frozen(config: Mapping[str, Any]) -> bool:
    """Return whether the whole backbone is frozen; False for a builder that is not registered.

    Args:
        config: Flat config of a task or of a record.
    """
    name, at = config.get("MODEL.BACKBONE.NAME", ""), config.get("MODEL.BACKBONE.FREEZE_AT")
    if name not in BACKBONE_TYPES or not at:
        return False
    cfg = CfgNode()
    for key in (key for key in config if key.startswith("MODEL.")):
        *nodes, last = key.split(".")
        inner = cfg
        for node in nodes:
            inner = inner.setdefault(node, CfgNode())
        inner[last] = config[key]
    return bool(at < 0 or at == backbone_type(name).num_parts(cfg))


def check_backbone(cfg: CfgNode) -> list[str]:
    """Check the keys of the backbone, and return the names of its feature maps.

    Raises:
        UserError: If a key of the backbone is invalid, or if a head does not fit the backbone.
    """
    name, keys = cfg.MODEL.BACKBONE.NAME, cfg.MODEL.BACKBONE
    kind = backbone_type(name)
    maps, parts = kind.maps(cfg), kind.num_parts(cfg)
    # The number of parts of a ViT and of timm's networks follows from the weights.
    if not (-1 if kind.freezes_whole else 0) <= keys.FREEZE_AT <= parts:
        whole = ", or -1: the whole network" if kind.freezes_whole else ""
        raise UserError(
            f"MODEL.BACKBONE.FREEZE_AT {keys.FREEZE_AT}: {name} has 0 (nothing is frozen) to "
            f"{parts} (all of it){whole}"
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
    if keys.PER_IMAGE:
        _check_per_image(cfg, parts)
    return maps


def _check_per_image(cfg: CfgNode, parts: int) -> None:
    keys = cfg.MODEL.BACKBONE
    if keys.NAME not in BACKBONE_TYPES:
        raise UserError(
            f"MODEL.BACKBONE.PER_IMAGE True: {keys.NAME} is not a backbone of this project, whose "
            "frozen part is known; set it to False"
        )
    if keys.FREEZE_AT not in (-1, parts):
        raise UserError(
            f"MODEL.BACKBONE.FREEZE_AT {keys.FREEZE_AT}: MODEL.BACKBONE.PER_IMAGE needs a frozen "
            f"backbone; set it to {parts}, or PER_IMAGE to False"
        )
    if cfg.TEST.AUG.ENABLED:
        raise UserError(
            "TEST.AUG.ENABLED True: it calls the backbone with its own batches, without the "
            "images that MODEL.BACKBONE.PER_IMAGE needs; set one of them to False"
        )


def _check_square_pad(cfg: CfgNode, kind: BackboneType) -> None:
    side, keys = cfg.MODEL.BACKBONE.SQUARE_PAD, cfg.INPUT
    if not kind.pyramid:
        raise UserError(
            f"MODEL.BACKBONE.SQUARE_PAD {side}: only backbones with a pyramid pad images to a "
            f"square, and {cfg.MODEL.BACKBONE.NAME} has none; set it to 0"
        )
    train = "LSJ.SIZE" if keys.LSJ.ENABLED else "MAX_SIZE_TRAIN"
    for key, longest in (
        (train, keys.LSJ.SIZE if keys.LSJ.ENABLED else keys.MAX_SIZE_TRAIN),
        ("MAX_SIZE_TEST", keys.MAX_SIZE_TEST),
    ):
        if longest > side:
            raise UserError(
                f"MODEL.BACKBONE.SQUARE_PAD {side}: images have up to {longest} px; set "
                f"INPUT.{key} to at most {side}"
            )


def require_maps(key: str, names: Sequence[str], maps: Sequence[str]) -> None:
    """Raise UserError unless `names`, the value of a key, are one or more of `maps`."""
    if not names or not set(names) <= set(maps):
        raise UserError(f"{key} {list(names)}: expected one or more of {', '.join(maps)}")
