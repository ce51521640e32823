"""Learning-rate schedules and gradient clipping of SOLVER, equal to detectron2/solver."""

import torch
from fvcore.common.config import CfgNode
from fvcore.common.param_scheduler import (
    CompositeParamScheduler,
    ConstantParamScheduler,
    CosineParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    ParamScheduler,
    PolynomialDecayParamScheduler,
)
from torch.nn.utils import clip_grad_norm_, clip_grad_value_


def build_schedule(solver: CfgNode) -> ParamScheduler:
    """Build the learning-rate factor as a function of progress, iteration / MAX_ITER in [0, 1).

    Over WARMUP_ITERS the factor rises from WARMUP_FACTOR to the schedule's value ("linear") or
    stays at WARMUP_FACTOR ("constant"). Then LR_SCHEDULER_NAME multiplies it by GAMMA at each of
    STEPS (those beyond MAX_ITER are ignored), or lowers the rate from BASE_LR to BASE_LR_END along
    half a cosine, or to 0 by a power of what remains, both from the beginning of the training.
    """
    schedules = {
        "WarmupMultiStepLR": _steps,
        "WarmupCosineLR": _cosine,
        "WarmupPolyLR": lambda keys: PolynomialDecayParamScheduler(1.0, keys.POLY_LR_POWER),
    }
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
    """Set the learning rate of each parameter group to its initial one times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def clip_gradients(solver: CfgNode, optimizer: torch.optim.Optimizer) -> None:
    """Clip each gradient by SOLVER.CLIP_GRADIENTS, to a value or to its own norm, not the total."""
    clip = solver.CLIP_GRADIENTS
    if not clip.ENABLED:
        return
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if clip.CLIP_TYPE == "value":
            clip_grad_value_(parameter, clip.CLIP_VALUE)
        else:
            clip_grad_norm_(parameter, clip.CLIP_VALUE, clip.NORM_TYPE)
