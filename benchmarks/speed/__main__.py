"""Command that measures speed: python -m benchmarks.speed {pretrain,input,detection,gpu}.

Both sides of a comparison run alternately, so that other load on the machine affects both. The
reported speed is the ratio of the smallest CPU times of several rounds.
"""

import argparse
import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moco.common.errors import UserError, run_cli

MIN_ROUNDS, SUITES = 5, ("pretrain", "input", "detection", "gpu")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `python -m benchmarks.speed`."""
    prog = "python -m benchmarks.speed"
    description = "Measure speed, and compare it with stated goals."
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add = parser.add_argument
    add("suite", choices=SUITES, help="part of the project to measure")
    add("--goals", metavar="loss,step", help="measure only these cases; default: all")
    add("--images", metavar="DIR", help="JPEG images for `input`; default: generated ones")
    add("--rounds", type=int, default=MIN_ROUNDS, help="rounds of each timing (%(default)s)")
    add("--quick", action="store_true", help="use tiny sizes and one round, as a smoke test")
    add("--output", metavar="FILE.md", help="insert the table between its <!-- SUITE [GOALS] -->")
    add("--debug", action="store_true", help="show tracebacks of errors")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the requested cases, and print the table or insert it into a page."""
    args = build_parser().parse_args(argv)
    if args.rounds < MIN_ROUNDS and not args.quick:
        raise UserError(f"--rounds: got {args.rounds}, expected at least {MIN_ROUNDS}, or --quick")
    import torch

    from benchmarks.speed.measure import Setting, insert, section
    from detection.config.engines import detectron2_installed
    from moco.common.files import atomic_write_text

    if args.suite == "gpu" and not torch.cuda.is_available():
        raise UserError("gpu: this machine has no GPU; run the command on one that does")
    if args.suite == "detection" and not detectron2_installed():
        raise UserError("detection: needs Detectron2, see docs/install.md")
    cases = importlib.import_module(f"benchmarks.speed.{args.suite}").CASES
    names = args.goals.split(",") if args.goals else list(cases)
    for name in names:
        if name not in cases:
            raise UserError(f"--goals: got {name!r}, choices are {', '.join(cases)}")
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    rounds, rows = 1 if args.quick else args.rounds, []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            print(f"{name} ...", flush=True)
            torch.manual_seed(0)
            rows += cases[name](Setting(Path(scratch), rounds, args.quick, args.images))
    print(found := section(rows, rounds))
    if args.output:
        output = Path(args.output)
        page = output.read_text(encoding="utf-8") if output.exists() else ""
        marker = f"{args.suite} {args.goals}" if args.goals else args.suite
        atomic_write_text(output, insert(page, marker, found))
        print(f"wrote {output}")


if __name__ == "__main__":
    run_cli(main)
