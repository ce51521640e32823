"""Figures: loss and AP over iterations, AP and its gaps, schedules, classes, precision and recall.

A curve is the mean over the seeds, with a band from the lowest to the highest; a point is one run.
Several metrics are plotted as small multiples. Functions return None instead of a figure if there
is nothing to plot. Pages hold figures and images as data URLs.
"""

import base64
import io
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.report.datasets import Collection
from benchmarks.report.records import FinishedRun, Results
from benchmarks.report.style import (
    GRAY,
    GRID_COLOR,
    MISSING,
    colors,
    figure_label,
    format_gap,
    title_parts,
)
from benchmarks.report.table import Gap, Row, Table
from detection.evaluation.metrics import titles
from moco.common.errors import UserError
from moco.common.files import PathLike, atomic_write, atomic_write_text, read_text
from moco.common.run import METRICS_NAME
from moco.data.decode import decode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUALITY = 70  # of JPEG
_PLAIN = " !$()*+,-./:;=?@[]^_`{|}~"  # neither special in a URL nor escaped in an attribute
Curve = tuple[NDArray[Any], NDArray[Any]]  # x and y
Curves = Mapping[str, Sequence[Curve]]  # name → one curve per run
LOSS_NAMES = ("total_loss", "loss")  # in the metrics of Detectron2, and of pre-training
DPI = 150
MAX_VALUE = 1e100  # of a curve; larger values overflow matplotlib's axes
MAX_POINTS = 75  # of a curve; every k-th of longer ones
MAX_CLASSES = 40  # if there are more (COCO, LVIS), those with the largest differences are plotted
# The names of tasks end in their schedule: _24k, _2x, _s1x, maybe followed by _frozen_bn.
_SCHEDULE = re.compile(r"_(\d+k|s?\d+x)(?=_| \(|$)")


def svg_source(plot: "Plot") -> str:
    """Return a figure as data URL."""
    return f"data:image/svg+xml,{quote(plot.svg, safe=_PLAIN)}"


def jpeg_source(image: Image.Image | Path, side_px: int) -> str:
    """Return an image, or that of a file, as data URL, with no side longer than `side_px`."""
    image = decode(image) if isinstance(image, Path) else image.copy()
    image.thumbnail((side_px, side_px))
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


class Plot:
    """Figure with its PNG and SVG files."""

    def __init__(self, figure: "Figure") -> None:
        self.figure = figure

    @cached_property
    def svg(self) -> str:
        """Reproducible SVG file, in which letters are text."""
        from matplotlib import rc_context

        buffer, no_metadata = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
        text: Any = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
        with rc_context({"svg.hashsalt": "report", **text}), _any_script():
            self.figure.savefig(buffer, format="svg", facecolor="white", metadata=no_metadata)
        return buffer.getvalue()

    def save(self, path: PathLike) -> list[Path]:
        """Write a PNG file and an SVG file next to it, and return both paths."""
        png, svg = Path(path), Path(path).with_suffix(".svg")
        atomic_write_text(svg, self.svg)  # before the PNG file: rendering changes the layout
        atomic_write(png, self.png)
        return [png, svg]

    def png(self, file: Any) -> None:
        """Write a PNG file to an open file."""
        with _any_script():
            self.figure.savefig(file, format="png", facecolor="white")


@contextmanager
def _any_script() -> Iterator[None]:
    """Silence matplotlib's warnings about names in scripts that its font lacks, such as Chinese.

    An SVG file has such names as text, for which a browser picks a font.
    """
    with warnings.catch_warnings():
        for message in ("Glyph .* missing from", "Matplotlib currently does not support"):
            warnings.filterwarnings("ignore", message, UserWarning)
        yield


def read_curves(runs: Sequence[FinishedRun], names: Sequence[str] = LOSS_NAMES) -> list[Curve]:
    """Read the curve of every run that has metrics; a record may come without them.

    Raises:
        UserError: If a line of `metrics.json` is not JSON.
    """
    files = [run.folder / METRICS_NAME for run in runs]
    curves = [read_curve(path, names) for path in files if path.is_file()]
    return [curve for curve in curves if len(curve[0])]


def read_curve(path: Path, names: Sequence[str], x: str = "iteration") -> Curve:
    """Read a curve from `metrics.json`, see `parse_curve`.

    Raises:
        UserError: If the file cannot be read, or a line is not JSON or lacks iteration or `x`.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    return parse_curve(text, str(path), names, x)


def parse_curve(text: str, where: str, names: Sequence[str], x: str) -> Curve:
    """Return a curve from lines of metrics: `x` and the first of `names` that each line has.

    If an iteration was logged twice (by a resumed run), the last value is used.

    Raises:
        UserError: If a line is not JSON or lacks iteration or `x`.
    """
    points: dict[int, tuple[float, float]] = {}
    decode = json.JSONDecoder().raw_decode  # twice as fast as `json.loads`, line by line
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            values, end = decode(line)
            if end != len(line):
                raise ValueError(f"extra text after character {end}")
            y = next((values[name] for name in names if values.get(name) is not None), None)
            if y is None:
                continue
            at, value = float(values[x]), float(y)
            if not abs(at) < MAX_VALUE:
                raise ValueError(f"{x}: got {at}, expected a finite number")
            points[int(values["iteration"])] = at, value if abs(value) < MAX_VALUE else np.nan
        except Exception as error:  # an untrusted line may raise anything
            raise UserError(f"{where}: line {number} is not a line of metrics ({error})") from error
    xy = np.array([points[i] for i in sorted(points)], float).reshape(-1, 2)
    return xy[:, 0], xy[:, 1]


def losses(table: Table, results: Results) -> dict[str, Curves]:
    """Read the panels of `loss_figure`: curves of all pre-trainings, and of a table's inits.

    A panel without curves is left out.

    Raises:
        UserError: If a line of `metrics.json` is not JSON.
    """
    tasks = [run.record.task for run in results.pretraining]
    pretraining = {
        task if tasks.count(task) == 1 else f"{task} {run.folder.name}": read_curves([run])
        for task, run in zip(tasks, results.pretraining, strict=True)
    }
    finetuning = {row.init: read_curves(row.runs) for row in table.rows}
    panels = {"Pre-training": pretraining, "Fine-tuning": finetuning}
    return {title: curves for title, curves in panels.items() if any(curves.values())}


def band(curves: Sequence[Curve]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the iterations that all curves share, with the mean, lowest and highest value."""
    shared = sorted(set.intersection(*(set(iterations.tolist()) for iterations, _ in curves)))
    values = np.array([[loss[it == i][0] for i in shared] for it, loss in curves])
    return np.array(shared), values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def loss_figure(panels: Mapping[str, Curves], title: str = "") -> "Figure":
    """Plot the losses of pre-training and fine-tuning, one panel each."""
    figure, axes = new_figure(max(len(panels), 1), width=5.2, height=3.4, title=title)
    for axis, (name, curves) in zip(axes, panels.items(), strict=False):
        _plot_curves(axis, curves)
        axis.set(title=name, xlabel="iteration", ylabel="loss")
        axis.margins(x=0.01)
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False)
    return figure


def ap_figure(table: Table, title: str = "") -> "Figure":
    """Plot a panel per metric: a bar for the mean, a point per seed, the gap to the baseline."""
    values = [max(cell.values) for row in table.rows for cell in row.cells.values() if cell]
    top = max(values, default=0) or 1.0

    def bar(axis: "Axes", y: int, row: Row, metric: str, color: str) -> bool:
        cell, gap = row.cells[metric], row.gaps[metric]
        if cell is None:
            return False
        axis.barh(y, cell.mean, height=0.62, color=color, alpha=0.3)
        axis.vlines(cell.mean, y - 0.31, y + 0.31, color=color, linewidth=2)
        spread = np.linspace(-0.16, 0.16, cell.n) if cell.n > 1 else np.zeros(1)
        axis.scatter(cell.values, y + spread, s=14, color=color, zorder=3)
        label = f"{cell.mean:.1f}" + (f" ({format_gap(gap.printed)})" if gap else "")
        axis.text(max(cell.values) + 0.03 * top, y, label, va="center", fontsize=9)
        return True

    figure, axes = _per_metric(table, table.rows, bar, title)
    for axis in axes:
        # The labels are to the right of the bars, where a scale up to 100 may have ended.
        axis.set(xlim=(0, 1.45 * top))
        axis.set_xticks([tick for tick in axis.get_xticks() if tick <= min(100, 1.45 * top)])
        axis.spines["bottom"].set_bounds(0, min(100, 1.45 * top))
    name = titles(table.metrics)[0]
    figure.supxlabel(f"{'AP' if name.startswith('AP') else name} (0 to 100)", fontsize=10)
    return figure


def gap_figure(table: Table) -> "Figure | None":
    """Plot a panel per metric: a bar per init with its gap to the baseline and the 95% interval.

    A gap without an interval (one trial) is a hollow bar.
    """
    rows = [row for row in table.rows if any(row.gaps.values())]
    if not rows:
        return None

    def bar(axis: "Axes", y: int, row: Row, metric: str, color: str) -> bool:
        gap = row.gaps[metric]
        if gap is None:
            return False
        face = "none" if gap.low is None else color
        axis.barh(y, gap.value, height=0.55, color=face, edgecolor=color, alpha=0.45)
        if gap.low is not None and gap.high is not None:
            sides = [[gap.value - gap.low], [gap.high - gap.value]]
            axis.errorbar(gap.value, y, xerr=sides, color=color, capsize=3, linewidth=1.6)
        return True

    figure, axes = _per_metric(table, rows, bar)
    for axis in axes:
        axis.axvline(0, color="#444444", linewidth=1)
        axis.set(xlabel=f"points above {figure_label(str(table.baseline))}")
    return figure


def ap_curve_figure(table: Table) -> "Figure | None":
    """Plot the first metric over the iterations, if it was evaluated more than once in a run."""
    metric = table.metrics[0]
    curves = {row.init: read_curves(row.runs, (metric,)) for row in table.rows}
    if not any(len(curve[0]) > 1 for runs in curves.values() for curve in runs):
        return None
    figure, [axis] = new_figure(1, width=5.2, height=3.4)
    _plot_curves(axis, curves)
    axis.set(xlabel="iteration", ylabel=pretty(titles(table.metrics)[0]))
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    return figure


def family(table: Table) -> tuple[str, tuple[str, ...], str]:
    """Return a key that tables share if only their schedules differ: task, test data, engine."""
    return _SCHEDULE.sub("", table.task), table.tested_on, table.engine


def schedule_figure(tables: Sequence[Table]) -> "Figure | None":
    """Plot the first metric of tables of one `family` against the length of the fine-tuning."""
    if len({table.iterations for table in tables}) < 2:
        return None
    ordered = sorted(tables, key=lambda table: table.iterations)
    metric = ordered[0].metrics[0]
    points: dict[str, list[tuple[int, float, float]]] = {}
    for table in ordered:
        for row in table.rows:
            if (cell := row.cells.get(metric)) is not None:
                point = table.iterations, cell.mean, cell.std or 0.0
                points.setdefault(row.init, []).append(point)
    figure, [axis] = new_figure(1, width=5.2, height=3.4)
    palette = colors(list(points))
    for name, of_init in points.items():
        x, mean, std = zip(*of_init, strict=True)
        color, label = palette[name], figure_label(name)
        axis.errorbar(x, mean, yerr=std, marker="o", color=color, capsize=3, label=label)
    axis.set_xticks([table.iterations for table in ordered])
    axis.set(xlabel="iterations of fine-tuning", ylabel=pretty(titles(ordered[0].metrics)[0]))
    if points:
        axis.legend(frameon=False)
    return figure


def differences_figure(collection: Collection) -> "Figure | None":
    """Plot a panel per row: its difference from the baseline on each dataset, in order of size."""
    base, names = collection.baseline, collection.complete
    rows = [row for row in collection.values if row != base]
    if not rows or not names:
        return None
    height = 1.0 + 0.2 * len(names)
    figure, axes = new_figure(len(rows), 4.4, height, collection.heading, along="x")
    palette, of_base = colors(list(collection.values)), collection.means(base)
    for axis, row in zip(axes, rows, strict=True):
        gaps = [mean - other for mean, other in zip(collection.means(row), of_base, strict=True)]
        order = sorted(range(len(names)), key=gaps.__getitem__)
        axis.scatter([gaps[i] for i in order], range(len(order)), s=18, color=palette[row])
        axis.hlines(range(len(order)), 0, [gaps[i] for i in order], color=palette[row], alpha=0.4)
        axis.axvline(0, color="#444444", linewidth=1)
        axis.set_yticks(range(len(order)), [figure_label(names[i]) for i in order], fontsize=7)
        title = f"{figure_label(row)}: {pretty(titles([collection.metric])[0])}"
        axis.set(title=title, xlabel=f"points above {figure_label(base)}")
    return figure


def class_metrics(table: Table) -> tuple[str, dict[str, str]]:
    """Return the name of the metric of classes, AP or IoU, and class → metric."""
    kind = table.metrics[0].split("/", 1)[0]
    what = "IoU" if kind == "sem_seg" else "AP"
    names = {name: None for run in table.runs for name in run.record.metrics}
    return what, {n.split("-", 1)[1]: n for n in names if n.startswith(f"{kind}/{what}-")}


def class_gap_figure(gaps: Mapping[str, Gap], row: str, base: str, what: str) -> "Figure | None":
    """Plot a row's difference to the baseline for each class, with its 95% interval if known."""
    if not gaps:
        return None
    names = sorted(gaps, key=lambda name: (-abs(gaps[name].value), name))[:MAX_CLASSES]
    names.sort(key=lambda name: (gaps[name].value, name))
    figure, [axis] = new_figure(1, width=5.8, height=1.0 + 0.22 * len(names), along="x")
    color = colors([base, row])[row]
    axis.axvline(0, color="#444444", linewidth=1)
    for y, name in enumerate(names):
        found = gaps[name]
        if found.low is not None and found.high is not None:
            axis.hlines(y, found.low, found.high, color=color, linewidth=1.6)
        axis.scatter([found.value], [y], s=26, color=color, zorder=2)
    axis.set_yticks(range(len(names)), [*map(figure_label, names)])
    left_out = f" ({len(names)} of {len(gaps)}, the largest)" if len(names) < len(gaps) else ""
    axis.set_xlabel(f"{what}, points above {figure_label(base)}{left_out}")
    axis.set_ylim(-0.7, len(names) - 0.3)
    return figure


def class_figure(table: Table) -> "Figure | None":
    """Plot the metric of each class: a line per class, a point per init (mean over its seeds)."""
    what, metrics = class_metrics(table)
    means: dict[str, dict[str, float]] = {}  # class → init → mean
    for name, metric in metrics.items():
        for row in table.rows:
            values = [run.record.metrics.get(metric) for run in row.runs]
            if known := [value for value in values if value is not None]:
                means.setdefault(name, {})[row.init] = float(np.mean(known))
    if not means:
        return None
    spread = {name: max(of.values()) - min(of.values()) for name, of in means.items()}
    names = sorted(means, key=lambda name: (-spread[name], name))[:MAX_CLASSES]
    names.sort(key=lambda name: (np.mean(list(means[name].values())), name))
    figure, [axis] = new_figure(1, width=5.8, height=1.2 + 0.22 * len(names), along="x")
    palette = colors([row.init for row in table.rows])
    for y, name in enumerate(names):
        ends = [min(means[name].values()), max(means[name].values())]
        axis.plot(ends, [y, y], color="#cccccc", linewidth=2, zorder=1)
    for row in table.rows:
        points = [(means[n][row.init], y) for y, n in enumerate(names) if row.init in means[n]]
        if points:
            x, positions = zip(*points, strict=True)
            label = figure_label(row.init)
            axis.scatter(x, positions, s=26, color=palette[row.init], label=label, zorder=2)
    axis.set_yticks(range(len(names)), [*map(figure_label, names)])
    left_out = f" ({len(names)} of {len(means)}, by difference)" if len(names) < len(means) else ""
    axis.set(xlabel=f"{what} by class{left_out}", ylim=(-0.7, len(names) - 0.3))
    axis.set_xlim(left=0)
    figure.legend(frameon=False, loc="outside upper center", ncols=min(len(table.rows), 4))
    return figure


def precision_figure(curves: Mapping[str, Curve]) -> "Figure":
    """Plot precision against recall at IoU 0.5, a curve per init."""
    figure, [axis] = new_figure(1, width=4.4, height=3.6)
    palette = colors(list(curves))
    for name, (recall, precision) in curves.items():
        label = figure_label(name)
        axis.plot(recall, precision, color=palette[name], linewidth=1.8, label=label)
    axis.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
    axis.legend(frameon=False)
    return figure


def pretty(title: str) -> str:
    """Format a column head such as `AP50^bb` in matplotlib's math text, as the paper sets it."""
    name, below, above = title_parts(title)
    upper = f"^{{\\mathrm{{{above}}}}}" if above else ""
    lower = f"_{{{below}}}" if below else ""
    return f"{name}${upper}{lower}$" if upper or lower else name


def new_figure(
    panels: int, width: float, height: float, title: str = "", along: str = "y"
) -> tuple["Figure", list["Axes"]]:
    """Create panels of `width` x `height` inches, at most three per row, with a grid on `along`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 2 if panels == 4 else min(panels, 3)
    rows = -(-panels // columns)
    size = (columns * width, rows * height + (0.3 if title else 0))
    figure = Figure(figsize=size, layout="constrained", dpi=DPI)
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[panels:]:
        unused.remove()
    for axis in axes[:panels]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis=along, color=GRID_COLOR, linewidth=0.8)
        axis.set_axisbelow(True)
    if title:
        figure.suptitle(figure_label(title), fontsize=11)
    return figure, axes[:panels]


def _per_metric(
    table: Table,
    rows: Sequence[Row],
    bar: "Callable[[Axes, int, Row, str, str], bool]",
    title: str = "",
) -> tuple["Figure", list["Axes"]]:
    """Create a panel per metric with a bar per row, or a dash if `bar` returns False.

    Only the first panel of each line shows the names of the rows.
    """
    height = 1.0 + 0.34 * len(rows)
    figure, axes = new_figure(len(table.metrics), 3.4, height, title, along="x")
    palette = colors([row.init for row in table.rows])
    for axis, metric, name in zip(axes, table.metrics, titles(table.metrics), strict=True):
        for y, row in enumerate(rows):
            if not bar(axis, y, row, metric, palette[row.init]):
                axis.text(0, y, f" {MISSING}", va="center", color=GRAY)
        axis.set(title=pretty(name), ylim=(len(rows) - 0.4, -0.6))
        axis.set_yticks(range(len(rows)), [figure_label(row.init) for row in rows])
        place = axis.get_subplotspec()
        axis.tick_params(axis="y", length=0, labelleft=place is None or place.is_first_col())
    return figure, axes


def _plot_curves(axis: "Axes", curves: Curves) -> None:
    palette = colors(list(curves))
    for name, runs in curves.items():
        if not runs:
            continue
        x, mean, low, high = (values[:: -(-len(values) // MAX_POINTS)] for values in band(runs))
        label = figure_label(name) + (f" ({len(runs)} seeds)" if len(runs) > 1 else "")
        marker = "o" if len(x) == 1 else None
        axis.plot(x, mean, color=palette[name], linewidth=1.8, label=label, marker=marker)
        axis.fill_between(x, low, high, color=palette[name], alpha=0.18, linewidth=0)
