"""Timing on a machine that others use, too."""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu"
) -> dict[str, float]:
    """Seconds that each contender takes; in every round each of them runs once.

    On a CPU the processor time of this process, the smallest of all rounds: whatever else runs can
    only add to it. On a GPU the median of the times between two events.
    """
    clock = _gpu_seconds if device == "cuda" else _cpu_seconds
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender()  # allocations and choices of kernels that are made once
    for _ in range(rounds):
        for name, contender in contenders.items():
            seconds[name].append(clock(contender))
    typical = median if device == "cuda" else min
    return {name: typical(values) for name, values in seconds.items()}


def copy_bytes_per_second(rounds: int, device: str, num_bytes: int) -> float:
    """Bytes read plus bytes written per second by a copy."""
    a = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * num_bytes / interleaved({"copy": lambda: b.copy_(a)}, rounds, device)["copy"]


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
