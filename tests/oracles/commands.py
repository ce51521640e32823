"""Commands as users start them, with a fault built in: signals, or a full disk.

A fault comes at a chosen event of a file, which Python's audit events tell: nothing waits for a
time or needs a name of this project. Processes are forked by a server that has imported torch,
which saves seconds each, and those of --num-gpus by the command, unless they are to be fresh, as
what a command starts otherwise always is.
"""

import itertools
import json
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tests.oracles.processes import processes, server

ROOT = Path(__file__).resolve().parents[2]
FAULT, GROUP = "MOCO_TEST_FAULT", "MOCO_TEST_GROUP"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
_START = torch.multiprocessing.start_processes
AGENT = ("tests.oracles.agent",)  # as torchrun, of forked processes
SECONDS = 300  # until a command that does not end is an error


@dataclass(frozen=True)
class Fault:
    """A signal at the `count`-th event, from 1, of one process on paths that hold `path`.

    Attributes:
        event: "read", or "change": opened for writing, moved or removed.
        to: "self"; "group", as Ctrl-C in a terminal; "parent", and this process waits until it gets
            a signal to stop itself; "command", the same.
        again: once more at once.
        seconds: how long this process then waits, as if it computed.
        where: None: in any process; or only in the "command" itself or in a "child" of it.
    """

    signal: int
    path: str
    count: int = 1
    event: str = "read"
    to: str = "self"
    again: bool = False
    seconds: float = 0
    where: str | None = None


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line of stderr."""
        return (self.err.splitlines() or [""])[-1]


def start(
    words: Sequence[object],
    folder: Path,
    fault: Fault | None = None,
    max_bytes: int = 0,
    is_killed: bool = False,
    is_fresh: bool = False,
) -> BaseProcess:
    """Start `python -m WORDS` in `folder`, in a session of its own.

    No file gets more than `max_bytes`, as on a full disk, or the process is killed in that write.
    With `is_fresh`, the processes of --num-gpus are spawned, as by a user's command.
    """
    (folder / "at_start").mkdir(parents=True, exist_ok=True)
    code = "from tests.oracles import commands\ncommands.build_in('child')\n"
    (folder / "at_start/sitecustomize.py").write_text(code, encoding="utf-8")
    (folder / "fault_happened").unlink(missing_ok=True)
    variables = {
        **os.environ,
        "PYTHONPATH": f"{folder / 'at_start'}:{ROOT}",
        "MOCO_PROGRESS": "off",
        "CUDA_VISIBLE_DEVICES": "",
        "DETECTRON2_DATASETS": os.environ.get("DETECTRON2_DATASETS", ""),
        FAULT: json.dumps(asdict(fault) | {"happened": str(folder / "fault_happened")})
        if fault
        else "",
    }
    args = variables, [str(word) for word in words], str(folder), max_bytes, is_killed, is_fresh
    process = server().Process(target=_command, args=args)
    process.start()
    return process


def wait(process: BaseProcess, folder: Path) -> Done:
    """Wait for the end of a command and of all processes that it has started."""
    process.join(SECONDS)
    left = process.is_alive() or not _ends(process.pid or 0)
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    out, err = ((folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    assert not left, f"{process.pid} or what it has started did not end: {err[-2000:]}"
    assert process.exitcode is not None
    return Done(process.exitcode, out, err)


def run(words: Sequence[object], folder: Path, fault: Fault | None = None, **limits: int) -> Done:
    """Run a command to its end; a fault must have come."""
    done = wait(start(words, folder, fault, **limits), folder)
    assert fault is None or (folder / "fault_happened").exists(), f"no fault: {done}"
    return done


def wait_for_fault(process: BaseProcess, folder: Path) -> None:
    """Wait for the fault; the command must not end before it."""
    end = time.monotonic() + SECONDS
    while not (folder / "fault_happened").exists():
        assert process.is_alive() and time.monotonic() < end
        time.sleep(0.01)


def build_in(where: str = "command") -> None:
    """Let this process have the fault that the variable describes."""
    if not os.environ.get(FAULT):
        return
    content = json.loads(os.environ[FAULT])
    happened, fault = content.pop("happened"), Fault(**content)
    if fault.where not in (None, where):
        return
    counter, inside = itertools.count(1), [False]

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event not in ("open", "os.rename", "os.remove") or inside[0]:
            return
        writes = event != "open" or bool(int(str(args[2])) & (os.O_WRONLY | os.O_RDWR))
        paths = [os.path.abspath(str(path)) for path in args[: 1 + (event == "os.rename")]]
        if writes != (fault.event == "change") or not any(fault.path in path for path in paths):
            return
        if next(counter) != fault.count:
            return
        inside[0] = True
        with suppress(FileExistsError):
            os.close(os.open(happened, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            _send(fault)
            end = time.monotonic() + fault.seconds  # a signal would end a sleep
            while time.monotonic() < end:
                time.sleep(0.1)
        inside[0] = False

    sys.addaudithook(hook)


def _send(fault: Fault) -> None:
    for _ in range(2 if fault.again else 1):
        if fault.to == "group":
            os.killpg(int(os.environ[GROUP]), fault.signal)
        elif fault.to == "self":
            os.kill(os.getpid(), fault.signal)
        else:
            _tell(os.getppid() if fault.to == "parent" else int(os.environ[GROUP]), fault.signal)


def _tell(other: int, number: int) -> None:
    """Send another process a signal and wait until this one is told to stop."""
    told, before = [], signal.getsignal(signal.SIGTERM)

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, note)
    os.kill(other, number)
    end = time.monotonic() + (0 if number == signal.SIGKILL else 60)
    while not told and time.monotonic() < end:
        time.sleep(0.01)
    signal.signal(signal.SIGTERM, before)


def _command(
    variables: dict[str, str],
    words: list[str],
    folder: str,
    max_bytes: int,
    is_killed: bool,
    is_fresh: bool,
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    os.environ[GROUP] = str(os.getpid())
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    multiprocessing.set_start_method("fork", force=True)  # for DataLoader, as without a server
    signal.signal(signal.SIGINT, signal.default_int_handler)
    build_in()
    if not is_fresh:
        torch.multiprocessing.start_processes = _fork
    if is_killed:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    if max_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _fork(function: Callable[..., None], args: tuple[Any, ...], nprocs: int, **keys: Any) -> Any:
    return _START(_begin, (function, args), nprocs, **(keys | {"start_method": "fork"}))


def _begin(rank: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    build_in("child")
    function(rank, *args)


def _ends(group: int) -> bool:
    """Return whether a command and all processes that it has started end.

    Their environment tells, since torchrun and the suite's runner give theirs a session of their
    own; those that were forked have the command's session.
    """
    mark = f"{GROUP}={group}\0".encode()
    end = time.monotonic() + 60
    while any(
        stat[0] != "Z" and (int(stat[3]) == group or mark in _environment(number))
        for number, stat, _ in processes()
    ):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _environment(number: int) -> bytes:
    try:
        return Path(f"/proc/{number}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""
