"""From a list of checkpoints to the tables: run a suite to its end, or resume it.

    python -m benchmarks.run_suite configs/suites/voc.yaml --init mine=my.pth \\
        --init supervised=r50.pth --init random --trials 5

    ... --dry-run     list the runs and the hours that they take, check everything, start nothing
    ... --status      how far a running suite is, from another shell
    ... --tune        choose the learning rate of every init from one grid first

Everything is checked before the first run starts. Interrupted at any moment, the same command
continues; several may work on one folder. A run that fails does not stop the others, and is in no
number.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import benchmarks.suites.executors  # noqa: F401 - registers them
from benchmarks.report.progress import Progress
from benchmarks.suites.checks import Findings, option_pairs
from benchmarks.suites.data_digest import data_digests
from benchmarks.suites.executors.base import EXECUTORS, Executor, Options
from benchmarks.suites.folder import (
    SuiteFolder,
    identify,
    project_version,
    remove_stale,
    requested,
)
from benchmarks.suites.keep import FINAL, KEEP, disk_line, remove_checkpoints
from benchmarks.suites.listing import detectable, listing, measured_speeds, status
from benchmarks.suites.live import Live, of_runs, results_of
from benchmarks.suites.programs import Programs
from benchmarks.suites.runs import DONE, FAILED, Run, State
from benchmarks.suites.scheduler import Scheduler
from benchmarks.suites.suite import Init, RunSpec, Suite, expand, row_of
from benchmarks.suites.suite_file import load_suite, parse_inits, with_options, without_tasks
from benchmarks.suites.tuning import choose, describe, grid_suite, with_tuned
from detection.evaluation.metrics import headline_names
from moco.common.command import RANDOM, program
from moco.common.errors import NumericError, UserError, first_few, plural, printable, run_cli, say
from moco.common.shipped import resolve

ENGINES = ("auto", "detectron2", "embedded", "each")


class SuiteFailed(UserError):
    """Some runs failed; the others have their numbers."""

    exit_code = 1


def main(argv: Sequence[str] | None = None, programs: Programs | None = None) -> None:
    args = build_parser().parse_args(argv)
    suite = without_tasks(load_suite(resolve(args.suite)), args.skip)
    folder = SuiteFolder(args.output or Path("output", suite.name))
    grids = SuiteFolder(Path(f"{folder.path}-tuning"))  # beside it: the grids have no table
    if args.status:
        for each in (grids, folder) if args.tune and grids.path.is_dir() else (folder,):
            status(each)
        return
    stated = parse_stated(args.seconds_per_iteration)
    suite = with_options(suite, option_pairs(suite.tasks, args.opts), stated, args.trials)
    programs = programs or Programs()
    for name in args.skip:
        print(f"left out: {name}, by --skip")
    if args.tune:
        suite = tune(suite, grids, args, programs)
    run(suite, folder, args, programs)


def tune(suite: Suite, folder: SuiteFolder, args: argparse.Namespace, programs: Programs) -> Suite:
    """Run every grid, and return the suite with its tuned tasks.

    With `--dry-run` the tuned tasks have the values of the untuned ones, as long as there are none.

    Raises:
        UserError: as `run`; a run of a grid failed of something else than its learning rate; all of
            an init did.
    """
    if args.engine == "each":
        raise UserError("--tune: chooses for one engine; give --engine detectron2 or embedded")
    suite_of_grids, points = grid_suite(suite)
    found: dict[tuple[str, str], float] = {}
    undone = []
    for spec in run(suite_of_grids, folder, args, programs, tables=False):
        each = folder.run(spec)
        record = each.record()
        if record is not None and record.status == "done":
            value = record.metrics[headline_names(record.metrics)[0]]
            found[spec.task, spec.init] = math.nan if value is None else value
        elif diverged(each):
            found[spec.task, spec.init] = math.nan
        else:
            undone.append(spec.title)
    if undone or not found:
        if args.dry_run:
            return with_tuned(suite, {})
        raise SuiteFailed(f"the grid is not complete: {first_few(undone)}; see above")
    choices = choose(suite, points, found)
    print(describe(choices), flush=True)
    return with_tuned(suite, choices)


def run(
    suite: Suite,
    folder: SuiteFolder,
    args: argparse.Namespace,
    programs: Programs,
    *,
    tables: bool = True,
) -> tuple[RunSpec, ...]:
    """Check, run, report; with `--dry-run` only check and list.

    Args:
        tables: whether there is something to compare; else a training that diverges is a result.

    Returns:
        All runs of the suite.

    Raises:
        UserError: something that a run would fail of, before anything has started.
        Preempted: stopped by a signal.
        SuiteFailed: after everything else: some runs failed.
    """
    print(f"suite {suite.name}: reading tasks and weights", flush=True)
    keep = args.keep or FINAL
    executor = make_executor(args.executor, Options(folder.path, args.workers, args.slurm, keep))
    weights = parse_inits(args.init) if args.init else dict(suite.inits)
    if not weights:
        raise UserError(
            f"suite {suite.name}: names no init; give --init [NAME=]WEIGHTS for each row, e.g. "
            "--init random --init mine=weights.pth"
        )
    rows = dict.fromkeys(map(row_of, weights))
    if args.baseline is not None and args.baseline not in rows:
        choices = ", ".join(rows)
        raise UserError(f"--baseline {args.baseline}: no such init; choices are {choices}")
    later: dict[str, Init] = {}
    if args.dry_run:
        for init, what in programs.not_downloaded(weights).items():
            print(f"would download {init}: {what}; its runs are checked as if from random weights")
            later[init] = Init(weights.pop(init), None)
    inits = identify(programs.locate(weights)) | later
    engines = programs.choose_engines(args.engine)
    version, data = project_version(), data_digests(suite, folder.data_before())
    keys: dict[str, Any] = {"version": version, "gpus": args.gpus_per_run, "data": data}
    specs = expand(suite, inits, engines, available=executor.gpus, **keys)
    machines = {size: executor.machines(size) for size in {spec.gpus for spec in specs}}
    content = requested(suite, inits, engines, **keys)
    folder.check(content)
    opening = f"{suite.title or suite.name}: {plural(len(specs), 'run')}"
    print(f"{opening}, {executor.where()}, in {folder.path}", flush=True)
    undone = [spec for spec in specs if folder.run(spec).state().kind != DONE]
    checked = [replace(s, weights=RANDOM) if s.init in later else s for s in undone]
    findings, problems = check_open(checked, executor, programs)
    if not args.dry_run:
        refuse(problems)
    specs = tuple(with_length(folder, spec, findings) for spec in specs)
    hardware = None if executor.remote else findings.hardware or None
    seen = [folder.run(spec) for spec in specs]
    measured = measured_speeds(seen, hardware)
    if args.dry_run:
        print(listing(specs, seen, measured, executor, args.retry_failed))
        open_ = [spec for spec, each in zip(specs, seen, strict=True) if not each.state().settled]
        if open_:
            print(disk_line(open_, findings.checkpoints, keep, folder.path))
        if tables:
            from benchmarks.make_table import tables_so_far

            print(f"\n{detectable(specs, tables_so_far(results_of(seen), None))}")
        refuse(problems)
        print("\nchecked every task, dataset and weights file; nothing was started")
        return specs
    folder.agree(content, specs)
    given = folder.copy_weights(inits)

    def make_run(spec: RunSpec) -> Run:
        own = replace(spec, weights=given[spec.init])
        path = folder.run(spec).folder
        return folder.run(spec, partial(programs.command, own, path, machines[spec.gpus]))

    runs, baseline = [make_run(spec) for spec in specs], args.baseline or suite.baseline
    shown = runs if tables else []
    refresh = partial(refresh_tables, folder.tables, shown, baseline, lock=folder.lock)
    with Live(suite.title or suite.name, runs, refresh) as live:
        states = Scheduler(
            runs,
            executor,
            retry_failed=args.retry_failed,
            measured=measured,
            stop_seconds=args.stop_seconds,
            keep=keep,
            watch=live.update,
        ).run()
        live.pause()
        if args.keep:  # else runs that were done before stay as they are
            for each in runs:
                if states[each.name].kind == DONE:
                    remove_checkpoints(each.folder, args.keep, done=True)
        if tables:
            of_runs(runs, write_tables, folder, runs, baseline)
    if not tables:
        runs = [each for each in runs if not diverged(each)]
    raise_failures(runs, states)
    return specs


def diverged(each: Run) -> bool:
    """Whether its training ended because a loss was not finite."""
    record = each.record()
    if record is None or record.status != "failed" or not record.notes:
        return False
    return record.notes[-1].startswith(f"{NumericError.__name__}:")


def make_executor(name: str, options: Options) -> Executor:
    """The executor that `--executor` names.

    Raises:
        UserError: it cannot work here, or not with these options.
    """
    if options.slurm and name != "slurm":
        raise UserError(f"--slurm {options.slurm[0]}: is for --executor slurm; got {name}")
    executor: Executor = EXECUTORS.get(name)(options)
    return executor


def check_open(
    specs: Sequence[RunSpec], executor: Executor, programs: Programs
) -> tuple[Findings, list[str]]:
    """Check the runs that are not done; also returns all problems, of the executor too."""
    if not specs:
        return Findings(), []
    # The GPUs of a cluster are not here.
    on_gpus = executor.gpus > 0 and not executor.remote
    findings = programs.check(specs, on_gpus)
    for note in findings.notes:
        say(f"note: {note}")
    return findings, [*findings.problems, *executor.problems({spec.gpus for spec in specs})]


def refuse(problems: Sequence[str]) -> None:
    """Raise UserError for all that would fail, one line for each."""
    if len(problems) == 1:
        raise UserError(f"nothing was started: {problems[0]}")
    if problems:
        print(*(printable(f"problem: {each}") for each in problems), sep="\n", file=sys.stderr)
        raise UserError(f"nothing was started: {len(problems)} problems, see above")


def with_length(folder: SuiteFolder, spec: RunSpec, findings: Findings) -> RunSpec:
    """The run with its number of iterations, from the check or from its record."""
    length = findings.iterations.get((spec.task, spec.engine, spec.init))
    if not length:
        state = folder.run(spec).state()
        length = int(state.iteration) if state.kind == DONE else spec.iterations
    return replace(spec, iterations=length)


def raise_failures(runs: Sequence[Run], states: Mapping[str, State]) -> None:
    """Print what failed and what was cancelled.

    Raises:
        SuiteFailed: some runs failed, or their jobs were cancelled.
    """
    failed = [each for each in runs if states[each.name].kind == FAILED]
    cancelled = [each for each in runs if not states[each.name].settled]
    for what, which in (("failed", failed), ("cancelled", cancelled)):
        for each in which:
            print(f"{what}: {each.title}: {printable(states[each.name].text)}", file=sys.stderr)
    if failed:
        raise SuiteFailed(
            f"{len(failed)} of {len(runs)} runs failed and are in no number; fix what is named "
            "above, then the same command with --retry-failed"
        )
    if cancelled:
        raise SuiteFailed(
            f"the jobs of {len(cancelled)} of {len(runs)} runs were cancelled; the same command "
            "submits them again, and they resume from their checkpoints"
        )


def refresh_tables(
    out: Path,
    runs: Sequence[Run],
    baseline: str | None,
    progress: Progress,
    lock: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Write the tables of the runs that are done so far, and the page."""
    from benchmarks.make_table import FORMATS, tables_so_far, write_files
    from benchmarks.report.content import Report

    results = results_of(runs, reported=())  # the page has the others in its progress
    report = Report(tables_so_far(results, baseline), results, progress)
    with lock():
        write_files(out, report, FORMATS if report.tables else ("html",))


def write_tables(folder: SuiteFolder, runs: Sequence[Run], baseline: str | None) -> None:
    """Write and print the tables of the finished runs."""
    from benchmarks.make_table import RESAMPLES, tables_so_far, write_files
    from benchmarks.report.content import Report
    from benchmarks.report.render import to_terminal

    results = results_of(runs)
    finished = {row_of(each.record.init) for each in results.transfer}
    if finished and baseline in {row_of(each.expected["init"]) for each in runs} - finished:
        instead = "random" if "random" in finished else "nothing"
        print(f"note: no run of the baseline {baseline} is done; gaps refer to {instead}")
    report = Report(tables_so_far(results, baseline, RESAMPLES), results)
    with folder.lock():  # another runner may have come to its end as well
        remove_stale(folder.tables)
        files = write_files(folder.tables, report)
    if not report.tables:
        print("no run is done, so there is no table")
        return
    print(to_terminal(report, color=sys.stdout.isatty()))
    print("\nFiles:", *files, sep="\n  ")
    page = next(path for path in files if path.suffix == ".html")
    print("\nNext:")
    say(f"  open {page} in a browser")
    make_table = program("table", "python -m benchmarks.make_table")
    say(f"  {make_table} {shlex.quote(str(folder.runs))} --engine each")


def parse_stated(arguments: Sequence[str]) -> dict[str, float]:
    """`0.3` for every task, `TASK=0.3` for one.

    Raises:
        UserError: not a number.
    """
    stated = {}
    for argument in arguments:
        name, _, number = argument.rpartition("=")
        try:
            stated[name] = float(number)
        except ValueError:
            raise UserError(
                f"--seconds-per-iteration: got {argument!r}, expected a number, or TASK=number"
            ) from None
    return stated


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("suite", "python -m benchmarks.run_suite"),
        description="Fine-tune every task of a suite from every init in several trials, "
        "and write the tables. Interrupted, the same command continues; several may share a "
        "folder.",
    )
    add = parser.add_argument
    several: dict[str, Any] = {"action": "append", "default": []}
    add("suite", metavar="SUITE", help="a file or a shipped name, e.g. voc")
    rows = (
        "a row of the tables: weights under a name, or random; may be repeated. Weights are a "
        "file, or a name or address (see moco-transfer weights --help); NAME=A,B,C are several "
        "pre-trainings of one row"
    )
    add("--init", **several, metavar="[NAME=]WEIGHTS", help=rows)
    add("--skip", **several, metavar="TASK", help="leave a task out; may be repeated")
    add("--trials", type=int, help="seeds per row, 0, 1, ... (default: the suite's)")
    add("--baseline", metavar="NAME", help="the init that gaps refer to")
    add("--output", type=Path, metavar="DIR", help="folder of the suite (output/<suite>)")
    engines = "for detection; auto: detectron2 where it can be imported; each: a table of both"
    add("--engine", choices=ENGINES, default="auto", help=engines)
    executors = sorted(name for name, _ in EXECUTORS)
    add("--executor", choices=executors, default="auto", help="auto: GPUs where there are any")
    gpus = "GPUs of one run (default: the suite's)"
    add("--gpus-per-run", type=int, metavar="N", help=gpus)
    workers = (
        "runs at a time on the CPU (default: one per core); with slurm, jobs in the queue at a "
        "time (default: all)"
    )
    add("--workers", type=int, default=0, metavar="N", help=workers)
    slurm = (
        "for --executor slurm, may be repeated: time (24:00:00), "
        "gpus_per_node (8; what a node has), cpus_per_gpu (5), cpus_per_task, array_parallelism "
        "(256 at a time), signal_delay_s (90), setup and teardown (lines of the script), "
        "srun_args, or any option of sbatch: partition, account, qos, constraint, mem, ..."
    )
    add("--slurm", **several, metavar="KEY=VALUE", help=slurm)
    add("--dry-run", action="store_true", help="list the runs, check everything, start nothing")
    add("--status", action="store_true", help="how far the suite in DIR is")
    grid = (
        "before, train every task of detection from every init with the same grid of learning "
        "rates, shortened and without the test images; the best of each init is one more row"
    )
    add("--tune", action="store_true", help=grid)
    add("--retry-failed", action="store_true", help="try runs that failed before once more")
    keep = (
        "checkpoints that stay: the final one of each run (default), its last two, or all; "
        "given by name, also of runs that were done before"
    )
    add("--keep", choices=KEEP, help=keep)
    seconds = "for the estimate, where nothing was measured in DIR; may be repeated"
    add("--seconds-per-iteration", **several, metavar="[TASK=]S", help=seconds)
    stop = "how long runs may take to save when the suite is stopped (%(default)s)"
    add("--stop-seconds", type=float, default=120.0, metavar="S", help=stop)
    add("--debug", action="store_true", help="show the traceback of an error")
    add("--opts", nargs="*", default=[], metavar="KEY VALUE", help="config overrides of all runs")
    return parser


if __name__ == "__main__":
    run_cli(main)
