"""Timing on a machine that others use, too."""

import shlex
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from moco.common.run import provenance

Clock = Callable[[Callable[[], object]], float]


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    device: str = "cpu",
    clock: Clock | None = None,
) -> dict[str, float]:
    """Seconds that each contender takes; in every round each of them runs once.

    On a CPU the CPU time of this process, the smallest of all rounds: whatever else runs can
    only add to it. On a GPU the median of the times between two events.

    Args:
        clock: what else to measure on the CPU, e.g. `children_seconds`.
    """
    clock = clock or (_gpu_seconds if device == "cuda" else _cpu_seconds)
    typical = median if device == "cuda" else min
    seconds = every_round(contenders, rounds, clock)
    return {name: typical(values) for name, values in seconds.items()}


def every_round(
    contenders: Mapping[str, Callable[[], object]], rounds: int, clock: Clock | None = None
) -> dict[str, list[float]]:
    """What `interleaved` chooses from: of each contender the seconds of all rounds."""
    clock = clock or _cpu_seconds
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender()  # allocations and choices of kernels that are made once
    for _ in range(rounds):
        for name, contender in contenders.items():
            seconds[name].append(clock(contender))
    return seconds


def copy_bytes_per_second(rounds: int, device: str, num_bytes: int) -> float:
    """Bytes read plus bytes written per second by a copy."""
    a = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * num_bytes / interleaved({"copy": lambda: b.copy_(a)}, rounds, device)["copy"]


def description(rounds: int) -> list[str]:
    """When, by which command, on which machine, with which versions."""
    facts = provenance()
    command = shlex.join(["python", "-m", "benchmarks.speed", *sys.argv[1:]])
    versions = ", ".join(f"{name} {v}" for name, v in facts["versions"].items() if v)
    return [
        f"{facts['utc']}, `{command}`, revision {facts['git']}",
        f"CPU {facts['hardware']['cpu']}, {torch.get_num_threads()} thread; "
        f"GPU {', '.join(facts['hardware']['gpus']) or 'none'}",
        versions,
        f"{rounds} rounds of each timing",
    ]


def children_seconds(function: Callable[[], object]) -> float:
    """Processor time of the processes that a call starts, and of theirs; it waits for them."""

    def used() -> float:
        import resource  # POSIX only, and so not above

        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    start = used()
    function()
    return used() - start


def wall_seconds(function: Callable[[], object]) -> float:
    """Time that passes."""
    start = time.monotonic()
    function()
    return time.monotonic() - start


def _cpu_seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def _gpu_seconds(function: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000
