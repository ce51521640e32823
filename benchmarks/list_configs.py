"""Command that lists the task files, recipes and suites shipped with the project.

moco-transfer configs               list all names and titles
moco-transfer configs voc           list the names that contain `voc`
moco-transfer configs --show NAME   print one file, to start your own from
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moco.common import shipped
from moco.common.command import command_parser
from moco.common.errors import UserError, run_cli
from moco.common.files import read_text

HIDDEN = "Base-", "inits"  # base files, and inits.yaml, which is no configuration
_COMMENT = re.compile(r"(?:#.*\n)+")


def title(path: Path) -> str:
    """Return the first sentence of a file's opening comment."""
    match = _COMMENT.match(read_text(path))
    text = " ".join(line.lstrip("# ") for line in match[0].splitlines()) if match else ""
    return re.split(r"\.(?: |$)", text)[0]


def listing(word: str = "") -> str:
    """Format one line for each shipped file with `word` in its name.

    Raises:
        UserError: If no name contains it.
    """
    found = [name for name in shipped.names() if word in name and not name.startswith(HIDDEN)]
    if not found:
        raise UserError(f"{word}: no configuration has this in its name; omit it to list all")
    width = max(map(len, found)) + 2
    return "\n".join(f"{name:{width}}{title(shipped.CONFIGS / f'{name}.yaml')}" for name in found)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `moco-transfer configs`."""
    parser = command_parser(
        "configs",
        "List the task files, recipes and suites shipped with the project. "
        "--config-file and suites take a name with or without its folder.",
    )
    word = "list only names that contain WORD"
    parser.add_argument("word", nargs="?", default="", metavar="WORD", help=word)
    parser.add_argument("--show", metavar="NAME", help="print this file instead")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print the list, or one file."""
    args = build_parser().parse_args(argv)
    if args.show is not None:
        print(read_text(shipped.resolve(args.show)), end="")
    else:
        print(f"in {shipped.CONFIGS}", listing(args.word), sep="\n")


if __name__ == "__main__":
    run_cli(main)
