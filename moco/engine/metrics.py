"""Metrics of a run: lines of metrics.json, the same numbers for its loggers, means over steps."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from moco.common.cfgnode import flatten
from moco.common.errors import DataError
from moco.common.run import RunFolder, metrics_lines
from moco.engine.loggers import Loggers
from moco.engine.training import Training


class Metrics:
    """metrics.json and, once they are open, the loggers of LOG.LOGGERS.

    Args:
        folder: of the run; None: another process writes.
    """

    def __init__(self, folder: RunFolder | None) -> None:
        self._folder = folder
        self._loggers: Loggers | None = None

    def open(self, cfg: CfgNode) -> None:
        """Open the loggers of a run that nothing can refuse any more; raises UserError."""
        if self._folder is not None:
            self._loggers = Loggers(cfg.LOG.LOGGERS, self._folder.path, flatten(cfg))

    def write(self, iteration: int, values: Mapping[str, float], **beside: float) -> None:
        """One line; what is `beside` the values is for metrics.json alone."""
        if self._folder is not None:
            self._folder.log({"iteration": iteration, **beside, **values})
        if self._loggers is not None:
            self._loggers.log(values, iteration)

    def close(self) -> None:
        """See `Loggers.close`."""
        if self._loggers is not None:
            self._loggers.close()


class MetricsLog(Metrics):
    """Metrics by step of the loop.

    Every LOG.EVERY_ITERS steps a line has the means over the steps since the last one. They are
    saved in the checkpoints, so that a resumed run writes the lines of an uninterrupted one.
    """

    def __init__(self, folder: RunFolder | None, training: Training[Any, Any]) -> None:
        super().__init__(folder)
        self._training = training
        self._steps: list[tuple[float, float]] = []  # loss and accuracy
        self._since = time.monotonic()

    def write(self, iteration: int, values: Mapping[str, float], **beside: float) -> None:
        """One line for the state after this many steps."""
        epoch = iteration / self._training.steps_per_epoch
        super().write(iteration, values, epoch=epoch, **beside)

    def add(self, step: int, loss: float, accuracy: float, lr: float) -> None:
        """The values of a step; writes a line if it is due."""
        self._steps.append((loss, accuracy))
        training, done, count = self._training, step + 1, len(self._steps)
        if done % training.cfg.LOG.EVERY_ITERS and done != training.total_steps:
            return
        now = time.monotonic()
        values = {
            "loss": sum(loss for loss, _ in self._steps) / count,
            training.accuracy_name: sum(accuracy for _, accuracy in self._steps) / count,
            "lr": lr,
            "images_per_second": count * training.batch_size / (now - self._since),
        }
        self.write(done, values)
        self._steps.clear()
        self._since = now

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent on training."""
        self._since += seconds

    def last(self) -> dict[str, tuple[int, float]]:
        """For each name the last line's iteration and value."""
        lines = metrics_lines(self._folder.path) if self._folder else None
        return {
            name: (line["iteration"], value) for line in lines or () for name, value in line.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self._steps), "seconds": time.monotonic() - self._since}

    def resume(self, path: Path, state: Mapping[str, Any]) -> None:
        """Continue the means of a checkpoint.

        Raises:
            DataError: malformed.
        """
        try:
            saved = state["step_log"]
            self._steps = [(float(loss), float(accuracy)) for loss, accuracy in saved["values"]]
            self._since = time.monotonic() - float(saved["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: a malformed 'step_log'") from error
