"""Learning rate as a pure function of the step, and the registries of schedules and optimizers.

An entry of `SCHEDULES`, registered under its value of SOLVER.SCHEDULE, is a function of the keys
under SOLVER and of a `Length`. It returns the factor of BASE_LR as a function of the step, from 0.
An entry of `OPTIMIZERS`, registered under its value of SOLVER.OPTIMIZER, is a function of the
parameters to train and of the keys.
"""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from moco.common.errors import UserError, lookup

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

SCHEDULES = Registry("SCHEDULES")
Factor = Callable[[int], float]


class Length(NamedTuple):
    """Length of a run in steps."""

    total_steps: int
    steps_per_epoch: int


@SCHEDULES.register()
def step(solver: CfgNode, length: Length) -> Factor:
    """Multiply by GAMMA at each of MILESTONES_EPOCHS (the paper, sec. 4)."""
    milestones, gamma = tuple(solver.MILESTONES_EPOCHS), solver.GAMMA
    return lambda step: gamma ** sum(step // length.steps_per_epoch >= m for m in milestones)


@SCHEDULES.register()
def cosine(solver: CfgNode, length: Length) -> Factor:
    """Decay to 0 by half a cosine (MoCo v2).

    With LR_UPDATE epoch, each epoch has one value, as in the official code.
    """
    hold = length.steps_per_epoch if solver.LR_UPDATE == "epoch" else 1
    return lambda step: 0.5 * (1.0 + math.cos(math.pi * (step // hold * hold) / length.total_steps))


@SCHEDULES.register()
def warmup_cosine(solver: CfgNode, length: Length) -> Factor:
    """Decay to 0 by half a cosine from the end of the warm-up on, at each step (MoCo v3).

    Deviation: in the official code the step after i of w warm-up steps has the rate i / w, so
    that the first step does nothing; here the rate is (i + 1) / w, as in all schedules.
    """
    warmup, total = warmup_steps(solver, length), length.total_steps
    rest = max(1, total - warmup)
    return lambda step: 0.5 * (1.0 + math.cos(math.pi * max(0, step - warmup) / rest))


@SCHEDULES.register()
def exponential(solver: CfgNode, length: Length) -> Factor:
    """Multiply by GAMMA after every DECAY_EVERY_ITERS steps (the paper's IG-1B)."""
    gamma, every = solver.GAMMA, solver.DECAY_EVERY_ITERS
    return lambda step: gamma ** (step // every)


def warmup_steps(solver: CfgNode, length: Length) -> int:
    """Return the number of warm-up steps, from WARMUP_ITERS or WARMUP_EPOCHS."""
    return int(solver.WARMUP_ITERS or round(solver.WARMUP_EPOCHS * length.steps_per_epoch))


def check_warmup(solver: CfgNode, length: Length) -> None:
    """Check that the warm-up ends before the run does.

    Raises:
        UserError: If the schedule would never reach BASE_LR, or never decay.
    """
    warmup = warmup_steps(solver, length)
    if warmup and warmup >= length.total_steps:
        key = "SOLVER.WARMUP_ITERS" if solver.WARMUP_ITERS else "SOLVER.WARMUP_EPOCHS"
        steps, epoch = length.total_steps, length.steps_per_epoch
        raise UserError(
            f"{key}: a warm-up of {warmup} steps in a run of {steps} steps "
            f"({steps / epoch:g} epochs of {epoch} steps of {solver.BATCH_SIZE} images), expected "
            "fewer; for a warm-up in epochs set SOLVER.WARMUP_EPOCHS"
        )


class LearningRate:
    """Learning rate as a function of the step: `LearningRate(solver, length)(step)`.

    During a warm-up of w steps, the schedule is multiplied by `1/w, 2/w, ... 1`.
    """

    def __init__(self, solver: CfgNode, length: Length) -> None:
        self.length, self._solver = length, solver
        self._warmup = warmup_steps(solver, length)
        self._factor = lookup(SCHEDULES, solver.SCHEDULE, "SOLVER.SCHEDULE")(solver, length)

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        factor: float = self._factor(step)
        if step < self._warmup:
            factor *= (step + 1) / self._warmup
        return float(self._solver.BASE_LR * factor)

    def of_total(self, steps: int) -> "LearningRate":
        """Return the learning rate for a run of another total number of steps."""
        return LearningRate(self._solver, self.length._replace(total_steps=steps))


OPTIMIZERS = Registry("OPTIMIZERS")


@OPTIMIZERS.register()
def sgd(parameters: Iterable["Tensor"], solver: "CfgNode") -> "Optimizer":
    """Build SGD with momentum (the paper, sec. 4) and weight decay on all parameters."""
    import torch

    return torch.optim.SGD(
        parameters, solver.BASE_LR, solver.MOMENTUM, weight_decay=solver.WEIGHT_DECAY
    )


@OPTIMIZERS.register()
def adamw(parameters: Iterable["Tensor"], solver: "CfgNode") -> "Optimizer":
    """Build AdamW with torch's betas (0.9, 0.999), decaying all parameters as in MoCo v3."""
    import torch

    return torch.optim.AdamW(parameters, solver.BASE_LR, weight_decay=solver.WEIGHT_DECAY)


@OPTIMIZERS.register()
def lars(parameters: Iterable["Tensor"], solver: "CfgNode") -> "Optimizer":
    """Build LARS, for large batches; see `moco.engine.lars.LARS`."""
    from moco.engine.lars import LARS

    return LARS(parameters, solver.BASE_LR, solver.MOMENTUM, solver.WEIGHT_DECAY)
