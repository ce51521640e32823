"""Tables → Markdown, CSV, LaTeX and terminal text (HTML: report_html.py).

A cell is `mean ± std`, then the gap to the baseline in brackets, in bold (and green where there
is color) from +0.5 on, as in the paper; `–` where there is no number. Printed gaps are the
differences of the printed means. Fewer trials than the paper averages are marked. The paper's rows
are in tables of their own below ours; in LaTeX, where the tables are arranged as the paper's, below
a rule.

What differs from one making of the same runs to the next, or from machine to machine (folders,
time, hardware), stands in `runs_to_markdown` and `runs_to_csv` alone.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.report.aggregate import RANDOM, Cell, Gap, Row, Table, stems
from benchmarks.report.escape import csv_text, latex, markdown, terminal
from benchmarks.report.paper import OWN, PaperTable, load_paper, tables_for
from benchmarks.report.records import Results, Run, Unusable
from detection.evaluation.metrics import titles

MISSING = "–"
EPOCHS = "SOLVER.MAX_EPOCHS"  # of classification; detection counts iterations
STRONG_FROM = 0.5
FEW_MARK = "†"
GREEN = "39b54a"  # the paper's "Highlight"
MINUS = "−"


def format_cell(cell: Cell | None, n_of_row: int) -> str:
    """`26.5 ± 1.2`, `26.5` for one trial, and `(n = 2)` where some trials have no number."""
    if cell is None:
        return MISSING
    text = f"{cell.mean:.1f}" if cell.std is None else f"{cell.mean:.1f} ± {cell.std:.1f}"
    return text if cell.n == n_of_row else f"{text} (n = {cell.n})"


def format_gap(value: float) -> str:
    """`+18.4` or `−0.3`, rounded as printed."""
    rounded = round(value, 1) + 0.0  # no negative zero
    return f"{MINUS if rounded < 0 else '+'}{abs(rounded):.1f}"


def is_strong(value: float) -> bool:
    """Whether the gap, as printed, is at least +0.5."""
    return round(value, 1) >= STRONG_FROM


def format_evidence(gap: Gap | None) -> str:
    """`+18.4 [15.0, 21.8], p = 0.002`; the interval is a 95% one."""
    if gap is None:
        return MISSING
    if gap.low is None or gap.high is None or gap.p_value is None:
        return f"{format_gap(gap.printed)} (no interval)"
    p = "p < 0.001" if gap.p_value < 0.001 else f"p = {gap.p_value:.3f}"
    low, high = (f"{end:.1f}".replace("-", MINUS) for end in (gap.low, gap.high))
    return f"{format_gap(gap.printed)} [{low}, {high}], {p}"


def to_markdown(tables: Sequence[Table], results: Results, runs_name: str = "") -> str:
    """A document with, per task: our rows, the gaps' evidence, the paper's rows.

    Args:
        runs_name: of the file with `runs_to_markdown`, to lead there; empty for none.
    """
    lines = ["# Transfer results", ""]
    for table, stem in zip(tables, stems(tables), strict=True):
        lines += [f"## {markdown(heading(table, tables))}", "", f"{markdown(setting(table))}.", ""]
        lines += _pipe_table(head(table), rows(table, _markdown_gap, markdown))
        lines += [f"\n{markdown(note)}" for note in notes(table)] + [""]
        if runs_name:
            lines += [f"[The runs behind it]({runs_name}#{anchor(stem)})", ""]
        if found := evidence(table, markdown):
            lines += [f"{markdown(evidence_title(table))}:", ""]
            lines += [*_pipe_table(["", *titles(table.metrics)], found), ""]
        for paper in papers(table):
            title = markdown(paper.title)
            lines += [f"The paper, {paper.cite}; not measured here: {title}.", ""]
            names = ["pre-train", *titles(table.metrics)]
            lines += [*_pipe_table(names, paper_rows(paper, table, _markdown_gap, markdown)), ""]
    lines += _markdown_unusable(results)
    if any(papers(table) for table in tables):
        lines += [f"The paper: {load_paper()[0]}.", ""]
    return "\n".join(lines)


def runs_to_markdown(tables: Sequence[Table], results: Results) -> str:
    """What every number was made of: per table and row its runs, weights, versions, hardware."""
    lines = ["# Runs", ""]
    for table, stem in zip(tables, stems(tables), strict=True):
        lines += [f'<a id="{anchor(stem)}"></a>', "", f"## {markdown(heading(table, tables))}", ""]
        for row in table.rows:
            lines += [f"### {markdown(row.init)}", ""]
            lines += [f"- {name}: {markdown(text)}" for name, text in facts(row)]
            names, cells = run_rows(row, table.metrics)
            lines += ["", *_pipe_table(names, [[*map(markdown, line)] for line in cells]), ""]
    return "\n".join([*lines, *_markdown_unusable(results)])


def to_csv(tables: Sequence[Table]) -> str:
    """One line per task, initialization and metric; empty fields where there is no number."""
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
    return csv_text(lines)


def runs_to_csv(tables: Sequence[Table]) -> str:
    """One line per run: all its metrics, and what it was made of."""
    runs = [run for table in tables for run in table.runs]
    metrics = sorted({name for run in runs for name in run.record.metrics})
    names = ["task", "engine", "init", "seed", "iterations", "seconds", "weights_sha256"]
    names += ["config_sha256", "folder", *metrics, "tested_on", "weights_source", "label"]
    lines: list[list[str]] = [[*names, "versions", "hardware", "finished", "notes"]]
    for run in runs:
        r = run.record
        lines.append(
            [
                *(r.task, r.engine, r.init, str(r.seed), str(r.iterations), f"{r.seconds:.1f}"),
                *(r.weights_sha256 or "", r.config_sha256, str(run.folder)),
                *(_precise(r.metrics.get(name)) for name in metrics),
                " ".join(r.config.get("DATASETS.TEST") or ()),
                *(r.weights_source or "", run.label, run.versions, run.hardware, run.finished),
                "; ".join(r.notes),
            ]
        )
    return csv_text(lines)


def paper_to_csv(tables: Sequence[Table]) -> str:
    """The paper's numbers of these tasks, one line per printed number, each once."""
    lines: list[list[str]] = [
        ["table", "part", "label", "pre-train", "column", "metric", "method", "value", "gap"]
    ]
    for paper in {paper.cite: paper for table in tables for paper in papers(table)}.values():
        for row in paper.rows:
            for i, value in enumerate(row.values):
                if value is not None:
                    lines.append(
                        [
                            *(str(paper.number or ""), paper.part or "", paper.label, row.name),
                            *(paper.columns[i], paper.metrics[i] or "", paper.methods[i]),
                            *(_precise(value), _precise(row.gaps[i])),
                        ]
                    )
    return csv_text(lines)


@dataclass(frozen=True)
class Panel:
    """One (sub-)table of the paper and what was measured here for it; None: not in the paper."""

    paper: PaperTable | None
    ours: tuple[Table, ...]


def arrange(tables: Sequence[Table]) -> list[tuple[Panel, ...]]:
    """Tables as the paper has them: in its order, the parts of one number together.

    A task that several of the paper's tables are about stands in each; one that none is about
    stands alone, at the end.
    """
    floats: dict[str, list[Panel]] = {}
    for paper in load_paper()[1]:
        if ours := tuple(table for table in tables if paper in papers(table)):
            name = paper.cite if paper.number is None else str(paper.number)
            floats.setdefault(name, []).append(Panel(paper, ours))
    alone = [(Panel(None, (table,)),) for table in tables if not papers(table)]
    return [*map(tuple, floats.values()), *alone]


def to_latex(tables: Sequence[Table]) -> str:
    """A document that compiles, tables arranged as the paper's: its rows below ours."""
    lines = [
        "% A document of its own; to take a table over, load these packages:",
        "\\documentclass{article}",
        "\\usepackage[margin=2cm]{geometry}",
        "\\usepackage{booktabs}",
        "\\usepackage{graphicx}",
        "\\usepackage{subcaption}",
        "\\usepackage{xcolor}",
        "\\setlength{\\tabcolsep}{4pt}",
        "\\begin{document}",
        "",
    ]
    for panels in arrange(tables):
        lines += ["\\begin{table}[ht]", "\\centering"]
        for i, panel in enumerate(panels):
            body = _tex_tabular(panel)
            if len(panels) > 1:
                name = panel.paper.title if panel.paper else ""
                beside = _tex_beside(panels)
                body = [
                    f"\\begin{{subtable}}[t]{{{0.49 if beside else 1.0}\\linewidth}}",
                    "\\centering",
                    *body,
                    f"\\caption{{{latex(name)}}}",
                    "\\end{subtable}"
                    + ("\\hfill" if beside and i % 2 == 0 else "\n\\par\\medskip"),
                ]
            lines += body
        lines += [f"\\caption{{{_tex_caption(panels)}}}", "\\end{table}", ""]
    return "\n".join([*lines, "\\end{document}", ""])


def to_terminal(tables: Sequence[Table], unusable: Sequence[Unusable], color: bool) -> str:
    """Text for a terminal; `color` adds green to the bold gaps."""
    from tabulate import tabulate

    def paint(value: float) -> str:
        text = f"({format_gap(value)})"
        return f"\033[1;32m{text}\033[0m" if color and is_strong(value) else text

    blocks = []
    for table in tables:
        body = tabulate(rows(table, paint, terminal), headers=head(table), disable_numparse=True)
        lines = [terminal(f"{table.task}: {setting(table)}"), "", body, ""]
        for name, *cells in evidence(table, terminal):
            shown = zip(titles(table.metrics), cells, strict=True)
            lines += [f"{name}: " + "; ".join(f"{m} {cell}" for m, cell in shown)]
        lines += map(terminal, notes(table))
        for paper in papers(table):
            names = [f"the paper, {paper.cite}", *titles(table.metrics)]
            theirs = paper_rows(paper, table, paint, terminal)
            lines += ["", tabulate(theirs, headers=names, disable_numparse=True)]
        blocks.append("\n".join(lines))
    if unusable:
        lines = [f"  {terminal(f'{item.folder}: {item.reason}')}" for item in unusable]
        blocks.append("\n".join(["without numbers:", *lines]))
    return "\n\n".join(blocks)


def heading(table: Table, tables: Sequence[Table]) -> str:
    """The task, with its dataset and engine where another table has the same task."""
    same = [other for other in tables if other.task == table.task]
    text = table.task
    if len({other.tested_on for other in same}) > 1:
        text += f" on {', '.join(table.tested_on)}"
    if len({other.engine for other in same}) > 1:
        text += f", {table.engine} engine"
    return text


def anchor(stem: str) -> str:
    """Of a table's runs, within a document; each name has its own, whatever its characters."""

    def code(match: re.Match[str]) -> str:
        return f":{ord(match[0]):x}:"

    return "runs-" + re.sub(r"[^A-Za-z0-9_.-]", code, stem)


def setting(table: Table) -> str:
    """`embedded engine, 300 iterations, tested on voc_2007_test`."""
    config = table.runs[0].record.config
    parts = [f"{table.engine} engine"]
    if table.iterations:
        epochs = f" ({config[EPOCHS]} epochs)" if EPOCHS in config else ""
        parts.append(f"{table.iterations} iterations{epochs}")
    if table.tested_on:
        parts.append(f"tested on {', '.join(table.tested_on)}")
    return ", ".join(parts)


def papers(table: Table) -> list[PaperTable]:
    """The paper's tables of this task; of a detection task only on the data of this table."""
    return tables_for(table.task, table.tested_on)


def notes(table: Table) -> list[str]:
    """What a reader of the table has to know: few trials, missing numbers, other lengths."""
    found, trials = [], paper_trials(table)
    if any(row.n < trials for row in table.rows):
        found.append(f"{FEW_MARK} fewer than {trials} trials (the paper averages {trials})")
    if any(row.n > 1 for row in table.rows):
        found.append(
            f"standard deviations, intervals and p-values are over {seeds(table)} only: a row has "
            "one pre-training, and how much another would differ was not measured"
        )
    for row in table.rows:
        found += _missing(row, table.metrics)
    if differing := _versions(table.runs):
        found.append(f"runs of different versions: {differing}")
    for paper in papers(table):
        epochs = table.runs[0].record.config.get(EPOCHS)
        for unit, here, there in (
            ("iterations", table.iterations, paper.iterations),
            ("epochs", epochs, paper.epochs),
        ):
            if there is not None and here != there:
                found.append(
                    f"not comparable with {paper.cite} of the paper: "
                    f"{here} {unit} here, {there} there"
                )
    return found


def paper_trials(table: Table) -> int:
    """How many trials the paper averages for this task; 0 where it does not say."""
    return max((paper.trials or 0 for paper in papers(table)), default=0)


def seeds(table: Table) -> str:
    """Which seeds the trials of a row differ in."""
    kind = table.runs[0].record.kind
    return "seeds of the linear classifier" if kind == "linear" else "fine-tuning seeds"


def head(table: Table) -> list[str]:
    """The heads of `rows`."""
    return ["pre-train", "n", *titles(table.metrics)]


def rows(
    table: Table, gap_text: Callable[[float], str], escaped: Callable[[str], str]
) -> list[list[str]]:
    """Our rows: name, n, and a cell per metric with the gap as `gap_text` writes it.

    `escaped` is the renderer's function of benchmarks/report/escape.py, here and in the next two.
    """
    found = []
    for row in table.rows:
        mark = FEW_MARK if row.n < paper_trials(table) else ""
        cells = [_cell(row, metric, gap_text, escaped) for metric in table.metrics]
        found.append([escaped(row.init), escaped(f"{row.n}{mark}"), *cells])
    return found


def paper_rows(
    paper: PaperTable,
    table: Table,
    gap_text: Callable[[float], str],
    escaped: Callable[[str], str],
) -> list[list[str]]:
    """The paper's rows: name and, per metric of `table`, the value with its printed gap."""
    found = []
    for row in paper.rows:
        cells = [_printed(*paper.own(row, metric), gap_text, escaped) for metric in table.metrics]
        found.append([escaped(row.name), *cells])
    return found


def evidence(table: Table, escaped: Callable[[str], str]) -> list[list[str]]:
    """Per row other than the baseline: its name against the baseline's, and each gap in full."""
    return [
        [escaped(f"{row.init} {MINUS} {table.baseline}"), *map(format_evidence, row.gaps.values())]
        for row in table.rows
        if any(gap is not None for gap in row.gaps.values())
    ]


def evidence_title(table: Table) -> str:
    """The title of `evidence`."""
    return f"Gap to {table.baseline}, 95% interval over {seeds(table)}, Welch's test"


def facts(row: Row) -> list[tuple[str, str]]:
    """What the row's numbers were made of, as (name, text); what differs is told by seed."""
    first = row.runs[0].record
    seconds = sum(run.record.seconds for run in row.runs)
    weights = first.weights_sha256 or ("none: random" if row.init == RANDOM else "none")
    return [
        ("weights' sha256", weights),
        ("weights made from", _by_seed(row, lambda run: run.record.weights_source or "")),
        ("label", _by_seed(row, lambda run: run.label)),
        ("seeds", ", ".join(str(run.record.seed) for run in row.runs)),
        ("config's sha256", _by_seed(row, lambda run: run.record.config_sha256)),
        ("versions", _by_seed(row, lambda run: run.versions)),
        ("hardware", _by_seed(row, lambda run: run.hardware)),
        ("time", f"{seconds:.0f} s in {row.n} run{'s' * (row.n > 1)}"),
        ("notes", _by_seed(row, lambda run: "; ".join(run.record.notes))),
    ]


def run_rows(row: Row, metrics: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Heads and, per run of the row, its seed, metrics, length, time and folder."""
    lines = []
    for run in row.runs:
        record = run.record
        values = [record.metrics.get(metric) for metric in metrics]
        lines.append(
            [
                str(record.seed),
                *(MISSING if value is None else f"{value:.1f}" for value in values),
                *(str(record.iterations), f"{record.seconds:.0f} s"),
                *(run.finished or MISSING, str(run.folder)),
            ]
        )
    return ["seed", *titles(metrics), "iterations", "time", "finished", "folder"], lines


def _by_seed(row: Row, text: Callable[[Run], str]) -> str:
    """What all runs of a row say, or each text with the seeds that say it."""
    said: dict[str, list[str]] = {}
    for run in row.runs:
        said.setdefault(text(run) or MISSING, []).append(str(run.record.seed))
    if len(said) == 1:
        return next(iter(said))
    return " / ".join(
        f"{words} (seed{'s' * (len(seeds) > 1)} {', '.join(seeds)})"
        for words, seeds in said.items()
    )


def _missing(row: Row, metrics: Sequence[str]) -> list[str]:
    """Per metric that some runs of the row have and others have not: which, and why.

    So too where every run has null; where no run was to measure it, the dash says all.
    """
    found = []
    for metric, title in zip(metrics, titles(metrics), strict=True):
        without = [run for run in row.runs if run.record.metrics.get(metric) is None]
        if not any(metric in run.record.metrics for run in row.runs):
            continue
        for run in without:
            words = {note: re.split(r"[\s,]+", note) for note in run.record.notes}
            reasons = [note for note, of_note in words.items() if metric in of_note]
            absent = "null, no reason recorded" if metric in run.record.metrics else "not reported"
            reason = reasons[0] if reasons else absent
            found.append(f"{row.init}, seed {run.record.seed}: no {title} ({reason})")
    return found


def _versions(runs: Sequence[Run]) -> str:
    """`torch (2.4.0 / 2.5.1)`: the packages whose version is not the same in all runs."""
    said: dict[str, dict[str, None]] = {}
    for run in runs:
        for package, version in (run.record.provenance.get("versions") or {}).items():
            said.setdefault(package, {})[str(version)] = None
    return ", ".join(
        f"{package} ({' / '.join(sorted(versions))})"
        for package, versions in said.items()
        if len(versions) > 1
    )


def _cell(
    row: Row, metric: str, gap_text: Callable[[float], str], escaped: Callable[[str], str]
) -> str:
    text, gap = escaped(format_cell(row.cells[metric], row.n)), row.gaps[metric]
    return text if gap is None else f"{text} {gap_text(gap.printed)}"


def _printed(
    value: float | None,
    gap: float | None,
    gap_text: Callable[[float], str],
    escaped: Callable[[str], str],
) -> str:
    text = escaped(MISSING) if value is None else f"{value:.1f}"
    return text if gap is None else f"{text} {gap_text(gap)}"


def _markdown_unusable(results: Results) -> list[str]:
    if not results.unusable:
        return []
    lines = [f"- {markdown(f'{item.folder}: {item.reason}')}" for item in results.unusable]
    return ["Runs without numbers:", "", *lines, ""]


def _tex_beside(panels: Sequence[Panel]) -> bool:
    """Whether two parts fit on a line; box and mask AP, six columns with ±, do not."""
    return max(len(panel.paper.columns) for panel in panels if panel.paper is not None) <= 3


def _tex_caption(panels: Sequence[Panel]) -> str:
    paper = panels[0].paper
    tables = list({id(table): table for panel in panels for table in panel.ours}.values())
    if paper is None:
        name = tables[0].task
    elif len(panels) > 1:
        name = f"As Table {paper.number} of the paper ({paper.label})"
    else:
        name = f"As {paper.cite} of the paper: {paper.title}"
    said = [*dict.fromkeys(setting(table) for table in tables)]
    baselines = {table.baseline for table in tables} - {None}
    text = f"{latex(name)}. Measured here: {latex('; '.join(said))}; "
    text += "mean $\\pm$ standard deviation of $n$ trials"
    if baselines:
        names = latex(", ".join(sorted(map(str, baselines))))
        text += f"; in brackets the gap to {names}, in green from $+$0.5"
    found = dict.fromkeys(note for table in tables for note in notes(table))
    return f"{text}." + "".join(f" {latex(note)}." for note in found)


def _tex_tabular(panel: Panel) -> list[str]:
    """Columns as in the paper (without those that are no result), no wider than the line."""
    if panel.paper is None:
        metrics = panel.ours[0].metrics
        columns = [(metric, OWN) for metric in metrics]
    else:
        pairs = zip(panel.paper.metrics, panel.paper.methods, strict=True)
        columns = [(metric, method) for metric, method in pairs if metric is not None]
    names = [_tex_title(title) for title in titles([metric for metric, _ in columns])]
    methods = ["MoCo" if method == OWN else method for _, method in columns]
    width = len(columns) + 2
    lines = [
        "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%",
        f"\\begin{{tabular}}{{l{'r' * (width - 1)}}}",
        "\\toprule",
    ]
    if {method for _, method in columns} == {OWN}:
        lines.append(" & ".join(["pre-train", "$n$", *names]) + " \\\\")
    else:
        lines.append(" & ".join(["", "", *names]) + " \\\\")
        lines.append(" & ".join(["pre-train", "$n$", *map(latex, methods)]) + " \\\\")
    for table in panel.ours:
        lines.append("\\midrule")
        if len(panel.ours) > 1:
            lines.append(_tex_across(width, f"{table.task}, {table.engine} engine"))
        for row in table.rows:
            mark = FEW_MARK if row.n < paper_trials(table) else ""
            cells = [
                _cell(row, metric, _tex_gap, latex)
                if method == OWN and metric in row.cells
                else latex(MISSING)
                for metric, method in columns
            ]
            lines.append(_tex_row([latex(row.init), f"{row.n}{latex(mark)}", *cells]))
    if panel.paper is not None:
        lines += ["\\midrule", _tex_across(width, f"The paper, {panel.paper.cite}")]
        trials = str(panel.paper.trials or latex(MISSING))
        for theirs in panel.paper.rows:
            cells = [
                _printed(value, gap, _tex_gap, latex)
                for value, gap, metric in zip(
                    theirs.values, theirs.gaps, panel.paper.metrics, strict=True
                )
                if metric is not None
            ]
            lines.append(_tex_row([latex(theirs.name), trials, *cells]))
    return [*lines, "\\bottomrule", "\\end{tabular}}"]


def _tex_across(width: int, text: str) -> str:
    return f"\\multicolumn{{{width}}}{{l}}{{\\emph{{{latex(text)}}}}} \\\\"


def _tex_row(cells: Sequence[str]) -> str:
    """As in the paper, a random initialization is gray."""
    if cells[0].split()[:1] in ([RANDOM], ["rand"]):
        cells = [f"\\textcolor{{gray}}{{{cell}}}" for cell in cells]
    return " & ".join(cells) + " \\\\"


def _markdown_gap(value: float) -> str:
    return f"(**{format_gap(value)}**)" if is_strong(value) else f"({format_gap(value)})"


def _tex_gap(value: float) -> str:
    sign, size = format_gap(value)[0], format_gap(value)[1:]
    sign = "$-$" if sign == MINUS else "$+$"
    if is_strong(value):
        return f"\\textcolor[HTML]{{{GREEN}}}{{({sign}\\textbf{{{size}}})}}"
    return f"({sign}{size})"


def _tex_title(title: str) -> str:
    """`AP$^{mk}_{50}$` of `AP50^mk`."""
    parts = re.fullmatch(r"AP(\d*)(?:\^(\w+))?", title)
    if parts is None or title == "AP":
        return latex(title)
    threshold, mark = parts.groups()
    upper, lower = f"^{{{mark}}}" if mark else "", f"_{{{threshold}}}" if threshold else ""
    return f"AP${upper}{lower}$"


def _pipe_table(head: list[str], rows: list[list[str]]) -> list[str]:
    def line(cells: list[str]) -> str:
        return f"| {' | '.join(cells)} |"

    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


def _precise(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
