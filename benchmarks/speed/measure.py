"""Interleaved timings with `torch.utils.benchmark`, for a machine that others use, too."""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.utils.benchmark import Timer
from torch.utils.benchmark import timer as synchronized_seconds

from convert.detectron2_backbone import installed
from moco.common.run import provenance

ROOT = Path(__file__).resolve().parents[2]
Contenders = Mapping[str, Callable[[], object]]
BLOCK_SECONDS = 0.1  # short calls are repeated in each round until they take that long


@dataclass(frozen=True)
class Setting:
    """What to measure with.

    Args:
        scratch: folder for generated files.
        rounds: of each timing.
        quick: tiny sizes, for a smoke test.
        images: folder with JPEG images; None for generated ones.
    """

    scratch: Path
    rounds: int
    quick: bool
    images: str | None = None


def every_round(
    contenders: Contenders, rounds: int, timer: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Seconds of a call of each contender in every round; each round times all of them in turn.

    Args:
        timer: a clock; by default the CPU time of this process.
    """
    timers = {
        name: Timer("run()", globals={"run": run}, timer=timer) for name, run in contenders.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, clock in timers.items():
            seconds[name].append(clock.blocked_autorange(min_run_time=BLOCK_SECONDS).median)
    return seconds


def interleaved(
    contenders: Contenders,
    rounds: int,
    device: str = "cpu",
    timer: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """The fastest round of each, as whatever else the machine does can only add to CPU time.

    On a GPU the median round of wall time, synchronized.
    """
    if device == "cpu":
        return {name: min(all_) for name, all_ in every_round(contenders, rounds, timer).items()}
    found = every_round(contenders, rounds, synchronized_seconds)
    return {name: median(all_) for name, all_ in found.items()}


def children_seconds() -> float:
    """CPU time of the processes that this one has waited for, and of theirs."""
    import resource  # POSIX only, and so not above

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_python(*arguments: str) -> str:
    """What a new Python prints.

    Raises:
        RuntimeError: it failed; with what it printed as errors.
    """
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def present() -> set[str]:
    """Which needs of goals.yaml are met here."""
    parts = [("a GPU", torch.cuda.is_available()), ("Detectron2", installed())]
    met = [need for need, is_met in parts if is_met]
    return {"", *met, " and ".join(met)}


def description(rounds: int) -> list[str]:
    """When, by which command, on which machine, with which versions."""
    facts = provenance()
    command = shlex.join(["python", "-m", "benchmarks.speed", *sys.argv[1:]])
    cpu, gpus = facts["hardware"]["cpu"], ", ".join(facts["hardware"]["gpus"])
    return [
        f"{facts['utc']}, `{command}`, revision {facts['git']}",
        f"CPU {cpu}, {torch.get_num_threads()} thread; GPU {gpus or 'none'}",
        ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version),
        f"{rounds} rounds of each timing",
    ]
