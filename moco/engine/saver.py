"""When a run saves its state, which of its checkpoints stay, and which are moved aside."""

import math
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from moco.common import distributed
from moco.common.errors import DataError, NumericError
from moco.common.run import RECORD_NAME
from moco.engine.checkpoint import (
    checkpoint_name,
    list_checkpoints,
    order,
    remove_old_checkpoints,
    save_checkpoint,
    set_aside,
)
from moco.engine.stop import leave
from moco.engine.training import Training


class LossRange:
    """Tells which checkpoints are worth keeping when a run diverges.

    A loss is in range if it is at most FACTOR times the running mean of those before it (an
    exponential one over some hundred steps), or FACTOR where that mean is below 1. A checkpoint is
    good once the step after it, the first that uses its weights, had a loss in range, if no weight
    was above MAX_WEIGHT: normalized networks have a bounded loss whatever their weights.
    """

    FACTOR, DECAY, MAX_WEIGHT = 100.0, 0.99, 1e6

    def __init__(self) -> None:
        self._mean: float | None = None
        self._untried = ""  # the checkpoint of the step before
        self.good = ""  # name of the newest good checkpoint

    def add(self, loss: float) -> None:
        """The loss of a step, finite."""
        untried, self._untried = self._untried, ""
        if self._mean is None:
            self._mean = loss
        if loss > self.FACTOR * max(1.0, self._mean):
            return
        self._mean += (1 - self.DECAY) * (loss - self._mean)
        self.good = untried or self.good

    def save(self, name: str, largest_weight: float) -> dict[str, Any]:
        """Its state, for the checkpoint of this name."""
        self._untried = name if largest_weight <= self.MAX_WEIGHT else ""
        return {"mean": self._mean, "good": self.good, "untried": bool(self._untried)}

    def load(self, state: Mapping[str, Any], name: str) -> None:
        """Continue from what `save` returned, of a checkpoint that has this name now."""
        self._mean = None if state["mean"] is None else float(state["mean"])
        self.good, self._untried = str(state["good"]), name if state["untried"] else ""


class Saver:
    """Saves a run's state after the steps that are due, and leaves when a stop is requested.

    Args:
        content: what to save after N steps; all processes call it together.
    """

    SCALED = 100  # steps of fp16 after which the scale of the loss has been found

    def __init__(
        self, folder: Path, training: Training[Any, Any], content: Callable[[int], dict[str, Any]]
    ) -> None:
        self._folder, self._training, self._content = folder, training, content
        self._range = LossRange()

    def path(self, done: int) -> Path:
        """What is saved after `done` steps, also where another machine's folder holds it."""
        epoch, into_epoch = divmod(done, self._training.steps_per_epoch)
        if into_epoch == 0:
            return self._folder / checkpoint_name(epoch - 1)
        finished = done == self._training.total_steps
        return self._folder / checkpoint_name(epoch, None if finished else done)

    def delete_earlier(self) -> None:
        """Delete an earlier run's checkpoints, which a later --resume must not find."""
        if distributed.is_main():
            set_aside(self._folder, (), None)
            for path in list_checkpoints(self._folder):
                path.unlink()

    def resume_from(self, path: Path, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint that all processes have read; newer ones are moved aside."""
        done = state["step"]
        named = self.path(done)
        try:
            self._range.load(state["loss_range"], named.name)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: a malformed 'loss_range'") from error
        if not distributed.is_main():
            return
        inside = path.parent.resolve() == self._folder.resolve()
        if inside and path.name != named.name and path in list_checkpoints(path.parent):
            # A copy with another step's name, or the end of a run that is longer now.
            set_aside(self._folder, [named], None)
            path.rename(named)
        all_of_them = list_checkpoints(self._folder)
        kept = [found for found in all_of_them if order(found.name) <= order(named.name)]
        newer = all_of_them[len(kept) :]
        if done < self._training.total_steps:
            newer.append(self._folder / RECORD_NAME)
        set_aside(self._folder, newer, kept[-1] if kept else None)

    def check_loss(self, loss: float, step: int) -> None:
        """Raise NumericError before a loss that is not finite reaches the weights."""
        if not math.isfinite(loss):
            raise NumericError(f"loss is {loss} at step {step}; {self._advice()}")
        self._range.add(loss)

    def save_if_due(self, step: int, stop_signal: int | None) -> None:
        """Save after this step if the schedule, the end, or a stop requires it.

        Raises:
            NumericError: a weight is not finite, or fp16 skipped most steps; nothing is saved.
            Preempted, KeyboardInterrupt: saved, and this was the last step before stopping.
        """
        training, done = self._training, step + 1
        total, every = training.total_steps, training.cfg.CHECKPOINT
        finished = done == total
        epoch, into_epoch = divmod(done, training.steps_per_epoch)
        stop_at = training.cfg.SOLVER.STOP_AT_ITERS
        stop = not finished and (stop_signal is not None or done == stop_at)
        due = into_epoch == 0 and epoch % every.EVERY_EPOCHS == 0
        due |= every.EVERY_ITERS > 0 and done % every.EVERY_ITERS == 0
        if not (finished or stop or due):
            return
        largest = largest_weight(training.model)
        if not math.isfinite(largest):
            raise NumericError(f"a weight is {largest} after step {step}; {self._advice()}")
        if (finished or done >= self.SCALED) and training.skipped_steps > done / 2:
            raise NumericError(
                f"SOLVER.PRECISION fp16: {training.skipped_steps} of {done} steps were skipped, "
                "because a gradient overflowed; set bf16 or fp32"
            )
        path = self.path(done)
        content = {
            **self._content(done),
            "total_steps": total,
            "loss_range": self._range.save(path.name, largest),
        }
        if distributed.is_main():
            save_checkpoint(path, content)
            never = (path.name, self._range.good)
            remove_old_checkpoints(self._folder, every.KEEP, every.MILESTONE_EPOCHS, never)
        if stop:
            distributed.barrier()  # no process ends before the file is there
            leave(stop_signal or signal.SIGTERM, f"step {done} of {total}", path)

    def _advice(self) -> str:
        good = self._folder / self._range.good
        return (
            "the newest checkpoint after which the loss stayed in its range: "
            f"{good if good.is_file() else 'none'}; lower SOLVER.BASE_LR or add SOLVER.WARMUP_ITERS"
        )


def largest_weight(model: torch.nn.Module) -> float:
    """The largest magnitude among the parameters; NaN where one is."""
    return float(torch.stack([p.detach().abs().max() for p in model.parameters()]).max())
