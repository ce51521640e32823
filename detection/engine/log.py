"""Logs of a run: log.txt, metrics.json, and the same numbers for its loggers."""

import logging
import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from detection.engine.resuming import WINDOW_ITERS, WRITE_EVERY_ITERS
from moco.common import distributed
from moco.common.run import RunFolder
from moco.engine.metrics import Metrics

logger = logging.getLogger(__name__)

_TIMES = ("time", "data_time")


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Send what `detection` and fvcore log to a file; warnings reach stderr as well.

    Of the main process only.
    """
    handlers: list[logging.Handler] = [logging.NullHandler()]  # else Python prints the warnings
    if distributed.is_main():
        to_file, to_terminal = logging.FileHandler(path, encoding="utf-8"), logging.StreamHandler()
        to_file.setFormatter(logging.Formatter("[%(asctime)s %(name)s] %(levelname)s: %(message)s"))
        to_terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        to_terminal.setLevel(logging.WARNING)
        handlers = [to_file, to_terminal]
    with ExitStack() as stack:
        stack.callback(handlers[0].close)
        for one in map(logging.getLogger, ("detection", "fvcore")):
            stack.callback(one.setLevel, one.level)
            one.setLevel(logging.INFO)
            for handler in handlers:
                one.addHandler(handler)
                stack.callback(one.removeHandler, handler)
        yield


class StepLog(Metrics):
    """Collects values per iteration; writes a line every 20 iterations and at the end.

    Names are Detectron2's: total_loss, the losses, lr, time, data_time, eta_seconds (all in
    seconds), so that its tools read the file.

    Args:
        folder: None on all processes but the main one, where nothing is written.
    """

    def __init__(self, folder: Path | None, max_iter: int) -> None:
        super().__init__(None if folder is None else RunFolder(folder, owner=False))
        self._max_iter = max_iter
        self._windows: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW_ITERS))

    def step(self, iteration: int, values: Mapping[str, float], lr: float) -> None:
        """Note the values of one iteration; `lr` is the rate it was done with."""
        for name, value in values.items():
            self._windows[name].append(value)
        left = self._max_iter - iteration - 1
        if left == 0 or (iteration + 1) % WRITE_EVERY_ITERS == 0:
            medians = {name: statistics.median(w) for name, w in self._windows.items()}
            self.write(iteration, {**medians, "lr": lr, "eta_seconds": medians["time"] * left})

    def recent(self) -> dict[str, list[float]]:
        """The values that the next line is smoothed over, for a checkpoint; without the times."""
        return {name: list(w) for name, w in self._windows.items() if name not in _TIMES}

    def resume(self, recent: Mapping[str, Sequence[float]]) -> None:
        """Take up what `recent` returned."""
        for name, values in recent.items():
            self._windows[name].extend(values)

    def write(self, iteration: int, values: Mapping[str, float], **beside: float) -> None:
        """Write values at once, such as the metrics of an evaluation."""
        super().write(iteration, values, **beside)
        if self._folder is None:
            return
        said = "  ".join(f"{name}: {value:.4g}" for name, value in values.items())
        logger.info("iter: %d  %s", iteration, said)
