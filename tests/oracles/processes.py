"""Run a function on several gloo processes of this machine."""

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

_START = torch.multiprocessing.start_processes


def server() -> ForkServerContext:
    """Return a server whose processes have imported everything, and start ten times as fast."""
    context = multiprocessing.get_context("forkserver")
    modules = ["pytest", "moco.pretraining.run", "torch.nn.parallel", "torch.utils.tensorboard"]
    # Without Detectron2 its engine is not imported, which the server passes over.
    modules += ["detection.engine.trainer", "detection.embedded.engine", "detection.d2.engine"]
    context.set_forkserver_preload([*modules, "tests.oracles.preloaded"])
    return context


def start_processes(
    function: Callable[..., None],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "",
) -> Any:
    """torch.multiprocessing's, from the `server`, with the variables that this process has now."""
    server()
    # By value: multiprocessing would share tensors by files, of which a server takes few.
    given = dict(os.environ), pickle.dumps((function, args))
    return _START(_unpacked, given, nprocs, join, daemon, start_method="forkserver")


def _unpacked(rank: int, variables: dict[str, str], content: bytes) -> None:
    os.environ.clear()
    os.environ.update(variables)
    function, args = pickle.loads(content)
    function(rank, *args)


def run_on(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    connect: bool = True,
    fresh: bool = False,
) -> list[Any]:
    """Return the results of `function(*args)` of all processes by rank.

    Args:
        world_size: Number of processes.
        function: Function of a module, not a local one.
        *args: Its arguments.
        connect: Open the session; otherwise the function does, as under torchrun.
        fresh: Start processes that have imported nothing yet.
    """
    # As torchrun, which outlives its processes and has their store.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launch = torch.multiprocessing.spawn if fresh else start_processes
    with tempfile.TemporaryDirectory() as folder:
        launch(_work, (world_size, store.port, folder, connect, function, args), world_size)
        files = [Path(folder, str(rank)) for rank in range(world_size)]
        return [pickle.loads(file.read_bytes()) for file in files]


def _work(
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    connect: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    from moco.common import distributed

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    os.environ |= variables_of(rank, world_size, port)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MOCO_PROGRESS": "off"}
    meet()
    session = distributed.session(torch.device("cpu"), timeout_seconds=60)
    with session if connect else nullcontext():
        result = function(*args)
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))


def processes() -> Iterator[tuple[int, list[str], str]]:
    """Yield number, `stat` after the command's name, and command line of all processes."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            yield int(entry.name), stat, (entry / "cmdline").read_text(errors="replace")


def variables_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a process of this machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in numbers.items()}


def meet() -> None:
    """Wait until torchrun's other processes, too, have imported torch: no timeout is about that."""
    store = torch.distributed.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    store.add("met", 1)
    while store.add("met", 0) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
