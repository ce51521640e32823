"""Tables and runs → one HTML page that needs no other file: style and images are inside.

Per task: our rows, the gaps' evidence, the paper's rows, figures, sample predictions, and what
could not be drawn and why. Every number leads to the runs behind it, further down.
"""

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import escape, plots
from benchmarks.report.aggregate import Row, Table, stems
from benchmarks.report.paper import load_paper
from benchmarks.report.records import Results, Run, precision_recall, sample_images
from benchmarks.report.tables import (
    GREEN,
    MISSING,
    anchor,
    evidence,
    evidence_title,
    facts,
    format_gap,
    head,
    heading,
    is_strong,
    notes,
    paper_rows,
    papers,
    rows,
    run_rows,
    seeds,
    setting,
)
from detection.evaluation.metrics import titles
from moco.common.errors import UserError
from moco.data.decode import decode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES = 4  # images per initialization
SAMPLE_PX = 320  # width in the page, twice what it is shown at on most screens


def to_html(
    tables: Sequence[Table], results: Results, drawn: Mapping[str, bytes] | None = None
) -> str:
    """The page.

    Args:
        drawn: PNG files there are already, by the names that make_table gives them: `loss-` and
            `ap-` with the table's name of `stems`.

    Raises:
        UserError: a run's metrics.json that is none.
    """
    names = stems(tables)
    heads = [heading(table, tables) for table in tables]
    links = [_link(f"#{name}", text) for name, text in zip(map(_id, names), heads, strict=True)]
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Transfer results</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>",
        "<h1>Transfer results</h1>",
    ]
    if len(tables) > 1:
        parts.append("<nav>" + " ".join(links) + ' <a href="#runs">every run</a></nav>')
    if unusable := _unusable(results):
        parts.append(unusable)
    for table, name, text in zip(tables, names, heads, strict=True):
        parts += [f'<section id="{_id(name)}">', f"<h2>{escape.html(text)}</h2>"]
        parts += [*_numbers(table, name), *_figures(table, name, results, drawn or {})]
        parts.append("</section>")
    parts += _schedules(tables)
    parts.append('<h2 id="runs">Every run</h2>')
    for table, name, text in zip(tables, names, heads, strict=True):
        parts += [f'<h3 id="{anchor(name)}">{escape.html(text)}</h3>', *_runs(table, name)]
    if any(papers(table) for table in tables):
        parts.append(f'<p class="note">The paper: {escape.html(load_paper()[0])}.</p>')
    return "\n".join([*parts, "</main>\n</body>\n</html>\n"])


def _numbers(table: Table, name: str) -> list[str]:
    """Setting, our rows with their links, notes, evidence, the paper's rows."""
    parts = [f"<p>{escape.html(setting(table))}.</p>"]
    body = []
    for row, cells in zip(table.rows, rows(table, _gap, escape.html), strict=True):
        goal = f"#{_row_id(name, row)}"
        body.append([cells[0], *(f'<a href="{goal}">{cell}</a>' for cell in cells[1:])])
    parts += ['<div class="figures">', "<div><h3>Measured here</h3>", _table(head(table), body)]
    parts += [f'<p class="note">{escape.html(note)}</p>' for note in notes(table)] + ["</div>"]
    for paper in papers(table):
        theirs = paper_rows(paper, table, _gap, escape.html)
        parts += [
            f"<div><h3>The paper, {escape.html(paper.cite)}</h3>",
            _table(["pre-train", *titles(table.metrics)], theirs, kind="paper"),
            f'<p class="note">Not measured here: {escape.html(paper.title)}.</p></div>',
        ]
    parts.append("</div>")
    if found := evidence(table, escape.html):
        parts.append(f"<h3>{escape.html(evidence_title(table))}</h3>")
        parts.append(_table(["", *titles(table.metrics)], found, kind="evidence"))
    return parts


def _figures(table: Table, name: str, results: Results, drawn: Mapping[str, bytes]) -> list[str]:
    """Everything that can be drawn of a table, then what cannot, with the reason."""
    metric = titles(table.metrics)[0]
    parts, missing = [], []

    def add(title: str, figure: "Figure | bytes | None", reason: str) -> None:
        if figure is None:
            missing.append(f"{title}: {reason}")
        else:
            png = figure if isinstance(figure, bytes) else plots.to_png(figure)
            parts.append(_figure(title, png))

    losses = None
    if any(plots.read_losses(table.runs)):
        losses = drawn.get(f"loss-{name}") or plots.loss_figure(*plots.losses(table, results))
    add("Loss", losses, "the folders hold no metrics.json with one")
    add(
        f"{metric} during fine-tuning",
        plots.ap_curve_figure(table),
        "the runs were evaluated at their end alone (TEST.EVAL_PERIOD)",
    )
    bars = drawn.get(f"ap-{name}") or plots.ap_figure(table)
    add(f"{metric} and every seed", bars, "")
    gaps = plots.gap_figure(table)
    add(
        f"Gap to the baseline, 95% interval over {seeds(table)}",
        gaps,
        "no baseline, or nothing to compare with it",
    )
    add("By class", plots.class_figure(table), "the records hold no number of a class")
    curves, reasons = _precision(table)
    figure = plots.precision_figure(curves) if curves else None
    add("Precision and recall of boxes, IoU 0.5, first seed", figure, "; ".join(reasons))
    if curves and reasons:
        missing.append(f"Precision and recall of some: {'; '.join(reasons)}")
    if samples := _samples(table):
        parts.append(samples)
    else:
        missing.append("Sample predictions: no run has any (train_net --eval-only --visualize N)")
    result = ['<div class="figures">', *parts, "</div>"]
    if missing:
        items = "".join(f"<li>{escape.html(text)}</li>" for text in missing)
        result.append(f'<div class="note">Not drawn:<ul>{items}</ul></div>')
    return result


def _precision(table: Table) -> tuple[dict[str, plots.Curve], list[str]]:
    curves: dict[str, plots.Curve] = {}
    reasons: dict[str, None] = {}
    if not table.metrics[0].startswith(("bbox/", "segm/")):
        return {}, ["not of this kind of task"]
    for row in table.rows:
        try:
            curves[row.init] = precision_recall(row.runs[0])
        except (UserError, ImportError) as error:
            reasons[str(error).split(";")[0]] = None
    return curves, list(reasons)


def _schedules(tables: Sequence[Table]) -> list[str]:
    """AP against the length of the fine-tuning, per family of tasks that has several."""
    families: dict[Any, list[Table]] = {}
    for table in tables:
        families.setdefault(plots.family(table), []).append(table)
    parts = []
    for (task, data, engine), members in families.items():
        figure = plots.schedule_figure(members)
        if figure is not None:
            title = f"{task}, {', '.join((*data, engine))}: by length of the fine-tuning"
            parts.append(_figure(title, plots.to_png(figure)))
    return ['<div class="figures">', *parts, "</div>"] if parts else []


def _samples(table: Table) -> str:
    """The same images with the predictions of each initialization, one row each."""
    by_row = {row.init: _first(row.runs, sample_images) for row in table.rows}
    counts: dict[str, int] = {}
    for images in by_row.values():
        for name in images:
            counts[name] = counts.get(name, 0) + 1
    names = sorted(counts, key=lambda name: (-counts[name], name))[:SAMPLES]
    lines = []
    for init, images in by_row.items():
        cells = [
            f"<td>{_image(name, _small(images[name]), 'jpeg')}</td>"
            if name in images
            else f"<td>{MISSING}</td>"
            for name in names
        ]
        if images:
            lines.append(f"<tr><th>{escape.html(init)}</th>{''.join(cells)}</tr>")
    if not lines:
        return ""
    title = "Sample predictions, first seed that has them"
    return (
        f'<figure class="wide"><figcaption>{title}</figcaption><div class="scroll">'
        f'<table class="samples"><tbody>{"".join(lines)}</tbody></table></div></figure>'
    )


def _first(runs: Sequence[Run], found: Callable[[Run], dict[str, Path]]) -> dict[str, Path]:
    return next((files for run in runs if (files := found(run))), {})


def _small(path: Path) -> bytes:
    small, buffer = decode(path), io.BytesIO()
    small.thumbnail((SAMPLE_PX, SAMPLE_PX))
    small.save(buffer, format="JPEG", quality=80)
    return buffer.getvalue()


def _runs(table: Table, name: str) -> list[str]:
    """Per row what its runs were made of, then the protocol that all of them share."""
    parts = []
    for row in table.rows:
        items = "".join(
            f"<dt>{escape.html(key)}</dt><dd>{escape.html(text)}</dd>" for key, text in facts(row)
        )
        names, lines = run_rows(row, table.metrics)
        parts += [
            f'<div class="row" id="{_row_id(name, row)}"><h4>{escape.html(row.init)}</h4>',
            f"<dl>{items}</dl>",
            _table(names, _escaped(lines), kind="runs"),
            "</div>",
        ]
    first = table.runs[0].record
    text = "\n".join(escape.html(f"{key}: {first.config[key]}") for key in sorted(first.config))
    summary = f"Resolved configuration of {table.rows[0].init}, seed {first.seed}"
    return [
        *parts,
        f"<details><summary>{escape.html(summary)} ({len(first.config)} keys)</summary>"
        f"<pre>{text}</pre></details>",
    ]


def _unusable(results: Results) -> str:
    if not results.unusable:
        return ""
    items = "".join(
        f"<li><code>{escape.html(str(item.folder))}</code>: {escape.html(item.reason)}</li>"
        for item in results.unusable
    )
    return f"<h3>Runs without numbers</h3>\n<ul>{items}</ul>"


def _id(stem: str) -> str:
    return anchor(stem).replace("runs-", "table-", 1)


def _row_id(stem: str, row: Row) -> str:
    return f"{anchor(stem)}--{anchor(row.init).removeprefix('runs-')}"


def _link(goal: str, text: str) -> str:
    return f'<a href="{goal}">{escape.html(text)}</a>'


def _figure(title: str, png: bytes) -> str:
    caption = f"<figcaption>{escape.html(title)}</figcaption>"
    return f"<figure>{caption}{_image(title, png, 'png')}</figure>"


def _image(name: str, content: bytes, kind: str) -> str:
    data = base64.b64encode(content).decode()
    return f'<img alt="{escape.html(name)}" src="data:image/{kind};base64,{data}">'


def _gap(value: float) -> str:
    kind = "gap strong" if is_strong(value) else "gap"
    return f'<span class="{kind}">({format_gap(value)})</span>'


def _table(names: list[str], lines: list[list[str]], kind: str = "ours") -> str:
    cells = "".join(f"<th>{_head(name)}</th>" for name in names)
    body = "\n".join("<tr>" + "".join(f"<td>{c}</td>" for c in line) + "</tr>" for line in lines)
    return (
        f'<div class="scroll"><table class="{kind}">\n<thead><tr>{cells}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _head(name: str) -> str:
    """`AP50^bb` as the paper sets it."""
    parts = re.fullmatch(r"AP(\d*)(?:\^(\w+))?", name)
    if parts is None:
        return escape.html(name)
    threshold, mark = parts.groups()
    upper = f"<sup>{mark}</sup>" if mark else ""
    return f"AP{upper}<sub>{threshold}</sub>" if threshold else f"AP{upper}"


def _escaped(lines: list[list[str]]) -> list[list[str]]:
    return [[escape.html(cell) for cell in line] for line in lines]


_CSS = f"""
:root {{ color-scheme: light; }}
body {{ margin: 0; background: #fafafa; color: #222;
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }}
main {{ max-width: 80rem; margin: 2rem auto; padding: 1rem 2rem 2rem; background: #fff;
  border: 1px solid #e4e4e4; border-radius: 6px; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.25rem; margin-top: 2rem; }}
h3 {{ font-size: 1rem; margin: 1.5rem 0 .3rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }}
th, td {{ padding: .3rem .6rem; text-align: right; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; padding-left: .2rem; }}
thead th {{ border-top: 2px solid #222; border-bottom: 1px solid #222; font-weight: 600; }}
tbody tr:last-child td {{ border-bottom: 2px solid #222; }}
tbody tr:hover {{ background: #f3f7f3; }}
table.paper {{ color: #555; }} table.evidence {{ font-size: .88rem; }}
table.runs {{ font-size: .82rem; color: #444; }}
table.runs th:last-child {{ text-align: left; }}
table.runs td:last-child {{ text-align: left; font-family: ui-monospace, monospace; }}
.gap {{ color: #777; font-size: .88em; }}
.gap.strong {{ color: #{GREEN}; font-weight: 700; }}
.note {{ color: #666; font-size: .88rem; margin: .2rem 0; }}
nav {{ display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .88rem; }}
a {{ color: inherit; text-decoration: none; }}
nav a {{ color: #0072b2; }} a:hover {{ text-decoration: underline; }}
.figures {{ display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: flex-start; }}
sup, sub {{ font-size: .7em; line-height: 0; }} .figures > div {{ max-width: 100%; }}
.figures > div > .note {{ max-width: 34rem; }}
figure {{ margin: 1rem 0 0; max-width: 100%; }} figure.wide {{ width: 100%; }}
figcaption {{ font-weight: 600; font-size: .88rem; }}
img {{ max-width: 100%; height: auto; max-height: 40rem; }}
.figures figure > img {{ zoom: .62; }}
table.samples {{ border: 0; }} table.samples td, table.samples th {{ padding: .2rem; border: 0;
  text-align: left; }} table.samples tr:last-child td {{ border: 0; }}
table.samples img {{ width: 12rem; display: block; }}
.row {{ border-left: 3px solid #e4e4e4; padding-left: 1rem; margin: 1rem 0; }}
.row:target {{ border-color: #{GREEN}; background: #f6fbf6; }}
h4 {{ margin: 0; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .3rem 0;
  font-size: .82rem; color: #444; }}
dt {{ color: #777; }} dd {{ margin: 0; overflow-wrap: anywhere; }}
pre {{ font-size: .78rem; overflow-x: auto; }} summary {{ font-size: .88rem; cursor: pointer; }}
@media print {{ body {{ background: #fff; }} main {{ border: 0; }} }}
"""
