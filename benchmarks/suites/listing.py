"""What a suite takes and how far it is, as tables for the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tabulate import tabulate

from benchmarks.suites.executors.base import Executor
from benchmarks.suites.executors.slurm import with_jobs
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.forecast import Measured, estimate, foresee
from benchmarks.suites.runs import DONE, FAILED, QUEUED, RUNNING, STOPPED, WAITING, Run, State
from benchmarks.suites.suite import RunSpec
from moco.common.errors import printable
from moco.common.progress import format_seconds


def measured_speeds(runs: Sequence[Run], hardware: Mapping[str, Any] | None) -> list[Measured]:
    """Speeds of finished runs.

    Args:
        hardware: only runs on this hardware (as records have it); None: on any.
    """
    found = []
    for each in runs:
        state = each.state()
        record = each.record() if state.kind == DONE else None
        if record is None or record.iterations < 1 or state.seconds <= 0:
            continue
        own = (record.provenance or {}).get("hardware") or {}
        if hardware is None or _same_hardware(own, hardware, each.gpus):
            found.append(Measured(each.speed_key, state.seconds / record.iterations))
    return found


def _same_hardware(own: Mapping[str, Any], here: Mapping[str, Any], gpus: int) -> bool:
    if gpus:
        return list(own.get("gpus") or ()) == list(here.get("gpus") or ())[:gpus]
    return not own.get("gpus") and own.get("cpu") == here.get("cpu")


def listing(
    folder: SuiteFolder,
    specs: Sequence[RunSpec],
    measured: Sequence[Measured],
    executor: Executor,
    retry_failed: bool = False,
) -> str:
    """Every run with what it takes from its beginning, and what is left of all."""
    unit = "GPU hours" if executor.gpus else "CPU hours"
    runs = [folder.run(spec) for spec in specs]
    states = {each.name: each.state() for each in runs}
    rows, hours, unknown, number = [], 0.0, [], 0
    for spec, each in zip(specs, runs, strict=True):
        state, expected = states[each.name], estimate(each, measured)
        own = expected.hours(spec.gpus)
        again = state.kind == FAILED and retry_failed and not state.foreign
        if again:
            states[each.name] = replace(state, kind=STOPPED)
        if again or not state.settled:
            number += 1
            if own is None:
                unknown.append(spec.task)
            else:
                hours += own * (1 - each.fraction(state))
        shown = "unknown" if own is None else f"{own:.2f}"
        length = spec.iterations or "?"
        row = [spec.task, spec.init, spec.seed, spec.engine, spec.gpus or "CPU", length, shown]
        rows.append([*row, expected.source if own is not None else "", state.kind])
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
        left = format_seconds(foresee(runs, states, measured, parallel).seconds_left)
        total += f", about {left} "
        total += "without the time in the queue" if executor.remote else "here"
    return f"\n{tabulate(rows, headers=head, disable_numparse=True)}\n\n{total}"


def status(folder: SuiteFolder) -> None:
    """How far every run is; reads only."""
    content, specs = folder.read()
    runs = [folder.run(spec) for spec in specs]
    states = with_jobs(runs, {each.name: each.state() for each in runs})
    rows = []
    for spec, each in zip(specs, runs, strict=True):
        state, length = states[each.name], spec.iterations or "?"
        at = "" if state.kind in (WAITING, FAILED) else f"{state.iteration:.0f}/{length}"
        begun = state.kind in (RUNNING, STOPPED, QUEUED)
        percent = f"{100 * each.fraction(state):.0f}%" if begun and each.fraction(state) else ""
        row = [spec.task, spec.init, spec.seed, spec.engine, state.kind, at, percent]
        rows.append([*row, printable(state.text)])
    head = ["task", "init", "seed", "engine", "state", "iteration", "share", "where, or why"]
    print(tabulate(rows, headers=head, disable_numparse=True))
    kinds = [state.kind for state in states.values()]
    parts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
    print(f"\n{content['suite']}: {', '.join(parts)} of {len(specs)}{_left(runs, states)}")


def _left(runs: Sequence[Run], states: Mapping[str, State]) -> str:
    kinds = [state.kind for state in states.values()]
    if RUNNING not in kinds:
        settled = all(state.settled for state in states.values())
        return "" if QUEUED in kinds or settled else "; nothing is running"
    left = foresee(runs, states, measured_speeds(runs, None), kinds.count(RUNNING)).seconds_left
    return f", about {format_seconds(left)} left"
