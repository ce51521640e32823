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

from benchmarks.report.aggregate import Cell, Row, Table, stems, untuned
from benchmarks.report.along import Along, along_figure, along_pretraining
from benchmarks.report.analysis import analysis_grids, unread
from benchmarks.report.captions import (
    EPOCHS,
    different,
    heading,
    how_sure,
    missing_numbers,
    never_trained,
    nothing_shown,
    reachable,
    setting,
    test_name,
    trial,
    tuned,
    tuned_keys,
    tuned_value,
    uncertainty,
    versions,
    warnings,
)
from benchmarks.report.cells import Grid, TextCell, printed
from benchmarks.report.datasets import Collection, collections
from benchmarks.report.escape import file_names
from benchmarks.report.gaps import gap_grids
from benchmarks.report.isolation import isolation, shortened
from benchmarks.report.literature import LiteratureRow, rows_for
from benchmarks.report.looks import looks_notes
from benchmarks.report.paper import OWN, PaperTable, load_paper, tables_for
from benchmarks.report.progress import Progress
from benchmarks.report.records import Results
from benchmarks.report.shared import Shared, rows_beside
from benchmarks.report.significance import significance
from benchmarks.report.style import (
    FEW_MARK,
    MISSING,
    UNVERIFIED_MARK,
    format_cell,
    is_strong,
    legend,
)
from benchmarks.report.summary import Summary, summarize
from detection.evaluation.metrics import titles

if TYPE_CHECKING:
    from benchmarks.report.plots import Plot

COMPARISON = "compare"  # first part of the name of a page of two rows
Column = tuple[str, str]  # metric and method; the method is whose pre-training the paper used
LIVE_RUNS = 500  # maximum number of runs that the page lists while its suite is running


@dataclass(frozen=True)
class Published:
    """Published rows of one protocol.

    Attributes:
        differs: Differences from the protocol of the table, empty if there are none.
        rows: Rows in the order of the file.
        shared: True for rows of the project's own results, whose data is the same, too.
    """

    differs: tuple[str, ...]
    rows: Sequence[LiteratureRow]
    shared: bool = False

    @property
    def title(self) -> str:
        """Heading of the rows."""
        if self.shared:
            return "Measured by others with moco-transfer, same protocol and data"
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
        shared: Results whose rows of the same protocol and data are included.
    """

    def __init__(
        self,
        table: Table,
        stem: str,
        tables: Sequence[Table],
        near: bool = False,
        shared: Sequence[Shared] = (),
    ) -> None:
        self.table, self.stem = table, stem
        self.heading = heading(table, tables)
        self.setting = setting(table)
        self.papers = tables_for(table.task, table.tested_on)
        groups = rows_for(table.runs[0].record.config, table.metrics, near)
        self.published = [Published(differs, rows) for differs, rows in groups.items()]
        if beside := rows_beside(table, shared):
            self.published.append(Published((), beside, shared=True))
        self.columns = [(metric, OWN) for metric in table.metrics]
        self.titles = list(titles(table.metrics))
        head = ["pre-train", "n", *self.titles]
        self.published_head = [*head, "source"]
        self.untuned = untuned(table, tables)
        self.tuned_head = tuned_keys(table)
        self.tuned_head += [f"untuned {self.titles[0]}"] if self.tuned_head else []
        self.head = [*head, *self.tuned_head]
        # The largest number of trials that the paper averages, or 0 if it does not say.
        self.trials = max((paper.trials or 0 for paper in self.papers), default=0)
        self.anchor, self.runs_anchor = f"table-{_slug(stem)}", f"runs-{_slug(stem)}"
        self.runs_head = ["seed", *self.titles, "iterations", "time", "finished", "folder"]
        self.significance = significance(table)
        self.shown = {(e.row.init, e.metric) for e in self.significance if e.significant}
        compared = isolation(table)
        self.comparisons = [str(each) for each in compared]
        self.isolation = shortened(compared)
        gaps = [gap for row in table.rows for gap in row.gaps.values() if gap]
        self.legend = legend(gaps, table.baseline, test_name(table)) if len(table.rows) > 1 else ""
        self.ending = [
            different(table, self.significance),
            how_sure(table, self.significance, self.isolation),
        ]

    def rows(self, columns: Sequence[Column] | None = None) -> list[list[TextCell]]:
        """Return rows of formatted cells: name, n (marked if the paper averages more), columns.

        The table's own columns are followed by what was tuned and the result without tuning.
        """
        return [
            [
                TextCell(row.init),
                TextCell(f"{row.n}{FEW_MARK if row.n < self.trials else ''}", row.n),
                *(self.cell(row, *column) for column in columns or self.columns),
                *([] if columns else self._tuned(row)),
            ]
            for row in self.table.rows
        ]

    def _tuned(self, row: Row) -> list[TextCell]:
        if not self.tuned_head:
            return []
        chosen = [TextCell(tuned_value(row, key)) for key in self.tuned_head[:-1]]
        cell = self.untuned_cell(row, self.table.metrics[0])
        if cell is None:
            return [*chosen, TextCell(MISSING)]
        text = format_cell(cell, cell.n) + ("" if cell.n == row.n else f" (n = {cell.n})")
        return [*chosen, TextCell(text, cell.mean)]

    def untuned_cell(self, row: Row, metric: str) -> Cell | None:
        """Return the number of a tuned row's init in the untuned task, if the report has it."""
        rows = self.untuned.rows if self.untuned else ()
        return next((other.cells.get(metric) for other in rows if other.init == row.init), None)

    def cell(self, row: Row, metric: str, method: str = OWN) -> TextCell:
        """Return the formatted cell of a row; empty for methods other than `OWN`."""
        cell, gap = row.cells.get(metric), row.gaps.get(metric)
        if cell is None or method != OWN:
            return TextCell(MISSING)
        others = (other.cells[metric] for other in self.table.rows if other is not row)
        means = [round(other.mean, 1) for other in others if other is not None]
        best = bool(means) and round(cell.mean, 1) >= max(means)
        text, value = format_cell(cell, row.n), cell.mean
        if gap is None:
            return TextCell(text, value, best=best)
        significant = (row.init, metric) in self.shown
        strong = significant and is_strong(gap.printed)
        return TextCell(text, value, gap.printed, significant, bool(gap.untested), strong, best)

    @cached_property
    def gaps(self) -> list[Grid]:
        """Grids of gaps: intervals, corrections, power, bootstrap."""
        return gap_grids(self.table, self.significance)

    @cached_property
    def others(self) -> list[Grid]:
        """Grids of convergence, error types and corrupted images."""
        return analysis_grids(self.table)

    @property
    def notes(self) -> list[str]:
        """Caveats of the table, after what its numbers cover and show."""
        table = self.table
        return [uncertainty(table), *nothing_shown(table, self.significance), *self.caveats]

    @cached_property
    def caveats(self) -> list[str]:
        """Notes on few trials, missing numbers, and schedules other than the paper's."""
        table, found, trials = self.table, [], self.trials
        if any(row.n < trials for row in table.rows):
            found.append(f"{FEW_MARK} fewer than {trials} trials (the paper averages {trials})")
        found += looks_notes(table)
        missing = table.resamples.missing if table.resamples else {}
        for reason in dict.fromkeys(missing.values()):
            which = ", ".join(init for init in missing if missing[init] == reason)
            found.append(f"no interval over test images, {which}: {reason}")
        found += unread(table)
        found += reachable(table)
        found += warnings(table)
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
        shared: Results whose rows of the same protocol and data are included.
    """

    tables: Sequence[Table]
    results: Results
    progress: Progress | None = None
    near: bool = False
    shared: Sequence[Shared] = ()

    @cached_property
    def sections(self) -> list[Section]:
        """Sections, one per table."""
        names = stems(self.tables)
        pairs = zip(self.tables, names, strict=True)
        return [Section(table, name, self.tables, self.near, self.shared) for table, name in pairs]

    @cached_property
    def plots(self) -> "dict[str, Plot]":
        """Figures by file name: `{loss,ap,along}-<stem>`, and `differences-<task>` of datasets."""
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
        return found | {each.figure: plots.Plot(along_figure(each)) for each in self.along}

    @cached_property
    def compared(self) -> dict[tuple[str, str], str]:
        """Pages that compare a row with the baseline: (stem of the table, row) → file name.

        There is none while the suite is running: they would be outdated with its next run.
        """
        pairs = [
            (section.stem, row.init)
            for section in self.sections
            for row in section.table.rows
            if self.progress is None and any(row.gaps.values())
        ]
        names = file_names([(COMPARISON, *pair) for pair in pairs])
        return {pair: f"{name}.html" for pair, name in zip(pairs, names, strict=True)}

    def pages(self, section: Section) -> dict[str, str]:
        """Return the pages of `compared` of one table, by row."""
        return {init: name for (stem, init), name in self.compared.items() if stem == section.stem}

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

    @cached_property
    def along(self) -> list[Along]:
        """Transfer along pre-training, of tables with several checkpoints of one."""
        parts = (along_pretraining(s.table, s.stem, s.heading, self.tables) for s in self.sections)
        return [each for each in parts if each is not None]

    @property
    def parts(self) -> list[Collection | Along]:
        """Parts above the tables: each has a heading, grids and notes."""
        return [*self.collections, *self.along]

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
