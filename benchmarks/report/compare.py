"""Comparison of a row with the baseline, on a separate page that each gap of the table links to.

The page has differences by metric, class and error type with their intervals, learning curves on
one axis, and the test images on which the two rows differ most. On an image with G objects, an
object counts as found if one of the G best-scored detections matches it at IoU 0.5. Counts are over
all runs of a row; the boxes of the first run are drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import plots
from benchmarks.report.analysis import ERROR_TYPES, error_types, row_cells
from benchmarks.report.bootstrap import run_matches
from benchmarks.report.plots import jpeg_source, svg_source
from benchmarks.report.report import Report, Section
from benchmarks.report.samples import draw_pair
from benchmarks.report.stats import holm
from benchmarks.report.style import MINUS, MISSING, format_gap, format_p
from benchmarks.report.table import (
    Cell,
    Gap,
    Grid,
    Row,
    Table,
    TextCell,
    evidence,
    format_cell,
    gap,
    mean_cell,
    seeds,
)
from detection.evaluation.matches import Matches
from moco.common.errors import UserError, plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGE_PX = 256  # the displayed width
IMAGES = 4  # of those on which the row finds more, and of those on which the baseline does


class Found(NamedTuple):
    """Objects that a row finds on each test image.

    Attributes:
        images: (I,) ids of the images.
        objects: (I,) number of objects.
        found: (I,) number of found objects, the mean over the runs.
    """

    images: tuple[str, ...]
    objects: NDArray[np.integer]
    found: NDArray[np.floating]


@dataclass(frozen=True)
class Sample:
    """Test image with the ground truth and the predictions of both rows.

    Attributes:
        caption: Id of the image, and how many objects each row finds on it.
        sources: Data URLs of the three images, or empty if they cannot be drawn here.
    """

    caption: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Content of the page of one row.

    Attributes:
        title: What is compared, as `row − baseline`.
        seeds: Kind of seeds that the intervals are over.
        columns: Titles of the three columns of `samples`.
        grids: Differences by metric, class and error type.
        figures: Title → data URL of the image.
        samples: Title → images with the largest differences.
        missing: Title → reason why something is not on the page.
    """

    title: str
    seeds: str
    columns: tuple[str, ...]
    grids: list[Grid]
    figures: dict[str, str]
    samples: dict[str, list[Sample]]
    missing: dict[str, str]


def comparisons(report: Report) -> dict[str, tuple[Section, Comparison]]:
    """Make the pages of `report.compared`: file name → section of the row, content.

    Raises:
        UserError: If a run's metrics.json is invalid.
        DataError: If a run's file of error types is damaged.
    """
    made = {}
    for section in report.sections:
        names = report.pages(section)
        found = _found_objects(section.table) if names else {}
        for row in section.table.rows:
            if row.init in names:
                made[names[row.init]] = section, _compare(section, row, found)
    return made


def _compare(section: Section, row: Row, found: Mapping[str, Found | str]) -> Comparison:
    table, base = section.table, section.table.base
    assert base is not None
    pair = replace(table, rows=(base, row))
    figures: dict[str, str] = {}
    missing: dict[str, str] = {}

    def add(title: str, figure: "Figure | None", reason: str) -> None:
        if figure is None:
            missing[title] = reason
        else:
            figures[title] = svg_source(plots.Plot(figure))

    metrics = {name: (base.cells[name], row.cells[name]) for name in table.metrics}
    named = dict(zip(table.metrics, section.titles, strict=True))
    corrected = {e.metric: e.holm for e in section.significance if e.row.init == row.init}
    by_metric = {named[name]: cells for name, cells in metrics.items()}
    of_table = {named[name]: p for name, p in corrected.items()}
    grids = [_grid("Metrics", "metric", pair, by_metric, of_table)]
    what, classes = plots.class_metrics(table)
    by_class = {name: (_cell(base, metric), _cell(row, metric)) for name, metric in classes.items()}
    gaps = {
        name: each
        for name, (a, b) in by_class.items()
        if (each := gap(b, a, table.looks)) is not None
    }
    add(
        f"{what} by class, differences with 95% intervals",
        plots.class_gap_figure(gaps, row.init, base.init, what),
        "the records hold no number of a class",
    )
    if gaps:
        ordered = {name: by_class[name] for name in sorted(gaps, key=lambda n: -gaps[n].value)}
        grids.append(_grid(f"{what} by class", "class", pair, ordered))
    errors = row_cells(pair, error_types, ERROR_TYPES)
    by_type = dict(zip(ERROR_TYPES.values(), zip(*errors.values(), strict=True), strict=True))
    if any(all(cells) for cells in by_type.values()):
        text = "Points of AP50 (COCO's) that are lost to each type of error (TIDE)"
        grids.append(_grid(text, "error", pair, by_type))
    else:
        missing["Error types"] = "not recorded for both rows (moco-transfer errors writes them)"
    add(
        f"{section.titles[0]} during fine-tuning",
        plots.ap_curve_figure(pair),
        "the runs were evaluated only once, at their end (TEST.EVAL_PERIOD)",
    )
    losses = {each.init: plots.read_curves(each.runs) for each in pair.rows}
    add(
        "Loss during fine-tuning",
        plots.loss_figure({"Fine-tuning": losses}) if all(losses.values()) else None,
        "not every row has a metrics.json with a loss",
    )
    try:
        samples, reason = _samples(pair, found)
        if reason:
            missing["Predictions on the images"] = reason
    except UserError as error:
        samples = {}
        missing["Images with the largest differences"] = str(error)
    columns = ("ground truth", *(f"{r.init}, seed {r.runs[0].record.seed}" for r in pair.rows))
    title = f"{row.init} {MINUS} {base.init}"
    return Comparison(title, seeds(table), columns, grids, figures, samples, missing)


def _cell(row: Row, metric: str) -> Cell | None:
    return mean_cell([run.record.metrics.get(metric) for run in unit] for unit in row.units)


def _grid(
    title: str,
    what: str,
    pair: Table,
    cells: Mapping[str, Sequence[Cell | None]],
    corrected: Mapping[str, float] | None = None,
) -> Grid:
    """Return a line per name: both rows, their difference, and its p-value after correction.

    Args:
        title: Title of the grid.
        what: Head of the names.
        pair: Table of the baseline and the row.
        cells: Name → cells of the baseline and of the row.
        corrected: Name → corrected p-value, or None to correct over the lines of this grid.
    """
    base, row = pair.rows
    gaps: dict[str, Gap | None] = {
        name: gap(own, of_base, pair.looks) for name, (of_base, own) in cells.items()
    }
    if corrected is None:
        corrected = holm({n: g.p_value for n, g in gaps.items() if g and g.p_value is not None})
    head = [what, base.init, row.init, "difference, 95% interval, p", "Holm's p"]
    rows = []
    for name, (of_base, own) in cells.items():
        numbers = [
            TextCell(MISSING if c is None else format_cell(c, of.n), c.mean if c else None)
            for c, of in ((of_base, base), (own, row))
        ]
        p = corrected.get(name)
        shown = TextCell(MISSING if p is None else format_p(p), p)
        rows.append([TextCell(name), *numbers, evidence(gaps[name]), shown])
    return Grid(title, head, rows)


def _found_objects(table: Table) -> dict[str, Found | str]:
    """Count the found objects of every row, or return the reason why they are not known."""
    kind = table.metrics[0].split("/", 1)[0]
    made: dict[str, Found | str] = {}
    for row in table.rows:
        try:
            files = [run_matches(run) for run in row.runs]
            if any(kind not in file.kinds for file in files):
                raise UserError(f"the match records have no {kind}")
            counts = [found_objects(file.kinds[kind], len(file.images)) for file in files]
            if len({file.images for file in files}) > 1:
                raise UserError("its runs were not tested on the same images")
            found = np.mean([own for _, own in counts], axis=0)
            made[row.init] = Found(files[0].images, counts[0][0], found)
        except UserError as error:
            made[row.init] = f"{row.init}: {error}"
    return made


def found_objects(matches: Matches, images: int) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Count objects and found objects of each image, at IoU 0.5 and as many detections as objects.

    Args:
        matches: Match records of one run.
        images: Number of test images I.

    Returns:
        Objects and found objects, (I,) each.
    """
    objects = np.bincount(matches.object_images, minlength=images)
    counted = np.flatnonzero(~matches.ignored[:, 0])
    order = counted[np.lexsort((-matches.scores[counted], matches.images[counted]))]
    of = matches.images[order].astype(np.int64)
    rank = np.arange(len(of)) - np.searchsorted(of, of)
    best = order[rank < objects[of]]
    right = matches.images[best][matches.true[best, 0]]
    return objects, np.bincount(right, minlength=images)


def _samples(pair: Table, found: Mapping[str, Found | str]) -> tuple[dict[str, list[Sample]], str]:
    """Select the images with the largest differences; return them, and why none is drawn.

    Raises:
        UserError: If the objects found by the rows are not known.
    """
    base, row = pair.rows
    theirs, own = found[base.init], found[row.init]
    if isinstance(theirs, str) or isinstance(own, str):
        raise UserError("; ".join(each for each in (theirs, own) if isinstance(each, str)))
    if theirs.images != own.images:
        raise UserError("the rows were tested on different images")
    difference = own.found - theirs.found
    chosen = {
        f"{better.init} finds more": [
            i
            for i in np.argsort(-sign * difference, kind="stable")[:IMAGES].tolist()
            if sign * difference[i] > 0
        ]
        for better, sign in ((row, 1), (base, -1))
    }
    objects = {own.images[i]: int(own.objects[i]) for of in chosen.values() for i in of}
    try:
        drawn, reason = draw_pair(pair, objects), ""
    except (UserError, ImportError) as error:
        drawn, reason = {}, str(error)
    samples = {
        title: [
            Sample(
                f"{own.images[i]}: {plural(int(own.objects[i]), 'object')}, {base.init} finds "
                f"{theirs.found[i]:.1f}, {row.init} {own.found[i]:.1f} "
                f"({format_gap(float(difference[i]))})",
                tuple(jpeg_source(each, IMAGE_PX) for each in drawn.get(own.images[i], ())),
            )
            for i in of
        ]
        for title, of in chosen.items()
        if of
    }
    return samples, reason
