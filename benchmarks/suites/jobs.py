"""A handful of dependent processes on a few cores, one thread each, under one progress bar.

Each job is an ordinary command line whose output goes to its own log file. How far a job has come
is read from the `metrics.json` that it writes; nothing else passes between the processes.

Beside its log is a lock file that a job's process holds. Where a call is killed with SIGKILL its
processes continue, and the next call takes them over instead of starting others beside them.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from benchmarks.suites import locks as claims
from benchmarks.suites.locks import Claim
from moco.common.errors import UserError
from moco.common.progress import LINE_EVERY_SECONDS, format_seconds
from moco.engine import stop

POLL_SECONDS = 0.3
STOP_SECONDS = 30.0
LOCK_ENDING = ".lock"
TAIL_BYTES = 1 << 18  # the AP of each of a thousand classes fits on one line
# Torch and its libraries read these; more threads on one small job only get in each other's way.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        command: called when the job starts, because it may name a file that an earlier job makes.
        log: receives stdout and stderr.
        expected_seconds: on one core; only the time left depends on it.
        after: names of jobs that must be done first.
        metrics: file of JSON lines with `iteration`, and the number of `iterations` in all.
        is_done: whether the job needs no process, asked after one of an earlier call has ended.
    """

    name: str
    command: Callable[[], Sequence[str]]
    log: Path
    expected_seconds: float
    after: tuple[str, ...] = ()
    metrics: Path | None = None
    iterations: int = 0
    is_done: Callable[[], bool] = lambda: False

    @property
    def lock(self) -> Path:
        return self.log.with_suffix(LOCK_ENDING)

    def fraction(self) -> float:
        """Share of the iterations that the job has logged, 0..1."""
        if self.metrics is None or self.iterations < 1:
            return 0.0
        return min(max(last_iteration(self.metrics) / self.iterations, 0.0), 1.0)


class JobFailed(UserError):
    """A process ended with an error; carries its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _Orphan:
    """The process of an earlier call that was killed, known by the lock that it holds."""

    def __init__(self, lock: Path) -> None:
        self._lock = lock

    def poll(self) -> int | None:
        return None if claims.held(self._lock) else 0

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def wait(self, timeout: float = math.inf) -> None:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self._lock), timeout)
            time.sleep(POLL_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        pid = claims.read(self._lock).get("pid")
        if pid and self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass
class _Running:
    process: "subprocess.Popen[bytes] | _Orphan"
    log: IO[bytes]
    started: float
    initial: float  # fraction that an earlier, interrupted call had done
    fraction: float
    claim: Claim | None = None  # None: the process of an earlier call has it

    def close(self) -> None:
        self.log.close()
        if self.claim is not None:
            self.claim.release()


@dataclass
class _Board:
    """What is known of the whole: finished and running jobs, and their speed."""

    jobs: Sequence[Job]
    workers: int
    seconds: dict[str, float] = field(default_factory=dict)
    running: dict[str, _Running] = field(default_factory=dict)
    finished_work: float = 0.0  # expected seconds of what finished jobs did in this call

    def speed(self, now: float) -> float:
        """Seconds that a job takes here per second that was expected."""
        taken, expected = sum(self.seconds.values()), self.finished_work
        for job in self.jobs:
            run = self.running.get(job.name)
            if run is not None and run.fraction - run.initial > 0.1:
                taken += now - run.started
                expected += (run.fraction - run.initial) * job.expected_seconds
        return taken / expected if expected else 1.0

    def done(self) -> float:
        """Share of the expected work that is done, 0..1."""
        total = sum(job.expected_seconds for job in self.jobs)
        done = 0.0
        for job in self.jobs:
            run = self.running.get(job.name)
            share = 1.0 if job.name in self.seconds else run.fraction if run else 0.0
            done += share * job.expected_seconds
        return done / total if total else 1.0

    def left(self, now: float) -> float:
        """Seconds until everything is done."""
        speed = self.speed(now)
        left: dict[str, float] = {}
        for job in self.jobs:
            if job.name not in self.seconds:
                run = self.running.get(job.name)
                left[job.name] = job.expected_seconds * speed * (1 - (run.fraction if run else 0))
        return time_left(self.jobs, left, set(self.running), self.workers)

    def text(self) -> str:
        names = [
            f"{name} {100 * run.fraction:.0f}%" if run.fraction else name
            for name, run in self.running.items()
        ]
        return ", ".join(names)


def run_jobs(
    jobs: Sequence[Job], workers: int, environment: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Run all jobs, at most `workers` at a time, in order as far as `after` allows.

    Returns:
        Wall seconds of each job.

    Raises:
        JobFailed: a process failed; its last line and its log are named, and the others stopped.
        Preempted, KeyboardInterrupt: SIGTERM or SIGHUP, or Ctrl-C; all processes were stopped.
    """
    board = _Board(jobs, workers)
    env = {**os.environ, **ONE_THREAD, "MOCO_PROGRESS": "off", **(environment or {})}
    display = Display("quickstart")
    before = {
        number: signal.signal(number, _leave)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    }
    try:
        while len(board.seconds) < len(jobs):
            _start_ready(board, env)
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            for job in jobs:
                if job.name in board.running:
                    _look_after(board, job, now)
            display.show(board.done(), board.left(now), board.text())
    finally:
        display.close()
        _stop(board.running.values())
        for number, handler in before.items():
            signal.signal(number, handler)
    return board.seconds


def processes_left(logs: Path) -> list[str]:
    """Jobs with logs in a folder whose processes outlived the call that started them."""
    return sorted(p.stem for p in logs.glob(f"*{LOCK_ENDING}") if claims.held(p))


def time_left(
    jobs: Sequence[Job], left: Mapping[str, float], running: Collection[str], workers: int
) -> float:
    """Seconds until all jobs in `left` (name → seconds of work) are done.

    Plays the schedule of `run_jobs` forward: running jobs keep their slot, others start in
    order when a slot is free and what they wait for is done.
    """
    waiting = [job for job in jobs if job.name in left and job.name not in running]
    ends = {name: left[name] for name in running if name in left}
    now, undone = 0.0, set(left)
    while waiting or ends:
        for job in list(waiting):
            if len(ends) < workers and not undone & set(job.after):
                waiting.remove(job)
                ends[job.name] = now + left[job.name]
        now = min(ends.values())
        for name in [name for name, end in ends.items() if end <= now]:
            del ends[name]
            undone.discard(name)
    return now


def last_line(log: Path, start: int = 0) -> str:
    """The line that says what went wrong: the last `error:` line, else the last line.

    Args:
        start: bytes of the log that belong to an earlier process.
    """
    with open(log, "rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1].removeprefix("error: ").strip()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    stop.end(
        number, f"stopped by {signal.Signals(number).name}; the same command continues from here"
    )


def _start_ready(board: _Board, env: Mapping[str, str]) -> None:
    for job in board.jobs:
        if len(board.running) >= board.workers:
            return
        if job.name in board.seconds or job.name in board.running:
            continue
        if all(name in board.seconds for name in job.after):
            claim = Claim.take(job.lock)
            log = open(job.log, "ab")  # noqa: SIM115 - closed when the process ends
            process: subprocess.Popen[bytes] | _Orphan = _Orphan(job.lock)
            if claim is None:
                note = "is still computed by a process of an earlier call that was killed"
                print(f"note: {job.name} {note}; waiting for it", file=sys.stderr, flush=True)
            else:
                log.truncate(0)
                process = subprocess.Popen(
                    job.command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(env),
                    pass_fds=[claim.fd],
                )
                claim.write({"pid": process.pid})
            done, now = job.fraction(), time.monotonic()
            board.running[job.name] = _Running(process, log, now, done, done, claim)


def _look_after(board: _Board, job: Job, now: float) -> None:
    run = board.running[job.name]
    run.fraction = job.fraction()
    code = run.process.poll()
    if code is None:
        return
    run.close()
    del board.running[job.name]
    if run.claim is None and not job.is_done():
        return  # it did not come to its end, and is started as any other
    if code != 0:
        reason = f"it was killed by signal {-code}" if code < 0 else last_line(job.log)
        raise JobFailed(
            f"{job.name} failed: {reason}; its log is {job.log}", code if code > 0 else 1
        )
    board.seconds[job.name] = now - run.started
    board.finished_work += (1 - run.initial) * job.expected_seconds


def _stop(running: Collection[_Running]) -> None:
    for run in running:
        run.process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for run in running:
        try:
            run.process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()
        run.close()


def last_iteration(path: Path) -> float:
    """`iteration` of the last whole line of a `metrics.json`, 0 while there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - TAIL_BYTES, 0))
            lines = file.read().splitlines()
    except OSError:
        return 0.0
    for line in reversed(lines):
        try:
            return float(json.loads(line)["iteration"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return 0.0


class Display:
    """A bar on a terminal, a line now and then elsewhere, silent with MOCO_PROGRESS=off."""

    def __init__(self, name: str, every_seconds: float = LINE_EVERY_SECONDS) -> None:
        self._name, self._bar, self._every_seconds = name, None, every_seconds
        self._silent = os.environ.get("MOCO_PROGRESS") == "off"
        self._last = -math.inf
        if not self._silent and sys.stderr.isatty():
            from tqdm import tqdm

            bar_format = "{desc} {percentage:3.0f}%|{bar}| {elapsed}{postfix}"
            self._bar = tqdm(total=100, desc=name, bar_format=bar_format, dynamic_ncols=True)

    def show(self, done: float, left_seconds: float, text: str) -> None:
        left = f"about {format_seconds(left_seconds)} left"
        if self._bar is not None:
            self._bar.n = 100 * done
            self._bar.set_postfix_str(f"{left}: {text}", refresh=True)
        elif not self._silent and time.monotonic() - self._last >= self._every_seconds:
            self._last = time.monotonic()
            line = f"{self._name}: {100 * done:.0f}%, {left}: {text}"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
