"""How long runs take, how much of a plan is done, and the one line that shows it."""

import math
import os
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.suites.runs import DONE, FAILED, QUEUED, RUNNING, WAITING, Run, State
from moco.common.progress import format_seconds


class Measured(NamedTuple):
    """The speed of a run: see `Run.speed_key`."""

    speed_key: tuple[str, str, int]
    seconds_per_iteration: float


class Estimate(NamedTuple):
    """What a run is expected to take: its seconds, None if unknown, and how that is known."""

    seconds: float | None
    source: str


class Forecast(NamedTuple):
    """Share of the work that is done, 0..1, and seconds until all is; infinity if unknown."""

    done: float
    seconds_left: float


def estimate(run: Run, measured: Iterable[Measured]) -> Estimate:
    """From runs with the same speed; else as stated; else unknown."""
    speeds = [m.seconds_per_iteration for m in measured if m.speed_key == run.speed_key]
    if run.iterations and speeds:
        number = f"{len(speeds)} run{'s'[: len(speeds) > 1]}"
        return Estimate(run.iterations * statistics.fmean(speeds), f"measured, {number}")
    if run.iterations and run.seconds_per_iteration is not None:
        return Estimate(run.iterations * run.seconds_per_iteration, "stated")
    return Estimate(None, "unknown")


def foresee(
    runs: Sequence[Run], states: Mapping[str, State], measured: Sequence[Measured], parallel: int
) -> Forecast:
    """How far a plan is.

    A run of which nothing is known is taken to last as long as the mean of the others.

    Args:
        parallel: how many runs are computed at once.
    """
    known_keys = {m.speed_key for m in measured}
    # What runs tells its speed only where nothing is finished: its start and end are not in it.
    own = [m for run in runs if (m := speed(run, states.get(run.name), RUNNING))]
    speeds = [*measured, *(m for m in own if m.speed_key not in known_keys)]
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
    waiting = [run for run in runs if run.name in left and run.name not in running]
    ends = {name: left[name] for name in running if name in left}
    now, undone = 0.0, set(left)
    while waiting or ends:
        for run in list(waiting):
            if len(ends) < parallel and not undone & set(run.after):
                waiting.remove(run)
                ends[run.name] = now + left[run.name]
        now = min(ends.values())
        for name in [name for name, end in ends.items() if end <= now]:
            del ends[name]
            undone.discard(name)
    return now


def speed(run: Run, state: State | None, kind: str) -> Measured | None:
    """Of a run of that kind: done, or running and a twentieth of it done by its process."""
    if state is None or not run.iterations or state.kind != kind:
        return None
    if kind == DONE and state.iteration and state.seconds:
        return Measured(run.speed_key, state.seconds / state.iteration)
    progress = state.iteration - state.began_at
    if kind == RUNNING and state.seconds and progress > run.iterations / 20:
        return Measured(run.speed_key, state.seconds / progress)
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


class Display:
    """A bar on a terminal, a line now and then elsewhere, silent with MOCO_PROGRESS=off."""

    def __init__(self, name: str, every_seconds: float) -> None:
        self._name, self._bar, self._every_seconds = name, None, every_seconds
        self._silent = os.environ.get("MOCO_PROGRESS") == "off"
        self._last = -math.inf
        if not self._silent and sys.stderr.isatty():
            from tqdm import tqdm

            bar_format = "{desc} {percentage:3.0f}%|{bar}| {elapsed}{postfix}"
            self._bar = tqdm(total=100, desc=name, bar_format=bar_format, dynamic_ncols=True)

    def show(self, forecast: Forecast, text: str) -> None:
        left = f"about {format_seconds(forecast.seconds_left)} left"
        if self._bar is not None:
            self._bar.n = 100 * forecast.done
            self._bar.set_postfix_str(f"{left}: {text}", refresh=True)
        elif not self._silent and time.monotonic() - self._last >= self._every_seconds:
            self._last = time.monotonic()
            line = f"{self._name}: {100 * forecast.done:.0f}%, {left}: {text}"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
