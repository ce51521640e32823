"""Speeds and hours of a suite's runs: timed, forecast, and in terminal tables.

`--time` measures 20 iterations of each kind of run whose speed is unknown, `--dry-run` lists the
runs and their hours, and `--status` prints the progress.
"""

import heapq
import json
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from tabulate import tabulate

from benchmarks.suites.executors.base import Executor
from benchmarks.suites.executors.slurm import with_jobs
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import (
    DONE,
    FAILED,
    QUEUED,
    RUNNING,
    STOPPED,
    WAITING,
    Run,
    State,
    read_json,
    why_failed,
)
from benchmarks.suites.suite import RunSpec, row_of
from moco.common.errors import UserError, echo, plural, printable
from moco.common.files import atomic_write_json
from moco.common.progress import Bar, format_seconds

if TYPE_CHECKING:
    from benchmarks.report.table import Table


class Estimate(NamedTuple):
    """Expected seconds of a run, or None if unknown, and the source of the estimate."""

    seconds: float | None
    source: str


class Forecast(NamedTuple):
    """Finished share of the work, 0..1, and the seconds that are left, infinity if unknown."""

    done: float
    seconds_left: float


Speeds = dict[tuple[str, str, int], list[float]]  # `Run.speed_key` → seconds per iteration


def estimate(run: Run, measured: Speeds) -> Estimate:
    """Estimate the seconds of a run from measured runs of the same kind, or a stated speed."""
    speeds = measured.get(run.speed_key)
    if run.iterations and speeds:
        seconds = run.iterations * math.fsum(speeds) / len(speeds)
        return Estimate(seconds, f"measured, {plural(len(speeds), 'run')}")
    if run.iterations and run.seconds_per_iteration is not None:
        return Estimate(run.iterations * run.seconds_per_iteration, "stated")
    return Estimate(None, "unknown")


def make_forecast(
    runs: Sequence[Run], states: Mapping[str, State], measured: Speeds, parallel: int
) -> Forecast:
    """Forecast when the runs of a suite will be done.

    A run without an estimate is assumed to take as long as the others on average.

    Args:
        runs: All runs of the suite.
        states: Name → state.
        measured: Speeds of finished runs.
        parallel: Number of runs that are computed at once.
    """
    speeds = known_speeds(runs, states, measured)
    seconds = {run.name: estimate(run, speeds).seconds for run in runs}
    known = [value for value in seconds.values() if value is not None]
    mean = statistics.fmean(known) if known else None
    total = done = 0.0
    left: dict[str, float] = {}
    for run in runs:
        state, length = states.get(run.name, State(WAITING)), seconds[run.name]
        weight = next(value for value in (length, mean, 1.0) if value is not None)
        share = 1.0 if state.settled else run.fraction(state)
        total += weight
        done += share * weight
        if not state.settled:
            left[run.name] = weight * (1 - share)
    if left and mean is None:
        return Forecast(done / total, math.inf)
    running = [name for name in left if name in states and states[name].kind == RUNNING]
    seconds_left = time_left(runs, left, running, max(parallel, len(running), 1))
    return Forecast(done / total if total else 1.0, seconds_left)


def time_left(
    runs: Sequence[Run], left: Mapping[str, float], running: Collection[str], parallel: int
) -> float:
    """Simulate the schedule, and return the seconds until all runs in `left` are done.

    Running runs keep their slots; the others start in order, when a slot is free and the runs on
    which they depend are done.

    Args:
        runs: All runs, in the order of starting.
        left: Name → seconds of work that are left.
        running: Names of the runs that have started.
        parallel: Number of slots.
    """
    order = {run.name: place for place, run in enumerate(runs)}
    before = {
        run.name: undone
        for run in runs
        if run.name in left and run.name not in running and (undone := left.keys() & run.after)
    }
    after = defaultdict(list)  # name → runs that depend on it
    for name, undone in before.items():
        for other in undone:
            after[other].append(name)
    ready = [order[name] for name in left if name not in before and name not in running]
    heapq.heapify(ready)
    ends = [(left[name], order[name]) for name in running if name in left]
    heapq.heapify(ends)
    now = 0.0
    while ready or ends:
        while ready and len(ends) < parallel:
            place = heapq.heappop(ready)
            heapq.heappush(ends, (now + left[runs[place].name], place))
        now = ends[0][0]
        while ends and ends[0][0] <= now:
            ended = runs[heapq.heappop(ends)[1]].name
            for name in after[ended]:
                before[name] = before[name] - {ended}
                if not before[name]:
                    heapq.heappush(ready, order[name])
    return now


def known_speeds(runs: Iterable[Run], states: Mapping[str, State], measured: Speeds) -> Speeds:
    """Return the speeds of finished runs, or else of running runs.

    Finished runs come first, as the speed of a running run lacks the start and the end.
    """
    return speeds_of(runs, states, RUNNING) | measured


def speeds_of(runs: Iterable[Run], states: Mapping[str, State], kind: str) -> Speeds:
    """Collect the known speeds of the runs in state `kind`."""
    speeds: Speeds = defaultdict(list)
    for run in runs:
        if (own := speed(run, states.get(run.name), kind)) is not None:
            speeds[run.speed_key].append(own)
    return speeds


def speed(run: Run, state: State | None, kind: str) -> float | None:
    """Return the seconds per iteration of a run in state `kind`, or None if unknown.

    The speed of a running run is known after a twentieth of the iterations.
    """
    if state is None or not run.iterations or state.kind != kind:
        return None
    if kind == DONE and state.iteration and state.seconds:
        return state.seconds / state.iteration
    progress = state.iteration - state.began_at
    if kind == RUNNING and state.seconds and progress > run.iterations / 20:
        return state.seconds / progress
    return None


def format_progress(runs: Sequence[Run], states: Mapping[str, State]) -> str:
    """Format the states as `3/18 done, 1 failed; voc mine seed 0 45%, …`."""
    kinds = [state.kind for state in states.values()]
    text = f"{kinds.count(DONE)}/{len(runs)} done"
    for kind in (FAILED, QUEUED):
        text += f", {kinds.count(kind)} {kind}" if kind in kinds else ""
    running = [run for run in runs if run.name in states and states[run.name].kind == RUNNING]
    names = [f"{run.title} {100 * run.fraction(states[run.name]):.0f}%" for run in running[:3]]
    names += [f"{len(running) - 3} more"] if len(running) > 3 else []
    return f"{text}; {', '.join(names)}" if names else text


class Display(Bar):
    """Progress bar of a suite on a terminal, or lines in a log."""

    def __init__(self, name: str) -> None:
        bar_format = "{desc} {percentage:3.0f}%|{bar}| {elapsed}{postfix}"
        super().__init__(total=100, desc=name, bar_format=bar_format)
        self._name, self._start = name, (time.monotonic(), math.nan)  # when, share done then
        self._latest = self._start[0], Forecast(0, math.inf)

    def show(self, forecast: Forecast, text: str) -> None:
        """Show a forecast and the text of `format_progress`."""
        now = time.monotonic()
        if math.isnan(self._start[1]):
            self._start = now, forecast.done
        if forecast != self._latest[1]:
            self._latest = now, forecast
        # The time left counts down between two reports of a run. When it is used up, it is
        # extrapolated from the share that is done.
        seconds_left = forecast.seconds_left - (now - self._latest[0])
        if seconds_left <= 0:
            share = forecast.done - self._start[1]
            seconds_left = (
                (now - self._start[0]) * (1 - forecast.done) / share if share else math.inf
            )
        left = f"about {format_seconds(seconds_left)} left"
        if self.terminal is not None:
            self.terminal.n = 100 * forecast.done
            self.terminal.set_postfix_str(f"{left}: {text}", refresh=True)
        line = f"{self._name}: {100 * forecast.done:.0f}%, {left}: {text}"
        self.line((forecast.done, text), lambda: line, now=forecast.done == 1)


def measured_speeds(runs: Sequence[Run], hardware: Mapping[str, Any] | None) -> Speeds:
    """Return the speeds of finished runs.

    Args:
        runs: All runs; those that are not done are ignored.
        hardware: Hardware in the form of records, to ignore runs on other hardware; None: any.
    """
    states = {each.name: each.state() for each in runs}
    done = [each for each in runs if states[each.name].kind == DONE]
    if hardware is not None:
        done = [each for each in done if _ran_on(each, hardware)]
    return speeds_of(done, states, DONE)


def _ran_on(run: Run, hardware: Mapping[str, Any]) -> bool:
    record = run.record()
    recorded = (record.provenance.get("hardware") if record else None) or {}
    gpus = list(recorded.get("gpus") or ())
    same_gpus = gpus == list(hardware.get("gpus") or ())[: run.gpus]
    return same_gpus and bool(run.gpus or recorded.get("cpu") == hardware.get("cpu"))


def format_listing(
    specs: Sequence[RunSpec],
    runs: Sequence[Run],
    measured: Speeds,
    executor: Executor,
    retry_failed: bool = False,
) -> str:
    """Format a table of all runs with their hours, and the total of the hours that are left."""
    unit = "GPU hours" if executor.gpus else "CPU hours"
    found = {each.name: each.state() for each in runs}
    states = {name: state.retried(retry_failed) for name, state in found.items()}
    rows, hours, unknown, number = [], 0.0, [], 0
    for spec, each in zip(specs, runs, strict=True):
        state, expected = found[each.name], estimate(each, measured)
        seconds = expected.seconds
        own = None if seconds is None else seconds * max(spec.gpus, 1) / 3600
        if not states[each.name].settled:
            number += 1
            if own is None:
                unknown.append(spec.task)
            else:
                hours += own * (1 - each.fraction(state))
        takes = ("unknown", "") if own is None else (f"{own:.2f}", expected.source)
        row = [spec.task, spec.init, spec.seed, spec.engine, spec.gpus or "CPU"]
        rows.append([*row, spec.iterations or "?", *takes, state.kind])
    head = ["task", "init", "seed", "engine", "GPUs", "iterations", unit, "known from", "state"]
    total = f"{number} to do"
    if len(unknown) < number:
        total += f": {hours:.2f} {unit}"
    if unknown:
        which = f"{len(unknown)} of them take" if len(unknown) < number else "that takes"
        total += (
            f"; how long {which} is not known ({', '.join(dict.fromkeys(unknown))}): give "
            "--seconds-per-iteration, or let a run of each task finish"
        )
    elif number:
        parallel = executor.parallel(max(spec.gpus for spec in specs))
        left = format_seconds(make_forecast(runs, states, measured, parallel).seconds_left)
        total += f", about {left} "
        total += "without the time in the queue" if executor.remote else "here"
    return f"\n{tabulate(rows, headers=head, disable_numparse=True)}\n\n{total}"


def format_detectable_gaps(specs: Sequence[RunSpec], tables: Sequence["Table"]) -> str:
    """Format the smallest gap that the runs can detect, in standard deviations and in points.

    Args:
        specs: Requested runs.
        tables: Tables of the runs that are done so far, from which the points follow.
    """
    from benchmarks.report.stats import pooled_std, runs_needed, smallest_gap
    from benchmarks.report.style import STRONG_FROM, format_runs
    from detection.evaluation.metrics import titles

    lines = [
        "smallest single gap between two rows that Welch's test finds 80% of the time (p < 0.05):"
    ]
    for task in dict.fromkeys(spec.task for spec in specs):
        own = [spec for spec in specs if spec.task == task]
        files = Counter(map(row_of, {spec.init for spec in own}))
        trials = len({spec.seed for spec in own})
        # Each of several pre-trainings counts as one value, its mean over the seeds.
        n = min(number if number > 1 else trials for number in files.values())
        gap = smallest_gap(max(n, 2))
        found = f"{gap:.2f} standard deviations"
        if n == 1:
            found = f"none; 2 find {found}"
        what = plural(n, "run")
        if max(files.values()) > 1:
            what += " or pre-training" if n == 1 else " or pre-trainings"
        lines.append(f"  {task}, {what} per row: {found}")
        for table in (table for table in tables if table.title == task):
            std = pooled_std([row.cells[table.metrics[0]] for row in table.rows])
            if std and n > 1:
                lines.append(
                    f"    {gap * std:.2f} {titles(table.metrics)[0]} by the {len(table.runs)} "
                    f"{table.engine} runs so far (standard deviation {std:.2f}); "
                    f"{STRONG_FROM} takes {format_runs(runs_needed(STRONG_FROM / std), n)}"
                )
    return "\n".join(lines)


def inspect_runs(runs: Sequence[Run]) -> tuple[dict[str, State], Forecast]:
    """Read the states of runs that another process computes, and forecast their ends."""
    states = with_jobs(runs, {each.name: each.state() for each in runs})
    parallel = sum(state.kind == RUNNING for state in states.values())
    return states, make_forecast(runs, states, speeds_of(runs, states, DONE), parallel)


def print_status(folder: SuiteFolder) -> None:
    """Print the progress of every run; write nothing."""
    content, specs = folder.read()
    runs = [folder.run(spec) for spec in specs]
    states, forecast = inspect_runs(runs)
    rows = []
    for spec, each in zip(specs, runs, strict=True):
        state, length = states[each.name], spec.iterations or "?"
        at = "" if state.kind in (WAITING, FAILED) else f"{state.iteration:.0f}/{length}"
        started = state.kind in (RUNNING, STOPPED, QUEUED)
        percent = f"{100 * each.fraction(state):.0f}%" if started and each.fraction(state) else ""
        row = [spec.task, spec.init, spec.seed, spec.engine, state.kind, at, percent, state.text]
        rows.append([printable(str(cell)) for cell in row])
    head = ["task", "init", "seed", "engine", "state", "iteration", "share", "where, or why"]
    print(tabulate(rows, headers=head, disable_numparse=True))
    kinds = [state.kind for state in states.values()]
    parts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
    left = ""
    if RUNNING in kinds:
        left = f", about {format_seconds(forecast.seconds_left)} left"
    elif QUEUED not in kinds and not all(state.settled for state in states.values()):
        left = "; nothing is running"
    echo("", f"{content['suite']}: {', '.join(parts)} of {len(specs)}{left}")


SPEEDS_NAME = ".speeds.json"
ITERATIONS = 20  # after the first logged one, as the iterations before that are slower
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class TimedSpeeds:
    """File of the speeds that were timed for a suite, which later calls reuse.

    Attributes:
        folder: Folder of the suite, which need not exist.
        content: Content of `suite.json`. Other tasks, keys, data or versions are timed again.
        hardware: Hardware in the form of records. Another one is timed again.
    """

    folder: Path
    content: Mapping[str, Any]
    hardware: Mapping[str, Any]

    def read(self) -> Speeds:
        """Return the speeds that were timed for the same tasks on the same hardware."""
        stored = read_json(self.folder / SPEEDS_NAME)
        if stored.get("of") != self._of():
            return {}
        return {(task, engine, gpus): [seconds] for task, engine, gpus, seconds in stored["timed"]}

    def write(self, speeds: Speeds) -> None:
        """Write the speeds, and create the folder."""
        timed = [[*key, math.fsum(each) / len(each)] for key, each in speeds.items()]
        atomic_write_json(self.folder / SPEEDS_NAME, {"of": self._of(), "timed": timed})

    def _of(self) -> Any:
        names = ("version", "tasks", "steps")
        content = {name: self.content.get(name) for name in names} | {"hardware": self.hardware}
        return json.loads(json.dumps(content, default=str))


def time_runs(
    runs: Sequence[Run],
    executor: Executor,
    command: Callable[[Run, Path], Sequence[str]],
    measured: Speeds,
) -> Speeds:
    """Start a run of each kind in a temporary folder, and kill it after `ITERATIONS` iterations.

    Args:
        runs: Runs whose dependencies are done.
        executor: Executor of this machine.
        command: Function that returns a run's command for another folder.
        measured: Known speeds, which are not measured again.

    Returns:
        The speeds that could be measured.

    Raises:
        UserError: If the executor starts its processes on other machines.
    """
    if executor.remote:
        raise UserError("--time: times runs on this machine; give --executor local or cpu")
    found: Speeds = {}
    for run in runs:
        known = found.keys() | measured.keys()
        if run.product is None and run.speed_key not in known and estimate(run, {}).seconds is None:
            with TemporaryDirectory() as folder:
                path = Path(folder, "run")
                copy = replace(run, folder=path, argv=command(run, path))
                found[run.speed_key] = _seconds(copy, executor)
    return {key: seconds for key, seconds in found.items() if seconds}


def _seconds(run: Run, executor: Executor) -> list[float]:
    """Measure the seconds per iteration of a run; return an empty list if the run ends before."""
    devices, lock = executor.reserve(run.gpus), Lock.acquire(run.lock)
    assert devices is not None and lock is not None  # no other run has been started
    echo(f"timing {run.title}")
    process = executor.start(run, lock, devices)
    first: tuple[float, float] | None = None  # iteration, time at which it was read
    try:
        while (code := process.poll()) is None:
            at, now = run.iteration(), time.monotonic()
            if at and first is None:
                first = at, now
            elif first and at >= first[0] + ITERATIONS:
                return [(now - first[1]) / (at - first[0])]
            time.sleep(POLL_SECONDS)
        echo(f"note: {run.title} could not be timed: {printable(why_failed(run, code, 0))}")
        return []
    finally:
        process.kill()
        lock.release()
        executor.release(devices)
