"""`--executor cpu`: one run per core of this machine, each with one thread."""

from collections.abc import Mapping, Sequence

from benchmarks.suites.executors.base import EXECUTORS, ONE_THREAD, VISIBLE, Options
from benchmarks.suites.executors.processes import ProcessExecutor
from moco.common.distributed import usable_cores
from moco.common.errors import UserError


class CpuExecutor(ProcessExecutor):
    """Processes of one thread that see no GPU."""

    def environment(self, devices: Sequence[str]) -> Mapping[str, str]:
        return {VISIBLE: "", **ONE_THREAD}

    def where(self) -> str:
        return f"on the CPU, {self.parallel(0)} at a time"


@EXECUTORS.register()
def cpu(options: Options) -> CpuExecutor:
    """As many slots as `--workers` says, or as there are cores.

    Raises:
        UserError: fewer than no workers.
    """
    if options.workers < 0:
        raise UserError(f"--workers: got {options.workers}, expected at least 1")
    slots = range(options.workers or usable_cores())
    return CpuExecutor(options.folder, "cpu", [str(slot) for slot in slots])
