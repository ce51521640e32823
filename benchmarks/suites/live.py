"""The report of a suite while it is computed: made again after each run that ends, and served.

Both happen in threads, so that the scheduler never waits for them and no failure of theirs stops
it. The server answers browsers of this machine only, and what it answers is in memory: no address
leads to a file. The report of many runs takes hundreds of MiB, and is made in a process of its own.
"""

import argparse
import multiprocessing
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.report.progress import Progress
from benchmarks.report.records import Results, Unusable, collect
from benchmarks.suites.forecast import Forecast
from benchmarks.suites.runs import DONE, FAILED, QUEUED, RUNNING, STOPPED, WAITING, Run, State
from moco.common.errors import UserError, printable
from moco.common.progress import format_seconds
from moco.engine.stop import signals_by_name

Returned = TypeVar("Returned")
HOST = "127.0.0.1"
# What a browser on this machine, or at the other end of a tunnel, calls it. Another name is that of
# a web site that had it resolved to this machine.
NAMES = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?", re.IGNORECASE)
EVERY_SECONDS = 10.0  # between two reports, at least
REST = 30  # and this many times the square of the CPU seconds that one takes,
MAX_REST = 200  # or this many times the seconds where that is less
MANY = 1000  # runs
LAST_SECONDS = 15.0  # an open page asks again within them, and gets the final one
FINAL = "the end"  # when the last page was made
ORDER = (DONE, RUNNING, QUEUED, STOPPED, WAITING, FAILED)
# Why a run has no numbers.
UNDONE = {
    FAILED: "failed: {}",
    RUNNING: "unfinished: it is still running",
    STOPPED: "unfinished: it was interrupted",
    WAITING: "unfinished: it was not started",
}


def add_serve(parser: argparse.ArgumentParser) -> None:
    """The argument `--serve`."""
    shown = (
        "show the tables so far, the progress and the time left on a page for browsers of this "
        f"machine, on http://{HOST}:PORT/ (default: a free port)"
    )
    parser.add_argument("--serve", nargs="?", type=int, const=0, metavar="PORT", help=shown)


class Live:
    """While open, the report is kept up to date; whoever computes the suite calls `update`.

    Args:
        name: of the suite.
        runs: of the suite.
        make_page: makes the report of the runs that are done, and returns its page; can be pickled.
        port: to serve the page on; 0: any that is free; None: it is not served.

    Raises:
        UserError: the port is taken.
    """

    def __init__(
        self,
        name: str,
        runs: Sequence[Run],
        make_page: Callable[[Progress], str],
        port: int | None = None,
    ) -> None:
        self._name, self._runs, self._make_page = name, runs, make_page
        self._server = None if port is None else _Server(port)
        self._progress: Progress | None = None
        self._ended = -1
        self._due, self._closing = threading.Event(), threading.Event()
        self._worker = threading.Thread(target=self._work, name="report", daemon=True)

    def __enter__(self) -> "Live":
        self._worker.start()
        if self._server is not None:
            threading.Thread(target=self._server.serve_forever, name="server", daemon=True).start()
            print(f"the report is on http://{HOST}:{self._server.server_port}/", flush=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.pause()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def update(self, states: Mapping[str, State], forecast: Forecast) -> None:
        """Note how far the suite is; the report is made when more runs have ended."""
        self._progress = describe(self._name, self._runs, states, forecast)
        if self._server is not None:
            self._server.progress = self._progress
        ended = sum(state.settled for state in states.values())
        if ended != self._ended:
            self._ended = ended
            self._due.set()

    def pause(self) -> None:
        """Make no more reports; one that is being made is waited for."""
        self._closing.set()
        self._due.set()
        self._worker.join()

    def finish(self, path: Path) -> None:
        """Serve the final page, until a browser that shows the one before has it."""
        if self._server is not None and path.is_file():
            self._server.finish(path.read_text(encoding="utf-8"))

    def _work(self) -> None:
        # Ctrl-C is for the scheduler alone; the process of a report inherits this.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals_by_name("SIGINT"))
        warned = False
        while self._due.wait() and not self._closing.is_set():
            self._due.clear()
            start, progress = time.monotonic(), self._progress
            assert progress is not None
            try:
                page, seconds = of_runs(self._runs, self._make_page, progress)
                if self._server is not None:
                    self._server.show(page, progress.at)
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


class _Server(ThreadingHTTPServer):
    """Of one page and of how far its suite is."""

    progress: Progress | None = None

    def __init__(self, port: int) -> None:
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"--serve {port}: {reason}; give another port, or none") from error
        self._shown = "", ""  # the page, and when it was made
        self._made, self._fetched = threading.Event(), threading.Event()
        self._asked = -LAST_SECONDS

    def show(self, page: str, at: str) -> None:
        self._shown = page, at
        self._made.set()

    def finish(self, page: str) -> None:
        self.show(page, FINAL)
        if time.monotonic() - self._asked < LAST_SECONDS:
            self._fetched.wait(LAST_SECONDS)

    def answer(self, path: str) -> tuple[str, str] | None:
        """The text at an address and when the page was made; None: there is none."""
        from benchmarks.report.render import progress_text

        if path == "/" and self._made.wait(LAST_SECONDS):
            page, at = self._shown
            if at == FINAL:
                self._fetched.set()
            return page, at
        if path == "/progress" and self.progress is not None:
            self._asked = time.monotonic()
            return progress_text(self.progress), self._shown[1]
        return None


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "moco-transfer", ""
    timeout = 30  # seconds that a request may take to come

    def do_GET(self) -> None:
        if not NAMES.fullmatch(self.headers.get("Host", "")):
            self.send_error(403, "Not by this name", f"Expected http://{HOST}:<port>/")
            return
        found = self.server.answer(self.path)
        if found is None:
            self.send_error(404)
            return
        text, at = found[0].encode(), found[1]
        self.send_response(200)
        for name, value in (
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Length", str(len(text))),
            ("Content-Security-Policy", "frame-ancestors 'none'"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cache-Control", "no-store"),
            ("Report-At", at),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text)

    do_HEAD = do_GET  # noqa: N815 - the name that the standard library asks for

    def log_message(self, *arguments: Any) -> None:
        """The terminal is for the suite."""
