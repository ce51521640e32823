"""The learning rate as a pure function of the step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRate:
    """`LearningRate(...)(step)` is the learning rate of the step with that number, from 0.

    Attributes:
        base: before any decay.
        kind: `"step"` (times `gamma` at each of `milestones_epochs`; the paper, sec. 4) or
            `"cosine"` (half a cosine to 0 over `total_steps`; MoCo v2) or `"exponential"`
            (times `gamma` after every `decay_every_iters` steps; the paper's IG-1B).
        per_epoch: hold the value for a whole epoch, as the official code does.
        warmup_iters: the first steps rise linearly, `1/w, 2/w, ... 1` times the schedule.
    """

    base: float
    kind: str
    total_steps: int
    steps_per_epoch: int
    milestones_epochs: Sequence[int] = ()
    gamma: float = 0.1
    per_epoch: bool = True
    warmup_iters: int = 0
    decay_every_iters: int = 62500

    def __call__(self, step: int) -> float:
        epoch = step // self.steps_per_epoch
        if self.kind == "step":
            factor = self.gamma ** sum(epoch >= m for m in self.milestones_epochs)
        elif self.kind == "exponential":
            factor = self.gamma ** (step // self.decay_every_iters)
        else:
            done = epoch * self.steps_per_epoch if self.per_epoch else step
            factor = 0.5 * (1.0 + math.cos(math.pi * done / self.total_steps))
        if step < self.warmup_iters:
            factor *= (step + 1) / self.warmup_iters
        return self.base * factor
