"""The processes of one fine-tuning: their number, stop signals, and the result or first error.

Both engines are given a number of processes by Detectron2's flags. The first process starts the
others, passes signals on to them, and gets the result or the first error back through a file. With
torchrun there is nothing to start: every process is one of them.

torch's elastic launch is not used for it: told to stop, it kills after 30 seconds what may still
be at an iteration, an evaluation or a checkpoint, and its error files do not say whether an error
is the user's, the data's or the numbers'.
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
from detection.engine.job import Job, Processes
from detection.engine.resuming import iterations_before, set_iterations
from detection.engine.trainer import work
from detection.engine.weights import Coverage, EngineResult
from moco.common import distributed
from moco.common.errors import DataError, NumericError, Preempted, UserError, kill_children
from moco.common.files import atomic_write_json, atomic_write_text, hold
from moco.engine.stop import StopRequest, end, stop_signals

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 1800  # how long processes wait for one that evaluates, as Detectron2's
_STOP_MARK = "stop"  # beside the outcome; the signal that the first process has got

# One process's share of a job; its result is complete on the main process.
Work = Callable[[Job, StopRequest], EngineResult]


def run(job: Job) -> EngineResult:
    """Do a job in this process, or in others of this machine.

    A stop signal (moco/engine/stop.py) is answered after the iteration at hand by all processes
    together; one that comes during an evaluation, after its end and one more iteration. An
    evaluation that was due at a stop is done by `resume`. Before the processes are up, and in a
    job that only evaluates, there is nothing to save, and the job just ends.

    Raises:
        UserError: what does not fit; DataError: an image that cannot be read; NumericError: a loss
            that is not finite; as the process that failed first.
        Preempted, KeyboardInterrupt: a signal requested a stop, and the state is saved.
    """
    if job.processes.world_size == 1 or job.processes.started:
        with _connected(job), _stop_signals(StopRequest(), job) as stop:
            return work(job, stop)
    with TemporaryDirectory(prefix="detection-") as scratch:
        outcome = Path(scratch) / "outcome.json"
        if job.cfg.MODEL.DEVICE == "cpu":
            # Else every process would be given a GPU of its own, as far as there are any.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # It tells how it ends the others when one has failed, before that one's message.
        logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
        with _stop_signals(_ParentStop(outcome), job) as stop:
            failure = None
            try:
                _launch(job, outcome)
            except KeyboardInterrupt:  # the second one: at once
                kill_children()
                raise
            except Exception as error:
                failure = error
            if outcome.is_file():  # of the process that failed first: worth more than `failure`
                try:
                    return read_outcome(outcome)
                except Preempted as error:
                    end(stop.received or signal.SIGTERM, str(error))
            if failure is not None:
                if stop.received is None:
                    raise failure
                end(  # told to stop while they were still starting, which ended them
                    stop.received,
                    f"stopped, and nothing was saved since the last checkpoint ({failure}); run "
                    "the same command with --resume to continue",
                )
    # The main process, and so the result, is on the first machine.
    return EngineResult({}, 0 if job.eval_only else job.cfg.SOLVER.MAX_ITER, 0.0, None)


def _launch(job: Job, outcome: Path) -> None:
    address = _address(job.processes)
    torch.multiprocessing.start_processes(
        _in_process, (job, address, outcome), job.processes.num_gpus, start_method="spawn"
    )


def _in_process(local_rank: int, job: Job, address: tuple[str, str], outcome: Path) -> None:
    """A process that `run` starts, with the environment that torchrun gives."""
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
    # Python's handler would wait with torch for the other processes.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    report(job, work, outcome, rank=rank, local_rank=local_rank)


def _address(processes: Processes) -> tuple[str, str]:
    """Host and port at which the processes meet."""
    if processes.dist_url != "auto":
        host, _, port = processes.dist_url.removeprefix("tcp://").rpartition(":")
        return host, port
    with socket.create_server(("127.0.0.1", 0)) as server:
        return "127.0.0.1", str(server.getsockname()[1])


@contextmanager
def _connected(job: Job) -> Iterator[None]:
    """Open the connection of this process; a signal ends one that still waits for the others."""
    device = job.cfg.MODEL.DEVICE
    own = f"cuda:{distributed.local_rank()}" if device == "cuda" else device
    session = distributed.session(torch.device(own), TIMEOUT_SECONDS, setting=None)
    with session, find_engine(job.engine).session():
        yield


def report(job: Job, work: Work, outcome: Path, *, rank: int, local_rank: int) -> None:
    """Do one process's share; the main one leaves its result or error in `outcome`.

    Raises:
        Exception: as `work`, but for a stop that was requested.
    """
    hold(job.cfg.OUTPUT_DIR)
    try:
        with _connected(job), _stop_signals(_WorkerStop(outcome), job) as stop:
            result = work(job, stop)
    except Preempted as error:
        if local_rank == 0:  # on every machine; it has no message of its own to wait for
            atomic_write_json(outcome, {"preempted": str(error)})
        return
    except Exception as error:
        if isinstance(error, UserError):
            text, exit_code = str(error), error.exit_code
        else:
            logger.exception("process %d failed", rank)
            text, exit_code = " ".join(f"{type(error).__name__}: {error}".split()), None
        # What follows from the end of another process says less than what that one says.
        consequence = exit_code is None or isinstance(error, distributed.LostProcess)
        if not (consequence and outcome.is_file()):
            content = {
                "error": f"{text} (process {rank})",
                "exit_code": exit_code,
                "trace": traceback.format_exc(),
                "iterations": iterations_before(error),
            }
            atomic_write_json(outcome, content)
        raise
    if rank == 0:
        # JSON as Python writes it: NaN is allowed here, the file is read by the function below.
        atomic_write_text(outcome, json.dumps(dataclasses.asdict(result)))


def read_outcome(path: Path) -> EngineResult:
    """What `report` has left.

    Raises:
        UserError, DataError, NumericError, Preempted: it is an error.
        RuntimeError: it is one that nobody expected; its traceback is a note of this one.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if "preempted" in content:
        raise Preempted(content["preempted"])
    if "error" in content:
        if content["exit_code"] is None:
            error: Exception = RuntimeError(content["error"])
            error.add_note(content["trace"])
        else:
            kinds = {kind.exit_code: kind for kind in (DataError, NumericError)}
            error = kinds.get(content["exit_code"], UserError)(content["error"])
        set_iterations(error, content["iterations"])
        raise error
    if coverage := content.pop("coverage"):
        coverage = Coverage(coverage["loaded"], tuple(coverage["left_at_init"]))
    return EngineResult(**content, coverage=coverage)


def _stop_signals(stop: StopRequest, job: Job) -> AbstractContextManager[StopRequest]:
    """Signals end what has nothing to save at once."""
    return nullcontext(stop) if job.eval_only else stop_signals(stop)


class _ParentStop(StopRequest):
    """Of the process that started the others: passes a signal on to them."""

    def __init__(self, outcome: Path) -> None:
        super().__init__()
        self._mark = outcome.with_name(_STOP_MARK)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        super().__call__(number, frame)
        # SIGINT is also what they get when this process dies.
        number = signal.SIGTERM if number == signal.SIGINT else number
        self._mark.write_text(
            str(int(number)), encoding="utf-8"
        )  # for one that is just being started
        for process in multiprocessing.active_children():
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)


class _WorkerStop(StopRequest):
    """Of the others."""

    def __init__(self, outcome: Path) -> None:
        super().__init__()
        self._outcome, self._mark = outcome, outcome.with_name(_STOP_MARK)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        parent = multiprocessing.parent_process()
        if number == signal.SIGINT:  # Ctrl-C reaches all processes; the first one passes it on
            if parent is not None and os.getppid() != parent.pid:
                raise KeyboardInterrupt  # it is gone, and with it the lock of the folder
        elif number == signal.SIGTERM and self._outcome.is_file():
            signal.signal(number, signal.SIG_DFL)  # another process failed, and this one is ended
            os.kill(os.getpid(), number)
        else:
            super().__call__(number, frame)

    @property
    def received(self) -> int | None:
        if self._number is None and self._mark.is_file():
            self._number = int(self._mark.read_text(encoding="utf-8"))
        return super().received
