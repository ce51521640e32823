"""Seeds only as needed: which runs a suite with `--until-decided` computes next.

The suite computes its first seeds, looks, adds one seed to both rows of every comparison that is
not decided, looks again, and so on (benchmarks/report/sequential.py). What it computes next follows
from the records of the runs and from the plan in `suite.json` alone, so a suite that was killed
takes the same looks when it continues.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from benchmarks.report.aggregate import Table
from benchmarks.report.looks import why
from benchmarks.report.sequential import FIRST_SEEDS, MARGIN, MOST_SEEDS, SeedPlan
from benchmarks.report.style import MINUS
from benchmarks.report.tables import tables_so_far
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.options import SuiteOptions
from benchmarks.suites.suite import PROGRAMS, RunSpec, Suite, row_of
from benchmarks.suites.tables import results_of
from moco.common.command import RANDOM
from moco.common.errors import UserError


def check_options(options: SuiteOptions) -> None:
    """Check that the options of a suite fit `--until-decided`.

    Raises:
        UserError: If they do not.
    """
    for flag, value in (("--margin", options.margin), ("--max-seeds", options.max_seeds)):
        if value is not None and not options.until_decided:
            raise UserError(f"{flag} {value}: is for --until-decided")
    if options.until_decided and (options.plan or options.executor == "slurm"):
        flag = "--plan" if options.plan else "--executor slurm"
        raise UserError(
            f"--until-decided: {flag} submits all runs at once, and these depend on each other's "
            "results; give a fixed number, --trials N"
        )


def seed_plan(
    options: SuiteOptions, inits: Collection[str], baseline: str | None
) -> SeedPlan | None:
    """Return the plan of the looks, or None without `--until-decided`.

    Args:
        options: Options of the suite.
        inits: Inits of all runs.
        baseline: Row that gaps refer to; None: random.

    Raises:
        UserError: If there is nothing to compare, or a number is out of range.
    """
    if not options.until_decided:
        return None
    rows = list(dict.fromkeys(map(row_of, inits)))
    if several := next((name for name in inits if row_of(name) != name), None):
        raise UserError(
            f"--until-decided: {row_of(several)} has several pre-trainings, and more seeds are no "
            "evidence about others; give one file, or --trials"
        )
    base = baseline or RANDOM
    if base not in rows:
        raise UserError(
            f"--until-decided: no row {base} to compare with; give --init {RANDOM}, or --baseline "
            f"with one of {', '.join(rows)}"
        )
    return SeedPlan(
        base,
        tuple(row for row in rows if row != base),
        first=options.trials or FIRST_SEEDS,
        most=MOST_SEEDS if options.max_seeds is None else options.max_seeds,
        margin=MARGIN if options.margin is None else options.margin,
    )


def with_seeds(suite: Suite, seeds: int) -> Suite:
    """Return a suite whose tasks have this many seeds; the points of a grid keep their one."""
    tasks = (task if task.point_of else replace(task, trials=seeds) for task in suite.tasks)
    return replace(suite, tasks=tuple(tasks))


def next_runs(
    specs: Sequence[RunSpec], folder: SuiteFolder, plan: SeedPlan
) -> tuple[tuple[RunSpec, ...], list[str]]:
    """Return the runs up to the next look of each comparison, and a line on each last look.

    Args:
        specs: Runs with all seeds that the plan allows.
        folder: Folder of the suite.
        plan: Plan of the looks.
    """
    by_folder = {folder.folder_of(spec).resolve(): spec for spec in specs}
    results = results_of([folder.run(spec) for spec in specs], reported=())
    seeds: dict[tuple[str, str, str], int] = defaultdict(lambda: plan.first)
    lines = []
    for table in tables_so_far(results, plan.baseline):
        known = [by_folder[run.folder] for run in table.runs if run.folder in by_folder]
        for task, engine in dict.fromkeys((spec.task, spec.engine) for spec in known):
            for row, number in _wanted(table, plan).items():
                key = task, engine, row
                seeds[key] = max(seeds[key], number)
        lines += _lines(table)
    wanted = _up_to(specs, seeds)
    # No row runs ahead while a run of the others' next look is not over: the correction over the
    # rows needs all of them.
    for spec in wanted:
        if spec.program in PROGRAMS and not folder.run(spec).state().settled:
            for key in seeds:
                if key[:2] == (spec.task, spec.engine):
                    seeds[key] = min(seeds[key], max(plan.first, spec.seed + 1))
    return _up_to(wanted, seeds), lines


def _up_to(
    specs: Sequence[RunSpec], seeds: Mapping[tuple[str, str, str], int]
) -> tuple[RunSpec, ...]:
    return tuple(
        spec
        for spec in specs
        if spec.program not in PROGRAMS or spec.seed < seeds[spec.task, spec.engine, spec.init]
    )


def _wanted(table: Table, plan: SeedPlan) -> dict[str, int]:
    """Return row → number of seeds up to its next look."""
    found = {plan.baseline: plan.first}
    for row, each in (table.looks.comparisons if table.looks else {}).items():
        looked = each.looks[-1].seeds if each.looks else 0
        more = not each.decided and plan.first <= looked < plan.most
        found[row] = max(plan.first, looked + more)
        found[plan.baseline] = max(found[plan.baseline], found[row])
    return found


def _lines(table: Table) -> list[str]:
    if table.looks is None:
        return []
    return [
        f"look {len(each.looks)} of {table.looks.plan.looks}: {table.title}, {table.engine}: {row} "
        f"{MINUS} {table.baseline}, {each.looks[-1].seeds} seeds: {why(each, table)}"
        for row, each in table.looks.comparisons.items()
        if each.looks
    ]
