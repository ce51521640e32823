"""Check the data sets before training.

    python -m detection.datasets doctor coco --root /path/to/datasets

Exit code 0: everything found is right; 3: something is wrong, or nothing is there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from detection.datasets import doctor
from detection.datasets.layout import DATASETS_VARIABLE, datasets_root
from moco.errors import DataError, run_cli


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m detection.datasets", description=(__doc__ or "").splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser(
        "doctor",
        help="say what is there, complete, wrong",
        description="Show the expected tree, and what is there, complete, wrong. Exit code 0: "
        "everything found is right; 3: something is wrong, or nothing is there.",
    )
    check.add_argument("kind", choices=doctor.KINDS, metavar="{" + ",".join(doctor.KINDS) + "}")
    check.add_argument(
        "--root",
        metavar="DIR",
        help=f"the folder of the data sets; default ${DATASETS_VARIABLE}, else ./datasets",
    )
    check.add_argument(
        "--verify", action="store_true", help="also decode every picture and look at every label"
    )
    check.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = build_parser().parse_args(argv)
    root = Path(args.root if args.root is not None else datasets_root()).expanduser()
    print(f"reading {args.kind} in {root}", flush=True)
    findings = doctor.examine(args.kind, root, verify=args.verify)
    print(doctor.report(args.kind, root, findings))
    return 0 if doctor.all_right(findings) else DataError.exit_code


if __name__ == "__main__":
    run_cli(main)
