"""Run folders → the transfer table, printed and as files.

    python -m benchmarks.make_table RUNS... [--baseline random] [--out DIR] [--format md,csv]
    python -m benchmarks.make_table RUNS... --margin 0.3 --bootstrap
    python -m benchmarks.make_table RUNS... --bundle FILE.zip

RUNS are folders of `moco-transfer train`, `linear`, `finetune` (OUTPUT_DIR) or `knn` (--output), or
folders that hold several of them.
Without `--out` the table is only printed. Folders may come from other machines: a record holds
all that a table needs, and what its paths lead to need not be here. They may come from untrusted
people, too: in every output a record's texts are texts and no markup, formula or path
(benchmarks/report/escape.py).

The flags are explained in benchmarks/report/: `--bundle` in bundle.py and share.py, `--margin` in
significance.py, `--bootstrap` in bootstrap.py.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moco.common.command import program
from moco.common.errors import UserError, run_cli

if TYPE_CHECKING:
    from benchmarks.report.aggregate import Table
    from benchmarks.report.content import Report
    from benchmarks.report.records import Results

FORMATS = ("md", "csv", "tex", "html")
EACH = "each"
RESAMPLES, MAX_RESAMPLES = 1000, 100_000  # of the test images


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.bundle is not None and args.bundle.suffix != ".zip":
        raise UserError(f"--bundle {args.bundle}: expected a name that ends in .zip")
    if args.margin is not None and not 0 < args.margin <= 100:
        raise UserError(f"--margin {args.margin}: expected points above 0 to 100")
    if args.bootstrap and not 100 <= args.bootstrap <= MAX_RESAMPLES:
        raise UserError(f"--bootstrap {args.bootstrap}: expected 100 to {MAX_RESAMPLES}")
    from benchmarks.report.content import Report
    from benchmarks.report.records import collect
    from benchmarks.report.render import to_terminal

    formats = [name.strip() for name in args.format.split(",")]
    _renderers(formats)  # before the work
    results = collect(args.runs)
    tables = make_tables(results, args.baseline, args.engine, args.margin, args.bootstrap)
    report = Report(tables, results, near=args.near)
    print(to_terminal(report, sys.stdout.isatty()))
    written = write_files(args.out, report, formats) if args.out else []
    if args.bundle is not None:
        from benchmarks.report.share import share, write_bundle

        others = share(results)
        own = make_tables(others, args.baseline, args.engine, args.margin)
        own = [  # resampled once
            replace(shared, resamples=table.resamples)
            for shared, table in zip(own, tables, strict=True)
        ]
        write_bundle(args.bundle, report, Report(own, others, near=args.near))
        written.append(args.bundle)
    for path in written:
        print(f"wrote {path}")


def make_tables(
    results: "Results",
    baseline: str | None = None,
    engine: str | None = None,
    margin: float | None = None,
    resamples: int = 0,
) -> list["Table"]:
    """Tables of all finished runs.

    Args:
        engine: only this engine's runs; `each`: a table of each engine; None: there is one.
        margin: points within which two rows are called equal; None: that is not tested.
        resamples: of the test images (benchmarks/report/bootstrap.py); 0: none.

    Raises:
        UserError: no finished run, no runs of that engine, or what must not be averaged.
    """
    from benchmarks.report.aggregate import aggregate

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
    if resamples:
        from benchmarks.report.bootstrap import over_images

        tables = [replace(table, resamples=over_images(table, resamples)) for table in tables]
    return [replace(table, margin=margin) for table in tables]


def tables_so_far(results: "Results", baseline: str | None, resamples: int = 0) -> list["Table"]:
    """Tables of a suite, maybe unfinished: none where no run is done.

    Args:
        baseline: ignored where no run of it is done.
        resamples: of the test images.

    Raises:
        UserError: what must not be averaged.
    """
    if not results.transfer:
        return []
    from benchmarks.report.aggregate import row_of

    finished = {row_of(run.record.init)[0] for run in results.transfer}
    known = baseline if baseline in finished else None
    return make_tables(results, known, EACH, resamples=resamples)


def write_files(out: Path, report: "Report", formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a report in each format and the figures into `out`; returns the paths.

    Raises:
        UserError: a format that no renderer is registered for.
    """
    written: list[Path] = []
    for renderer in _renderers(formats):
        written += _write(out, renderer(report))
    for name, plot in report.plots.items():
        written += plot.save(out / f"{name}.png")
    return written


def _renderers(formats: Sequence[str]) -> list[Any]:
    from benchmarks.report.render import RENDERERS
    from moco.common.registry import lookup

    return [lookup(RENDERERS, name, "--format") for name in formats]


def _write(out: Path, texts: Mapping[str, str]) -> list[Path]:
    from moco.common.files import atomic_write_text

    for name, text in texts.items():
        atomic_write_text(out / name, text)
    return [out / name for name in texts]


def build_parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog=program("table", "python -m benchmarks.make_table"),
        description="Average finished runs over their seeds and show the gap to a baseline, "
        "beside published numbers of the same protocol. Runs of different engines, protocols "
        "or weights are never averaged.",
    )
    result.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders of runs")
    result.add_argument("--baseline", help="init that gaps refer to (default: random, if there)")
    result.add_argument("--engine", help="only the runs of this engine; 'each': a table of each")
    margin = "test which rows equal the baseline within this many points, e.g. 0.3"
    bootstrap = "also intervals over the test images, by N resamples of them (default: %(const)s)"
    result.add_argument(
        "--bootstrap", type=int, nargs="?", const=RESAMPLES, default=0, metavar="N", help=bootstrap
    )
    result.add_argument("--margin", type=float, metavar="POINTS", help=margin)
    near = "also published rows of other protocols on the same data, with what differs"
    result.add_argument("--near", action="store_true", help=near)
    result.add_argument("--out", type=Path, metavar="DIR", help="folder for files and figures")
    zipped = "a zip file of page, records and evidence, to share: RUNS may be such a file"
    result.add_argument("--bundle", type=Path, metavar="FILE.zip", help=zipped)
    result.add_argument("--format", default=",".join(FORMATS), help="default: %(default)s")
    result.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return result


if __name__ == "__main__":
    run_cli(main)
