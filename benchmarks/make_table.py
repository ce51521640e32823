"""Run folders → the transfer table, printed and as files.

    python -m benchmarks.make_table RUNS... [--baseline random] [--out DIR] [--format md,csv]

RUNS are folders of ``detection/train_net.py``, ``moco.linear``, ``moco.finetune`` (OUTPUT_DIR) or
``moco.knn`` (--output), or folders that hold several of them.
Without ``--out`` the table is only printed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moco.errors import UserError, run_cli

if TYPE_CHECKING:
    from benchmarks.aggregate import Table
    from benchmarks.results import Results

FORMATS = ("md", "csv", "tex", "html")
EACH = "each"


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    formats = _formats(args.format)
    from benchmarks.aggregate import Table, aggregate
    from benchmarks.results import collect
    from benchmarks.tables import to_terminal

    results = collect(args.runs)
    if not results.transfer:
        reasons = "; ".join(f"{item.folder}: {item.reason}" for item in results.unusable[:3])
        raise UserError(f"no finished run to make a table of ({reasons or 'none found'})")
    engines = sorted({run.record.engine for run in results.transfer})
    if args.engine not in (None, EACH, *engines):
        raise UserError(
            f"--engine {args.engine}: no such runs; choices are {', '.join([*engines, EACH])}"
        )
    if args.engine is None:
        groups = [list(results.transfer)]
    else:
        chosen = engines if args.engine == EACH else [args.engine]
        groups = [[r for r in results.transfer if r.record.engine == name] for name in chosen]
    tables: list[Table] = [t for group in groups for t in aggregate(group, args.baseline)]
    print(to_terminal(tables, results.unusable, colour=sys.stdout.isatty()))
    if args.out is not None:
        for path in write_files(args.out, tables, results, formats):
            print(f"wrote {path}")


def write_files(
    out: Path, tables: Sequence["Table"], results: "Results", formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Write the table in each format and the figures into ``out``; returns the paths."""
    from benchmarks import plots
    from benchmarks import tables as render
    from moco.fileio import atomic_write_text

    figures = []
    tasks = [run.record.task for run in results.pretraining]
    curves = {
        f"{task} {run.folder.name}" if tasks.count(task) > 1 else task: plots.read_losses([run])
        for task, run in zip(tasks, results.pretraining, strict=True)
    }
    for table in tables:
        stem = table.task if len({t.engine for t in tables}) < 2 else f"{table.task}-{table.engine}"
        figures += [out / f"loss-{stem}.png", out / f"ap-{stem}.png"]
        tuning = {row.init: plots.read_losses(row.runs) for row in table.rows}
        plots.plot_losses(figures[-2], curves, tuning)
        plots.plot_ap(figures[-1], table)
    texts = {
        "md": lambda: {"table.md": render.to_markdown(tables, results)},
        "csv": lambda: {
            "table.csv": render.to_csv(tables),
            "runs.csv": render.runs_to_csv(tables),
        },
        "tex": lambda: {"table.tex": render.to_latex(tables)},
        "html": lambda: {"table.html": render.to_html(tables, results, figures)},
    }
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
    result.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders of runs")
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
