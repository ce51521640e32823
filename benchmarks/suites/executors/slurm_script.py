"""The batch script of Slurm jobs, and the options of `--slurm` that go into it."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moco.common.children import own_modules
from moco.common.errors import UserError

PARTNER_SECONDS = 60  # for the other machines of a run when the process on one has ended
# What follows from a run's size, or from how its jobs are put back into the queue.
OURS = (
    "array",
    "error",
    "gpus-per-task",
    "job-name",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "requeue",
    "no-requeue",
    "signal",
    "test-only",
    "wait",
    "wrap",
)
TIME = "24:00:00"


@dataclass(frozen=True)
class JobOptions:
    """What `--slurm KEY=VALUE` says.

    Attributes:
        gpus_per_node: how many a node has; a run of more is spread over several. 0: no GPUs.
        cpus_per_gpu: a process and its four data-loader workers.
        signal_delay_s: how long before the end of its time a job is asked to save.
        setup, teardown: lines of the script before and after the run. srun_args: further arguments.
        sbatch: other options, by Slurm's names; an empty value is a flag. `time` is of one job; a
            run that needs more continues in the next.
    """

    gpus_per_node: int = 8
    cpus_per_gpu: int = 5
    cpus_per_task: int = 0
    signal_delay_s: int = 90
    array_parallelism: int = 256
    setup: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    sbatch: Mapping[str, str] = field(default_factory=lambda: {"time": TIME})

    @property
    def save_seconds(self) -> float:
        """How long a run may take to save; the rest of the delay is for getting back in line."""
        return max(self.signal_delay_s - 20.0, self.signal_delay_s / 2)


_LEAST = {"gpus_per_node": 0, "cpus_per_gpu": 1, "cpus_per_task": 1, "array_parallelism": 1}
_LEAST["signal_delay_s"] = 30


def parse_options(arguments: Sequence[str]) -> JobOptions:
    """`KEY=VALUE` of `--slurm`; the last of a key counts, but setup lines add up.

    What this project has no meaning for is Slurm's: sbatch itself says whether it knows it.

    Raises:
        UserError: a value that cannot be, or an option that the project sets.
    """
    values: dict[str, Any] = {}
    sbatch = {"time": TIME}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        where = f"--slurm {argument}"
        if not equals or not text:
            raise UserError(f"{where}: expected KEY=VALUE, e.g. partition=gpu")
        option = key.removeprefix("sbatch.").replace("_", "-")
        if key in ("setup", "teardown", "srun_args"):
            values[key] = (*values.get(key, ()), text)
        elif key in _LEAST:
            if not text.isdecimal() or int(text) < _LEAST[key]:
                raise UserError(f"{where}: expected a whole number of at least {_LEAST[key]}")
            values[key] = int(text)
        elif option in OURS:
            raise UserError(f"{where}: is set by the suite; leave it out")
        else:
            sbatch[option] = "" if text.lower() == "true" else text
    return JobOptions(**values, sbatch=sbatch)


def make_script(
    options: JobOptions, name: str, jobs: Path, entries: Path, number: int, gpus: int, nodes: int
) -> str:
    """The batch script of an array of `number` jobs.

    Args:
        name: of the jobs.
        jobs: folder of their logs.
        entries: file that describes their runs.
        gpus: of one run.
        nodes: of one run.
    """
    cpus = options.cpus_per_task or max(gpus // nodes * options.cpus_per_gpu, 1)
    own = {
        "job-name": name,
        "array": f"0-{number - 1}%{options.array_parallelism}",
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus),
        **({"gpus-per-node": str(gpus // nodes)} if gpus else {}),
        "signal": f"TERM@{options.signal_delay_s}",
        "requeue": "",
        "open-mode": "append",
        "output": f"{jobs}/%A_%a.log",
    }
    lines = [
        f"#SBATCH --{key}{f'={shlex.quote(value)}' if value else ''}"
        for key, value in (own | dict(options.sbatch)).items()
    ]
    # Since Slurm 22.05 srun does not know by itself how many cores the job has.
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", f"--cpus-per-task={cpus}"]
    srun += [f"--wait={PARTNER_SECONDS}", *options.srun_args]
    program = [sys.executable, "-u", "-m", "benchmarks.suites.executors.slurm_job"]
    start = shlex.join([*program, str(entries), str(options.save_seconds), "--", *srun])
    export = shlex.join(["export", *(f"{key}={value}" for key, value in own_modules().items())])
    # `scancel --full` signals the shell as well, which would end at once and take the job with it.
    body = ["trap : TERM", export, *options.setup, start, *options.teardown]
    return "\n".join(["#!/bin/bash", *lines, "", *body, ""])
