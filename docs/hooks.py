"""MkDocs hooks: the parts of the site that are generated from the code when it is built.

A comment `<!-- generated: NAME -->` in a page is replaced by what `GENERATED[NAME]` returns, each
subpackage gets a page of its API, each bundle of results/ its report, and CHANGELOG.md and
CONTRIBUTING.md become pages.
"""

import argparse
import html
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from markupsafe import Markup

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # mkdocs imports this file by its path

from benchmarks.__main__ import COMMANDS  # noqa: E402
from benchmarks.report.bundle import read_all  # noqa: E402
from benchmarks.report.export import RENDERERS, TEMPLATES  # noqa: E402
from benchmarks.report.report import Report, Shared  # noqa: E402
from benchmarks.report.style import PAGE_NAME  # noqa: E402
from benchmarks.report.table import evidence, format_cell  # noqa: E402
from detection.config.keys import DETECTRON2S, FAMILIES, KEYS, OURS  # noqa: E402
from detection.evaluation import metrics  # noqa: E402
from moco.classification import config as classification  # noqa: E402
from moco.common.cfgnode import flatten  # noqa: E402
from moco.common.command import NAME  # noqa: E402
from moco.common.keys import Key, Keys, defaults_of  # noqa: E402
from moco.common.shipped import RESULTS  # noqa: E402
from moco.engine import keys as training  # noqa: E402
from moco.finetune import FINETUNE  # noqa: E402
from moco.linear import LINEAR  # noqa: E402
from moco.pretraining import config as pretraining  # noqa: E402

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PACKAGES = ("moco", "convert", "detection", "benchmarks", "moco_transfer")
NO_API = ("benchmarks/speed",)  # a command alone
TOP_LEVEL = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
_MARK = re.compile(r"<!-- generated: (\w+) -->")
# In a text: a flag, a dotted key, a path, a pattern.
_CODE = re.compile(r"(?<![\w$])(--[a-z][\w-]*|[A-Z]+\.[A-Z_]*[A-Z]|[\w.-]+/[^ ,;:)]*[\w*>/])")
ABOUT = {
    "Detection: Detectron2's keys": "Names, defaults and meaning are [Detectron2's](https://"
    "detectron2.readthedocs.io/en/latest/modules/config.html#yaml-config-references).",
    "Detection: fixed on the embedded engine": "The embedded engine takes these of Detectron2's "
    "keys at these values only, and refuses any other by name.",
    "Detection: fixed on both engines": "Detectron2's keys of what this project's loop does not "
    "have; another value is refused by name.",
}
_LONG_CODE = re.compile(r"(?<=<code>)[^<\n]{16,}(?=</code>)")


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """List the API's pages in the navigation, below the entry of reference/api/index.md."""
    [reference] = [entry["Reference"] for entry in config.nav or () if "Reference" in entry]
    pages = [{folder.replace("/", "."): page} for folder, page in api_pages().items()]
    reference[-1] = {"Python API": ["reference/api/index.md", *pages]}
    return config


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the pages that are not files below docs/."""
    from mkdocs.structure.files import File

    pages = {page: api_page(folder) for folder, page in api_pages().items()}
    for page, name in TOP_LEVEL.items():
        pages[page] = (ROOT / name).read_text().replace("](docs/", "](")
    for shared, report in _reports().values():
        for name, content in RENDERERS.get("html")(report).items():
            pages[f"results/{shared.name}/{name}"] = content
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    for name in _reports():
        path = RESULTS / f"{name}.zip"
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what is generated."""
    return _MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Let names in tables break behind `/` and `_`, instead of anywhere."""
    return _LONG_CODE.sub(lambda code: re.sub(r"(?<=[/_])", "<wbr>", code[0]), content)


def api_pages() -> dict[str, str]:
    """Return each package's page by folder: `{"moco/data": "reference/api/moco.data.md"}`."""
    folders = [
        path.parent.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("__init__.py"))
    ]
    return {r: f"reference/api/{r.replace('/', '.')}.md" for r in folders if r not in NO_API}


def api_page(folder: str) -> str:
    """Return a package's docstring and its modules in mkdocstrings' notation."""
    names = [path.stem for path in sorted((ROOT / folder).glob("*.py"))]
    name = folder.replace("/", ".")
    modules = [f"::: {name}.{module}" for module in names if not module.startswith("_")]
    package = f"::: {name}\n    options: {{show_root_heading: false, show_root_toc_entry: false}}"
    # In the search, what the guides and the other references say comes first.
    return "\n\n".join(["---\nsearch: {boost: 0.5}\n---", f"# {name}", package, *modules])


def command_line() -> str:
    """Return all commands of `moco-transfer` with the arguments of their parsers."""
    lines: list[str] = []
    for name, (module, _) in COMMANDS.items():
        with mock.patch.object(sys, "argv", [NAME]):  # as the command names itself
            parser = importlib.import_module(module).build_parser()
        lines += describe_parser(name, parser)
    return "\n".join(lines)


def describe_parser(name: str, parser: argparse.ArgumentParser, level: int = 2) -> Iterator[str]:
    """Return a parser in Markdown: its description, its arguments, then its subcommands."""
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
    """Return a description or epilog, with its own lines if the parser keeps them."""
    if issubclass(parser.formatter_class, argparse.RawDescriptionHelpFormatter):
        return f"```text\n{inspect.cleandoc(text or '')}\n```"
    return _prose(text or "")


def _default_of(action: argparse.Action, said: str) -> str:
    """Return a default that the help text does not name."""
    default = action.default
    if not isinstance(default, str | int) or default in (False, "") or str(default) in said:
        return ""
    return "" if default == argparse.SUPPRESS else f" (default: {default})"


def config_keys() -> str:
    """Return all keys of a training: type, default and description."""
    pretrain = flatten(pretraining.default_cfg())
    linear, finetune = (
        flatten(classification.default_cfg(protocol.defaults)) for protocol in (LINEAR, FINETUNE)
    )
    of_families = {name for family in FAMILIES for name in family.keys}
    on_embedded = {name for name, key in DETECTRON2S.items() if len(key.embedded) == 1}
    on_both = {n for n, key in DETECTRON2S.items() if key.range and len(key.range.choices) == 1}
    fixed = on_embedded | on_both
    common, detection = training.COMMON.keys(), {"": defaults_of(KEYS)}
    classified = {"linear": linear, "finetune": finetune}
    views = {"v1": pretrain, "v2": flatten(pretraining.default_cfg("v2"))}
    every, own = {"pretrain": pretrain, **classified}, training.CLASSIFICATION
    sections: dict[str, tuple[Keys, Collection[str], dict[str, dict[str, Any]]]] = {
        "Every training of moco/": (training.COMMON, common, every),
        "Pre-training": (training.PRETRAIN, training.PRETRAIN.keys() - common, views),
        "Linear classification and fine-tuning": (own, own.keys() - common, classified),
        "Detection: this project's keys": (OURS, OURS.keys() - of_families, detection),
        "Detection: the backbone families' keys": (OURS, of_families, detection),
        "Detection: Detectron2's keys": (DETECTRON2S, DETECTRON2S.keys() - fixed, detection),
        "Detection: fixed on the embedded engine": (DETECTRON2S, on_embedded, detection),
        "Detection: fixed on both engines": (DETECTRON2S, on_both, detection),
    }
    lines: list[str] = []
    anchors: set[str] = set()
    for title, (table, names, defaults) in sections.items():
        lines += [f"\n## {title}\n\n{ABOUT.get(title, '')}\n"]
        group = ""
        for name in (name for name in table if name in names):
            if group != (group := name.rpartition(".")[0].partition(".")[0]):
                lines += [f"\n### {group or 'Others'}\n"]
            shown = f"{_anchor(name, anchors)}{_default(name, defaults)}"
            said = "" if name in fixed else _said(table[name])
            lines += [f"- {shown}\n\n    {_prose(said)}\n"]
    return "\n".join(lines)


@cache
def _reports() -> dict[str, tuple[Shared, Report]]:
    return {each.name: (each, Report(each.tables, each.results)) for each in read_all()}


def results() -> str:
    """Return the rows of all bundles as one sortable table, whose numbers link their runs.

    Bundles with a gap that is shown come first, those with the largest gap at the top.
    """
    head = ("tested on", "pre-train", "n", "result", "gap to the baseline", "computed with")
    names = Markup("").join(map(Markup("<th>{}</th>").format, head))
    body = []
    for shared, report in sorted(_reports().values(), key=_order):
        page = f"results/{shared.name}/{PAGE_NAME}"
        for section in report.sections:
            table, metric = section.table, section.table.metrics[0]
            for row in table.rows:
                cell, run = row.cells[metric], row.runs[0]
                number = f"{section.titles[0]} {format_cell(cell, row.n)}"
                weights = shared.about.weights if run.record.weights_sha256 else "none"
                gap = evidence(row.gaps[metric])
                tested = _link(f"{page}#{section.anchor}", ", ".join(table.tested_on))
                with_ = Markup("{}; {}; {}; weights: {}").format(
                    _link(f"results/{shared.name}.zip", f"{shared.name}.zip"),
                    f"{table.engine}, {run.hardware}",
                    shared.about.measured_by,
                    _link(weights, "public") if "://" in weights else weights,
                )
                texts: list[tuple[object, float | None]] = [
                    (Markup("{}<br><small>{}</small>").format(tested, table.task), None),
                    (row.init, None),
                    (row.n, row.n),
                    (_link(f"{page}#{section.row_anchor(row)}", number), cell and cell.mean),
                    (gap.text, gap.value),
                    (Markup("<small>{}</small>").format(with_), None),
                ]
                body.append(Markup("<tr>{}</tr>").format(Markup("").join(_cell(*t) for t in texts)))
    script = (TEMPLATES / "page.js").read_text()
    return Markup(
        '<div class="results">\n<table>\n<thead><tr>{}</tr></thead>\n<tbody>\n{}\n</tbody>\n'
        "</table>\n<script>\n{}</script>\n</div>"
    ).format(names, Markup("\n").join(body), Markup(script))


def _order(found: tuple[Shared, Report]) -> tuple[float, str]:
    """Return what bundles are sorted by: their largest shown gap, then their name."""
    shared, report = found
    gaps = [
        abs(gap.value)
        for section in report.sections
        for row in section.table.rows
        for metric, gap in row.gaps.items()
        if gap and (row.init, metric) in section.shown
    ]
    return -max(gaps, default=0.0), shared.name


def status() -> str:
    """Return the section of README.md on what has been run and what has not."""
    text = (ROOT / "README.md").read_text().partition("## Status and limits\n")[2]
    return text.partition("\n## ")[0].replace("](docs/", "](")


def _link(address: str, text: str) -> Markup:
    return Markup('<a href="{}">{}</a>').format(address, text)


def _cell(text: object, value: float | None) -> Markup:
    data = "" if value is None else Markup(' data-value="{}"').format(value)
    return Markup("<td{}>{}</td>").format(data, text)


def _said(key: Key) -> str:
    """Return a key's description, its range, and the values that the embedded engine takes."""
    said = key.doc
    for label, values in (
        ("On the embedded engine", key.embedded),
        ("Choices", key.range.choices if key.range else ()),
    ):
        if values:
            said += f" {label}: {', '.join(f'`{_value(value)}`' for value in values)}."
    if key.range and not key.range.choices:
        said += f" Range: {key.range.expected}."
    return said


def _anchor(name: str, anchors: set[str]) -> str:
    """Return the key, with an anchor of its name unless there is one already."""
    new = name not in anchors
    anchors.add(name)
    return f'<a id="{name}"></a>`{name}`' if new else f"`{name}`"


def _default(name: str, variants: Mapping[str, Mapping[str, Any]]) -> str:
    """Format ` *type* = default`, or the default of each variant where they differ."""
    values = {variant: _value(cfg[name]) for variant, cfg in variants.items() if name in cfg}
    value = next(cfg[name] for cfg in variants.values() if name in cfg)
    kind = "optional" if value is None else type(value).__name__
    if len(set(values.values())) == 1:
        return f" *{kind}* = `{next(iter(values.values()))}`"
    return f" *{kind}* = " + ", ".join(f"`{text}` ({variant})" for variant, text in values.items())


def _value(value: Any) -> str:
    """Format a default as in YAML, floats with six digits."""
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    if isinstance(value, list | tuple):
        inside = ", ".join(map(_value, value)) + ("," if len(value) == 1 else "")
        return f"[{inside.rstrip(',')}]" if isinstance(value, list) else f"({inside})"
    return repr(value)


def _prose(text: str) -> str:
    """Format a description as one line of Markdown, with keys, flags and paths as code."""
    parts = " ".join(text.split()).split("`")  # every other part is code already
    parts[::2] = [_CODE.sub(r"`\1`", part) for part in parts[::2]]
    parts = "`".join(parts).split("`")
    parts[::2] = [html.escape(part, quote=False).replace("*", r"\*") for part in parts[::2]]
    return "`".join(parts)


GENERATED: dict[str, Callable[[], str]] = {
    "command_line": command_line,
    "config_keys": config_keys,
    "results": results,
    "status": status,
    "metrics": lambda: inspect.cleandoc(metrics.__doc__ or ""),
}
