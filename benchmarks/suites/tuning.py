r"""Equal-budget tuning: the same grid for every init, evaluated on held-out training images.

For each point of the grid, a shortened schedule is trained on all but a tenth of the training
images, and tested on the rest (DATASETS.PART tune). One more task then trains each init on all
images with its best point, by the first of the metrics that tables show. No run of the grid reads
the test split. The choice is a run of the suite, which writes the file that the tuned task reads:

    python -m benchmarks.suites.tuning --config TASK.yaml --init NAME --grid TEXT \
        --untuned KEY=VALUE,... --run KEY=VALUE,... FOLDER ... OUT.yaml
"""

import argparse
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.suites.suite import DETECTION, RunSpec, Suite, SuiteTask, all_keys, parse_value
from detection.config.keys import KEYS, at_edge, tuned_axes
from detection.evaluation.metrics import headline_names
from moco.common.cfgnode import flatten, read_yaml
from moco.common.errors import UserError, plural, run_cli
from moco.common.files import atomic_write_text, expand_home, read_text
from moco.common.keys import defaults_of
from moco.common.run import RECORD_NAME, read_record

DEFAULTS = Path(__file__).with_name("tuning.yaml")
Point = tuple[tuple[str, str], ...]  # KEY VALUE pairs


@dataclass(frozen=True)
class Grid:
    """Grid of one task.

    Attributes:
        axes: Key → values, as strings.
        untuned: Values of the untuned task.
        share: Length of a training, as a share of the task's iterations.
    """

    axes: Mapping[str, tuple[str, ...]]
    untuned: Point
    share: float

    @property
    def points(self) -> tuple[Point, ...]:
        """All combinations of the values."""
        pairs = [[(key, value) for value in axis] for key, axis in self.axes.items()]
        return tuple(itertools.product(*pairs))

    def __str__(self) -> str:
        """Return the value of SOLVER.TUNED, which `tuned_axes` parses."""
        axes = (f"{key}={','.join(axis)}" for key, axis in self.axes.items())
        return f"{' '.join(axes)} at {self.share:g} of the schedule"


@dataclass(frozen=True)
class Choice:
    """Choice of a point for one init.

    Attributes:
        point: The best point.
        value: Its metric on the held-out images, 0..100.
        untuned: Metric of the untuned values; None if they are not in the grid, or diverged.
        edges: Keys whose best value is the lowest or the highest of the grid.
        diverged: Number of points whose training diverged.
        equal: Number of points with the best metric.
    """

    point: Point
    value: float
    untuned: float | None
    edges: tuple[str, ...]
    diverged: int
    equal: int = 1


def grid_of(task: SuiteTask, own: Mapping[str, Any] | None = None) -> Grid:
    """Return the grid of a task, from `own`, the `tune` of the suite, or from tuning.yaml."""
    keys = {**defaults_of(KEYS), **all_keys(task)}
    table = read_yaml(DEFAULTS)
    share = float((own or {}).get("share", table["share"]))
    if own and "values" in own:
        axes = {key: tuple(map(float, values)) for key, values in flatten(own["values"]).items()}
    else:
        factors = table["factors"][keys.get("SOLVER.OPTIMIZER", "SGD")]
        axes = {k: tuple(float(keys[k]) * f for f in values) for k, values in factors.items()}
    texts = {key: tuple(f"{value:.6g}" for value in axis) for key, axis in axes.items()}
    return Grid(texts, tuple((key, f"{float(keys[key]):.6g}") for key in axes), share)


def with_grids(suite: Suite) -> Suite:
    """Insert the points of the grid and the tuned task after each detection task.

    Raises:
        UserError: If the suite has no detection task.
    """
    from detection.datasets.base import TUNE  # imports numpy

    if all(task.program != DETECTION for task in suite.tasks):
        raise UserError(
            f"--tune: suite {suite.name} has no detection task, and others have no grid"
        )
    tasks: list[SuiteTask] = []
    for task in suite.tasks:
        tasks.append(task)
        if task.program != DETECTION:
            continue
        grid, keys = grid_of(task, suite.tune), {**defaults_of(KEYS), **all_keys(task)}
        length = max(int(keys["SOLVER.MAX_ITER"] * grid.share), 1)
        # YAML reads a tuple as a string.
        steps = tuple(
            max(int(step * grid.share), 1) for step in parse_value(str(keys["SOLVER.STEPS"]))
        )
        short = (
            ("DATASETS.PART", TUNE),
            ("SOLVER.MAX_ITER", str(length)),
            ("SOLVER.STEPS", str(steps)),
        )
        for point in grid.points:
            # A name of only the values lets a wider grid reuse the runs of a narrower grid.
            name = ".".join((task.name, *(value for _, value in point)))
            overrides = (*task.overrides, *short, *point)
            own: dict[str, Any] = {"point_of": task.name, "point": point, "trials": 1, "paper": ()}
            tasks.append(replace(task, name=name, overrides=overrides, **own))
        free = tuple((key, value) for key, value in task.overrides if key not in grid.axes)
        overrides = (*free, ("SOLVER.TUNED", str(grid)))
        name = f"{task.name}_tuned"
        own = {"tunes": task.name, "point": grid.untuned, "paper": ()}
        tasks.append(replace(task, name=name, overrides=overrides, **own))
    return replace(suite, tasks=tuple(tasks))


def choice_command(choice: RunSpec, grid: Path) -> list[str]:
    """Return the command that chooses one of the trained points and writes the tuned file.

    Args:
        choice: Run of the choice.
        grid: Folder of the runs of grids, see benchmarks/suites/folder.py.
    """
    pairs = zip(choice.points, choice.after, strict=True)
    runs = [word for point, name in pairs for word in ("--run", point, str(grid / name))]
    program = [sys.executable, "-m", "benchmarks.suites.tuning", *choice.arguments, *runs]
    return [*program, str(grid / choice.name / choice.config.name)]


def choose(
    axes: Mapping[str, Sequence[str]], found: Mapping[Point, float], untuned: Point
) -> Choice:
    """Choose the point with the best metric; the first one if several are equal.

    Args:
        axes: Key → values of the grid.
        found: Point → metric; NaN if the training diverged.
        untuned: Values of the untuned task.

    Raises:
        UserError: If every point diverged.
    """
    finite = {point: value for point, value in found.items() if not math.isnan(value)}
    if not finite:
        raise UserError(
            f"all {len(found)} points of the grid diverged; give the suite's file a `tune` with "
            "lower learning rates"
        )
    best = max(finite, key=lambda point: finite[point])
    edges = tuple(key for key, value in best if at_edge(value, axes[key]))
    equal, diverged = list(finite.values()).count(finite[best]), len(found) - len(finite)
    return Choice(best, finite[best], finite.get(untuned), edges, diverged, equal)


def describe(init: str, choice: Choice) -> list[str]:
    """Format the choice, with warnings about divergence, ties and values at an edge."""
    values = ", ".join(f"{key} {value}" for key, value in choice.point)
    untuned = "not tried" if choice.untuned is None else f"{choice.untuned:.1f}"
    lines = [f"{init}: {values}: {choice.value:.1f} (untuned: {untuned})"]
    if choice.diverged:
        lines.append(f"  {plural(choice.diverged, 'point')} diverged")
    if choice.value == 0:
        lines.append("  no point is above 0.0, the first was taken")
    elif choice.equal > 1:
        lines.append(f"  {choice.equal} points are equal, the first was taken")
    lines += [
        f"  {key} is at the edge of its grid: a better value may lie beyond; widen it with `tune` "
        "in the suite's file"
        for key in choice.edges
    ]
    return lines


def read_description(path: Path) -> list[str]:
    """Read the lines of `describe` from the file that `main` writes; empty without the file."""
    if not path.is_file():
        return []
    lines = read_text(path).splitlines()
    comments = itertools.takewhile(lambda line: line.startswith("# "), lines)
    return [line.removeprefix("# ") for line in comments]


def _measured(folder: Path) -> float:
    """Read the headline metric of a point's run; NaN if it diverged.

    Raises:
        UserError: If the run is not done.
    """
    path = folder / RECORD_NAME
    record = read_record(path) if path.is_file() else None
    if record is None or not (record.diverged or record.status == "done"):
        raise UserError(f"{folder}: this point of the grid has no result, so nothing is chosen")
    value = record.metrics[headline_names(record.metrics)[0]] if not record.diverged else None
    return math.nan if value is None else value


def main(argv: Sequence[str] | None = None) -> None:
    """Choose the best point, print the choice, and write the tuned task's file."""
    args = build_parser().parse_args(argv)
    found = {_point(text): _measured(Path(folder)) for text, folder in args.run}
    choice = choose(tuned_axes({"SOLVER.TUNED": args.grid}), found, _point(args.untuned))
    lines = describe(args.init, choice)
    print(*lines, sep="\n")
    content: dict[str, Any] = {"_BASE_": str(args.config.resolve())}
    for key, value in choice.point:
        *sections, name = key.split(".")
        node = content
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = parse_value(value)
    atomic_write_text(args.out, "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(content))


def _point(text: str) -> Point:
    pairs = [pair.partition("=") for pair in text.split(",")]
    return tuple((key, value) for key, _, value in pairs)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the choice."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suites.tuning",
        description="Choose the best point of a grid, and write the task with its values.",
    )
    add = parser.add_argument
    add("out", type=expand_home, metavar="OUT.yaml")
    add("--config", type=expand_home, required=True, metavar="TASK.yaml")
    add("--init", required=True, metavar="NAME", help="init that the printed choice names")
    add("--grid", required=True, help="value of SOLVER.TUNED")
    add("--untuned", required=True, metavar="KEY=VALUE,...", help="the task's own values")
    add("--run", nargs=2, action="append", required=True, metavar=("KEY=VALUE,...", "FOLDER"))
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    run_cli(main)
