"""Forecasts of a suite: seconds of a run, share of the work done, time left, progress line."""

import heapq
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.suites.runs import DONE, FAILED, QUEUED, RUNNING, WAITING, Run, State
from moco.common.errors import plural
from moco.common.progress import Bar, format_seconds


class Estimate(NamedTuple):
    """Expected seconds of a run, None if unknown, and their source."""

    seconds: float | None
    source: str


class Forecast(NamedTuple):
    """Share of the work that is done, 0..1, and seconds until the rest is, infinity if unknown."""

    done: float
    seconds_left: float


Speeds = dict[tuple[str, str, int], list[float]]  # `Run.speed_key` → seconds per iteration


def estimate(run: Run, measured: Speeds) -> Estimate:
    """Estimate a run's seconds from measured runs of the same speed, or from the stated speed."""
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
    """Forecast when the runs of a plan will be done.

    A run without an estimate is assumed to take the mean of the others.

    Args:
        runs: All runs of the plan.
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

    Running ones keep their slot; others start in order when a slot is free and the runs that they
    depend on are done. `left` is name → seconds of work.
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
    """Add the speeds of running runs to those of finished ones.

    Finished runs come first, as the speed of a running one lacks its start and its end.
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
    """Return a run's seconds per iteration, or None if unknown or the run is not in state `kind`.

    The speed of a running one is known when its process has done a twentieth of the iterations.
    """
    if state is None or not run.iterations or state.kind != kind:
        return None
    if kind == DONE and state.iteration and state.seconds:
        return state.seconds / state.iteration
    progress = state.iteration - state.began_at
    if kind == RUNNING and state.seconds and progress > run.iterations / 20:
        return state.seconds / progress
    return None


def summary(runs: Sequence[Run], states: Mapping[str, State]) -> str:
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
    """Progress bar of a plan on a terminal, or lines in a log."""

    def __init__(self, name: str) -> None:
        bar_format = "{desc} {percentage:3.0f}%|{bar}| {elapsed}{postfix}"
        super().__init__(total=100, desc=name, bar_format=bar_format)
        self._name, self._start = name, (time.monotonic(), math.nan)  # when, share done then
        self._latest = self._start[0], Forecast(0, math.inf)

    def show(self, forecast: Forecast, text: str) -> None:
        """Show a forecast and the text of `summary`."""
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
