"""Metrics of a run: lines of metrics.json, the same numbers for TensorBoard, means over steps."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moco.common.errors import DataError
from moco.common.run import METRICS_NAME, RunFolder, drop_metrics


class MetricsLog:
    """metrics.json and, if wanted, the same numbers as event files.

    Args:
        folder: of the run; None: another process writes.
        steps_per_epoch: to tell the epoch of a step.
        tensorboard: write event files where tensorboard is installed.
    """

    def __init__(self, folder: RunFolder | None, steps_per_epoch: int, tensorboard: bool) -> None:
        self._folder, self._steps_per_epoch = folder, steps_per_epoch
        self._events = _event_files(folder.path) if folder and tensorboard else None

    def write(self, done: int, values: Mapping[str, float]) -> None:
        """One line for the state after `done` steps."""
        if self._folder is None:
            return
        self._folder.log({"iteration": done, "epoch": done / self._steps_per_epoch, **values})
        if self._events:
            for name, value in values.items():
                self._events.add_scalar(name, value, done)

    def last(self) -> dict[str, tuple[int, float]]:
        """For each name the last line's iteration and value."""
        last: dict[str, tuple[int, float]] = {}
        if self._folder is not None and (self._folder.path / METRICS_NAME).exists():
            for line in (self._folder.path / METRICS_NAME).read_text().splitlines():
                values = json.loads(line)
                last |= {name: (values["iteration"], value) for name, value in values.items()}
        return last

    def drop_after(self, step: int) -> None:
        """See `moco.common.run.drop_metrics`."""
        if self._folder is not None:
            drop_metrics(self._folder.path, step)

    def close(self) -> None:
        """Write what the event files have not written yet."""
        if self._events:
            self._events.close()


class StepLog:
    """A line of metrics.json every N steps: means over the steps since the last one.

    They are saved in the checkpoints, so that a resumed run writes the lines of an uninterrupted
    one.

    Args:
        metrics: where the lines go. every_iters: LOG.EVERY_ITERS.
        total_steps, batch_size: of the run. accuracy: its name in the lines.
    """

    def __init__(
        self,
        metrics: MetricsLog,
        every_iters: int,
        total_steps: int,
        batch_size: int,
        accuracy: str,
    ) -> None:
        self._metrics, self._accuracy = metrics, accuracy
        self._every, self._total_steps, self._batch_size = every_iters, total_steps, batch_size
        self._values: list[tuple[float, float]] = []
        self._since = time.monotonic()

    def add(self, step: int, loss: float, accuracy: float, lr: float) -> None:
        """The values of a step; writes a line if it is due."""
        self._values.append((loss, accuracy))
        if (step + 1) % self._every and step + 1 != self._total_steps:
            return
        now, steps = time.monotonic(), len(self._values)
        self._metrics.write(
            step + 1,
            {
                "loss": sum(loss for loss, _ in self._values) / steps,
                self._accuracy: sum(accuracy for _, accuracy in self._values) / steps,
                "lr": lr,
                "images_per_second": steps * self._batch_size / (now - self._since),
            },
        )
        self._values.clear()
        self._since = now

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent on training."""
        self._since += seconds

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self._values), "seconds": time.monotonic() - self._since}

    def resume(self, path: Path, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; those of earlier versions have nothing for it."""
        if "step_log" not in state:
            return
        try:
            saved = state["step_log"]
            self._values = [(float(loss), float(accuracy)) for loss, accuracy in saved["values"]]
            self._since = time.monotonic() - float(saved["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: a malformed 'step_log'") from error


def _event_files(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("LOG.TENSORBOARD: tensorboard is not installed; metrics.json has the same numbers")
        return None
    return SummaryWriter(str(folder))
