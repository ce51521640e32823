"""What a report says, apart from how it looks: per table its rows, notes, evidence and provenance.

A cell is `mean ± std` and the gap to the baseline; `–` where there is no number. Printed gaps are
the differences of the printed means. Fewer trials than the paper averages are marked. The paper's
rows are in tables of their own.

All texts here are plain: what a record says is escaped by the renderers (render.py), never here.
What differs from one report of the same runs to the next, or from machine to machine (folders,
time, hardware), is in `facts` and `Section.run_rows` alone.
"""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report.aggregate import CONFIDENCE, Row, Table, stems
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
from benchmarks.report.cells import Grid, Shown, printed
from benchmarks.report.convergence import convergence_grid
from benchmarks.report.gaps import gap_grids
from benchmarks.report.isolation import isolation
from benchmarks.report.literature import LiteratureRow, rows_for
from benchmarks.report.paper import OWN, PaperTable, load_paper, tables_for
from benchmarks.report.progress import Progress
from benchmarks.report.records import Results
from benchmarks.report.significance import significance
from benchmarks.report.style import FEW_MARK, MISSING, UNVERIFIED_MARK, format_cell
from benchmarks.report.summary import Summary, summarize
from benchmarks.report.why import reasons, unread
from detection.evaluation.metrics import titles

if TYPE_CHECKING:
    from benchmarks.report.plots import Plot

Column = tuple[str, str]  # metric, and whose pre-training: the paper's "method"
LIVE_RUNS = 500  # that a page lists while its suite is computed


@dataclass(frozen=True)
class Published:
    """Published rows of one protocol.

    Attributes:
        differs: from the protocol of the table; empty if it is the same.
    """

    differs: tuple[str, ...]
    rows: Sequence[LiteratureRow]

    @property
    def title(self) -> str:
        if not self.differs:
            return "Published elsewhere, same protocol"
        return f"Published elsewhere, not comparable: {', '.join(self.differs)}"

    @property
    def note(self) -> str:
        note = f"Not measured here. n: runs that a number averages, {MISSING} if not stated"
        unverified = any(row.unverified for row in self.rows)
        return f"{note}. {UNVERIFIED_MARK} not verified in the source" if unverified else note

    def cells(self, columns: Sequence[Column]) -> list[list[Shown]]:
        """Name, n, the number of each column, and the source."""
        return [
            [
                Shown(row.name),
                Shown(str(row.n or MISSING), row.n),
                *(_published(row, *column) for column in columns),
                Shown(row.source),
            ]
            for row in self.rows
        ]


class Section:
    """One table as a report shows it.

    Args:
        stem: the table's name among `stems`.
        tables: all of the report.
        near: also published rows of near protocols.
    """

    def __init__(
        self, table: Table, stem: str, tables: Sequence[Table], near: bool = False
    ) -> None:
        self.table, self.stem = table, stem
        self.heading = heading(table, tables)
        self.setting = setting(table)
        # Of the paper those of this task; of a detection task only on the data of this table.
        self.papers = tables_for(table.task, table.tested_on)
        groups = rows_for(table.runs[0].record.config, table.metrics, near)
        self.published = [Published(differs, rows) for differs, rows in groups.items()]
        self.columns = [(metric, OWN) for metric in table.metrics]
        self.titles = list(titles(table.metrics))
        self.head = ["pre-train", "n", *self.titles]
        self.published_head = [*self.head, "source"]
        # How many trials the paper averages; 0 where it does not say.
        self.trials = max((paper.trials or 0 for paper in self.papers), default=0)
        self.anchor, self.runs_anchor = f"table-{_slug(stem)}", f"runs-{_slug(stem)}"
        self.runs_head = ["seed", *self.titles, "iterations", "time", "finished", "folder"]
        self.significance = significance(table)
        self.holm = {(each.row.init, each.metric): each.holm for each in self.significance}
        self.isolation = [str(each) for each in isolation(table)]

    def rows(self, columns: Sequence[Column] | None = None) -> list[list[Shown]]:
        """Name, n, marked where the paper averages more trials, and a cell per column."""
        return [
            [
                Shown(row.init),
                Shown(f"{row.n}{FEW_MARK if row.n < self.trials else ''}", row.n),
                *(self._cell(row, *column) for column in columns or self.columns),
            ]
            for row in self.table.rows
        ]

    def _cell(self, row: Row, metric: str, method: str) -> Shown:
        cell, gap = row.cells.get(metric), row.gaps.get(metric)
        if cell is None or method != OWN:
            return Shown(MISSING)
        others = (other.cells[metric] for other in self.table.rows if other is not row)
        means = [round(other.mean, 1) for other in others if other is not None]
        best = bool(means) and round(cell.mean, 1) >= max(means)
        text, value = format_cell(cell, row.n), cell.mean
        if gap is None:
            return Shown(text, value, best=best)
        significant = self.holm.get((row.init, metric), 1.0) < 1 - CONFIDENCE
        return Shown(text, value, gap.printed, significant, best)

    @cached_property
    def gaps(self) -> list[Grid]:
        return gap_grids(self.table, self.significance)

    @cached_property
    def others(self) -> list[Grid]:
        return [*convergence_grid(self.table), *reasons(self.table)]

    @cached_property
    def notes(self) -> list[str]:
        """What a reader of the table has to know: few trials, missing numbers, other lengths."""
        table, found, trials = self.table, [], self.trials
        if any(row.n < trials for row in table.rows):
            found.append(f"{FEW_MARK} fewer than {trials} trials (the paper averages {trials})")
        found.append(uncertainty(table))
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
        return f"{self.runs_anchor}--{_slug(row.init)}"

    def run_rows(self, row: Row, listed: Container[Path] | None = None) -> list[list[Shown]]:
        """Per run of a row (of those in `listed`) its seed, metrics, length, time and folder."""
        return [
            [
                Shown(trial(run), run.record.seed),
                *(printed(run.record.metrics.get(metric)) for metric in self.table.metrics),
                Shown(str(run.record.iterations), run.record.iterations),
                Shown(f"{run.record.seconds:.0f} s", run.record.seconds),
                Shown(run.finished or MISSING),
                Shown(str(run.folder)),
            ]
            for run in row.runs
            if listed is None or run.folder in listed
        ]


@dataclass(frozen=True)
class Report:
    """Tables and the runs behind them: what a renderer gets.

    Attributes:
        progress: of a suite that is being computed; only the page shows it.
        near: whether published rows of near protocols are shown, too.
    """

    tables: Sequence[Table]
    results: Results
    progress: Progress | None = None
    near: bool = False

    @cached_property
    def sections(self) -> list[Section]:
        names = stems(self.tables)
        pairs = zip(self.tables, names, strict=True)
        return [Section(table, name, self.tables, self.near) for table, name in pairs]

    @cached_property
    def plots(self) -> "dict[str, Plot]":
        """Per table `loss-<stem>` and `ap-<stem>`, by name."""
        from benchmarks.report import plots

        found = {}
        for section in self.sections:
            table, title = section.table, section.heading
            losses = plots.losses(table, self.results)
            found[f"loss-{section.stem}"] = plots.Plot(plots.loss_figure(losses, title))
            found[f"ap-{section.stem}"] = plots.Plot(plots.ap_figure(table, title))
        return found

    @cached_property
    def listed(self) -> set[Path] | None:
        """Folders of the runs that the page lists: all (None), or the newest while it is live."""
        if self.progress is None:
            return None
        runs = [run for table in self.tables for run in table.runs]
        return {run.folder for run in sorted(runs, key=lambda run: run.finished)[-LIVE_RUNS:]}

    @cached_property
    def summary(self) -> Summary | None:
        return summarize(self.tables)

    @property
    def citation(self) -> str:
        """Of the paper; empty where no table has rows of it."""
        return load_paper()[0] if any(section.papers for section in self.sections) else ""


def paper_rows(paper: PaperTable, columns: Sequence[Column]) -> list[list[Shown]]:
    """The paper's rows: name and, per column, the value with its printed gap."""
    return [
        [Shown(row.name), *(printed(*paper.number_of(row, *column)) for column in columns)]
        for row in paper.rows
    ]


def _published(row: LiteratureRow, metric: str, method: str) -> Shown:
    value = row.values.get(metric) if method == OWN else None
    shown = printed(value)
    return Shown(f"{shown.text}{UNVERIFIED_MARK}", value) if metric in row.unverified else shown


def arrange(sections: Sequence[Section]) -> list[list[tuple[PaperTable | None, list[Section]]]]:
    """Sections in the order of the paper's tables, the parts of one number together.

    A task that several of the paper's tables are about is in each; one that none is about is
    alone, at the end, with None for the paper's.
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
