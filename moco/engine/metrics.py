"""Metrics of a run: lines of metrics.json, the same numbers for TensorBoard, means over steps."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moco.common.errors import DataError
from moco.common.run import METRICS_NAME, RunFolder
from moco.engine.training import Training


class MetricsLog:
    """metrics.json and, with LOG.TENSORBOARD, event files.

    Every LOG.EVERY_ITERS steps a line has the means over the steps since the last one. They are
    saved in the checkpoints, so that a resumed run writes the lines of an uninterrupted one.

    Args:
        folder: of the run; None: another process writes.
    """

    def __init__(self, folder: RunFolder | None, training: Training[Any, Any]) -> None:
        self._folder, self._training = folder, training
        self._steps: list[tuple[float, float]] = []  # loss and accuracy
        self._since = time.monotonic()
        self._events: Any = None
        if folder and training.cfg.LOG.TENSORBOARD:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._events = SummaryWriter(str(folder.path))
            except ImportError:
                print("LOG.TENSORBOARD: tensorboard is not installed; see metrics.json")

    def write(self, done: int, values: Mapping[str, float]) -> None:
        """One line for the state after `done` steps."""
        if self._folder is None:
            return
        epoch = done / self._training.steps_per_epoch
        self._folder.log({"iteration": done, "epoch": epoch, **values})
        if self._events:
            for name, value in values.items():
                self._events.add_scalar(name, value, done)

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
        last: dict[str, tuple[int, float]] = {}
        if self._folder is not None and (path := self._folder.path / METRICS_NAME).exists():
            for line in path.read_text().splitlines():
                values = json.loads(line)
                last |= {name: (values["iteration"], value) for name, value in values.items()}
        return last

    def close(self) -> None:
        """Write what the event files have not written yet."""
        if self._events:
            self._events.close()

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self._steps), "seconds": time.monotonic() - self._since}

    def resume(self, path: Path, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; those of earlier versions have no means.

        Raises:
            DataError: malformed.
        """
        try:
            saved = state.get("step_log", self.state_dict())
            self._steps = [(float(loss), float(accuracy)) for loss, accuracy in saved["values"]]
            self._since = time.monotonic() - float(saved["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: a malformed 'step_log'") from error
