"""Seeds only as needed: `--until-decided` adds seeds until the gaps of a suite are decided.

At each look, all rows of a task have the same number of seeds, and the table of these runs decides:
each gap of AP to the baseline is significant, or shown to be within the margin. Otherwise every row
gets one seed more. Testing again after each seed at p < 0.05 would call equal rows different in far
more than 5% of all cases. So each of the k possible looks tests at the level 0.05 / k (Bonferroni,
over the looks; Holm, over the rows), which holds for any rule by which a suite stops.

The looks follow from the records of the runs and from the plan in `suite.json` alone, so a suite
that was killed continues with the same looks, and each table of its runs repeats the last one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report.records import PLAN, SUITE_NAME, FinishedRun, collect
from benchmarks.report.stats import significance
from benchmarks.report.style import MINUS
from benchmarks.report.table import Grid, Table, TextCell, aggregate, gap, gap_name, untested
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.runs import DONE
from benchmarks.suites.suite import PROGRAMS, RunSpec, Suite, row_of
from detection.evaluation.metrics import headline_names, titles
from moco.common.command import RANDOM
from moco.common.errors import UserError

FIRST_SEEDS, MOST_SEEDS, MARGIN = 3, 9, 0.5  # of --until-decided


@dataclass(frozen=True)
class InterimPlan:
    """Plan of the looks, which is fixed before the first one.

    Attributes:
        baseline: Row with which the others are compared.
        rows: The other rows.
        first: Number of seeds at the first look.
        most: Number of seeds at the last look; there is a look at each number between them.
        margin: Largest gap, in points, that counts as equivalence.
    """

    baseline: str
    rows: list[str]
    first: int = FIRST_SEEDS
    most: int = MOST_SEEDS
    margin: float = MARGIN

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            UserError: If there is nothing to compare, or a number is out of range.
        """
        if not self.rows or self.baseline in self.rows:
            raise UserError("--until-decided: expected a baseline and at least one other row")
        if not 2 <= self.first < self.most <= 50:
            text = f"got seeds from {self.first} to {self.most}, expected at least 2 to at most 50"
            raise UserError(f"--until-decided: {text}, the first below the last")
        if not 0 < self.margin <= 100:
            raise UserError(f"--margin {self.margin}: expected points above 0 to 100")

    @property
    def looks(self) -> int:
        """Largest number of looks."""
        return self.most - self.first + 1

    @property
    def condition(self) -> str:
        """Condition of a look, as text."""
        return f"looks are at {self.first} to {self.most} equal seeds of both rows"


def with_looks(tables: Sequence[Table], margin: float | None = None) -> list[Table]:
    """Return tables whose tests account for the looks of the suites; others are unchanged.

    Args:
        tables: Tables of one report.
        margin: Value of `--margin`, which must equal the margin of the looks.

    Raises:
        UserError: If runs of a table are of several plans, or of one and of none, or a plan is
            damaged.
    """
    plans: dict[Path | None, InterimPlan | None] = {None: None}

    def plan_of(run: FinishedRun) -> InterimPlan | None:
        suite = run.folder.parents[3] if run.suite_task else None
        if suite is not None and suite not in plans:
            content = run.read_suite().get(PLAN)
            try:
                plans[suite] = content and InterimPlan(**content)
            except TypeError as error:
                raise UserError(f"{suite / SUITE_NAME}: {PLAN}: not a plan of looks") from error
        return plans[suite]

    found = []
    for table in tables:
        plan = plan_of(table.runs[0])
        if others := [run.folder for run in table.runs if plan_of(run) != plan]:
            raise UserError(
                f"{table.title}: {table.runs[0].folder} and {others[0]} cannot be in one table, as "
                "--until-decided added seeds to one of them; give the folder of each suite alone"
            )
        if plan and margin not in (None, plan.margin):
            raise UserError(f"--margin {margin}: the looks of this suite were at {plan.margin}")
        found.append(with_look_level(table, plan) if plan else table)
    return found


def with_look_level(table: Table, plan: InterimPlan) -> Table:
    """Return a table with tests of AP, the first headline metric, at the level of one look."""
    base, metric = table.base, headline_names(table.metrics)[0]
    name = titles(table.metrics)[table.metrics.index(metric)]
    why, rows = f"{plan.condition}, at {name} only", []
    for row in table.rows:
        gaps = {key: untested(each, why) for key, each in row.gaps.items()}
        if base and row is not base and (a := row.cells[metric]) and (b := base.cells[metric]):
            gaps[metric] = gap(a, b, plan.looks) if a.n == b.n >= plan.first else gaps[metric]
        rows.append(replace(row, gaps=gaps))
    changes: dict[str, Any] = {"rows": tuple(rows), "margin": plan.margin, "looks": plan.looks}
    if table.resamples:  # over runs, it would be one test more
        of_images = {key: replace(each, both=None) for key, each in table.resamples.gaps.items()}
        changes["resamples"] = replace(table.resamples, gaps=of_images)
    table = replace(table, **changes)
    note = f"seeds were added until each gap to {plan.baseline} was decided; {why}, and intervals "
    note += f"and p-values account for all looks (each at the level 0.05 / {plan.looks})"
    found = outcomes(table, plan)
    lines = [[gap_name(table, row), *map(TextCell, each[:3])] for row, each in found.items()]
    grid = Grid("Seeds as needed", ["", "seeds", "look", "decided"], lines)
    return replace(table, notes=(note,), grids=(grid,))


def outcomes(table: Table, plan: InterimPlan) -> dict[str, tuple[str, str, str, bool]]:
    """Return row → seeds, look, decision or reason of none, and whether a seed comes next."""
    if (base := table.base) is None:
        return {}
    within = f"within ±{plan.margin:g}"
    tests = [each for each in significance(table) if each.significant or each.equivalent]
    decided = {each.row.init: "a gap" if each.significant else within for each in tests}
    found = {}
    for row in (row for row in table.rows if row is not base):
        n = min(row.n, base.n)
        more = row.n == base.n and plan.first <= n < plan.most and row.init not in decided
        no = f"not yet: seed {n} comes next" if more else f"no: {plan.condition}"
        look = f"{max(n - plan.first + 1, 0)} of {plan.looks}"
        found[row.init] = str(n), look, decided.get(row.init, no), more
    return found


def next_runs(
    specs: Sequence[RunSpec], folder: SuiteFolder, plan: InterimPlan
) -> tuple[tuple[RunSpec, ...], list[str]]:
    """Return the runs up to the next look at each task, and lines about the gaps at the last look.

    Args:
        specs: Runs with all seeds that the plan allows.
        folder: Folder of the suite.
        plan: Plan of the looks.
    """
    groups: dict[tuple[str, str], list[RunSpec]] = {}
    for spec in (spec for spec in specs if spec.program in PROGRAMS):
        groups.setdefault((spec.task, spec.engine), []).append(spec)
    wanted, lines = set[str](), dict[tuple[str, str], list[str]]()
    for setting, own in groups.items():
        states = {spec.name: folder.run(spec).state() for spec in own}
        for n in range(plan.first, plan.most + 1):
            so_far = [spec for spec in own if spec.seed < n]
            wanted |= {spec.name for spec in so_far}
            done = [spec for spec in so_far if states[spec.name].kind == DONE]
            over = all(states[spec.name].settled for spec in so_far)
            if not over or plan.baseline not in {spec.init for spec in done}:
                break
            runs = collect([folder.folder_of(spec) for spec in done]).transfer
            found = outcomes(with_look_level(aggregate(runs, plan.baseline)[0], plan), plan)
            at = f"look {n - plan.first + 1} of {plan.looks}: {', '.join(setting)}, {n} seeds: "
            gaps = {f"{row} {MINUS} {plan.baseline}": why for row, (_, _, why, _) in found.items()}
            lines[setting] = [f"{at}{pair}: {why}" for pair, why in gaps.items()]
            if not any(more for *_, more in found.values()):
                break
    chosen = tuple(s for s in specs if s.program not in PROGRAMS or s.name in wanted)
    return chosen, [line for of_setting in lines.values() for line in of_setting]


def make_interim_plan(
    inits: Collection[str],
    baseline: str | None,
    first: int | None,
    most: int | None,
    margin: float | None,
) -> InterimPlan:
    """Make the plan of the looks from the options of a suite, of which None is the default.

    Args:
        inits: Inits of all runs.
        baseline: Row that gaps refer to; None: random.
        first: Number of seeds at the first look.
        most: Number of seeds at the last look.
        margin: Largest gap, in points, that counts as equivalence.

    Raises:
        UserError: If there is nothing to compare, or a number is out of range.
    """
    if several := next((row_of(name) for name in inits if row_of(name) != name), None):
        raise UserError(
            f"--until-decided: {several} has several pre-trainings, and more seeds are no evidence "
            "about others; give one file, or --trials"
        )
    if (base := baseline or RANDOM) not in inits:
        raise UserError(
            f"--until-decided: no row {base} to compare with; give --init {RANDOM}, or --baseline "
            f"with one of {', '.join(inits)}"
        )
    given = {"first": first, "most": most, "margin": margin}
    own: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    return InterimPlan(base, [row for row in inits if row != base], **own)


def with_seeds(suite: Suite, seeds: int) -> Suite:
    """Return a suite whose tasks have this many seeds; points of a grid keep one seed."""
    tasks = (task if task.point_of else replace(task, trials=seeds) for task in suite.tasks)
    return replace(suite, tasks=tuple(tasks))
