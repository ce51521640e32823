"""Saving of a run's state: schedule of the checkpoints and retention of old ones."""

import math
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from moco.common import distributed
from moco.common.errors import DataError, NumericError
from moco.engine.checkpoint import (
    checkpoint_name,
    delete_checkpoints,
    list_checkpoints,
    remove_old_checkpoints,
    save_checkpoint,
    set_aside,
)
from moco.engine.stop import exit_after_save
from moco.engine.training import Training


class LossRange:
    """Range of plausible losses, to know which checkpoint to keep if a run diverges.

    A loss is in range if it is at most FACTOR times the exponential running mean of the earlier
    losses (over about a hundred steps), or FACTOR if that mean is below 1. A checkpoint is good if
    the next step, which is the first to use its weights, has a loss in range, and no weight exceeds
    MAX_WEIGHT. The weights are checked too, because the loss of a normalized network is bounded for
    any weights.
    """

    FACTOR, DECAY, MAX_WEIGHT = 100.0, 0.99, 1e6

    def __init__(self) -> None:
        self._mean: float | None = None
        self._untried = ""  # name of the checkpoint of the previous step
        self.good = ""  # name of the newest good checkpoint

    def add(self, loss: float) -> None:
        """Add the finite loss of a step."""
        untried, self._untried = self._untried, ""
        if self._mean is None:
            self._mean = loss
        if loss > self.FACTOR * max(1.0, self._mean):
            return
        self._mean += (1 - self.DECAY) * (loss - self._mean)
        self.good = untried or self.good

    def save(self, name: str, largest_weight: float) -> dict[str, Any]:
        """Return the state to store in the checkpoint of this name."""
        self._untried = name if largest_weight <= self.MAX_WEIGHT else ""
        return {"mean": self._mean, "good": self.good, "untried": bool(self._untried)}

    def load(self, state: Mapping[str, Any], name: str) -> None:
        """Restore the state returned by `save` from a checkpoint that is now called `name`."""
        self._mean = None if state["mean"] is None else float(state["mean"])
        self.good, self._untried = str(state["good"]), name if state["untried"] else ""


class Saver:
    """Writer of a run's checkpoints; it also ends the run when a stop is requested.

    Args:
        folder: Folder of the run.
        training: Training to save.
        content: Function from the number of steps done to the content to save; all processes call
            it together.
    """

    def __init__(
        self, folder: Path, training: Training[Any, Any], content: Callable[[int], dict[str, Any]]
    ) -> None:
        self._folder, self._training, self._content = folder, training, content
        self._range = LossRange()

    def path(self, done: int) -> Path:
        """Return the path of the checkpoint after `done` steps."""
        epoch, into_epoch = divmod(done, self._training.steps_per_epoch)
        if into_epoch == 0:
            return self._folder / checkpoint_name(epoch - 1)
        finished = done == self._training.total_steps
        return self._folder / checkpoint_name(epoch, None if finished else done)

    def delete_earlier(self) -> None:
        """Delete the checkpoints of an earlier run, so that a later --resume does not find them."""
        if distributed.is_main():
            delete_checkpoints(self._folder)

    def restore(self, path: Path, state: Mapping[str, Any]) -> Path:
        """Restore the loss range from a checkpoint; return the checkpoint's path, renamed if wrong.

        All processes must have read the file.
        """
        named = self.path(state["step"])
        try:
            self._range.load(state["loss_range"], named.name)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: a malformed 'loss_range'") from error
        inside = path.parent.resolve() == self._folder.resolve()
        renamed = inside and path.name != named.name and path in list_checkpoints(path.parent)
        if renamed and distributed.is_main():
            # The file is a copy with the name of another step, or the end of a run since extended.
            set_aside(self._folder, [named], None)
            path.rename(named)
        return named

    def check_loss(self, loss: float, step: int) -> None:
        """Raise NumericError for a loss that is not finite."""
        if not math.isfinite(loss):
            raise NumericError(f"loss is {loss} at step {step}; {self._advice()}")
        self._range.add(loss)

    def is_due(self, step: int) -> bool:
        """Return whether the schedule requires saving the state after this step."""
        training, done = self._training, step + 1
        every = training.cfg.CHECKPOINT
        epoch, into_epoch = divmod(done, training.steps_per_epoch)
        due = into_epoch == 0 and epoch % every.EVERY_EPOCHS == 0
        due |= every.EVERY_ITERS > 0 and done % every.EVERY_ITERS == 0
        return due or done in (training.total_steps, training.cfg.SOLVER.STOP_AT_ITERS)

    def save_if_due(self, step: int, stop_signal: int | None) -> None:
        """Save after this step if the schedule, the end of the run, or a stop requires it.

        Raises:
            NumericError: If a weight is not finite, or fp16 skipped most steps; nothing is saved.
            Preempted: If a stop was requested; the state is saved.
            KeyboardInterrupt: If SIGINT requested the stop; the state is saved.
        """
        training, done = self._training, step + 1
        total, every = training.total_steps, training.cfg.CHECKPOINT
        finished = done == total
        stop_at = training.cfg.SOLVER.STOP_AT_ITERS
        stop = not finished and (stop_signal is not None or done == stop_at)
        if not (stop or self.is_due(step)):
            return
        largest = largest_weight(training.model)
        if not math.isfinite(largest):
            raise NumericError(f"a weight is {largest} after step {step}; {self._advice()}")
        training.scaler.check(done, total)
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
            distributed.barrier()  # no process exits before the file is written
            exit_after_save(stop_signal or signal.SIGTERM, f"step {done} of {total}", path)

    def _advice(self) -> str:
        good = self._folder / self._range.good
        return (
            "the newest checkpoint after which the loss stayed in its range: "
            f"{good if good.is_file() else 'none'}; lower SOLVER.BASE_LR or add SOLVER.WARMUP_ITERS"
        )


def largest_weight(model: torch.nn.Module) -> float:
    """Return the largest magnitude of the parameters; NaN if any is NaN."""
    return float(torch.stack([p.detach().abs().max() for p in model.parameters()]).max())
