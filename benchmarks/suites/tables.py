"""Tables of the runs of a suite, while runs are computed and at the end.

Whenever a run has ended, a child process writes the tables and the page: this takes seconds and
hundreds of MiB, and a failure does not stop the suite.
"""

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report.records import Results, Unusable, collect
from benchmarks.report.style import Progress
from benchmarks.suites import forkserver
from benchmarks.suites.folder import SuiteFolder, remove_stale
from benchmarks.suites.forecast import Forecast, Speeds, estimate, known_speeds
from benchmarks.suites.runs import DONE, FAILED, QUEUED, RUNNING, STOPPED, WAITING, Run, State
from benchmarks.suites.suite import row_of
from benchmarks.suites.until_decided import with_looks
from moco.common.errors import echo, printable
from moco.common.progress import format_seconds

if TYPE_CHECKING:
    from benchmarks.report.report import Report

# State of a run → reason why there are no numbers.
UNDONE = {
    FAILED: "failed: {}",
    RUNNING: "unfinished: it is still running",
    STOPPED: "unfinished: it was interrupted",
    WAITING: "unfinished: it was not started",
}
ORDER = (DONE, RUNNING, QUEUED, STOPPED, WAITING, FAILED)
# State of a run → maximum number of runs that the page lists by name, the next ones first.
LISTED = {FAILED: None, RUNNING: None, QUEUED: 100, STOPPED: 100, WAITING: 20}
REST = 10  # pause after making the tables, in multiples of the time that they took


class TablesSoFar:
    """Context manager that writes the tables of a suite whenever a run has ended.

    Args:
        name: Name of the suite.
        runs: Runs of the suite.
        refresh: Picklable function that writes the tables of the finished runs, and the page.
    """

    def __init__(
        self, name: str, runs: Sequence[Run], refresh: Callable[[Progress], object]
    ) -> None:
        self._name, self._runs, self._refresh = name, runs, refresh
        self._pool = ThreadPoolExecutor(1, "tables")
        self._making: Future[float] | None = None
        self._ended, self._not_before = -1, 0.0
        self._warned = False

    def __enter__(self) -> "TablesSoFar":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()  # waits for tables that are being made
        self._check()

    def update(self, states: Mapping[str, State], forecast: Forecast, speeds: Speeds) -> None:
        """Write the tables if a run has ended since, unless tables are being written."""
        ended = sum(state.settled for state in states.values())
        if self._making is not None and not self._making.done():
            return
        self._check()
        if ended != self._ended and time.monotonic() >= self._not_before:
            self._ended = ended
            progress = describe(self._name, self._runs, states, forecast, speeds)
            self._making = self._pool.submit(self._make, progress)

    def _make(self, progress: Progress) -> float:
        start = time.monotonic()
        forkserver.call(self._refresh, progress)
        end = time.monotonic()
        return end + REST * (end - start)

    def _check(self) -> None:
        """Record when the next tables may be written, or print that the last ones failed."""
        if self._making is None:
            return
        try:
            self._not_before = self._making.result()
        except Exception as error:  # a page is not worth stopping the suite for
            if not self._warned:
                reason = printable(" ".join(f"{type(error).__name__}: {error}".split()))
                note = f"note: the page cannot be written ({reason}); the suite continues"
                print(note, file=sys.stderr)
            self._warned = True
        self._making = None


def refresh_tables(
    out: Path, runs: Sequence[Run], baseline: str | None, progress: Progress
) -> None:
    """Write the tables of the finished runs, and the page with the progress."""
    from benchmarks.report.export import html, write_files
    from benchmarks.report.report import Report, tables_so_far
    from benchmarks.report.style import FORMATS

    results = results_of(runs, reported=())  # the progress on the page lists the others
    report = Report(with_looks(tables_so_far(results, baseline)), results, progress)
    write_files(out, report, FORMATS if report.tables else [html.__name__])


def describe(
    name: str,
    runs: Sequence[Run],
    states: Mapping[str, State],
    forecast: Forecast,
    speeds: Speeds,
) -> Progress:
    """Summarize the states of the runs for the page."""
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


def write_report(
    folder: SuiteFolder, runs: Sequence[Run], baseline: str | None
) -> "tuple[Report, list[Path]]":
    """Write the tables of the finished runs; return the report without plots, and the files."""
    from benchmarks.report.export import write_files
    from benchmarks.report.report import Report, tables_so_far
    from benchmarks.report.style import RESAMPLES

    results = results_of(runs)
    finished = {row_of(each.record.init) for each in results.transfer}
    if finished and baseline in {row_of(each.expected.get("init", "")) for each in runs} - finished:
        instead = "random" if "random" in finished else "nothing"
        echo(f"note: no run of the baseline {baseline} is done; gaps refer to {instead}")
    report = Report(with_looks(tables_so_far(results, baseline, RESAMPLES)), results)
    remove_stale(folder.tables)
    files = write_files(folder.tables, report)
    return replace(report), files


def write_tables(folder: SuiteFolder, runs: Sequence[Run], baseline: str | None) -> None:
    """Write and print the tables of the finished runs."""
    from benchmarks.report.export import format_paths, to_terminal

    report, files = write_report(folder, runs, baseline)
    if not report.tables:
        print("no run is done, so there is no table")
        return
    print(to_terminal(report, color=sys.stdout.isatty()))
    print(format_paths(files))


def results_of(runs: Sequence[Run], reported: Collection[str] = tuple(UNDONE)) -> Results:
    """Read the records of the finished runs; other files in their folders are ignored.

    Args:
        runs: Runs of the suite.
        reported: States of unfinished runs that the result lists with the reason of absence.
    """
    compared = [run for run in runs if run.product is None and not run.in_grid]
    states = [(run.folder, run.state()) for run in compared]
    done = [folder for folder, state in states if state.kind == DONE]
    found = collect(done) if done else Results((), (), ())
    undone = [
        Unusable(folder, UNDONE[state.kind].format(state.text))
        for folder, state in states
        if state.kind in reported
    ]
    return Results(found.transfer, found.pretraining, tuple(undone))
