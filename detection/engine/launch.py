"""Launching of the processes of a job: stop signals, and the result or the first error.

Detectron2's flags set the number of processes for both engines. The first process starts the
others, forwards signals to them, and receives the result or the first error through a file. Under
torchrun every process is already running.

torch's elastic launch is not used: after a stop signal it kills processes within 30 seconds, even
during an iteration, an evaluation or a checkpoint, and its error files do not distinguish errors of
the user, of the data and of numerics.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import torch

from detection.config.engines import find_engine
from detection.engine.job import Job, Processes, known_iterations, set_iterations
from detection.engine.trainer import work
from detection.engine.weights import Coverage, EngineResult
from moco.common import distributed
from moco.common.errors import DataError, NumericError, Preempted, UserError, kill_children
from moco.common.files import atomic_write_json, atomic_write_text, read_text
from moco.engine.stop import StopRequest, end, stop_signals

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 1800  # Timeout while another process evaluates, as in Detectron2.
_STOP_MARK = "stop"  # File next to the outcome, with the signal that the first process received.

# Function that runs one process's share of a job; its result is complete on the main process.
Work = Callable[[Job, StopRequest], EngineResult]


def run(job: Job) -> EngineResult:
    """Run a job in this process, or in new processes on this machine.

    After a stop signal (moco/engine/stop.py), all processes stop together at the end of the current
    iteration; if the signal comes during an evaluation, after the evaluation and one more
    iteration. A resumed run makes up for an evaluation that was due at the stop. Before the
    processes are connected, and in a job that only evaluates, there is nothing to save, and a
    signal ends the job.

    An error is that of the process that failed first.

    Raises:
        UserError: If configuration, weights or processes do not fit.
        DataError: If an image cannot be read.
        NumericError: If a loss is not finite.
        Preempted: If a signal requested a stop, and the state is saved.
        KeyboardInterrupt: If Ctrl-C requested a stop.
    """
    if job.processes.world_size == 1 or job.processes.started:
        with _connected(job), _stop_signals(StopRequest(), job) as stop:
            return work(job, stop)
    with TemporaryDirectory(prefix="detection-") as scratch:
        outcome = Path(scratch) / "outcome.json"
        # Otherwise torch logs that it ends the other processes before the error of the failed one.
        logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
        with _stop_signals(_ParentStop(outcome), job) as stop:
            failure: Exception | None = None
            try:
                _launch(job, outcome)
            except KeyboardInterrupt:  # The second Ctrl-C ends everything immediately.
                kill_children()
                raise
            except torch.multiprocessing.ProcessExitedException as error:
                # This process saw a child's end before the other children lost its connection.
                cause = error.signal_name or f"exit code {error.exit_code}"
                failure = distributed.LostProcess(
                    f"process {error.error_index} of this run died ({cause}); run the same command "
                    "with --resume to continue"
                )
            except Exception as error:
                failure = error
            if outcome.is_file():  # The error of the process that failed first, before `failure`.
                try:
                    return read_outcome(outcome)
                except Preempted as error:
                    end(stop.received or signal.SIGTERM, str(error))
            if failure is not None:
                if stop.received is None:
                    raise failure
                end(  # The signal ended the processes while they were starting.
                    stop.received,
                    f"stopped, but nothing was saved since the last checkpoint ({failure}); run "
                    "the same command with --resume to continue",
                )
    # The main process, which has the result, is on the first machine.
    return EngineResult({}, 0 if job.eval_only else job.cfg.SOLVER.MAX_ITER, 0.0, None)


def _launch(job: Job, outcome: Path) -> None:
    address = _address(job.processes)
    torch.multiprocessing.start_processes(
        _in_process, (job, address, outcome), job.processes.num_gpus, start_method="spawn"
    )


def _in_process(local_rank: int, job: Job, address: tuple[str, str], outcome: Path) -> None:
    """Run a process that `run` started, with the environment variables of torchrun."""
    processes = job.processes
    rank = processes.machine_rank * processes.num_gpus + local_rank
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(processes.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(processes.num_gpus),
        "GROUP_RANK": str(processes.machine_rank),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": address[1],
    }
    if job.cfg.MODEL.DEVICE == "cpu":  # else each process would take a GPU, if there are any
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Python's handler would only run after torch has stopped waiting for the other processes.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    report(job, work, outcome, rank=rank, local_rank=local_rank)


def _address(processes: Processes) -> tuple[str, str]:
    """Return host and port of the rendezvous."""
    if processes.dist_url != "auto":
        host, _, port = processes.dist_url.removeprefix("tcp://").rpartition(":")
        return host, port
    with socket.create_server(("127.0.0.1", 0)) as server:
        return "127.0.0.1", str(server.getsockname()[1])


@contextmanager
def _connected(job: Job) -> Iterator[None]:
    """Connect this process to the others; a signal ends a process that still waits for them."""
    device = job.cfg.MODEL.DEVICE
    own = f"cuda:{distributed.local_rank()}" if device == "cuda" else device
    session = distributed.session(torch.device(own), TIMEOUT_SECONDS, setting=None)
    with session, find_engine(job.engine).session():
        yield


def report(job: Job, work: Work, outcome: Path, *, rank: int, local_rank: int) -> None:
    """Run one process's share of a job, and write its result or error to `outcome`.

    Args:
        job: Job to run.
        work: Function that runs the share.
        outcome: File for the result of rank 0, or the error of the process that failed first.
        rank: Rank of this process on all machines.
        local_rank: Rank of this process on this machine.

    Raises:
        Exception: Any error of `work`, except a requested stop.
    """
    try:
        with _connected(job), _stop_signals(_WorkerStop(outcome), job) as stop:
            result = work(job, stop)
    except Preempted as error:
        if local_rank == 0:  # One process per machine reports the stop.
            atomic_write_json(outcome, {"preempted": str(error)})
        return
    except Exception as error:
        if isinstance(error, UserError):
            text, exit_code = str(error), error.exit_code
        else:
            logger.exception("process %d failed", rank)
            text, exit_code = " ".join(f"{type(error).__name__}: {error}".split()), None
        # The failure of another process may cause this error; the other's own message is better.
        consequence = exit_code is None or isinstance(error, distributed.LostProcess)
        if not outcome.is_file() or (not consequence and _is_consequence(outcome)):
            content = {
                "error": f"{text} (process {rank})",
                "exit_code": exit_code,
                "consequence": consequence,
                "trace": traceback.format_exc(),
                "iterations": known_iterations(error),
            }
            atomic_write_json(outcome, content)
        raise
    if rank == 0:
        # NaN is allowed here, because only `read_outcome` reads the file.
        atomic_write_text(outcome, json.dumps(dataclasses.asdict(result)))


def _is_consequence(outcome: Path) -> bool:
    """Return whether an outcome is no error, or one that another process's failure may cause."""
    content = json.loads(read_text(outcome))
    return "error" not in content or bool(content["consequence"])


def read_outcome(path: Path) -> EngineResult:
    """Read the file that `report` wrote: return the result, or raise the error.

    Raises:
        UserError: If the process raised one; DataError, NumericError and Preempted likewise.
        RuntimeError: If the process raised an unexpected error, whose traceback is a note of this
            one.
    """
    content = json.loads(read_text(path))
    if "preempted" in content:
        raise Preempted(content["preempted"])
    if "error" in content:
        if content["exit_code"] is None:
            error: Exception = RuntimeError(content["error"])
            error.add_note(content["trace"])
        else:
            kinds = {kind.exit_code: kind for kind in (DataError, NumericError)}
            error = kinds.get(content["exit_code"], UserError)(content["error"])
        if content["iterations"] is not None:
            set_iterations(error, content["iterations"])
        raise error
    if coverage := content.pop("coverage"):
        coverage = Coverage(coverage["loaded"], tuple(coverage["left_at_init"]))
    return EngineResult(**content, coverage=coverage)


def _stop_signals(stop: StopRequest, job: Job) -> AbstractContextManager[StopRequest]:
    """Handle stop signals by `stop`; signals end a job that only evaluates immediately."""
    return nullcontext(stop) if job.eval_only else stop_signals(stop)


class _ParentStop(StopRequest):
    """Stop request of the process that started the others; forwards signals to them."""

    def __init__(self, outcome: Path) -> None:
        super().__init__()
        self._mark = outcome.with_name(_STOP_MARK)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        super().__call__(number, frame)
        # The other processes get SIGINT when this process dies, so that it cannot mean a stop.
        number = signal.SIGTERM if number == signal.SIGINT else number
        # A process that is still starting reads the signal from the file.
        self._mark.write_text(str(int(number)), encoding="utf-8")
        for process in multiprocessing.active_children():
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)


class _WorkerStop(StopRequest):
    """Stop request of a process that `run` started."""

    def __init__(self, outcome: Path) -> None:
        super().__init__()
        self._outcome, self._mark = outcome, outcome.with_name(_STOP_MARK)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        parent = multiprocessing.parent_process()
        if number == signal.SIGINT:  # Ctrl-C reaches all processes; the first one forwards it.
            if parent is not None and os.getppid() != parent.pid:
                raise KeyboardInterrupt  # The parent is gone, and the folder is no longer locked.
        elif number == signal.SIGTERM and self._outcome.is_file():
            signal.signal(number, signal.SIG_DFL)  # Another process failed, which ends this one.
            os.kill(os.getpid(), number)
        else:
            super().__call__(number, frame)

    @property
    def received(self) -> int | None:
        if self._number is None and self._mark.is_file():
            self._number = int(read_text(self._mark))
        return super().received
