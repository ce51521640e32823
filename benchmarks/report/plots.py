"""Figures: loss and AP over iterations, AP and its gaps, schedules, classes, precision and recall.

A curve is the mean over the seeds and a band from the lowest to the highest; a point is one run.
A function that returns None instead of a figure found nothing to draw.
"""

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import escape
from benchmarks.report.aggregate import RANDOM, Table
from benchmarks.report.records import Results, Run
from detection.evaluation.metrics import titles
from moco.common.errors import UserError
from moco.common.files import PathLike, atomic_write
from moco.common.run import METRICS_NAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]  # iterations, losses

LOSS_NAMES = ("total_loss", "loss")  # Detectron2's name, and that of pre-training
GREY = "#8a8a8a"
# Okabe and Ito's palette, which color-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DPI = 150
MAX_VALUE = 1e100  # of a curve; beyond it an axis overflows
MAX_CLASSES = 40  # of more (COCO, LVIS) those are shown on which the initializations differ most
# What reading a line that somebody else wrote may raise.
_NOT_METRICS = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
# A task's name ends in its schedule: _24k, _2x, _s1x, or that with _frozen_bn.
_SCHEDULE = re.compile(r"_(\d+k|s?\d+x)(?=_|$)")


def read_losses(runs: Sequence[Run]) -> list[Curve]:
    """The loss curve of every run that has one (a record may have come without its metrics).

    Raises:
        UserError: a line of `metrics.json` that is not JSON.
    """
    files = [run.folder / METRICS_NAME for run in runs]
    curves = [read_curve(path, LOSS_NAMES) for path in files if path.is_file()]
    return [curve for curve in curves if len(curve[0])]


def read_curve(path: Path, names: Sequence[str], x: str = "iteration") -> Curve:
    """From the lines of `metrics.json` the `x` and the first of `names` that a line has.

    Of an iteration logged twice (a resumed run) the last one counts.

    Raises:
        UserError: unreadable, a line that is not JSON, or without iteration or `x`.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    points: dict[int, tuple[float, float]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            y = next((values[name] for name in names if values.get(name) is not None), None)
            if y is None:
                continue
            at, value = float(values[x]), float(y)
            if not abs(at) < MAX_VALUE:
                raise ValueError(f"{x}: got {at}, expected a finite number")
            points[int(values["iteration"])] = at, value if abs(value) < MAX_VALUE else np.nan
        except _NOT_METRICS as error:
            raise UserError(f"{path}: line {number} is not a line of metrics ({error})") from error
    xy = np.array([points[i] for i in sorted(points)], float).reshape(-1, 2)
    return xy[:, 0], xy[:, 1]


def losses(table: Table, results: Results) -> tuple[dict[str, list[Curve]], dict[str, list[Curve]]]:
    """The arguments of `loss_figure`: curves of all pre-trainings, and of the table's runs.

    Raises:
        UserError: as `read_losses`.
    """
    tasks = [run.record.task for run in results.pretraining]
    pretraining = {
        f"{task} {run.folder.name}" if tasks.count(task) > 1 else task: read_losses([run])
        for task, run in zip(tasks, results.pretraining, strict=True)
    }
    return pretraining, {row.init: read_losses(row.runs) for row in table.rows}


def band(curves: Sequence[Curve]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Iterations that all curves share, and mean, lowest and highest loss there."""
    shared = sorted(set.intersection(*(set(iterations.tolist()) for iterations, _ in curves)))
    values = np.array([[loss[it == i][0] for i in shared] for it, loss in curves])
    return np.array(shared), values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def plot_losses(
    path: PathLike,
    pretraining: Mapping[str, Sequence[Curve]],
    finetuning: Mapping[str, Sequence[Curve]],
) -> None:
    """Write `loss_figure`."""
    save_figure(loss_figure(pretraining, finetuning), path)


def loss_figure(
    pretraining: Mapping[str, Sequence[Curve]], finetuning: Mapping[str, Sequence[Curve]]
) -> "Figure":
    """Two panels: the pre-training's loss, and the fine-tunings' by initialization.

    A panel without curves is left out.
    """
    panels = [
        (title, curves)
        for title, curves in (("Pre-training", pretraining), ("Fine-tuning", finetuning))
        if any(curves.values())
    ]
    figure, axes = new_figure(max(len(panels), 1), width=5.2, height=3.4)
    for axis, (title, curves) in zip(axes, panels, strict=False):
        _draw_curves(axis, curves)
        axis.set(title=title, xlabel="iteration", ylabel="loss")
        axis.margins(x=0.01)
        axis.set_ylim(bottom=0)
        if len(curves) > 1 or title == "Fine-tuning":
            axis.legend(frameon=False)
    return figure


def plot_ap(path: PathLike, table: Table) -> None:
    """Write `ap_figure`."""
    save_figure(ap_figure(table), path)


def ap_figure(table: Table) -> "Figure":
    """A panel per metric: a bar for the mean, a point for every seed, the gap to the baseline."""
    figure, axes = new_figure(len(table.metrics), width=1.2 + 0.85 * len(table.rows), height=3.4)
    names = [row.init for row in table.rows]
    colors = _colors(names)
    top = max((max(c.values) for row in table.rows for c in row.cells.values() if c), default=1.0)
    heads = titles(table.metrics)
    for axis, metric, title in zip(axes, table.metrics, heads, strict=True):
        for x, row in enumerate(table.rows):
            cell, gap = row.cells[metric], row.gaps[metric]
            if cell is None:
                axis.text(x, 0.02 * top, "–", ha="center", color=GREY)
                continue
            axis.bar(x, cell.mean, width=0.62, color=colors[row.init], alpha=0.3)
            axis.hlines(cell.mean, x - 0.31, x + 0.31, color=colors[row.init], linewidth=2)
            spread = np.linspace(-0.16, 0.16, cell.n) if cell.n > 1 else [0.0]
            axis.scatter(
                x + np.asarray(spread), cell.values, s=20, color=colors[row.init], zorder=3
            )
            label = f"{cell.mean:.1f}" + (f"\n({gap.printed:+.1f})" if gap else "")
            axis.text(x, max(cell.values) + 0.03 * top, label, ha="center", va="bottom", fontsize=9)
        axis.set(title=pretty(title), ylim=(0, 1.25 * top), xlim=(-0.6, len(names) - 0.4))
        axis.set_xticks(
            range(len(names)), [*map(escape.figure, names)], rotation=0 if len(names) < 4 else 30
        )
        axis.tick_params(axis="x", length=0)
    axes[0].set_ylabel(f"{'AP' if heads[0].startswith('AP') else heads[0]} (0 to 100)")
    return figure


def gap_figure(table: Table) -> "Figure | None":
    """A panel per metric: a bar per initialization, its gap to the baseline and the 95% interval.

    A gap without an interval (one trial) is a hollow bar.
    """
    rows = [row for row in table.rows if any(gap is not None for gap in row.gaps.values())]
    if not rows:
        return None
    height = 1.3 + 0.45 * len(rows)
    figure, axes = new_figure(len(table.metrics), width=3.4, height=height)
    colors = _colors([row.init for row in table.rows])
    for axis, metric, title in zip(axes, table.metrics, titles(table.metrics), strict=True):
        for y, row in enumerate(rows):
            gap = row.gaps[metric]
            if gap is None:
                axis.text(0, y, " –", va="center", color=GREY)
                continue
            known = gap.low is not None and gap.high is not None
            face = colors[row.init] if known else "none"
            edge = colors[row.init]
            axis.barh(y, gap.value, height=0.55, color=face, edgecolor=edge, alpha=0.45)
            if gap.low is not None and gap.high is not None:
                sides = [[gap.value - gap.low], [gap.high - gap.value]]
                axis.errorbar(gap.value, y, xerr=sides, color=edge, capsize=3, linewidth=1.6)
        axis.axvline(0, color="#444444", linewidth=1)
        axis.set_yticks(range(len(rows)), [escape.figure(row.init) for row in rows])
        axis.set(
            title=pretty(title),
            xlabel=f"points above {escape.figure(str(table.baseline))}",
            ylim=(len(rows) - 0.4, -0.6),
        )
        axis.grid(axis="y", visible=False)
        axis.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    for axis in axes[1:]:
        axis.tick_params(axis="y", labelleft=False)
    return figure


def ap_curve_figure(table: Table) -> "Figure | None":
    """The first metric over the iterations of a run, where runs were evaluated on the way."""
    metric = table.metrics[0]
    curves = {row.init: _evaluations(row.runs, metric) for row in table.rows}
    if not any(len(curve[0]) > 1 for runs in curves.values() for curve in runs):
        return None
    figure, [axis] = new_figure(1, width=5.2, height=3.4)
    _draw_curves(axis, {name: [c for c in runs if len(c[0])] for name, runs in curves.items()})
    axis.set(xlabel="iteration", ylabel=pretty(titles(table.metrics)[0]))
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    return figure


def family(table: Table) -> tuple[str, tuple[str, ...], str]:
    """What tables share that differ in their schedule alone: task without it, data, engine."""
    return _SCHEDULE.sub("", table.task), table.tested_on, table.engine


def schedule_figure(tables: Sequence[Table]) -> "Figure | None":
    """The first metric against the length of the fine-tuning; `tables` are of one family."""
    if len({table.iterations for table in tables}) < 2:
        return None
    ordered = sorted(tables, key=lambda table: table.iterations)
    metric = ordered[0].metrics[0]
    names = list(dict.fromkeys(row.init for table in ordered for row in table.rows))
    colors = _colors(names)
    figure, [axis] = new_figure(1, width=5.2, height=3.4)
    for name in names:
        points = [
            (table.iterations, cell)
            for table in ordered
            for row in table.rows
            if row.init == name and (cell := row.cells.get(metric)) is not None
        ]
        if points:
            x, mean = [x for x, _ in points], [cell.mean for _, cell in points]
            spread = [cell.std or 0.0 for _, cell in points]
            color, label = colors[name], escape.figure(name)
            axis.errorbar(x, mean, yerr=spread, marker="o", color=color, capsize=3, label=label)
    axis.set_xticks([table.iterations for table in ordered])
    axis.set(xlabel="iterations of fine-tuning", ylabel=pretty(titles(ordered[0].metrics)[0]))
    axis.legend(frameon=False)
    return figure


def class_figure(table: Table) -> "Figure | None":
    """A line per class, a point per initialization: the mean over its seeds."""
    kind = table.metrics[0].split("/", 1)[0]
    start = f"{kind}/IoU-" if kind == "sem_seg" else f"{kind}/AP-"
    means: dict[str, dict[str, float]] = {}
    for row in table.rows:
        for name in sorted({n for r in row.runs for n in r.record.metrics if n.startswith(start)}):
            values = [v for r in row.runs if (v := r.record.metrics.get(name)) is not None]
            if values:
                means.setdefault(name.removeprefix(start), {})[row.init] = float(np.mean(values))
    if not means:
        return None
    spread = {name: max(of.values()) - min(of.values()) for name, of in means.items()}
    shown = sorted(sorted(means, key=lambda name: -spread[name])[:MAX_CLASSES])
    shown.sort(key=lambda name: np.mean(list(means[name].values())))
    figure, [axis] = new_figure(1, width=5.8, height=1.2 + 0.22 * len(shown))
    colors = _colors([row.init for row in table.rows])
    for y, name in enumerate(shown):
        values = list(means[name].values())
        axis.plot([min(values), max(values)], [y, y], color="#cccccc", linewidth=2, zorder=1)
    for row in table.rows:
        points = [
            (means[name][row.init], y) for y, name in enumerate(shown) if row.init in means[name]
        ]
        if points:
            x, positions = zip(*points, strict=True)
            label = escape.figure(row.init)
            axis.scatter(x, positions, s=26, color=colors[row.init], label=label, zorder=2)
    axis.set_yticks(range(len(shown)), [*map(escape.figure, shown)])
    left_out = f" ({len(shown)} of {len(means)}, by difference)" if len(shown) < len(means) else ""
    what = "IoU" if kind == "sem_seg" else "AP"
    axis.set(xlabel=f"{what} by class{left_out}", ylim=(-0.7, len(shown) - 0.3))
    axis.set_xlim(left=0)
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    figure.legend(frameon=False, loc="outside upper center", ncols=min(len(table.rows), 4))
    return figure


def precision_figure(curves: Mapping[str, Curve]) -> "Figure":
    """Precision against recall at IoU 0.5, a curve per initialization."""
    figure, [axis] = new_figure(1, width=4.4, height=3.6)
    colors = _colors(list(curves))
    for name, (recall, precision) in curves.items():
        label = escape.figure(name)
        axis.plot(recall, precision, color=colors[name], linewidth=1.8, label=label)
    axis.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
    axis.legend(frameon=False)
    return figure


def to_png(figure: "Figure") -> bytes:
    """The image as a PNG file has it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()


def _evaluations(runs: Sequence[Run], metric: str) -> list[Curve]:
    files = [run.folder / METRICS_NAME for run in runs]
    return [read_curve(path, (metric,)) for path in files if path.is_file()]


def _draw_curves(axis: "Axes", curves: Mapping[str, Sequence[Curve]]) -> None:
    colors = _colors(list(curves))
    for name, runs in curves.items():
        if not runs:
            continue
        x, mean, low, high = band(runs)
        label = escape.figure(name) + (f" ({len(runs)} seeds)" if len(runs) > 1 else "")
        marker = "o" if len(x) == 1 else None
        axis.plot(x, mean, color=colors[name], linewidth=1.8, label=label, marker=marker)
        axis.fill_between(x, low, high, color=colors[name], alpha=0.18, linewidth=0)


def pretty(title: str) -> str:
    """`AP50^bb` as the paper sets it, for matplotlib."""
    parts = re.fullmatch(r"AP(\d*)(?:\^(\w+))?", title)
    if parts is None or title == "AP":
        return title
    threshold, mark = parts.groups()
    upper = f"^{{\\mathrm{{{mark}}}}}" if mark else ""
    return f"AP${upper}_{{{threshold}}}$" if threshold else f"AP${upper}$"


def _colors(names: Sequence[str]) -> dict[str, str]:
    """Gray for random, the palette in order for the others."""
    others = [name for name in names if name != RANDOM]
    colors = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(others)}
    return {RANDOM: GREY, **colors}


def new_figure(panels: int, width: float, height: float) -> tuple["Figure", list["Axes"]]:
    """A row of panels, each `width` x `height` inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(width, 2.6) * panels, height), layout="constrained", dpi=DPI)
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def save_figure(figure: "Figure", path: PathLike) -> None:
    """Write a PNG file, atomically."""
    atomic_write(path, lambda file: figure.savefig(file, format="png", facecolor="white"))
