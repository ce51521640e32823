"""Child processes of the local runner, forked from a server that has imported torch once.

A child ends with the runner: when the runner has ended, even by SIGKILL, the child gets SIGTERM so
that the run saves, and SIGKILL if saving takes too long. A later runner finds no process.
"""

import atexit
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from moco.common.errors import run_cli
from moco.common.files import open_descriptor
from moco.common.shipped import own_modules

# Variables of torch and its libraries: the runs fill the cores, so more threads are slower.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Modules that most programs of a suite import, which takes seconds; forks share them.
PRELOADED = ("detection.engine.job", "detection.embedded.engine", "moco.pretraining.run")

_T = TypeVar("_T")
_main = threading.Lock()


class InheritedFd:
    """File descriptor that pickling duplicates into a child process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach_fd, (reduction.DupFd(self.fd),)


def _detach_fd(duplicate: Any) -> int:
    fd: int = duplicate.detach()
    return fd


@cache
def context() -> ForkServerContext:
    """Start the server, and return the context that forks from the server."""
    started: ForkServerContext = multiprocessing.get_context("forkserver")
    started.set_forkserver_preload(list(PRELOADED))
    own = own_modules()  # without them, the server would import from the current folder first
    saved = {name: os.environ[name] for name in own.keys() & os.environ.keys()}
    os.environ.update(own)
    # Only the runner handles Ctrl-C; the server would end with a traceback while it imports. The
    # resource tracker, which the server would start otherwise, unblocks the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for name in own:
            del os.environ[name]
        os.environ.update(saved)
    return started


@contextmanager
def _hide_main() -> Iterator[None]:
    """Hide the running script: a child would import the script, and start its children again."""
    with _main:
        own, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = own


def call(function: Callable[..., _T], *arguments: object) -> _T:
    """Call `function` in a separate process, whose end frees the memory of imports and data.

    An exception of `function` is raised here.

    Raises:
        RuntimeError: If the process ended without a result.
    """
    reader, writer = context().Pipe(duplex=False)
    environment = dict(os.environ)  # the server has the environment of its start
    process = context().Process(
        target=_send_result, args=(writer, environment, function, arguments)
    )
    with _hide_main():
        process.start()
    writer.close()
    with reader:
        try:
            answer, error = reader.recv()
        except EOFError:
            process.join()
            raise RuntimeError(f"a process ended with exit code {process.exitcode}") from None
    process.join()
    if error is not None:
        raise error
    return answer


def _send_result(
    writer: Any,
    environment: Mapping[str, str],
    function: Callable[..., object],
    arguments: Sequence[object],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_exit_with_runner, args=(0.0,), daemon=True).start()
    try:
        writer.send((function(*arguments), None))
    except Exception as error:  # `call` raises it in the caller
        writer.send((None, error))


def start_command(
    argv: Sequence[str], log: Path, environment: Mapping[str, str], lock: int, save_seconds: float
) -> ForkServerProcess:
    """Start a command of this project as a child.

    Args:
        argv: The interpreter, `-m`, a module with a `main`, and its arguments.
        log: File to which the output of the child is appended.
        environment: Complete environment of the child.
        lock: Descriptor that stays open as long as the child lives.
        save_seconds: Time between SIGTERM and SIGKILL when the runner has ended.
    """
    arguments = (argv[2:], log, dict(environment), InheritedFd(lock), save_seconds)
    process = context().Process(target=_run, args=arguments, name=" ".join(argv))
    with _hide_main():
        process.start()
    return process


def _run(
    argv: Sequence[str], log: Path, environment: Mapping[str, str], lock: int, save_seconds: float
) -> None:
    os.setsid()
    fd = open_descriptor(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    if (threads := environment.get("OMP_NUM_THREADS", "")).isdecimal():
        import torch  # the server imported it with its own number of threads

        torch.set_num_threads(int(threads))
    threading.Thread(target=_exit_with_runner, args=(save_seconds,), daemon=True).start()
    name, *rest = argv
    if name.partition(".")[0] == name:  # a package
        name = f"{name}.__main__"
    sys.argv = [name, *rest]
    try:
        run_cli(importlib.import_module(name).main)
    finally:
        atexit._run_exitfuncs()  # multiprocessing skips them before Python 3.13


def _exit_with_runner(save_seconds: float) -> None:
    runner = multiprocessing.parent_process()
    assert runner is not None
    runner.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(save_seconds)
    if os.getpgrp() == os.getpid():  # the group has the processes that this one started
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
