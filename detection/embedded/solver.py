"""SGD with its parameter groups, schedule and clipping, equal to detectron2/solver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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


def build_optimizer(solver: CfgNode, model: nn.Module) -> torch.optim.SGD:
    """SGD by the keys of SOLVER."""
    groups = parameter_groups(
        model,
        base_lr=solver.BASE_LR,
        weight_decay=solver.WEIGHT_DECAY,
        weight_decay_norm=solver.WEIGHT_DECAY_NORM,
        weight_decay_bias=solver.WEIGHT_DECAY_BIAS,
        bias_lr_factor=solver.BIAS_LR_FACTOR,
    )
    return torch.optim.SGD(
        groups, lr=solver.BASE_LR, momentum=solver.MOMENTUM, nesterov=solver.NESTEROV
    )


def build_schedule(solver: CfgNode) -> ParamScheduler:
    """`warmup_multistep` by the keys of SOLVER."""
    return warmup_multistep(
        steps=solver.STEPS,
        gamma=solver.GAMMA,
        max_iter=solver.MAX_ITER,
        warmup_iters=solver.WARMUP_ITERS,
        warmup_factor=solver.WARMUP_FACTOR,
        warmup_method=solver.WARMUP_METHOD,
    )


def build_clipping(solver: CfgNode) -> Callable[[torch.optim.Optimizer], None]:
    """`clip_gradients` by SOLVER.CLIP_GRADIENTS, or nothing."""
    clip = solver.CLIP_GRADIENTS
    if not clip.ENABLED:
        return lambda optimizer: None
    return partial(
        clip_gradients,
        clip_type=clip.CLIP_TYPE,
        clip_value=clip.CLIP_VALUE,
        norm_type=clip.NORM_TYPE,
    )


def parameter_groups(
    model: nn.Module,
    *,
    base_lr: float,
    weight_decay: float,
    weight_decay_norm: float,
    weight_decay_bias: float | None,
    bias_lr_factor: float,
) -> list[dict[str, Any]]:
    """Trainable parameters, grouped by learning rate and weight decay.

    A bias counts as a bias also in a normalization layer when `weight_decay_bias` is given.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            lr, decay = base_lr, weight_decay
            if isinstance(module, _NormBase):
                decay = weight_decay_norm
            if name == "bias":
                lr = base_lr * bias_lr_factor
                decay = decay if weight_decay_bias is None else weight_decay_bias
            groups.setdefault((lr, decay), []).append(parameter)
    return [
        {"params": parameters, "lr": lr, "initial_lr": lr, "weight_decay": decay}
        for (lr, decay), parameters in groups.items()
    ]


def warmup_multistep(
    *,
    steps: Sequence[int],
    gamma: float,
    max_iter: int,
    warmup_iters: int,
    warmup_factor: float,
    warmup_method: str,
) -> ParamScheduler:
    """Factor of the learning rate as a function of progress, iteration / max_iter in [0, 1).

    From `warmup_factor` to 1 over `warmup_iters` ("linear"; "constant" stays at the factor), then
    multiplied by `gamma` at each of `steps`; steps beyond `max_iter` are ignored.
    """
    reached = [step for step in steps if step <= max_iter]
    decayed = MultiStepParamScheduler(
        values=[gamma**k for k in range(len(reached) + 1)],
        milestones=reached,
        num_updates=max_iter,
    )
    length = min(warmup_iters / max_iter, 1.0)
    start = warmup_factor * decayed(0.0)
    end = decayed(length)
    warmup = {
        "constant": ConstantParamScheduler(start),
        "linear": LinearParamScheduler(start, end),
    }[warmup_method]
    return CompositeParamScheduler(
        [warmup, decayed],
        lengths=[length, 1 - length],
        interval_scaling=["rescaled", "fixed"],
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Every group's own learning rate, times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def clip_gradients(
    optimizer: torch.optim.Optimizer, clip_type: str, clip_value: float, norm_type: float
) -> None:
    """Clip each parameter's gradient by "value", or its own "norm" (not the norm of all)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if clip_type == "value":
                torch.nn.utils.clip_grad_value_(parameter, clip_value)
            else:
                torch.nn.utils.clip_grad_norm_(parameter, clip_value, norm_type)
