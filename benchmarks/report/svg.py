"""Shorter SVG files: a page of seven rows and ten tasks is a file of less than 2 MB."""

import re
from collections import Counter

_BETWEEN_TAGS = re.compile(r">\s*\n\s*<")
_GROUP_ID = re.compile(r'(?<=<g) id="[^"]*"')  # nothing refers to matplotlib's groups
_NO_ROTATION = re.compile(r' transform="rotate\(-?0 [^"]*"')
_GROUP = re.compile(r"<g(?: [^>]*)?>|</g>")
_PATH = re.compile(r'(?<= d=")[^"]*')
_PLACE = re.compile(r'(?<= [xy]=")[^"]*')
_DECIMALS = re.compile(r"(\.\d)\d+")
_STYLE = re.compile(r'(<\w+[^<>]*?) style="([^"]*)"')
_SHEET = re.compile(r"(?<=\})(?=</style>)")


def compact(text: str) -> str:
    """Shorten an SVG file of matplotlib without a visible change.

    Places have one decimal of a point, and styles that are repeated become classes.
    """
    text = _GROUP_ID.sub("", _NO_ROTATION.sub("", _BETWEEN_TAGS.sub("><", text)))
    text = _without_groups(text)
    text = _PATH.sub(lambda path: _short_path(path[0]), text)
    text = _PLACE.sub(lambda place: _DECIMALS.sub(r"\1", place[0]), text)
    times = Counter(style for _, style in _STYLE.findall(text))
    names = {style: f"s{i}" for i, style in enumerate(times) if times[style] > 1}
    text = _STYLE.sub(
        lambda tag: f'{tag[1]} class="{names[tag[2]]}"' if tag[2] in names else tag[0], text
    )
    rules = "".join(f".{name}{{{style}}}" for style, name in names.items())
    return _SHEET.sub(lambda _: rules, text, count=1)


def _without_groups(text: str) -> str:
    """Remove groups without attributes, but not what is in them."""
    kept: list[bool] = []

    def tag(found: re.Match[str]) -> str:
        if found[0].startswith("</"):
            return found[0] if kept.pop() else ""
        kept.append(found[0] != "<g>")
        return found[0] if kept[-1] else ""

    return _GROUP.sub(tag, text)


def _short_path(path: str) -> str:
    short = re.sub(r" ?([A-Za-z]) ?", r"\1", " ".join(_DECIMALS.sub(r"\1", path).split()))
    # Further pairs after a moveto are linetos.
    return short if re.search("[^-MLz. 0-9]", short) else short.replace("L", " ")
