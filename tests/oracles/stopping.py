"""Runs of train_net.py that are watched, and told something, from outside."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.detection.conftest import ROOT

TRAIN_NET = [sys.executable, str(ROOT / "detection" / "train_net.py")]


def start(command: list[str], out: Path) -> subprocess.Popen:
    """A run in a session of its own, which writes into ``out``."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MOCO_PROGRESS": "off"}
    with out.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)


def wait_for(condition: Callable[[], object], process: subprocess.Popen, out: Path) -> None:
    """Until then the run must not end."""
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, out.read_text()[-2000:]
        assert time.monotonic() < end
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """The training processes of a run's first process, the oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(stat[1]) == pid and b"spawn_main" in line:
                found.append((int(stat[19]), int(entry.name)))
    return [number for _, number in sorted(found)]


def nobody_left(process: subprocess.Popen) -> bool:
    """Whether the whole session of a run ends, and soon."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
