"""Base class of executors, and the registry of `--executor`.

An executor reserves devices (`Executor.reserve`) and starts a run's process on them. The registry
holds functions named as the values of `--executor`, which build an executor from `Options`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fvcore.common.registry import Registry

from benchmarks.suites.checkpoints import ALL
from benchmarks.suites.locks import Lock
from benchmarks.suites.runs import Run
from moco.common.errors import UserError

EXECUTORS = Registry("EXECUTORS")
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Placeholders in the arguments of a run on several machines, which each machine fills in.
RANK, HOST, PORT = "<rank>", "<host>", "<port>"


@dataclass(frozen=True)
class Options:
    """Options of an executor from the command line.

    Attributes:
        folder: Folder of the suite.
        workers: Parallel runs on the CPU, or jobs in the queue of a cluster; 0: the default.
        slurm: `KEY=VALUE` items of `--slurm`.
        keep: Policy of the checkpoints, for jobs that delete their own, see
            benchmarks/suites/checkpoints.py.
        stop_seconds: Time that runs have to save.

    Raises:
        UserError: If the number of workers is negative.
    """

    folder: Path
    workers: int = 0
    slurm: Sequence[str] = ()
    keep: str = ALL
    stop_seconds: float = 120.0

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise UserError(f"--workers: got {self.workers}, expected at least 1")


class Process(ABC):
    """Process of a run, or a job of a cluster, which records its run's failure itself.

    Attributes:
        why: Description of its end, in addition to the log; empty if there is none.
        cancelled: Whether its job was removed from the queue while this runner watched it.
    """

    why = ""
    cancelled = False

    @abstractmethod
    def poll(self) -> int | None:
        """Return its exit code (negative: the signal that killed it), or None while it runs."""

    def terminate(self) -> None:  # noqa: B027 - a runner leaves jobs in their queue
        """Send SIGTERM, so that it saves and ends."""

    def kill(self) -> None:  # noqa: B027
        """Kill it and the processes that it has started."""

    def is_queued(self) -> bool:
        """Return whether it is a job that has not started."""
        return False


class Executor(ABC):
    """Base class of executors.

    Attributes:
        gpus: Total number of GPUs; 0 for a CPU executor.
        remote: Whether its processes are jobs on other machines. Jobs wait in a queue for the runs
            that they depend on, take the lock of their run when they start, and continue when the
            runner is stopped.
    """

    gpus: int = 0
    remote: bool = False

    @abstractmethod
    def parallel(self, gpus: int) -> int:
        """Return how many runs of `gpus` GPUs are computed at once, for estimates."""

    @abstractmethod
    def reserve(self, gpus: int) -> Sequence[str] | None:
        """Reserve devices for a run of `gpus` GPUs (0: one CPU process), or return None."""

    def release(self, devices: Sequence[str]) -> None:  # noqa: B027 - a cluster assigns devices
        """Free devices for other runs."""

    @abstractmethod
    def start(self, run: Run, lock: Lock, devices: Sequence[str]) -> Process:
        """Start a process that holds the run's lock as long as it lives."""

    @abstractmethod
    def where(self) -> str:
        """Describe the place for a message, e.g. `on 8 GPUs`."""

    def machines(self, gpus: int) -> int:
        """Return the number of machines of a run of `gpus` GPUs."""
        return 1

    def problems(self, sizes: Collection[int]) -> list[str]:
        """Return why runs of these numbers of GPUs could not start, one line each."""
        return []

    def submit(self) -> None:  # noqa: B027 - `start` has started processes of this machine
        """Submit together the jobs that were started since the last call."""

    def adopt(self, run: Run) -> Process | None:
        """Return the job that an earlier runner has submitted for a run, if there is one."""
        return None

    def shutdown_message(self) -> str:
        """Return how to continue, and what happens to jobs in the queue, for a message."""
        return "the same command continues from here"


class PlanExecutor(Executor):
    """Placeholder for the scheduler of a written plan, with any number of GPUs."""

    gpus = 1 << 20
    remote = True

    def parallel(self, gpus: int) -> int:
        """Return 1, as the scheduler is unknown."""
        return 1

    def reserve(self, gpus: int) -> None:
        """Return None: a plan is only written."""
        return None

    def start(self, run: Run, lock: Lock, devices: Sequence[str]) -> Process:
        """Raise NotImplementedError."""
        raise NotImplementedError("a plan is computed by something else")

    def where(self) -> str:
        """Return the words of the message that a plan is written."""
        return "for a plan"
