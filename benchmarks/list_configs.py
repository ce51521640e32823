"""List the task files, recipes and suites that come with the project.

moco-transfer configs               names and titles
moco-transfer configs voc           those with `voc` in their names
moco-transfer configs --show NAME   the text of one, to begin a file of your own
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from moco.common import shipped
from moco.common.command import program
from moco.common.errors import UserError, run_cli

HIDDEN = "Base-", "inits"  # what files share, and what is no configuration
_COMMENT = re.compile(r"(?:#.*\n)+")


def title(path: Path) -> str:
    """The first sentence of a file's opening comment."""
    match = _COMMENT.match(path.read_text(encoding="utf-8"))
    text = " ".join(line.lstrip("# ") for line in match[0].splitlines()) if match else ""
    return re.split(r"\.(?: |$)", text)[0]


def listing(word: str = "") -> str:
    """A line for each shipped file with `word` in its name.

    Raises:
        UserError: no name has it.
    """
    found = [name for name in shipped.names() if word in name and not name.startswith(HIDDEN)]
    if not found:
        raise UserError(f"{word}: no configuration has this in its name; leave it out for all")
    width = max(map(len, found)) + 2
    return "\n".join(f"{name:{width}}{title(shipped.CONFIGS / f'{name}.yaml')}" for name in found)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("configs", "python -m benchmarks.list_configs"),
        description="List the task files, recipes and suites that come with the project. A name, "
        "with or without its folder, is what --config-file and suites take.",
    )
    parser.add_argument("word", nargs="?", default="", metavar="WORD", help="only names with it")
    parser.add_argument("--show", metavar="NAME", help="print this file instead")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.show is not None:
        print(shipped.resolve(args.show).read_text(encoding="utf-8"), end="")
    else:
        print(f"in {shipped.CONFIGS}", listing(args.word), sep="\n")


if __name__ == "__main__":
    run_cli(main)
