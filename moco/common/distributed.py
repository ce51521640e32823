"""Distributed helpers: session, rank, gather, all-reduce.

Every function also works in a single process, where it returns its input. W processes have N rows
together, of which n = N / W are on this process.

Under torchrun (on one or several machines), a run opens a `session`; NCCL connects GPUs, gloo CPUs.
`bytes_received` counts the payload received by this process, by operation.
"""

import gc
import itertools
import os
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from moco.common.errors import UserError
from moco.common.files import read_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Environment variables that torchrun sets.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
bytes_received: Counter[str] = Counter()
ROLL_CALL_SECONDS = 2.0  # how long a process that lost a peer waits for the state of the others
MAX_CAUSE = 200  # characters of a message of gloo or NCCL
_LAUNCHER = os.getppid()
_store: Any = None  # key-value store of the open session
_turns = itertools.count()


class LostProcess(UserError):
    """Another process of this run died, hangs, or stopped with an error of its own."""


class _MainFailedError(RuntimeError):
    """The main process failed, as seen in the store; `session` names it in its message."""


def launched_processes() -> int:
    """Return the number of processes that torchrun started, or 1 without it.

    It is known before a session opens.

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
    """Return the rank of this process; it is known before a session opens."""
    return int(os.environ["RANK"]) if launched_processes() > 1 else 0


def restarted() -> int:
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
    """Return whether torchrun has exited and left this process behind.

    That happens if torchrun is killed, or receives a signal that it does not forward.
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
        timeout_seconds: How long a process waits for the others before it gives up.
        setting: Key that the timeout comes from, for the message; None if it cannot be set.

    Raises:
        LostProcess: If another process died, hangs, or stopped with an error of its own.
    """
    global _store
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launched_processes() == 1:
        yield
        return
    # DistributedDataParallel imports it; first imported while connected, it would keep the
    # connection until exit.
    import torch.distributed.nn
    from torch.distributed import PrefixStore, rendezvous

    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_seconds)
    store, number, world = next(rendezvous("env://", timeout=timeout))
    # torchrun's store outlives a restart and still holds the addresses of the earlier processes.
    store = PrefixStore(f"moco/{restarted()}", store)
    store.set(f"process/{number}", f"{os.environ.get('GROUP_RANK')} {os.getpid()}")
    try:
        torch.distributed.init_process_group(
            backend, timeout=timeout, store=store, rank=number, world_size=world
        )
        bytes_received.clear()
        _store = store
        yield
    except BaseException as error:
        _forget_locals(error)
        if not _is_lost_connection(error):
            with suppress(RuntimeError):  # the others read this once the connection closes
                store.set(f"failed/{number}", "")
            raise
        failed, silent = _roll_call(store, number, world)
        if failed:
            reason = f"{failed} stopped with an error; see its message"
        else:
            reason = (
                f"{silent or 'another process'} of this run died or did not answer in "
                f"{timeout_seconds:g} s{f' ({setting})' if setting else ''}; run the same command "
                f"with --resume to continue ({_cause(error)})"
            )
        raise LostProcess(f"process {number} of {world}: {reason}") from error
    finally:
        _store = None
        disconnect()


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
def main_first() -> Iterator[None]:
    """Run a block on the main process first, for as long as it takes, then on the others.

    The block must not contain a collective, which would time out after DIST_TIMEOUT_SECONDS.
    """
    turn = f"turn/{next(_turns)}"
    while not is_main() and not _store.check([turn]):
        if _store.check(["failed/0"]):
            raise _MainFailedError("process 0 failed")
        time.sleep(0.2)
    yield
    if is_main() and _store is not None:
        _store.set(turn, "")


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
    """Return whether this process is rank 0, which writes and prints."""
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
    bytes_received["gather"] += gathered.nbytes - x.nbytes
    return gathered


def gather_rows_with_gradient(x: "Tensor") -> "Tensor":
    """Gather rows as `gather_rows` does; gradients are summed over all processes' losses."""
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
    x: "Tensor", send: "Tensor", send_counts: list[int], place: "Tensor", counts: list[int]
) -> "Tensor":
    """Exchange rows between the processes (all-to-all).

    Args:
        x: Rows (n, ...) of this process.
        send: Indices of the rows of `x` in the order in which they are sent.
        send_counts: Number of rows sent to each process.
        place: Positions of the received rows in the result.
        counts: Number of rows received from each process.

    Returns:
        Rows (n, ...); see `moco.modeling.shuffle_bn.exchange_plan`.
    """
    import torch

    from moco.common import transfers

    arrived = torch.empty_like(x)
    outgoing = x[transfers.send(send, x.device)].contiguous()
    _dist().all_to_all_single(arrived, outgoing, counts, send_counts)
    row_bytes = x[0].numel() * x.element_size()
    bytes_received["exchange"] += row_bytes * (sum(counts) - counts[rank()])
    rows = torch.empty_like(x)
    rows[transfers.send(place, x.device)] = arrived
    return rows


def sum_over_ranks(x: "Tensor") -> "Tensor":
    """Return the sum of `x` over all processes, without gradient."""
    if world_size() == 1:
        return x.detach()
    total = x.detach().clone()
    _dist().all_reduce(total)
    bytes_received["sum"] += total.nbytes
    return total


def mean_over_ranks(x: "Tensor") -> "Tensor":
    """Return the mean of `x` over all processes, without gradient."""
    return sum_over_ranks(x) / world_size()


def gather_objects(item: Any) -> list[Any]:
    """Gather one item per process, by rank, on the main process; others get an empty list."""
    if world_size() == 1:
        return [item]
    gathered = [None] * world_size() if is_main() else None
    _dist().gather_object(item, gathered)
    return gathered or []


def copy_from_main(model: "nn.Module") -> None:
    """Broadcast the main process's parameters and buffers to all processes."""
    if world_size() > 1:
        for values in model.state_dict().values():
            received = values.contiguous()
            _dist().broadcast(received, 0)
            values.copy_(received)


def barrier() -> None:
    """Wait until all processes have reached this call."""
    if world_size() > 1:
        highest(0)


def highest(value: int) -> int:
    """Return the largest value over all processes."""
    if world_size() == 1:
        return value
    import torch

    agreed = torch.tensor(value)
    _dist().all_reduce(agreed, torch.distributed.ReduceOp.MAX)
    return int(agreed)


def agree(value: int, what: str) -> None:
    """Check that all processes have the same value.

    Raises:
        UserError: If they differ, on every process; the message names `what`, the smallest and the
            largest value.
    """
    low, high = -highest(-value), highest(value)
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
    """Clear the local variables in an error's tracebacks, which hold models and the connection."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because another process is gone or hangs."""
    if isinstance(error, _MainFailedError | _dist().DistError):
        return True  # NCCL's, and torchrun's store
    if not isinstance(error, RuntimeError):
        return False
    signs = ("onnection closed", "onnection reset", "Broken pipe", "imed out", "connectFullMesh")
    return any(sign in str(error) for sign in signs)


def _cause(error: BaseException) -> str:
    """Return the first line of an error of gloo or NCCL, and that of NCCL's `Last error`."""
    parts = (part.strip() for part in str(error).split("Last error:"))
    return "; ".join(part.splitlines()[0][:MAX_CAUSE] for part in parts if part)


def _roll_call(store: Any, number: int, world: int) -> tuple[str, str]:
    """Return the processes that failed by themselves and, if there are none, the silent ones.

    Processes that do not report a lost peer hang or are dead. They are killed, because torchrun
    takes half a minute to end a process that does not react.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's would come before the message
    others = [other for other in range(world) if other != number]
    failed: list[int] = []
    silent = others
    try:
        store.set(f"lost/{number}", "")
        end = time.monotonic() + ROLL_CALL_SECONDS
        while silent and not failed and time.monotonic() < end:
            failed = [other for other in others if store.check([f"failed/{other}"])]
            silent = [other for other in silent if not store.check([f"lost/{other}"])]
            time.sleep(0.05)
        for other in [] if failed else silent:
            group, pid = store.get(f"process/{other}").decode().split()
            if group == os.environ.get("GROUP_RANK"):  # a child of the same torchrun
                _kill_sibling(int(pid))
    except RuntimeError:
        silent = []  # the process that died held the store
    return _named(failed), _named(silent)


def _named(processes: list[int]) -> str:
    if not processes:
        return ""
    noun = "process" if len(processes) == 1 else "processes"
    return f"{noun} {', '.join(map(str, processes))}"


def _kill_sibling(pid: int) -> None:
    """Kill a process if it is still a child of the same torchrun; its pid may have been reused."""
    try:
        parent = int(read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])
        if parent == os.getppid():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
