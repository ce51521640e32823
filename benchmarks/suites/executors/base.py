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


@dataclass(frozen=True)
class Options:
    """Options of an executor from the command line.

    Attributes:
        folder: Folder of the suite.
        workers: Parallel runs on the CPU, or jobs in the queue of a cluster; 0: the default.
        slurm: `KEY=VALUE` items of `--slurm`.
        keep: Policy of the checkpoints, for jobs, which delete checkpoints themselves, see
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
    """Process of a run, or a job on a cluster, which records the failure of its run itself.

    Attributes:
        why: Reason why the process ended, in addition to the log; empty if unknown.
        cancelled: Whether the job was removed from the queue while this runner watched it.
    """

    why = ""
    cancelled = False

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit code (negative: the number of a fatal signal), or None if running."""

    def terminate(self) -> None:  # noqa: B027 - a runner leaves jobs in their queue
        """Send SIGTERM, so that the run saves and ends."""

    def kill(self) -> None:  # noqa: B027
        """Kill the process and its descendants."""

    def is_queued(self) -> bool:
        """Return whether this is a job that has not started."""
        return False


class Executor(ABC):
    """Base class of executors.

    Attributes:
        gpus: Total number of GPUs; 0 for a CPU executor.
        remote: Whether processes are jobs on other machines. A job waits in a queue for the runs
            that it depends on, acquires the lock of its run when it starts, and continues when the
            runner is stopped.
    """

    gpus: int = 0
    remote: bool = False

    @abstractmethod
    def parallel(self, gpus: int) -> int:
        """Return the number of runs with `gpus` GPUs that are computed at once, for estimates."""

    @abstractmethod
    def reserve(self, gpus: int) -> Sequence[str] | None:
        """Reserve devices for a run of `gpus` GPUs (0: one CPU process), or return None."""

    def release(self, devices: Sequence[str]) -> None:  # noqa: B027 - a cluster assigns devices
        """Free devices for other runs."""

    @abstractmethod
    def start(self, run: Run, lock: Lock, devices: Sequence[str]) -> Process:
        """Start the process of a run, which holds the lock of the run as long as it lives."""

    @abstractmethod
    def where(self) -> str:
        """Return where runs are computed, for a message, e.g. `on 8 GPUs`."""

    def machines(self, gpus: int) -> int:
        """Return the number of machines of a run of `gpus` GPUs."""
        return 1

    def problems(self, sizes: Collection[int]) -> list[str]:
        """Return one line for each number of GPUs that this executor cannot run."""
        return []

    def submit(self) -> None:  # noqa: B027 - `start` has started processes of this machine
        """Submit the jobs that were started since the last call."""

    def adopt(self, run: Run) -> Process | None:
        """Return the job that an earlier runner submitted for a run, or None."""
        return None

    def shutdown_message(self) -> str:
        """Return how to continue and what happens to queued jobs, for a message."""
        return "the same command continues from here"


class PlanExecutor(Executor):
    """Placeholder for the scheduler that computes a written plan, with any number of GPUs."""

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
        """Return the end of the message about the runs of a plan."""
        return "for a plan"
