"""The training state of a run on Detectron2: saved when it is due or at a stop, and resumed from.

Detectron2's checkpoints hold the model, the optimizer, the schedule and the iteration. With them
a run continues with other images and random numbers than it would have had. The checkpoints of
this project also hold, for every rank, its random streams and its place in the data, so that a
resumed run is bitwise identical to the uninterrupted one where the kernels are.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detectron2.engine import HookBase
from detectron2.engine.hooks import PeriodicCheckpointer
from detectron2.utils import comm

from detection.d2.loader import ResumableLoader
from detection.d2.log import EvaluationHook
from detection.data.random_state import random_state, restore_random
from detection.engine.resuming import WINDOW_ITERS, check_finite, due, evaluation_is_missing
from detection.modeling.focal_loss import moving_averages, restore_moving_averages
from moco.common.errors import DataError, UserError
from moco.common.files import PathLike
from moco.engine.stop import StopRequest

logger = logging.getLogger(__name__)

STATE_KEY = "standing"  # in a checkpoint


class StoppedError(BaseException):
    """Leaves the loop. No Exception: Detectron2 would log it as the run's failure.

    Attributes:
        number: the signal. iteration: the last one that was done. name: of the checkpoint.
    """

    def __init__(self, number: int, iteration: int, name: str) -> None:
        super().__init__()
        self.number, self.iteration, self.name = number, iteration, name


class EndedError(BaseException):
    """Leaves the loop with an error for the user; no Exception, for the same reason."""

    def __init__(self, error: UserError) -> None:
        super().__init__()
        self.error = error


class CheckpointHook(HookBase):
    """Saves the training state when Detectron2's hook would and before a stop, and restores it.

    It runs on all ranks, after PreciseBN and before the evaluation. The ranks exchange after every
    iteration whether one was told to stop: one number each, where Detectron2 exchanges all losses.

    Args:
        inner: Detectron2's hook; None on ranks other than the first.
        evaluation: the hook; what it misses by a stop it makes up for after --resume.
        period_iters: between two checkpoints (0: at the end only).
        eval_period_iters: between two evaluations (0: at the end only).

    Attributes:
        stop: the signals of this process.
        done: iterations. saved: the iteration after which the newest checkpoint was written.
        resumed: the training state of a checkpoint (`usable_state`); None for a start.
    """

    def __init__(
        self,
        inner: PeriodicCheckpointer | None,
        evaluation: EvaluationHook,
        period_iters: int,
        eval_period_iters: int,
    ) -> None:
        self.inner, self.evaluation = inner, evaluation
        self.period_iters, self.eval_period_iters = period_iters, eval_period_iters
        self.stop: StopRequest | None = None
        self.done = 0
        self.saved = -1
        self.resumed: Mapping[str, Any] | None = None

    def before_train(self) -> None:
        loader: ResumableLoader = self.trainer._trainer.data_loader
        if self.inner is not None:
            self.inner.max_iter = self.trainer.max_iter
        self.done = self.trainer.start_iter
        self._evaluate_if_missed()
        if self.resumed is None:
            return
        mine = self.resumed["ranks"][comm.get_rank()]
        loader.load_state_dict(mine["data"])
        _ = self.trainer._trainer._data_loader_iter  # samples from torch's stream when it begins
        restore_random(mine["random"])
        model = self.trainer._trainer.model
        restore_moving_averages(getattr(model, "module", model), mine["random"])  # within DDP
        if self.done == self.trainer.max_iter:
            return  # nothing to smooth: the last line is there
        for name, values in self.resumed["recent"].items():
            for value, iteration in values:
                self.trainer.storage.put_scalar(name, value, cur_iter=iteration)

    def after_step(self) -> None:
        iteration, done = self.trainer.iter, self.trainer.iter + 1
        self.done = done
        finished = done == self.trainer.max_iter
        number = 0 if finished else self._stop_signal()
        if not (finished or due(done, self.period_iters) or number):
            return
        name = f"model_{iteration:07d}"
        self._save(iteration, name if number else None)
        if number:
            comm.synchronize()  # no rank leaves before the file is there
            raise StoppedError(number, iteration, name)

    def save_unreadable(self, iteration: int) -> None:
        """Save the state after `iteration` before an image ends the run, unless that was done."""
        if self.trainer.start_iter <= iteration < self.trainer.max_iter and iteration > self.saved:
            self._save(iteration, f"model_{iteration:07d}")
            comm.synchronize()

    def _save(self, iteration: int, name: str | None) -> None:
        """On all ranks; under a name, or when and as Detectron2's hook does."""
        inner = self.trainer._trainer
        check_finite(self.trainer.cfg, inner.model, iteration)
        streams = {**random_state(), **moving_averages(inner.model)}
        ranks = comm.gather({"random": streams, "data": inner.data_loader.state_dict()})
        self.saved = iteration
        if self.inner is None:
            return
        state = {"ranks": ranks, "recent": self._recent(iteration)}
        if name is None:
            self.inner.step(iteration, **{STATE_KEY: state})
        else:
            self.inner.save(name, iteration=iteration, **{STATE_KEY: state})

    def _evaluate_if_missed(self) -> None:
        folder, done = Path(self.trainer.cfg.OUTPUT_DIR), self.done
        missing = comm.is_main_process() and evaluation_is_missing(
            folder, done, self.eval_period_iters
        )
        if done < self.trainer.max_iter and any(comm.all_gather(missing)):
            try:
                self.evaluation.evaluate(done - 1)
            except DataError as error:
                raise EndedError(error) from error
            self.trainer.storage.iter = done

    def _stop_signal(self) -> int:
        """The signal that a rank has got, 0 for none; the same on all ranks."""
        received = None if self.stop is None else self.stop.received
        return max(comm.all_gather(int(received or 0)))

    def _recent(self, iteration: int) -> dict[str, list[tuple[float, int]]]:
        """The values that the next lines of metrics.json are smoothed over."""
        storage, first = self.trainer.storage, iteration - WINDOW_ITERS
        # Not the time: a process has none in its first iteration, and would write it again.
        hints = storage.smoothing_hints()
        smoothed = [name for name, hint in hints.items() if hint and name != "time"]
        return {
            name: [(float(v), int(i)) for v, i in storage.history(name).values() if i > first]
            for name in smoothed
        }


def usable_state(state: Any, path: PathLike, loader: ResumableLoader) -> Mapping[str, Any] | None:
    """The training state of a checkpoint; None, with a warning, where it does not fit this run."""
    if not isinstance(state, dict):
        reason = "Detectron2 itself wrote it"
    elif len(state["ranks"]) != comm.get_world_size():
        reason = f"{len(state['ranks'])} processes wrote it, now there are {comm.get_world_size()}"
    elif not loader.fits(state["ranks"][comm.get_rank()]["data"]):
        reason = "DATALOADER.NUM_WORKERS was 0 and is not, or was not and is"
    else:
        return state
    logger.warning("%s: resumed with other images and random numbers (%s)", path, reason)
    return None
