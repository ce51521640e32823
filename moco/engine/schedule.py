"""The learning rate as a pure function of the step, and the registry of its schedules.

A schedule is registered under its value of SOLVER.SCHEDULE: a function of the keys under SOLVER and
of `Length` that returns the factor of BASE_LR at each step, from 0.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from moco.common.errors import UserError
from moco.common.registry import lookup

SCHEDULES = Registry("SCHEDULES")
Factor = Callable[[int], float]


class Length(NamedTuple):
    """Of a run in steps."""

    total_steps: int
    steps_per_epoch: int


@SCHEDULES.register()
def step(solver: CfgNode, length: Length) -> Factor:
    """Times GAMMA at each of MILESTONES_EPOCHS (the paper, sec. 4)."""
    milestones, gamma = tuple(solver.MILESTONES_EPOCHS), solver.GAMMA
    return lambda step: gamma ** sum(step // length.steps_per_epoch >= m for m in milestones)


@SCHEDULES.register()
def cosine(solver: CfgNode, length: Length) -> Factor:
    """Half a cosine to 0 (MoCo v2).

    With LR_UPDATE epoch one value per epoch, as the official code has it.
    """
    hold = length.steps_per_epoch if solver.LR_UPDATE == "epoch" else 1
    return lambda step: 0.5 * (1.0 + math.cos(math.pi * (step // hold * hold) / length.total_steps))


@SCHEDULES.register()
def warmup_cosine(solver: CfgNode, length: Length) -> Factor:
    """Half a cosine to 0 that begins where the warm-up ends (MoCo v3), a value for each step.

    Deviation: in the official code the step after i of w warm-up steps has the rate i / w, so
    that the first one does nothing; here it is (i + 1) / w, as in all schedules.
    """
    warmup, total = warmup_steps(solver, length), length.total_steps
    rest = max(1, total - warmup)
    return lambda step: 0.5 * (1.0 + math.cos(math.pi * max(0, step - warmup) / rest))


@SCHEDULES.register()
def exponential(solver: CfgNode, length: Length) -> Factor:
    """Times GAMMA after every DECAY_EVERY_ITERS steps (the paper's IG-1B)."""
    gamma, every = solver.GAMMA, solver.DECAY_EVERY_ITERS
    return lambda step: gamma ** (step // every)


def warmup_steps(solver: CfgNode, length: Length) -> int:
    """Return the number of warm-up steps, from WARMUP_ITERS or WARMUP_EPOCHS."""
    return int(solver.WARMUP_ITERS or round(solver.WARMUP_EPOCHS * length.steps_per_epoch))


def check_warmup(solver: CfgNode, length: Length) -> None:
    """Refuse a warm-up after which no step of the run is left.

    Raises:
        UserError: Its schedule would never reach BASE_LR, or never decay.
    """
    warmup = warmup_steps(solver, length)
    if warmup and warmup >= length.total_steps:
        key = "SOLVER.WARMUP_ITERS" if solver.WARMUP_ITERS else "SOLVER.WARMUP_EPOCHS"
        steps, epoch = length.total_steps, length.steps_per_epoch
        raise UserError(
            f"{key}: a warm-up of {warmup} steps in a run of {steps} steps "
            f"({steps / epoch:g} epochs of {epoch} steps of {solver.BATCH_SIZE} images), expected "
            "fewer; papers have warm-ups in epochs: SOLVER.WARMUP_EPOCHS"
        )


class LearningRate:
    """`LearningRate(solver, length)(step)` is the learning rate of the step with that number.

    The w steps of the warm-up rise linearly, `1/w, 2/w, ... 1` times the schedule.
    """

    def __init__(self, solver: CfgNode, length: Length) -> None:
        self.length, self._solver = length, solver
        self._warmup = warmup_steps(solver, length)
        self._factor = lookup(SCHEDULES, solver.SCHEDULE, "SOLVER.SCHEDULE")(solver, length)

    def __call__(self, step: int) -> float:
        factor: float = self._factor(step)
        if step < self._warmup:
            factor *= (step + 1) / self._warmup
        return float(self._solver.BASE_LR * factor)

    def of_total(self, steps: int) -> "LearningRate":
        """That of a run of another length."""
        return LearningRate(self._solver, self.length._replace(total_steps=steps))
