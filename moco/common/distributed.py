"""Distributed helpers: session, rank, gather, all-reduce.

One process is a normal case: every function then returns what it was given. N rows of all
processes, n = N / W rows of this one, W processes.

Launched by torchrun (on one or many machines), a run opens a `session`; NCCL connects GPUs,
gloo CPUs. `bytes_received` counts the payload that reached this process, by operation.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moco.common.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Detectron2's tools call these so, too.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
bytes_received: Counter[str] = Counter()
ROLL_CALL_SECONDS = 2.0  # how long a process that lost another one waits to hear of the rest
MAX_CAUSE = 200  # characters of what gloo or NCCL says
_LAUNCHER = os.getppid()
_store: Any = None  # of the open session
_turns = itertools.count()


class LostProcess(UserError):
    """Another process of this run died, hangs, or stopped with an error of its own."""


class _MainFailedError(RuntimeError):
    """Found without a collective; `session` says who it was."""


def launched_processes() -> int:
    """Number of processes that torchrun started, 1 without it; known before a session opens.

    Raises:
        UserError: some of torchrun's variables are set and others are missing.
    """
    if "WORLD_SIZE" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        return 1
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and {missing[0]} is not set; "
            "start the processes with torchrun, or unset WORLD_SIZE"
        )
    return int(os.environ["WORLD_SIZE"])


def launched_rank() -> int:
    """Number of this process among them; known before a session opens."""
    return int(os.environ["RANK"]) if launched_processes() > 1 else 0


def restarted() -> int:
    """How often torchrun has started these processes again after one of them failed.

    Raises:
        UserError: it may do so, on several machines: each counts the failures of its own processes.
    """
    allowed = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if allowed and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise UserError(
            f"torchrun --max-restarts {allowed}: is for one machine; on several, leave it out and "
            "run the same command with --resume when it has failed"
        )
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launcher_died() -> bool:
    """Whether torchrun is gone and has left this process behind.

    It ends so when it is killed, or by a signal that it was not told to pass on.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != _LAUNCHER


@contextmanager
def session(
    device: "torch.device",
    timeout_seconds: float,
    *,
    setting: str | None = "DIST_TIMEOUT_SECONDS",
) -> Iterator[None]:
    """Connect the processes that torchrun started; nothing to do for one.

    Args:
        device: where the run's tensors are; a GPU is made the current one.
        timeout_seconds: how long a process waits for the others before the run is given up.
        setting: the key that it comes from, for the message; None: it cannot be set.

    Raises:
        LostProcess: another process died, hangs, or stopped with an error of its own.
    """
    global _store
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launched_processes() == 1:
        yield
        return
    # Imported while connected, as DistributedDataParallel does, it keeps the connection until exit.
    import torch.distributed.nn
    from torch.distributed import PrefixStore, rendezvous

    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_seconds)
    store, number, world = next(rendezvous("env://", timeout=timeout))
    # torchrun's store outlives a restart, with the addresses of the processes before it.
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
            with suppress(RuntimeError):  # the others read it when this connection closes
                store.set(f"failed/{number}", "")
            raise
        failed, silent = _roll_call(store, number, world)
        if failed:
            reason = f"{failed} stopped with an error, see its message"
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
    """End the connection of this process, if there is one, and wait for gloo's threads to end.

    DistributedDataParallel is in reference cycles that keep the connection. A thread of gloo that
    is still about to free a tensor when the interpreter ends would abort the process, after all
    its work (pytorch/pytorch#179291).
    """
    if not _connected():
        return
    _dist().destroy_process_group()
    gc.collect()


def data_parallel(model: "nn.Module") -> "nn.Module":
    """`model` with gradients averaged over the processes during the backward pass.

    Its parameters have to be the same on all processes, from one seed or checkpoint. Nothing but
    gradients is sent, ever: BN's statistics, the queue, and each process's part of a memory bank
    stay where they are.
    """
    if world_size() == 1:
        return model
    from torch.nn.parallel import DistributedDataParallel

    with warnings.catch_warnings():
        # torch 2.15 announces another name for an argument that earlier versions need.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model, broadcast_buffers=False, init_sync=False, gradient_as_bucket_view=True
        )


@contextmanager
def main_first() -> Iterator[None]:
    """The main process goes through the block alone, for as long as it takes; then the others do.

    Nothing in the block may be a collective, whose end DIST_TIMEOUT_SECONDS is.
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
    """CPU cores that this process may use; macOS does not tell, there all of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def local_rank() -> int:
    """Number of this process on its machine, which is the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_processes() -> int:
    """Number of processes that torchrun started on this machine, 1 without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank() -> int:
    """Number of this process, 0..W-1."""
    return _dist().get_rank() if _connected() else 0


def world_size() -> int:
    """W, the number of processes."""
    return _dist().get_world_size() if _connected() else 1


def is_main() -> bool:
    """Whether this process is the one that writes and prints."""
    return rank() == 0


def gather_rows(x: "Tensor") -> "Tensor":
    """All processes' rows (n, ...) → (N, ...), by rank; without gradient. The same n everywhere."""
    if world_size() == 1:
        return x.detach()
    x = x.detach().contiguous()
    gathered = x.new_empty(world_size() * x.shape[0], *x.shape[1:])
    _dist().all_gather_into_tensor(gathered, x)
    bytes_received["gather"] += gathered.nbytes - x.nbytes
    return gathered


def gather_rows_with_gradient(x: "Tensor") -> "Tensor":
    """As `gather_rows`; a row's gradient is the sum of what all processes' losses give it."""
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
    """Rows to the processes that need them, rows from those that have them (all-to-all).

    Args:
        x: (n, ...); send: rows of `x` in the order in which they leave, `send_counts` to each
            process; place: where the arriving rows belong, `counts` from each process. See
            `moco.modeling.shuffle_bn.exchange_plan`.

    Returns:
        (n, ...)
    """
    import torch

    arrived = torch.empty_like(x)
    outgoing = x[send.to(x.device)].contiguous()
    _dist().all_to_all_single(arrived, outgoing, counts, send_counts)
    row_bytes = x[0].numel() * x.element_size()
    bytes_received["exchange"] += row_bytes * (sum(counts) - counts[rank()])
    rows = torch.empty_like(x)
    rows[place.to(x.device)] = arrived
    return rows


def sum_over_ranks(x: "Tensor") -> "Tensor":
    """The sum of all processes' `x`; without gradient."""
    if world_size() == 1:
        return x.detach()
    total = x.detach().clone()
    _dist().all_reduce(total)
    bytes_received["sum"] += total.nbytes
    return total


def mean_over_ranks(x: "Tensor") -> "Tensor":
    """The mean of all processes' `x`; without gradient."""
    return sum_over_ranks(x) / world_size()


def gather_objects(item: Any) -> list[Any]:
    """All processes' items, by rank, on the main process; an empty list on the others."""
    if world_size() == 1:
        return [item]
    gathered = [None] * world_size() if is_main() else None
    _dist().gather_object(item, gathered)
    return gathered or []


def copy_from_main(model: "nn.Module") -> None:
    """Give every process the main process's parameters and buffers."""
    if world_size() > 1:
        for values in model.state_dict().values():
            received = values.contiguous()
            _dist().broadcast(received, 0)
            values.copy_(received)


def barrier() -> None:
    """Wait until all processes are here."""
    if world_size() > 1:
        highest(0)


def highest(value: int) -> int:
    """The largest of all processes' values."""
    if world_size() == 1:
        return value
    import torch

    agreed = torch.tensor(value)
    _dist().all_reduce(agreed, torch.distributed.ReduceOp.MAX)
    return int(agreed)


def agree(value: int, what: str) -> None:
    """Check that all processes have the same value.

    Raises:
        UserError: naming `what` and the smallest and largest value, on every process.
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
    """Let go of what the functions held through which an error went: models, the connection."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_lost_connection(error: BaseException) -> bool:
    """Whether this is how a collective fails when another process is gone or hangs."""
    if isinstance(error, _MainFailedError | _dist().DistError):
        return True  # NCCL's, and torchrun's store
    if not isinstance(error, RuntimeError):
        return False
    signs = ("onnection closed", "onnection reset", "Broken pipe", "imed out", "connectFullMesh")
    return any(sign in str(error) for sign in signs)


def _cause(error: BaseException) -> str:
    """The first line of what gloo or NCCL says and, of NCCL, of its last error: the reason."""
    parts = (part.strip() for part in str(error).split("Last error:"))
    return "; ".join(part.splitlines()[0][:MAX_CAUSE] for part in parts if part)


def _roll_call(store: Any, number: int, world: int) -> tuple[str, str]:
    """Which processes failed by themselves; if none, which do not say that they lost another one.

    The latter, which hang or are dead, are ended: left to itself, torchrun takes half a minute to
    end a process that does not react.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which would silence the message
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
        silent = []  # the store was in the process that died
    return _named(failed), _named(silent)


def _named(processes: list[int]) -> str:
    if not processes:
        return ""
    noun = "process" if len(processes) == 1 else "processes"
    return f"{noun} {', '.join(map(str, processes))}"


def _kill_sibling(pid: int) -> None:
    """Unless it has died, and perhaps another process has its number."""
    try:
        parent = int(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]
        )
        if parent == os.getppid():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
