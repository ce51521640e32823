"""Check the datasets before training: `python -m detection.datasets doctor --help`."""

import argparse
import os
from collections.abc import Sequence

from detection.datasets import doctor
from detection.datasets.base import formats
from detection.datasets.layout import DATASETS_VARIABLE, datasets_root
from moco.common.command import program
from moco.common.errors import DataError, run_cli


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("datasets", "python -m detection.datasets"),
        description="Check the datasets before training.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser(
        "doctor",
        help="say what exists, is complete, is wrong",
        description="Show the expected tree, and what exists, is complete, is wrong. Exit code 0: "
        "everything found is right; 3: something is wrong, or nothing exists.",
    )
    what = check.add_mutually_exclusive_group(required=True)
    kinds = "{" + ",".join(formats()) + "}"
    what.add_argument("kind", nargs="?", choices=list(formats()), metavar=kinds)
    for kind, format_ in formats().items():
        if format_.custom:
            what.add_argument(format_.custom.flag, dest=f"custom_{kind}", **format_.custom.options)
    check.add_argument(
        "--root",
        metavar="DIR",
        help=f"the folder of the datasets; default ${DATASETS_VARIABLE}, else ./datasets. With "
        "--coco-json the folder of the images; default: near the file",
    )
    check.add_argument(
        "--verify",
        action="store_true",
        help="also decode every image, and compare its size with the annotations; check every "
        "label map, and look for copies of images",
    )
    check.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = build_parser().parse_args(argv)
    if args.kind is not None:
        format_ = formats()[args.kind]
        root = os.path.expanduser(args.root or datasets_root())
        print(f"reading {args.kind} in {root}", flush=True)
        findings = doctor.examine(format_, root, verify=args.verify)
        following = doctor.next_step(args.kind, format_, root, findings)
        tree = [f"expected in {root}:", *("  " + line for line in format_.tree.splitlines()), ""]
    else:
        custom, value = next(
            (format_.custom, value)
            for kind, format_ in formats().items()
            if format_.custom and (value := getattr(args, f"custom_{kind}")) is not None
        )
        root, tree = args.root or "", []
        findings, following = doctor.examine_custom(custom, value, root, verify=args.verify)
    print(doctor.report(findings, following, tree))
    return 0 if doctor.all_right(findings) else DataError.exit_code


if __name__ == "__main__":
    run_cli(main)
