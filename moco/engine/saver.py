"""When a run saves its state, which of its checkpoints stay, and which are moved aside."""

import math
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode

from moco.common import distributed
from moco.common.errors import DataError, NumericError
from moco.common.run import RECORD_NAME
from moco.engine.checkpoint import (
    checkpoint_name,
    list_checkpoints,
    newer_than,
    remove_old_checkpoints,
    save_checkpoint,
    set_aside,
)
from moco.engine.stop import leave


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
        folder: of the run.
        steps_per_epoch, total_steps: of the whole run.
        cfg: of the run: the keys under CHECKPOINT, SOLVER.STOP_AT_ITERS.
        model: whose weights have to be finite.
        content: what to save after N steps; all processes call it together.
    """

    def __init__(
        self,
        folder: Path,
        steps_per_epoch: int,
        total_steps: int,
        cfg: CfgNode,
        model: torch.nn.Module,
        content: Callable[[int], Mapping[str, Any]],
    ) -> None:
        self._folder, self._model, self._content = folder, model, content
        self._steps_per_epoch, self._total_steps = steps_per_epoch, total_steps
        self._every, self._stop_at = cfg.CHECKPOINT, cfg.SOLVER.STOP_AT_ITERS
        self._range = LossRange()

    def path(self, done: int) -> Path:
        """What is saved after `done` steps, also where another machine's folder holds it."""
        epoch, into_epoch = divmod(done, self._steps_per_epoch)
        if done == self._total_steps or into_epoch == 0:
            return self._folder / checkpoint_name(math.ceil(done / self._steps_per_epoch) - 1)
        return self._folder / checkpoint_name(epoch, done)

    def delete_earlier(self) -> None:
        """Delete an earlier run's checkpoints, which a later --resume must not find."""
        if distributed.is_main():
            set_aside(self._folder, (), None)
            for path in list_checkpoints(self._folder):
                path.unlink()

    def resume_from(self, path: Path, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; newer ones in the folder are moved aside.

        To be called after all processes have read it.
        """
        done = state["step"]
        named = self.path(done)
        if "loss_range" in state:
            try:
                self._range.load(state["loss_range"], named.name)
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(f"{path}: a malformed 'loss_range'") from error
        if not distributed.is_main():
            return
        here = {found.name for found in list_checkpoints(path.parent)}
        inside = path.parent.resolve() == self._folder.resolve()
        if inside and path.name in here - {named.name}:
            # A copy with another step's name, or the end of a run that is longer now.
            set_aside(self._folder, [named], None)
            path.rename(named)
        newer = newer_than(self._folder, named.name)
        kept = [found for found in list_checkpoints(self._folder) if found not in newer]
        if done < self._total_steps:
            newer.append(self._folder / RECORD_NAME)
        set_aside(self._folder, newer, kept[-1] if kept else None)

    def check_loss(self, loss: float, step: int) -> None:
        """Stop before a loss that is not finite reaches the weights.

        Raises:
            NumericError: naming the step and the newest good checkpoint.
        """
        if not math.isfinite(loss):
            raise NumericError(f"loss is {loss} at step {step}; {self._advice()}")
        self._range.add(loss)

    def save_if_due(self, step: int, stop_signal: int | None) -> None:
        """Save after this step if the schedule, the end, or a stop requires it.

        Raises:
            NumericError: a weight is not finite; nothing is saved.
            Preempted, KeyboardInterrupt: saved, and this was the last step before stopping.
        """
        done, every = step + 1, self._every
        finished = done == self._total_steps
        epoch, into_epoch = divmod(done, self._steps_per_epoch)
        stop = not finished and (stop_signal is not None or done == self._stop_at)
        due = into_epoch == 0 and epoch % every.EVERY_EPOCHS == 0
        due |= every.EVERY_ITERS > 0 and done % every.EVERY_ITERS == 0
        if not (finished or stop or due):
            return
        largest = largest_weight(self._model)
        if not math.isfinite(largest):
            raise NumericError(f"a weight is {largest} after step {step}; {self._advice()}")
        path = self.path(done)
        content = {
            **self._content(done),
            "total_steps": self._total_steps,
            "loss_range": self._range.save(path.name, largest),
        }
        if distributed.is_main():
            save_checkpoint(path, content)
            never = (path.name, self._range.good)
            remove_old_checkpoints(self._folder, every.KEEP, every.MILESTONE_EPOCHS, never)
        if stop:
            distributed.barrier()  # no process ends before the file is there
            # Where the schedule stops the run, as where another process got the signal.
            number = signal.SIGTERM if stop_signal is None else stop_signal
            leave(number, f"step {done} of {self._total_steps}", path)

    def _advice(self) -> str:
        good = [path for path in list_checkpoints(self._folder) if path.name == self._range.good]
        if good:
            kept = f"the newest checkpoint after which the loss stayed in its range is {good[0]}"
        else:
            kept = "there is no checkpoint after which the loss stayed in its range"
        return f"{kept}; lower SOLVER.BASE_LR or add SOLVER.WARMUP_ITERS"


def largest_weight(model: torch.nn.Module) -> float:
    """The largest magnitude among the parameters; NaN where one is."""
    return float(torch.stack([p.detach().abs().max() for p in model.parameters()]).max())
