"""Metrics of a run: lines of metrics.json, loggers, means over steps."""

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
    """Writer of metrics.json and, once they are open, of the loggers of LOG.LOGGERS.

    Args:
        folder: Folder of the run; None on processes that do not write.
    """

    def __init__(self, folder: RunFolder | None) -> None:
        self._folder = folder
        self._loggers: Loggers | None = None

    def open(self, cfg: CfgNode) -> None:
        """Open the loggers of a run that has passed all checks.

        Raises:
            UserError: If a logger cannot be opened.
        """
        if self._folder is not None:
            self._loggers = Loggers(cfg.LOG.LOGGERS, self._folder.path, flatten(cfg))

    def write(self, iteration: int, values: Mapping[str, float], **extra: float) -> None:
        """Write one line; `extra` values go to metrics.json only."""
        if self._folder is not None:
            self._folder.log({"iteration": iteration, **extra, **values})
        if self._loggers is not None:
            self._loggers.log(values, iteration)

    def close(self) -> None:
        """Close the loggers; see `Loggers.close`."""
        if self._loggers is not None:
            self._loggers.close()


class MetricsLog(Metrics):
    """Metrics of the training loop.

    A line every LOG.EVERY_ITERS steps has the means over the steps since the last line. Pending
    values are saved in checkpoints, so that a resumed run writes the lines of an uninterrupted one.
    """

    def __init__(self, folder: RunFolder | None, training: Training[Any, Any]) -> None:
        super().__init__(folder)
        self._training = training
        self._steps: list[tuple[float, float]] = []  # loss and accuracy
        self._since = time.monotonic()

    def write(self, iteration: int, values: Mapping[str, float], **extra: float) -> None:
        """Write one line for the state after `iteration` steps, with the epoch."""
        epoch = iteration / self._training.steps_per_epoch
        super().write(iteration, values, epoch=epoch, **extra)

    def add(self, step: int, loss: float, accuracy: float, lr: float) -> None:
        """Add the values of a step and write a line if it is due."""
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
        """Exclude time that was not spent on training from the speed."""
        self._since += seconds

    def last(self) -> dict[str, tuple[int, float]]:
        """Return the iteration and value of the last line that has each name."""
        lines = metrics_lines(self._folder.path) if self._folder else None
        return {
            name: (line["iteration"], value) for line in lines or () for name, value in line.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the pending values for a checkpoint."""
        return {"values": list(self._steps), "seconds": time.monotonic() - self._since}

    def resume(self, path: Path, state: Mapping[str, Any]) -> None:
        """Restore the pending values of a checkpoint.

        Raises:
            DataError: If they are malformed.
        """
        try:
            saved = state["step_log"]
            self._steps = [(float(loss), float(accuracy)) for loss, accuracy in saved["values"]]
            self._since = time.monotonic() - float(saved["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: a malformed 'step_log'") from error
