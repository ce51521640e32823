"""Tables → Markdown, CSV, LaTeX, HTML and terminal text.

A cell is ``mean ± std``, then the gap to the baseline in brackets, in bold (and green where there
is colour) from +0.5 on, as in the paper; ``–`` where there is no number. Fewer trials than the
paper's five are marked. The paper's rows stand in tables of their own below ours.
"""

import base64
import csv
import html
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.aggregate import FEW_TRIALS, Cell, Gap, Row, Table
from benchmarks.paper import PaperTable, load_paper, tables_for
from benchmarks.results import Results, Run, Unusable
from detection.metrics import titles

MISSING = "–"
EPOCHS = "SOLVER.MAX_EPOCHS"  # of classification; detection counts iterations
STRONG_FROM = 0.5
FEW_MARK = "†"
FEW_NOTE = f"{FEW_MARK} fewer than {FEW_TRIALS} trials (the paper averages {FEW_TRIALS})"
GREEN = "39b54a"  # the paper's "Highlight"
MINUS = "−"


def format_cell(cell: Cell | None, n_of_row: int) -> str:
    """``26.5 ± 1.2``, ``26.5`` for one trial, and ``(n = 2)`` where some trials have no number."""
    if cell is None:
        return MISSING
    text = f"{cell.mean:.1f}" if cell.std is None else f"{cell.mean:.1f} ± {cell.std:.1f}"
    return text if cell.n == n_of_row else f"{text} (n = {cell.n})"


def format_gap(value: float) -> str:
    """``+18.4`` or ``−0.3``, rounded as printed."""
    rounded = round(value, 1) + 0.0  # no negative zero
    return f"{MINUS if rounded < 0 else '+'}{abs(rounded):.1f}"


def is_strong(value: float) -> bool:
    """Whether the gap, as printed, is at least +0.5."""
    return round(value, 1) >= STRONG_FROM


def format_evidence(gap: Gap | None) -> str:
    """``+18.4 [15.0, 21.8], p = 0.002``; the interval is a 95% one."""
    if gap is None:
        return MISSING
    if gap.low is None or gap.high is None or gap.p_value is None:
        return f"{format_gap(gap.value)} (no interval)"
    p = "p < 0.001" if gap.p_value < 0.001 else f"p = {gap.p_value:.3f}"
    low, high = (f"{end:.1f}".replace("-", MINUS) for end in (gap.low, gap.high))
    return f"{format_gap(gap.value)} [{low}, {high}], {p}"


def to_markdown(tables: Sequence[Table], results: Results) -> str:
    """A document with, per task: our rows, the gaps' evidence, the paper's rows, every run."""
    lines = ["# Transfer results", ""]
    for table in tables:
        lines += [f"## {table.task}", "", f"{_setting(table)}.", ""]
        lines += _pipe_table(_head(table), _rows(table, _markdown_gap))
        lines += [f"\n{note}" for note in _notes(table)] + [""]
        if evidence := _evidence(table):
            lines += [f"Gap to {table.baseline}, 95% interval, Welch's test:", ""]
            lines += [*_pipe_table(["", *titles(table.metrics)], evidence), ""]
        for paper in tables_for(table.task):
            lines += [f"The paper, {paper.cite}; not measured here: {paper.title}.", ""]
            head = ["pre-train", *titles(table.metrics)]
            lines += [*_pipe_table(head, _paper_rows(paper, table, _markdown_gap)), ""]
        lines += ["Every run:", "", *_pipe_table(*_runs(table)), ""]
    if results.unusable:
        lines += ["Runs without numbers:", ""]
        lines += [f"- {item.folder}: {item.reason}" for item in results.unusable] + [""]
    if any(tables_for(table.task) for table in tables):
        lines += [f"The paper: {load_paper()[0]}.", ""]
    return "\n".join(lines)


def to_csv(tables: Sequence[Table]) -> str:
    """One line per task, initialisation and metric; empty fields where there is no number."""
    names = ["task", "engine", "iterations", "init", "metric", "n", "mean", "std"]
    names += ["baseline", "gap", "gap_low", "gap_high", "p_value"]
    lines: list[list[str]] = [names]
    for table in tables:
        for row in table.rows:
            for metric in table.metrics:
                cell, gap = row.cells[metric], row.gaps[metric]
                stats = [None, None] if cell is None else [cell.mean, cell.std]
                gaps = [gap.value, gap.low, gap.high, gap.p_value] if gap else [None] * 4
                lines.append(
                    [
                        *(table.task, table.engine, str(table.iterations), row.init, metric),
                        *(str(cell.n if cell else 0), *map(_precise, stats)),
                        *(table.baseline or "", *map(_precise, gaps)),
                    ]
                )
    return _csv(lines)


def runs_to_csv(tables: Sequence[Table]) -> str:
    """One line per run with all its metrics."""
    runs = [run for table in tables for run in table.runs]
    metrics = sorted({name for run in runs for name in run.record.metrics})
    names = ["task", "engine", "init", "seed", "iterations", "seconds", "weights_sha256"]
    lines: list[list[str]] = [[*names, "config_sha256", "folder", *metrics]]
    for run in runs:
        r = run.record
        lines.append(
            [
                *(r.task, r.engine, r.init, str(r.seed), str(r.iterations), f"{r.seconds:.1f}"),
                *(r.weights_sha256 or "", r.config_sha256, str(run.folder)),
                *(_precise(r.metrics.get(name)) for name in metrics),
            ]
        )
    return _csv(lines)


def to_latex(tables: Sequence[Table]) -> str:
    """A ``table`` per task for a document that loads booktabs and xcolor."""
    lines = ["% needs \\usepackage{booktabs} and \\usepackage{xcolor}"]
    for table in tables:
        columns = len(table.metrics) + 2
        head = ["pre-train", "$n$", *map(_tex_title, titles(table.metrics))]
        lines += [
            "\\begin{table}[t]",
            "\\centering",
            f"\\begin{{tabular}}{{l{'r' * (columns - 1)}}}",
            "\\toprule",
            " & ".join(head) + " \\\\",
            "\\midrule",
        ]
        lines += [" & ".join(row) + " \\\\" for row in _rows(table, _tex_gap, escape_latex)]
        for paper in tables_for(table.task):
            cite = escape_latex(f"The paper, {paper.cite}")
            lines += ["\\midrule", f"\\multicolumn{{{columns}}}{{l}}{{\\emph{{{cite}}}}} \\\\"]
            trials = str(paper.trials or escape_latex(MISSING))
            for name, *cells in _paper_rows(paper, table, _tex_gap, escape_latex):
                lines.append(" & ".join([name, trials, *cells]) + " \\\\")
        note = f"{escape_latex(_setting(table))}, mean $\\pm$ standard deviation of $n$ trials"
        if table.baseline is not None:
            note += f"; in brackets the gap to {escape_latex(table.baseline)}"
        lines += ["\\bottomrule", "\\end{tabular}"]
        notes = "".join(f" {escape_latex(text)}." for text in _notes(table))
        lines += [f"\\caption{{{escape_latex(table.task)}: {note}.{notes}}}", "\\end{table}", ""]
    return "\n".join(lines)


def to_terminal(tables: Sequence[Table], unusable: Sequence[Unusable], colour: bool) -> str:
    """Text for a terminal; ``colour`` adds green to the bold gaps."""
    from tabulate import tabulate

    def paint(value: float) -> str:
        text = f"({format_gap(value)})"
        return f"\033[1;32m{text}\033[0m" if colour and is_strong(value) else text

    blocks = []
    for table in tables:
        body = tabulate(_rows(table, paint), headers=_head(table), disable_numparse=True)
        lines = [f"{table.task}: {_setting(table)}", "", body, ""]
        for name, *cells in _evidence(table):
            shown = zip(titles(table.metrics), cells, strict=True)
            lines += [f"{name}: " + "; ".join(f"{m} {cell}" for m, cell in shown)]
        lines += _notes(table)
        for paper in tables_for(table.task):
            head = [f"the paper, {paper.cite}", *titles(table.metrics)]
            rows = _paper_rows(paper, table, paint)
            lines += ["", tabulate(rows, headers=head, disable_numparse=True)]
        blocks.append("\n".join(lines))
    if unusable:
        blocks.append(
            "\n".join(["without numbers:", *(f"  {u.folder}: {u.reason}" for u in unusable)])
        )
    return "\n\n".join(blocks)


def to_html(tables: Sequence[Table], results: Results, figures: Sequence[Path] = ()) -> str:
    """One page that needs no other file: style and pictures are inside."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Transfer results</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>",
        "<h1>Transfer results</h1>",
    ]
    for table in tables:
        parts += [f"<h2>{html.escape(table.task)}</h2>", f"<p>{html.escape(_setting(table))}.</p>"]
        parts.append(_html_table(_head(table), _rows(table, _html_gap, html.escape)))
        parts += [f'<p class="note">{html.escape(note)}</p>' for note in _notes(table)]
        if evidence := _evidence(table):
            base = html.escape(str(table.baseline))
            parts.append(f"<h3>Gap to {base}, 95% interval, Welch's test</h3>")
            head = ["", *titles(table.metrics)]
            parts.append(_html_table(head, _escaped(evidence), kind="evidence"))
        for paper in tables_for(table.task):
            parts.append(f"<h3>The paper, {html.escape(paper.cite)}</h3>")
            parts.append(f'<p class="note">Not measured here: {html.escape(paper.title)}.</p>')
            head = ["pre-train", *titles(table.metrics)]
            rows = _paper_rows(paper, table, _html_gap, html.escape)
            parts.append(_html_table(head, rows, kind="paper"))
    for figure in figures:
        data = base64.b64encode(figure.read_bytes()).decode()
        alt = html.escape(figure.stem)
        parts.append(f'<figure><img alt="{alt}" src="data:image/png;base64,{data}"></figure>')
    for table in tables:
        head, rows = _runs(table)
        parts.append(f"<h3>Every run of {html.escape(table.task)}</h3>")
        parts.append(_html_table(head, _escaped(rows), kind="runs"))
    if results.unusable:
        items = "".join(
            f"<li><code>{html.escape(str(u.folder))}</code>: {html.escape(u.reason)}</li>"
            for u in results.unusable
        )
        parts.append(f"<h3>Runs without numbers</h3>\n<ul>{items}</ul>")
    if any(tables_for(table.task) for table in tables):
        parts.append(f'<p class="note">The paper: {html.escape(load_paper()[0])}.</p>')
    return "\n".join([*parts, "</main>\n</body>\n</html>\n"])


def escape_latex(text: str) -> str:
    """Text with LaTeX's special characters and this module's marks made printable."""
    special = {
        "\\": "\\textbackslash{}",
        "~": "\\textasciitilde{}",
        "^": "\\textasciicircum{}",
        "±": "$\\pm$",
        "†": "$\\dagger$",
        "–": "--",
        "−": "$-$",
        "→": "$\\to$",
        **{char: f"\\{char}" for char in "&%$#_{}"},
    }
    return "".join(special.get(char, char) for char in text)


def _setting(table: Table) -> str:
    config = table.runs[0].record.config
    parts = [f"{table.engine} engine"]
    if table.iterations:
        epochs = f" ({config[EPOCHS]} epochs)" if EPOCHS in config else ""
        parts.append(f"{table.iterations} iterations{epochs}")
    if "DATASETS.TEST" in config:
        parts.append(f"tested on {', '.join(config['DATASETS.TEST'])}")
    return ", ".join(parts)


def _notes(table: Table) -> list[str]:
    notes = [FEW_NOTE] if any(row.n < FEW_TRIALS for row in table.rows) else []
    for paper in tables_for(table.task):
        epochs = table.runs[0].record.config.get(EPOCHS)
        for unit, here, there in (
            ("iterations", table.iterations, paper.iterations),
            ("epochs", epochs, paper.epochs),
        ):
            if there is not None and here != there:
                notes.append(
                    f"not comparable with {paper.cite} of the paper: "
                    f"{here} {unit} here, {there} there"
                )
    return notes


def _head(table: Table) -> list[str]:
    return ["pre-train", "n", *titles(table.metrics)]


def _rows(
    table: Table, gap_text: Callable[[float], str], escape: Callable[[str], str] = str
) -> list[list[str]]:
    """Our rows: name, n, and a cell per metric with the gap as ``gap_text`` writes it."""
    rows = []
    for row in table.rows:
        mark = FEW_MARK if row.n < FEW_TRIALS else ""
        cells = [_cell(row, metric, gap_text, escape) for metric in table.metrics]
        rows.append([escape(row.init), escape(f"{row.n}{mark}"), *cells])
    return rows


def _cell(
    row: Row, metric: str, gap_text: Callable[[float], str], escape: Callable[[str], str]
) -> str:
    text, gap = escape(format_cell(row.cells[metric], row.n)), row.gaps[metric]
    return text if gap is None else f"{text} {gap_text(gap.value)}"


def _paper_rows(
    paper: PaperTable,
    table: Table,
    gap_text: Callable[[float], str],
    escape: Callable[[str], str] = str,
) -> list[list[str]]:
    """The paper's rows: name and, per metric of ``table``, the value with its printed gap."""
    rows = []
    for row in paper.rows:
        cells = []
        for metric in table.metrics:
            value, gap = paper.own(row, metric)
            text = escape(MISSING) if value is None else f"{value:.1f}"
            cells.append(text if gap is None else f"{text} {gap_text(gap)}")
        rows.append([escape(row.name), *cells])
    return rows


def _evidence(table: Table) -> list[list[str]]:
    """Per row other than the baseline: its name against the baseline's, and each gap in full."""
    return [
        [f"{row.init} {MINUS} {table.baseline}", *map(format_evidence, row.gaps.values())]
        for row in table.rows
        if any(gap is not None for gap in row.gaps.values())
    ]


def _runs(table: Table) -> tuple[list[str], list[list[str]]]:
    head = ["init", "seed", *titles(table.metrics), "iterations", "time", "weights", "folder"]
    return head, [_run(run, table.metrics) for run in table.runs]


def _run(run: Run, metrics: Sequence[str]) -> list[str]:
    record = run.record
    values = [record.metrics.get(metric) for metric in metrics]
    return [
        *(record.init, str(record.seed)),
        *(MISSING if value is None else f"{value:.1f}" for value in values),
        *(str(record.iterations), f"{record.seconds:.0f} s"),
        *((record.weights_sha256 or MISSING)[:8], str(run.folder)),
    ]


def _markdown_gap(value: float) -> str:
    return f"(**{format_gap(value)}**)" if is_strong(value) else f"({format_gap(value)})"


def _html_gap(value: float) -> str:
    kind = "gap strong" if is_strong(value) else "gap"
    return f'<span class="{kind}">({format_gap(value)})</span>'


def _tex_gap(value: float) -> str:
    sign, size = format_gap(value)[0], format_gap(value)[1:]
    sign = "$-$" if sign == MINUS else "$+$"
    if is_strong(value):
        return f"\\textcolor[HTML]{{{GREEN}}}{{({sign}\\textbf{{{size}}})}}"
    return f"({sign}{size})"


def _tex_title(title: str) -> str:
    """``AP$^{mk}_{50}$`` of ``AP50^mk``."""
    parts = re.fullmatch(r"AP(\d*)(?:\^(\w+))?", title)
    if parts is None or title == "AP":
        return escape_latex(title)
    threshold, mark = parts.groups()
    upper, lower = f"^{{{mark}}}" if mark else "", f"_{{{threshold}}}" if threshold else ""
    return f"AP${upper}{lower}$"


def _pipe_table(head: list[str], rows: list[list[str]]) -> list[str]:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


def _html_table(head: list[str], rows: list[list[str]], kind: str = "ours") -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "\n".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}">\n<thead><tr>{cells}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _escaped(rows: list[list[str]]) -> list[list[str]]:
    return [[html.escape(cell) for cell in row] for row in rows]


def _precise(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _csv(lines: list[list[str]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(lines)
    return buffer.getvalue()


_CSS = f"""
:root {{ color-scheme: light; }}
body {{ margin: 0; background: #fafafa; color: #222;
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }}
main {{ max-width: 62rem; margin: 2rem auto; padding: 1rem 2rem 2rem; background: #fff;
  border: 1px solid #e4e4e4; border-radius: 6px; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.25rem; margin-top: 2rem; }}
h3 {{ font-size: 1rem; margin: 1.5rem 0 .3rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }}
th, td {{ padding: .3rem .9rem; text-align: right; white-space: nowrap; }}
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
figure {{ margin: 1.5rem 0; }} img {{ max-width: 100%; height: auto; }}
"""
