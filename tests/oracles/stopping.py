"""Runs that are watched, and get signals, from outside.

As a program: detection/train_net.py, held where the variable HOLD says, in all its processes.
"""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from moco.common.errors import run_cli
from moco.engine.stop import StopRequest
from tests.oracles.processes import processes

ROOT = Path(__file__).resolve().parents[2]
TRAIN_NET = [sys.executable, __file__]
HOLD = "MOCO_TEST_HOLD"
SECONDS = 300  # until a run that does not end is an error


def start(command: list[str], out: Path, hold: int = 0) -> subprocess.Popen:
    """A run in a session of its own, which writes into `out`; see `hold_at`."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), HOLD: str(hold)}
    with out.open("w", encoding="utf-8") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)


def hold_at(iteration: int) -> None:
    """In its `iteration`-th (from 1) this process says "held" and waits for a signal to stop.

    However late the signal comes, the run is not over, and how far it gets is known.
    """
    received, iterations = StopRequest.received.fget, itertools.count(1)
    assert received is not None

    def hold(self: StopRequest) -> int | None:
        number = received(self)
        if next(iterations) == iteration:
            print("held", flush=True)
            while number is None:
                time.sleep(0.01)
                number = received(self)
        return number

    StopRequest.received = property(hold)  # type: ignore[assignment,method-assign]


def held(processes: int, out: Path) -> Callable[[], bool]:
    """The condition that this many processes are."""
    return lambda: out.read_text(encoding="utf-8").count("held\n") == processes


def wait_for(condition: Callable[[], object], process: subprocess.Popen, out: Path) -> None:
    """Until then the run must not end."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, out.read_text(encoding="utf-8")[-2000:]
        assert time.monotonic() < end
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """The training processes of a run's first process, the oldest first."""
    found = [
        (int(stat[19]), number)
        for number, stat, line in processes()
        if int(stat[1]) == pid and "spawn_main" in line
    ]
    return [number for _, number in sorted(found)]


def nobody_left(process: subprocess.Popen) -> bool:
    """Whether the whole session of a run ends."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


if hold := int(os.environ.get(HOLD, "0")):  # also in what multiprocessing starts from this file
    hold_at(hold)
if __name__ == "__main__":
    from detection.train_net import main

    run_cli(main)
