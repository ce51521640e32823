"""Processes on the devices of this machine, one run per group of devices.

A device is locked by a file below the suite's folder, and the locks are inherited by the processes:
two runners on one machine share its devices, and a process whose runner was killed keeps its own.
"""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suites.executors.base import ONE_THREAD, VISIBLE, Executor, Process, Slots
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import Run

SLOTS_NAME = ".slots"


@dataclass(frozen=True)
class DeviceSlots(Slots):
    """Devices of this machine, each with its lock."""

    devices: tuple[str, ...]
    locks: tuple[Lock, ...]

    def release(self) -> None:
        for lock in self.locks:
            lock.release()


class LocalProcess(Process):
    """A process in a session of its own.

    Ctrl-C in the terminal therefore reaches the runner alone, which then asks its processes to
    save; and all that a process has started can be ended with it.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def terminate(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class ProcessExecutor(Executor):
    """Processes on named devices.

    Args:
        folder: of the suite.
        gpus: names of the devices, as CUDA_VISIBLE_DEVICES takes them; none: on the CPU.
        cores: number of slots on the CPU, of one thread each.
    """

    def __init__(self, folder: Path, gpus: Sequence[str] = (), cores: int = 0) -> None:
        self._slots = folder / SLOTS_NAME / socket.gethostname()
        self._devices = tuple(gpus) or tuple(map(str, range(cores)))
        self.gpus = len(gpus)

    def where(self) -> str:
        if self.gpus:
            return f"on {self.gpus} GPU{'s' if self.gpus > 1 else ''}"
        return f"on the CPU, {len(self._devices)} at a time"

    def parallel(self, gpus: int) -> int:
        return len(self._devices) // max(gpus, 1)

    def reserve(self, gpus: int) -> DeviceSlots | None:
        """The first free devices; none is kept while there are too few."""
        wanted, devices, locks = max(gpus, 1), [], []
        for device in self._devices:
            lock = Lock.take(self._slots / f"{'gpu' if self.gpus else 'cpu'}-{device}.lock")
            if lock is not None:
                devices.append(device)
                locks.append(lock)
            if len(locks) == wanted:
                return DeviceSlots(tuple(devices), tuple(locks))
        DeviceSlots(tuple(devices), tuple(locks)).release()
        return None

    def start(self, run: Run, argv: Sequence[str], lock: Lock, slots: Slots) -> LocalProcess:
        assert isinstance(slots, DeviceSlots)
        own = {"MOCO_PROGRESS": "off", VISIBLE: ",".join(slots.devices) if self.gpus else ""}
        with open(run.log, "ab") as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **own, **({} if self.gpus else ONE_THREAD)},
                pass_fds=[each.fd for each in (lock, *slots.locks)],
                start_new_session=True,
            )
        return LocalProcess(process)
