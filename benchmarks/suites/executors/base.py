"""What an executor is, and the registry that `--executor` looks it up in.

An executor hands out slots (`Executor.reserve`) and starts a run's process in them. What is
registered is a function named as the value of `--executor` that makes one from `Options`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fvcore.common.registry import Registry

from benchmarks.suites.keep import ALL
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import Run
from moco.common.errors import UserError

EXECUTORS = Registry("EXECUTORS")
# Torch and its libraries read these; more threads on one small run only get in each other's way.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
VISIBLE = "CUDA_VISIBLE_DEVICES"
# In the arguments of a run on several machines: what only the machine itself knows.
RANK, HOST, PORT = "<rank>", "<host>", "<port>"


@dataclass(frozen=True)
class Options:
    """What the command line says to an executor.

    Attributes:
        folder: of the suite; whatever has to be shared between runners is below it.
        workers: runs at a time on the CPU, jobs in the queue of a cluster; 0: the default.
        slurm: the `KEY=VALUE` of `--slurm`.
        keep: which checkpoints stay, where jobs have to see to that, see benchmarks/suites/keep.py.

    Raises:
        UserError: fewer than no workers.
    """

    folder: Path
    workers: int = 0
    slurm: Sequence[str] = ()
    keep: str = ALL

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise UserError(f"--workers: got {self.workers}, expected at least 1")


class Process(ABC):
    """A process that was started, or a job of a cluster, which notes its run's failure itself.

    Attributes:
        why: what is known about its end beside its log.
        cancelled: somebody took it out of the queue while this runner watched it.
    """

    why = ""
    cancelled = False

    @abstractmethod
    def poll(self) -> int | None:
        """Its exit code (negative: the signal that killed it), or None while it runs."""

    def terminate(self) -> None:  # noqa: B027 - jobs belong to their queue
        """Ask it to save and end."""

    def kill(self) -> None:  # noqa: B027
        """End it, and what it has started, at once."""

    def is_queued(self) -> bool:
        return False

    def in_charge(self) -> bool:
        """Whether its end is still to be judged; another runner may have done it."""
        return True

    def forget(self) -> None:  # noqa: B027
        """Its end was judged."""


@dataclass(frozen=True)
class Slots:
    """Devices that are reserved for one run, with their locks; a cluster finds its own."""

    devices: tuple[str, ...] = ()
    locks: tuple[Lock, ...] = ()

    def release(self) -> None:
        """Free them for others; they stay taken while a process started in them lives."""
        for lock in self.locks:
            lock.release()


class Executor(ABC):
    """Where runs are computed.

    Attributes:
        gpus: number of GPUs in all, 0 for a CPU executor.
        remote: its processes are jobs on other machines: they wait in a queue, take the locks of
            their runs themselves when they begin, and continue when the runner is stopped.
    """

    gpus: int = 0
    remote: bool = False

    @abstractmethod
    def parallel(self, gpus: int) -> int:
        """How many runs of this many GPUs are computed at once; estimates depend on it."""

    @abstractmethod
    def reserve(self, gpus: int) -> Slots | None:
        """Slots for a run of this many GPUs (0: one CPU process), or None: not now."""

    @abstractmethod
    def start(self, run: Run, argv: Sequence[str], lock: Lock, slots: Slots) -> Process:
        """Start a process that keeps the run's lock as long as it lives."""

    @abstractmethod
    def where(self) -> str:
        """For people: `on 8 GPUs`."""

    def machines(self, gpus: int) -> int:
        """On how many machines a run of this many GPUs is computed."""
        return 1

    def problems(self, sizes: Collection[int]) -> list[str]:
        """Why runs of these numbers of GPUs would not be started, one line each."""
        return []

    def submit(self) -> None:  # noqa: B027 - processes of this machine have started
        """Send off together what was started since the last call."""

    def adopt(self, run: Run) -> Process | None:
        """The job that another runner has submitted for a run, and whose end is not judged."""
        return None

    def shutdown_message(self) -> str:
        """What becomes of processes that are left behind, and how to continue."""
        return "the same command continues from here"
