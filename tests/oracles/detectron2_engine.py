"""Detectron2's side of a comparison: its model, its solver, its inputs. Needs Detectron2."""

from __future__ import annotations

from typing import Any

import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import build_model
from detectron2.solver import build_lr_scheduler, build_optimizer
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints, PolygonMasks
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from detection.config.task import add_transfer_config
from detection.d2.config import with_builder  # the package registers this project's models
from detection.embedded.model import build_model as build_embedded
from tests.oracles.tiny_detector import assert_same, merge, task


def config(keys: dict[str, Any]) -> CfgNode:
    cfg = get_cfg()
    add_transfer_config(cfg)
    return merge(cfg, keys)


def model(cfg: CfgNode) -> nn.Module:
    return build_model(with_builder(cfg))


def same_start(keys: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """Build both engines' models, and check that one seed gives them equal weights."""
    torch.manual_seed(7)
    theirs = model(config(keys))
    torch.manual_seed(7)
    ours = build_embedded(task(keys))
    assert_same(theirs.state_dict(), ours.state_dict())
    trainable = {name for name, p in ours.named_parameters() if p.requires_grad}
    assert trainable == {name for name, p in theirs.named_parameters() if p.requires_grad}
    return theirs, ours


def inputs(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert samples of the embedded engine to the dicts of Detectron2's mapper."""
    converted = []
    for sample in samples:
        instances = Instances(tuple(sample["image"].shape[-2:]))
        instances.gt_boxes = Boxes(sample["boxes"])
        instances.gt_classes = sample["classes"]
        # As in its mapper, without objects there are no such fields.
        if "masks" in sample and len(sample["boxes"]):
            kind = BitMasks if isinstance(sample["masks"], Tensor) else PolygonMasks
            instances.gt_masks = kind(sample["masks"])
        if "keypoints" in sample and len(sample["boxes"]):
            instances.gt_keypoints = Keypoints(sample["keypoints"])
        learned = ("boxes", "classes", "masks", "keypoints")
        rest = {k: v for k, v in sample.items() if k not in learned}
        converted.append({**rest, "instances": instances})
    return converted


def losses(net: nn.Module, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    with EventStorage():
        return net(inputs(samples))


_ANSWERS = {
    "scores": "scores",
    "pred_classes": "classes",
    "pred_masks": "masks",
    "pred_keypoints": "keypoints",
}


def detections(net: nn.Module, samples: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Return the model's outputs for each sample, with the embedded engine's names."""
    with torch.no_grad():
        outputs = net(inputs(samples))
    if "sem_seg" in outputs[0]:
        return outputs
    return [
        {
            "boxes": found.pred_boxes.tensor,
            **{own: found.get(name) for name, own in _ANSWERS.items() if found.has(name)},
        }
        for found in (output["instances"] for output in outputs)
    ]


def solver(cfg: CfgNode, net: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = build_optimizer(cfg, net)
    return optimizer, build_lr_scheduler(cfg, optimizer)
