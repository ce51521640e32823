"""Figures and sample predictions of the HTML page, and what cannot be plotted and why."""

import base64
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import plots
from benchmarks.report.aggregate import Table
from benchmarks.report.captions import seeds
from benchmarks.report.content import Report, Section
from benchmarks.report.precision import precision_recall
from moco.common.errors import UserError
from moco.data.decode import decode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES = 4  # images per init
SAMPLE_PX = 320  # width in the page, twice what it is shown at on most screens


@dataclass(frozen=True)
class Figures:
    """What the page shows of a table besides numbers.

    Attributes:
        plots: title → source of the image.
        missing: title → why there is no plot.
        samples: init → per image its name and source; None where it has no prediction of it.
    """

    plots: dict[str, str]
    missing: dict[str, str]
    samples: dict[str, list[tuple[str, str] | None]]


def figures(report: Report, section: Section) -> Figures:
    """Everything that can be plotted of a table, and what cannot.

    Raises:
        UserError: a run's metrics.json that is none, or a sample that is no image.
    """
    table, names = section.table, section.titles
    shown: dict[str, str] = {}
    missing: dict[str, str] = {}

    def add(title: str, plot: "plots.Plot | Figure | None", reason: str = "") -> None:
        if plot is None:
            missing[title] = reason
        else:
            shown[title] = _svg(plot if isinstance(plot, plots.Plot) else plots.Plot(plot))

    has_losses = bool(plots.read_curves(table.runs))
    losses = report.plots[f"loss-{section.stem}"] if has_losses else None
    add("Loss", losses, "the folders hold no metrics.json with one")
    once = "the runs were evaluated at their end alone (TEST.EVAL_PERIOD)"
    add(f"{names[0]} during fine-tuning", plots.ap_curve_figure(table), once)
    add(f"{names[0]} and every seed", report.plots[f"ap-{section.stem}"])
    title = f"Gap to the baseline, 95% interval over {seeds(table)}"
    add(title, plots.gap_figure(table), "no baseline, or nothing to compare with it")
    add("By class", plots.class_figure(table), "the records hold no number of a class")
    curves, reasons = _precision(table)
    precision = plots.precision_figure(curves) if curves else None
    add("Precision and recall of boxes, IoU 0.5, first seed", precision, "; ".join(reasons))
    if curves and reasons:
        missing["Precision and recall of some"] = "; ".join(reasons)
    samples = _samples(table)
    if not samples:
        missing["Sample predictions"] = "no run has any (train_net --eval-only --visualize N)"
    return Figures(shown, missing, samples)


def schedules(tables: Sequence[Table]) -> dict[str, str]:
    """AP against the length of the fine-tuning, per family of tasks that has several lengths."""
    families: dict[Any, list[Table]] = {}
    for table in tables:
        families.setdefault(plots.family(table), []).append(table)
    found = {}
    for (task, data, engine), members in families.items():
        if (figure := plots.schedule_figure(members)) is not None:
            title = f"{task}, {', '.join((*data, engine))}: by length of the fine-tuning"
            found[title] = _svg(plots.Plot(figure))
    return found


def _precision(table: Table) -> tuple[dict[str, plots.Curve], list[str]]:
    if not table.metrics[0].startswith(("bbox/", "segm/")):
        return {}, ["not of this kind of task"]
    curves, reasons = {}, []
    for row in table.rows:
        try:
            curves[row.init] = precision_recall(row.runs[0])
        except (UserError, ImportError) as error:
            reasons.append(str(error).split(";")[0])
    return curves, list(dict.fromkeys(reasons))


def _samples(table: Table) -> dict[str, list[tuple[str, str] | None]]:
    """The same images with the predictions of each init: those that most of them have."""
    by_init: dict[str, dict[str, Path]] = {}
    for row in table.rows:
        folders = [run.folder / "inference" / "visualize" for run in row.runs]
        files = next(filter(None, (sorted(folder.glob("*.jpg")) for folder in folders)), None)
        if files:
            by_init[row.init] = {path.name: path for path in files}
    counts = Counter(name for images in by_init.values() for name in images)
    names = sorted(counts, key=lambda name: (-counts[name], name))[:SAMPLES]
    return {
        init: [(name, _jpeg(images[name])) if name in images else None for name in names]
        for init, images in by_init.items()
    }


def _jpeg(path: Path) -> str:
    image, buffer = decode(path), io.BytesIO()
    image.thumbnail((SAMPLE_PX, SAMPLE_PX))
    image.save(buffer, format="JPEG", quality=80)
    return _source("jpeg", buffer.getvalue())


def _svg(plot: plots.Plot) -> str:
    return _source("svg+xml", plot.svg.encode())


def _source(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
