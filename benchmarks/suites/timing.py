"""Timing of runs whose speed is unknown, by 20 iterations of each kind on this machine."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.suites.executors.base import Executor
from benchmarks.suites.forecast import Speeds, estimate
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import Run, read_json, why_failed
from moco.common.errors import UserError, printable, say
from moco.common.files import atomic_write_json

SPEEDS_NAME = ".speeds.json"
ITERATIONS = 20  # after the first logged one, as the iterations before that are slower
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class TimedSpeeds:
    """File of the speeds that were timed for a suite, so that a later call does not time again.

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
        """Store speeds; the folder is made."""
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
