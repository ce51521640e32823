"""Distributed helpers: session, rank, gather, all-reduce.

Every function also works in a single process, where it returns its input. W processes have N rows
together, n = N / W each.

Under torchrun (on one or several machines), a run opens a `session`; NCCL connects GPUs, gloo CPUs.
A process that fails in a session writes its error to a file, and its launcher reports the first
error of all processes.
"""

import gc
import os
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from moco.common.errors import UserError
from moco.common.files import atomic_write_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Environment variables that torchrun sets.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
FAILURE_FILE = "TORCHELASTIC_ERROR_FILE"  # variable; torchrun names a file for each process
CLOSED_SECONDS = 1.0  # time until all connections to a dead process are closed
ANSWER_SECONDS = 2.0  # time that a process that lost others waits for their reports
TURN = timedelta(days=7)  # longest time of a block of the main process alone
MAX_CAUSE = 200  # characters of a message of gloo or NCCL
_LAUNCHER = os.getppid()
_FAILED, _LOST = b"failed", b"lost"  # reports of a process: an error of its own, or a lost peer


class LostProcess(UserError):
    """Failure of another process of this run: it died, hangs, or stopped with its own error."""


def launched_processes() -> int:
    """Return the number of processes that torchrun started, or 1 without torchrun.

    The number is known before a session opens.

    Raises:
        UserError: If only some of torchrun's variables are set.
    """
    if "WORLD_SIZE" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        return 1
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {missing[0]} is not set; "
            "start the processes with torchrun, or unset WORLD_SIZE"
        )
    return int(os.environ["WORLD_SIZE"])


def launched_rank() -> int:
    """Return the rank of this process, which is known before a session opens."""
    return int(os.environ["RANK"]) if launched_processes() > 1 else 0


def restart_count() -> int:
    """Return how often torchrun has restarted the processes after a failure.

    Raises:
        UserError: If restarts are allowed on several machines, because each machine's torchrun
            counts only the failures of its own processes.
    """
    allowed = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if allowed and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise UserError(
            f"torchrun --max-restarts {allowed}: works on one machine only; on several, leave it "
            "out and run the same command with --resume after a failure"
        )
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launcher_died() -> bool:
    """Return whether torchrun has exited before this process.

    This happens if torchrun is killed or receives a signal that it does not forward.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != _LAUNCHER


@contextmanager
def session(
    device: "torch.device",
    timeout_seconds: float,
    *,
    setting: str | None = "DIST_TIMEOUT_SECONDS",
) -> Iterator[None]:
    """Connect the processes that torchrun started; a single process needs no connection.

    Args:
        device: Device of the run's tensors; a GPU becomes the current one.
        timeout_seconds: Time that a process waits for the others before it fails.
        setting: Key of the timeout, for the message; None if no key sets it.

    Raises:
        LostProcess: If another process died, hangs, or stopped with an error of its own.
    """
    import torch

    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if launched_processes() == 1:
            yield
            return
        waited = f"{timeout_seconds:g} s{f' ({setting})' if setting else ''}"
        with _connection(device, timedelta(seconds=timeout_seconds), waited):
            yield
    except Exception as error:
        write_failure(error)
        raise
    finally:
        disconnect()


@contextmanager
def _connection(device: "torch.device", timeout: timedelta, waited: str) -> Iterator[None]:
    """Connect the processes; report an error of this one to the others before it disconnects."""
    # DistributedDataParallel imports this module. If it were first imported while connected, it
    # would keep the connection open until the process exits.
    import torch.distributed.nn
    from torch.distributed import PrefixStore, rendezvous

    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    number, world = launched_rank(), launched_processes()
    store: Any = None
    try:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        # torchrun's store outlives a restart and still holds the addresses of earlier processes.
        store = PrefixStore(f"moco/{restart_count()}", store)
        torch.distributed.init_process_group(
            backend, timeout=timeout, store=store, rank=number, world_size=world
        )
        yield
    except BaseException as error:
        _forget_locals(error)
        if (closed := _closed_connections(error)) is None:
            _report(store, _FAILED)
            raise
        # torchrun would send SIGTERM before the message is written.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _report(store, _LOST)
        reason = _loss(store, closed, waited, _cause(error))
        raise LostProcess(f"process {number} of {world}: {reason}") from error


def write_failure(error: Exception) -> None:
    """Write the error that ends this process to the file named by its launcher, if any.

    torchrun reads text and time from `message` and reports the first error of all processes. The
    other entries are for detection/engine/launch.py.
    """
    if (path := os.environ.get(FAILURE_FILE)) is None:
        return
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    text, now = " ".join(text.split()), time.time()
    shown = {"py_callstack": text, "timestamp": str(int(now))}
    content = {
        "message": {"message": text, "extraInfo": shown},
        "text": f"{text} (process {launched_rank()})",
        "exit_code": getattr(error, "exit_code", None),
        "time": now,
        "fields": {name: x for name, x in vars(error).items() if isinstance(x, str | int)},
        "trace": "".join(traceback.format_exception(error)),
    }
    with suppress(UserError):  # a full disk must not hide the error
        atomic_write_json(path, content)


def disconnect() -> None:
    """Close the connection of this process, if there is one, and wait for gloo's threads.

    DistributedDataParallel is part of reference cycles that keep the connection open. A gloo thread
    that frees a tensor while the interpreter shuts down would abort the process after all its work
    is done (pytorch/pytorch#179291).
    """
    if not _connected():
        return
    _dist().destroy_process_group()
    gc.collect()


def data_parallel(model: "nn.Module") -> "nn.Module":
    """Wrap `model` so that the backward pass averages gradients over the processes.

    The parameters must be equal on all processes, from one seed or checkpoint. Only gradients are
    ever sent: BN's statistics, the queue, and each process's part of a memory bank stay local.
    """
    if world_size() == 1:
        return model
    from torch.nn.parallel import DistributedDataParallel

    with warnings.catch_warnings():
        # torch 2.15 deprecates the name of an argument that earlier versions need.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model, broadcast_buffers=False, init_sync=False, gradient_as_bucket_view=True
        )


@contextmanager
def run_main_first() -> Iterator[None]:
    """Run a block on the main process first, without a time limit, then on the others.

    The block must not contain a collective, which would time out after DIST_TIMEOUT_SECONDS.
    """
    if world_size() == 1:
        yield
        return
    turn = _dist().new_group(backend="gloo", timeout=TURN)
    if not is_main():
        _dist().barrier(turn)
    yield
    if is_main():
        _dist().barrier(turn)
    _dist().destroy_process_group(turn)


def usable_cores() -> int:
    """Return the number of CPU cores available to this process (on macOS, to the machine)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def local_rank() -> int:
    """Return the rank of this process on its machine, which is the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_processes() -> int:
    """Return the number of processes that torchrun started on this machine, or 1 without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank() -> int:
    """Return the rank of this process, 0..W-1."""
    return _dist().get_rank() if _connected() else 0


def world_size() -> int:
    """Return W, the number of processes."""
    return _dist().get_world_size() if _connected() else 1


def is_main() -> bool:
    """Return whether this process has rank 0 and therefore writes files and prints."""
    return rank() == 0


def gather_rows(x: "Tensor") -> "Tensor":
    """Gather the rows (n, ...) of all processes into (N, ...), ordered by rank, without gradient.

    All processes must have the same n.
    """
    if world_size() == 1:
        return x.detach()
    x = x.detach().contiguous()
    gathered = x.new_empty(world_size() * x.shape[0], *x.shape[1:])
    _dist().all_gather_into_tensor(gathered, x)
    return gathered


def gather_rows_with_gradient(x: "Tensor") -> "Tensor":
    """Gather rows as `gather_rows` does; gradients are summed over the losses of all processes."""
    if world_size() == 1:
        return x
    import torch

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: "Tensor") -> "Tensor":
            return gather_rows(rows)

        @staticmethod
        def backward(ctx: Any, gradient: "Tensor") -> "Tensor":
            return sum_over_ranks(gradient.contiguous()).chunk(world_size())[rank()]

    gathered: Tensor = Gather.apply(x)
    return gathered


def exchange_rows(
    x: "Tensor", sent: "Tensor", sent_counts: list[int], place: "Tensor", counts: list[int]
) -> "Tensor":
    """Exchange rows between the processes (all-to-all).

    Args:
        x: Rows (n, ...) of this process.
        sent: Indices of the rows of `x` in the order in which they are sent.
        sent_counts: Number of rows sent to each process.
        place: Positions of the received rows in the result.
        counts: Number of rows received from each process.

    Returns:
        Rows (n, ...); see `moco.modeling.shuffle_bn.exchange_plan`.
    """
    import torch

    from moco.common import async_copy

    arrived = torch.empty_like(x)
    outgoing = x[async_copy.to_device_async(sent, x.device)].contiguous()
    _dist().all_to_all_single(arrived, outgoing, counts, sent_counts)
    rows = torch.empty_like(x)
    rows[async_copy.to_device_async(place, x.device)] = arrived
    return rows


def sum_over_ranks(x: "Tensor") -> "Tensor":
    """Return the sum of `x` over all processes, without gradient."""
    if world_size() == 1:
        return x.detach()
    total = x.detach().clone()
    _dist().all_reduce(total)
    return total


def mean_over_ranks(x: "Tensor") -> "Tensor":
    """Return the mean of `x` over all processes, without gradient."""
    return sum_over_ranks(x) / world_size()


def gather_objects(item: Any) -> list[Any]:
    """Gather one item per process on the main process, ordered by rank; others get []."""
    if world_size() == 1:
        return [item]
    gathered = [None] * world_size() if is_main() else None
    _dist().gather_object(item, gathered)
    return gathered or []


def broadcast_from_main(model: "nn.Module") -> None:
    """Broadcast the main process's parameters and buffers to all processes."""
    if world_size() > 1:
        for values in model.state_dict().values():
            received = values.contiguous()
            _dist().broadcast(received, 0)
            values.copy_(received)


def barrier() -> None:
    """Wait until all processes have reached this call."""
    if world_size() > 1:
        max_over_ranks(0)


def max_over_ranks(value: int) -> int:
    """Return the largest value over all processes."""
    if world_size() == 1:
        return value
    import torch

    agreed = torch.tensor(value)
    _dist().all_reduce(agreed, torch.distributed.ReduceOp.MAX)
    return int(agreed)


def check_equal(value: int, what: str) -> None:
    """Check that all processes have the same value.

    Raises:
        UserError: On every process, if the values differ; the message names `what`, the smallest
            and the largest value.
    """
    low, high = -max_over_ranks(-value), max_over_ranks(value)
    if low != high:
        raise UserError(
            f"{what}: the processes do not agree (from {low} to {high}); "
            "give all machines the same files and the same command"
        )


def _connected() -> bool:
    dist = _dist()
    return bool(dist.is_available() and dist.is_initialized())


def _dist() -> Any:
    import torch.distributed

    return torch.distributed


def _forget_locals(error: BaseException | None) -> None:
    """Clear local variables in an error's tracebacks, as they hold models and the connection."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _closed_connections(error: BaseException) -> list[int] | None:
    """Return the processes that cannot be reached; None if the error has another cause.

    gloo raises plain RuntimeErrors. It closes the connection to a process that has exited or that
    did not join a collective in time.
    """
    if not isinstance(error, RuntimeError):
        return None
    number, world = launched_rank(), launched_processes()
    others = [other for other in range(world) if other != number]
    if not _connected():
        return others
    end = time.monotonic() + CLOSED_SECONDS
    while not (closed := [other for other in others if not _can_send(other)]):
        if isinstance(error, _dist().DistError):  # NCCL's
            break
        if time.monotonic() > end:
            return None
        time.sleep(0.05)
    return closed


def _can_send(other: int) -> bool:
    import torch

    try:
        _dist().isend(torch.zeros(1), other)
    except RuntimeError:
        return False
    return True


def _cause(error: BaseException) -> str:
    """Return the first line of an error of gloo or NCCL, and the first of NCCL's `Last error`."""
    parts = (part.strip() for part in str(error).split("Last error:"))
    return "; ".join(part.splitlines()[0][:MAX_CAUSE] for part in parts if part)


def _report(store: Any, report: bytes) -> None:
    """Report to the other processes why this one exits."""
    if store is not None:
        with suppress(RuntimeError):  # another process, which died, held the store
            store.set(f"report/{launched_rank()}", report)


def _loss(store: Any, closed: list[int], waited: str, cause: str) -> str:
    """Describe the failure of processes that cannot be reached, from their reports."""
    keys = {other: f"report/{other}" for other in closed}
    reports: dict[int, bytes] = {}
    end = time.monotonic() + ANSWER_SECONDS
    with suppress(RuntimeError):
        while store is not None and len(reports) < len(keys) and time.monotonic() < end:
            reports = {other: store.get(key) for other, key in keys.items() if store.check([key])}
            if failed := [other for other, report in reports.items() if report == _FAILED]:
                return f"{_named(failed)} stopped with an error; see its message"
            time.sleep(0.05)
    silent = _named([other for other in closed if other not in reports]) or "another process"
    return (
        f"{silent} of this run died or did not answer in {waited}; run the same command with "
        f"--resume to continue ({cause})"
    )


def _named(processes: list[int]) -> str:
    if not processes:
        return ""
    noun = "process" if len(processes) == 1 else "processes"
    return f"{noun} {', '.join(map(str, processes))}"
