"""What a run on Detectron2 writes while it trains: metrics.json, its loggers, progress."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from detectron2.engine import HookBase
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.utils import comm
from detectron2.utils.events import EventWriter, TensorboardXWriter, get_event_storage

from detection.engine.resuming import WINDOW_ITERS, due
from moco.common.progress import Progress
from moco.engine.metrics import Metrics


class MetricsWriter(EventWriter):
    """Writes what Detectron2's JSONWriter does, and gives the run's loggers the same.

    Deviation: an evaluation is a line at once, under the last iteration that was done. Detectron2
    writes the newest one every 20 iterations, and the last one under one iteration more.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._last, self._evaluated = metrics, -1, set[str]()

    def write(self) -> None:
        new: dict[int, dict[str, float]] = defaultdict(dict)
        latest = get_event_storage().latest_with_smoothing_hint(WINDOW_ITERS)
        for name, (value, iteration) in latest.items():
            if iteration > self._last and name not in self._evaluated:
                new[iteration][name] = value
        for iteration in sorted(new):
            self._metrics.write(iteration, new[iteration])
            self._last = iteration

    def write_evaluation(self, iteration: int, results: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation."""
        self._evaluated.update(results)
        self._metrics.write(iteration, results)

    def close(self) -> None:
        self._metrics.close()


class EvaluationHook(HookBase):
    """Evaluates when Detectron2's hook does, the last time before its writers write, not after.

    Args:
        test: tests the model; its results are on the main process.
        period_iters: between two evaluations; 0: at the end only.
        writers: of the main process; none on the others.
    """

    def __init__(
        self, test: Callable[[], Any], period_iters: int, writers: Sequence[EventWriter]
    ) -> None:
        self._test, self._period_iters, self._writers = test, period_iters, writers
        self._newest = -1

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if due(done, self._period_iters) or done == self.trainer.max_iter:
            self.evaluate(self.trainer.iter)

    def after_train(self) -> None:
        """Evaluate what was resumed after its last iteration."""
        last = self.trainer.max_iter - 1
        if self.trainer.iter > last != self._newest:
            self.evaluate(last)

    def evaluate(self, iteration: int) -> None:
        """Evaluate the model as it is after `iteration`; on all ranks."""
        storage = self.trainer.storage
        storage.iter = self._newest = iteration
        found = flatten_results_dict(self._test() or {})
        results = {name: float(value) for name, value in found.items()}
        storage.put_scalars(**results, smoothing_hint=False)
        for writer in self._writers:
            if isinstance(writer, MetricsWriter):
                writer.write_evaluation(iteration, results)
            elif isinstance(writer, TensorboardXWriter):
                writer.write()
        comm.synchronize()  # the next iteration begins on all ranks together


class ProgressHook(HookBase):
    """Iterations done, speed and time left."""

    def before_train(self) -> None:
        self._progress = Progress(
            self.trainer.max_iter, "fine-tune", unit="it", initial=self.trainer.start_iter
        )
        self._progress.__enter__()

    def after_step(self) -> None:
        self._progress.update()

    def after_train(self) -> None:
        self._progress.__exit__(None, None, None)
