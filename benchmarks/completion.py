"""Command that prints a shell completion script for `moco-transfer`.

moco-transfer completion bash > ~/.local/share/bash-completion/completions/moco-transfer
moco-transfer completion zsh > DIR_OF_FPATH/_moco-transfer
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import __main__ as console
from moco.common.command import command_parser
from moco.common.errors import UserError, run_cli

SHELLS = ("bash", "zsh", "tcsh")


def script(shell: str) -> str:
    """Return the completion script for a shell.

    Raises:
        UserError: If shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise UserError(
            "completion needs the package shtab: pip install 'moco-transfer[completion]'"
        ) from error
    text: str = shtab.complete(console.build_parser(every=True), shell)
    return text


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `moco-transfer completion`."""
    parser = command_parser(
        "completion",
        "Print a shell completion script for moco-transfer.",
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print the completion script of the requested shell."""
    print(script(build_parser().parse_args(argv).shell))


if __name__ == "__main__":
    run_cli(main)
