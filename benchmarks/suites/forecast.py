"""How long runs take, how much of a plan is done, and the one line that shows it."""

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
    """What a run is expected to take: its seconds, None if unknown, and how that is known."""

    seconds: float | None
    source: str


class Forecast(NamedTuple):
    """Share of the work that is done, 0..1, and seconds until all is; infinity if unknown."""

    done: float
    seconds_left: float


Speeds = dict[tuple[str, str, int], list[float]]  # `Run.speed_key` → seconds per iteration


def estimate(run: Run, measured: Speeds) -> Estimate:
    """From runs with the same speed; else as stated; else unknown."""
    speeds = measured.get(run.speed_key)
    if run.iterations and speeds:
        seconds = run.iterations * math.fsum(speeds) / len(speeds)
        return Estimate(seconds, f"measured, {plural(len(speeds), 'run')}")
    if run.iterations and run.seconds_per_iteration is not None:
        return Estimate(run.iterations * run.seconds_per_iteration, "stated")
    return Estimate(None, "unknown")


def foresee(
    runs: Sequence[Run], states: Mapping[str, State], measured: Speeds, parallel: int
) -> Forecast:
    """How far a plan is.

    A run of which nothing is known is taken to last as long as the mean of the others.

    Args:
        parallel: how many runs are computed at once.
    """
    # What runs tells its speed only where nothing is finished: its start and end are not in it.
    speeds = speeds_of(runs, states, RUNNING) | measured
    seconds = {run.name: estimate(run, speeds).seconds for run in runs}
    known = [value for value in seconds.values() if value is not None]
    usual = statistics.fmean(known) if known else None
    total = done = 0.0
    left: dict[str, float] = {}
    for run in runs:
        state, length = states.get(run.name, State(WAITING)), seconds[run.name]
        weight = next(value for value in (length, usual, 1.0) if value is not None)
        share = 1.0 if state.settled else run.fraction(state)
        total += weight
        done += share * weight
        if not state.settled:
            left[run.name] = weight * (1 - share)
    if left and usual is None:
        return Forecast(done / total, math.inf)
    running = [name for name in left if name in states and states[name].kind == RUNNING]
    seconds_left = time_left(runs, left, running, max(parallel, len(running), 1))
    return Forecast(done / total if total else 1.0, seconds_left)


def time_left(
    runs: Sequence[Run], left: Mapping[str, float], running: Collection[str], parallel: int
) -> float:
    """Seconds until all runs in `left` (name → seconds of work) are done.

    Plays the schedule forward: running ones keep their slot, others start in order when a slot is
    free and the runs that they come after are done.
    """
    order = {run.name: place for place, run in enumerate(runs)}
    before = {
        run.name: undone
        for run in runs
        if run.name in left and run.name not in running and (undone := left.keys() & run.after)
    }
    after = defaultdict(list)  # name → who comes after it
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


def speeds_of(runs: Iterable[Run], states: Mapping[str, State], kind: str) -> Speeds:
    """Of the runs whose `speed` is known."""
    speeds: Speeds = defaultdict(list)
    for run in runs:
        if (own := speed(run, states.get(run.name), kind)) is not None:
            speeds[run.speed_key].append(own)
    return speeds


def speed(run: Run, state: State | None, kind: str) -> float | None:
    """Seconds per iteration of a run that is done, or running and a twentieth of it done by its
    process, whichever `kind` says."""
    if state is None or not run.iterations or state.kind != kind:
        return None
    if kind == DONE and state.iteration and state.seconds:
        return state.seconds / state.iteration
    progress = state.iteration - state.began_at
    if kind == RUNNING and state.seconds and progress > run.iterations / 20:
        return state.seconds / progress
    return None


def summary(runs: Sequence[Run], states: Mapping[str, State]) -> str:
    """`3/18 done, 1 failed; voc mine seed 0 45%, …`."""
    kinds = [state.kind for state in states.values()]
    text = f"{kinds.count(DONE)}/{len(runs)} done"
    for kind in (FAILED, QUEUED):
        text += f", {kinds.count(kind)} {kind}" if kind in kinds else ""
    running = [run for run in runs if run.name in states and states[run.name].kind == RUNNING]
    names = [f"{run.title} {100 * run.fraction(states[run.name]):.0f}%" for run in running[:3]]
    names += [f"{len(running) - 3} more"] if len(running) > 3 else []
    return f"{text}; {', '.join(names)}" if names else text


class Display(Bar):
    """How far a plan is, shown as `moco.common.progress` shows it."""

    def __init__(self, name: str) -> None:
        bar_format = "{desc} {percentage:3.0f}%|{bar}| {elapsed}{postfix}"
        super().__init__(total=100, desc=name, bar_format=bar_format)
        self._name, self._begun = name, (time.monotonic(), math.nan)
        self._latest = self._begun[0], Forecast(0, math.inf)

    def show(self, forecast: Forecast, text: str) -> None:
        now = time.monotonic()
        if math.isnan(self._begun[1]):
            self._begun = now, forecast.done
        if forecast != self._latest[1]:
            self._latest = now, forecast
        # A run tells how far it is every now and then, and the time passes in between. Where it
        # takes longer than foreseen, the rest takes as long for its share as what was done.
        seconds_left = forecast.seconds_left - (now - self._latest[0])
        if seconds_left <= 0:
            share = forecast.done - self._begun[1]
            seconds_left = (
                (now - self._begun[0]) * (1 - forecast.done) / share if share else math.inf
            )
        left = f"about {format_seconds(seconds_left)} left"
        if self.terminal is not None:
            self.terminal.n = 100 * forecast.done
            self.terminal.set_postfix_str(f"{left}: {text}", refresh=True)
        line = f"{self._name}: {100 * forecast.done:.0f}%, {left}: {text}"
        self.line((forecast.done, text), lambda: line, now=forecast.done == 1)
