"""The table of goals, for a terminal and for docs/."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

HEAD = """# Speed

Each section was written by the command in it; not to be edited.
"""
HEADERS = ("goal", "what", "ours", "reference", "measured", "wanted", "met")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        goal: its number; "" for a comparison without a goal.
        what: the sizes and what belongs to the measurement.
        ours, reference: with units.
        measured, wanted: a ratio, a share or an error, with its sign or unit.
        met: None where there is nothing to meet, or nothing was measured.
        note: why a goal is missed, or what else a reader has to know.
    """

    goal: str
    what: str
    ours: str = ""
    reference: str = ""
    measured: str = ""
    wanted: str = ""
    met: bool | None = None
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """The columns of HEADERS."""
        met = {True: "yes", False: "no", None: "-"}[self.met]
        return self.goal, self.what, self.ours, self.reference, self.measured, self.wanted, met


def faster(
    goal: str, what: str, seconds: Mapping[str, float], reference: str, ours: str, wanted: float
) -> Row:
    """A row for how many times faster ours is; `wanted` 0 is no goal."""
    ratio = seconds[reference] / seconds[ours]
    return Row(
        goal,
        what,
        duration(seconds[ours]),
        duration(seconds[reference]),
        f"{ratio:.2f}x",
        f">= {wanted:g}x" if wanted else "",
        ratio >= wanted if wanted else None,
    )


def at_most(goal: str, what: str, share: float, wanted: float, ours: str, reference: str) -> Row:
    """A row for a share of a whole."""
    measured, limit = f"{share:.1%}", f"<= {wanted:.0%}"
    return Row(goal, what, ours, reference, measured, limit, share <= wanted)


def at_least(goal: str, what: str, share: float, wanted: float, ours: str, reference: str) -> Row:
    """A row for a share of what is possible."""
    measured, limit = f"{share:.0%}", f">= {wanted:.0%}"
    return Row(goal, what, ours, reference, measured, limit, share >= wanted)


def duration(seconds: float) -> str:
    """With three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def text(rows: Sequence[Row]) -> str:
    """For a terminal."""
    cells = [["\n".join(textwrap.wrap(cell, 40)) for cell in row.cells()] for row in rows]
    table = tabulate(cells, HEADERS, tablefmt="grid", disable_numparse=True)
    return "\n".join([table, *_notes(rows)])


def markdown(
    title: str, about: str, rows: Sequence[Row], description: Sequence[str], quick: bool
) -> str:
    """One section of the report; see `docs/speed.md`."""
    table = tabulate(
        [row.cells() for row in rows], HEADERS, tablefmt="github", disable_numparse=True
    )
    warning = ["**A smoke test with tiny sizes: these numbers say nothing.**", ""] if quick else []
    lines = [
        f"## {title}",
        "",
        about.strip(),
        "",
        *warning,
        *(f"- {line}" for line in description),
        "",
        table,
        "",
        *(f"- {note}" for note in _notes(rows)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def with_section(page: str, section: str) -> str:
    """`page`, or an empty one, with a section in the place of that of the same title."""
    head, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    sections = [text.rstrip() + "\n" for text in sections]
    title = section.splitlines()[0]
    same = [i for i, text in enumerate(sections) if text.splitlines()[0] == title]
    if same:
        sections[same[0]] = section
    else:
        sections.append(section)
    return "\n".join([head.rstrip() + "\n" if head.strip() else HEAD, *sections])


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = (f"{row.goal or row.what}: {row.note}" for row in rows if row.note)
    return list(dict.fromkeys(notes))
