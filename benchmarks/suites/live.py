"""The report of a suite while it is computed: written again after each run that ends.

This happens in a thread, so that the scheduler never waits for it and no failure of it stops the
suite. The report of many runs takes hundreds of MiB, and is made in a process of its own.
"""

import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from typing import TypeVar

from benchmarks.report.progress import Progress
from benchmarks.report.records import Results, Unusable, collect
from benchmarks.suites.forecast import Forecast
from benchmarks.suites.runs import DONE, FAILED, QUEUED, RUNNING, STOPPED, WAITING, Run, State
from moco.common.errors import printable
from moco.common.progress import format_seconds
from moco.engine.stop import signals_by_name

Returned = TypeVar("Returned")
EVERY_SECONDS = 10.0  # between two reports, at least
REST = 30  # and this many times the square of the CPU seconds that one takes,
MAX_REST = 200  # or this many times the seconds where that is less
MANY = 1000  # runs
ORDER = (DONE, RUNNING, QUEUED, STOPPED, WAITING, FAILED)
# Why a run has no numbers.
UNDONE = {
    FAILED: "failed: {}",
    RUNNING: "unfinished: it is still running",
    STOPPED: "unfinished: it was interrupted",
    WAITING: "unfinished: it was not started",
}


class Live:
    """While open, the report is kept up to date; whoever computes the suite calls `update`.

    Args:
        name: of the suite.
        runs: of the suite.
        refresh: writes the report of the runs that are done; can be pickled.
    """

    def __init__(
        self, name: str, runs: Sequence[Run], refresh: Callable[[Progress], object]
    ) -> None:
        self._name, self._runs, self._refresh = name, runs, refresh
        self._progress: Progress | None = None
        self._ended = -1
        self._due, self._closing = threading.Event(), threading.Event()
        self._worker = threading.Thread(target=self._work, name="report", daemon=True)

    def __enter__(self) -> "Live":
        self._worker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.pause()

    def update(self, states: Mapping[str, State], forecast: Forecast) -> None:
        """Note how far the suite is; the report is made when more runs have ended."""
        self._progress = describe(self._name, self._runs, states, forecast)
        ended = sum(state.settled for state in states.values())
        if ended != self._ended:
            self._ended = ended
            self._due.set()

    def pause(self) -> None:
        """Make no more reports; one that is being made is waited for."""
        self._closing.set()
        self._due.set()
        self._worker.join()

    def _work(self) -> None:
        # Ctrl-C is for the scheduler alone; the process of a report inherits this.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals_by_name("SIGINT"))
        warned = False
        while self._due.wait() and not self._closing.is_set():
            self._due.clear()
            start, progress = time.monotonic(), self._progress
            assert progress is not None
            try:
                _, seconds = of_runs(self._runs, self._refresh, progress)
            except Exception as error:  # the suite continues whatever it is
                if not warned:
                    reason = printable(" ".join(f"{type(error).__name__}: {error}".split()))
                    print(f"note: no tables yet ({reason}); the suite continues", file=sys.stderr)
                warned, seconds = True, time.monotonic() - start
            self._closing.wait(rest(seconds))


def rest(seconds: float) -> float:
    """Between a report that took this many CPU seconds and the next one."""
    return max(EVERY_SECONDS, seconds * min(REST * seconds, MAX_REST))


def of_runs(
    runs: Sequence[Run], function: Callable[..., Returned], *arguments: object
) -> tuple[Returned, float]:
    """What a function of a suite's runs returns, and the CPU seconds that it took.

    Of many runs, it is called in a process of its own, so that its memory ends with it.
    """
    if len(runs) < MANY:
        start = time.thread_time()
        return function(*arguments), time.thread_time() - start
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_timed, function, *arguments).result()


def _timed(function: Callable[..., Returned], *arguments: object) -> tuple[Returned, float]:
    return function(*arguments), time.process_time()


def describe(
    name: str, runs: Sequence[Run], states: Mapping[str, State], forecast: Forecast
) -> Progress:
    """What a page shows of the states of a suite's runs."""
    of_runs = [(run, states.get(run.name, State(WAITING))) for run in runs]
    kinds = [state.kind for _, state in of_runs]
    left = "nothing is running"
    if RUNNING in kinds or QUEUED in kinds:
        left = f"about {format_seconds(forecast.seconds_left)} left"
        left += ", and the time in the queue" if QUEUED in kinds else ""
    begun = [
        (run.title, state.kind, run.fraction(state), state.text)
        for kind in (FAILED, RUNNING, QUEUED, STOPPED)
        for run, state in of_runs
        if state.kind == kind
    ]
    counts = {kind: kinds.count(kind) for kind in ORDER if kind in kinds}
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Progress(name, forecast.done, left, counts, begun, at)


def results_of(runs: Sequence[Run], reported: Collection[str] = tuple(UNDONE)) -> Results:
    """The records of the runs that are done, whatever else is in their folders.

    Args:
        reported: states of the others of which it is said why they have no numbers.
    """
    states = [(run.folder, run.state()) for run in runs if run.product is None]
    done = [folder for folder, state in states if state.kind == DONE]
    found = collect(done) if done else Results((), (), ())
    undone = [
        Unusable(folder, UNDONE[state.kind].format(state.text))
        for folder, state in states
        if state.kind in reported
    ]
    return Results(found.transfer, found.pretraining, tuple(undone))
