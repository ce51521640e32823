"""Executors for the GPUs or cores of this machine: `--executor local`, `cpu` and `auto`."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess

from benchmarks.suites import forkserver
from benchmarks.suites.executors.base import EXECUTORS, VISIBLE, Executor, Options, Process
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import Run
from moco.common.distributed import usable_cores
from moco.common.errors import UserError, plural
from moco.common.shipped import own_modules


class LocalProcess(Process):
    """Process that leads a session.

    Ctrl-C in the terminal therefore reaches only the runner, which then terminates its processes;
    and a process can be killed together with those that it has started.
    """

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    def poll(self) -> int | None:
        """Return the exit code, or None if running."""
        return self._process.exitcode

    def terminate(self) -> None:
        """Send SIGTERM to this process only."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the session, and wait until the process has ended."""
        assert self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


class LocalExecutor(Executor):
    """Executor of processes on the devices of this machine.

    Args:
        gpus: Names of the devices for CUDA_VISIBLE_DEVICES; none: on the CPU.
        cores: Number of slots on the CPU, of one thread each.
        stop_seconds: Time that a run has to save when its runner has ended.
    """

    def __init__(self, gpus: Sequence[str] = (), cores: int = 0, stop_seconds: float = 120) -> None:
        self._devices = tuple(gpus) or tuple(map(str, range(cores)))
        self._taken: set[str] = set()
        self._stop_seconds = stop_seconds
        self.gpus = len(gpus)

    def where(self) -> str:
        """Return e.g. `on 2 GPUs` or `on the CPU, 4 at a time`."""
        if self.gpus:
            return f"on {plural(self.gpus, 'GPU')}"
        return f"on the CPU, {len(self._devices)} at a time"

    def parallel(self, gpus: int) -> int:
        """Return how many runs of `gpus` GPUs fit on the devices."""
        return len(self._devices) // max(gpus, 1)

    def reserve(self, gpus: int) -> Sequence[str] | None:
        """Reserve the first free devices, or none if there are too few."""
        free = [device for device in self._devices if device not in self._taken][: max(gpus, 1)]
        if len(free) < max(gpus, 1):
            return None
        self._taken.update(free)
        return free

    def release(self, devices: Sequence[str]) -> None:
        """Mark devices as free."""
        self._taken.difference_update(devices)

    def start(self, run: Run, lock: Lock, devices: Sequence[str]) -> LocalProcess:
        """Fork a child that sees only the reserved devices; on the CPU it has one thread."""
        own = {**own_modules(), "MOCO_PROGRESS": "off", VISIBLE: ",".join(devices)}
        own |= {} if self.gpus else {VISIBLE: "", **forkserver.ONE_THREAD}
        environment = {**os.environ, **own}
        return LocalProcess(
            forkserver.start_command(run.argv, run.log, environment, lock.fd, self._stop_seconds)
        )


@EXECUTORS.register()
def cpu(options: Options) -> LocalExecutor:
    """Build an executor of one run per core, or of `--workers` runs, with one thread each."""
    return LocalExecutor(cores=options.workers or usable_cores(), stop_seconds=options.stop_seconds)


@EXECUTORS.register()
def local(options: Options) -> LocalExecutor:
    """Build an executor for all visible GPUs.

    Raises:
        UserError: If no GPU is visible, or --workers is given.
    """
    gpus = visible_gpus()
    if not gpus:
        raise UserError(
            f"--executor local: no GPU is visible ({VISIBLE} is "
            f"{os.environ.get(VISIBLE, 'not set')!r}); use --executor cpu"
        )
    if options.workers:
        raise UserError(
            f"--workers: got {options.workers}, but applies to CPU runs only; on GPUs, "
            "--gpus-per-run determines how many runs are computed at a time"
        )
    return LocalExecutor(gpus, stop_seconds=options.stop_seconds)


@EXECUTORS.register()
def auto(options: Options) -> LocalExecutor:
    """Build the executor `local` if a GPU is visible, else `cpu`."""
    return local(options) if visible_gpus() else cpu(options)


def visible_gpus() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that a child process would see, without importing torch.

    By UUID, each device is reserved once, whatever names CUDA_VISIBLE_DEVICES has for it.
    """
    chosen, uuids = os.environ.get(VISIBLE), _uuids()
    if chosen is None:
        return tuple(dict.fromkeys(uuids.values()))
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    # CUDA ignores the devices after a -1.
    names = names[: names.index("-1")] if "-1" in names else names
    return tuple(dict.fromkeys(_uuid(name, uuids) for name in names))


def _uuid(name: str, uuids: Mapping[str, str]) -> str:
    """Return the UUID of a device named by its index, UUID, or the start of a UUID."""
    if name in uuids or name.isdigit():
        return uuids.get(name, name)
    return next((uuid for full, uuid in uuids.items() if full.startswith(name)), name)


def _uuids() -> dict[str, str]:
    """Map every name that CUDA accepts for a GPU or MIG device to the UUID of the device.

    A GPU that is divided by MIG stands for its first device, as in CUDA.
    """
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    gpus, parts = [], []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        if found := _GPU.match(line):
            gpus.append(found.groups())
            parts.append([found["uuid"]])
        elif gpus and (found := _MIG.match(line)):
            parts[-1].append(found["uuid"])
    # CUDA counts the fastest GPUs first, which is the order of the list if all are equal.
    equal = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({g[1] for g in gpus}) == 1
    uuids: dict[str, str] = {}
    for (index, _, gpu), (_, *own) in zip(gpus, parts, strict=True):
        uuids |= {gpu: own[0] if own else gpu, **{uuid: uuid for uuid in own}}
        if equal:
            uuids[index] = uuids[gpu]
    return uuids


_GPU = re.compile(r"GPU (\d+): (.*) \(UUID: (?P<uuid>GPU-[^)]+)\)")
_MIG = re.compile(r"\s+MIG .*\(UUID: (?P<uuid>MIG-[^)]+)\)")
