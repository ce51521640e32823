"""Terminal tables of a suite: its runs and their hours (`--dry-run`), its progress (`--status`)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from benchmarks.suites.executors.base import Executor
from benchmarks.suites.executors.slurm import with_jobs
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.forecast import Forecast, Speeds, estimate, make_forecast, speeds_of
from benchmarks.suites.runs import DONE, FAILED, QUEUED, RUNNING, STOPPED, WAITING, Run, State
from benchmarks.suites.suite import RunSpec, row_of
from moco.common.errors import plural, printable, say
from moco.common.progress import format_seconds

if TYPE_CHECKING:
    from benchmarks.report.aggregate import Table


def measured_speeds(runs: Sequence[Run], hardware: Mapping[str, Any] | None) -> Speeds:
    """Return the speeds of finished runs.

    Args:
        runs: All runs; those that are not done are ignored.
        hardware: Ignore runs on other hardware than this, in the form of records; None: on any.
    """
    states = {each.name: each.state() for each in runs}
    done = [each for each in runs if states[each.name].kind == DONE]
    if hardware is not None:
        done = [each for each in done if _ran_on(each, hardware)]
    return speeds_of(done, states, DONE)


def _ran_on(run: Run, hardware: Mapping[str, Any]) -> bool:
    record = run.record()
    recorded = (record.provenance.get("hardware") if record else None) or {}
    gpus = list(recorded.get("gpus") or ())
    same_gpus = gpus == list(hardware.get("gpus") or ())[: run.gpus]
    return same_gpus and bool(run.gpus or recorded.get("cpu") == hardware.get("cpu"))


def listing(
    specs: Sequence[RunSpec],
    runs: Sequence[Run],
    measured: Speeds,
    executor: Executor,
    retry_failed: bool = False,
) -> str:
    """Format a table of all runs with the hours of each, and the hours that are left in all."""
    unit = "GPU hours" if executor.gpus else "CPU hours"
    states = {each.name: each.state() for each in runs}
    rows, hours, unknown, number = [], 0.0, [], 0
    for spec, each in zip(specs, runs, strict=True):
        state, expected = states[each.name], estimate(each, measured)
        seconds = expected.seconds
        own = None if seconds is None else seconds * max(spec.gpus, 1) / 3600
        if state.kind == FAILED and retry_failed and not state.foreign:
            states[each.name] = replace(state, kind=STOPPED)
        if not states[each.name].settled:
            number += 1
            if own is None:
                unknown.append(spec.task)
            else:
                hours += own * (1 - each.fraction(state))
        takes = ("unknown", "") if own is None else (f"{own:.2f}", expected.source)
        row = [spec.task, spec.init, spec.seed, spec.engine, spec.gpus or "CPU"]
        rows.append([*row, spec.iterations or "?", *takes, state.kind])
    head = ["task", "init", "seed", "engine", "GPUs", "iterations", unit, "known from", "state"]
    total = f"{number} to do"
    if len(unknown) < number:
        total += f": {hours:.2f} {unit}"
    if unknown:
        which = f"{len(unknown)} of them take" if len(unknown) < number else "that takes"
        total += (
            f"; how long {which} is not known ({', '.join(dict.fromkeys(unknown))}): give "
            "--seconds-per-iteration, or let a run of each task finish"
        )
    elif number:
        parallel = executor.parallel(max(spec.gpus for spec in specs))
        left = format_seconds(make_forecast(runs, states, measured, parallel).seconds_left)
        total += f", about {left} "
        total += "without the time in the queue" if executor.remote else "here"
    return f"\n{tabulate(rows, headers=head, disable_numparse=True)}\n\n{total}"


def detectable(specs: Sequence[RunSpec], tables: Sequence["Table"]) -> str:
    """Format the smallest gap that the runs can detect, in standard deviations and in points.

    Args:
        specs: Requested runs.
        tables: Tables of the runs that are done so far, from which the points follow.
    """
    from benchmarks.report.significance import pooled_std, runs_needed, smallest_gap
    from benchmarks.report.style import STRONG_FROM, format_runs
    from detection.evaluation.metrics import titles

    lines = [
        "smallest single gap between two rows that Welch's test finds 80% of the time (p < 0.05):"
    ]
    for task in dict.fromkeys(spec.task for spec in specs):
        own = [spec for spec in specs if spec.task == task]
        files = Counter(map(row_of, {spec.init for spec in own}))
        trials = len({spec.seed for spec in own})
        # Each of several pre-trainings counts as one value, its mean over the seeds.
        n = min(number if number > 1 else trials for number in files.values())
        gap = smallest_gap(max(n, 2))
        found = f"{gap:.2f} standard deviations"
        if n == 1:
            found = f"none; 2 find {found}"
        what = plural(n, "run")
        if max(files.values()) > 1:
            what += " or pre-training" if n == 1 else " or pre-trainings"
        lines.append(f"  {task}, {what} per row: {found}")
        for table in (table for table in tables if table.title == task):
            std = pooled_std([row.cells[table.metrics[0]] for row in table.rows])
            if std and n > 1:
                lines.append(
                    f"    {gap * std:.2f} {titles(table.metrics)[0]} by the {len(table.runs)} "
                    f"{table.engine} runs so far (standard deviation {std:.2f}); "
                    f"{STRONG_FROM} takes {format_runs(runs_needed(STRONG_FROM / std), n)}"
                )
    return "\n".join(lines)


def inspect_runs(runs: Sequence[Run]) -> tuple[dict[str, State], Forecast]:
    """Read the states of runs that another process computes, and forecast their end."""
    states = with_jobs(runs, {each.name: each.state() for each in runs})
    parallel = sum(state.kind == RUNNING for state in states.values())
    return states, make_forecast(runs, states, speeds_of(runs, states, DONE), parallel)


def status(folder: SuiteFolder) -> None:
    """Print the progress of every run; write nothing."""
    content, specs = folder.read()
    runs = [folder.run(spec) for spec in specs]
    states, forecast = inspect_runs(runs)
    rows = []
    for spec, each in zip(specs, runs, strict=True):
        state, length = states[each.name], spec.iterations or "?"
        at = "" if state.kind in (WAITING, FAILED) else f"{state.iteration:.0f}/{length}"
        started = state.kind in (RUNNING, STOPPED, QUEUED)
        percent = f"{100 * each.fraction(state):.0f}%" if started and each.fraction(state) else ""
        row = [spec.task, spec.init, spec.seed, spec.engine, state.kind, at, percent, state.text]
        rows.append([printable(str(cell)) for cell in row])
    head = ["task", "init", "seed", "engine", "state", "iteration", "share", "where, or why"]
    print(tabulate(rows, headers=head, disable_numparse=True))
    kinds = [state.kind for state in states.values()]
    parts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
    left = ""
    if RUNNING in kinds:
        left = f", about {format_seconds(forecast.seconds_left)} left"
    elif QUEUED not in kinds and not all(state.settled for state in states.values()):
        left = "; nothing is running"
    say("", f"{content['suite']}: {', '.join(parts)} of {len(specs)}{left}")
