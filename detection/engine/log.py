"""Logs of a run: log.txt, metrics.json, and the loggers that receive its metrics."""

import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from detection.evaluation.metrics import is_evaluation
from moco.common import distributed
from moco.common.run import RunFolder, metrics_lines
from moco.engine.loggers import Point, StepLog, select_values

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


def is_kept(line: Mapping[str, Any], done: int, max_iter: int) -> bool:
    """Return whether a run resumed after `done` iterations keeps a line of metrics.json."""
    last = done - 1 if done == max_iter or is_evaluation(line) else last_written(done)
    return bool(line["iteration"] <= last)


def is_evaluated(folder: Path, done: int) -> bool:
    """Return whether metrics.json has an evaluation after `done` iterations."""
    return any(
        line["iteration"] == done - 1 and is_evaluation(line)
        for line in metrics_lines(folder) or ()
    )


def open_log(folder: Path | None) -> StepLog:
    """Return a log of medians over the last 20 iterations, as Detectron2's.

    Names are Detectron2's too, so that its tools read metrics.json: total_loss, the losses, lr,
    time, data_time, eta_seconds (times in seconds).

    Args:
        folder: Folder of the run; None on all processes but the main one, which write nothing.
    """
    run = None if folder is None else RunFolder(folder, owner=False)
    return StepLog(run, statistics.median, WINDOW_ITERS, text=logger)


def log_step(
    log: StepLog,
    iteration: int,
    max_iter: int,
    values: Mapping[str, float],
    scalars: Scalars,
    lr: float,
) -> None:
    """Add the values of an iteration to a log, and write lines every 20 iterations.

    Args:
        log: Log of the run.
        iteration: Number of the iteration.
        max_iter: Number of iterations of the training.
        values: Values by name, with `time`.
        scalars: Values that the model itself logged, and whether they are smoothed.
        lr: Learning rate of the iteration.
    """
    for name, (_, is_smoothed) in scalars.items():
        if not is_smoothed:
            log.recent[name].clear()
    log.add(iteration, {**values, **{name: value for name, (value, _) in scalars.items()}})
    left = max_iter - iteration - 1
    if left and (iteration + 1) % WRITE_EVERY_ITERS:
        return
    seconds = statistics.median(select_values(log.recent["time"]))
    log.write_smoothed(iteration, {"lr": lr, "eta_seconds": seconds * left})


def recent_values(log: StepLog) -> dict[str, list[Point]]:
    """Return the values that the next lines are smoothed over, except times."""
    return {name: list(w) for name, w in log.recent.items() if not name.endswith("time")}


def continue_log(log: StepLog, recent: Mapping[str, Sequence[Point]], done: int) -> None:
    """Continue a log after `done` iterations, with the values that `recent_values` returned."""
    log.written = last_written(done)
    for name, points in recent.items():
        log.recent[name].extend((at, value) for at, value in points)
