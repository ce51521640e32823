"""Log of a run's steps in metrics.json, and the registry of loggers that receive the same values.

Each entry of LOGGERS, registered under its name in LOG.LOGGERS, is a function that opens a
`Logger`. Its arguments are the folder of the run, the configuration (flat), and the id under which
an interrupted run was logged ("" for a new run).
"""

import json
import logging
import math
import os
import re
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from moco.common.cfgnode import flatten
from moco.common.errors import UserError, lookup
from moco.common.files import atomic_write_json, read_text
from moco.common.run import LOGGERS_NAME, RunFolder

KEY = "LOG.LOGGERS"
PROJECT = "moco-transfer"  # unless the environment names another
LOGGERS = Registry("LOGGERS")


class Logger(NamedTuple):
    """Open logger.

    Attributes:
        log: Function that logs values, named as in metrics.json, at an iteration.
        close: Function that closes the logger; its argument is whether the run is finished.
        run_id: Id by which a resumed run continues the log; "" if none is needed.
    """

    log: Callable[[Mapping[str, float], int], None]
    close: Callable[[bool], None]
    run_id: str = ""


@LOGGERS.register()
def tensorboard(folder: Path, config: Mapping[str, Any], run_id: str) -> Logger:
    """Write event files to the run's folder."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))

    def log(values: Mapping[str, float], iteration: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)

    return Logger(log, lambda done: writer.close())


@LOGGERS.register()
def wandb(folder: Path, config: Mapping[str, Any], run_id: str) -> Logger:
    """Log to Weights & Biases; the variables WANDB_* set account, project and mode."""
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=folder.name,
        dir=folder,
        id=run_id or None,
        resume="allow",
        settings=wandb.Settings(console="off"),
    )
    run.config.update(dict(config), allow_val_change=True)

    def log(values: Mapping[str, float], iteration: int) -> None:
        if iteration >= run.step:  # a resumed run repeats earlier iterations, with the same values
            run.log(dict(values), step=iteration)

    return Logger(log, lambda done: run.finish(exit_code=0 if done else 1), run.id)


@LOGGERS.register()
def mlflow(folder: Path, config: Mapping[str, Any], run_id: str) -> Logger:
    """Log to MLflow; the variables MLFLOW_* set server and experiment."""
    import mlflow

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    experiment = mlflow.set_experiment(name).experiment_id
    run = mlflow.start_run(run_id or None, experiment_id=experiment, run_name=folder.name)
    mlflow.log_params({} if run_id else dict(config))  # in batches that a server accepts

    def log(values: Mapping[str, float], iteration: int) -> None:
        named = {re.sub(r"[^\w\-./ :]", "_", name): value for name, value in values.items()}
        mlflow.log_metrics(named, step=iteration)

    def close(done: bool) -> None:
        mlflow.end_run("FINISHED" if done else "KILLED")

    return Logger(log, close, run.info.run_id)


def check_loggers(names: Collection[str]) -> None:
    """Check that all loggers are registered; raise UserError otherwise."""
    for name in names:
        lookup(LOGGERS, name, KEY)


class Loggers:
    """Loggers of a run; a logger that fails is dropped with a warning.

    Args:
        names: Names in LOG.LOGGERS.
        folder: Folder of the run, which stores the ids of the loggers.
        config: Configuration of the run, flat.

    Raises:
        UserError: If a logger cannot be opened.
    """

    def __init__(self, names: Collection[str], folder: Path, config: Mapping[str, Any]) -> None:
        self._open: dict[str, Logger] = {}
        earlier = _read_ids(folder / LOGGERS_NAME)
        for name in names:
            try:
                opened = lookup(LOGGERS, name, KEY)(folder, config, earlier.get(name, ""))
            except Exception as error:
                self.close()
                raise UserError(f"{KEY}: {_why(name, error)}") from error
            self._open[name] = opened
        ids = {name: logger.run_id for name, logger in self._open.items() if logger.run_id}
        if earlier | ids != earlier:
            atomic_write_json(folder / LOGGERS_NAME, earlier | ids)

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        """Log the values of an iteration to all loggers."""
        for name, logger in list(self._open.items()):
            self._try(name, logger.log, values, iteration)

    def close(self) -> None:
        """Close all loggers; while an exception propagates, the run counts as unfinished."""
        done = sys.exc_info()[0] is None
        for name, logger in list(self._open.items()):
            self._try(name, logger.close, done)
        self._open.clear()

    def _try(self, name: str, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            del self._open[name]
            reason = " ".join(str(error).split())[:200]
            print(f"warning: {KEY}: {name} failed and is no longer used ({reason})", flush=True)


Point = tuple[int, float]  # an iteration and its value


class StepLog:
    """Log of a run's steps in metrics.json and, once they are open, in the loggers of LOG.LOGGERS.

    A line has values smoothed over the latest iterations. A value is written in the line of the
    last iteration that has the value, so a value that is logged occasionally gets its own line.

    Args:
        folder: Folder of the run; None on processes that do not write.
        smooth: Function from the values of several iterations to one.
        window: Number of iterations to smooth over; None for those since the last line.
        extra: Function from an iteration to further values for the line in metrics.json.
        text: Logger that receives every line as text; None for no text.

    Attributes:
        recent: Points over which the next line is smoothed, by name.
        written: Iteration of the newest line, -1 before the first.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        smooth: Callable[[list[float]], float],
        window: int | None = None,
        extra: Callable[[int], Mapping[str, float]] = lambda iteration: {},
        text: logging.Logger | None = None,
    ) -> None:
        self._folder, self._smooth, self._window = folder, smooth, window
        self._extra, self._text = extra, text
        self._loggers: Loggers | None = None
        self.recent: dict[str, deque[Point]] = defaultdict(lambda: deque(maxlen=window))
        self.written = -1

    def open(self, cfg: CfgNode) -> None:
        """Open the loggers of a run that has passed all checks.

        Raises:
            UserError: If a logger cannot be opened.
        """
        if self._folder is not None:
            self._loggers = Loggers(cfg.LOG.LOGGERS, self._folder.path, flatten(cfg))

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Add the values of an iteration."""
        for name, value in values.items():
            self.recent[name].append((iteration, value))

    def write_smoothed(self, iteration: int, latest: Mapping[str, float]) -> None:
        """Write the smoothed values that are new since the last call.

        Args:
            iteration: Newest iteration.
            latest: Values of that iteration that are not smoothed.
        """
        lines: dict[int, dict[str, float]] = defaultdict(dict)
        for name, points in self.recent.items():
            last = points[-1][0]
            if last > self.written:
                first = self.written if self._window is None else last - self._window
                lines[last][name] = self._smooth(select_values(points, first))
        lines[iteration] |= latest
        for at in sorted(lines):
            self.write(at, lines[at])
        self.written = iteration
        if self._window is None:
            self.recent.clear()

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Write values immediately, such as the metrics of an evaluation."""
        if self._folder is not None:
            self._folder.log({"iteration": iteration, **self._extra(iteration), **values})
            if self._text is not None:
                listed = "  ".join(f"{name}: {value:.4g}" for name, value in values.items())
                self._text.info("iter: %d  %s", iteration, listed)
        if self._loggers is not None:
            self._loggers.log(values, iteration)

    def close(self) -> None:
        """Close the loggers; see `Loggers.close`."""
        if self._loggers is not None:
            self._loggers.close()


def select_values(points: Iterable[Point], after: float = -math.inf) -> list[float]:
    """Return the values of the points after an iteration."""
    return [value for iteration, value in points if iteration > after]


def _why(name: str, error: Exception) -> str:
    if isinstance(error, ImportError):
        extra = f"'moco-transfer[{name}]'" if name in ("wandb", "mlflow") else error.name
        return f"{name} needs a package that is missing; pip install {extra}, or leave {name} out"
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return f"{name} cannot be opened ({reason}); see its documentation, or leave {name} out"


def _read_ids(path: Path) -> dict[str, str]:
    """Read the ids of a run by logger; {} for a new run or an invalid file."""
    try:
        found = json.loads(read_text(path))
        return {k: v for k, v in found.items() if re.fullmatch(r"[\w-]{1,128}", v)}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
