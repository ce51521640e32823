"""Runner of a suite: starts the runs that are ready, watches them, stops them.

A folder has one runner at a time. Processes on this machine end with the runner, so that the next
runner needs only the files: a run with a complete record is done, and any other run resumes from
its checkpoint.
"""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace

from benchmarks.suites import locks
from benchmarks.suites.checkpoints import ALL, KEEP_SECONDS, remove_checkpoints
from benchmarks.suites.executors.base import Executor, Process
from benchmarks.suites.forecast import (
    Display,
    Forecast,
    Speeds,
    format_progress,
    make_forecast,
    speed,
)
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import (
    DONE,
    FAILED,
    MAX_INTERRUPTIONS,
    QUEUED,
    RUNNING,
    Run,
    State,
    interrupted_error,
    why_failed,
)
from moco.common.errors import LockedError, Preempted, UserError
from moco.engine.stop import signals_by_name

POLL_SECONDS = 0.2
SHOW_SECONDS = 1.0
REMOTE_SHOW_SECONDS = 10.0  # interval of reading the progress of jobs on other machines
REST = 500  # minimum pause of a periodic task, in multiples of the time that it took
AGAIN_SECONDS = 10.0  # pause before retrying a run whose folder another process holds
SIGNALS = signals_by_name("SIGTERM", "SIGINT", "SIGHUP")
# Exit codes of a process that was asked to end, whose run is resumed.
INTERRUPTED = (Preempted.exit_code, *(-number for number in SIGNALS))


class RunFailed(UserError):
    """Failure of a run that ended the suite, with the exit code of the run."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class _Active:
    """Run that was started, or whose job was found in the queue.

    Attributes:
        lock: Lock of the run; None if the job acquires the lock.
        log_start: Offset in the log at which the output of the process begins.
    """

    run: Run
    process: Process
    lock: Lock | None = None
    devices: Sequence[str] = ()
    log_start: int = 0
    started: float = field(default_factory=time.monotonic)


@dataclass
class Runner:
    """Runner of all runs that are not done; the caller holds the lock of the suite folder.

    Attributes:
        runs: Runs in the order of starting, as far as `Run.after` allows.
        executor: Executor that starts the processes.
        name: Title of the progress line.
        retry_failed: Repeat failed runs; by default they are only reported.
        fail_fast: Stop the other runs and raise `RunFailed` when one fails.
        measured: Speeds of earlier runs on this hardware, for the time left.
        stop_seconds: Time that processes have to save when the runner is stopped.
        keep: Policy of the checkpoints of computed runs, see benchmarks/suites/checkpoints.py.
        watch: Callback with states, forecast and speeds, called whenever the progress is shown.
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
    watch: Callable[[Mapping[str, State], Forecast, Speeds], None] = lambda *seen: None

    def __post_init__(self) -> None:
        self._states = {run.name: run.state() for run in self.runs}
        self._open = {run.name: run for run in self.runs}  # neither settled nor started
        self._active: dict[str, _Active] = {}
        self._not_before: dict[str, float] = {}
        self._interruptions: dict[str, int] = {}
        self._signals: list[int] = []
        self._stopping = False
        self._next: dict[str, float] = {}  # periodic task → time when it is due
        self._smallest = min((run.gpus for run in self.runs), default=0)

    def run(self) -> dict[str, State]:
        """Compute until every run is done or failed, and return their states by name.

        Raises:
            Preempted: If SIGTERM, SIGINT or SIGHUP arrived. The runs have saved and ended; jobs of
                a cluster stay in its queue.
            RunFailed: If a run failed and `fail_fast` is set.
            UserError: If a cluster refuses a job, or a file cannot be written.
        """
        self._display = Display(self.name)
        with self._noted_signals():
            try:
                for run in self.runs:
                    self._begin(run)
                while self._open or self._active:
                    if self._signals:
                        name = signal.Signals(self._signals[0]).name
                        left = self.executor.shutdown_message()
                        self._stop()
                        raise Preempted(f"stopped by {name}; {left}")
                    self._reap()
                    self._start()
                    if not self.executor.remote:  # jobs delete their own checkpoints
                        self._periodically(self._delete_checkpoints, KEEP_SECONDS)
                    seconds = REMOTE_SHOW_SECONDS if self.executor.remote else SHOW_SECONDS
                    self._periodically(self._show, seconds)
                    if self._open or self._active:
                        time.sleep(POLL_SECONDS)
                for run in self.runs:
                    if not self._states[run.name].settled:
                        self._fail_with_dependency(run)
            except OSError as error:
                where = error.filename or self.runs[0].folder
                raise UserError(
                    f"{where}: {error.strerror or error}; fix that and repeat the command, which "
                    "continues"
                ) from error
            finally:
                self._display.close()
                self._stop()
        return self._states

    def _begin(self, run: Run) -> None:
        """Settle a run that is over, or adopt its job that is in the queue."""
        state = self._states[run.name]
        if state.retried(self.retry_failed).settled:
            self._settle(run, state)
        elif (process := self.executor.adopt(run)) is not None:
            self._active[run.name] = _Active(self._open.pop(run.name), process)

    def _settle(self, run: Run, state: State) -> None:
        self._states[run.name] = state
        self._open.pop(run.name, None)
        if self.fail_fast and not self._stopping and state.kind == FAILED:
            exit_code = int(run.failure().get("exit_code", 1))
            raise RunFailed(f"{run.title} failed: {state.text}", max(exit_code, 1))

    def _periodically(self, work: Callable[[], None], seconds: float) -> None:
        """Do a periodic task every `seconds`, or less often if the task takes long."""
        name, now = work.__name__, time.monotonic()
        if now >= self._next.get(name, 0.0):
            start = time.thread_time()
            work()
            self._next[name] = now + max(seconds, REST * (time.thread_time() - start))

    def _delete_checkpoints(self) -> None:
        """Delete the checkpoints of active runs that need not be kept."""
        for active in self._active.values():
            remove_checkpoints(active.run.folder, self.keep, done=False)

    def _start(self) -> None:
        """Start runs in order while devices are free; skip runs that need too many."""
        too_large = 1 << 30
        for run in list(self._open.values()):
            if self._signals or self._smallest >= too_large:
                break
            if run.gpus >= too_large or not self._is_ready(run):
                continue
            devices = self.executor.reserve(run.gpus)
            if devices is None:
                too_large = run.gpus
                continue
            lock = Lock.acquire(run.lock)
            if lock is None:  # a process of a killed runner holds it while it saves
                self.executor.release(devices)
                continue
            try:
                self._start_locked(run, lock, devices)
            except BaseException:
                self.executor.release(devices)
                lock.release()
                raise
        self.executor.submit()

    def _fail_with_dependency(self, run: Run) -> bool:
        """Settle a run if one that it depends on failed; return whether it did."""
        failed = [name for name in run.after if self._states[name].kind == FAILED]
        if failed:
            self._settle(run, State(FAILED, text=f"{failed[0]} failed, which it depends on"))
        return bool(failed)

    def _abandon(self, run: Run, why: str) -> None:
        """Leave a run to the next call of the command."""
        self._open.pop(run.name, None)
        self._states[run.name] = replace(run.state(locked=True), text=why)

    def _is_ready(self, run: Run) -> bool:
        if self._fail_with_dependency(run):
            return False
        left = [
            name
            for name in run.after
            if not (self._states[name].settled or name in self._open or name in self._active)
        ]
        if left:
            self._abandon(run, f"the job of {left[0]}, which it depends on, was cancelled")
            return False
        # The queue of a cluster delays a job until those that it depends on are done.
        waits = any(
            self._states[name].kind != DONE and not (self.executor.remote and name in self._active)
            for name in run.after
        )
        return not waits and time.monotonic() >= self._not_before.get(run.name, 0.0)

    def _start_locked(self, run: Run, lock: Lock, devices: Sequence[str]) -> None:
        run.forget_failure()
        run.note_holder(lock)
        at, remote = run.iteration(), self.executor.remote
        log_start = 0 if remote else run.note_start()
        process = self.executor.start(run, lock, devices)
        if remote:
            lock.release()
        own = None if remote else lock
        self._active[run.name] = _Active(run, process, own, devices, log_start)
        del self._open[run.name]
        self._states[run.name] = State(QUEUED if remote else RUNNING, at, began_at=at)

    def _reap(self) -> None:
        """Handle the processes that have ended."""
        for name, active in list(self._active.items()):
            code = active.process.poll()
            if code is None:
                continue
            del self._active[name]
            self.executor.release(active.devices)
            if active.lock is None and locks.is_held(active.run.lock):  # its job was requeued
                self._open[name] = active.run
                continue
            try:
                self._end(active, code)
            finally:
                if active.lock is not None:
                    active.lock.release()

    def _end(self, active: _Active, code: int) -> None:
        """Settle the run of a process that has ended, or open the run again."""
        run, process = active.run, active.process
        state = run.state(locked=True)
        if state.kind == DONE or (self.executor.remote and run.failure()):
            if own := speed(run, state, DONE):
                self.measured.setdefault(run.speed_key, []).append(own)
            if state.kind == DONE:
                remove_checkpoints(run.folder, self.keep, done=True)
            self._settle(run, state)
            return
        if process.cancelled:  # by a user, or by Slurm with a job that it depends on
            self._abandon(run, process.why)
            return
        interrupted = code in INTERRUPTED or (self._stopping and code != 0)
        if (interrupted and not self._is_stuck(active)) or code == LockedError.exit_code:
            if not interrupted:
                self._not_before[run.name] = time.monotonic() + AGAIN_SECONDS
            self._open[run.name] = run
            self._states[run.name] = state
            return
        error = (
            interrupted_error(process.why)
            if interrupted
            else why_failed(run, code, active.log_start)
        )
        run.fail(error, code)
        self._settle(run, run.state(locked=True))

    def _is_stuck(self, active: _Active) -> bool:
        """Return whether a run was interrupted `MAX_INTERRUPTIONS` times without progress."""
        run = active.run
        if self._stopping or active.process.cancelled or run.has_progressed():
            self._interruptions.pop(run.name, None)
            return False
        self._interruptions[run.name] = self._interruptions.get(run.name, 0) + 1
        return self._interruptions[run.name] >= MAX_INTERRUPTIONS

    def _stop(self) -> None:
        """Terminate the processes; kill them after `stop_seconds`, or on a second signal."""
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
        """Record signals instead of handling them, so that `run` stops at the next step."""
        before = {
            number: signal.signal(number, lambda number, _: self._signals.append(number))
            for number in SIGNALS
            # nohup sets SIGHUP to be ignored, and a shell SIGINT of a background process.
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
                # A job is in the queue until it acquires the lock of the run.
                if active.process.is_queued() or state.kind not in (RUNNING, DONE):
                    state = State(QUEUED, state.iteration)
            else:
                seconds = time.monotonic() - active.started
                at = active.run.iteration()
                state = replace(self._states[name], iteration=at, seconds=seconds)
            self._states[name] = state
        parallel = self.executor.parallel(max((run.gpus for run in self.runs), default=0))
        forecast = make_forecast(self.runs, self._states, self.measured, parallel)
        self.watch(self._states, forecast, self.measured)
        self._display.show(forecast, format_progress(self.runs, self._states))
