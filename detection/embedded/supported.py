"""Refuses, before training, every key whose value this engine cannot honour.

A key that is silently ignored would make a number that means something else than its
configuration says. The tables of keys are in detection/keys.py.
"""

from __future__ import annotations

from typing import Any

from fvcore.common.config import CfgNode

from convert.backbone import is_bottleneck
from detection.keys import DETECTRON2_ONLY, EMBEDDED_CHOICES
from moco.errors import UserError


def check_supported(cfg: CfgNode) -> None:
    """Raise UserError for the first key, or pair of keys, that this engine cannot honour."""
    choices = {key: (default,) for key, default in DETECTRON2_ONLY.items()} | EMBEDDED_CHOICES
    for key, allowed in choices.items():
        value = _get(cfg, key, default=allowed[0])
        if not any(_same(value, choice) for choice in allowed):
            names = ", ".join(str(choice) for choice in allowed)
            raise UserError(
                f"{key} {value}: the embedded engine has only {names}; "
                "change it, or use --engine detectron2"
            )
    for key in ("MODEL.ANCHOR_GENERATOR.SIZES", "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS"):
        value = _get(cfg, key, default=[[]])
        if len(value) != 1 or not isinstance(value[0], list | tuple) or not value[0]:
            raise UserError(
                f"{key} {value}: expected one list for the one feature map, as [[1, 2]]"
            )
    resnets = cfg.MODEL.RESNETS
    if not is_bottleneck(resnets.DEPTH):
        if resnets.RES2_OUT_CHANNELS != resnets.STEM_OUT_CHANNELS:
            raise UserError(
                f"MODEL.RESNETS.RES2_OUT_CHANNELS {resnets.RES2_OUT_CHANNELS}: a ResNet-"
                f"{resnets.DEPTH} keeps the channels of its stem; "
                f"set it to {resnets.STEM_OUT_CHANNELS}"
            )
        if resnets.NUM_GROUPS != 1:
            raise UserError(
                f"MODEL.RESNETS.NUM_GROUPS {resnets.NUM_GROUPS}: a ResNet-{resnets.DEPTH} "
                "has basic blocks without groups; set it to 1"
            )
        if cfg.MODEL.ROI_HEADS.NAME == "Res5ROIHeads":
            # Detectron2 would put three bottlenecks there, whatever the trunk.
            raise UserError(
                "MODEL.ROI_HEADS.NAME Res5ROIHeads: its res5 is made of bottlenecks; with a "
                f"ResNet-{resnets.DEPTH} use Res5ROIHeadsExtraNorm"
            )


def _get(cfg: CfgNode, key: str, default: Any) -> Any:
    """The value of a dotted key, `default` where the key does not exist."""
    node: Any = cfg
    for part in key.split("."):
        if part not in node:
            return default
        node = node[part]
    return node


def _same(a: Any, b: Any) -> bool:
    """Equal, whether written as list or tuple; True is not 1."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return isinstance(a, bool) == isinstance(b, bool) and a == b
