"""Detectron2's side of a comparison: its model, its solver, its inputs. Needs Detectron2."""

from __future__ import annotations

from typing import Any

import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import build_model
from detectron2.solver import build_lr_scheduler, build_optimizer
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

import detection.d2  # noqa: F401  # registers Res5ROIHeadsExtraNorm
from tests.oracles.tiny_detector import merge


def config(keys: dict[str, Any]) -> CfgNode:
    return merge(get_cfg(), keys)


def model(cfg: CfgNode) -> nn.Module:
    return build_model(cfg)


def inputs(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Samples of the embedded engine as Detectron2's mapper would give them."""
    converted = []
    for sample in samples:
        instances = Instances(tuple(sample["image"].shape[-2:]))
        instances.gt_boxes = Boxes(sample["boxes"])
        instances.gt_classes = sample["classes"]
        rest = {k: v for k, v in sample.items() if k not in ("boxes", "classes")}
        converted.append({**rest, "instances": instances})
    return converted


def losses(net: nn.Module, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    with EventStorage():
        return net(inputs(samples))


def detections(net: nn.Module, samples: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    with torch.no_grad():
        found = [output["instances"] for output in net(inputs(samples))]
    return [
        {"boxes": x.pred_boxes.tensor, "scores": x.scores, "classes": x.pred_classes} for x in found
    ]


def solver(cfg: CfgNode, net: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = build_optimizer(cfg, net)
    return optimizer, build_lr_scheduler(cfg, optimizer)
