"""`--executor cpu`: one run per core of this machine, each with one thread."""

from benchmarks.suites.executors.base import EXECUTORS, Options
from benchmarks.suites.executors.processes import ProcessExecutor
from moco.common.distributed import usable_cores
from moco.common.errors import UserError


@EXECUTORS.register()
def cpu(options: Options) -> ProcessExecutor:
    """As many slots as `--workers` says, or as there are cores.

    Raises:
        UserError: fewer than no workers.
    """
    if options.workers < 0:
        raise UserError(f"--workers: got {options.workers}, expected at least 1")
    return ProcessExecutor(options.folder, cores=options.workers or usable_cores())
