"""Processes on the GPUs or cores of this machine: `--executor local`, `cpu` and `auto`.

A device is locked by a file below the suite's folder, and the locks are inherited by the processes:
two runners on one machine share its devices, and a process whose runner was killed keeps its own.
"""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.suites.executors.base import (
    EXECUTORS,
    ONE_THREAD,
    VISIBLE,
    Executor,
    Options,
    Process,
    Slots,
)
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import Run
from moco.common.children import own_modules
from moco.common.distributed import usable_cores
from moco.common.errors import UserError


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
        self._process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class LocalExecutor(Executor):
    """Processes on named devices.

    Args:
        folder: of the suite.
        gpus: names of the devices, as CUDA_VISIBLE_DEVICES takes them; none: on the CPU.
        cores: number of slots on the CPU, of one thread each.
    """

    def __init__(self, folder: Path, gpus: Sequence[str] = (), cores: int = 0) -> None:
        self._locks = folder / ".slots" / socket.gethostname()
        self._devices = tuple(gpus) or tuple(map(str, range(cores)))
        self.gpus = len(gpus)

    def where(self) -> str:
        if self.gpus:
            return f"on {self.gpus} GPU{'s' if self.gpus > 1 else ''}"
        return f"on the CPU, {len(self._devices)} at a time"

    def parallel(self, gpus: int) -> int:
        return len(self._devices) // max(gpus, 1)

    def reserve(self, gpus: int) -> Slots | None:
        """The first free devices; none is kept while there are too few."""
        slots = Slots()
        for device in self._devices:
            lock = Lock.take(self._locks / f"{'gpu' if self.gpus else 'cpu'}-{device}.lock")
            if lock is not None:
                slots = Slots((*slots.devices, device), (*slots.locks, lock))
            if len(slots.locks) == max(gpus, 1):
                return slots
        slots.release()
        return None

    def start(self, run: Run, argv: Sequence[str], lock: Lock, slots: Slots) -> LocalProcess:
        own = {**own_modules(), "MOCO_PROGRESS": "off", VISIBLE: ",".join(slots.devices)}
        own |= {} if self.gpus else {VISIBLE: "", **ONE_THREAD}
        with open(run.log, "ab") as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **own},
                pass_fds=[each.fd for each in (lock, *slots.locks)],
                start_new_session=True,
            )
        return LocalProcess(process)


@EXECUTORS.register()
def cpu(options: Options) -> LocalExecutor:
    """One run per core, each with one thread, or as many as `--workers` says."""
    return LocalExecutor(options.folder, cores=options.workers or usable_cores())


@EXECUTORS.register()
def local(options: Options) -> LocalExecutor:
    """All visible GPUs, as many runs side by side as fit.

    Raises:
        UserError: there is none, or a number of workers.
    """
    gpus = visible_gpus()
    if not gpus:
        raise UserError(
            f"--executor local: no GPU is visible ({VISIBLE} is "
            f"{os.environ.get(VISIBLE, 'not set')!r}); use --executor cpu"
        )
    if options.workers:
        raise UserError(
            f"--workers: got {options.workers}, but is for the CPU; on GPUs, --gpus-per-run tells "
            "how many run at a time"
        )
    return LocalExecutor(options.folder, gpus)


@EXECUTORS.register()
def auto(options: Options) -> LocalExecutor:
    """`local` where a GPU is visible, else `cpu`."""
    return local(options) if visible_gpus() else cpu(options)


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that a process started here would see, without importing torch."""
    chosen = os.environ.get(VISIBLE)
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",") if name.strip()]
        # As CUDA reads it: what follows a -1 is not visible.
        return tuple(names[: names.index("-1")] if "-1" in names else names)
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(done.stdout.split()) if done.returncode == 0 else ()
