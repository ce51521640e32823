"""Command that describes weights: what they are, what is assumed, and which tasks take them.

moco-transfer inspect checkpoint_0199.pth.tar     describe a file
moco-transfer inspect my_vit/                     describe the network in a folder
moco-transfer inspect hf://user/repo              describe weights by name or address
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moco.common.command import command_parser
from moco.common.errors import run_cli


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser of the command line."""
    parser = command_parser(
        "inspect",
        "Describe weights: the networks in them, what is assumed, the tasks that take "
        "them. Nothing is written, and nothing in a file is executed.",
    )
    parser.add_argument(
        "weights",
        metavar="WEIGHTS",
        help="any checkpoint; a folder with one, of the Hugging Face Hub or of a training; or "
        "weights by name or address, see moco-transfer weights --help",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    args = build_parser().parse_args(argv)
    from convert.convert_to_d2 import announce

    announce(args.weights)
    from convert.inspect_file import inspected
    from detection.config.weights import fitting_tasks

    text, exit_code = inspected(args.weights, fitting_tasks)
    print(text)
    return exit_code


if __name__ == "__main__":
    run_cli(main)
