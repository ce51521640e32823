"""Measured speed against stated goals.

    python -m benchmarks.speed pretrain                            the table, in about ten minutes
    python -m benchmarks.speed pretrain --goals C1,C6 --quick      two of them, with few repetitions
    python -m benchmarks.speed pretrain --output docs/speed.md     and its section of the report
    python -m benchmarks.speed convert                             of converting a checkpoint
    python -m benchmarks.speed detection                           the engines, the evaluators

Our side and the other in turn, so that what else the machine does meets both; the smallest
CPU time of several rounds counts, and of that only the ratio.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moco.common.errors import UserError, run_cli

SUITES = ("pretrain", "convert", "detection")
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
        "--images", metavar="DIR", help="pretrain: JPEG images; default: generated ones"
    )
    parser.add_argument(
        "--rounds", type=int, default=MIN_ROUNDS, help=f"of each timing, default {MIN_ROUNDS}"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, one round: a smoke test, no measurement"
    )
    parser.add_argument("--output", metavar="FILE.md", help="put the section there as well")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """The command `python -m benchmarks.speed`."""
    args = build_parser().parse_args(argv)
    if args.rounds < MIN_ROUNDS and not args.quick:
        raise UserError(f"--rounds: got {args.rounds}, expected at least {MIN_ROUNDS}, or --quick")

    from benchmarks.speed import convert, detection, pretrain
    from benchmarks.speed.report import markdown, text, with_section
    from moco.common.files import atomic_write_text

    suite = {"pretrain": pretrain, "convert": convert, "detection": detection}[args.suite]
    goals = args.goals.split(",") if args.goals else list(suite.GOALS)
    unknown = [goal for goal in goals if goal not in suite.GOALS]
    if unknown:
        raise UserError(f"--goals: got {unknown[0]!r}, choices are {', '.join(suite.GOALS)}")
    with tempfile.TemporaryDirectory() as scratch:
        rounds = 1 if args.quick else args.rounds
        if args.suite == "pretrain":
            training = pretrain.Setting(Path(scratch), args.images, rounds, args.quick)
            rows, facts = pretrain.measure(training, goals), training.description()
        elif args.suite == "convert":
            conversion = convert.Setting(Path(scratch), rounds, args.quick)
            rows, facts = convert.measure(conversion, goals), conversion.description()
        else:
            engines = detection.Setting(Path(scratch), rounds, args.quick)
            rows, facts = detection.measure(engines, goals), engines.description()
        print(text(rows))
        if args.output:
            path = Path(args.output)
            section = markdown(suite.TITLE, suite.ABOUT, rows, facts, args.quick)
            before = path.read_text() if path.exists() else ""
            atomic_write_text(path, with_section(before, section))
            print(f"wrote {args.output}")


if __name__ == "__main__":
    run_cli(main)
