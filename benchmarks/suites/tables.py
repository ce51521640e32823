"""Tables of a suite's runs, while they are computed and at the end."""

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report.progress import PAGE_NAME, Progress
from benchmarks.report.records import Results, Unusable, collect
from benchmarks.suites.folder import SuiteFolder, remove_stale
from benchmarks.suites.runs import DONE, FAILED, RUNNING, STOPPED, WAITING, Run
from benchmarks.suites.suite import row_of
from moco.common.errors import say

if TYPE_CHECKING:
    from benchmarks.report.content import Report

# State of a run → reason why it has no numbers.
UNDONE = {
    FAILED: "failed: {}",
    RUNNING: "unfinished: it is still running",
    STOPPED: "unfinished: it was interrupted",
    WAITING: "unfinished: it was not started",
}


def refresh_tables(out: Path, runs: Sequence[Run], baseline: str | None, progress: Progress) -> str:
    """Write the tables of the runs that are done so far, and return the HTML page."""
    from benchmarks.report.content import Report
    from benchmarks.report.render import html
    from benchmarks.report.tables import FORMATS, tables_so_far, write_files

    results = results_of(runs, reported=())  # the page lists the others in its progress
    report = Report(tables_so_far(results, baseline), results, progress)
    if report.tables:
        write_files(out, report, [name for name in FORMATS if name != html.__name__])
    return html(report)[PAGE_NAME]


def write_report(
    folder: SuiteFolder, runs: Sequence[Run], baseline: str | None
) -> "tuple[Report, list[Path]]":
    """Write the tables of the finished runs; return them without their plots, and the files."""
    from benchmarks.report.content import Report
    from benchmarks.report.tables import RESAMPLES, tables_so_far, write_files

    results = results_of(runs)
    finished = {row_of(each.record.init) for each in results.transfer}
    if finished and baseline in {row_of(each.expected.get("init", "")) for each in runs} - finished:
        instead = "random" if "random" in finished else "nothing"
        say(f"note: no run of the baseline {baseline} is done; gaps refer to {instead}")
    report = Report(tables_so_far(results, baseline, RESAMPLES), results)
    remove_stale(folder.tables)
    files = write_files(folder.tables, report)
    return replace(report), files


def write_tables(folder: SuiteFolder, runs: Sequence[Run], baseline: str | None) -> None:
    """Write and print the tables of the finished runs."""
    from benchmarks.report.render import to_terminal
    from benchmarks.report.tables import whereabouts

    report, files = write_report(folder, runs, baseline)
    if not report.tables:
        print("no run is done, so there is no table")
        return
    print(to_terminal(report, color=sys.stdout.isatty()))
    print(whereabouts(files))


def results_of(runs: Sequence[Run], reported: Collection[str] = tuple(UNDONE)) -> Results:
    """Read the records of the runs that are done; ignore other files in their folders.

    Args:
        runs: Runs of the suite.
        reported: States of other runs that the result lists with the reason of their absence.
    """
    compared = [run for run in runs if run.product is None and not run.in_grid]
    states = [(run.folder, run.state()) for run in compared]
    done = [folder for folder, state in states if state.kind == DONE]
    found = collect(done) if done else Results((), (), ())
    undone = [
        Unusable(folder, UNDONE[state.kind].format(state.text))
        for folder, state in states
        if state.kind in reported
    ]
    return Results(found.transfer, found.pretraining, tuple(undone))
