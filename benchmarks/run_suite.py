r"""Command that runs a suite, or resumes it: from a list of checkpoints to the tables.

    python -m benchmarks.run_suite configs/suites/voc.yaml --init mine=my.pth \
        --init supervised=r50.pth --init random --trials 5

    ... --plan FILE   write the runs to a file, for another scheduler to compute
    ... --dry-run     list the runs and their hours, check everything, start no run
    ... --status      print the progress of a running suite, from another shell
    ... --until-decided   add seeds until the gap of every row is decided
    ... --tune        choose the learning rate of every init from one grid first
    ... --data FOLDER one task per dataset in a folder of them, for the suite `many`

Everything is checked before the first run starts. After an interruption at any moment, the same
command continues. A run that fails does not stop the others, and enters no number.
"""

import argparse
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import benchmarks.suites.executors  # noqa: F401 - registers them
from benchmarks.suites import forkserver
from benchmarks.suites.checkpoints import FINAL, KEEP, format_disk_space, remove_checkpoints
from benchmarks.suites.checks import Findings, option_pairs
from benchmarks.suites.data_digest import check_outside, data_digests
from benchmarks.suites.executors.base import EXECUTORS, Executor, Options, PlanExecutor
from benchmarks.suites.folder import (
    SuiteFolder,
    hash_inits,
    project_version,
    suite_content,
)
from benchmarks.suites.forecast import (
    Speeds,
    TimedSpeeds,
    estimate,
    format_detectable_gaps,
    format_listing,
    make_forecast,
    measured_speeds,
    print_status,
    time_runs,
)
from benchmarks.suites.runner import Runner
from benchmarks.suites.runs import DONE, Programs, Run, State, raise_failures, shared_cache
from benchmarks.suites.runs import SuiteFailed as SuiteFailed
from benchmarks.suites.suite import (
    CHOOSE,
    PROGRAMS,
    Init,
    RunSpec,
    Suite,
    expand,
    row_of,
    with_metric,
)
from benchmarks.suites.suite_file import (
    describe_datasets,
    expand_datasets,
    load_suite,
    parse_inits,
    parse_stated,
    with_options,
    without_tasks,
)
from benchmarks.suites.tables import TablesSoFar, refresh_tables, results_of, write_tables
from benchmarks.suites.tuning import choice_command, read_description, with_grids
from benchmarks.suites.until_decided import (
    FIRST_SEEDS,
    MARGIN,
    MOST_SEEDS,
    InterimPlan,
    make_interim_plan,
    next_runs,
    with_seeds,
)
from moco.common.command import RANDOM, command_parser, parse_options
from moco.common.errors import Preempted, UserError, echo, plural, printable, run_cli
from moco.common.files import atomic_write_json, expand_home
from moco.common.progress import format_seconds
from moco.common.run import RECORD_NAME
from moco.common.shipped import own_modules, resolve

MANY = 1000  # runs
PLAN_SCHEMA = 1
ENGINES = ("auto", "detectron2", "embedded", "each")


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """Options with which a suite is computed, from a command line or from Python.

    `add_arguments` explains each option at its flag, and the flags have the same defaults.
    """

    init: Sequence[str] = ()
    trials: int | None = None
    until_decided: bool = False
    margin: float | None = None
    max_seeds: int | None = None
    baseline: str | None = None
    output: Path | None = None
    engine: str = "auto"
    executor: str = "auto"
    gpus_per_run: int | None = None
    workers: int = 0
    slurm: Sequence[str] = ()
    dry_run: bool = False
    plan: Path | None = None
    tune: bool = False
    retry_failed: bool = False
    keep: str | None = None
    seconds_per_iteration: Sequence[str] = ()
    time: bool = False
    stop_seconds: float = 120.0
    opts: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class CommandOptions(SuiteOptions):
    """Options of the command `suite`; `build_parser` explains them."""

    suite: str
    skip: Sequence[str] = ()
    data: Path | None = None
    task: str | None = None
    status: bool = False


def main(argv: Sequence[str] | None = None, programs: Programs | None = None) -> None:
    """Run the suite that the command line describes."""
    args = parse_options(build_parser(), argv, CommandOptions)
    suite = load_suite(resolve(args.suite))
    folder = SuiteFolder(args.output or Path("output", suite.name))
    if args.status:
        print_status(folder)
        return
    suite = without_tasks(expand_datasets(suite, args.data, args.task), args.skip)
    if args.data is not None:
        rows = {row_of(name) for name in parse_inits(args.init) or suite.inits}
        echo(*describe_datasets(suite, len(rows)))
    for name in args.skip:
        echo(f"left out: {name}, by --skip")
    run(configure_suite(suite, args), folder, args, programs or Programs())


def check_options(options: SuiteOptions) -> None:
    """Check that the options of a suite fit `--until-decided`.

    Raises:
        UserError: If they do not.
    """
    for flag, value in (("--margin", options.margin), ("--max-seeds", options.max_seeds)):
        if value is not None and not options.until_decided:
            raise UserError(f"{flag} {value}: is for --until-decided")
    if options.until_decided and (options.plan or options.executor == "slurm"):
        raise UserError(
            f"--until-decided: {'--plan' if options.plan else '--executor slurm'} submits all runs "
            "at once, and these depend on each other's results; give a fixed number, --trials N"
        )


def configure_suite(suite: Suite, options: SuiteOptions) -> Suite:
    """Apply the seeds, keys, speeds and grids of the options to a suite.

    Raises:
        UserError: If an option does not fit the suite.
    """
    check_options(options)
    stated = parse_stated(options.seconds_per_iteration)
    trials = options.trials or (FIRST_SEEDS if options.until_decided else None)
    suite = with_options(suite, option_pairs(suite.tasks, options.opts), stated, trials)
    if not options.tune:
        return suite
    if options.engine == "each":
        raise UserError("--tune: chooses for one engine; give --engine detectron2 or embedded")
    return with_grids(suite)


@dataclass(frozen=True)
class Prepared:
    """Suite whose runs are expanded and checked.

    Attributes:
        content: Content of `suite.json`, from `suite_content`.
        specs: All runs that the suite may need.
        plan: Plan of the looks after which seeds are added; None: all runs are computed.
        keep: Policy of the checkpoints, see benchmarks/suites/checkpoints.py.
        measured: Speeds of runs that are done.
        problems: Reasons why some runs would fail, one line each.
    """

    folder: SuiteFolder
    content: Mapping[str, Any]
    specs: tuple[RunSpec, ...]
    inits: Mapping[str, Init]
    baseline: str | None
    executor: Executor
    keep: str
    measured: Speeds
    findings: Findings
    problems: Sequence[str]
    plan: InterimPlan | None = None

    def next_specs(self) -> tuple[tuple[RunSpec, ...], list[str]]:
        """Return the runs up to the next looks, and lines about the last looks."""
        if self.plan is None:
            return self.specs, []
        return next_runs(self.specs, self.folder, self.plan)

    def runs(self, specs: Sequence[RunSpec], programs: Programs) -> list[Run]:
        """Copy and convert the weights, and return the runs; the caller holds the folder's lock."""
        folder = self.folder
        folder.write(self.content, specs, self.findings.scores)
        copies = folder.copy_weights(self.inits)
        computed = [
            replace(spec, weights=copies[spec.init]) for spec in specs if spec.program != CHOOSE
        ]
        converted = programs.convert(computed, folder.converted)
        weights = {spec.name: each for spec, each in zip(computed, converted, strict=True)}
        cached = shared_cache(computed, folder.features)
        sizes = {spec.gpus for spec in specs}
        machines = {size: self.executor.machines(size) for size in sizes}
        runs = []
        for spec in specs:
            if spec.program == CHOOSE:
                argv = choice_command(spec, folder.grid)
            else:
                own = replace(spec, weights=weights[spec.name], config=folder.task_file(spec))
                argv = programs.command(own, folder.folder_of(spec), machines[spec.gpus])
                argv += cached.get(spec.name, [])
            runs.append(folder.run(spec, argv))
        return runs


def run(
    suite: Suite,
    folder: SuiteFolder,
    options: SuiteOptions,
    programs: Programs,
    *,
    timing: bool = False,
    fail_fast: bool = False,
    finish: Callable[[SuiteFolder, Sequence[Run], str | None], Any] | None = None,
    beside: Sequence[Run] = (),
    show_notes: bool = True,
) -> Any:
    """Check and compute a suite; `--dry-run` stops after the checks, `--plan` writes the runs.

    Args:
        suite: Suite from `configure_suite`.
        folder: Folder of the suite.
        options: Options of the suite.
        programs: Programs of the runs.
        timing: Time runs of unknown speed as `--time` does, if this machine computes them.
        fail_fast: Stop everything at the first failure.
        finish: Function that makes the tables; None: `write_tables`.
        beside: Further runs to compute with those of the suite.
        show_notes: Print the notes of the checks.

    Returns:
        The result of `finish`, or None if nothing was computed.

    Raises:
        UserError: If a run would fail; nothing has started then.
        LockedError: If another runner holds the folder.
        Preempted: If a signal stopped the suite.
        SuiteFailed: If some runs failed; raised when the others are done.
    """
    prepared = prepare_suite(suite, folder, options, programs, timing)
    for note in prepared.findings.notes if show_notes else ():
        echo(f"note: {note}")
    if options.dry_run:
        print_runs(prepared, options.retry_failed)
        raise_problems(prepared.problems)
        print("\nchecked every task, dataset and weights file; no run was started")
        return None
    raise_problems(prepared.problems)
    with folder.lock():
        if options.plan:
            runs = prepared.runs(prepared.specs, programs)
            write_plan(options.plan, suite.name, runs, prepared.measured)
            echo(
                f"wrote {options.plan}: {plural(len(runs), 'run')}; the same command without",
                "--plan makes the tables when they are done, and computes those that are not",
            )
            return None
        specs, lines = prepared.next_specs()
        computed = len(specs) - 1
        while len(specs) > computed:
            print(*lines, sep="\n", end="\n" if lines else "", flush=True)
            runs = [*beside, *prepared.runs(specs, programs)]
            states = compute_runs(suite, runs, prepared, options, fail_fast)
            computed = len(specs)
            specs, lines = prepared.next_specs()
        print(*lines, sep="\n", end="\n" if lines else "")
        return finish_suite(runs, states, prepared, options, finish or write_tables)


def prepare_suite(
    suite: Suite, folder: SuiteFolder, options: SuiteOptions, programs: Programs, timing: bool
) -> Prepared:
    """Expand a suite into its runs, and check those that are not done.

    Only timed speeds are written, for the next call.
    """
    print(f"suite {suite.name}: reading tasks and weights", flush=True)
    keep = options.keep or FINAL
    place = Options(folder.path, options.workers, options.slurm, keep, options.stop_seconds)
    if options.plan and options.executor == "auto":
        executor: Executor = PlanExecutor()
    else:
        executor = make_executor(options.executor, place)
    weights = parse_inits(options.init) if options.init else dict(suite.inits)
    if not weights:
        raise UserError(
            f"suite {suite.name} names no init; give --init [NAME=]WEIGHTS for each row, e.g. "
            "--init random --init mine=weights.pth"
        )
    rows = dict.fromkeys(map(row_of, weights))
    if options.baseline is not None and options.baseline not in rows:
        choices = ", ".join(rows)
        raise UserError(f"--baseline {options.baseline}: no such init; choices are {choices}")
    later: dict[str, Init] = {}
    if options.dry_run:
        for init, what in programs.not_downloaded(weights).items():
            echo(f"would download {init}: {what}; its runs are checked as if from random weights")
            later[init] = Init(weights[init], None)
    found = hash_inits(
        programs.locate({name: text for name, text in weights.items() if name not in later})
    )
    inits = {name: later.get(name) or found[name] for name in weights}
    suite, kept = with_metric(suite, folder.recorded())
    echo(*(f"note: {note}" for note in kept))
    engines = programs.choose_engines(options.engine)
    if options.plan:
        check_outside(options.plan, suite)
    version, data = project_version(), data_digests(suite, folder.recorded_data())
    keys: dict[str, Any] = {"version": version, "gpus": options.gpus_per_run, "data": data}
    baseline = options.baseline or suite.baseline
    plan = None
    if options.until_decided:
        looks = options.trials, options.max_seeds, options.margin
        plan = make_interim_plan(inits, baseline, *looks)
    most = suite if plan is None else with_seeds(suite, plan.most)
    everything = specs = expand(most, inits, engines, available=executor.gpus, **keys)
    content = suite_content(suite, inits, engines, plan=asdict(plan) if plan else None, **keys)
    folder.check(content)
    if plan is not None:
        specs, _ = next_runs(everything, folder, plan)
        print(
            f"looks from {plan.first} to at most {plural(plan.most, 'seed')} per row, at most "
            f"{plural(len(everything), 'run')} in all"
        )
    opening = f"{suite.title or suite.name}: {plural(len(specs), 'run')}"
    echo(f"{opening}, {executor.where()}, in {folder.path}")
    undone = [spec for spec in specs if folder.run(spec).state().kind != DONE]
    if plan and undone:  # a later look adds seeds to rows whose runs so far are done
        undone = [spec for spec in everything if folder.run(spec).state().kind != DONE]
    checked = [replace(s, weights=RANDOM) if s.init in later else s for s in undone]
    findings, problems = check_undone(checked, executor, programs, [*folder.scores()])
    lengths = {spec.name: set_length(folder, spec, findings) for spec in everything}
    everything, specs = tuple(lengths.values()), tuple(lengths[spec.name] for spec in specs)
    hardware = None if executor.remote else findings.hardware or None
    seen = [folder.run(spec) for spec in specs]
    measured = measured_speeds(seen, hardware)
    if options.time or (timing and not executor.remote):
        timed = TimedSpeeds(folder.path, content, findings.hardware)
        known = timed.read()
        measured = known | measured
        if new := time_undone(specs, seen, folder, executor, programs, measured):
            timed.write(known | new)
            measured |= new
    return Prepared(
        folder,
        content,
        everything,
        inits,
        baseline,
        executor,
        keep,
        measured,
        findings,
        problems,
        plan,
    )


def time_undone(
    specs: Sequence[RunSpec],
    runs: Sequence[Run],
    folder: SuiteFolder,
    executor: Executor,
    programs: Programs,
    measured: Speeds,
) -> Speeds:
    """Time a few iterations of the runs that can start now, see benchmarks/suites/forecast.py."""
    by_name = {spec.name: spec for spec in specs}
    done = {run.name for run in runs if run.state().kind == DONE}

    def command(run: Run, where: Path) -> Sequence[str]:
        spec = by_name[run.name]
        return programs.command(replace(spec, config=folder.task_file(spec)), where)

    ready = [run for run in runs if run.name not in done and done >= set(run.after)]
    return time_runs(ready, executor, command, measured)


def print_runs(prepared: Prepared, retry_failed: bool) -> None:
    """Print the runs with their hours and disk space, and the smallest gap that they detect."""
    from benchmarks.report.report import tables_so_far

    specs, _ = prepared.next_specs()
    seen = [prepared.folder.run(spec) for spec in specs]
    print(format_listing(specs, seen, prepared.measured, prepared.executor, retry_failed))
    undone = [spec for spec, each in zip(specs, seen, strict=True) if not each.state().settled]
    if trained := [spec for spec in undone if spec.program != CHOOSE]:
        print(
            format_disk_space(
                trained, prepared.findings.checkpoints, prepared.keep, prepared.folder.path
            )
        )
    if prepared.plan is not None:
        return
    compared = [spec for spec in specs if spec.program in PROGRAMS]
    print(f"\n{format_detectable_gaps(compared, tables_so_far(results_of(seen), None))}")


def compute_runs(
    suite: Suite,
    runs: Sequence[Run],
    prepared: Prepared,
    options: SuiteOptions,
    fail_fast: bool,
) -> dict[str, State]:
    """Compute runs while the page shows the progress, and return name → state."""
    folder, title = prepared.folder, suite.title or suite.name
    states = {each.name: each.state().retried(options.retry_failed) for each in runs}
    if number := sum(not state.settled for state in states.values()):
        parallel = prepared.executor.parallel(max(each.gpus for each in runs))
        left = make_forecast(runs, states, prepared.measured, parallel).seconds_left
        known = f", about {format_seconds(left)}" if math.isfinite(left) else ""
        print(f"\n{number} to do{known}; each writes its log to suite.log", flush=True)
    else:
        print("\n0 to do", flush=True)
    refresh = partial(refresh_tables, folder.tables, runs, prepared.baseline)
    with TablesSoFar(title, runs, refresh) as tables:
        return Runner(
            runs,
            prepared.executor,
            name=suite.name,
            retry_failed=options.retry_failed,
            fail_fast=fail_fast,
            measured=prepared.measured,
            stop_seconds=options.stop_seconds,
            keep=prepared.keep,
            watch=tables.update,
        ).run()


def finish_suite(
    runs: Sequence[Run],
    states: Mapping[str, State],
    prepared: Prepared,
    options: SuiteOptions,
    finish: Callable[[SuiteFolder, Sequence[Run], str | None], Any],
) -> Any:
    """Write the tables when the runs are over, and return the result of `finish`."""
    folder = prepared.folder
    if all(states[each.name].kind == DONE for each in runs):
        shutil.rmtree(folder.features, ignore_errors=True)
    if options.keep:  # by default, runs of earlier calls keep all checkpoints
        for each in runs:
            if states[each.name].kind == DONE:
                remove_checkpoints(each.folder, options.keep, done=True)
    choices = {spec.name for spec in prepared.specs if spec.program == CHOOSE}
    for each in runs:
        if each.name in choices and each.product is not None:
            echo(*read_description(each.product))
    if len(runs) < MANY:
        result = finish(folder, runs, prepared.baseline)
    else:  # the end of a child process frees the memory of that many records
        result = forkserver.call(finish, folder, runs, prepared.baseline)
    raise_failures(runs, states, options.retry_failed)
    return result


def write_plan(path: Path, suite: str, runs: Sequence[Run], measured: Speeds) -> None:
    """Write the runs as JSON: command, GPUs, dependencies, and the file that exists at the end.

    Args:
        path: File to write.
        suite: Name of the suite.
        runs: Runs of the suite.
        measured: Speeds of earlier runs, from which the seconds are estimated.
    """
    content = {
        "schema": PLAN_SCHEMA,
        "suite": suite,
        "environment": own_modules(),
        "run_again_on_exit_code": Preempted.exit_code,
        "runs": [
            {
                "name": run.name,
                "title": run.title,
                "command": list(run.argv),
                "folder": str(run.folder.absolute()),
                "gpus": run.gpus,
                "after": list(run.after),
                "done": str((run.product or run.folder / RECORD_NAME).absolute()),
                "seconds": estimate(run, measured).seconds,
            }
            for run in runs
        ],
    }
    atomic_write_json(path, content)


def make_executor(name: str, options: Options) -> Executor:
    """Build the executor of `--executor`.

    Raises:
        UserError: If it cannot work on this machine or with these options.
    """
    if options.slurm and name != "slurm":
        raise UserError(f"--slurm {options.slurm[0]}: is for --executor slurm; got {name}")
    executor: Executor = EXECUTORS.get(name)(options)
    return executor


def check_undone(
    specs: Sequence[RunSpec], executor: Executor, programs: Programs, scored: Sequence[str]
) -> tuple[Findings, list[str]]:
    """Check runs; return the findings, and all problems including those of the executor.

    Args:
        specs: Runs that are not done.
        executor: Executor of the runs.
        programs: Programs of the runs.
        scored: Digests whose scores of perfect predictions are known.
    """
    if not specs:
        return Findings(), []
    # This machine does not have the GPUs of a cluster.
    on_gpus = executor.gpus > 0 and not executor.remote
    findings = programs.check(specs, on_gpus, scored)
    return findings, [*findings.problems, *executor.problems({spec.gpus for spec in specs})]


def raise_problems(problems: Sequence[str]) -> None:
    """Raise UserError if there are problems, after printing one line for each."""
    if len(problems) == 1:
        raise UserError(f"nothing was started: {problems[0]}")
    if problems:
        print(*(printable(f"problem: {each}") for each in problems), sep="\n", file=sys.stderr)
        raise UserError(f"nothing was started: {len(problems)} problems, see above")


def set_length(folder: SuiteFolder, spec: RunSpec, findings: Findings) -> RunSpec:
    """Return a run with the number of iterations from the check or from the record."""
    length = findings.iterations.get((spec.task, spec.engine, spec.init))
    if not length:
        state = folder.run(spec).state()
        length = int(state.iteration) if state.kind == DONE else spec.iterations
    return replace(spec, iterations=length)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `moco-transfer suite`."""
    parser = command_parser(
        "suite",
        "Fine-tune every task of a suite from every init in several trials, and "
        "write the tables. After an interruption, the same command continues.",
    )
    add = parser.add_argument
    add("suite", metavar="SUITE", help="a file or a shipped name, e.g. voc")
    skip = "leave a task out; may be repeated"
    add("--skip", action="append", default=[], metavar="TASK", help=skip)
    data = "folder of datasets in COCO's format as Roboflow exports it, for the suites many*"
    add("--data", type=expand_home, metavar="FOLDER", help=data)
    add("--task", metavar="CONFIG", help="task file for all datasets of --data (the suite's)")
    add("--status", action="store_true", help="print the progress of the suite in DIR")
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser, trials: int | None = None) -> None:
    """Add the flags of `SuiteOptions`; a missing flag leaves the default.

    Args:
        parser: Parser of a command.
        trials: Default of --trials, for the help; None: the suite's.
    """
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    several: dict[str, Any] = {"action": "append"}
    rows = (
        "add a row to the tables: weights under a name, or random; may be repeated. Weights are "
        "a file, a name or an address (see moco-transfer weights --help); NAME=A,B,C gives "
        "several pre-trainings of one row, 'NAME=ckpt_*.pth' a row for each checkpoint"
    )
    add("--init", **several, metavar="[NAME=]WEIGHTS", help=rows)
    add(
        "--trials",
        "--seeds",
        type=int,
        metavar="N",
        help=f"seeds per row, 0, 1, ... (default: {trials or 'that of the suite'})",
    )
    add(
        "--until-decided",
        action="store_true",
        help="add seeds to all rows of a task until each gap to the baseline is beyond chance or "
        "within --margin, by tests that account for every look",
    )
    margin = f"largest gap in points that counts as none, for --until-decided ({MARGIN})"
    add("--margin", type=float, metavar="POINTS", help=margin)
    most = (
        f"most seeds per row, for --until-decided ({MOST_SEEDS}); the first look is at --trials "
        f"({FIRST_SEEDS})"
    )
    add("--max-seeds", type=int, metavar="M", help=most)
    add("--baseline", metavar="NAME", help="the init that gaps refer to")
    add("--output", type=expand_home, metavar="DIR", help="folder of the suite (output/<suite>)")
    engines = "detection engine; auto: detectron2 if it can be imported; each: one table per engine"
    add("--engine", choices=ENGINES, help=engines)
    executors = sorted(name for name, _ in EXECUTORS)
    where = "where runs are computed; auto: on the GPUs if there are any"
    add("--executor", choices=executors, help=where)
    gpus = "GPUs of one run (default: the suite's)"
    add("--gpus-per-run", type=int, metavar="N", help=gpus)
    workers = (
        "parallel runs on the CPU (default: one per core); with slurm, jobs in the queue at a "
        "time (default: all)"
    )
    add("--workers", type=int, metavar="N", help=workers)
    slurm = (
        "option of --executor slurm; may be repeated: time (24:00:00), "
        "gpus_per_node (8; GPUs of one node), cpus_per_gpu (5), cpus_per_task, array_parallelism "
        "(256 at a time), signal_delay_s (90), setup and teardown (lines of the script), "
        "srun_args, or any option of sbatch: partition, account, qos, constraint, mem, ..."
    )
    add("--slurm", **several, metavar="KEY=VALUE", help=slurm)
    dry = "list the runs, check everything, start no run; what is timed (see --time) is kept in DIR"
    add("--dry-run", action="store_true", help=dry)
    plan = (
        "write every run to a file instead of computing it: command, GPUs, dependencies, and the "
        "file that exists when it is done"
    )
    add("--plan", type=expand_home, metavar="FILE.json", help=plan)
    grid = (
        "first train every detection task from every init with the same grid of learning rates, "
        "shortened and without the test images; the best one of each init adds a row"
    )
    add("--tune", action="store_true", help=grid)
    add("--retry-failed", action="store_true", help="repeat runs that failed before")
    keep = (
        "checkpoints to keep: the final one of each run (default), its last two, or all; if "
        "given, it also applies to runs that were done before"
    )
    add("--keep", choices=KEEP, help=keep)
    seconds = "speed to estimate from if DIR has no measurement; may be repeated"
    add("--seconds-per-iteration", **several, metavar="[TASK=]S", help=seconds)
    timed = "time 20 iterations of every task without a known speed, to estimate the hours"
    add("--time", action="store_true", help=timed)
    stop = f"time that runs have to save when the suite is stopped ({SuiteOptions.stop_seconds})"
    add("--stop-seconds", type=float, metavar="S", help=stop)
    add("--opts", nargs="*", metavar="KEY VALUE", help="config overrides of all tasks")


if __name__ == "__main__":
    run_cli(main)
