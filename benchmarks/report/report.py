"""Tables and content of a report, independent of its format: rows, notes, provenance per table.

A cell is `mean ± std` and the gap to the baseline, or `–` if there is no number. Printed gaps are
the differences of the printed means. Rows with fewer trials than the paper averages are marked.
The paper's rows are in separate tables, as are results of others (the bundles of `results/`) with
the same protocol hash and data digests as a table; they never enter a mean.

All texts are plain; renderers (export.py) escape texts from records. Facts that vary between
machines or repeated reports of the same runs (folders, time, hardware) are only in `facts` and
`Section.run_rows`.
"""

import re
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report.along import TransferCurves, transfer_curves, transfer_figure
from benchmarks.report.analysis import (
    Cells,
    analysis_grids,
    convergence_cells,
    floor,
    outdated_files,
    still_rising,
)
from benchmarks.report.datasets import Collection, Summary, collections, summarize
from benchmarks.report.isolation import isolation, shortened
from benchmarks.report.published import (
    OWN,
    LiteratureRow,
    PaperTable,
    load_paper,
    rows_for,
    tables_for,
    tags_of,
)
from benchmarks.report.records import About, FinishedRun, Results
from benchmarks.report.stats import (
    different,
    gap_grids,
    how_sure,
    nothing_shown,
    significance,
    uncertainty,
)
from benchmarks.report.style import (
    EACH,
    FEW_MARK,
    MISSING,
    UNVERIFIED_MARK,
    Progress,
    file_names,
    format_seeds,
    is_strong,
)
from benchmarks.report.table import (
    EPOCHS,
    LOGME_NOTE,
    LOGME_TITLE,
    Cell,
    Grid,
    Row,
    Table,
    TextCell,
    format_cell,
    has_logme,
    heading,
    legend,
    logme_cell,
    printed,
    row_of,
    setting,
    stems,
    untuned,
)
from benchmarks.report.trust import Trust, frozen_against_tuned
from detection.config.keys import at_edge, tuned_axes, tuned_values
from detection.evaluation.metrics import titles
from detection.modeling.backbones import frozen_random
from moco.common.command import RANDOM
from moco.common.errors import UserError, first_few, plural

if TYPE_CHECKING:
    from benchmarks.report.plots import Plot

AT_EDGE = "at the edge"  # of the grid
COMPARISON = "compare"  # first part of the name of a page of two rows
Column = tuple[str, str]  # metric and method; the method is whose pre-training the paper used
LIVE_RUNS = 500  # maximum number of runs that the page lists while its suite is running


def reachable(table: Table) -> list[str]:
    """Return notes on test splits on which perfect predictions score less than 100."""
    found: dict[str, list[str]] = {}
    for run in table.runs:
        scored = run.record.reachable or {}
        if faults := scored.get("faults"):
            shown = [
                f"{title} {scored['highest'][metric]:.1f}"
                for metric, title in zip(table.metrics, titles(table.metrics), strict=True)
                if metric in scored.get("highest", {})
            ]
            text = f"{', '.join(shown)} ({'; '.join(faults)})"
            found.setdefault(text, []).append(str(run.folder))
    of_some = len(found) > 1 or sum(map(len, found.values())) < len(table.runs)
    return [
        f"perfect predictions reach {text}" + (f" in {first_few(folders, 3)}" if of_some else "")
        for text, folders in found.items()
    ]


def warnings(table: Table) -> list[str]:
    """Return the warnings in the records of the runs, without duplicates."""
    return list(dict.fromkeys(text for run in table.runs for text in run.record.warnings))


def never_trained(table: Table) -> list[str]:
    """Return notes on layers of the `random` row that stayed at their random initialization."""
    configs = [run.record.config for row in table.rows if row.init == RANDOM for run in row.runs]
    notes = dict.fromkeys(note for config in configs for note in frozen_random(config))
    return [f"{RANDOM}: {note}" for note in notes]


def tuned(table: Table) -> list[str]:
    """Return the note on the grid from which tuned values were chosen, if any."""
    grid = table.runs[0].record.config.get("SOLVER.TUNED", "")
    if not grid:
        return []
    text = "chosen for each row on held-out training images, by one run of each point of "
    return [f"{text}{grid}; {AT_EDGE}: a better value may lie outside the grid"]


def tuned_keys(table: Table) -> list[str]:
    """Return the keys of the grid from which tuned values were chosen."""
    return [*tuned_axes(table.runs[0].record.config)]


def tuned_value(row: Row, key: str) -> str:
    """Format the value of a key that tuning chose for a row: `0.04 (at the edge)`."""
    return _by_seed(row, lambda run: _tuned_value(run, key))


def _tuned_value(run: FinishedRun, key: str) -> str:
    value = tuned_values(run.record.config).get(key, MISSING)
    with suppress(ValueError, LookupError):  # a record edited by hand may hold anything
        edge = at_edge(value, tuned_axes(run.record.config)[key])
        return f"{value} ({AT_EDGE if edge else 'inside'})"
    return value


def facts(row: Row) -> list[tuple[str, str]]:
    """Return the provenance of a row as (name, text) pairs; differing texts are listed by seed."""
    seconds = sum(run.record.seconds for run in row.runs)
    return [
        ("weights' sha256", _by_seed(row, _weights)),
        ("weights made from", _by_seed(row, lambda run: run.record.weights_source or "")),
        ("label", _by_seed(row, lambda run: run.label)),
        ("seeds", ", ".join(map(trial, row.runs))),
        ("config's sha256", _by_seed(row, lambda run: run.record.config_sha256)),
        ("versions", _by_seed(row, lambda run: run.versions)),
        ("hardware", _by_seed(row, lambda run: run.hardware)),
        ("time", f"{seconds:.0f} s in {plural(len(row.runs), 'run')}"),
        ("notes", _by_seed(row, lambda r: "; ".join((*r.record.notes, *r.record.warnings)))),
    ]


def _weights(run: FinishedRun) -> str:
    random = run.record.init == RANDOM
    return run.record.weights_sha256 or ("none: random" if random else "none")


def trial(run: FinishedRun) -> str:
    """Return the seed of a run and, if its row has several, the number of the pre-training."""
    number = row_of(run.record.init)[1]
    return f"{run.record.seed} of pre-training {number}" if number else str(run.record.seed)


def _by_seed(row: Row, text: Callable[[FinishedRun], str]) -> str:
    """Return the text that all runs of a row share, or each text with its seeds."""
    seeds: dict[str, list[str]] = {}
    for run in row.runs:
        seeds.setdefault(text(run) or MISSING, []).append(trial(run))
    if len(seeds) == 1:
        return next(iter(seeds))
    return " / ".join(f"{text} ({format_seeds(of)})" for text, of in seeds.items())


def missing_numbers(row: Row, metrics: Sequence[str]) -> list[str]:
    """Return a note for each number that a run of the row lacks.

    Metrics that no run of the row reports, not even as null, get no note.
    """
    found = []
    for metric, title in zip(metrics, titles(metrics), strict=True):
        if not any(metric in run.record.metrics for run in row.runs):
            continue
        for record in (run.record for run in row.runs if run.record.metrics.get(metric) is None):
            reason = "not a number" if metric in record.metrics else "not reported"
            found.append(f"{record.init}, seed {record.seed}: no {title} ({reason})")
        cell = row.cells.get(metric)
        if cell is not None and cell.n < row.n:
            found.append(
                f"{row.init}: {title} is the mean of {cell.n} of {row.n} "
                f"{'pre-trainings' if row.several else 'runs'}, and its gap excludes the others, "
                "which may be the worst"
            )
    return found


def versions(runs: Sequence[FinishedRun]) -> str:
    """Format the packages whose version differs between runs: `torch (2.4.0 / 2.5.1)`."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for package, version in (run.record.provenance.get("versions") or {}).items():
            found.setdefault(package, set()).add(str(version))
    return ", ".join(f"{p} ({' / '.join(sorted(v))})" for p, v in found.items() if len(v) > 1)


@dataclass(frozen=True)
class Shared:
    """Results of one bundle.

    Attributes:
        name: Name of the bundle's file, without its ending.
        about: Who measured them, and where the weights are.
        results: Runs of the bundle.
        tables: Tables of the runs.
    """

    name: str
    about: About
    results: Results
    tables: tuple[Table, ...]

    @property
    def source(self) -> str:
        """Citation of a row: bundle and authors."""
        return f"results/{self.name}.zip, measured by {self.about.measured_by}"


def shared_rows(table: Table, shared: Sequence[Shared]) -> list[LiteratureRow]:
    """Return the rows of bundles whose protocol and data equal those of a table."""
    own = identity(table.runs[0])
    return [
        LiteratureRow(
            method=row.init,
            pretrain=None,
            epochs=None,
            n=row.n,
            source=each.source,
            tags={tag: value or "" for tag, value in tags_of(row.runs[0].record.config).items()},
            values={name: cell.mean for name, cell in row.cells.items() if cell is not None},
            unverified=frozenset(),
        )
        for each in shared
        for theirs in each.tables
        if identity(theirs.runs[0]) == own
        for row in theirs.rows
    ]


def identity(run: FinishedRun) -> tuple[object, ...]:
    """Return the facts that all runs of a table share: kind, protocol and data."""
    record = run.record
    return record.kind, record.config_sha256, run.tested_on, record.provenance.get("data")


@dataclass(frozen=True)
class Published:
    """Published rows of one protocol.

    Attributes:
        differs: Differences from the protocol of the table, empty if there are none.
        rows: Rows in the order of the file.
        shared: True for results of this project on the same data.
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
        self.papers = tables_for(table.runs[0].record.task, table.tested_on)
        groups = rows_for(table.runs[0].record.config, table.metrics, near)
        self.published = [Published(differs, rows) for differs, rows in groups.items()]
        if beside := shared_rows(table, shared):
            self.published.append(Published((), beside, shared=True))
        self.columns = [(metric, OWN) for metric in table.metrics]
        self.titles = list(titles(table.metrics))
        head = ["pre-train", "n", *self.titles]
        self.published_head = [*head, "source"]
        self.untuned = untuned(table, tables)
        self.tuned_head = tuned_keys(table)
        self.tuned_head += [f"untuned {self.titles[0]}"] if self.tuned_head else []
        self.more_head = [*self.tuned_head, *([LOGME_TITLE] if has_logme(table) else [])]
        self.head = [*head, *self.more_head]
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
        self.legend = legend(gaps, table.baseline) if len(table.rows) > 1 else ""
        self.ending = [
            different(table, self.significance),
            how_sure(table, self.significance, self.isolation),
        ]

    def rows(self, columns: Sequence[Column] | None = None) -> list[list[TextCell]]:
        """Return rows of formatted cells: name, n (marked if the paper averages more), columns.

        The table's own columns are followed by what was tuned, the result without tuning, and
        LogME.
        """
        return [
            [
                TextCell(row.init),
                TextCell(f"{row.n}{FEW_MARK if row.n < self.trials else ''}", row.n),
                *(self.cell(row, *column) for column in columns or self.columns),
                *([] if columns else self._tuned(row)),
                *([] if columns or LOGME_TITLE not in self.more_head else [logme_cell(row)]),
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
        return analysis_grids(self.table, self.convergence)

    @cached_property
    def convergence(self) -> Cells:
        """First metric of each row along the schedule."""
        return convergence_cells(self.table)

    @property
    def notes(self) -> list[str]:
        """Caveats of the table, after what its numbers cover and show."""
        table = self.table
        return [uncertainty(table), *nothing_shown(table, self.significance), *self.caveats]

    @cached_property
    def caveats(self) -> list[str]:
        """Notes on rows that learned too little, missing numbers, and other schedules."""
        table, trials = self.table, self.trials
        found = [*floor(table), *still_rising(table, self.convergence)]
        if any(row.n < trials for row in table.rows):
            found.append(f"{FEW_MARK} fewer than {trials} trials (the paper averages {trials})")
        found += table.notes
        missing = table.resamples.missing if table.resamples else {}
        for reason in dict.fromkeys(missing.values()):
            which = ", ".join(init for init in missing if missing[init] == reason)
            found.append(f"no interval over test images, {which}: {reason}")
        found += outdated_files(table)
        found += reachable(table)
        found += warnings(table)
        found += never_trained(table)
        found += tuned(table)
        found += [LOGME_NOTE] if has_logme(table) else []
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
        return found | {
            each.figure: plots.Plot(transfer_figure(each)) for each in self.transfer_curves
        }

    @cached_property
    def compared(self) -> dict[tuple[str, str], str]:
        """Pages that compare a row with the baseline: (stem of the table, row) → file name.

        Empty while the suite is running, as the next run would make the pages outdated.
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
        """Summary over all tables; None for a single table or the tables of one collection."""
        known = {name for each in self.collections for name in each.datasets}
        return None if known >= {t.title for t in self.tables} else summarize(self.tables)

    @cached_property
    def collections(self) -> list[Collection]:
        """Summaries over datasets, for suites with one task on many datasets."""
        return collections(self.tables, self.results)

    @cached_property
    def transfer_curves(self) -> list[TransferCurves]:
        """Transfer along pre-training, for tables with several checkpoints of a pre-training."""
        parts = (transfer_curves(s.table, s.stem, s.heading, self.tables) for s in self.sections)
        return [each for each in parts if each is not None]

    @cached_property
    def trust(self) -> list[Trust]:
        """Agreement of frozen with fine-tuned backbones, for each dataset that has both."""
        return frozen_against_tuned(self.tables)

    @property
    def parts(self) -> list[Collection | TransferCurves | Trust]:
        """Sections above the tables, each with a heading, grids and notes."""
        return [*self.collections, *self.transfer_curves, *self.trust]

    @property
    def citation(self) -> str:
        """Citation of the paper, or "" if no table has rows of the paper."""
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


def make_tables(
    results: "Results",
    baseline: str | None = None,
    engine: str | None = None,
    margin: float | None = None,
    resamples: int = 0,
) -> list["Table"]:
    """Make tables of all finished runs.

    Args:
        results: Runs of the tables.
        baseline: Name of the row that gaps refer to. None selects `random` if there is such a row.
        engine: Engine whose runs are used, or `each` for one table per engine. None requires that
            all runs are of one engine.
        margin: Largest gap, in points, that counts as equivalence; None skips that test.
        resamples: Number of bootstrap resamples of the test images
            (benchmarks/report/bootstrap.py), or 0 for none.

    Raises:
        UserError: If there is no finished run (of the engine), or runs must not be averaged.
    """
    from benchmarks.report.table import aggregate

    if not results.transfer:
        reasons = "; ".join(f"{item.folder}: {item.reason}" for item in results.unusable[:3])
        raise UserError(f"no finished run to make a table of ({reasons or 'none found'})")
    engines = sorted({run.record.engine for run in results.transfer})
    if engine not in (None, EACH, *engines):
        raise UserError(
            f"--engine {engine}: no such runs; choices are {', '.join([*engines, EACH])}"
        )
    if engine is None:
        tables = aggregate(results.transfer, baseline)
    else:
        chosen = engines if engine == EACH else [engine]
        groups = [[r for r in results.transfer if r.record.engine == name] for name in chosen]
        tables = [table for group in groups for table in aggregate(group, baseline)]
    if resamples:
        from benchmarks.report.bootstrap import over_images

        tables = [replace(table, resamples=over_images(table, resamples)) for table in tables]
    return [replace(table, margin=margin) for table in tables]


def tables_so_far(results: "Results", baseline: str | None, resamples: int = 0) -> list["Table"]:
    """Make tables of a suite that may be unfinished, or none if no run is done.

    Args:
        results: Runs of the suite.
        baseline: Name of the row that gaps refer to, ignored until a run of the row is done.
        resamples: Number of bootstrap resamples of the test images, or 0 for none.

    Raises:
        UserError: If runs must not be averaged.
    """
    if not results.transfer:
        return []
    from benchmarks.report.table import row_of

    finished = {row_of(run.record.init)[0] for run in results.transfer}
    known = baseline if baseline in finished else None
    return make_tables(results, known, EACH, resamples=resamples)
