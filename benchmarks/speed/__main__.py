"""Measured speed against stated goals.

    python -m benchmarks.speed pretrain                            the table, in about ten minutes
    python -m benchmarks.speed pretrain --goals C1,C6 --quick      two of them, with few repetitions
    python -m benchmarks.speed pretrain --output docs/speed.md     and the report in a file

Processor time of one thread, our side and the other in turn, so that what else the machine does
meets both; the smallest of several rounds counts, and of that only the ratio.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moco.errors import UserError, run_cli

SUITES = ("pretrain",)
MIN_ROUNDS = 5


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description="Measured speed against stated goals.",
    )
    parser.add_argument("suite", choices=SUITES, help="what is measured")
    parser.add_argument("--goals", metavar="C1,C6", help="only these, e.g. C1,C6; default: all")
    parser.add_argument(
        "--images", metavar="DIR", help="JPEG pictures to read; default: generated ones"
    )
    parser.add_argument(
        "--rounds", type=int, default=MIN_ROUNDS, help=f"of each timing, default {MIN_ROUNDS}"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, one round: a smoke test, no measurement"
    )
    parser.add_argument("--output", metavar="FILE.md", help="write the report there as well")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """The command ``python -m benchmarks.speed``."""
    args = build_parser().parse_args(argv)
    if args.rounds < MIN_ROUNDS and not args.quick:
        raise UserError(f"--rounds: got {args.rounds}, expected at least {MIN_ROUNDS}, or --quick")

    from benchmarks.speed.pretrain import GOALS, Setting, measure
    from benchmarks.speed.report import markdown, text
    from moco.fileio import atomic_write_text

    goals = args.goals.split(",") if args.goals else list(GOALS)
    unknown = [goal for goal in goals if goal not in GOALS]
    if unknown:
        raise UserError(f"--goals: got {unknown[0]!r}, choices are {', '.join(GOALS)}")
    with tempfile.TemporaryDirectory() as scratch:
        rounds = 1 if args.quick else args.rounds
        setting = Setting(Path(scratch), args.images, rounds, args.quick)
        rows = measure(setting, goals)
        print(text(rows))
        if args.output:
            atomic_write_text(args.output, markdown(rows, setting.description(), args.quick))
            print(f"wrote {args.output}")


if __name__ == "__main__":
    run_cli(main)
