"""Equal-budget tuning: the same grid for every init, measured on held-out training images. Pure.

A grid is a suite of its own: every task is shortened, trained on all but a tenth of its training
images and tested on the rest (DATASETS.PART tune), once for each point. The best point of each
init, by the first of the metrics that tables show, then trains on all images as one more task. The
test split is in no run of the grid.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.suites.suite import DETECTION, Suite, SuiteTask, all_keys, parsed
from detection.config.keys import HONORED, TRANSFER, at_edge
from moco.common.cfgnode import flatten, read_yaml
from moco.common.errors import UserError, plural

DEFAULTS = Path(__file__).with_name("tuning.yaml")
Point = tuple[tuple[str, str], ...]  # KEY VALUE pairs


@dataclass(frozen=True)
class Grid:
    """The points of one task.

    Attributes:
        axes: key → values, as texts, in the order of the table.
        untuned: the task's own values.
        share: of the task's iterations.
    """

    axes: Mapping[str, tuple[str, ...]]
    untuned: Point
    share: float

    @property
    def points(self) -> tuple[Point, ...]:
        pairs = [[(key, value) for value in axis] for key, axis in self.axes.items()]
        return tuple(itertools.product(*pairs))

    def __str__(self) -> str:
        """Return the text of SOLVER.TUNED, from which `tuned_axes` reads the values."""
        axes = (f"{key}={','.join(axis)}" for key, axis in self.axes.items())
        return f"{' '.join(axes)} at {self.share:g} of the schedule"


@dataclass(frozen=True)
class Choice:
    """What the grid says of one init.

    Attributes:
        point: the best; value: its metric on the held-out images, 0..100.
        untuned: that of the task's own values; None: they are not in the grid, or diverged.
        edges: keys whose best value is the lowest or the highest that was tried.
        diverged: number of points whose training did.
        equal: number of points with the best value.
    """

    point: Point
    value: float
    untuned: float | None
    edges: tuple[str, ...]
    diverged: int
    equal: int = 1


def grid_of(task: SuiteTask, own: Mapping[str, Any] | None = None) -> Grid:
    """The grid of a task; `own`: the suite's `tune`."""
    keys = {**HONORED, **TRANSFER, **all_keys(task)}
    table = read_yaml(DEFAULTS)
    share = float((own or {}).get("share", table["share"]))
    if own and "values" in own:
        axes = {key: tuple(map(float, values)) for key, values in flatten(own["values"]).items()}
    else:
        factors = table["factors"][keys.get("SOLVER.OPTIMIZER", "SGD")]
        axes = {k: tuple(float(keys[k]) * f for f in values) for k, values in factors.items()}
    texts = {key: tuple(f"{value:.6g}" for value in axis) for key, axis in axes.items()}
    return Grid(texts, tuple((key, f"{float(keys[key]):.6g}") for key in axes), share)


def grid_suite(suite: Suite) -> tuple[Suite, dict[str, tuple[str, Point]]]:
    """The suite of all grids, and its tasks' names → the task and the point that each is of."""
    from detection.datasets.parts import TUNE  # imports numpy

    tasks, points = [], {}
    for task in tunable(suite):
        grid, keys = grid_of(task, suite.tune), {**HONORED, **all_keys(task)}
        length = max(int(keys["SOLVER.MAX_ITER"] * grid.share), 1)
        # Tuples are texts in YAML.
        steps = tuple(max(int(step * grid.share), 1) for step in parsed(str(keys["SOLVER.STEPS"])))
        short = (
            ("DATASETS.PART", TUNE),
            ("SOLVER.MAX_ITER", str(length)),
            ("SOLVER.STEPS", str(steps)),
        )
        for point in grid.points:
            # After its values: a wider grid has the runs of the narrower one.
            name = ".".join((task.name, *(value for _, value in point)))
            points[name] = (task.name, point)
            overrides = (*task.overrides, *short, *point)
            tasks.append(replace(task, name=name, overrides=overrides, trials=1))
    return replace(suite, name=f"{suite.name}-tuning", tasks=tuple(tasks)), points


def tunable(suite: Suite) -> list[SuiteTask]:
    """The tasks that have a grid, detection's; UserError: there is none."""
    found = [task for task in suite.tasks if task.program == DETECTION]
    if not found:
        raise UserError(f"suite {suite.name}: has no task of detection, which is what is tuned")
    return found


def choose(
    suite: Suite, points: Mapping[str, tuple[str, Point]], found: Mapping[tuple[str, str], float]
) -> dict[str, dict[str, Choice]]:
    """Task → init → choice; of two equal points the first.

    Args:
        found: (name of a task of the grid, init) → metric; NaN where the training diverged.

    Raises:
        UserError: every point of an init diverged.
    """
    choices: dict[str, dict[str, Choice]] = {}
    for task in tunable(suite):
        grid = grid_of(task, suite.tune)
        names = {name: point for name, (of, point) in points.items() if of == task.name}
        for init in dict.fromkeys(init for name, init in found if name in names):
            values = {point: found[name, init] for name, point in names.items()}
            finite = {point: value for point, value in values.items() if value == value}
            if not finite:
                raise UserError(
                    f"{task.name} from {init}: all {len(values)} points of the grid diverged; "
                    "give the suite's file a `tune` with lower learning rates"
                )
            best = max(finite, key=lambda point: finite[point])
            edges = tuple(key for key, value in best if at_edge(value, grid.axes[key]))
            equal, diverged = list(finite.values()).count(finite[best]), len(values) - len(finite)
            choices.setdefault(task.name, {})[init] = Choice(
                best, finite[best], finite.get(grid.untuned), edges, diverged, equal
            )
    return choices


def with_tuned(suite: Suite, choices: Mapping[str, Mapping[str, Choice]]) -> Suite:
    """The suite with every tuned task beside the task itself, which is the untuned row."""
    tasks: list[SuiteTask] = []
    for task in suite.tasks:
        tasks.append(task)
        if task.program == DETECTION:
            tasks.append(
                replace(
                    task,
                    name=f"{task.name}_tuned",
                    overrides=(*task.overrides, ("SOLVER.TUNED", str(grid_of(task, suite.tune)))),
                    init_overrides={i: c.point for i, c in choices.get(task.name, {}).items()},
                    paper=(),
                )
            )
    return replace(suite, tasks=tuple(tasks))


def describe(choices: Mapping[str, Mapping[str, Choice]]) -> str:
    """What was chosen, a line for each init; also which values were at an edge."""
    lines = []
    for task, chosen in choices.items():
        lines.append(f"tuned {task}, on held-out training images:")
        for init, choice in chosen.items():
            values = ", ".join(f"{key} {value}" for key, value in choice.point)
            untuned = "not tried" if choice.untuned is None else f"{choice.untuned:.1f}"
            lines.append(f"  {init}: {values}: {choice.value:.1f} (untuned: {untuned})")
            if choice.diverged:
                lines.append(f"    {plural(choice.diverged, 'point')} diverged")
            if choice.value == 0:
                lines.append("    no point is above 0.0, the first was taken")
            elif choice.equal > 1:
                lines.append(f"    {choice.equal} points are equal, the first was taken")
            lines += [
                f"    {key} is at the edge of its grid: a better value may lie beyond; widen it "
                "with `tune` in the suite's file"
                for key in choice.edges
            ]
    return "\n".join(lines)
