"""Timing of runs whose speed is unknown, by 20 iterations of each kind on this machine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.suites.executors.base import Executor
from benchmarks.suites.forecast import Speeds, estimate
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import Run, why_failed
from moco.common.errors import UserError, printable, say

ITERATIONS = 20  # after the first logged one, as the iterations before that are slower
POLL_SECONDS = 0.05


def time_runs(
    runs: Sequence[Run],
    executor: Executor,
    command: Callable[[Run, Path], Sequence[str]],
    measured: Speeds,
) -> Speeds:
    """Start a run of each kind in a temporary folder, and kill it after `ITERATIONS`.

    Args:
        runs: Runs whose dependencies are done.
        executor: Executor of this machine.
        command: Function that returns a run's command for another folder.
        measured: Speeds that are known, which are not measured again.

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
    """Measure a run's seconds per iteration; return none if it ends before."""
    devices, lock = executor.reserve(run.gpus), Lock.take(run.lock)
    assert devices is not None and lock is not None  # no other run has been started
    say(f"timing {run.title}")
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
        say(f"note: {run.title} could not be timed: {printable(why_failed(run, code, 0))}")
        return []
    finally:
        process.kill()
        lock.release()
        executor.release(devices)
