"""`--executor local`: the visible GPUs of this machine, as many runs side by side as fit."""

import os
import subprocess

from benchmarks.suites.executors.base import EXECUTORS, VISIBLE, Executor, Options
from benchmarks.suites.executors.cpu import cpu
from benchmarks.suites.executors.processes import ProcessExecutor
from moco.common.errors import UserError


@EXECUTORS.register()
def local(options: Options) -> ProcessExecutor:
    """All visible GPUs.

    Raises:
        UserError: there is none, or a number of workers.
    """
    gpus = visible_gpus()
    if not gpus:
        raise UserError(
            f"--executor local: no GPU is visible ({VISIBLE} is "
            f"{os.environ.get(VISIBLE, 'not set')!r}); use --executor cpu"
        )
    if options.workers:
        raise UserError(
            f"--workers: got {options.workers}, but is for the CPU; on GPUs, --gpus-per-run tells "
            "how many run at a time"
        )
    return ProcessExecutor(options.folder, gpus)


@EXECUTORS.register()
def auto(options: Options) -> Executor:
    """`local` where a GPU is visible, else `cpu`."""
    return local(options) if visible_gpus() else cpu(options)


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that a process started here would see, without importing torch."""
    chosen = os.environ.get(VISIBLE)
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",") if name.strip()]
        # As CUDA reads it: what follows a -1 is not visible.
        return tuple(names[: names.index("-1")] if "-1" in names else names)
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(done.stdout.split()) if done.returncode == 0 else ()
