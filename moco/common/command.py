"""Command-line parser shared by the training commands.

Flags of the official code are aliases of keys; explicit `KEY VALUE` pairs are applied last.
"""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from typing import Any, TypeVar

from moco.common import shipped
from moco.common.cfgnode import split_assignments
from moco.common.errors import printable
from moco.common.files import expand_home

NAME = "moco-transfer"  # the console command
RANDOM = "random"  # weights argument: random initialization
SEVERAL = "@"  # `moco@2`: the second pre-training of the method `moco`
EPOCH = "-epoch"  # `moco-epoch0100`: the checkpoint of the pre-training `moco` at epoch 100
AUTO = "auto"  # resume from the newest checkpoint in OUTPUT_DIR
# Flags of every training command, and the keys that they set.
VALUES: dict[tuple[str, ...], str] = {
    ("-a", "--arch"): "MODEL.ARCH",
    ("-j", "--workers"): "DATA.NUM_WORKERS",
    ("-b", "--batch-size"): "SOLVER.BATCH_SIZE",
    ("--lr", "--learning-rate"): "SOLVER.BASE_LR",
    ("--momentum",): "SOLVER.MOMENTUM",
    ("--wd", "--weight-decay"): "SOLVER.WEIGHT_DECAY",
    ("--epochs",): "SOLVER.MAX_EPOCHS",
    ("--seed",): "SEED",
    ("--dist-timeout",): "DIST_TIMEOUT_SECONDS",
}
_KEY = re.compile(r"[A-Z][A-Z_]*(\.[A-Z][A-Z0-9_]*)*")
_PAIR = re.compile(rf"{_KEY.pattern}(=.*)?", re.DOTALL)
_NEGATIVE = re.compile(r"-[\d.].*|-inf")
_Options = TypeVar("_Options")


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a training command.

    Attributes:
        config_file: Path of the recipe; None: the defaults.
        resume: Checkpoint to resume from, or `AUTO`; None: start from scratch.
        extend: Whether a finished run is resumed with a larger SOLVER.MAX_EPOCHS.
        overwrite: Whether to start from scratch in a used OUTPUT_DIR.
        opts: Keys and values in turn, of flags and of `KEY VALUE` pairs.
    """

    config_file: str | None
    resume: str | None
    extend: bool
    overwrite: bool
    opts: Sequence[str]


def build_options(values: Mapping[str, Any], kind: type[_Options]) -> _Options:
    """Build a dataclass of options from the values that have the names of its fields."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names if name in values})


def parse_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, kind: type[_Options]
) -> _Options:
    """Parse a command line into a dataclass whose fields have the names of the arguments."""
    return build_options(vars(parser.parse_args(argv)), kind)


def program(command: str) -> str:
    """Return a command of this project as a user would type it.

    The result is `moco-transfer <command>` if the console command is running or there is no
    checkout, else `python -m benchmarks <command>`, or outside of the checkout's folder its path.
    """
    if sys.argv[0] == NAME or not shipped.CHECKOUT:
        return f"{NAME} {command}"
    is_here = os.getcwd() == str(shipped.ROOT)
    return f"python {'-m benchmarks' if is_here else quote(shipped.ROOT / 'benchmarks')} {command}"


def command_parser(command: str, description: str, **more: Any) -> argparse.ArgumentParser:
    """Build the parser of `moco-transfer <command>`; `more`: arguments of `ArgumentParser`."""
    parser = argparse.ArgumentParser(prog=program(command), description=description, **more)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def quote(*words: object) -> str:
    r"""Quote words for a shell, to show a command in a message.

    A message has one line, so a line break becomes `\x0a` in `$'…'`, which bash and zsh decode.
    """
    return " ".join(_quoted(str(word)) for word in words)


def _quoted(word: str) -> str:
    if printable(word) == word:
        return shlex.quote(word)
    return f"$'{''.join(map(_escaped, word))}'"


def _escaped(char: str) -> str:
    if char.isprintable() and char not in "\\'":
        return char
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def converter() -> str:
    """Return the converter's command as a user would type it."""
    return program("convert")


def convert_first() -> str:
    """Return the advice about an option that only the converter has."""
    return f"convert the file first with this option of `{converter()}`, and use its output"


def training_parser(
    command: str, description: str, values: Mapping[tuple[str, ...], str] = VALUES
) -> argparse.ArgumentParser:
    """Build a parser with the common flags and one flag per key of `values`."""
    parser = command_parser(command, description)
    parser.add_argument("--config-file", metavar="YAML", help="recipe: a file or a shipped name")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=AUTO,
        metavar="FILE",
        help="resume from the newest checkpoint in OUTPUT_DIR, or from FILE",
    )
    parser.add_argument(
        "--extend",
        action="store_true",
        help="resume a finished run with a larger SOLVER.MAX_EPOCHS",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="start from scratch in a used OUTPUT_DIR"
    )
    for flags, key in values.items():
        parser.add_argument(*flags, dest=key, metavar="VALUE", help=key)
    parser.add_argument(
        "--schedule", nargs="*", metavar="EPOCH", help="SOLVER.MILESTONES_EPOCHS, e.g. 120 160"
    )
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="e.g. DATA.ROOT my/images")
    return parser


def parse_with_pairs(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> dict[str, Any]:
    """Parse arguments in which `KEY VALUE` and `KEY=VALUE` pairs may stand between the flags.

    Returns:
        Values by name, with the pairs under `opts`.
    """
    joined: list[str] = []
    for arg in sys.argv[1:] if argv is None else argv:
        if joined and _KEY.fullmatch(joined[-1]) and _NEGATIVE.fullmatch(arg):
            joined[-1] += f"={arg}"  # argparse would parse -1e-3 as a flag
        else:
            joined.append(arg)
    values = vars(parser.parse_intermixed_args(joined))
    return {**values, "opts": split_assignments(values["opts"])}


def parse_training_args(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    flags: Mapping[tuple[str, ...], str] = VALUES,
) -> dict[str, Any]:
    """Parse arguments into values by name, and turn the flags of keys into `opts`."""
    argv = list(argv)
    for i, arg in enumerate(argv[:-1]):
        if arg == "--resume" and _PAIR.fullmatch(argv[i + 1]):
            argv[i] = f"--resume={AUTO}"  # the next argument is a key, not a checkpoint
    values = parse_with_pairs(parser, argv)
    opts, pairs = [], values["opts"]
    for key in flags.values():
        if values[key] is not None:
            opts += [key, values[key]]
    if values["SOLVER.BASE_LR"] is not None:  # used as given, whatever the batch size
        opts += ["SOLVER.REFERENCE_BATCH_SIZE", "0"]
    if (schedule := values["schedule"]) is not None:
        epochs = list(takewhile(str.isdigit, schedule))  # what follows are KEY VALUE pairs
        pairs += split_assignments(schedule[len(epochs) :])
        opts += ["SOLVER.MILESTONES_EPOCHS", f"({''.join(f'{epoch},' for epoch in epochs)})"]
    if values["config_file"] is not None:
        values["config_file"] = str(shipped.resolve(values["config_file"]))
    if values["resume"] not in (None, AUTO):
        values["resume"] = str(expand_home(values["resume"]))
    if values["extend"]:
        values["resume"] = values["resume"] or AUTO
    return {**values, "opts": opts + pairs}
