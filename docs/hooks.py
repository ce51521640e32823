"""MkDocs hooks: the parts of the site that are generated from the code when it is built.

A comment `<!-- generated: NAME -->` in a page is replaced by what `GENERATED[NAME]` returns, each
room of a package gets a page of its API, and CHANGELOG.md and CONTRIBUTING.md become pages.
"""

import argparse
import html
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # mkdocs imports this file by its path

from benchmarks.__main__ import COMMANDS  # noqa: E402
from convert import families  # noqa: E402
from detection.config import keys  # noqa: E402
from detection.evaluation import metrics  # noqa: E402
from moco.classification import config as classification  # noqa: E402
from moco.common.cfgnode import flatten  # noqa: E402
from moco.common.command import NAME  # noqa: E402
from moco.engine import config as common  # noqa: E402
from moco.finetune import FINETUNE  # noqa: E402
from moco.linear import LINEAR  # noqa: E402
from moco.pretraining import config as pretraining  # noqa: E402

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PACKAGES = ("moco", "convert", "detection", "benchmarks")
NO_API = ("benchmarks/speed",)  # not installed
TOP_LEVEL = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
_MARK = re.compile(r"<!-- generated: (\w+) -->")
# `cfg.A.B = …` and `"A.B": …`, with the comment behind it.
_KEY = re.compile(r'\s*(?:cfg\.|")([A-Z][A-Z0-9_.]*)"?(?: =|:) (?!CfgNode).*?(?:  # (.*))?$')
# In a comment: a flag, a dotted key, a path, a pattern.
_CODE = re.compile(r"(?<![\w$])(--[a-z][\w-]*|[A-Z]+\.[A-Z_]*[A-Z]|[\w.-]+/[^ ,;:)]*[\w*>/])")
ABOUT = {
    "Detection: Detectron2's keys": "Names, defaults and meaning are [Detectron2's](https://"
    "detectron2.readthedocs.io/en/latest/modules/config.html#yaml-config-references).",
    "Detection: fixed on the embedded engine": "The embedded engine takes these of Detectron2's "
    "keys at these values only, and refuses any other by name.",
    "Detection: fixed on both engines": "Detectron2's keys of what this project's loop does not "
    "have; another value is refused by name.",
}
FAMILY_FILES = [file for file in vars(families).values() if hasattr(file, "TASK_KEYS")]
_LONG_CODE = re.compile(r"(?<=<code>)[^<\n]{16,}(?=</code>)")
Documented = list[tuple[list[str], str]]  # keys and what is said about them


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """List the API's pages in the navigation, below the entry of reference/api/index.md."""
    [reference] = [entry["Reference"] for entry in config.nav or () if "Reference" in entry]
    pages = [{room.replace("/", "."): page} for room, page in api_pages().items()]
    reference[-1] = {"Python API": ["reference/api/index.md", *pages]}
    return config


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the pages that are not files below docs/."""
    from mkdocs.structure.files import File

    pages = {page: api_page(room) for room, page in api_pages().items()}
    for page, name in TOP_LEVEL.items():
        pages[page] = (ROOT / name).read_text().replace("](docs/", "](")
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what is generated."""
    return _MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Let names in tables break behind `/` and `_`, instead of anywhere."""
    return _LONG_CODE.sub(lambda code: re.sub(r"(?<=[/_])", "<wbr>", code[0]), content)


def api_pages() -> dict[str, str]:
    """The page of each room, by its folder: `{"moco/data": "reference/api/moco.data.md"}`."""
    rooms = [
        path.parent.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("__init__.py"))
    ]
    return {r: f"reference/api/{r.replace('/', '.')}.md" for r in rooms if r not in NO_API}


def api_page(room: str) -> str:
    """A room's docstring, then each of its modules, in mkdocstrings' notation."""
    names = [path.stem for path in sorted((ROOT / room).glob("*.py"))]
    name = room.replace("/", ".")
    modules = [f"::: {name}.{module}" for module in names if not module.startswith("_")]
    package = f"::: {name}\n    options: {{show_root_heading: false, show_root_toc_entry: false}}"
    # In the search, what the guides and the other references say comes first.
    return "\n\n".join(["---\nsearch: {boost: 0.5}\n---", f"# {name}", package, *modules])


def command_line() -> str:
    """Every command of `moco-transfer` with its arguments, from its own parser."""
    lines: list[str] = []
    for name, (module, first, what) in COMMANDS.items():
        if first:  # another name for a command with these arguments
            alias = " ".join([next(n for n, c in COMMANDS.items() if c[0] == module), *first])
            lines += [f"\n## {name}\n\n{what.capitalize()}: the same as `{alias}`.\n"]
        else:
            with mock.patch.object(sys, "argv", [NAME]):  # as the command names itself
                parser = importlib.import_module(module).build_parser()
            lines += describe_parser(name, parser)
    return "\n".join(lines)


def describe_parser(name: str, parser: argparse.ArgumentParser, level: int = 2) -> Iterator[str]:
    """A parser in Markdown: what it is for, its arguments, then the commands below it."""
    yield f"\n{'#' * level} {name}\n\n{_text_of(parser, parser.description)}\n"
    below: dict[str, argparse.ArgumentParser] = {}
    formatter = parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = action.choices
        elif action.dest != "help" and action.help != argparse.SUPPRESS:
            names = [f"`{flag}`" for flag in action.option_strings]
            if action.nargs != 0:
                metavar = action.dest.upper() if names else action.dest
                names.append(f"`{formatter._format_args(action, metavar)}`")
            said = formatter._expand_help(action) if action.help else ""
            yield f"- {' '.join(names)}\n\n    {_prose(said)}{_default_of(action, said)}\n"
    if parser.epilog:
        yield f"\n{_text_of(parser, parser.epilog)}\n"
    for command, its_parser in below.items():
        yield from describe_parser(f"{name} {command}", its_parser, level + 1)


def _text_of(parser: argparse.ArgumentParser, text: str | None) -> str:
    """A description or epilog, in the lines that it has where the parser keeps them."""
    if issubclass(parser.formatter_class, argparse.RawDescriptionHelpFormatter):
        return f"```text\n{inspect.cleandoc(text or '')}\n```"
    return _prose(text or "")


def _default_of(action: argparse.Action, said: str) -> str:
    """A default that the help does not name."""
    default = action.default
    if not isinstance(default, str | int) or default in (False, "") or str(default) in said:
        return ""
    return "" if default == argparse.SUPPRESS else f" (default: {default})"


def config_keys() -> str:
    """Every key of a training: its type, its default, and the comment at its definition."""
    pretrain = flatten(pretraining.default_cfg())
    linear, finetune = (
        flatten(classification.default_cfg(protocol.defaults)) for protocol in (LINEAR, FINETUNE)
    )
    task = {**keys.HONORED, **keys.TRANSFER}
    sections: dict[str, tuple[Documented, dict[str, dict[str, Any]]]] = {
        "Every training of moco/": (
            documented(common.common_cfg),
            {"pretrain": pretrain, "linear": linear, "finetune": finetune},
        ),
        "Pre-training": (
            documented(pretraining.default_cfg),
            {"v1": pretrain, "v2": flatten(pretraining.default_cfg("v2"))},
        ),
        "Linear classification and fine-tuning": (
            documented(classification.default_cfg),
            {"linear": linear, "finetune": finetune},
        ),
        "Detection: this project's keys": (documented(keys, "TRANSFER"), {"": task}),
        "Detection: the backbone families' keys": (
            [entry for module in FAMILY_FILES for entry in documented(module, "TASK_KEYS")],
            {"": task},
        ),
        "Detection: Detectron2's keys": (documented(keys, "HONORED"), {"": task}),
        "Detection: fixed on the embedded engine": (
            [([key], "") for key in keys.DETECTRON2_ONLY],
            {"": keys.DETECTRON2_ONLY},
        ),
        "Detection: fixed on both engines": ([([key], "") for key in keys.FIXED], {"": keys.FIXED}),
    }
    lines: list[str] = []
    anchors: set[str] = set()
    for title, (entries, defaults) in sections.items():
        lines += [f"\n## {title}\n\n{ABOUT.get(title, '')}\n"]
        group = ""
        for names, said in entries:
            if group != (group := names[0].rpartition(".")[0].partition(".")[0]):
                lines += [f"\n### {group or 'Others'}\n"]
            shown = [f"{_anchor(name, anchors)}{_default(name, defaults)}" for name in names]
            if title.startswith("Detection"):
                said += _choices("On the embedded engine", keys.EMBEDDED_CHOICES.get(names[0]))
                said += _choices("Choices", keys.LOOP_CHOICES.get(names[0]))
            lines += [f"- {'<br>'.join(shown)}\n\n    {_prose(said)}\n"]
    return "\n".join(lines)


def _choices(label: str, values: Sequence[Any] | None) -> str:
    shown = ", ".join(f"`{_value(value)}`" for value in values or ())
    return f" {label}: {shown}." if shown else ""


def documented(where: Any, table: str = "") -> Documented:
    """Keys and what the comments at their definition say, in the order of the source.

    A comment above a key is about the keys below it, too, until an empty line or the next comment;
    in `HONORED`, about that key alone.

    Args:
        where: a function that sets `cfg.A.B`, or a module that has the dict `table`.
    """
    source = inspect.getsource(where)
    if table:
        source = source.split(f"\n{table}: ")[1].split("\n}")[0]
    found: Documented = []
    comment: list[str] = []
    new = False  # no key has the comment yet
    for line in source.splitlines():
        if (text := line.strip()).startswith("#"):
            comment, new = [*(comment if new else ()), text.lstrip("# ")], True
        elif key := _KEY.match(line):
            if comment and not new and not key[2] and table != "HONORED":
                found[-1][0].append(key[1])
            else:
                found.append(([key[1]], key[2] or (" ".join(comment) if new else "")))
            new = False
        else:
            comment, new = [], False
    return found


def _anchor(name: str, anchors: set[str]) -> str:
    """The key, with an anchor of its name where it has none yet."""
    new = name not in anchors
    anchors.add(name)
    return f'<a id="{name}"></a>`{name}`' if new else f"`{name}`"


def _default(name: str, variants: Mapping[str, Mapping[str, Any]]) -> str:
    """` *type* = default`, or the default of each variant where they differ."""
    values = {variant: _value(cfg[name]) for variant, cfg in variants.items() if name in cfg}
    value = next(cfg[name] for cfg in variants.values() if name in cfg)
    kind = "optional" if value is None else type(value).__name__
    if len(set(values.values())) == 1:
        return f" *{kind}* = `{next(iter(values.values()))}`"
    return f" *{kind}* = " + ", ".join(f"`{text}` ({variant})" for variant, text in values.items())


def _value(value: Any) -> str:
    """A default as one writes it, floats with six digits."""
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    if isinstance(value, list | tuple):
        inside = ", ".join(map(_value, value)) + ("," if len(value) == 1 else "")
        return f"[{inside.rstrip(',')}]" if isinstance(value, list) else f"({inside})"
    return repr(value)


def _prose(text: str) -> str:
    """A comment or help text as one line of Markdown, with keys, flags and paths as code."""
    parts = " ".join(text.split()).split("`")  # every other part is code already
    parts[::2] = [_CODE.sub(r"`\1`", part) for part in parts[::2]]
    parts = "`".join(parts).split("`")
    parts[::2] = [html.escape(part, quote=False).replace("*", r"\*") for part in parts[::2]]
    return "`".join(parts)


GENERATED: dict[str, Callable[[], str]] = {
    "command_line": command_line,
    "config_keys": config_keys,
    "metrics": lambda: inspect.cleandoc(metrics.__doc__ or ""),
}
