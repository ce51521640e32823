"""Tables of results, and the files of a report."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moco.common.errors import UserError, printable

if TYPE_CHECKING:
    from benchmarks.report.aggregate import Table
    from benchmarks.report.content import Report
    from benchmarks.report.records import Results

FORMATS = ("md", "csv", "tex", "html")
EACH = "each"
RESAMPLES = 1000  # default number of bootstrap resamples of the test images


def make_tables(
    results: "Results",
    baseline: str | None = None,
    engine: str | None = None,
    margin: float | None = None,
    resamples: int = 0,
) -> list["Table"]:
    """Make tables of all finished runs.

    Args:
        results: Runs of the tables.
        baseline: Name of the row that gaps refer to. None selects `random` if there is such a row.
        engine: Engine whose runs are used, or `each` for one table per engine. None requires that
            all runs are of one engine.
        margin: Largest gap, in points, that counts as equivalence; None skips that test.
        resamples: Number of bootstrap resamples of the test images
            (benchmarks/report/bootstrap.py), or 0 for none.

    Raises:
        UserError: If there is no finished run (of the engine), or runs must not be averaged.
    """
    from benchmarks.report.aggregate import aggregate
    from benchmarks.report.looks import with_looks

    if not results.transfer:
        reasons = "; ".join(f"{item.folder}: {item.reason}" for item in results.unusable[:3])
        raise UserError(f"no finished run to make a table of ({reasons or 'none found'})")
    engines = sorted({run.record.engine for run in results.transfer})
    if engine not in (None, EACH, *engines):
        raise UserError(
            f"--engine {engine}: no such runs; choices are {', '.join([*engines, EACH])}"
        )
    if engine is None:
        tables = aggregate(results.transfer, baseline)
    else:
        chosen = engines if engine == EACH else [engine]
        groups = [[r for r in results.transfer if r.record.engine == name] for name in chosen]
        tables = [table for group in groups for table in aggregate(group, baseline)]
    tables = [with_looks(table) for table in tables]
    for plan in (table.looks.plan for table in tables if table.looks and margin is not None):
        if margin != plan.margin:
            raise UserError(f"--margin {margin}: the looks of this suite were at {plan.margin}")
    if resamples:
        from benchmarks.report.bootstrap import over_images

        tables = [replace(table, resamples=over_images(table, resamples)) for table in tables]
    return [table if table.looks else replace(table, margin=margin) for table in tables]


def tables_so_far(results: "Results", baseline: str | None, resamples: int = 0) -> list["Table"]:
    """Make tables of a suite that may be unfinished, or none if no run is done.

    Args:
        results: Runs of the suite.
        baseline: Name of the row that gaps refer to, ignored while no run of it is done.
        resamples: Number of bootstrap resamples of the test images, or 0 for none.

    Raises:
        UserError: If runs must not be averaged.
    """
    if not results.transfer:
        return []
    from benchmarks.report.aggregate import row_of

    finished = {row_of(run.record.init)[0] for run in results.transfer}
    known = baseline if baseline in finished else None
    return make_tables(results, known, EACH, resamples=resamples)


def write_files(out: Path, report: "Report", formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a report in each format and its figures into `out`, and return the paths.

    Raises:
        UserError: If a format has no renderer.
    """
    from moco.common.files import atomic_write_text

    written: list[Path] = []
    for renderer in find_renderers(formats):
        for name, text in renderer(report).items():
            atomic_write_text(out / name, text)
            written.append(out / name)
    for name, plot in report.plots.items():
        written += plot.save(out / f"{name}.png")
    return written


def whereabouts(written: Sequence[Path], bundle: Path | None = None) -> str:
    """Return the last line on a terminal: where the page is.

    Args:
        written: Files of the report.
        bundle: Bundle of the report, which contains its page.
    """
    from benchmarks.report.progress import PAGE_NAME

    places = [str(path) for path in written if path.name == PAGE_NAME]
    places += [f"{PAGE_NAME} in {bundle}"] if bundle else []
    if not places and written:
        places = [f"none, without the format html; other files are in {written[0].parent}"]
    return printable(f"page: {', '.join(places) or 'none; --out DIR writes it'}")


def find_renderers(formats: Sequence[str]) -> list[Any]:
    """Look up the renderers of formats.

    Raises:
        UserError: If a format has no renderer.
    """
    from benchmarks.report.render import RENDERERS
    from moco.common.errors import lookup

    return [lookup(RENDERERS, name, "--format") for name in formats]
