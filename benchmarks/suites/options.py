"""Options with which a suite is computed, and the flags of the commands that compute one."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.suites.checkpoints import KEEP
from benchmarks.suites.executors.base import EXECUTORS

FIRST_SEEDS, MOST_SEEDS, MARGIN = 3, 9, 0.5  # of --until-decided
ENGINES = ("auto", "detectron2", "embedded", "each")


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """Options with which a suite is computed, from a command line or from Python.

    Each is explained at its flag, in `add_arguments`; the defaults here are those of the flags.
    """

    init: Sequence[str] = ()
    trials: int | None = None
    until_decided: bool = False
    margin: float | None = None
    max_seeds: int | None = None
    baseline: str | None = None
    output: Path | None = None
    engine: str = "auto"
    executor: str = "auto"
    gpus_per_run: int | None = None
    workers: int = 0
    slurm: Sequence[str] = ()
    dry_run: bool = False
    plan: Path | None = None
    tune: bool = False
    retry_failed: bool = False
    keep: str | None = None
    seconds_per_iteration: Sequence[str] = ()
    time: bool = False
    stop_seconds: float = 120.0
    opts: Sequence[str] = ()


def add_arguments(parser: argparse.ArgumentParser, trials: int | None = None) -> None:
    """Add the flags of `SuiteOptions`; one that is not given leaves its default.

    Args:
        parser: Parser of a command.
        trials: Default of --trials, for the help; None: the suite's.
    """
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    several: dict[str, Any] = {"action": "append"}
    rows = (
        "add a row to the tables: weights under a name, or random; may be repeated. Weights are "
        "a file, a name or an address (see moco-transfer weights --help); NAME=A,B,C gives "
        "several pre-trainings of one row, 'NAME=ckpt_*.pth' a row for each checkpoint"
    )
    add("--init", **several, metavar="[NAME=]WEIGHTS", help=rows)
    add(
        "--trials",
        "--seeds",
        type=int,
        metavar="N",
        help=f"seeds per row, 0, 1, ... (default: {trials or 'that of the suite'})",
    )
    add(
        "--until-decided",
        action="store_true",
        help="add seeds to all rows of a task until each gap to the baseline is beyond chance or "
        "within --margin, by tests that account for every look",
    )
    margin = f"largest gap in points that counts as none, for --until-decided ({MARGIN})"
    add("--margin", type=float, metavar="POINTS", help=margin)
    most = (
        f"most seeds per row, for --until-decided ({MOST_SEEDS}); the first look is at --trials "
        f"({FIRST_SEEDS})"
    )
    add("--max-seeds", type=int, metavar="M", help=most)
    add("--baseline", metavar="NAME", help="the init that gaps refer to")
    add("--output", type=Path, metavar="DIR", help="folder of the suite (output/<suite>)")
    engines = "detection engine; auto: detectron2 if it can be imported; each: one table per engine"
    add("--engine", choices=ENGINES, help=engines)
    executors = sorted(name for name, _ in EXECUTORS)
    where = "where runs are computed; auto: on the GPUs if there are any"
    add("--executor", choices=executors, help=where)
    gpus = "GPUs of one run (default: the suite's)"
    add("--gpus-per-run", type=int, metavar="N", help=gpus)
    workers = (
        "parallel runs on the CPU (default: one per core); with slurm, jobs in the queue at a "
        "time (default: all)"
    )
    add("--workers", type=int, metavar="N", help=workers)
    slurm = (
        "option of --executor slurm; may be repeated: time (24:00:00), "
        "gpus_per_node (8; GPUs of one node), cpus_per_gpu (5), cpus_per_task, array_parallelism "
        "(256 at a time), signal_delay_s (90), setup and teardown (lines of the script), "
        "srun_args, or any option of sbatch: partition, account, qos, constraint, mem, ..."
    )
    add("--slurm", **several, metavar="KEY=VALUE", help=slurm)
    dry = "list the runs, check everything, start no run; what is timed (see --time) is kept in DIR"
    add("--dry-run", action="store_true", help=dry)
    plan = (
        "write every run to a file instead of computing it: command, GPUs, dependencies, and the "
        "file that exists when it is done"
    )
    add("--plan", type=Path, metavar="FILE.json", help=plan)
    grid = (
        "first train every detection task from every init with the same grid of learning rates, "
        "shortened and without the test images; the best one of each init adds a row"
    )
    add("--tune", action="store_true", help=grid)
    add("--retry-failed", action="store_true", help="repeat runs that failed before")
    keep = (
        "checkpoints to keep: the final one of each run (default), its last two, or all; if "
        "given, it also applies to runs that were done before"
    )
    add("--keep", choices=KEEP, help=keep)
    seconds = "speed to estimate from if DIR has no measurement; may be repeated"
    add("--seconds-per-iteration", **several, metavar="[TASK=]S", help=seconds)
    timed = "time 20 iterations of every task without a known speed, to estimate the hours"
    add("--time", action="store_true", help=timed)
    stop = f"time that runs have to save when the suite is stopped ({SuiteOptions.stop_seconds})"
    add("--stop-seconds", type=float, metavar="S", help=stop)
    add("--debug", action="store_true", help="show the traceback of an error")
    add("--opts", nargs="*", metavar="KEY VALUE", help="config overrides of all tasks")
