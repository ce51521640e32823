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

HEAD = """# Speed

What was measured, on what, against what, and how the two compare. Only the ratios count: both sides
ran on one machine, in turn. Each section was written by the command in it; not to be edited.
"""
FOOT = "Next, on your machine, in a checkout: `python -m benchmarks.speed pretrain`.\n"
HEADERS = ("what", "ours", "reference", "measured", "goal", "met")
# By kind: how the value and the wanted one are written.
FORMATS = {
    "faster": ("{:.2f} x as fast", ">= {:g} x"),
    "less": ("{:.4g} x less", ">= {:g} x"),
    "reached": ("{:.0%} of it", ">= {:.0%}"),
    "ratio": ("{:.3f} of it", "<= {:.2f}"),
    "share": ("{:.1%} of it", "<= {:.0%}"),
    "error": ("{:.1e}", "<= {:.0e}"),
    "limit": ("{:.3g}", "<= {:g}"),
    "estimate": ("{:.1f} x", ""),
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
        if kind in ("error", "limit"):
            return self.ours
        inverse = kind in ("faster", "less")
        return self.reference / self.ours if inverse else self.ours / self.reference

    @property
    def met(self) -> bool | None:
        """None where there is no goal, or nothing was measured."""
        value, wanted, kind = self.value, self.spec["wanted"], self.spec["kind"]
        if value is None or wanted is None:
            return None
        if kind == "ratio":
            value = round(value, 2)
        more = kind in ("faster", "less", "reached")
        enough = value >= wanted if more else value <= wanted
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
        ours, reference = (quantity(side, spec) for side in (self.ours, self.reference))
        against = ", ".join(filter(None, (reference, spec["against"])))
        met = {True: "yes", False: "no", None: "-"}[self.met]
        return "; ".join(filter(None, parts)), ours, against, measured, wanted, met

    def notes(self) -> list[str]:
        """What a reader has to know, and why the goal is missed, if it is."""
        keys = ("note", "why") if self.met is False else ("note",)
        return [f"{self.spec['what']}: {self.spec[key]}" for key in keys if key in self.spec]


@dataclass(frozen=True)
class Table:
    """Further numbers of a section, which are compared with nothing."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        table = tabulate(self.rows, self.headers, tablefmt="github", disable_numparse=True)
        return f"### {self.title}\n\n{table}\n"


Run = Callable[[Setting], Sequence[Result | Table]]


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


def with_noise(
    goal: str, seconds: Mapping[str, Sequence[float]], sizes: str, differs: bool = False
) -> Result:
    """A row of the fastest rounds, from all rounds of "ours" and "reference".

    A side without rounds was not measured.
    """
    best = {side: min(all_) for side, all_ in seconds.items() if all_}
    noise = max(sorted(all_)[:2][-1] / min(all_) - 1 for all_ in seconds.values() if all_)
    return Result(goal, best.get("ours"), best.get("reference"), sizes, noise, differs)


@cache
def suites() -> dict[str, Any]:
    """Content of goals.yaml."""
    content: dict[str, Any] = yaml.safe_load(
        Path(__file__).with_name("goals.yaml").read_text(encoding="utf-8")
    )
    return content


@cache
def goals() -> dict[str, dict[str, Any]]:
    """The goals of all suites."""
    return {
        name: {"against": suite["against"], **goal}
        for suite in suites().values()
        for name, goal in suite["goals"].items()
    }


def quantity(number: float | None, spec: Mapping[str, Any]) -> str:
    """With its unit."""
    if number is None:
        return ""
    if spec["kind"] == "error":
        return f"{number:.1e}"
    if spec["unit"] != "s":
        return f"{number:.4g} {spec['unit']}"
    return f"{number:.3g} s" if number >= 0.9995 else f"{number * 1000:.3g} ms"


def text(results: Sequence[Result], tables: Sequence[Table] = ()) -> str:
    """For a terminal."""
    cells = [["\n".join(textwrap.wrap(cell, 40)) for cell in result.cells()] for result in results]
    table = tabulate(cells, HEADERS, tablefmt="grid", disable_numparse=True)
    return "\n".join([table, *_notes(results), *(f"\n{each.markdown()}" for each in tables)])


def page(content: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown.

    Args:
        content: by suite "facts", a list of texts, "quick", "results", rows as dictionaries, and
            "tables", also as dictionaries, if there are any.
    """
    parts = [HEAD]
    for suite, of in content.items():
        results = [Result(**row) for row in of["results"]]
        parts += [f"## {suites()[suite]['title']}\n", suites()[suite]["about"]]
        if of["quick"]:
            parts.append("**A smoke test with tiny sizes: these numbers say nothing.**\n")
        parts.append("".join(f"- {fact}\n" for fact in of["facts"]))
        measured = [row for row in results if row.value is not None]
        estimates = [row for row in measured if row.spec["kind"] == "estimate"]
        parts.append(_table([row for row in measured if row not in estimates]))
        parts.append("".join(f"- {note}\n" for note in _notes(measured)))
        if estimates:
            parts += ["### Estimated on paper, not measured\n", _table(estimates)]
        parts += [Table(**table).markdown() for table in of.get("tables", ())]
        if missing := [row for row in results if row.value is None]:
            parts += ["### Not measured yet\n", _table(missing)]
            parts.append("".join(f"- {note}\n" for note in _notes(missing)))
    return "\n".join([*filter(None, parts), FOOT])


def _table(results: Sequence[Result]) -> str:
    """In Markdown, without the columns that have nothing."""
    rows = [dict(zip(HEADERS, result.cells(), strict=True)) for result in results]
    empty = [head for head in HEADERS if all(row[head] in ("", "-") for row in rows)]
    rows = [{head: cell for head, cell in row.items() if head not in empty} for row in rows]
    return tabulate(rows, "keys", tablefmt="github", disable_numparse=True) + "\n"


def _notes(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(note for result in results for note in result.notes()))
