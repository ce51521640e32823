"""Brings runs to their end: starts, watches, takes over, stops. No run is computed twice.

The truth is on disk: a run is done when its record says so, and being computed while its lock is
held. A scheduler therefore needs no memory of earlier ones, may be killed at any moment, and shares
a folder with others.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace

from benchmarks.suites.executors.base import Executor, Process, Slots
from benchmarks.suites.forecast import Display, Forecast, Speeds, foresee, speed, summary
from benchmarks.suites.keep import ALL, KEEP_SECONDS, remove_checkpoints
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import (
    DONE,
    FAILED,
    MAX_FRUITLESS,
    QUEUED,
    RUNNING,
    Run,
    State,
    fruitless_error,
    why_failed,
)
from moco.common.errors import LockedError, Preempted, UserError
from moco.engine.stop import signals_by_name

POLL_SECONDS = 0.2
SURVEY_SECONDS = 1.0  # between two looks at the runs of others
SHOW_SECONDS = 1.0
REMOTE_SHOW_SECONDS = 10.0  # between two looks at how far jobs on other machines are
REST = 500  # of what is done again and again: this many times as long as it took
SLICE_SECONDS = 0.003  # of CPU time for a look at the runs of others; the next one continues there
AGAIN_SECONDS = 10.0  # before a run is tried again whose folder another process holds
SIGNALS = signals_by_name("SIGTERM", "SIGINT", "SIGHUP")
# A process that ends so was asked to by somebody: it is continued.
INTERRUPTED = (Preempted.exit_code, *(-number for number in SIGNALS))


class RunFailed(UserError):
    """A run failed and ended its plan; carries its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class _Active:
    """A run that this scheduler has started, or whose job it has found in the queue.

    Attributes:
        held: its lock and slots; empty while a job has them, or may take them at any moment.
        log_start: where in the log its process begins.
    """

    run: Run
    process: Process
    held: ExitStack
    log_start: int = 0
    started: float = field(default_factory=time.monotonic)


@dataclass
class Scheduler:
    """Computes every run that is not done.

    Attributes:
        runs: in the order of starting, as far as `Run.after` allows.
        name: of the progress line.
        retry_failed: try failed runs once more; else they are only reported.
        fail_fast: a failure stops the others and raises `RunFailed`.
        measured: speeds of earlier runs on this hardware, for the time left.
        stop_seconds: how long processes may take to save when the scheduler is asked to stop.
        keep: which checkpoints of the runs that are computed stay, see benchmarks/suites/keep.py.
        watch: told how far the runs are, as often as it is shown.
    """

    runs: Sequence[Run]
    executor: Executor
    _: KW_ONLY
    name: str = "suite"
    retry_failed: bool = False
    fail_fast: bool = False
    measured: Speeds = field(default_factory=dict)
    stop_seconds: float = 120.0
    keep: str = ALL
    watch: Callable[[Mapping[str, State], Forecast], None] = lambda states, forecast: None

    def __post_init__(self) -> None:
        self._open = {run.name: run for run in self.runs}  # neither settled nor ours
        self._active: dict[str, _Active] = {}
        self._states: dict[str, State] = {}
        # A failure that came later than this call is not tried again, whoever had it.
        again = self.runs if self.retry_failed else ()
        self._retry = {run.name: run.failure().get("utc") for run in again}
        self._not_before: dict[str, float] = {}
        self._fruitless: dict[str, int] = {}
        self._signals: list[int] = []
        self._stopping = False
        self._next: dict[str, float] = {}  # when something is due again
        self._unseen: list[str] = []  # what is left of a round of looks at the runs of others
        self._smallest = min((run.gpus for run in self.runs), default=0)

    def run(self) -> dict[str, State]:
        """Work until every run is done or failed; returns their states by name.

        Raises:
            Preempted: SIGTERM, SIGINT or SIGHUP came; the runs were asked to save, and have ended.
                Jobs of a cluster stay where they are.
            RunFailed: with `fail_fast`, a run failed.
            UserError: a cluster refuses a job, or the disk is full.
        """
        self._display = Display(self.name)
        with self._noted_signals():
            try:
                while self._open or self._active:
                    if self._signals:
                        name = signal.Signals(self._signals[0]).name
                        left = self.executor.shutdown_message()
                        self._stop()
                        raise Preempted(f"stopped by {name}; {left}")
                    self._reap()
                    self._now_and_then(self._survey, SURVEY_SECONDS)
                    self._start()
                    if not self.executor.remote:  # jobs do that themselves
                        self._now_and_then(self._tidy, KEEP_SECONDS)
                    seconds = REMOTE_SHOW_SECONDS if self.executor.remote else SHOW_SECONDS
                    self._now_and_then(self._show, seconds)
                    if self._open or self._active:
                        time.sleep(POLL_SECONDS)
            except OSError as error:
                where = error.filename or self.runs[0].folder
                raise UserError(
                    f"{where}: {error.strerror or error}; fix that, and the same command continues"
                ) from error
            finally:
                self._display.close()
                self._stop()
        return self._states

    def _settle(self, run: Run, state: State) -> None:
        seen = run.name in self._states  # else it was done before, and is among the measured
        if seen and (own := speed(run, state, DONE)):
            self.measured.setdefault(run.speed_key, []).append(own)
        if seen and state.kind == DONE:
            remove_checkpoints(run.folder, self.keep, done=True)
        self._states[run.name] = state
        self._open.pop(run.name, None)
        if self.fail_fast and not self._stopping and state.kind == FAILED:
            exit_code = int(run.failure().get("exit_code", 1))
            raise RunFailed(f"{run.title} failed: {state.text}", max(exit_code, 1))

    def _now_and_then(self, work: Callable[[], None], seconds: float) -> None:
        """Do something every `seconds`; less often where that takes long, of many runs."""
        name, now = work.__name__, time.monotonic()
        if now >= self._next.get(name, 0.0):
            start = time.thread_time()
            work()
            self._next[name] = now + max(seconds, REST * (time.thread_time() - start))

    def _tidy(self) -> None:
        """Delete the checkpoints of our runs that need not be kept."""
        for active in self._active.values():
            remove_checkpoints(active.run.folder, self.keep, done=False)

    def _survey(self) -> None:
        """Look at the runs that are not ours: at first at all, then at as many as time allows."""
        first, start = not self._states, time.thread_time()
        self._unseen = self._unseen or list(reversed(self._open))
        while self._unseen and (first or time.thread_time() - start < SLICE_SECONDS):
            run = self._open.get(self._unseen.pop())
            if run is None:  # ours by now
                continue
            state = run.state()
            if self._is_over(run, state):
                self._settle(run, state)
            self._states[run.name] = state
            if not state.settled:
                self._adopt(run)
        if first and (
            busy := [run for run in self._open.values() if self._states[run.name].kind == RUNNING]
        ):
            print(
                f"note: {', '.join(run.title for run in busy)}: computed by processes of another "
                "call, which may have been killed; they are waited for",
                file=sys.stderr,
            )

    def _is_over(self, run: Run, state: State) -> bool:
        """Whether there is nothing to start: done, or failed and not to be tried again."""
        if state.kind != FAILED:
            return state.kind == DONE
        may_retry = run.name in self._retry and self._retry[run.name] == run.failure().get("utc")
        return state.foreign or not may_retry

    def _adopt(self, run: Run) -> bool:
        """Watch the job that another scheduler has submitted for a run, if there is one."""
        process = self.executor.adopt(run)
        if process is not None:
            self._active[run.name] = _Active(run, process, ExitStack())
            del self._open[run.name]
        return process is not None

    def _start(self) -> None:
        """Start what there are slots for, in order; a run that is too large now is passed over."""
        too_large = 1 << 30
        try:
            for run in list(self._open.values()):
                if self._signals:
                    return
                if self._smallest >= too_large:
                    break
                if run.gpus >= too_large or not self._may_start(run):
                    continue
                slots = self.executor.reserve(run.gpus)
                if slots is None:
                    too_large = run.gpus
                    continue
                with ExitStack() as held:
                    held.callback(slots.release)
                    lock = Lock.take(run.lock)
                    if lock is None:
                        self._states[run.name] = replace(self._states[run.name], kind=RUNNING)
                    else:
                        held.callback(lock.release)
                        self._start_locked(run, lock, slots, held)
            self.executor.submit()
        finally:
            if self.executor.remote:
                for active in self._active.values():
                    active.held.close()  # so that the jobs can take their locks

    def _may_start(self, run: Run) -> bool:
        if self._states[run.name].kind == RUNNING:
            return False
        for name in run.after:
            if self._states[name].kind == FAILED:
                self._settle(run, State(FAILED, text=f"{name} failed, which it comes after"))
        waits = any(self._states[name].kind != DONE for name in run.after)
        return not waits and time.monotonic() >= self._not_before.get(run.name, 0.0)

    def _start_locked(self, run: Run, lock: Lock, slots: Slots, held: ExitStack) -> None:
        """Start a run, unless another scheduler has ended or submitted it just now."""
        state = run.state(locked=True)
        if self._is_over(run, state):
            self._settle(run, state)
            return
        if self._adopt(run):
            return
        run.forget_failure()
        self._retry.pop(run.name, None)
        run.note_holder(lock)
        argv, remote = tuple(run.argv()), self.executor.remote
        log_start = 0 if remote else run.note_start(argv)
        at = run.iteration()
        process = self.executor.start(run, argv, lock, slots)
        self._active[run.name] = _Active(run, process, held.pop_all(), log_start)
        del self._open[run.name]
        self._states[run.name] = State(QUEUED if remote else RUNNING, at, began_at=at)

    def _reap(self) -> None:
        """Judge the processes that have ended."""
        for name, active in list(self._active.items()):
            code = active.process.poll()
            if code is None:
                continue
            del self._active[name]
            with active.held:
                lock = Lock.take(active.run.lock) if self.executor.remote else None
                if lock is not None:
                    active.held.callback(lock.release)
                if (lock or not self.executor.remote) and active.process.in_charge():
                    self._end(active, code)
                    active.process.forget()
                else:
                    self._open[name] = active.run  # another one judges it, or its next job runs

    def _end(self, active: _Active, code: int) -> None:
        """What a process's end means for its run."""
        run, process = active.run, active.process
        state = run.state(locked=True)
        if state.kind == DONE or (self.executor.remote and run.failure()):
            self._settle(run, state)
            return
        if process.cancelled:
            # Whoever did that does not want it back; the next call submits it again.
            self._states[run.name] = replace(state, text=process.why)
            return
        interrupted = code in INTERRUPTED or (self._stopping and code != 0)
        if (interrupted and not self._is_fruitless(run)) or code == LockedError.exit_code:
            if not interrupted:
                self._not_before[run.name] = time.monotonic() + AGAIN_SECONDS
            self._open[run.name] = run
            self._states[run.name] = state
            return
        vain = fruitless_error(process.why)
        run.fail(vain if interrupted else why_failed(run, code, active.log_start), code)
        self._settle(run, run.state(locked=True))

    def _is_fruitless(self, run: Run) -> bool:
        """Whether a run is interrupted again and again without progress."""
        if self._stopping or run.has_progressed():
            self._fruitless.pop(run.name, None)
            return False
        self._fruitless[run.name] = self._fruitless.get(run.name, 0) + 1
        return self._fruitless[run.name] >= MAX_FRUITLESS

    def _stop(self) -> None:
        """Ask our processes to save and end, and see that they do; a second signal kills them."""
        self._stopping = True
        if self.executor.remote:
            self._active.clear()
            return
        for active in self._active.values():
            active.process.terminate()
        deadline, signals = time.monotonic() + self.stop_seconds, len(self._signals)
        while self._active:
            self._reap()
            if time.monotonic() > deadline or len(self._signals) > max(signals, 1):
                for active in self._active.values():
                    active.process.kill()
            time.sleep(POLL_SECONDS if self._active else 0)

    @contextmanager
    def _noted_signals(self) -> Iterator[None]:
        """While open, a signal only asks `run` to stop."""
        before = {
            number: signal.signal(number, lambda number, _: self._signals.append(number))
            for number in SIGNALS
            # nohup, and the shell for what runs in the background, ignore some of them.
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _show(self) -> None:
        remote = self.executor.remote
        for name, active in self._active.items():
            if remote:
                state = active.run.state()
                # A job that has not taken its run's lock is in the queue.
                if active.process.is_queued() or state.kind not in (RUNNING, DONE):
                    state = State(QUEUED, state.iteration)
            else:
                seconds = time.monotonic() - active.started
                at = active.run.iteration()
                state = replace(self._states[name], iteration=at, seconds=seconds)
            self._states[name] = state
        parallel = self.executor.parallel(max((run.gpus for run in self.runs), default=0))
        forecast = foresee(self.runs, self._states, self.measured, parallel)
        self.watch(self._states, forecast)
        self._display.show(forecast, summary(self.runs, self._states))
