"""Content of a report, independent of its format: rows, notes, evidence and provenance per table.

A cell is `mean ± std` and the gap to the baseline, or `–` if there is no number. Printed gaps are
the differences of the printed means. Fewer trials than the paper averages are marked. The paper's
rows are in separate tables.

All texts are plain: renderers (render.py) escape what records contain. Only `facts` and
`Section.run_rows` hold what varies between machines or repeated reports of the same runs (folders,
time, hardware).
"""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report.aggregate import CONFIDENCE, Row, Table, stems
from benchmarks.report.analysis import analysis_grids, unread
from benchmarks.report.captions import (
    EPOCHS,
    heading,
    missing_numbers,
    never_trained,
    nothing_shown,
    reachable,
    setting,
    trial,
    tuned,
    uncertainty,
    versions,
)
from benchmarks.report.cells import Grid, TextCell, printed
from benchmarks.report.datasets import Collection, collections
from benchmarks.report.gaps import gap_grids
from benchmarks.report.isolation import isolation
from benchmarks.report.literature import LiteratureRow, rows_for
from benchmarks.report.looks import looks_notes
from benchmarks.report.paper import OWN, PaperTable, load_paper, tables_for
from benchmarks.report.progress import Progress
from benchmarks.report.records import Results
from benchmarks.report.significance import significance
from benchmarks.report.style import FEW_MARK, MISSING, UNVERIFIED_MARK, format_cell
from benchmarks.report.summary import Summary, summarize
from detection.evaluation.metrics import titles

if TYPE_CHECKING:
    from benchmarks.report.plots import Plot

Column = tuple[str, str]  # metric and method; the method is whose pre-training the paper used
LIVE_RUNS = 500  # maximum number of runs that the page lists while its suite is running


@dataclass(frozen=True)
class Published:
    """Published rows of one protocol.

    Attributes:
        differs: Differences from the protocol of the table, empty if there are none.
        rows: Rows in the order of the file.
    """

    differs: tuple[str, ...]
    rows: Sequence[LiteratureRow]

    @property
    def title(self) -> str:
        """Heading of the rows."""
        if not self.differs:
            return "Published elsewhere, same protocol"
        return f"Published elsewhere, not comparable: {', '.join(self.differs)}"

    @property
    def note(self) -> str:
        """Legend of the rows."""
        note = f"Not measured here. n: runs that a number averages, {MISSING} if not stated"
        unverified = any(row.unverified for row in self.rows)
        return f"{note}. {UNVERIFIED_MARK} not verified in the source" if unverified else note

    def cells(self, columns: Sequence[Column]) -> list[list[TextCell]]:
        """Return rows of formatted cells: name, n, a number per column, source."""
        return [
            [
                TextCell(row.name),
                TextCell(str(row.n or MISSING), row.n),
                *(_published(row, *column) for column in columns),
                TextCell(row.source),
            ]
            for row in self.rows
        ]


class Section:
    """Content of a report on one table.

    Args:
        table: Table of the section.
        stem: Unique name of the table, see `stems`.
        tables: All tables of the report.
        near: Include published rows of similar protocols.
    """

    def __init__(
        self, table: Table, stem: str, tables: Sequence[Table], near: bool = False
    ) -> None:
        self.table, self.stem = table, stem
        self.heading = heading(table, tables)
        self.setting = setting(table)
        self.papers = tables_for(table.task, table.tested_on)
        groups = rows_for(table.runs[0].record.config, table.metrics, near)
        self.published = [Published(differs, rows) for differs, rows in groups.items()]
        self.columns = [(metric, OWN) for metric in table.metrics]
        self.titles = list(titles(table.metrics))
        self.head = ["pre-train", "n", *self.titles]
        self.published_head = [*self.head, "source"]
        # The largest number of trials that the paper averages, or 0 if it does not say.
        self.trials = max((paper.trials or 0 for paper in self.papers), default=0)
        self.anchor, self.runs_anchor = f"table-{_slug(stem)}", f"runs-{_slug(stem)}"
        self.runs_head = ["seed", *self.titles, "iterations", "time", "finished", "folder"]
        self.significance = significance(table)
        self.holm = {(each.row.init, each.metric): each.holm for each in self.significance}
        self.isolation = [str(each) for each in isolation(table)]

    def rows(self, columns: Sequence[Column] | None = None) -> list[list[TextCell]]:
        """Return rows of formatted cells: name, n (marked if the paper averages more), columns."""
        return [
            [
                TextCell(row.init),
                TextCell(f"{row.n}{FEW_MARK if row.n < self.trials else ''}", row.n),
                *(self._cell(row, *column) for column in columns or self.columns),
            ]
            for row in self.table.rows
        ]

    def _cell(self, row: Row, metric: str, method: str) -> TextCell:
        cell, gap = row.cells.get(metric), row.gaps.get(metric)
        if cell is None or method != OWN:
            return TextCell(MISSING)
        others = (other.cells[metric] for other in self.table.rows if other is not row)
        means = [round(other.mean, 1) for other in others if other is not None]
        best = bool(means) and round(cell.mean, 1) >= max(means)
        text, value = format_cell(cell, row.n), cell.mean
        if gap is None:
            return TextCell(text, value, best=best)
        significant = self.holm.get((row.init, metric), 1.0) < 1 - CONFIDENCE
        return TextCell(text, value, gap.printed, significant, best)

    @cached_property
    def gaps(self) -> list[Grid]:
        """Grids of gaps: intervals, corrections, power, bootstrap."""
        return gap_grids(self.table, self.significance)

    @cached_property
    def others(self) -> list[Grid]:
        """Grids of convergence, error types and corrupted images."""
        return analysis_grids(self.table)

    @cached_property
    def notes(self) -> list[str]:
        """Caveats of the table: few trials, missing numbers, schedules other than the paper's."""
        table, found, trials = self.table, [], self.trials
        if any(row.n < trials for row in table.rows):
            found.append(f"{FEW_MARK} fewer than {trials} trials (the paper averages {trials})")
        found.append(uncertainty(table))
        found += looks_notes(table)
        found += nothing_shown(table, self.significance)
        missing = table.resamples.missing if table.resamples else {}
        for reason in dict.fromkeys(missing.values()):
            which = ", ".join(init for init in missing if missing[init] == reason)
            found.append(f"no interval over test images, {which}: {reason}")
        found += unread(table)
        found += reachable(table)
        found += never_trained(table)
        found += tuned(table)
        for row in table.rows:
            found += missing_numbers(row, table.metrics)
        if differing := versions(table.runs):
            found.append(f"runs of different versions: {differing}")
        epochs = table.runs[0].record.config.get(EPOCHS)
        for paper in self.papers:
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

    def row_anchor(self, row: Row) -> str:
        """Return the anchor of a row's provenance."""
        return f"{self.runs_anchor}--{_slug(row.init)}"

    def run_rows(self, row: Row, listed: Container[Path] | None = None) -> list[list[TextCell]]:
        """Return rows of formatted cells, one per run: seed, metrics, length, time, folder.

        Args:
            row: Row whose runs are listed.
            listed: Folders of the runs to list, or None for all.
        """
        return [
            [
                TextCell(trial(run), run.record.seed),
                *(printed(run.record.metrics.get(metric)) for metric in self.table.metrics),
                TextCell(str(run.record.iterations), run.record.iterations),
                TextCell(f"{run.record.seconds:.0f} s", run.record.seconds),
                TextCell(run.finished or MISSING),
                TextCell(str(run.folder)),
            ]
            for run in row.runs
            if listed is None or run.folder in listed
        ]


@dataclass(frozen=True)
class Report:
    """Tables and the runs behind them, the input of a renderer.

    Attributes:
        tables: Tables in the order of the report.
        results: Runs of the tables, and those without numbers.
        progress: Progress of a running suite, which only the HTML page shows.
        near: Include published rows of similar protocols.
    """

    tables: Sequence[Table]
    results: Results
    progress: Progress | None = None
    near: bool = False

    @cached_property
    def sections(self) -> list[Section]:
        """Sections, one per table."""
        names = stems(self.tables)
        pairs = zip(self.tables, names, strict=True)
        return [Section(table, name, self.tables, self.near) for table, name in pairs]

    @cached_property
    def plots(self) -> "dict[str, Plot]":
        """Figures by file name: `loss-<stem>` and `ap-<stem>`, `differences-<task>` of datasets."""
        from benchmarks.report import plots

        found = {}
        for section in self.sections:
            table, title = section.table, section.heading
            losses = plots.losses(table, self.results)
            found[f"loss-{section.stem}"] = plots.Plot(plots.loss_figure(losses, title))
            found[f"ap-{section.stem}"] = plots.Plot(plots.ap_figure(table, title))
        for each in self.collections:
            if (figure := plots.differences_figure(each)) is not None:
                found[each.figure] = plots.Plot(figure)
        return found

    @cached_property
    def listed(self) -> set[Path] | None:
        """Folders of the newest runs while the suite is running, or None to list all runs."""
        if self.progress is None:
            return None
        runs = [run for table in self.tables for run in table.runs]
        return {run.folder for run in sorted(runs, key=lambda run: run.finished)[-LIVE_RUNS:]}

    @cached_property
    def summary(self) -> Summary | None:
        """Summary over all tables, or None if there is only one, or they are of one collection."""
        known = {name for each in self.collections for name in each.datasets}
        return None if known >= {t.title for t in self.tables} else summarize(self.tables)

    @cached_property
    def collections(self) -> list[Collection]:
        """Summaries over datasets of suites that have one task on many of them."""
        return collections(self.tables, self.results)

    @property
    def citation(self) -> str:
        """Citation of the paper, or "" if no table has rows of it."""
        return load_paper()[0] if any(section.papers for section in self.sections) else ""


def paper_rows(paper: PaperTable, columns: Sequence[Column]) -> list[list[TextCell]]:
    """Return the paper's rows as formatted cells: name, then value and printed gap per column."""
    return [
        [TextCell(row.name), *(printed(*paper.number_of(row, *column)) for column in columns)]
        for row in paper.rows
    ]


def _published(row: LiteratureRow, metric: str, method: str) -> TextCell:
    value = row.values.get(metric) if method == OWN else None
    shown = printed(value)
    return TextCell(f"{shown.text}{UNVERIFIED_MARK}", value) if metric in row.unverified else shown


def arrange(sections: Sequence[Section]) -> list[list[tuple[PaperTable | None, list[Section]]]]:
    """Group sections by the number of the paper's table, in the paper's order.

    A task that is in several of the paper's tables is in each group. A task that is in none is a
    group of its own at the end, with None for the paper's table.
    """
    floats: dict[int | str, list[tuple[PaperTable | None, list[Section]]]] = {}
    for paper in load_paper()[1]:
        if ours := [section for section in sections if paper in section.papers]:
            floats.setdefault(paper.number or paper.cite, []).append((paper, ours))
    for section in sections:
        if not section.papers:
            floats[f"ours: {section.stem}"] = [(None, [section])]
    return list(floats.values())


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", lambda match: f":{ord(match[0]):x}:", name)
