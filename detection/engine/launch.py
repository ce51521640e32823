"""Launching of the processes of a job: stop signals, and the result or the first error.

Detectron2's flags set the number of processes for both engines. The first process starts the
others, forwards signals to them, and reads the result of the main one, or the first error by time,
from files (moco/common/distributed.py: `write_failure`). Under torchrun every process is already
running.

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
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import connection
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import torch

from detection.config.engines import find_engine
from detection.engine.job import Job, Processes
from detection.engine.trainer import work
from detection.engine.weights import Coverage, EngineResult
from moco.common import distributed
from moco.common.errors import DataError, NumericError, Preempted, UserError, kill_children
from moco.common.files import atomic_write_text, read_text
from moco.engine.device import pick_device
from moco.engine.stop import StopRequest, exit_stopped, stop_signals

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 1800  # Timeout while another process evaluates, as in Detectron2.
GRACE_SECONDS = 5.0  # Time in which the others can end by themselves after one has failed.
_STOP_MARK = "stop"  # File of the signal that the first process received.
_RESULT, _FAILURE = "result.json", "failure_{}.json"


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
        folder = Path(scratch)
        with _stop_signals(_ParentStop(folder), job) as stop:
            try:
                died = _run_processes(job, folder)
            except KeyboardInterrupt:  # The second Ctrl-C ends everything immediately.
                kill_children()
                raise
            failure = first_failure(folder)
            if isinstance(failure, Preempted):
                exit_stopped(stop.received or signal.SIGTERM, str(failure))
            if died is not None and stop.received is not None:
                exit_stopped(  # The signal ended the processes while they were starting.
                    stop.received,
                    f"stopped, but nothing was saved since the last checkpoint ({died}); run "
                    "the same command with --resume to continue",
                )
            if (failure := failure or died) is not None:
                raise failure
        if (folder / _RESULT).is_file():
            content = json.loads(read_text(folder / _RESULT))
            if coverage := content.pop("coverage"):
                coverage = Coverage(coverage["loaded"], tuple(coverage["left_at_init"]))
            return EngineResult(**content, coverage=coverage)
    # The main process, which has the result, is on the first machine.
    return EngineResult({}, 0 if job.eval_only else job.cfg.SOLVER.MAX_ITER, 0.0, None)


def _run_processes(job: Job, folder: Path) -> distributed.LostProcess | None:
    """Run the processes to their end; return an error for the first that died without an error.

    The others of a process that has failed lose their connection to it. Those that do not notice,
    because they evaluate or hang, are killed.
    """
    processes = torch.multiprocessing.start_processes(
        _in_process,
        (job, _address(job.processes), folder),
        job.processes.num_gpus,
        join=False,
        start_method="spawn",
    ).processes
    running, patience, died = dict(enumerate(processes)), None, None
    while running:
        ended = connection.wait([process.sentinel for process in running.values()], patience)
        for number, process in list(running.items()):
            if not ended:
                process.kill()
            elif process.sentinel in ended:
                process.join()
                del running[number]
                if process.exitcode and patience is None:
                    patience = GRACE_SECONDS
                    if not (folder / _FAILURE.format(number)).is_file():
                        died = (number, process.exitcode)
    if died is None:
        return None
    number, code = died
    cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return distributed.LostProcess(
        f"process {number} of this run died ({cause}); run the same command with --resume to "
        "continue"
    )


def _in_process(local_rank: int, job: Job, address: tuple[str, str], folder: Path) -> None:
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
        distributed.FAILURE_FILE: str(folder / _FAILURE.format(local_rank)),
    }
    if job.cfg.MODEL.DEVICE == "cpu":  # else each process would take a GPU, if there are any
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Python's handler would only run after torch has stopped waiting for the other processes.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with _connected(job), _stop_signals(_WorkerStop(folder), job) as stop:
            result = work(job, stop)
    except Preempted:
        return  # A stop is no failure, after which the other processes would be killed.
    except Exception as error:
        if not isinstance(error, UserError):
            logger.exception("process %d failed", rank)
        raise
    if rank == 0:
        # NaN is allowed here, because only `run` reads the file.
        atomic_write_text(folder / _RESULT, json.dumps(dataclasses.asdict(result)))


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
    device = pick_device(job.cfg.MODEL.DEVICE, "MODEL.DEVICE")
    session = distributed.session(device, TIMEOUT_SECONDS, setting=None)
    with session, find_engine(job.engine).session():
        yield


def first_failure(folder: Path) -> Exception | None:
    """Return the first error by time of those that processes wrote into a folder, or None.

    An unexpected error becomes a RuntimeError with its traceback as a note.
    """
    found = [json.loads(read_text(path)) for path in folder.glob(_FAILURE.format("*"))]
    if not found:
        return None
    first = min(found, key=itemgetter("time"))
    if first["exit_code"] is None:
        error: Exception = RuntimeError(first["text"])
        error.add_note(first["trace"])
    else:
        kinds = {kind.exit_code: kind for kind in (DataError, NumericError, Preempted)}
        error = kinds.get(first["exit_code"], UserError)(first["text"])
    vars(error).update(first["fields"])
    return error


def _stop_signals(stop: StopRequest, job: Job) -> AbstractContextManager[StopRequest]:
    """Handle stop signals by `stop`; signals end a job that only evaluates immediately."""
    return nullcontext(stop) if job.eval_only else stop_signals(stop)


class _ParentStop(StopRequest):
    """Stop request of the process that started the others; forwards signals to them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._mark = folder / _STOP_MARK

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

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._mark = folder / _STOP_MARK

    def __call__(self, number: int, frame: FrameType | None) -> None:
        parent = multiprocessing.parent_process()
        if number != signal.SIGINT:
            super().__call__(number, frame)
        elif parent is not None and os.getppid() != parent.pid:
            raise KeyboardInterrupt  # The parent is gone, and the folder is no longer locked.
        # Otherwise Ctrl-C, which reaches all processes; the first one forwards it.

    @property
    def received(self) -> int | None:
        if self._number is None and self._mark.is_file():
            self._number = int(read_text(self._mark))
        return super().received
