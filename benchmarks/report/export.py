"""Renderers and files of a report: Markdown, CSV, LaTeX, HTML and terminal text, from templates/.

Templates escape all values for their format, so texts of a record never become markup.
"""

import base64
import hashlib
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import markupsafe
from fvcore.common.registry import Registry
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from benchmarks.report import style
from benchmarks.report.along import TransferCurves
from benchmarks.report.datasets import Collection, Summary
from benchmarks.report.published import OWN, PaperTable
from benchmarks.report.report import (
    Report,
    Section,
    arrange,
    facts,
    paper_rows,
    tuned_keys,
    tuned_value,
)
from benchmarks.report.style import FORMATS, PAGE_NAME, csv_text
from benchmarks.report.table import Cell, Table, has_logme, logme_cell, voc_metric
from benchmarks.report.trust import KENDALL, SPEARMAN, Trust
from detection.evaluation.metrics import titles
from moco.common.errors import printable

if TYPE_CHECKING:
    from benchmarks.report.compare import Comparison
    from benchmarks.report.page import Figures

TEMPLATES = Path(__file__).with_name("templates")
# Terminal control codes.
GREEN, BOLD, UNDERLINE, PLAIN = map(Markup, ("\033[32m", "\033[1m", "\033[4m", "\033[0m"))
RENDERERS = Registry("RENDERERS")
RENDERERS.__doc__ = """Registry of renderers: functions from a `Report` to files by name.

The name of a renderer is a choice of make_table's `--format`.
"""
_TEX_SIGNS: dict[str, Any] = {  # Jinja's default delimiters collide with LaTeX's braces
    "block_start_string": "<%",
    "block_end_string": "%>",
    "variable_start_string": "<<",
    "variable_end_string": ">>",
    "comment_start_string": "<#",
    "comment_end_string": "#>",
}
RUNS_NAME = "table.runs.md"  # the runs behind table.md
Line = dict[str, object]  # of a CSV file, by column


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
    lines = {
        "table.csv": _means(report.sections),
        "runs.csv": _runs(report.tables),
        "table.paper.csv": _paper(papers.values()),
        "table.summary.csv": _summary(report.summary) if report.summary else (),
        "table.datasets.csv": _datasets(report.collections),
        "table.along.csv": _transfer_curves(report.transfer_curves),
        "table.trust.csv": _trust(report.trust),
        "table.literature.csv": _literature(report.sections),
    }
    return {name: csv_text(own) for name, of in lines.items() if (own := list(of))}


@RENDERERS.register()
def tex(report: Report) -> dict[str, str]:
    """Render a complete LaTeX document, its tables arranged as in the paper."""
    floats = arrange(report.sections)
    return {"table.tex": _render("table.tex", report=report, floats=floats)}


@RENDERERS.register()
def html(report: Report) -> dict[str, str]:
    """Render a self-contained page: tables, figures, sample predictions and every run.

    Each gap links to a separate page (benchmarks/report/compare.py).
    """
    from benchmarks.report import compare, page

    figures = {section.stem: page.figures(report, section) for section in report.sections}
    files = {PAGE_NAME: page_text(report, figures, page.overviews(report))}
    for name, (section, compared) in compare.comparisons(report).items():
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
        "md": style.markdown,
        "tex": style.latex,
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


def _named(names: str, values: Iterable[object] | None) -> Line:
    """Return values by name, None for missing values."""
    return dict(zip_longest(names.split(), values or ()))


def _means(sections: Sequence[Section]) -> Iterator[Line]:
    """Yield a line per task, init and metric, with empty fields for missing numbers."""
    scored = any(has_logme(section.table) for section in sections)
    for section in sections:
        table = section.table
        tests = {(each.row.init, each.metric): each for each in section.significance}
        resampled = table.resamples.gaps if table.resamples else {}
        tuned = tuned_keys(table)
        for row, metric in itertools.product(table.rows, table.metrics):
            gap, test = row.gaps[metric], tests.get((row.init, metric))
            own, shown = resampled.get((row.init, metric)), section.cell(row, metric)
            names = "task engine iterations init metric"
            yield {
                **_named(names, (table.task, table.engine, table.iterations, row.init, metric)),
                **_numbers(row.cells[metric], ("n", "mean", "std")),
                "baseline": table.baseline,
                **_named(
                    "gap gap_low gap_high p_value",
                    (gap.value, gap.low, gap.high, gap.p_value) if gap else None,
                ),
                "p_holm": test.holm if test else None,
                **_named(
                    "paired_low paired_high paired_p paired_p_holm", test.paired if test else None
                ),
                "smallest_gap": test.smallest if test else None,
                "runs_needed": test.runs if test else None,
                **_named("equivalence_p equivalence_p_holm", test.same if test else None),
                **_named(
                    "images_low images_high images_p images_p_holm", own.images if own else None
                ),
                **_named("both_low both_high both_p both_p_holm", own.both if own else None),
                "bold": shown.significant,
                "underlined": shown.best,
                "untested": gap.untested if gap else None,
                "tuned": "; ".join(f"{key} {tuned_value(row, key)}" for key in tuned),
                **_numbers(
                    section.untuned_cell(row, metric), ("untuned_n", "untuned_mean", "untuned_std")
                ),
                **({"logme": logme_cell(row).value} if scored else {}),
                "legend": section.legend,
                "voc_metric": voc_metric(table),
            }


def _numbers(cell: Cell | None, names: Sequence[str]) -> Line:
    """Return n, mean and standard deviation under these names."""
    none = 0 if names[0] == "n" else None
    numbers = (cell.n, cell.mean, cell.std) if cell else (none, None, None)
    return dict(zip(names, numbers, strict=True))


def _summary(matrix: Summary) -> Iterator[Line]:
    """Yield a line per init and task: mean, rank, and whether it counts in the mean rank."""
    for init, means in matrix.means.items():
        for i, (task, mean) in enumerate(zip(matrix.tasks, means, strict=True)):
            yield {
                "init": init,
                "task": task,
                "mean": mean,
                "rank": matrix.ranks[init][i],
                "in_mean_rank": i in matrix.ranked,
                "mean_rank": matrix.mean_rank(init),
            }


def _datasets(collections: Sequence[Collection]) -> Iterator[Line]:
    """Yield a line per row and dataset: mean, number of trials, why it is in no mean."""
    for each in collections:
        for row, name in itertools.product(each.values, each.datasets):
            values = each.values[row].get(name, ())
            yield {
                "task": each.task,
                "engine": each.engine,
                "init": row,
                "dataset": name,
                "metric": each.metric,
                "n": len(values),
                "mean": statistics.fmean(values) if values else None,
                "in_mean": name in each.complete,
                "absent": each.absent.get((row, name)),
            }


def _transfer_curves(parts: Sequence[TransferCurves]) -> Iterator[Line]:
    """Yield a line per checkpoint and measure: the metric of the table, and the cheap ones."""
    names = "task engine pretraining epoch measure n mean std"
    for part, series in ((each, series) for each in parts for series in each.series):
        setting = part.table.task, part.table.engine, series.name
        for epoch, row in series.rows.items():
            if cell := row.cells[part.metric]:
                numbers = (epoch, part.metric, cell.n, cell.mean, cell.std)
                yield _named(names, (*setting, *numbers))
        for measure, values in series.cheap.items():
            for epoch, value in values.items():
                yield _named(names, (*setting, epoch, measure, None, value))


def _trust(parts: Sequence[Trust]) -> Iterator[Line]:
    """Yield a line per init of a frozen and a fine-tuned task, with the correlations over all."""
    for part in parts:
        for point in part.points:
            yield {
                "tested_on": " ".join(part.table.tested_on),
                **_named("engine metric init", (part.table.engine, part.metric, point.init)),
                "frozen_task": point.frozen_task,
                **_numbers(point.frozen, ("frozen_n", "frozen_mean", "frozen_std")),
                "tuned_task": point.tuned_task,
                **_numbers(point.tuned, ("tuned_n", "tuned_mean", "tuned_std")),
                "inits": len(part.points),
                **_named("tau tau_low tau_high", part.correlations.get(KENDALL)),
                **_named("rho rho_low rho_high", part.correlations.get(SPEARMAN)),
            }


def _runs(tables: Sequence[Table]) -> Iterator[Line]:
    """Yield a line per run: all its metrics and its provenance."""
    runs = [run for table in tables for run in table.runs]
    metrics = sorted({name for run in runs for name in run.record.metrics})
    for run in runs:
        r = run.record
        first = {
            **{name: getattr(r, name) for name in ("task", "engine", "init", "seed", "iterations")},
            "seconds": f"{r.seconds:.1f}",
            "weights_sha256": r.weights_sha256,
            "config_sha256": r.config_sha256,
            "folder": run.folder,
        }
        last = {
            "tested_on": " ".join(run.tested_on),
            "weights_source": r.weights_source,
            "label": run.label,
            "versions": run.versions,
            "hardware": run.hardware,
            "finished": run.finished,
            "notes": "; ".join(r.notes),
        }
        # A record may call a metric as a column.
        yield {**first, **{name: r.metrics.get(name) for name in metrics}, **last, **first}


def _paper(papers: Iterable[PaperTable]) -> Iterator[Line]:
    """Yield a line per number that the paper prints."""
    names = "table part label pre-train column metric method value gap"
    for paper, row in ((each, row) for each in papers for row in each.rows):
        columns = zip(paper.columns, paper.metrics, paper.methods, strict=True)
        for column, value, gap in zip(columns, row.values, row.gaps, strict=True):
            if value is not None:
                own = (paper.number, paper.part, paper.label, row.name, *column, value, gap)
                yield _named(names, own)


def _literature(sections: Sequence[Section]) -> Iterator[Line]:
    """Yield a line per other published number, with the tags of its protocol."""
    for section, part in ((s, part) for s in sections for part in s.published):
        for row in part.rows:
            for metric, value in row.values.items():
                yield {
                    "task": section.table.task,
                    "differs": ", ".join(part.differs),
                    **{name: getattr(row, name) for name in ("method", "pretrain", "epochs", "n")},
                    "source": row.source,
                    **row.tags,
                    "metric": metric,
                    "value": value,
                    "verified": metric not in row.unverified,
                }


def write_files(out: Path, report: "Report", formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a report in each format and its figures into `out`, and return the paths.

    Raises:
        UserError: If a format has no renderer.
    """
    from moco.common.files import atomic_write_text

    written: list[Path] = []
    for renderer in find_renderers(formats):
        for name, text in renderer(report).items():
            atomic_write_text(out / name, text)
            written.append(out / name)
    for name, plot in report.plots.items():
        written += plot.save(out / f"{name}.png")
    return written


def format_paths(written: Sequence[Path], bundle: Path | None = None) -> str:
    """Return the last line on a terminal: where the page is.

    Args:
        written: Files of the report.
        bundle: Bundle of the report, which contains its page.
    """
    from benchmarks.report.style import PAGE_NAME

    places = [str(path) for path in written if path.name == PAGE_NAME]
    places += [f"{PAGE_NAME} in {bundle}"] if bundle else []
    if not places and written:
        places = [f"none, without the format html; other files are in {written[0].parent}"]
    return printable(f"page: {', '.join(places) or 'none; --out DIR writes it'}")


def find_renderers(formats: Sequence[str]) -> list[Any]:
    """Look up the renderers of formats.

    Raises:
        UserError: If a format has no renderer.
    """
    from moco.common.errors import lookup

    return [lookup(RENDERERS, name, "--format") for name in formats]
