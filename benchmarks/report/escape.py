r"""Escaping of untrusted text, such as that of records and paths, for each format.

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
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from moco.common.errors import printable

MAX_FILE_NAME = 100  # characters, without the caller's prefix and suffix
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


def figure(text: str) -> str:
    """Escape a label for matplotlib: `$` starts a formula, a leading `_` hides it from legends."""
    text = printable(text)
    if len(text) > MAX_LABEL:
        text = f"{text[: MAX_LABEL - 1]}…"
    return re.sub("^_", " _", text).replace("$", "\\$")


def csv_text(names: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Format lines as CSV with a header.

    None becomes an empty field, and a `'` precedes text that spreadsheets would run as a formula.
    """
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
