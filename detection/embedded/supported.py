"""Checks that reject, before training, every key value that this engine does not support.

A key that is silently ignored would make results that contradict their recorded configuration. The
table of keys is in detection/config/keys.py.
"""

from collections.abc import Sequence

from fvcore.common.config import CfgNode

from detection.config.checks import check_basic_blocks, check_box_head, find_invalid_choice
from detection.config.keys import KEYS
from detection.modeling.backbones import check_backbone
from detection.modeling.backbones.base import require_maps
from moco.common.errors import UserError


def check_supported(cfg: CfgNode) -> None:
    """Raise UserError for the first key, or pair of keys, that this engine does not support."""
    if found := find_invalid_choice(cfg, {name: key.embedded for name, key in KEYS.items()}):
        key, value, names = found
        raise UserError(
            f"{key} {value}: the embedded engine has only {names}; "
            "change it, or use --engine detectron2"
        )
    check_basic_blocks(cfg)
    maps = check_backbone(cfg)
    if cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor":
        _check_segmenter(cfg, maps)
    elif cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
        _check_anchors(cfg, maps, "RETINANET")
        _check_retinanet(cfg)
    else:
        _check_anchors(cfg, maps, "RPN")
        _check_roi_heads(cfg, maps)


def _check_anchors(cfg: CfgNode, maps: Sequence[str], head: str) -> None:
    names = list(cfg.MODEL[head].IN_FEATURES)
    require_maps(f"MODEL.{head}.IN_FEATURES", names, maps)
    for name in ("SIZES", "ASPECT_RATIOS"):
        value = cfg.MODEL.ANCHOR_GENERATOR[name]
        lengths = {len(part) if isinstance(part, list | tuple) else 0 for part in value}
        if len(value) not in (1, len(names)) or len(lengths) != 1 or 0 in lengths:
            raise UserError(
                f"MODEL.ANCHOR_GENERATOR.{name} {value}: expected one list for all feature maps, "
                f"such as [[1, 2]], or one for each of the {len(names)}, all of the same length"
            )


def _check_retinanet(cfg: CfgNode) -> None:
    for part in ("MASK_ON", "KEYPOINT_ON"):
        if cfg.MODEL[part]:
            raise UserError(f"MODEL.{part} True: RetinaNet predicts boxes only; set it to False")
    thresholds, labels = list(cfg.MODEL.RETINANET.IOU_THRESHOLDS), cfg.MODEL.RETINANET.IOU_LABELS
    _check_thresholds("RETINANET", thresholds, len(labels) - 1)


def _check_thresholds(part: str, thresholds: Sequence[float], number: int) -> None:
    if len(thresholds) != number or list(thresholds) != sorted(thresholds):
        raise UserError(
            f"MODEL.{part}.IOU_THRESHOLDS {thresholds}: expected {number} in ascending order"
        )


def _check_roi_heads(cfg: CfgNode, maps: Sequence[str]) -> None:
    model, name = cfg.MODEL, cfg.MODEL.ROI_HEADS.NAME
    for part, number in (("RPN", 2), ("ROI_HEADS", 1)):
        _check_thresholds(part, list(model[part].IOU_THRESHOLDS), number)
    dims = list(model.RPN.CONV_DIMS)
    if not dims or any(dim != -1 and dim < 1 for dim in dims):
        raise UserError(f"MODEL.RPN.CONV_DIMS {dims}: expected -1 or channels for each convolution")
    check_box_head(cfg)
    names = list(model.ROI_HEADS.IN_FEATURES)
    require_maps("MODEL.ROI_HEADS.IN_FEATURES", names, maps)
    if names != maps[maps.index(names[0]) :][: len(names)]:
        raise UserError(f"MODEL.ROI_HEADS.IN_FEATURES {names}: expected consecutive maps")
    if name not in ("StandardROIHeads", "CascadeROIHeads"):
        if names != ["res4"]:
            raise UserError(f"MODEL.ROI_HEADS.IN_FEATURES {names}: {name} needs ['res4']")
        if model.KEYPOINT_ON:
            raise UserError(
                f"MODEL.KEYPOINT_ON True: {name} has no keypoint head; set StandardROIHeads"
            )
        return
    box = model.ROI_BOX_HEAD
    if box.NAME != "FastRCNNConvFCHead":
        raise UserError(
            f"MODEL.ROI_BOX_HEAD.NAME {box.NAME!r}: the embedded engine has only "
            f"FastRCNNConvFCHead for {name}; change it, or use --engine detectron2"
        )
    if box.NUM_CONV + box.NUM_FC == 0:
        raise UserError("MODEL.ROI_BOX_HEAD.NUM_FC 0: with NUM_CONV 0 the head has no layer")


def _check_segmenter(cfg: CfgNode, maps: Sequence[str]) -> None:
    head = cfg.MODEL.SEM_SEG_HEAD
    known = ("FCN16sHead", "LinearHead", "UPerHead")
    if head.NAME not in known:
        raise UserError(
            f"MODEL.SEM_SEG_HEAD.NAME {head.NAME}: the embedded engine has only "
            f"{', '.join(known)}; change it, or use --engine detectron2"
        )
    require_maps("MODEL.SEM_SEG_HEAD.IN_FEATURES", head.IN_FEATURES, maps)
    if cfg.INPUT.RANDOM_FLIP == "vertical":
        raise UserError(
            "INPUT.RANDOM_FLIP: got 'vertical', choices for semantic segmentation are horizontal, "
            "none"
        )
