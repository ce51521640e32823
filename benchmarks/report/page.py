"""Figures and sample predictions of the HTML page, with the reasons for missing ones."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import plots
from benchmarks.report.analysis import precision_recall
from benchmarks.report.plots import jpeg_source, svg_source
from benchmarks.report.report import Report, Section
from benchmarks.report.table import Table, seeds
from moco.common.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLE_PX = 200  # maximum width and height, about the displayed width
SAMPLES = 4  # images per init, fewer if they exceed a table's part of SAMPLES_BYTES
SAMPLES_BYTES = 400_000  # of all tables of a page


@dataclass(frozen=True)
class Figures:
    """Figures and sample predictions of one table.

    Attributes:
        plots: Title → data URL of the image.
        missing: Title → reason why there is no plot.
        samples: Init → name and data URL of each image, or None if it has no predictions on it.
    """

    plots: dict[str, str]
    missing: dict[str, str]
    samples: dict[str, list[tuple[str, str] | None]]


def figures(report: Report, section: Section) -> Figures:
    """Plot everything that the runs of a table have data for.

    Raises:
        UserError: If a run's metrics.json or a sample image is invalid.
    """
    table, names = section.table, section.titles
    shown: dict[str, str] = {}
    missing: dict[str, str] = {}

    def add(title: str, plot: "plots.Plot | Figure | None", reason: str = "") -> None:
        if plot is None:
            missing[title] = reason
        else:
            shown[title] = svg_source(plot if isinstance(plot, plots.Plot) else plots.Plot(plot))

    has_losses = bool(plots.read_curves(table.runs))
    losses = report.plots[f"loss-{section.stem}"] if has_losses else None
    add("Loss", losses, "no run has a metrics.json with a loss")
    once = "the runs were evaluated only once, at their end (TEST.EVAL_PERIOD)"
    add(f"{names[0]} during fine-tuning", plots.ap_curve_figure(table), once)
    add(f"{names[0]} and every seed", report.plots[f"ap-{section.stem}"])
    title = f"Gap to the baseline, 95% interval over {seeds(table)}"
    add(title, plots.gap_figure(table), "no baseline, or nothing to compare with it")
    add("By class", plots.class_figure(table), "the records hold no number of a class")
    curves, reasons = _precision(table)
    precision = plots.precision_figure(curves) if curves else None
    add("Precision and recall of boxes, IoU 0.5, first seed", precision, "; ".join(reasons))
    if curves and reasons:
        missing["Precision and recall of other inits"] = "; ".join(reasons)
    samples = _samples(table, SAMPLES_BYTES // len(report.tables))
    if not samples:
        missing["Sample predictions"] = (
            "no run has any (moco-transfer train --eval-only --visualize N writes them)"
        )
    elif not any(samples.values()):
        samples, missing["Sample predictions"] = (
            {},
            "too large for a page with this number of tables",
        )
    return Figures(shown, missing, samples)


def overviews(report: Report) -> dict[str, str]:
    """Plot figures over several tables or checkpoints.

    The figures are the differences between rows on each dataset of a collection, AP against the
    epochs of a pre-training, and AP against the length of the fine-tuning for tasks that differ
    only in their schedule.

    Returns:
        Title → data URL of the image.
    """
    families: dict[Any, list[Table]] = {}
    for table in report.tables:
        families.setdefault(plots.family(table), []).append(table)
    found = {
        f"{each.heading}: differences from {each.baseline}": svg_source(report.plots[each.figure])
        for each in report.collections
        if each.figure in report.plots
    }
    found |= {
        each.heading: svg_source(report.plots[each.figure]) for each in report.transfer_curves
    }
    for (task, data, engine), members in families.items():
        if (figure := plots.schedule_figure(members)) is not None:
            title = f"{task}, {', '.join((*data, engine))}: by length of the fine-tuning"
            found[title] = svg_source(plots.Plot(figure))
    return found


def _precision(table: Table) -> tuple[dict[str, plots.Curve], list[str]]:
    if not table.metrics[0].startswith(("bbox/", "segm/")):
        return {}, ["only plotted for boxes and masks"]
    curves, reasons = {}, []
    for row in table.rows:
        try:
            curves[row.init] = precision_recall(row.runs[0])
        except (UserError, ImportError) as error:
            reasons.append(str(error).split(";")[0])
    return curves, list(dict.fromkeys(reasons))


def _samples(table: Table, limit: int) -> dict[str, list[tuple[str, str] | None]]:
    """Select the test images that most inits have predictions on, with those of each init.

    Args:
        table: Table with the inits.
        limit: Maximum number of characters of all data URLs; images beyond it are left out.
    """
    by_init: dict[str, dict[str, Path]] = {}
    for row in table.rows:
        folders = [run.folder / "inference" / "visualize" for run in row.runs]
        files = next(filter(None, (sorted(folder.glob("*.jpg")) for folder in folders)), None)
        if files:
            by_init[row.init] = {path.name: path for path in files}
    counts = Counter(name for images in by_init.values() for name in images)
    names = sorted(counts, key=lambda name: (-counts[name], name))[:SAMPLES]
    found: dict[str, list[tuple[str, str] | None]] = {init: [] for init in by_init}
    for name in names:
        column = {i: jpeg_source(of[name], SAMPLE_PX) for i, of in by_init.items() if name in of}
        limit -= sum(map(len, column.values()))
        if limit < 0:
            break
        for init, of_init in found.items():
            of_init.append((name, column[init]) if init in column else None)
    return found
