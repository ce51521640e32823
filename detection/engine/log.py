"""Logs of a run: log.txt, metrics.json, and the loggers that receive its metrics."""

import logging
import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from detection.evaluation.metrics import is_evaluation
from moco.common import distributed
from moco.common.run import RunFolder, metrics_lines
from moco.engine.loggers import Metrics

logger = logging.getLogger(__name__)

WRITE_EVERY_ITERS = 20  # Period of the lines of metrics.json, as in Detectron2.
WINDOW_ITERS = 20  # Number of iterations that their values are medians over.

# Name → value, and whether metrics.json is smoothed over it.
Scalars = Mapping[str, tuple[float, bool]]


@contextmanager
def log_file(path: Path, loggers: Sequence[str]) -> Iterator[None]:
    """Send what `loggers` log on the main process to a file; warnings reach stderr as well."""
    # Without a handler, Python prints the warnings.
    handlers: list[logging.Handler] = [logging.NullHandler()]
    if distributed.is_main():
        to_file, to_terminal = logging.FileHandler(path, encoding="utf-8"), logging.StreamHandler()
        to_file.setFormatter(logging.Formatter("[%(asctime)s %(name)s] %(levelname)s: %(message)s"))
        to_terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        to_terminal.setLevel(logging.WARNING)
        handlers = [to_file, to_terminal]
    with ExitStack() as stack:
        stack.callback(handlers[0].close)
        for one in map(logging.getLogger, loggers):
            stack.callback(one.setLevel, one.level)
            one.setLevel(logging.INFO)
            for handler in handlers:
                one.addHandler(handler)
                stack.callback(one.removeHandler, handler)
        yield


def last_written(done: int) -> int:
    """Return the iteration of metrics.json's last line after `done` iterations; -1 without one."""
    return done - 1 - done % WRITE_EVERY_ITERS


def is_evaluated(folder: Path, done: int) -> bool:
    """Return whether metrics.json has an evaluation after `done` iterations."""
    return any(
        line["iteration"] == done - 1 and is_evaluation(line)
        for line in metrics_lines(folder) or ()
    )


Point = tuple[int, float]  # An iteration and a value.
Recent = Mapping[str, Sequence[Point]]  # Values that metrics.json is smoothed over next.


class StepLog(Metrics):
    """Writer of metrics.json: medians of the values of each iteration, every 20 iterations.

    A value is the median over the last 20 iterations, and belongs to the last iteration that has
    one: a value that is logged occasionally has its own line, as in Detectron2. Names are
    Detectron2's, so that its tools read the file: total_loss, the losses, lr, time, data_time,
    eta_seconds (times in seconds).

    Args:
        folder: Folder of the run; None on all processes but the main one, which write nothing.
        max_iter: Number of iterations of the training.
    """

    def __init__(self, folder: Path | None, max_iter: int) -> None:
        super().__init__(None if folder is None else RunFolder(folder, owner=False))
        self._max_iter = max_iter
        self._windows: dict[str, deque[Point]] = defaultdict(lambda: deque(maxlen=WINDOW_ITERS))
        self._written = -1  # The newest iteration that has a line.

    def step(
        self, iteration: int, values: Mapping[str, float], scalars: Scalars, *, lr: float
    ) -> None:
        """Record the values of one iteration.

        Args:
            iteration: Number of the iteration.
            values: Values by name.
            scalars: Values that the model itself logged, and whether they are smoothed.
            lr: Learning rate of the iteration.
        """
        for name, value in values.items():
            self._windows[name].append((iteration, value))
        for name, (value, is_smoothed) in scalars.items():
            if not is_smoothed:
                self._windows[name].clear()
            self._windows[name].append((iteration, value))
        left = self._max_iter - iteration - 1
        if left and (iteration + 1) % WRITE_EVERY_ITERS:
            return
        lines: dict[int, dict[str, float]] = defaultdict(dict)
        for name, window in self._windows.items():
            last = window[-1][0]
            if last > self._written:
                recent = [value for at, value in window if at > last - WINDOW_ITERS]
                lines[last][name] = statistics.median(recent)
        lines[iteration] |= {"lr": lr, "eta_seconds": lines[iteration]["time"] * left}
        for at in sorted(lines):
            self.write(at, lines[at])
        self._written = iteration

    def recent(self) -> dict[str, list[Point]]:
        """Return the values that the next lines are smoothed over, except times."""
        return {name: list(w) for name, w in self._windows.items() if not name.endswith("time")}

    def resume(self, recent: Recent, done: int) -> None:
        """Continue after `done` iterations, with the values that `recent` returned."""
        self._written = last_written(done)
        for name, points in recent.items():
            self._windows[name].extend((at, value) for at, value in points)

    def write(self, iteration: int, values: Mapping[str, float], **extra: float) -> None:
        """Write values immediately, such as the metrics of an evaluation."""
        super().write(iteration, values, **extra)
        if self._folder is None:
            return
        text = "  ".join(f"{name}: {value:.4g}" for name, value in values.items())
        logger.info("iter: %d  %s", iteration, text)
