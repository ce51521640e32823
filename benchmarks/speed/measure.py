"""Interleaved timings on a shared machine, and Markdown tables of the results."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

from moco.common.command import quote
from moco.common.run import jsonable, provenance

ROOT = Path(__file__).resolve().parents[2]
BLOCK_SECONDS = 0.1  # a round repeats short calls until they take this long
HEADERS = ("what", "ours", "reference", "measured", "goal", "met")
# Formats of value and goal by kind. times: reference ÷ ours, at least the goal; floor: the same for
# a theoretical bound; share: ours ÷ reference, at most the goal; error: ours, at most the goal.
FORMATS = {
    "times": ("{:.4g} x", ">= {:g} x"),
    "floor": ("{:.1%} of its speed", ">= {:.0%}"),
    "share": ("{:.3f} of it", "<= {:g}"),
    "error": ("{:.1e}", "<= {:.0e}"),
}


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
    """Time all contenders alternately in every round, after warm-up calls of each.

    On a CPU the result is the CPU time of the fastest round, because other load can only add to it;
    on a GPU it is the median of the times between CUDA events.
    """
    clock, pick = (_cpu_seconds, min) if device == "cpu" else (_gpu_seconds, median)
    for run in contenders.values():
        for _ in range(1 if device == "cpu" else 3):  # a GPU's libraries choose their kernels
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
    calls, begin = 0, time.perf_counter()
    start.record()
    while not calls or time.perf_counter() - begin < BLOCK_SECONDS:
        run()
        calls += 1
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / calls


class Row(NamedTuple):
    """Comparison of two numbers in `unit`; `kind` selects the value compared with the goal."""

    what: str
    ours: float
    reference: float
    against: str = "official code"
    goal: float | None = None
    kind: str = "times"
    unit: str = "s"
    noise: float | None = None

    @property
    def value(self) -> float:
        """Return the measured value that `kind` selects; see `FORMATS`."""
        if self.kind in ("times", "floor"):
            return self.reference / (self.ours or 1e-30)
        return self.ours / (self.reference or 1e-30) if self.kind == "share" else self.ours

    @property
    def met(self) -> bool | None:
        """Return whether the goal is met, or None without a goal."""
        if self.goal is None:
            return None
        faster = self.kind in ("times", "floor")
        return self.value >= self.goal if faster else self.value <= self.goal

    def cells(self) -> tuple[str, ...]:
        """Format the row of the table with columns `HEADERS`."""
        value_format, goal_format = FORMATS[self.kind]
        measured = value_format.format(self.value)
        measured += "" if self.noise is None else f" ({self.noise:.1%})"
        goal = "" if self.goal is None else goal_format.format(self.goal)
        met = {None: "-", True: "yes", False: "no"}[self.met]
        reference = f"{_quantity(self.reference, self.unit)}, {self.against}"
        return self.what, _quantity(self.ours, self.unit), reference, measured, goal, met


def compare(
    what: str,
    sides: Mapping[str, Timing],
    ours: str = "ours",
    reference: str = "official code",
    goal: float | None = None,
    kind: str = "times",
) -> Row:
    """Compare two of the timed sides; the noise is the larger noise of the two."""
    a, b = sides[ours], sides[reference]
    noise = max(a.noise, b.noise)
    return Row(what, a.seconds, b.seconds, reference, goal, kind, noise=noise)


def _quantity(number: float, unit: str) -> str:
    if unit != "s":
        return f"{number:.4g} {unit}" if unit else f"{number:.1e}"
    return f"{number:.3g} s" if number >= 0.9995 else f"{number * 1000:.3g} ms"


def measurement(
    rows: Sequence[Row], words: Sequence[str], rounds: int, seconds: float
) -> dict[str, Any]:
    """Return rows, date, command, hardware and versions as a mapping for JSON.

    Args:
        rows: Rows of the table.
        words: Arguments of `moco-transfer speed`; of absolute paths only the names are shown.
        rounds: Rounds of each timing.
        seconds: Duration of the command.
    """
    facts = provenance()
    shown = [Path(word).name if Path(word).is_absolute() else word for word in words]
    command = quote("moco-transfer", "speed", *shown)
    kept = {name: facts[name] for name in ("utc", "git", "hardware", "versions")}
    lines = [{**row._asdict(), "value": row.value, "met": row.met} for row in rows]
    own = {"command": command, "rounds": rounds, "seconds": round(seconds), "rows": lines}
    content: dict[str, Any] = jsonable({**kept, **own})
    return content


def to_json(found: Mapping[str, Any]) -> str:
    """Format a measurement as a JSON file."""
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def section(found: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Format a measurement as a Markdown list of facts and a table."""
    cpu, gpus = found["hardware"]["cpu"], ", ".join(found["hardware"]["gpus"]) or "none"
    table = tabulate(
        [row.cells() for row in rows], HEADERS, tablefmt="github", disable_numparse=True
    )
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items() if value)
    return f"""- {found["utc"]}, `{found["command"]}`, revision {found["git"]}, {found["seconds"]} s
- CPU {cpu}, {torch.get_num_threads()} thread; GPU {gpus}; rounds of each timing: {found["rounds"]}
- {versions}

{table}"""


def insert(page: str, name: str, text: str) -> str:
    """Replace the text between the markers of `name`, which are appended if the page has none."""
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if first not in page:
        page = f"{page}\n{first}\n{last}\n"
    before, _, rest = page.partition(first)
    return f"{before}{first}\n\n{text}\n\n{last}{rest.partition(last)[2]}"
