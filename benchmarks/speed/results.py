"""Results as data, and the table made of them for a terminal and for docs/speed.md."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from tabulate import tabulate

from benchmarks.speed.measure import Setting

HEAD = "# Speed\n\nEach section was written by the command in it; not to be edited.\n"
HEADERS = ("goal", "what", "ours", "reference", "measured", "wanted", "met")
# By kind: how the value and the wanted one are written.
FORMATS = {
    "faster": ("{:.2f}x", ">= {:g}x"),
    "reached": ("{:.0%}", ">= {:.0%}"),
    "ratio": ("{:.3f}", "<= {:.2f}"),
    "share": ("{:.1%}", "<= {:.0%}"),
    "error": ("{:.1e}", "<= {:.0e}"),
}


@dataclass(frozen=True)
class Result:
    """One row.

    Attributes:
        goal: a key of goals.yaml.
        ours, reference: in the goal's unit; None where nothing was measured.
        sizes: what belongs to the measurement.
        noise: how much longer the second fastest round took than the fastest, as a share.
        differs: whether the two sides computed different things; then the goal is not met.
    """

    goal: str
    ours: float | None = None
    reference: float | None = None
    sizes: str = ""
    noise: float | None = None
    differs: bool = False

    @property
    def spec(self) -> dict[str, Any]:
        """The goal, see goals.yaml."""
        return {"kind": "faster", "unit": "s", "wanted": None, **goals()[self.goal]}

    @property
    def value(self) -> float | None:
        """What is compared with the goal."""
        if self.ours is None or self.reference is None:
            return None
        kind = self.spec["kind"]
        if kind == "error":
            return self.ours
        return self.reference / self.ours if kind == "faster" else self.ours / self.reference

    @property
    def met(self) -> bool | None:
        """None where there is no goal, or nothing was measured."""
        value, wanted, kind = self.value, self.spec["wanted"], self.spec["kind"]
        if value is None or wanted is None:
            return None
        if kind == "ratio":
            value = round(value, 2)
        enough = value >= wanted if kind in ("faster", "reached") else value <= wanted
        return enough and not self.differs

    def cells(self) -> tuple[str, ...]:
        """The columns of HEADERS."""
        spec = self.spec
        value_format, wanted_format = FORMATS[spec["kind"]]
        needs = f"needs {spec['needs']}" if self.value is None else ""
        parts = (spec["what"], self.sizes, "results DIFFER" if self.differs else "", needs)
        measured = "" if self.value is None else value_format.format(self.value)
        if self.noise is not None:
            measured += f" ({self.noise:.1%})"
        wanted = "" if spec["wanted"] is None else wanted_format.format(spec["wanted"])
        sides = (quantity(side, spec) for side in (self.ours, self.reference))
        met = {True: "yes", False: "no", None: "-"}[self.met]
        return number(self.goal), "; ".join(filter(None, parts)), *sides, measured, wanted, met

    def notes(self) -> list[str]:
        """What a reader has to know, and why the goal is missed, if it is."""
        keys = ("note", "why") if self.met is False else ("note",)
        return [f"{number(self.goal)}: {self.spec[key]}" for key in keys if key in self.spec]


Run = Callable[[Setting], list[Result]]


def compare(
    goal: str,
    sides: Mapping[str, float],
    ours: str = "ours",
    reference: str = "reference",
    sizes: str = "",
    differs: bool = False,
) -> Result:
    """The row of two of the measured sides; one that is missing was not measured."""
    return Result(goal, sides.get(ours), sides.get(reference), sizes, differs=differs)


@cache
def suites() -> dict[str, Any]:
    """Content of goals.yaml."""
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("goals.yaml").read_text())
    return content


@cache
def goals() -> dict[str, dict[str, Any]]:
    """The goals of all suites."""
    return {name: goal for suite in suites().values() for name, goal in suite["goals"].items()}


def number(goal: str) -> str:
    """`C4` of `C4 rate`; "" for a comparison without a goal."""
    return goal.split()[0] if goal[0].isupper() else ""


def quantity(number: float | None, spec: Mapping[str, Any]) -> str:
    """With its unit."""
    if number is None:
        return ""
    if spec["kind"] == "error":
        return f"{number:.1e}"
    if spec["unit"] != "s":
        return f"{number:.4g} {spec['unit']}"
    return f"{number:.3g} s" if number >= 0.9995 else f"{number * 1000:.3g} ms"


def text(results: Sequence[Result]) -> str:
    """For a terminal."""
    cells = [["\n".join(textwrap.wrap(cell, 40)) for cell in result.cells()] for result in results]
    table = tabulate(cells, HEADERS, tablefmt="grid", disable_numparse=True)
    return "\n".join([table, *_notes(results)])


def page(content: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown.

    Args:
        content: by suite "facts", a list of texts, "quick" and "results", rows as dictionaries.
    """
    parts = [HEAD]
    for suite, of in content.items():
        results = [Result(**row) for row in of["results"]]
        cells = [result.cells() for result in results]
        parts += [f"## {suites()[suite]['title']}\n", suites()[suite]["about"]]
        if of["quick"]:
            parts.append("**A smoke test with tiny sizes: these numbers say nothing.**\n")
        parts.append("".join(f"- {fact}\n" for fact in of["facts"]))
        parts.append(tabulate(cells, HEADERS, tablefmt="github", disable_numparse=True) + "\n")
        if notes := _notes(results):
            parts.append("".join(f"- {note}\n" for note in notes))
    return "\n".join(parts)


def _notes(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(note for result in results for note in result.notes()))
