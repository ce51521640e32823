"""What RetinaNet's losses depend on besides batch and weights, the same in both engines.

Deviation: the losses are divided by a moving average, which Detectron2's checkpoints lack and the
training state of ours has; and the focal loss is compiled before it counts.
`sigmoid_focal_loss_jit` differentiates its first call as it is written and later ones by a graph of
its own, with other last bits. It has to be past the first call before the first iteration, else a
resumed run, which begins with one again, would not be bitwise identical to the uninterrupted one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from fvcore.nn import sigmoid_focal_loss_jit
from torch import nn

_NAME = "loss_normalizer"


def compile_focal_loss(device: str) -> None:
    """Call it until TorchScript has compiled it for this kind of device."""
    for _ in range(3):
        logits = torch.zeros(2, 2, device=device, requires_grad=True)
        targets = torch.ones_like(logits)
        sigmoid_focal_loss_jit(logits, targets, 0.25, 2.0, "sum").backward()


def moving_averages(model: nn.Module) -> dict[str, float]:
    """What a checkpoint of this process has to hold of them; empty for other models."""
    owners = [m for m in model.modules() if hasattr(m, _NAME)]
    return {_NAME: getattr(owners[0], _NAME)} if owners else {}


def restore_moving_averages(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Detectron2's model has none before its first batch: `model` itself gets it then."""
    if _NAME in state:
        owners = [m for m in model.modules() if hasattr(m, _NAME)]
        setattr((owners or [model])[0], _NAME, state[_NAME])
