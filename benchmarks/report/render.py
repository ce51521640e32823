"""Renderers of a report: Markdown, CSV, LaTeX, HTML and terminal text, from templates/.

Templates escape everything they print for their own format, so texts of a record are never markup:
only what is written in a template is.
"""

import base64
import hashlib
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import markupsafe
from fvcore.common.registry import Registry
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from benchmarks.report import escape, style
from benchmarks.report.aggregate import Gap, Row, Table
from benchmarks.report.along import Along
from benchmarks.report.captions import facts, tuned_keys, tuned_value, voc_metric
from benchmarks.report.content import Report, Section, arrange, paper_rows
from benchmarks.report.datasets import Collection
from benchmarks.report.escape import csv_text
from benchmarks.report.looks import LOOKS_HEAD, looks_lines
from benchmarks.report.paper import OWN, PaperTable
from benchmarks.report.progress import PAGE_NAME, Progress
from benchmarks.report.summary import Summary
from detection.evaluation.metrics import titles
from moco.common.errors import printable

if TYPE_CHECKING:
    from benchmarks.report.comparison import Comparison
    from benchmarks.report.page import Figures

TEMPLATES = Path(__file__).with_name("templates")
RUNS_NAME = "table.runs.md"  # the runs behind table.md
# Terminal control codes.
GREEN, BOLD, UNDERLINE, PLAIN = map(Markup, ("\033[32m", "\033[1m", "\033[4m", "\033[0m"))

RENDERERS = Registry("RENDERERS")
RENDERERS.__doc__ = """Registry of renderers: functions from a `Report` to files by name.

The name of a renderer is a choice of make_table's `--format`.
"""


@RENDERERS.register()
def md(report: Report) -> dict[str, str]:
    """Render table.md (rows, gaps, the paper's rows per task) and the runs as another file."""
    return {
        "table.md": _render("table.md", report=report, runs_name=RUNS_NAME),
        RUNS_NAME: _render("runs.md", report=report),
    }


@RENDERERS.register()
def csv(report: Report) -> dict[str, str]:
    """Render means and gaps, runs, the summary and published numbers in full precision."""
    papers = {paper.cite: paper for section in report.sections for paper in section.papers}
    texts = {"table.csv": _means_csv(report.sections), "runs.csv": _runs_csv(report.tables)}
    if papers:
        texts["table.paper.csv"] = _paper_csv(papers.values())
    if lines := looks_lines(report.tables):
        texts["table.looks.csv"] = csv_text(LOOKS_HEAD, lines)
    if report.summary is not None:
        texts["table.summary.csv"] = _summary_csv(report.summary)
    if report.collections:
        texts["table.datasets.csv"] = _datasets_csv(report.collections)
    if report.along:
        texts["table.along.csv"] = _along_csv(report.along)
    if any(section.published for section in report.sections):
        texts["table.literature.csv"] = _literature_csv(report.sections)
    return texts


@RENDERERS.register()
def tex(report: Report) -> dict[str, str]:
    """Render a complete LaTeX document, its tables arranged as in the paper."""
    floats = arrange(report.sections)
    return {"table.tex": _render("table.tex", report=report, floats=floats)}


@RENDERERS.register()
def html(report: Report) -> dict[str, str]:
    """Render a self-contained page: tables, figures, sample predictions and every run.

    Each gap links to a page of its own (benchmarks/report/comparison.py).
    """
    from benchmarks.report import comparison, page

    figures = {section.stem: page.figures(report, section) for section in report.sections}
    files = {PAGE_NAME: page_text(report, figures, page.overviews(report))}
    for name, (section, compared) in comparison.comparisons(report).items():
        files[name] = comparison_text(report, section, compared)
    return files


def comparison_text(report: Report, section: Section, compared: "Comparison") -> str:
    """Render the page that compares a row with the baseline."""
    content = {"report": report, "section": section, "compared": compared}
    return _render("compare.html", **content)


def page_text(
    report: Report, figures: "Mapping[str, Figures]", overviews: Mapping[str, str]
) -> str:
    """Render the HTML page of a report from figures that are already plotted.

    Args:
        report: Report of the page.
        figures: Stem of a section → its figures.
        overviews: Title → data URL of the figures of `page.overviews`.
    """
    return _render("table.html", report=report, figures=figures, overviews=overviews)


def with_progress(page: str, progress: Progress) -> str:
    """Replace the progress in the page of a running suite, without rendering its tables again."""
    before, _, after = page.split("<!-- progress -->\n")
    before = re.sub("<title>[^ ]* ", f"<title>{progress.share:.0%} ", before)
    now = _render("progress.html", progress=progress)
    return f"{before}{now}{after}"


@RENDERERS.register()
def terminal(report: Report) -> dict[str, str]:
    """Render the text that make_table prints, without colors."""
    return {"table.txt": f"{to_terminal(report, color=False)}\n"}


def to_terminal(report: Report, color: bool) -> str:
    """Render text for a terminal: each table last, with what differs and how sure that is below it.

    With `color`, cells and gaps are underlined, bold and green as in the HTML page.
    """
    return _render("table.txt", report=report, color=color).rstrip("\n")


def _render(template: str, **content: Any) -> str:
    text = _environment(template.rpartition(".")[2]).get_template(template).render(content)
    return text.rstrip("\n") + "\n"


@cache
def _environment(kind: str) -> Environment:
    """Create the environment of the templates with this file extension."""
    escapes: Mapping[str, Callable[[str], str]] = {
        "md": escape.markdown,
        "tex": escape.latex,
        "html": lambda text: markupsafe.escape(printable(text)),
        "txt": printable,
    }
    escaped = escapes[kind]

    def safe(value: object) -> Markup:
        return value if isinstance(value, Markup) else Markup(escaped(str(value)))

    def grid(
        head: Sequence[str], rows: Sequence[Sequence[Any]], cell: Callable[[Any], str] = safe
    ) -> Markup:
        texts = [[str(cell(each)) for each in row] for row in rows]
        return Markup(_GRIDS[kind]([str(safe(name)) for name in head], texts))

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=safe,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **(_TEX_SIGNS if kind == "tex" else {}),
    )
    environment.globals.update(OWN=OWN, style=style)
    environment.globals.update(GREEN=GREEN, BOLD=BOLD, UNDERLINE=UNDERLINE, PLAIN=PLAIN)
    environment.globals.update(grid=grid, titles=titles, facts=facts, paper_rows=paper_rows)
    environment.globals.update(percent="{:.0%}".format, csp_hash=_csp_hash)
    environment.globals.update(PAGE_NAME=PAGE_NAME)
    return environment


def _csp_hash(text: str) -> Markup:
    """Return the hash by which a Content-Security-Policy allows an inline element's text."""
    digest = hashlib.sha256(text.encode()).digest()
    return Markup(f"sha256-{base64.b64encode(digest).decode()}")


def _pipes(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _tabulated(head: list[str], rows: list[list[str]]) -> str:
    from tabulate import tabulate

    return tabulate(rows, headers=head, disable_numparse=True)


def _tabular(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"{' & '.join(cells)} \\\\" for cells in (head, *rows)]
    rules = "\\toprule", lines[0], "\\midrule", *lines[1:], "\\bottomrule"
    return "\n".join([f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", *rules, "\\end{tabular}"])


_GRIDS = {"md": _pipes, "txt": _tabulated, "tex": _tabular}
_TEX_SIGNS: dict[str, Any] = {  # Jinja's default delimiters collide with LaTeX's braces
    "block_start_string": "<%",
    "block_end_string": "%>",
    "variable_start_string": "<<",
    "variable_end_string": ">>",
    "comment_start_string": "<#",
    "comment_end_string": "#>",
}


def _means_csv(sections: Sequence[Section]) -> str:
    """Format one line per task, init and metric, with empty fields for missing numbers."""
    names = ["task", "engine", "iterations", "init", "metric", "n", "mean", "std"]
    names += ["baseline", "gap", "gap_low", "gap_high", "p_value"]
    names += ["p_holm", "paired_low", "paired_high", "paired_p", "paired_p_holm"]
    names += ["smallest_gap", "runs_needed", "equivalence_p", "equivalence_p_holm"]
    names += [f"{of}_{x}" for of in ("images", "both") for x in ("low", "high", "p", "p_holm")]
    marks = ["bold", "underlined", "untested", "tuned", "untuned_n", "untuned_mean"]
    marks += ["untuned_std", "legend", "voc_metric"]
    lines = []
    for section in sections:
        table = section.table
        more = {(each.row.init, each.metric): each for each in section.significance}
        resampled = table.resamples.gaps if table.resamples else {}
        for row in table.rows:
            for metric, cell in row.cells.items():
                numbers = (cell.n, cell.mean, cell.std) if cell else (0, None, None)
                setting = (table.task, table.engine, table.iterations, row.init, metric)
                line = [*setting, *numbers, table.baseline, *_numbers(row.gaps[metric])]
                if found := more.get((row.init, metric)):
                    line += [found.holm, *(found.paired or (None,) * 4)]
                    line += [found.smallest, found.runs, *(found.same or ())]
                line += [None] * (len(names) - 8 - len(line))
                if own := resampled.get((row.init, metric)):
                    line += [*own.images, *(own.both or ())]
                line += [None] * (len(names) - len(line))
                lines.append([*line, *_marks(section, row, metric)])
    return csv_text([*names, *marks], lines)


def _marks(section: Section, row: Row, metric: str) -> list[object]:
    """Return a cell's marks, the tuned values with the untuned result, the legend, the metric."""
    shown, gap = section.cell(row, metric), row.gaps[metric]
    chosen = [f"{key} {tuned_value(row, key)}" for key in tuned_keys(section.table)]
    untuned = section.untuned_cell(row, metric)
    numbers = (untuned.n, untuned.mean, untuned.std) if untuned else (None,) * 3
    marks = shown.significant, shown.best, gap.untested if gap else None
    return [*marks, "; ".join(chosen), *numbers, section.legend, voc_metric(section.table)]


def _summary_csv(matrix: Summary) -> str:
    """Format one line per init and task: mean, rank, and whether it counts in the mean rank."""
    return csv_text(
        ["init", "task", "mean", "rank", "in_mean_rank", "mean_rank"],
        [
            [init, task, mean, matrix.ranks[init][i], i in matrix.ranked, matrix.mean_rank(init)]
            for init, means in matrix.means.items()
            for i, (task, mean) in enumerate(zip(matrix.tasks, means, strict=True))
        ],
    )


def _datasets_csv(collections: Sequence[Collection]) -> str:
    """Format one line per row and dataset: mean, number of trials, why it is in no mean."""
    return csv_text(
        ["task", "engine", "init", "dataset", "metric", "n", "mean", "in_mean", "absent"],
        [
            [
                *(each.task, each.engine, row, name, each.metric, len(of.get(name, ())), mean),
                *(name in each.complete, each.absent.get((row, name))),
            ]
            for each in collections
            for row, of in each.values.items()
            for name in each.datasets
            for mean in (statistics.fmean(of[name]) if of.get(name) else None,)
        ],
    )


def _along_csv(parts: Sequence[Along]) -> str:
    """Format one line per checkpoint and measure: the metric of the table, and the cheap ones."""
    lines: list[Sequence[object]] = []
    for part in parts:
        for series in part.series:
            setting = (part.table.task, part.table.engine, series.name)
            for epoch, row in series.rows.items():
                if cell := row.cells[part.metric]:
                    numbers = (epoch, part.metric, cell.n, cell.mean, cell.std)
                    lines.append([*setting, *numbers])
            for measure, values in series.cheap.items():
                lines += [[*setting, epoch, measure, None, v, None] for epoch, v in values.items()]
    return csv_text(
        ["task", "engine", "pretraining", "epoch", "measure", "n", "mean", "std"], lines
    )


def _runs_csv(tables: Sequence[Table]) -> str:
    """Format one line per run: all its metrics and its provenance."""
    runs = [run for table in tables for run in table.runs]
    metrics = sorted({name for run in runs for name in run.record.metrics})
    names = ["task", "engine", "init", "seed", "iterations", "seconds", "weights_sha256"]
    names += ["config_sha256", "folder", *metrics, "tested_on", "weights_source", "label"]
    lines = []
    for run in runs:
        r = run.record
        lines.append(
            [
                r.task,
                r.engine,
                r.init,
                r.seed,
                r.iterations,
                f"{r.seconds:.1f}",
                r.weights_sha256,
                r.config_sha256,
                run.folder,
                *map(r.metrics.get, metrics),
                " ".join(run.tested_on),
                r.weights_source,
                run.label,
                run.versions,
                run.hardware,
                run.finished,
                "; ".join(r.notes),
            ]
        )
    return csv_text([*names, "versions", "hardware", "finished", "notes"], lines)


def _paper_csv(papers: Iterable[PaperTable]) -> str:
    """Format the paper's numbers, one line per printed number."""
    return csv_text(
        ["table", "part", "label", "pre-train", "column", "metric", "method", "value", "gap"],
        [
            [paper.number, paper.part, paper.label, row.name, *column, value, gap]
            for paper in papers
            for row in paper.rows
            for *column, value, gap in zip(
                paper.columns, paper.metrics, paper.methods, row.values, row.gaps, strict=True
            )
            if value is not None
        ],
    )


def _literature_csv(sections: Sequence[Section]) -> str:
    """Format other published numbers, one line per number, with the tags of its protocol."""
    shown = [(s, part, row) for s in sections for part in s.published for row in part.rows]
    names = ["task", "differs", "method", "pretrain", "epochs", "n", "source", *shown[0][2].tags]
    return csv_text(
        [*names, "metric", "value", "verified"],
        [
            [
                section.table.task,
                ", ".join(part.differs),
                row.method,
                row.pretrain,
                row.epochs,
                row.n,
                row.source,
                *row.tags.values(),
                metric,
                value,
                metric not in row.unverified,
            ]
            for section, part, row in shown
            for metric, value in row.values.items()
        ],
    )


def _numbers(gap: Gap | None) -> tuple[float | None, ...]:
    return (gap.value, gap.low, gap.high, gap.p_value) if gap else (None,) * 4
