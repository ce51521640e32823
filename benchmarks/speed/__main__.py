"""Command that measures speed: moco-transfer speed {pretrain,input,detection,cached,gpu}.

The sides of a comparison run alternately, so that other load on the machine affects both. The
reported speed is the ratio of the smallest CPU times over several rounds.
"""

import argparse
import importlib
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from moco.common.command import command_parser
from moco.common.errors import UserError, run_cli
from moco.common.files import read_text

MIN_ROUNDS, SUITES = 5, ("pretrain", "input", "detection", "cached", "gpu")


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser of the command line."""
    parser = command_parser(
        "speed",
        "Measure speed, and compare it with stated goals. gpu takes about 8 minutes on "
        "one GPU; its JSON is what results/ of the project accepts.",
    )
    add = parser.add_argument
    add("suite", choices=SUITES, help="part of the project to measure")
    add("--goals", metavar="loss,step", help="measure only these cases; default: all")
    add("--images", metavar="DIR", help="JPEG images for `input`, or a VOC layout for `cached`")
    add("--rounds", type=int, default=MIN_ROUNDS, help="rounds of each timing (%(default)s)")
    add("--quick", action="store_true", help="use tiny sizes and one round, as a smoke test")
    add("--output", metavar="FILE.md", help="insert the table between its <!-- SUITE [GOALS] -->")
    add("--json", metavar="FILE.json", help="write the measurements with hardware and versions")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the requested cases; print the tables or insert them into a page."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)
    if args.rounds < MIN_ROUNDS and not args.quick:
        raise UserError(f"--rounds: got {args.rounds}, expected at least {MIN_ROUNDS}, or --quick")
    import torch

    from benchmarks.speed.measure import Setting, insert, measurement, section, to_json
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
    rounds, rows, began = 1 if args.quick else args.rounds, [], time.monotonic()
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            print(f"{name} ...", flush=True)
            torch.manual_seed(0)
            try:
                rows += cases[name](Setting(Path(scratch), rounds, args.quick, args.images))
            except Exception:  # of a branch that never ran on this hardware, to measure the others
                traceback.print_exc()
                failed.append(name)
    found = measurement(rows, words, rounds, time.monotonic() - began)
    print(table := section(found, rows))
    if args.json:
        atomic_write_text(Path(args.json), to_json(found))
        print(f"wrote {args.json}")
    if args.output:
        output = Path(args.output)
        page = read_text(output) if output.exists() else ""
        marker = f"{args.suite} {args.goals}" if args.goals else args.suite
        atomic_write_text(output, insert(page, marker, table))
        print(f"wrote {output}")
    if failed:
        raise UserError(f"failed, see above: {', '.join(failed)}; everything else was measured")


if __name__ == "__main__":
    run_cli(main)
