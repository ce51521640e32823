"""Figures: loss over iterations, and AP per initialisation with every seed shown (PNG files).

A curve is the mean over the seeds and a band from the lowest to the highest; a point is one run.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.aggregate import RANDOM, Table
from benchmarks.results import Run
from detection.metrics import titles
from moco.errors import UserError
from moco.fileio import PathLike, atomic_write
from moco.run import METRICS_NAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]  # iterations, losses

LOSS_NAMES = ("total_loss", "loss")  # Detectron2's name, and that of pre-training
GREY = "#8a8a8a"
# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DPI = 150


def read_losses(runs: Sequence[Run]) -> list[Curve]:
    """The loss curve of every run that has one (a record may have come without its metrics).

    Raises:
        UserError: a line of ``metrics.json`` that is not JSON.
    """
    files = [run.folder / METRICS_NAME for run in runs]
    curves = [read_curve(path, LOSS_NAMES) for path in files if path.is_file()]
    return [curve for curve in curves if len(curve[0])]


def read_curve(path: Path, names: Sequence[str], x: str = "iteration") -> Curve:
    """From the lines of ``metrics.json`` the ``x`` and the first of ``names`` that a line has.

    Of an iteration logged twice (a resumed run) the last one counts.

    Raises:
        UserError: a line that is not JSON, or without iteration or ``x``.
    """
    points: dict[int, tuple[float, float]] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            values = json.loads(line)
            y = next((values[name] for name in names if values.get(name) is not None), None)
            if y is not None:
                points[int(values["iteration"])] = float(values[x]), float(y)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: line {number} is not a line of metrics ({error})") from error
    xy = np.array([points[i] for i in sorted(points)], float).reshape(-1, 2)
    return xy[:, 0], xy[:, 1]


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
    """Two panels: the pre-training's loss, and the fine-tunings' by initialisation.

    A panel without curves is left out.
    """
    panels = [
        (title, curves)
        for title, curves in (("Pre-training", pretraining), ("Fine-tuning", finetuning))
        if any(curves.values())
    ]
    figure, axes = new_figure(max(len(panels), 1), width=5.2, height=3.4)
    for axis, (title, curves) in zip(axes, panels, strict=False):
        colours = _colours(list(curves))
        for name, runs in curves.items():
            if not runs:
                continue
            iterations, mean, low, high = band(runs)
            label = name if len(runs) == 1 else f"{name} ({len(runs)} seeds)"
            axis.plot(iterations, mean, color=colours[name], linewidth=1.8, label=label)
            axis.fill_between(iterations, low, high, color=colours[name], alpha=0.18, linewidth=0)
        axis.set(title=title, xlabel="iteration", ylabel="loss")
        axis.margins(x=0.01)
        axis.set_ylim(bottom=0)
        if len(curves) > 1 or title == "Fine-tuning":
            axis.legend(frameon=False)
    save_figure(figure, path)


def plot_ap(path: PathLike, table: Table) -> None:
    """A panel per metric: a bar for the mean, a point for every seed, the gap to the baseline."""
    figure, axes = new_figure(len(table.metrics), width=1.2 + 0.85 * len(table.rows), height=3.4)
    names = [row.init for row in table.rows]
    colours = _colours(names)
    top = max((max(c.values) for row in table.rows for c in row.cells.values() if c), default=1.0)
    heads = titles(table.metrics)
    for axis, metric, title in zip(axes, table.metrics, heads, strict=True):
        for x, row in enumerate(table.rows):
            cell, gap = row.cells[metric], row.gaps[metric]
            if cell is None:
                axis.text(x, 0.02 * top, "–", ha="center", color=GREY)
                continue
            axis.bar(x, cell.mean, width=0.62, color=colours[row.init], alpha=0.3)
            axis.hlines(cell.mean, x - 0.31, x + 0.31, color=colours[row.init], linewidth=2)
            spread = np.linspace(-0.16, 0.16, cell.n) if cell.n > 1 else [0.0]
            axis.scatter(
                x + np.asarray(spread), cell.values, s=20, color=colours[row.init], zorder=3
            )
            label = f"{cell.mean:.1f}" + (f"\n({gap.value:+.1f})" if gap else "")
            axis.text(x, max(cell.values) + 0.03 * top, label, ha="center", va="bottom", fontsize=9)
        axis.set(title=title, ylim=(0, 1.25 * top), xlim=(-0.6, len(names) - 0.4))
        axis.set_xticks(range(len(names)), names, rotation=0 if len(names) < 4 else 30)
        axis.tick_params(axis="x", length=0)
    axes[0].set_ylabel(f"{'AP' if heads[0].startswith('AP') else heads[0]} (0 to 100)")
    save_figure(figure, path)


def _colours(names: Sequence[str]) -> dict[str, str]:
    """Grey for random, the palette in order for the others."""
    others = [name for name in names if name != RANDOM]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(others)}
    return {RANDOM: GREY, **colours}


def new_figure(panels: int, width: float, height: float) -> tuple["Figure", list["Axes"]]:
    """A row of panels, each ``width`` x ``height`` inches."""
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
