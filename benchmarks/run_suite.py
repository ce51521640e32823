"""From a list of checkpoints to the tables: run a suite, to its end or on from where it was.

    python -m benchmarks.run_suite configs/suites/voc.yaml --init mine=my.pth \\
        --init supervised=r50.pth --init random --trials 5

    ... --dry-run     list the runs and the hours that they take, check everything, start nothing
    ... --status      how far a running suite is, from another shell

Everything is checked before the first run starts. Interrupted at any moment, the same command goes
on; several may work on one folder. A run that fails does not stop the others, and is in no number.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.suites.keep import FINAL, KEEP, disk_line, remove_checkpoints
from moco.common.errors import UserError, printable, run_cli
from moco.common.progress import format_seconds

if TYPE_CHECKING:
    from benchmarks.suites.checks import Findings
    from benchmarks.suites.executors.local import Executor
    from benchmarks.suites.folder import State, SuiteFolder
    from benchmarks.suites.suite import Measured, RunSpec, Suite

ENGINES = ("auto", "detectron2", "embedded", "each")
EXECUTORS = ("auto", "local", "cpu", "slurm")
OUTPUT = Path("output")
DRAWN_IMAGES = 4  # with predictions, for the report
_SIGNALS = "SIGTERM,SIGINT,SIGUSR1,SIGUSR2"  # torchrun would otherwise die of the last two


class SuiteFailed(UserError):
    """Some runs failed; the others have their numbers."""

    exit_code = 1


@dataclass(frozen=True)
class Backend:
    """What knows the training programs; tests put a small one in its place.

    Attributes:
        resolve_names: init → weights, with names that are not files made files.
        choose_engines: the value of `--engine` → engines for detection.
        check: every task, dataset, weights file; whether on GPUs.
        command: the words that start or continue a run in a folder; on several machines, their
            number is a third argument.
    """

    resolve_names: "Callable[[Mapping[str, str]], dict[str, str]]"
    choose_engines: "Callable[[str], tuple[str, ...]]"
    check: "Callable[[Sequence[RunSpec], bool], Findings]"
    command: "Callable[..., Sequence[str]]"


def main(argv: Sequence[str] | None = None, backend: Backend | None = None) -> None:
    args = build_parser().parse_args(argv)
    from benchmarks.suites.folder import SuiteFolder
    from benchmarks.suites.suite import load_suite

    suite = load_suite(args.suite)
    folder = SuiteFolder(args.output or OUTPUT / suite.name)
    if args.status:
        status(folder)
    else:
        run(suite, folder, args, backend or training_programs())


def run(suite: "Suite", folder: "SuiteFolder", args: argparse.Namespace, backend: Backend) -> None:
    """Check, run, report; with `--dry-run` only check and list.

    Raises:
        UserError: something that a run would fail of, before anything has started.
        Preempted: stopped by a signal.
        SuiteFailed: after everything else: some runs failed.
    """
    from benchmarks.suites.checks import option_pairs
    from benchmarks.suites.data_digest import data_digests
    from benchmarks.suites.executors.local import make_executor
    from benchmarks.suites.folder import asked, identify, project_version
    from benchmarks.suites.runner import Runner, measured_runs
    from benchmarks.suites.suite import expand, parse_inits, with_options

    print(f"suite {suite.name}: reading tasks and weights", flush=True)
    executor = make_executor(args.executor, folder.path, args.workers, args.slurm)
    weights = parse_inits(args.init) if args.init else suite.inits
    inits = identify(backend.resolve_names(weights))
    baseline = _baseline(args.baseline, suite, inits)
    stated = parse_stated(args.seconds_per_iteration)
    suite = with_options(suite, option_pairs(suite.tasks, args.opts), stated)
    engines = backend.choose_engines(args.engine)
    version, data = project_version(), data_digests(suite, folder.data_before())
    specs = expand(
        suite,
        inits,
        args.trials,
        engines,
        version=version,
        gpus=args.gpus_per_run,
        available=executor.gpus,
        data=data,
    )
    machines = {size: executor.machines(size) for size in sorted({spec.gpus for spec in specs})}
    content = asked(suite, inits, args.trials, engines, args.gpus_per_run, version, data)
    folder.check(content)
    opening = f"{suite.title or suite.name}: {_counted(len(specs), 'run')}"
    print(f"{opening}, {executor.where()}, in {folder.path}", flush=True)
    findings = check_open(folder, specs, executor, backend)
    specs = tuple(with_length(spec, findings) for spec in specs)
    hardware = None if executor.remote else findings.hardware or None
    measured = measured_runs(folder, specs, hardware)
    if args.dry_run:
        print(listing(folder, specs, measured, executor, args.retry_failed))
        open_ = [spec for spec in specs if not folder.state(spec).settled]
        if open_:
            print(disk_line(open_, findings.checkpoints, args.keep or FINAL, folder.path))
        print("\nchecked every task, dataset and weights file; nothing was started")
        return
    specs = _known_lengths(folder, specs)
    folder.agree(content, specs)
    given = folder.copy_weights(inits)
    runs = {spec.name: replace(spec, weights=given[spec.init]) for spec in specs}

    def words(spec: "RunSpec") -> "Sequence[str]":
        several = [machines[spec.gpus]] if machines[spec.gpus] > 1 else []
        return backend.command(runs[spec.name], folder.run(spec), *several)

    states = Runner(
        folder,
        specs,
        executor,
        words,
        retry_failed=args.retry_failed,
        measured=measured,
        stop_seconds=args.stop_seconds,
        keep=args.keep or FINAL,
    ).run()
    if args.keep:  # else runs that were done before stay as they are
        for spec in specs:
            if states[spec.name].kind == "done":
                remove_checkpoints(folder.run(spec), args.keep, done=True)
    report(folder, specs, states, baseline)


def check_open(
    folder: "SuiteFolder",
    specs: "Sequence[RunSpec]",
    executor: "Executor",
    backend: Backend,
) -> "Findings":
    """Check every run that is not done.

    Raises:
        UserError: all that would fail, one line for each.
    """
    from benchmarks.suites.checks import Findings

    open_ = [spec for spec in specs if folder.state(spec).kind != "done"]
    if not open_:
        return Findings()
    # The GPUs of a cluster are not here.
    findings = backend.check(open_, executor.gpus > 0 and not executor.remote)
    for note in findings.notes:
        print(f"note: {note}", flush=True)
    problems = [*findings.problems, *executor.problems({spec.gpus for spec in open_})]
    if problems:
        if len(problems) == 1:
            raise UserError(f"nothing was started: {problems[0]}")
        for problem in problems:
            print(f"problem: {problem}", file=sys.stderr)
        raise UserError(f"nothing was started: {len(problems)} problems, see above")
    return findings


def with_length(spec: "RunSpec", findings: "Findings") -> "RunSpec":
    """The run with the number of its iterations, where the check has found it."""
    length = findings.iterations.get((spec.task, spec.engine, spec.init), spec.iterations)
    return replace(spec, iterations=length)


def training_programs() -> Backend:
    """The programs of this project. Torch is imported by processes of their own only."""
    from benchmarks.suites import checks

    def resolve_names(weights: Mapping[str, str]) -> dict[str, str]:
        if not any("://" in name for name in weights.values()):
            return dict(weights)
        return checks.in_own_process(checks.resolve_names, dict(weights))

    def choose_engines(wanted: str) -> tuple[str, ...]:
        return checks.in_own_process(checks.choose_engines, wanted)

    def check(specs: "Sequence[RunSpec]", on_gpus: bool) -> "Findings":
        return checks.in_own_process(checks.check, list(specs), on_gpus)

    return Backend(resolve_names, choose_engines, check, command)


def command(spec: "RunSpec", folder: Path, machines: int = 1) -> list[str]:
    """The words that start a run of this project's programs, or continue it.

    On several machines each has to put in what only it knows, see
    `benchmarks.suites.executors.local`.
    """
    from benchmarks.suites.checks import command_keys
    from benchmarks.suites.executors.local import HOST, PORT, RANK
    from benchmarks.suites.suite import DETECTION, RANDOM

    keys = [*command_keys(spec), "OUTPUT_DIR", str(folder), "SEED", str(spec.seed)]
    if spec.program == DETECTION:
        gpus = max(spec.gpus // machines, 1)
        flags = ["--engine", spec.engine, "--resume", "--num-gpus", str(gpus)]
        if machines > 1:
            flags += ["--num-machines", str(machines), "--machine-rank", RANK]
            flags += ["--dist-url", f"tcp://{HOST}:{PORT}"]
        if spec.seed == 0:  # the report shows one trial's
            flags += ["--visualize", str(DRAWN_IMAGES)]
        words = ["-m", "detection.train_net", *flags, "--config-file", str(spec.config)]
        return [sys.executable, *words, *keys, "MODEL.WEIGHTS", spec.weights]
    launcher = []
    if spec.gpus > 1:
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={spec.gpus // machines}"]
        if machines > 1:
            launcher += [f"--nnodes={machines}", f"--node-rank={RANK}"]
            launcher += [f"--master-addr={HOST}", f"--master-port={PORT}"]
        else:
            launcher += ["--standalone"]
        launcher += [f"--signals-to-handle={_SIGNALS}"]
    words = ["-m", f"moco.{spec.program}", "--config-file", str(spec.config), "--resume=auto"]
    words += ["--checkpoint", spec.weights]
    if spec.weights != RANDOM:
        words += ["--init", spec.init]
    return [sys.executable, *launcher, *words, *keys]


def listing(
    folder: "SuiteFolder",
    specs: "Sequence[RunSpec]",
    measured: "Sequence[Measured]",
    executor: "Executor",
    retry_failed: bool = False,
) -> str:
    """Every run with what it takes from its beginning, and what is left of all."""
    from tabulate import tabulate

    from benchmarks.suites.runner import foresee, fraction, places_for
    from benchmarks.suites.suite import estimate

    unit = "GPU hours" if executor.gpus else "CPU hours"
    states = {spec.name: folder.state(spec) for spec in specs}
    rows, hours, unknown, number = [], 0.0, [], 0
    for spec in specs:
        state, expected = states[spec.name], estimate(spec, measured)
        own = expected.hours(spec.gpus)
        again = state.kind == "failed" and retry_failed and not state.foreign
        if again:
            states[spec.name] = replace(state, kind="interrupted")
        if again or not state.settled:
            number += 1
            if own is None:
                unknown.append(spec.task)
            else:
                hours += own * (1 - fraction(spec, state))
        shown = "unknown" if own is None else f"{own:.2f}"
        length = spec.iterations or "?"
        row = [spec.task, spec.init, spec.seed, spec.engine, spec.gpus or "CPU", length, shown]
        rows.append([*row, expected.source if own is not None else "", state.kind])
    head = ["task", "init", "seed", "engine", "GPUs", "iterations", unit, "known from", "state"]
    text = tabulate(rows, headers=head, disable_numparse=True)
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
        left = foresee(specs, states, measured, places_for(executor, specs)).seconds_left
        where = "without the time in the queue" if executor.remote else "here"
        total += f", about {format_seconds(left)} {where}"
    return f"\n{text}\n\n{total}"


def status(folder: "SuiteFolder") -> None:
    """How far every run is; reads only."""
    from tabulate import tabulate

    from benchmarks.suites.executors.slurm import with_jobs
    from benchmarks.suites.runner import fraction

    content, specs = folder.asked()
    states = with_jobs(folder, {spec: folder.state(spec) for spec in specs})
    rows = []
    for spec in specs:
        state = states[spec.name]
        length = spec.iterations or "?"
        at = "" if state.kind in ("waiting", "failed") else f"{state.iteration:.0f}/{length}"
        begun = state.kind in ("running", "interrupted", "queued")
        share = fraction(spec, state) if begun else None
        percent = "" if not share else f"{100 * share:.0f}%"
        row = [spec.task, spec.init, spec.seed, spec.engine, state.kind, at, percent]
        rows.append([*row, printable(state.text)])
    head = ["task", "init", "seed", "engine", "state", "iteration", "share", "where, or why"]
    print(tabulate(rows, headers=head, disable_numparse=True))
    kinds = [state.kind for state in states.values()]
    parts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
    print(f"\n{content['suite']}: {', '.join(parts)} of {len(specs)}{_left(folder, specs, states)}")


def report(
    folder: "SuiteFolder",
    specs: "Sequence[RunSpec]",
    states: "Mapping[str, State]",
    baseline: str | None,
) -> None:
    """The tables as files and on the terminal, what failed, and the next command.

    Raises:
        SuiteFailed: some runs failed, or their jobs were cancelled.
    """
    write_tables(folder, specs, baseline)
    failed = [spec for spec in specs if states[spec.name].kind == "failed"]
    for spec in failed:
        print(f"failed: {spec.title}: {printable(states[spec.name].text)}", file=sys.stderr)
    if failed:
        raise SuiteFailed(
            f"{len(failed)} of {len(specs)} runs failed and are in no number; mend what is named "
            "above, then the same command with --retry-failed"
        )
    cancelled = [spec for spec in specs if not states[spec.name].settled]
    for spec in cancelled:
        print(f"cancelled: {spec.title}: {states[spec.name].text}", file=sys.stderr)
    if cancelled:
        raise SuiteFailed(
            f"the jobs of {len(cancelled)} of {len(specs)} runs were cancelled; the same command "
            "submits them again, and they resume from their checkpoints"
        )


def write_tables(
    folder: "SuiteFolder", specs: "Sequence[RunSpec]", baseline: str | None
) -> list[Path]:
    """Write and print the tables of the finished runs; the paths."""
    from benchmarks.make_table import EACH, make_tables, write_files
    from benchmarks.report.render import to_terminal
    from benchmarks.suites.folder import remove_stale

    results = folder.results(specs)
    if not results.transfer:
        print("no run is done, so there is no table")
        return []
    finished = {run.record.init for run in results.transfer}
    if baseline not in finished:
        if baseline in {spec.init for spec in specs}:
            instead = "random" if "random" in finished else "nothing"
            print(f"note: no run of the baseline {baseline} is done; gaps refer to {instead}")
        baseline = None
    tables = make_tables(results, baseline, EACH)
    with folder.lock():  # another runner may have come to its end as well
        remove_stale(folder.tables)
        files = write_files(folder.tables, tables, results)
    print(to_terminal(tables, results.unusable, color=sys.stdout.isatty()))
    print("\nFiles:")
    for path in files:
        print(f"  {path}")
    pages = [path for path in files if path.suffix == ".html"]
    print("\nNext:")
    if pages:
        print(f"  open {pages[0]} in a browser")
    print(f"  python -m benchmarks.make_table {folder.runs} --engine each")
    return files


def parse_stated(words: Sequence[str]) -> dict[str, float]:
    """`0.3` for every task, `TASK=0.3` for one.

    Raises:
        UserError: not a number.
    """
    stated = {}
    for word in words:
        name, _, number = word.rpartition("=")
        try:
            stated[name] = float(number)
        except ValueError:
            raise UserError(
                f"--seconds-per-iteration: got {word!r}, expected a number, or TASK=number"
            ) from None
    return stated


def build_parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.run_suite",
        description="Fine-tune every task of a suite from every initialization in several trials, "
        "and write the tables. Interrupted, the same command goes on; several may share a folder.",
    )
    result.add_argument("suite", type=Path, metavar="SUITE", help="e.g. configs/suites/voc.yaml")
    result.add_argument(
        "--init",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="a row of the tables: weights under a name, or the word random; may be repeated",
    )
    result.add_argument(
        "--trials", type=int, help="seeds per row, 0, 1, ... (default: the suite's)"
    )
    result.add_argument("--baseline", metavar="NAME", help="the init that gaps refer to")
    result.add_argument(
        "--output", type=Path, metavar="DIR", help="folder of the suite (output/<suite>)"
    )
    result.add_argument(
        "--engine",
        choices=ENGINES,
        default="auto",
        help="for detection; auto: detectron2 where it can be imported; each: a table of both",
    )
    result.add_argument(
        "--executor", choices=EXECUTORS, default="auto", help="auto: GPUs where there are any"
    )
    result.add_argument(
        "--gpus-per-run", type=int, metavar="N", help="GPUs of one run (default: the suite's)"
    )
    result.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="runs at a time on the CPU (default: one per core); with slurm, jobs in the queue at "
        "a time (default: all)",
    )
    result.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for --executor slurm, may be repeated: partition, account, qos, constraint, time "
        "(24:00:00; minutes or [D-]HH:MM:SS), gpus_per_node (8; what a node has), cpus_per_gpu "
        "(5), mem, array_parallelism (256 at a time), signal_delay_s (90), setup, any other "
        "parameter of submitit's Slurm executor, or sbatch.OPTION",
    )
    result.add_argument(
        "--dry-run", action="store_true", help="list the runs, check everything, start nothing"
    )
    result.add_argument("--status", action="store_true", help="how far the suite in DIR is")
    result.add_argument(
        "--retry-failed", action="store_true", help="try runs that failed before once more"
    )
    result.add_argument(
        "--keep",
        choices=KEEP,
        help="checkpoints that stay: the final one of each run (default), its last two, or all; "
        "given by name, also of runs that were done before",
    )
    result.add_argument(
        "--seconds-per-iteration",
        action="append",
        default=[],
        metavar="[TASK=]S",
        help="for the estimate, where nothing was measured in DIR; may be repeated",
    )
    result.add_argument(
        "--stop-seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="how long runs may take to save when the suite is stopped (%(default)s)",
    )
    result.add_argument("--debug", action="store_true", help="show the traceback of an error")
    result.add_argument(
        "--opts",
        nargs="*",
        default=[],
        metavar="KEY VALUE",
        help="config overrides of all runs",
    )
    return result


def _baseline(name: str | None, suite: "Suite", inits: Mapping[str, Any]) -> str | None:
    if name is not None and name not in inits:
        raise UserError(f"--baseline {name}: no such init; choices are {', '.join(inits)}")
    return name if name is not None else suite.baseline


def _known_lengths(folder: "SuiteFolder", specs: "Sequence[RunSpec]") -> "tuple[RunSpec, ...]":
    """Lengths that this call had no need to find out, from the records of done runs."""
    result = []
    for spec in specs:
        state = folder.state(spec) if not spec.iterations else None
        length = int(state.iteration) if state is not None and state.kind == "done" else 0
        result.append(replace(spec, iterations=spec.iterations or length))
    return tuple(result)


def _left(folder: "SuiteFolder", specs: "Sequence[RunSpec]", states: "Mapping[str, State]") -> str:
    from benchmarks.suites.runner import foresee, measured_runs

    running = [spec for spec in specs if states[spec.name].kind == "running"]
    if not running and any(state.kind == "queued" for state in states.values()):
        return ""
    if not running:
        return "" if all(state.settled for state in states.values()) else "; nothing is running"
    places = len(running) * max(max(spec.gpus, 1) for spec in specs)
    left = foresee(specs, states, measured_runs(folder, specs, None), places).seconds_left
    return f", about {format_seconds(left)} left"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


if __name__ == "__main__":
    run_cli(main)
