"""Runs a suite's runs to their end: starts, watches, takes over, stops. No run is done twice.

What is true is on disk: a run is done when its record says so, and at work while its claim is
locked. A runner therefore needs no memory of earlier ones, may be killed at any moment, and shares
a folder with others.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.suites import locks as claims
from benchmarks.suites.executors.local import Executor, Launch, Process, Room
from benchmarks.suites.folder import CHECKPOINT, DONE, FAILED, RUNNING, State, SuiteFolder
from benchmarks.suites.jobs import Display, Job, last_iteration, last_line, time_left
from benchmarks.suites.keep import ALL, remove_checkpoints
from benchmarks.suites.locks import Claim
from benchmarks.suites.suite import Measured, RunSpec, estimate
from moco.common.errors import LockedError, Preempted, UserError
from moco.engine.stop import signals_by_name

POLL_SECONDS = 0.2
KEEP_SECONDS = 60.0  # between two looks for checkpoints that need not be kept
SURVEY_SECONDS = 1.0  # between two looks at the runs of others
SHOW_SECONDS = 1.0
LINE_EVERY_SECONDS = 60.0  # where there is no terminal: a suite takes days
AGAIN_SECONDS = 10.0  # before a run is tried again whose folder another process holds
STOP_SECONDS = 120.0  # for processes that were asked to save and end
MAX_FRUITLESS = 3  # interruptions in a row without a new checkpoint
REMOTE_SHOW_SECONDS = 10.0  # between two looks at how far jobs on other machines are
QUEUED = "queued"  # a job of a cluster that has not begun
STARTS = "starts"  # in a job's claim: how often it was begun from the same checkpoint
LOG_START = "log_start"  # in a job's claim: where in the log its process begins
SIGNALS = signals_by_name("SIGTERM", "SIGINT", "SIGHUP")
# A process that ends so was asked to by somebody: it is continued.
_INTERRUPTED = (Preempted.exit_code, *(-number for number in SIGNALS))
_SHOWN = 3  # runs named in the progress line


@dataclass
class _Mine:
    """A run that this runner has started, or whose job it has found in the queue.

    Attributes:
        claim: None while a job has it, or may take it at any moment.
        checkpoint: the newest one when the process began.
    """

    spec: RunSpec
    process: Process
    claim: Claim | None
    room: Room | None
    log_start: int
    checkpoint: str
    started: float

    def release(self) -> None:
        for lock in (self.claim, self.room):
            if lock is not None:
                lock.release()
        self.claim = self.room = None


class Runner:
    """Runs everything that is not done.

    Args:
        specs: in the order of starting.
        command: the words that start a run, to be continued if it has begun.
        retry_failed: try failed runs once more; else they are only reported.
        measured: speeds of earlier runs on this hardware, for the time left.
        stop_seconds: how long processes may take to save when the runner is asked to stop.
        keep: which checkpoints of the runs that are computed stay, see benchmarks/suites/keep.py.
    """

    def __init__(
        self,
        folder: SuiteFolder,
        specs: Sequence[RunSpec],
        executor: Executor,
        command: Callable[[RunSpec], Sequence[str]],
        *,
        retry_failed: bool = False,
        measured: Sequence[Measured] = (),
        stop_seconds: float = STOP_SECONDS,
        keep: str = ALL,
    ) -> None:
        self._folder, self._executor, self._command = folder, executor, command
        self._specs = tuple(specs)
        self._open = {spec.name: spec for spec in specs}  # neither settled nor ours
        self._mine: dict[str, _Mine] = {}
        self._states: dict[str, State] = {}
        self._measured, self._stop_seconds = list(measured), stop_seconds
        # A failure that came later than this call is not tried again, whoever had it.
        self._retry = {s.name: folder.failure(s) for s in specs} if retry_failed else {}
        self._not_before: dict[str, float] = {}
        self._fruitless: dict[str, int] = {}
        self._asked: list[int] = []
        self._stopping = False
        self._keep = keep
        self._next_survey = self._next_show = self._next_tidy = 0.0

    def run(self) -> dict[str, State]:
        """Work until every run is done or failed; returns their states by name.

        Raises:
            Preempted: SIGTERM, SIGINT or SIGHUP came; the runs were asked to save, and have ended.
                Jobs of a cluster stay where they are.
            UserError: a cluster refuses a job, or the disk is full.
        """
        display = Display("suite", LINE_EVERY_SECONDS)
        with self._signals():
            try:
                while self._open or self._mine:
                    if self._asked:
                        name = signal.Signals(self._asked[0]).name
                        left = self._executor.farewell([m.process for m in self._mine.values()])
                        self._stop()
                        raise Preempted(f"stopped by {name}; {left}")
                    self._reap()
                    self._survey()
                    self._start()
                    self._tidy()
                    self._show(display)
                    if self._open or self._mine:
                        time.sleep(POLL_SECONDS)
            except OSError as error:
                where = error.filename or self._folder.path
                raise UserError(
                    f"{where}: {error.strerror or error}; mend that, and the same command goes on"
                ) from error
            finally:
                display.close()
                self._stop()
        return self._states

    def _settle(self, spec: RunSpec, state: State) -> None:
        seen = spec.name in self._states  # else it was done before, and is among the measured
        if seen and (own := speed(spec, state, DONE)):
            self._measured.append(own)
        if seen and state.kind == DONE:
            remove_checkpoints(self._folder.run(spec), self._keep, done=True)
        self._states[spec.name] = state
        self._open.pop(spec.name, None)

    def _tidy(self) -> None:
        """Delete the checkpoints of our runs that need not be kept; jobs do that themselves."""
        now = time.monotonic()
        if now < self._next_tidy or self._executor.remote:
            return
        self._next_tidy = now + KEEP_SECONDS
        for mine in self._mine.values():
            remove_checkpoints(self._folder.run(mine.spec), self._keep, done=False)

    def _survey(self) -> None:
        """Look at the runs that are not ours."""
        now = time.monotonic()
        if now < self._next_survey:
            return
        first, self._next_survey = not self._next_survey, now + SURVEY_SECONDS
        for spec in list(self._open.values()):
            state = self._folder.state(spec)
            if state.kind == DONE or (state.kind == FAILED and not self._may_retry(spec, state)):
                self._settle(spec, state)
            self._states[spec.name] = state
            if not state.settled:
                self._adopt(spec)
        busy = [spec for spec in self._open.values() if self._states[spec.name].kind == RUNNING]
        if first and busy:
            print(
                f"note: {', '.join(spec.title for spec in busy)}: computed by processes of another "
                "call, which may have been killed; they are waited for",
                file=sys.stderr,
            )

    def _adopt(self, spec: RunSpec) -> bool:
        """Watch the job that another runner has submitted for a run, if there is one."""
        process = self._executor.adopt(spec)
        if process is None:
            return False
        self._watch(_Mine(spec, process, None, None, 0, "", time.monotonic()))
        return True

    def _watch(self, mine: _Mine) -> None:
        self._mine[mine.spec.name] = mine
        del self._open[mine.spec.name]

    def _may_retry(self, spec: RunSpec, state: State) -> bool:
        failure = self._folder.failure(spec)
        return not state.foreign and self._retry.get(spec.name) == failure

    def _start(self) -> None:
        """Start what there is room for, in order; a run that is too large now is passed over."""
        try:
            self._start_each()
            self._executor.submit()
        finally:
            if self._executor.remote:
                for mine in self._mine.values():
                    mine.release()  # so that the jobs can take their claims

    def _start_each(self) -> None:
        too_large = 1 << 30
        for spec in list(self._open.values()):
            if self._asked:
                return
            busy = self._states[spec.name].kind == RUNNING
            if busy or spec.gpus >= too_large or self._waits(spec):
                continue
            room = self._executor.reserve(spec.gpus)
            if room is None:
                too_large = spec.gpus
                continue
            claim = Claim.take(self._folder.claim(spec))
            if claim is None:
                room.release()
                self._states[spec.name] = replace(self._states[spec.name], kind=RUNNING)
                continue
            started = False
            try:
                started = self._start_claimed(spec, claim, room)
            finally:
                if not started:
                    claim.release()
                    room.release()

    def _waits(self, spec: RunSpec) -> bool:
        return time.monotonic() < self._not_before.get(spec.name, 0.0)

    def _start_claimed(self, spec: RunSpec, claim: Claim, room: Room) -> bool:
        """Start a run of which nobody else is in charge; False if there is nothing to start."""
        state = self._folder.state(spec, mine=True)  # another runner may have ended it just now
        if state.kind == DONE or (state.kind == FAILED and not self._may_retry(spec, state)):
            self._settle(spec, state)
            return False
        if self._adopt(spec):
            return False
        self._folder.forget_failure(spec)
        self._retry.pop(spec.name, None)
        self._folder.note_claim(claim, spec)
        log = self._folder.log(spec)
        words = tuple(self._command(spec))
        start = 0 if self._executor.remote else note_start(log, words)
        began_at = last_iteration(self._folder.metrics(spec))
        checkpoint = self._folder.checkpoint(spec)
        launch = Launch(words, log, (claim,), run=spec, keep=self._keep)
        process = self._executor.start(launch, room)
        self._watch(_Mine(spec, process, claim, room, start, checkpoint, time.monotonic()))
        kind = QUEUED if self._executor.remote else RUNNING
        self._states[spec.name] = State(kind, began_at, began_at=began_at)
        return True

    def _reap(self) -> None:
        """Look after the processes that have ended."""
        for name, mine in list(self._mine.items()):
            code = mine.process.poll()
            if code is None:
                continue
            del self._mine[name]
            if self._executor.remote and not self._take_back(mine):
                self._open[name] = mine.spec  # somebody else is at it
                continue
            self._end(mine, code)
            mine.process.forget()
            mine.release()

    def _take_back(self, mine: _Mine) -> bool:
        """Take the claim of a job that has ended, to judge its end; False if that is not ours."""
        path = self._folder.claim(mine.spec)
        mine.claim = Claim.take(path)
        if mine.claim is None or not mine.process.in_charge():
            mine.release()
            return False
        noted = claims.read(path)
        mine.checkpoint = str(noted.get(CHECKPOINT, ""))
        mine.log_start = int(noted.get(LOG_START, 0))
        return True

    def _end(self, mine: _Mine, code: int) -> None:
        """What a process's end means for its run."""
        spec, folder = mine.spec, self._folder
        state = folder.state(spec, mine=True)
        if state.kind == DONE or (self._executor.remote and folder.failure(spec)):
            self._settle(spec, state)
            return
        if mine.process.cancelled():
            # Whoever did that does not want it back; the next call submits it again.
            self._states[spec.name] = replace(state, text=mine.process.why())
            return
        interrupted = code in _INTERRUPTED or (self._stopping and code != 0)
        if interrupted and not self._is_fruitless(mine):
            self._open[spec.name] = spec
            self._states[spec.name] = state
            return
        if code == LockedError.exit_code:
            self._not_before[spec.name] = time.monotonic() + AGAIN_SECONDS
            self._open[spec.name] = spec
            self._states[spec.name] = state
            return
        if interrupted:
            error = f"it was interrupted {MAX_FRUITLESS} times without a new checkpoint in between"
            error += f"; {mine.process.why()}" if mine.process.why() else ""
        elif code < 0:
            error = f"it was killed by signal {-code} ({signal.Signals(-code).name})"
        elif code == 0:
            error = "it ended without a record"
        else:
            error = mine.process.why() or last_line(folder.log(spec), mine.log_start)
        folder.fail(spec, error, code)
        self._settle(spec, folder.state(spec, mine=True))

    def _is_fruitless(self, mine: _Mine) -> bool:
        """Whether a run is interrupted again and again without getting on."""
        if self._stopping or self._folder.checkpoint(mine.spec) != mine.checkpoint:
            self._fruitless.pop(mine.spec.name, None)
            return False
        count = self._fruitless.get(mine.spec.name, 0) + 1
        self._fruitless[mine.spec.name] = count
        # A cluster starts a job again by itself, too.
        starts = int(claims.read(self._folder.claim(mine.spec)).get(STARTS, 0))
        return max(count, starts) >= MAX_FRUITLESS

    def _stop(self) -> None:
        """Ask our processes to save and end, and see that they do; a second signal kills them."""
        self._stopping = True
        if self._executor.remote:
            self._mine.clear()
            return
        for mine in self._mine.values():
            mine.process.terminate()
        deadline, signals = time.monotonic() + self._stop_seconds, len(self._asked)
        while self._mine:
            self._reap()
            if time.monotonic() > deadline or len(self._asked) > max(signals, 1):
                for mine in self._mine.values():
                    mine.process.kill()
            time.sleep(POLL_SECONDS if self._mine else 0)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """While open, a signal only asks `run` to stop."""

        def note(number: int, frame: FrameType | None) -> None:
            self._asked.append(number)

        before = {}
        for number in SIGNALS:
            # nohup, and the shell for what runs in the background, ignore some of them.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _show(self, display: Display) -> None:
        now = time.monotonic()
        if now < self._next_show:
            return
        remote = self._executor.remote
        self._next_show = now + (REMOTE_SHOW_SECONDS if remote else SHOW_SECONDS)
        for name, mine in self._mine.items():
            if remote:
                self._states[name] = job_state(self._folder, mine.spec, mine.process)
                continue
            iteration = last_iteration(self._folder.metrics(mine.spec))
            state = replace(self._states[name], iteration=iteration, seconds=now - mine.started)
            self._states[name] = state
        places = places_for(self._executor, self._specs)
        forecast = foresee(self._specs, self._states, self._measured, places)
        display.show(forecast.done, forecast.seconds_left, summary(self._specs, self._states))


def note_start(log: Path, words: Sequence[str], where: str = "") -> int:
    """A line in a run's log about the process that starts; where its own lines begin."""
    with open(log, "a") as file:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        file.write(f"--- {now}{where}: {' '.join(words)}\n")
    return log.stat().st_size


def job_state(folder: SuiteFolder, spec: RunSpec, process: Process) -> State:
    """How far the run of a job is: a job that has not taken its claim is in the queue."""
    if not process.waits():
        state = folder.state(spec)
        if state.kind in (RUNNING, DONE):
            return state
    return State(QUEUED, last_iteration(folder.metrics(spec)))


def places_for(executor: Executor, specs: Sequence[RunSpec]) -> int:
    """How many runs of one device fit at once, for `foresee`."""
    size = max((max(spec.gpus, 1) for spec in specs), default=1)
    return executor.places * (size if executor.remote else 1)


@dataclass(frozen=True)
class Forecast:
    """Share of the work that is done, 0..1, and seconds until all is; infinity if unknown."""

    done: float
    seconds_left: float


def foresee(
    specs: Sequence[RunSpec],
    states: Mapping[str, State],
    measured: Sequence[Measured],
    places: int,
) -> Forecast:
    """How far a suite is.

    A run of which nothing is known is taken to last as long as the mean of the others.

    Args:
        places: how many runs of one device fit at once.
    """
    known_of = {(m.task, m.engine, m.gpus) for m in measured}
    # What runs tells its speed only where nothing is finished: its start and end are not in it.
    own = [m for s in specs if (m := speed(s, states.get(s.name), RUNNING))]
    speeds = [*measured, *(m for m in own if (m.task, m.engine, m.gpus) not in known_of)]
    seconds = {spec.name: estimate(spec, speeds).seconds for spec in specs}
    known = [value for value in seconds.values() if value is not None]
    usual = sum(known) / len(known) if known else None
    total = done = 0.0
    left: dict[str, float] = {}
    jobs, running = [], []
    for spec in specs:
        state = states.get(spec.name, State("waiting"))
        length = seconds[spec.name]
        weight = length if length is not None else usual if usual is not None else 1.0
        share = 1.0 if state.settled else fraction(spec, state)
        total += weight
        done += share * weight
        if not state.settled:
            left[spec.name] = weight * (1 - share)
            jobs.append(Job(spec.name, tuple, Path(), weight))
            if state.kind == RUNNING:
                running.append(spec.name)
    size = max((max(spec.gpus, 1) for spec in specs), default=1)
    workers = max(places // size, len(running), 1)
    if left and usual is None:
        return Forecast(done / total, float("inf"))
    return Forecast(done / total if total else 1.0, time_left(jobs, left, running, workers))


def fraction(spec: RunSpec, state: State) -> float:
    """Share of a run's iterations that is done, 0..1; 0 where its length is not known."""
    return min(state.iteration / spec.iterations, 1.0) if spec.iterations else 0.0


def speed(spec: RunSpec, state: State | None, kind: str) -> Measured | None:
    """Of a run of that kind: done, or running and got on with by a twentieth."""
    if state is None or not spec.iterations or state.kind != kind:
        return None
    own = (spec.task, spec.engine, spec.gpus)
    if kind == DONE and state.iteration and state.seconds:
        return Measured(*own, state.seconds / state.iteration)
    got_on = state.iteration - state.began_at
    if kind == RUNNING and state.seconds and got_on > spec.iterations / 20:
        return Measured(*own, state.seconds / got_on)
    return None


def summary(specs: Sequence[RunSpec], states: Mapping[str, State]) -> str:
    """`3/18 done, 1 failed; voc mine seed 0 45%, …`."""
    kinds = [states[spec.name].kind for spec in specs if spec.name in states]
    text = f"{kinds.count(DONE)}/{len(specs)} done"
    if FAILED in kinds:
        text += f", {kinds.count(FAILED)} failed"
    if QUEUED in kinds:
        text += f", {kinds.count(QUEUED)} queued"
    running = [s for s in specs if s.name in states and states[s.name].kind == RUNNING]
    names = [f"{s.title} {100 * fraction(s, states[s.name]):.0f}%" for s in running[:_SHOWN]]
    if len(running) > _SHOWN:
        names.append(f"{len(running) - _SHOWN} more")
    return "; ".join([text, *([", ".join(names)] if names else [])])


def measured_runs(
    folder: SuiteFolder, specs: Sequence[RunSpec], hardware: Mapping[str, Any] | None
) -> list[Measured]:
    """Speeds of the suite's finished runs.

    Args:
        hardware: only runs on this hardware (as records have it); None: on any.
    """
    found = []
    for spec in specs:
        state = folder.state(spec)
        record = folder.record(spec) if state.kind == DONE else None
        if record is None or record.iterations < 1 or state.seconds <= 0:
            continue
        own = (record.provenance or {}).get("hardware") or {}
        if hardware is None or _same_hardware(own, hardware, spec.gpus):
            speed_ = state.seconds / record.iterations
            found.append(Measured(spec.task, spec.engine, spec.gpus, speed_))
    return found


def _same_hardware(own: Mapping[str, Any], here: Mapping[str, Any], gpus: int) -> bool:
    if gpus:
        return list(own.get("gpus") or ()) == list(here.get("gpus") or ())[:gpus]
    return not own.get("gpus") and own.get("cpu") == here.get("cpu")
