"""Command that makes the transfer table from run folders, on the terminal and as files.

    python -m benchmarks.make_table RUNS... [--baseline random] [--out DIR] [--format md,csv]
    python -m benchmarks.make_table RUNS... --margin 0.3 --bootstrap
    python -m benchmarks.make_table RUNS... --bundle FILE.zip
    python -m benchmarks.make_table RUNS... --reference
    python -m benchmarks.make_table FILE.zip --verify

RUNS are output folders of `moco-transfer train`, `linear`, `finetune` (OUTPUT_DIR) or `knn`
(--output), or folders that contain several of them. Without `--out` the table is only printed.
Folders may come from other machines: a record holds all that a table needs, and its paths need not
exist here. Records are untrusted: in every output their texts are escaped, so that none becomes
markup, a formula or a path (benchmarks/report/style.py).

The flags are explained in benchmarks/report/: `--bundle` in bundle.py, `--margin` in stats.py,
`--bootstrap` in bootstrap.py.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.report.style import FORMATS, RESAMPLES
from moco.common.command import command_parser, program, quote
from moco.common.errors import UserError, echo, run_cli
from moco.common.files import expand_home
from moco.common.shipped import RESULTS

if TYPE_CHECKING:
    from benchmarks.report.records import About

MAX_RESAMPLES = 100_000  # of the test images


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of the given runs, and write the requested files."""
    args = build_parser().parse_args(argv)
    if args.bundle is not None and args.bundle.suffix != ".zip":
        raise UserError(f"--bundle {args.bundle}: expected a name that ends in .zip")
    if args.margin is not None and not 0 < args.margin <= 100:
        raise UserError(f"--margin {args.margin}: expected points above 0 to 100")
    if args.bootstrap and not 100 <= args.bootstrap <= MAX_RESAMPLES:
        raise UserError(f"--bootstrap {args.bootstrap}: expected 100 to {MAX_RESAMPLES}")
    if args.measured_by and args.bundle is None:
        raise UserError("--measured-by: is stored with --bundle FILE.zip; add that")
    if args.weights_at and not args.measured_by:
        raise UserError("--weights-at: is stored with --measured-by NAME; add that")
    about = _about(args)
    if args.verify:
        from benchmarks.report.bundle import verify

        for path in args.runs:
            print(verify(path))
        return
    from benchmarks.report.bundle import read_all
    from benchmarks.report.export import find_renderers, format_paths, to_terminal, write_files
    from benchmarks.report.records import collect
    from benchmarks.report.report import Report, make_tables
    from benchmarks.suites.until_decided import with_looks

    formats = [name.strip() for name in args.format.split(",")]
    find_renderers(formats)  # an unknown format is refused before any record is read
    results = collect(args.runs)
    tables = make_tables(results, args.baseline, args.engine, args.margin, args.bootstrap)
    tables = with_looks(tables, args.margin)
    shared = read_all(args.reference) if args.reference else []
    report = Report(tables, results, near=args.near, shared=shared)
    written = write_files(args.out, report, formats) if args.out else []
    if args.bundle is not None:
        from benchmarks.report.bundle import share, write_bundle

        others = share(results)
        own = with_looks(make_tables(others, args.baseline, args.engine, args.margin))
        own = [  # the bootstrap takes long, and its result is the same
            replace(shared, resamples=table.resamples)
            for shared, table in zip(own, tables, strict=True)
        ]
        write_bundle(args.bundle, report, Report(own, others, near=args.near, shared=shared), about)
    print(to_terminal(report, sys.stdout.isatty()))
    print(format_paths(written, None if about else args.bundle))
    if about:
        echo(f"wrote {args.bundle}; next: {program('table')} {quote(args.bundle)} --verify")


def _about(args: argparse.Namespace) -> "About | None":
    """Return who measured the results of `--bundle`, or None if no name is given.

    Raises:
        UserError: If a text is not one short line.
    """
    if not args.measured_by:
        return None
    from benchmarks.report.records import NOT_PUBLIC, About

    try:
        return About(args.measured_by, args.weights_at or NOT_PUBLIC)
    except ValueError as error:
        raise UserError(f"--measured-by, --weights-at: {error}") from error


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `moco-transfer table`."""
    result = command_parser(
        "table",
        "Average finished runs over their seeds and show the gap to a baseline, "
        "next to published numbers of the same protocol. Runs of different engines, protocols "
        "or weights are never averaged.",
    )
    result.add_argument("runs", nargs="+", type=expand_home, metavar="RUNS", help="folders of runs")
    baseline = "init that gaps refer to (default: random, if present)"
    result.add_argument("--baseline", help=baseline)
    result.add_argument(
        "--engine", help="use only runs of this engine; 'each': one table per engine"
    )
    margin = "test which rows equal the baseline within this many points, e.g. 0.3"
    bootstrap = "add intervals over the test images, from N resamples of them (default: %(const)s)"
    result.add_argument(
        "--bootstrap", type=int, nargs="?", const=RESAMPLES, default=0, metavar="N", help=bootstrap
    )
    result.add_argument("--margin", type=float, metavar="POINTS", help=margin)
    near = "add published rows of other protocols on the same data, with their differences"
    result.add_argument("--near", action="store_true", help=near)
    reference = (
        "add results of the same protocol and data that the project ships, or of the bundles in DIR"
    )
    result.add_argument(
        "--reference", type=expand_home, nargs="?", const=RESULTS, metavar="DIR", help=reference
    )
    result.add_argument(
        "--out", type=expand_home, metavar="DIR", help="folder for files and figures"
    )
    zipped = "write page, records and evidence to a zip file, which RUNS accepts as well"
    result.add_argument("--bundle", type=expand_home, metavar="FILE.zip", help=zipped)
    measured = "people who measured the results of --bundle, needed in results/"
    result.add_argument("--measured-by", metavar="NAME", help=measured)
    weights = "address of the weights of --bundle (default: not public)"
    result.add_argument("--weights-at", metavar="URL", help=weights)
    verified = "only recompute the numbers of the bundles RUNS: hashes, and AP from match records"
    result.add_argument("--verify", action="store_true", help=verified)
    result.add_argument("--format", default=",".join(FORMATS), help="default: %(default)s")
    return result


if __name__ == "__main__":
    run_cli(main)
