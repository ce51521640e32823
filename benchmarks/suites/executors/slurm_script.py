"""Batch script of Slurm jobs, and the options of `--slurm` that it is made from."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moco.common.errors import UserError
from moco.common.shipped import own_modules

PARTNER_SECONDS = 60  # time for the other machines of a run after the process on one has ended
# Options of sbatch that the project sets, as they follow from a run's size or from requeuing.
OURS = (
    "array",
    "dependency",
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
    """Options of `--slurm KEY=VALUE`.

    Attributes:
        gpus_per_node: GPUs of a node; a run of more GPUs gets several nodes. 0: no GPUs.
        cpus_per_gpu: CPUs for each GPU; the default is a process and four data-loader workers.
        cpus_per_task: CPUs of a node; 0: `cpus_per_gpu` times its GPUs.
        signal_delay_s: Seconds before the time limit at which a job is asked to save.
        array_parallelism: Jobs of an array that run at a time.
        setup: Lines of the script before the run.
        teardown: Lines of the script after the run.
        srun_args: Further arguments of srun.
        sbatch: Other options, by Slurm's names; an empty value is a flag. `time` is the limit of
            one job; a run that needs more continues in the next.
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
        """Time that a run has to save; the job needs the rest of the delay to requeue itself."""
        return max(self.signal_delay_s - 20.0, self.signal_delay_s / 2)


_LEAST = {"gpus_per_node": 0, "cpus_per_gpu": 1, "cpus_per_task": 1, "array_parallelism": 1}
_LEAST["signal_delay_s"] = 30


def parse_options(arguments: Sequence[str]) -> JobOptions:
    """Parse the `KEY=VALUE` items of `--slurm`; the last of a key counts, but lines add up.

    Any other key is passed on to sbatch, which reports the ones that it does not know.

    Raises:
        UserError: If a value is invalid, or the project sets the option.
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
                raise UserError(f"{where}: expected an integer of at least {_LEAST[key]}")
            values[key] = int(text)
        elif option in OURS:
            raise UserError(f"{where}: the suite sets this option; leave it out")
        else:
            sbatch[option] = "" if text.lower() == "true" else text
    return JobOptions(**values, sbatch=sbatch)


def make_script(
    options: JobOptions,
    name: str,
    jobs: Path,
    entries: Path,
    number: int,
    gpus: int,
    nodes: int,
    *,
    after: Sequence[str] = (),
) -> str:
    """Format the batch script of an array of jobs.

    Args:
        options: Options of `--slurm`.
        name: Name of the jobs.
        jobs: Folder of their logs.
        entries: File that describes their runs.
        number: Number of jobs.
        gpus: GPUs of one run.
        nodes: Nodes of one run.
        after: Jobs that have to succeed before any of these starts.
    """
    cpus = options.cpus_per_task or max(gpus // nodes * options.cpus_per_gpu, 1)
    comes_after = {"dependency": f"afterok:{':'.join(after)}", "kill-on-invalid-dep": "yes"}
    own = {
        "job-name": name,
        "array": f"0-{number - 1}%{options.array_parallelism}",
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus),
        **({"gpus-per-node": str(gpus // nodes)} if gpus else {}),
        **(comes_after if after else {}),
        "signal": f"TERM@{options.signal_delay_s}",
        "requeue": "",
        "open-mode": "append",
        "output": f"{jobs}/%A_%a.log",
    }
    lines = [
        f"#SBATCH --{key}{f'={shlex.quote(value)}' if value else ''}"
        for key, value in (own | dict(options.sbatch)).items()
    ]
    # Since Slurm 22.05 srun does not inherit --cpus-per-task from the job.
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", f"--cpus-per-task={cpus}"]
    srun += [f"--wait={PARTNER_SECONDS}", *options.srun_args]
    program = [sys.executable, "-u", "-m", "benchmarks.suites.executors.slurm_job"]
    start = shlex.join([*program, str(entries), str(options.save_seconds), "--", *srun])
    export = shlex.join(["export", *(f"{key}={value}" for key, value in own_modules().items())])
    # `scancel --full` signals the shell as well, which by default would end, and the job with it.
    body = ["trap : TERM", export, *options.setup, start, *options.teardown]
    return "\n".join(["#!/bin/bash", *lines, "", *body, ""])
