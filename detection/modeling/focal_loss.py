"""State of RetinaNet's losses beyond batch and weights, shared by both engines.

Deviation: the moving average that divides the losses is missing in Detectron2's checkpoints and is
saved in our training state; and the focal loss is compiled before the first iteration.
`sigmoid_focal_loss_jit` differentiates its first call as written and later calls by an optimized
graph, which differs in the last bits. Without a call before the first iteration, a resumed run
would not be bitwise identical to the uninterrupted one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from fvcore.nn import sigmoid_focal_loss_jit
from torch import nn

_NAME = "loss_normalizer"


def compile_focal_loss(device: str) -> None:
    """Call `sigmoid_focal_loss_jit` until TorchScript has compiled it for this device type."""
    for _ in range(3):
        logits = torch.zeros(2, 2, device=device, requires_grad=True)
        targets = torch.ones_like(logits)
        sigmoid_focal_loss_jit(logits, targets, 0.25, 2.0, "sum").backward()


def moving_averages(model: nn.Module) -> dict[str, float]:
    """Return the moving average of the loss normalizer for a checkpoint; empty for other models."""
    owners = [m for m in model.modules() if hasattr(m, _NAME)]
    return {_NAME: getattr(owners[0], _NAME)} if owners else {}


def restore_moving_averages(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore what `moving_averages` returned (in place)."""
    if _NAME in state:
        # Detectron2's model, the owner itself, has no such attribute before its first batch.
        owners = [m for m in model.modules() if hasattr(m, _NAME)]
        setattr((owners or [model])[0], _NAME, state[_NAME])
