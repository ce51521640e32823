"""Where the runs of a suite are computed: the GPUs of this machine, its CPU cores, or a cluster.

An executor hands out room (`Executor.reserve`) and starts a process in it. A room is locked
by files below the suite's folder, and the locks are inherited by the process: two runners on one
machine share its devices, and a process whose runner was killed keeps its own.

Another kind of executor (a cluster's queue, benchmarks/suites/executors/slurm.py) implements the
protocols below; it
is told what to run by a `Launch`, and hands back something that can be asked and stopped.
"""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.suites.jobs import ONE_THREAD
from benchmarks.suites.keep import ALL
from benchmarks.suites.locks import Claim
from benchmarks.suites.suite import RunSpec
from moco.common.distributed import usable_cores
from moco.common.errors import UserError

SLOTS_NAME = ".slots"
VISIBLE = "CUDA_VISIBLE_DEVICES"
KINDS = ("auto", "local", "cpu", "slurm")
# In the words of a run on several machines: what only the machine itself knows, see RunJob.
RANK, HOST, PORT = "<rank>", "<host>", "<port>"


@dataclass(frozen=True)
class Launch:
    """One process to start.

    Attributes:
        log: stdout and stderr are appended to it.
        claims: locks that the process has to keep as long as it lives.
        run: what the process computes, for executors that have to find it again.
        keep: which of its checkpoints stay, where the executor has to see to that.
    """

    command: tuple[str, ...]
    log: Path
    claims: tuple[Claim, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    run: RunSpec | None = None
    keep: str = ALL


class Process(Protocol):
    """A process that was started."""

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that killed it), or None while it runs."""

    def terminate(self) -> None:
        """Ask it to save and end."""

    def kill(self) -> None:
        """End it, and what it has started, at once."""

    def waits(self) -> bool:
        """Whether it has not begun yet, because it waits in a queue."""

    def why(self) -> str:
        """What is known about its end beside its log; empty: nothing."""

    def cancelled(self) -> bool:
        """Whether somebody took it out of the queue while this runner watched it."""

    def in_charge(self) -> bool:
        """Whether its end is still to be judged; another runner may have done it."""

    def forget(self) -> None:
        """Its end was judged."""


class Room(Protocol):
    """Devices for one run."""

    def release(self) -> None:
        """Free them for others; they stay taken while a process started in them lives."""


class Executor(Protocol):
    """Where runs are computed.

    Attributes:
        gpus: number of GPUs in all, 0 for a CPU executor.
        places: how many of the smallest runs fit at once (remote: how many jobs); estimates depend
            on it.
        remote: processes are jobs on other machines: they wait in a queue, take the claims of their
            runs themselves when they begin, and go on when the runner is stopped.
    """

    gpus: int
    places: int
    remote: bool

    def reserve(self, gpus: int) -> Room | None:
        """Room for a run of so many GPUs (0: one CPU process), or None: not now."""

    def start(self, launch: Launch, room: Room) -> Process:
        """Start a process in a room; a remote one is sent off by `submit`."""

    def submit(self) -> None:
        """Send off together what was started since the last call."""

    def adopt(self, run: RunSpec) -> Process | None:
        """The process that another runner has started for a run, and whose end is not judged."""

    def machines(self, gpus: int) -> int:
        """On how many machines a run of so many GPUs is computed."""

    def problems(self, sizes: Collection[int]) -> list[str]:
        """Why runs of so many GPUs would not be started, one line each; starts nothing."""

    def where(self) -> str:
        """For people: `on 8 GPUs`."""

    def farewell(self, processes: Sequence[Process]) -> str:
        """What becomes of processes that are left behind, and how to go on."""


@dataclass(frozen=True)
class LocalRoom:
    """Devices of this machine, each with its lock."""

    devices: tuple[str, ...]
    locks: tuple[Claim, ...]

    def release(self) -> None:
        for lock in self.locks:
            lock.release()


class LocalProcess:
    """A process of this machine, in a session of its own.

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

    def waits(self) -> bool:
        return False

    def why(self) -> str:
        return ""

    def cancelled(self) -> bool:
        return False

    def in_charge(self) -> bool:
        return True

    def forget(self) -> None:
        pass


class LocalExecutor:
    """Processes on the devices of this machine, one run per group of devices.

    Args:
        folder: of the suite; the locks of the devices are below it.
        devices: names of GPUs as CUDA_VISIBLE_DEVICES takes them, or of places on the CPU.
        cpu: the devices are places for one CPU process of one thread each.
    """

    remote = False

    def __init__(self, folder: Path, devices: Sequence[str], *, cpu: bool) -> None:
        self._slots = folder / SLOTS_NAME / socket.gethostname()
        self._devices, self._cpu = tuple(devices), cpu
        self.gpus = 0 if cpu else len(self._devices)
        self.places = len(self._devices)

    def reserve(self, gpus: int) -> LocalRoom | None:
        """The first free devices; none is kept while there are too few."""
        wanted, devices, locks = max(gpus, 1), [], []
        for device in self._devices:
            lock = Claim.take(self._slots / f"{'cpu' if self._cpu else 'gpu'}-{device}.lock")
            if lock is not None:
                devices.append(device)
                locks.append(lock)
            if len(locks) == wanted:
                return LocalRoom(tuple(devices), tuple(locks))
        LocalRoom(tuple(devices), tuple(locks)).release()
        return None

    def start(self, launch: Launch, room: Room) -> LocalProcess:
        """Start a process that sees the room's devices and no others."""
        assert isinstance(room, LocalRoom)
        environment = {
            **os.environ,
            "MOCO_PROGRESS": "off",
            VISIBLE: "" if self._cpu else ",".join(room.devices),
            **(ONE_THREAD if self._cpu else {}),
            **launch.environment,
        }
        with open(launch.log, "ab") as log:
            process = subprocess.Popen(
                launch.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[claim.fd for claim in (*launch.claims, *room.locks)],
                start_new_session=True,
            )
        return LocalProcess(process)

    def submit(self) -> None:
        pass

    def adopt(self, run: RunSpec) -> None:
        return None  # a process of another runner is known by its claim

    def machines(self, gpus: int) -> int:
        return 1

    def problems(self, sizes: Collection[int]) -> list[str]:
        return []

    def where(self) -> str:
        if self.gpus:
            return f"on {self.gpus} GPU{'s' if self.gpus > 1 else ''}"
        return f"on the CPU, {self.places} at a time"

    def farewell(self, processes: Sequence[Process]) -> str:
        return "the same command goes on from here"


def make_executor(kind: str, folder: Path, workers: int = 0, slurm: Sequence[str] = ()) -> Executor:
    """The executor that `--executor` names.

    Args:
        kind: one of `KINDS`; `auto` is `local` where a GPU is visible, else `cpu`.
        workers: processes at a time on the CPU, jobs in the queue of a cluster; 0: one per core,
            any number.
        slurm: the words of `--slurm`.

    Raises:
        UserError: no GPU for `local`, workers for GPUs, options that a kind does not have or a
            cluster that is not there.
    """
    if kind not in KINDS:
        raise UserError(f"--executor: got {kind!r}, choices are {', '.join(KINDS)}")
    if kind == "slurm":
        from benchmarks.suites.executors.slurm import make_slurm_executor

        return make_slurm_executor(folder, slurm, workers)
    if slurm:
        raise UserError(f"--slurm {slurm[0]}: is for --executor slurm; got --executor {kind}")
    gpus = () if kind == "cpu" else visible_gpus()
    if kind == "local" and not gpus:
        raise UserError(
            f"--executor local: no GPU is visible ({VISIBLE} is "
            f"{os.environ.get(VISIBLE, 'not set')!r}); use --executor cpu"
        )
    if workers < 0 or (workers and gpus):
        raise UserError(
            f"--workers: got {workers}, expected at least 1, and only on the CPU (on GPUs, "
            "--gpus-per-run tells how many run at a time)"
        )
    if gpus:
        return LocalExecutor(folder, gpus, cpu=False)
    cores = workers or usable_cores()
    return LocalExecutor(folder, [str(i) for i in range(cores)], cpu=True)


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
