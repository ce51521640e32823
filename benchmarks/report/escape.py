"""Untrusted text, that of records and of paths, made safe for each format.

Whatever a report takes from a record passes through the function of its format (in terminals:
`printable`, in HTML: Jinja's, too): there it is no markup, formula, control sequence or path.
Ordinary names such as `moco_v2 (200ep)` stay as they are, and what cannot be printed is shown as an
escape such as `\\x1b`.
"""

import csv
import hashlib
import html
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from moco.common.errors import printable

MAX_FILE_NAME = 100  # characters, without what a caller adds
MAX_LABEL = 60  # characters of a name in a figure
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
    **{char: f"${char}$" for char in "<>|"},  # others in LaTeX's default encoding of fonts
    **{char: f"\\{char}" for char in "&%$#_{}"},
}
# What is markup anywhere (an underscore is not within a word), and what is at the start of a line.
_MARKDOWN = re.compile(r"[\\`*\[|~$]|(?<![^\W_])_|_(?![^\W_])")
_MARKDOWN_LINE = re.compile(r"^(\d*)([#=]|[-+](?=[\s-]|$)|[.)](?=\s|$))")
_FORMULA = re.compile(r"\s*[=+@\-\uff1d\uff0b\uff0d\uff20]")  # and their full-width forms
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?")
_HASHED = re.compile(r"-[0-9a-f]{8}$")


def markdown(text: str) -> str:
    """For a line, a heading, a list's item or a table's cell of Markdown."""
    plain = html.escape(printable(text), quote=False)
    return _MARKDOWN_LINE.sub(r"\1\\\2", _MARKDOWN.sub(r"\\\g<0>", plain))


def latex(text: str) -> str:
    """For LaTeX's text, with the report's own marks (±, †) and what its fonts have."""
    result = "".join(
        _SPECIAL_IN_LATEX.get(char, char if ord(char) < 0x100 else f"[U+{ord(char):04X}]")
        for char in printable(text)
    )
    # At the beginning of a row they would be an argument of the \\ of the row before.
    return f"{{}}{result}" if result.lstrip()[:1] in ("[", "*") else result


def figure(text: str) -> str:
    """For matplotlib, whose `$` begins a formula and whose legends leave out names with `_`."""
    text = printable(text)
    if len(text) > MAX_LABEL:
        text = f"{text[: MAX_LABEL - 1]}…"
    return re.sub("^_", " _", text).replace("$", "\\$")


def csv_text(names: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """CSV with a head; None is empty, and a `'` is before what spreadsheets take for a formula."""
    buffer = io.StringIO()
    rows = [[_csv_cell(each) for each in line] for line in (names, *lines)]
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def _csv_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = printable(str(value))
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def file_names(keys: Sequence[tuple[str, ...]]) -> list[str]:
    """A file name for each key, all different: its parts, joined by dashes.

    Anything but ASCII letters, digits and `_.-` becomes `_`. A name that this
    changed, that is too long or that another has, in capitals or not, ends in a hash of its key.
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
