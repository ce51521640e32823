"""HTML page of a suite that is being computed.

The progress is written every 10 seconds. The tables are made again when a run has ended, in a
process of its own: that takes seconds and hundreds of MiB, and its failure does not stop the suite.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.report.progress import Progress
from benchmarks.suites import children
from benchmarks.suites.forecast import Forecast, Speeds, estimate, known_speeds
from benchmarks.suites.runs import DONE, FAILED, QUEUED, RUNNING, STOPPED, WAITING, Run, State
from moco.common.errors import printable
from moco.common.files import atomic_write_text
from moco.common.progress import format_seconds
from moco.engine.stop import signals_by_name

EVERY_SECONDS = 10.0
REST = 10  # pause after the tables, in multiples of the time that they took
ORDER = (DONE, RUNNING, QUEUED, STOPPED, WAITING, FAILED)
# State of a run → maximum number of runs that the page lists by name, the next ones first.
LISTED = {FAILED: None, RUNNING: None, QUEUED: 100, STOPPED: 100, WAITING: 20}


class Live:
    """Context manager that keeps the page up to date while the suite's runner calls `update`.

    Args:
        name: Name of the suite.
        runs: Runs of the suite.
        refresh: Picklable function that makes the tables of finished runs and returns the page.
        page: Path of the page.
    """

    def __init__(
        self, name: str, runs: Sequence[Run], refresh: Callable[[Progress], str], page: Path
    ) -> None:
        self._name, self._runs, self._refresh, self._page = name, runs, refresh, page
        self._progress: Progress | None = None
        self._ended = 0
        self._closing = threading.Event()
        self._worker = threading.Thread(target=self._work, name="page", daemon=True)

    def __enter__(self) -> "Live":
        self._worker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.pause()

    def update(self, states: Mapping[str, State], forecast: Forecast, speeds: Speeds) -> None:
        """Record the suite's progress, for the next page."""
        self._progress = describe(self._name, self._runs, states, forecast, speeds)
        self._ended = sum(state.settled for state in states.values())

    def pause(self) -> None:
        """Write no more pages; wait for tables that are being made."""
        self._closing.set()
        self._worker.join()

    def _work(self) -> None:
        # Only the runner's main thread may handle Ctrl-C.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals_by_name("SIGINT"))
        page, made, warned = "", -1, False
        start = not_before = 0.0
        making: Future[str] | None = None
        with ThreadPoolExecutor(1, "tables") as pool:
            while not self._closing.wait(EVERY_SECONDS if made >= 0 else 0.1):
                if self._progress is None:
                    continue
                try:
                    if making is not None and making.done():
                        not_before = time.monotonic() + REST * (time.monotonic() - start)
                        future, making = making, None
                        page = future.result()
                    if making is None and made != self._ended and time.monotonic() >= not_before:
                        made, start = self._ended, time.monotonic()
                        making = pool.submit(children.call, self._refresh, self._progress)
                    if page:
                        self._write(page, self._progress)
                except Exception as error:  # a page is not worth stopping the suite for
                    if not warned:
                        reason = printable(" ".join(f"{type(error).__name__}: {error}".split()))
                        note = f"note: the page cannot be written ({reason}); the suite continues"
                        print(note, file=sys.stderr)
                    warned = True

    def _write(self, page: str, progress: Progress) -> None:
        from benchmarks.report.render import with_progress

        atomic_write_text(self._page, with_progress(page, progress))


def describe(
    name: str,
    runs: Sequence[Run],
    states: Mapping[str, State],
    forecast: Forecast,
    speeds: Speeds,
) -> Progress:
    """Summarize the states of a suite's runs for its page."""
    of_runs = [(run, states.get(run.name, State(WAITING))) for run in runs]
    kinds = [state.kind for _, state in of_runs]
    left = "nothing is running"
    if RUNNING in kinds or QUEUED in kinds:
        left = f"about {format_seconds(forecast.seconds_left)} left"
        left += ", and the time in the queue" if QUEUED in kinds else ""
    known = known_speeds(runs, states, speeds)
    listed = [
        (run.title, state.kind, run.fraction(state), _left(run, state, known), state.text)
        for kind in (FAILED, RUNNING, QUEUED, STOPPED, WAITING)
        for run, state in [each for each in of_runs if each[1].kind == kind][: LISTED[kind]]
    ]
    counts = {kind: kinds.count(kind) for kind in ORDER if kind in kinds}
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Progress(name, forecast.done, left, counts, listed, at)


def _left(run: Run, state: State, speeds: Speeds) -> str:
    seconds = estimate(run, speeds).seconds
    if seconds is None or state.settled:
        return ""
    return f"about {format_seconds(seconds * (1 - run.fraction(state)))} left"
