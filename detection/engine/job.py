"""Job of an engine: the training or evaluation, and the processes that run it."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from fvcore.common.config import CfgNode

from convert.verify import Converted
from moco.common import distributed
from moco.common.errors import UserError
from moco.common.run import metrics_lines

_DONE = "iterations_done"  # attribute of an error


@dataclasses.dataclass(frozen=True)
class Processes:
    """Numbers of machines and processes, as in Detectron2's launch.

    Attributes:
        num_gpus: Number of processes on this machine, one per GPU; the same number on the CPU.
        num_machines: Number of machines.
        machine_rank: Index of this machine.
        dist_url: `tcp://host:port` of the first machine; "auto" for a single one.
        started: Whether torchrun has started the processes, of which this is one.
    """

    num_gpus: int = 1
    num_machines: int = 1
    machine_rank: int = 0
    dist_url: str = "auto"
    started: bool = False

    def __post_init__(self) -> None:
        """Raise UserError for numbers or an address that no task can have."""
        if not 0 <= self.machine_rank < self.num_machines or self.num_gpus < 1:
            raise UserError(
                f"--num-gpus {self.num_gpus} --num-machines {self.num_machines} "
                f"--machine-rank {self.machine_rank}: expected at least one of each, and a rank "
                "below the number of machines"
            )
        several = self.num_machines > 1 and not self.started
        if several and not re.fullmatch(r"tcp://.+:\d+", self.dist_url):
            raise UserError(
                f"--dist-url: got {self.dist_url}, --num-machines needs "
                "tcp://<first machine>:<port>"
            )

    @property
    def world_size(self) -> int:
        """Number of processes on all machines."""
        return self.num_gpus * self.num_machines


ONE_PROCESS = Processes()


@dataclasses.dataclass(frozen=True)
class Job:
    """Training and evaluation of a task, or its evaluation only.

    Attributes:
        engine: Name of the engine, for `detection.config.engines.find_engine`.
        cfg: Configuration that detection.config.task.load_task has checked; it fits `processes`,
            and SEED is not negative. The caller holds the lock of OUTPUT_DIR, which gets log.txt,
            metrics.json, model_*.pth, last_checkpoint and inference/.
        weights: Converted backbone; None for random weights and for evaluation only.
        resume: Whether to continue from the last checkpoint in OUTPUT_DIR, if there is one.
        eval_only: Whether to evaluate the trained model of MODEL.WEIGHTS only.
        visualize: Number of test images to draw the predictions on.
        processes: Processes that run the job together.
        imports: Modules of the user, which every process imports.
    """

    engine: str
    cfg: CfgNode
    weights: Converted | None = None
    resume: bool = False
    eval_only: bool = False
    visualize: int = 0
    processes: Processes = ONE_PROCESS
    imports: tuple[str, ...] = ()


def import_modules(names: Iterable[str]) -> list[str]:
    """Import the user's modules, and return a line about each.

    Raises:
        UserError: If one cannot be imported.
    """
    lines = []
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # The user's code may raise anything.
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"--import {name}: {reason}; its folder has to be in PYTHONPATH"
            ) from error
        lines.append(f"import: {name} ({getattr(module, '__file__', None) or 'built in'})")
    return lines


def torchrun_processes() -> Processes | None:
    """Return the processes that torchrun has started; None without torchrun."""
    world, local = distributed.launched_processes(), distributed.local_processes()
    if world == 1:
        return None
    return Processes(local, world // local, distributed.launched_rank() // local, started=True)


def check_processes(cfg: CfgNode, processes: Processes, *, eval_only: bool = False) -> None:
    """Raise UserError if the machine or the task does not allow this number of processes."""
    available = torch.cuda.device_count()
    if cfg.MODEL.DEVICE != "cpu" and processes.num_gpus > available:
        flag = "--nproc-per-node" if processes.started else "--num-gpus"
        raise UserError(f"{flag} {processes.num_gpus}: this machine has {available} GPUs")
    if processes.world_size > 1 and ":" in cfg.MODEL.DEVICE:
        raise UserError(
            f"MODEL.DEVICE {cfg.MODEL.DEVICE} is one GPU for {processes.world_size} processes; "
            "set it to cuda"
        )
    if not eval_only and cfg.SOLVER.IMS_PER_BATCH % processes.world_size:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH {cfg.SOLVER.IMS_PER_BATCH} cannot be divided among "
            f"{processes.world_size} processes; SOLVER.REFERENCE_WORLD_SIZE scales it to them"
        )


@contextmanager
def counting(done: Callable[[], int]) -> Iterator[None]:
    """Attach the number of iterations done to an error that is raised in the context."""
    try:
        yield
    except Exception as error:
        set_iterations(error, done())
        raise


def set_iterations(error: Exception, done: int) -> None:
    """Attach the number of iterations done to an error."""
    setattr(error, _DONE, done)


def iterations_before(error: Exception, folder: Path) -> int:
    """Return the number of iterations done before an error.

    If the error has no number, as when a process was killed, it is read from metrics.json.
    """
    done: int | None = getattr(error, _DONE, None)
    if done is not None:
        return done
    return max((line["iteration"] + 1 for line in metrics_lines(folder) or ()), default=0)
