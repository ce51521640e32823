r"""Formats, marks, colors and escaping: what all files of a report share.

All text that a report takes from a record passes through the function of its format (`printable`
for terminals, Jinja's escaping as well for HTML), so that it is never interpreted as markup,
formula, control sequence or path. Ordinary names such as `moco_v2 (200ep)` are unchanged, and
unprintable characters become escapes such as `\x1b`.
"""

import csv
import hashlib
import html
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moco.common.command import RANDOM
from moco.common.errors import printable

RESAMPLES = 1000  # default number of bootstrap resamples of the test images
EACH = "each"
FORMATS = ("md", "csv", "tex", "html")
MISSING = "–"
MINUS = "−"
FEW_MARK = "†"  # on n: fewer trials than the paper averages
UNVERIFIED_MARK = "‡"  # on a published number: not checked against its source
UNTESTED = "no test"
MAX_RUNS = 1000  # per row; a gap that needs more is negligible
STRONG_FROM = 0.5  # points; the paper prints gaps from here on in green
GREEN = "#39b54a"  # the paper's "Highlight"
GRAY = "#8a8a8a"  # random initialization
GRID_COLOR = "#e6e6e6"
# Okabe and Ito's color-blind safe palette.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Boxes of the ground truth, of correct and of wrong predictions.
TRUTH, RIGHT, WRONG = PALETTE[5], PALETTE[2], PALETTE[1]
_TITLE = re.compile(r"AP(\d*)(?:\^(\w+))?")
MAX_FILE_NAME = 100  # characters, without the caller's prefix and suffix
_SPECIAL_IN_LATEX = {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "±": "$\\pm$",
    "†": "$\\dagger$",
    "‡": "$\\ddagger$",
    "–": "--",
    "−": "$-$",
    "→": "$\\to$",
    "…": "\\ldots{}",
    **{char: f"${char}$" for char in "<>|"},  # LaTeX's default font encoding has others there
    **{char: f"\\{char}" for char in "&%$#_{}"},
}
# Markup anywhere (an underscore within a word is none), and markup at the start of a line.
_MARKDOWN = re.compile(r"[\\`*\[|~$]|(?<![^\W_])_|_(?![^\W_])")
_MARKDOWN_LINE = re.compile(r"^(\d*)([#=]|[-+](?=[\s-]|$)|[.)](?=\s|$))")
_FORMULA = re.compile(r"\s*[=+@\-\uff1d\uff0b\uff0d\uff20]")  # and their full-width forms
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?")
_HASHED = re.compile(r"-[0-9a-f]{8}$")
PAGE_NAME = "table.html"


def colors(names: Sequence[str]) -> dict[str, str]:
    """Map names to colors: gray for `random`, the palette in order for the others."""
    others = [name for name in names if name != RANDOM]
    palette = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(others)}
    return {RANDOM: GRAY, **palette}


def format_gap(value: float) -> str:
    """Format a gap, rounded to one decimal: `+18.4` or `−0.3`."""
    return f"{'' if round(value, 1) < 0 else '+'}{_signed(value)}"


def is_strong(value: float) -> bool:
    """Check whether the rounded gap is at least +0.5."""
    return round(value, 1) >= STRONG_FROM


def format_interval(low: float, high: float) -> str:
    """Format an interval: `[−1.0, 21.8]`."""
    return f"[{_signed(low)}, {_signed(high)}]"


def _signed(value: float) -> str:
    """Format a number to one decimal, without a negative zero."""
    return f"{round(value, 1) + 0.0:.1f}".replace("-", MINUS)


def format_p(value: float, holm: float | None = None, bound: bool = False) -> str:
    """Format a p-value: `p = 0.002`, or `p ≤ 0.002` if it is a bound; then `Holm p = 0.006`."""
    if value < 0.001:
        text = "p < 0.001"
    else:
        text = f"p ≤ {math.ceil(1000 * value) / 1000:.3f}" if bound else f"p = {value:.3f}"
    return text if holm is None else f"{text}, Holm {format_p(holm, bound=bound)}"


def format_seeds(seeds: Sequence[str]) -> str:
    """Format a list of seeds: `seed 0`, or `seeds 0, 1`."""
    word = "seed" if len(seeds) == 1 else "seeds"
    return f"{word} {', '.join(seeds)}"


def format_runs(needed: float, n: int) -> str:
    """Format a number of runs per row and how many more than `n` these are: `8 (3 more)`."""
    if needed > MAX_RUNS:
        return f"over {MAX_RUNS}"
    return f"{needed:.0f} ({needed - n:.0f} more)" if needed > n else f"{needed:.0f}"


def title_parts(title: str) -> tuple[str, str, str]:
    """Split a column head into name, subscript and superscript: `AP50^bb` is AP, 50 and bb."""
    parts = _TITLE.fullmatch(title)
    return ("AP", parts[1], parts[2] or "") if parts else (title, "", "")


MAX_LABEL = 60  # characters of a name in a figure


def markdown(text: str) -> str:
    """Escape text for a line, heading, list item or table cell of Markdown."""
    plain = html.escape(printable(text), quote=False)
    return _MARKDOWN_LINE.sub(r"\1\\\2", _MARKDOWN.sub(r"\\\g<0>", plain))


def latex(text: str) -> str:
    """Escape text for LaTeX's text mode; characters without a glyph become `[U+...]`."""
    result = "".join(
        _SPECIAL_IN_LATEX.get(char, char if ord(char) < 0x100 else f"[U+{ord(char):04X}]")
        for char in printable(text)
    )
    # At the start of a row they would be read as an argument of the previous row's \\.
    return f"{{}}{result}" if result.lstrip()[:1] in ("[", "*") else result


def figure_label(text: str) -> str:
    """Escape a label for matplotlib: `$` starts a formula, a leading `_` hides it from legends."""
    text = printable(text)
    if len(text) > MAX_LABEL:
        text = f"{text[: MAX_LABEL - 1]}…"
    return re.sub("^_", " _", text).replace("$", "\\$")


def csv_text(lines: Iterable[Mapping[str, object]]) -> str:
    """Format lines as CSV with a header of all their names.

    None becomes an empty field, and a `'` precedes text that spreadsheets would run as a formula.
    """
    rows = [{_csv_cell(name): _csv_cell(each) for name, each in line.items()} for line in lines]
    buffer = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(buffer, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _csv_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = printable(str(value))
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def file_names(keys: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a unique file name for each key: its parts joined by dashes.

    Anything but ASCII letters, digits and `_.-` becomes `_`. Names that are changed by this, are
    too long, or equal another one regardless of case end in a hash of the key.
    """
    names = ["-".join(key) for key in keys]
    slugs = [re.sub(r"[^A-Za-z0-9_.-]+", "_", name).lstrip(".-")[:MAX_FILE_NAME] for name in names]
    times = Counter(slug.lower() for slug in slugs)
    return [
        slug
        if slug == name and times[slug.lower()] == 1 and not _HASHED.search(slug)
        else f"{slug}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]}"
        for key, name, slug in zip(keys, names, slugs, strict=True)
    ]


@dataclass(frozen=True)
class Progress:
    """Progress of a suite in plain, unescaped texts.

    Attributes:
        name: Name of the suite.
        share: Fraction of the work that is done, 0..1.
        left: Time left.
        counts: State → number of runs.
        listed: Title, state, fraction of iterations, time left if known, and location or reason
            of failure of each run that is not done; of waiting ones, the next.
        at: Time of the snapshot, in UTC.
    """

    name: str
    share: float
    left: str
    counts: Mapping[str, int]
    listed: Sequence[tuple[str, str, float, str, str]]
    at: str
