"""SGD with its parameter groups, schedule and clipping from SOLVER, equal to detectron2/solver."""

from typing import Any

import torch
from fvcore.common.config import CfgNode
from fvcore.common.param_scheduler import (
    CompositeParamScheduler,
    ConstantParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    ParamScheduler,
)
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import clip_grad_norm_, clip_grad_value_


def build_optimizer(solver: CfgNode, model: nn.Module) -> torch.optim.SGD:
    """SGD on the trainable parameters, grouped by learning rate and weight decay.

    A bias counts as a bias also in a normalization layer when WEIGHT_DECAY_BIAS is given.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            lr, decay = solver.BASE_LR, solver.WEIGHT_DECAY
            if isinstance(module, _NormBase):
                decay = solver.WEIGHT_DECAY_NORM
            if name == "bias":
                lr *= solver.BIAS_LR_FACTOR
                decay = decay if solver.WEIGHT_DECAY_BIAS is None else solver.WEIGHT_DECAY_BIAS
            groups.setdefault((lr, decay), []).append(parameter)
    options: list[dict[str, Any]] = [
        {"params": parameters, "lr": lr, "initial_lr": lr, "weight_decay": decay}
        for (lr, decay), parameters in groups.items()
    ]
    return torch.optim.SGD(
        options, lr=solver.BASE_LR, momentum=solver.MOMENTUM, nesterov=solver.NESTEROV
    )


def build_schedule(solver: CfgNode) -> ParamScheduler:
    """Factor of the learning rate as a function of progress, iteration / MAX_ITER in [0, 1).

    From WARMUP_FACTOR to 1 over WARMUP_ITERS ("linear"; "constant" stays at the factor), then
    multiplied by GAMMA at each of STEPS; those beyond MAX_ITER are ignored.
    """
    reached = [step for step in solver.STEPS if step <= solver.MAX_ITER]
    decayed = MultiStepParamScheduler(
        values=[solver.GAMMA**k for k in range(len(reached) + 1)],
        milestones=reached,
        num_updates=solver.MAX_ITER,
    )
    length = min(solver.WARMUP_ITERS / solver.MAX_ITER, 1.0)
    start = solver.WARMUP_FACTOR * decayed(0.0)
    warmup = {
        "constant": ConstantParamScheduler(start),
        "linear": LinearParamScheduler(start, decayed(length)),
    }[solver.WARMUP_METHOD]
    return CompositeParamScheduler(
        [warmup, decayed],
        lengths=[length, 1 - length],
        interval_scaling=["rescaled", "fixed"],
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Every group's own learning rate, times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def clip_gradients(solver: CfgNode, optimizer: torch.optim.Optimizer) -> None:
    """By SOLVER.CLIP_GRADIENTS each gradient by "value", or its own "norm" (not that of all)."""
    clip = solver.CLIP_GRADIENTS
    if not clip.ENABLED:
        return
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if clip.CLIP_TYPE == "value":
            clip_grad_value_(parameter, clip.CLIP_VALUE)
        else:
            clip_grad_norm_(parameter, clip.CLIP_VALUE, clip.NORM_TYPE)
