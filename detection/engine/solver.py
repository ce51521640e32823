"""Learning-rate schedule and gradient clipping from SOLVER, equal to detectron2/solver."""

import torch
from fvcore.common.config import CfgNode
from fvcore.common.param_scheduler import (
    CompositeParamScheduler,
    ConstantParamScheduler,
    CosineParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    ParamScheduler,
)
from torch.nn.utils import clip_grad_norm_, clip_grad_value_


def build_schedule(solver: CfgNode) -> ParamScheduler:
    """Factor of the learning rate as a function of progress, iteration / MAX_ITER in [0, 1).

    From WARMUP_FACTOR to the schedule's value over WARMUP_ITERS ("linear"; "constant" stays at the
    factor), then by LR_SCHEDULER_NAME multiplied by GAMMA at each of STEPS (those beyond MAX_ITER
    are ignored), or from BASE_LR to BASE_LR_END along half a cosine that begins with the training.
    """
    schedules = {"WarmupMultiStepLR": _steps, "WarmupCosineLR": _cosine}
    decayed = schedules[solver.LR_SCHEDULER_NAME](solver)
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


def _steps(solver: CfgNode) -> ParamScheduler:
    reached = [step for step in solver.STEPS if step <= solver.MAX_ITER]
    return MultiStepParamScheduler(
        values=[solver.GAMMA**k for k in range(len(reached) + 1)],
        milestones=reached,
        num_updates=solver.MAX_ITER,
    )


def _cosine(solver: CfgNode) -> ParamScheduler:
    return CosineParamScheduler(1, solver.BASE_LR_END / solver.BASE_LR)


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
