"""Run folders → the transfer table, printed and as files.

    python -m benchmarks.make_table RUNS... [--baseline random] [--out DIR] [--format md,csv]
    python -m benchmarks.make_table --diff A B [--out DIR]

RUNS are folders of `detection/train_net.py`, `moco.linear`, `moco.finetune` (OUTPUT_DIR) or
`moco.knn` (--output), or folders that hold several of them.
Without `--out` the table is only printed. Folders may come from other machines: a record holds
all that a table needs, and what its paths lead to need not be here. They may come from untrusted
people, too: in every output a record's texts are texts and no markup, formula or path
(benchmarks/report/escape.py).

`--diff` compares two such folders, say of two machines or of two versions: what changed per task,
initialization and metric, what appeared or vanished, and where the protocols differ.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moco.common.errors import UserError, run_cli

if TYPE_CHECKING:
    from benchmarks.report.aggregate import Table
    from benchmarks.report.records import Results

FORMATS = ("md", "csv", "tex", "html")
EACH = "each"
RUNS_NAME = "table.runs.md"  # what the numbers of table.md were made of
PAPER_NAME = "table.paper.csv"  # the paper's numbers of the same tasks, if it has any


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    formats = _formats(args.format)
    if bool(args.runs) == (args.diff is not None):
        raise UserError("give either folders of runs, or --diff with two of them")
    if args.diff is not None:
        diff(args.diff[0], args.diff[1], args.engine, args.out)
        return
    from benchmarks.report.records import collect
    from benchmarks.report.tables import to_terminal

    results = collect(args.runs)
    tables = make_tables(results, args.baseline, args.engine)
    print(to_terminal(tables, results.unusable, color=sys.stdout.isatty()))
    if args.out is not None:
        for path in write_files(args.out, tables, results, formats):
            print(f"wrote {path}")


def make_tables(
    results: "Results", baseline: str | None = None, engine: str | None = None
) -> list["Table"]:
    """Tables of all finished runs.

    Args:
        engine: only this engine's runs; `each`: a table of each engine; None: there is one.

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
        return aggregate(results.transfer, baseline)
    chosen = engines if engine == EACH else [engine]
    groups = [[r for r in results.transfer if r.record.engine == name] for name in chosen]
    return [table for group in groups for table in aggregate(group, baseline)]


def diff(a: Path, b: Path, engine: str | None = None, out: Path | None = None) -> None:
    """Print what changed from the results in `a` to those in `b`; files with `out`.

    Raises:
        UserError: what `make_tables` refuses; the message names the folder.
    """
    from benchmarks.report import compare
    from benchmarks.report.records import collect
    from moco.common.files import atomic_write_text

    sides = []
    for folder in (a, b):
        try:
            sides.append(make_tables(collect([folder]), engine=engine or EACH))
        except UserError as error:
            raise UserError(f"{folder}: {error}") from error
    comparison = compare.compare(sides[0], sides[1])
    names = (str(a), str(b))
    print(compare.to_text(comparison, names))
    if out is not None:
        for name, text in (
            ("diff.md", compare.to_markdown(comparison, names)),
            ("diff.csv", compare.to_csv(comparison)),
        ):
            atomic_write_text(out / name, text)
            print(f"wrote {out / name}")


def write_files(
    out: Path, tables: Sequence["Table"], results: "Results", formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Write the table in each format and the figures into `out`; returns the paths."""
    from benchmarks.report import plots
    from benchmarks.report import tables as render
    from benchmarks.report.aggregate import stems
    from benchmarks.report.html import to_html
    from moco.common.files import atomic_write_text

    figures = []
    for table, stem in zip(tables, stems(tables), strict=True):
        figures += [out / f"loss-{stem}.png", out / f"ap-{stem}.png"]
        plots.plot_losses(figures[-2], *plots.losses(table, results))
        plots.plot_ap(figures[-1], table)
    in_paper = any(render.papers(table) for table in tables)
    texts = {
        "md": lambda: {
            "table.md": render.to_markdown(tables, results, RUNS_NAME),
            RUNS_NAME: render.runs_to_markdown(tables, results),
        },
        "csv": lambda: {
            "table.csv": render.to_csv(tables),
            "runs.csv": render.runs_to_csv(tables),
            **({PAPER_NAME: render.paper_to_csv(tables)} if in_paper else {}),
        },
        "tex": lambda: {"table.tex": render.to_latex(tables)},
        "html": lambda: {"table.html": to_html(tables, results, drawn())},
    }

    def drawn() -> dict[str, bytes]:
        return {path.stem: path.read_bytes() for path in figures}

    written = []
    for name in formats:
        for file, text in texts[name]().items():
            atomic_write_text(out / file, text)
            written.append(out / file)
    return written + figures


def build_parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.make_table",
        description="Average finished runs over their seeds and show the gap to a baseline, "
        "beside the paper's numbers where it has the task. Runs of different engines, protocols "
        "or weights are never averaged.",
    )
    result.add_argument("runs", nargs="*", type=Path, metavar="RUNS", help="folders of runs")
    result.add_argument(
        "--diff", nargs=2, type=Path, metavar=("A", "B"), help="compare two folders of runs"
    )
    result.add_argument("--baseline", help="init that gaps refer to (default: random, if there)")
    result.add_argument("--engine", help="only the runs of this engine; 'each': a table of each")
    result.add_argument("--out", type=Path, metavar="DIR", help="folder for files and figures")
    result.add_argument("--format", default=",".join(FORMATS), help="default: %(default)s")
    result.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return result


def _formats(text: str) -> list[str]:
    formats = [name.strip() for name in text.split(",")]
    for name in formats:
        if name not in FORMATS:
            raise UserError(f"--format: got {name!r}, choices are {', '.join(FORMATS)}")
    return formats


if __name__ == "__main__":
    run_cli(main)
