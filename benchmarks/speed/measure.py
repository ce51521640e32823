"""Interleaved timings on a shared machine, and Markdown tables of them."""

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from tabulate import tabulate

from moco.common.run import provenance

ROOT = Path(__file__).resolve().parents[2]
BLOCK_SECONDS = 0.1  # a round repeats short calls until they take this long
HEADERS = ("what", "ours", "reference", "measured", "goal", "met")
# Formats of value and goal by kind. times: reference ÷ ours; share: ours ÷ reference; error: ours.
FORMATS = {
    "times": ("{:.4g} x", ">= {:g} x"),
    "share": ("{:.3f} of it", "<= {:g}"),
    "error": ("{:.1e}", "<= {:.0e}"),
}
Row = tuple[str, ...]


class Setting(NamedTuple):
    """Options of a measurement."""

    scratch: Path  # folder for generated files
    rounds: int
    quick: bool  # tiny sizes, for a smoke test
    images: str | None = None  # folder with JPEG images; None: generate them


class Timing(NamedTuple):
    """Time of one call."""

    seconds: float
    noise: float  # relative difference of the second fastest round


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu"
) -> dict[str, Timing]:
    """Time all contenders alternately in every round, after one warm-up call of each.

    The result is the fastest round in CPU time on a CPU, as other load can only add to it, and the
    median by CUDA events on a GPU.
    """
    clock, pick = (_cpu_seconds, min) if device == "cpu" else (_gpu_seconds, median)
    for run in contenders.values():
        run()
    found = [[clock(run) for run in contenders.values()] for _ in range(rounds)]
    timings = {}
    for name, *seconds in zip(contenders, *found, strict=True):
        timings[name] = Timing(pick(seconds), sorted(seconds)[:2][-1] / min(seconds) - 1)
    return timings


def _cpu_seconds(run: Callable[[], object]) -> float:
    calls, passed, start = 0, 0.0, time.process_time()
    while passed < BLOCK_SECONDS:
        run()
        calls, passed = calls + 1, time.process_time() - start
    return passed / calls


def _gpu_seconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def row(
    what: str,
    ours: float,
    reference: float,
    against: str = "official code",
    goal: float | None = None,
    kind: str = "times",
    unit: str = "s",
    noise: float | None = None,
) -> Row:
    """Format a comparison of numbers in `unit`; `goal` bounds the value that `kind` selects."""
    values = {"times": reference / (ours or 1e-30), "share": ours / (reference or 1e-30)}
    value = values.get(kind, ours)
    value_format, goal_format = FORMATS[kind]
    measured = value_format.format(value) + ("" if noise is None else f" ({noise:.1%})")
    cells = (what, _quantity(ours, unit), f"{_quantity(reference, unit)}, {against}", measured)
    if goal is None:
        return *cells, "", "-"
    met = value >= goal if kind == "times" else value <= goal
    return *cells, goal_format.format(goal), "yes" if met else "no"


def compare(
    what: str,
    sides: Mapping[str, Timing],
    ours: str = "ours",
    reference: str = "official code",
    goal: float | None = None,
    kind: str = "times",
) -> Row:
    """Compare two of the timed sides; the noise is the larger of the two."""
    a, b = sides[ours], sides[reference]
    return row(what, a.seconds, b.seconds, reference, goal, kind, noise=max(a.noise, b.noise))


def _quantity(number: float, unit: str) -> str:
    if unit != "s":
        return f"{number:.4g} {unit}" if unit else f"{number:.1e}"
    return f"{number:.3g} s" if number >= 0.9995 else f"{number * 1000:.3g} ms"


def section(rows: Sequence[Row], rounds: int) -> str:
    """Format the table of rows, with date, command, hardware and versions of the measurement."""
    facts = provenance()
    command = shlex.join(["python", "-m", "benchmarks.speed", *sys.argv[1:]])
    cpu, gpus = facts["hardware"]["cpu"], ", ".join(facts["hardware"]["gpus"]) or "none"
    table = tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True)
    versions = ", ".join(f"{name} {found}" for name, found in facts["versions"].items() if found)
    return f"""- {facts["utc"]}, `{command}`, revision {facts["git"]}
- CPU {cpu}, {torch.get_num_threads()} thread; GPU {gpus}; rounds of each timing: {rounds}
- {versions}

{table}"""


def insert(page: str, name: str, text: str) -> str:
    """Replace the text between the markers of `name`, which are appended if the page has none."""
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if first not in page:
        page = f"{page}\n{first}\n{last}\n"
    before, _, rest = page.partition(first)
    return f"{before}{first}\n\n{text}\n\n{last}{rest.partition(last)[2]}"
