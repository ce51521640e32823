"""Every command of the project behind one name: `moco-transfer COMMAND`.

Each command is the `build_parser` and `main` of one module, which is imported when it runs.
"""

import argparse
import functools
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moco import __version__
from moco.common.command import NAME
from moco.common.errors import run_cli

# Command → module, help text.
COMMANDS: dict[str, tuple[str, str]] = {
    "quickstart": ("benchmarks.quickstart", "the whole chain in minutes on a CPU"),
    "pretrain": ("moco.pretrain", "pre-train a backbone with MoCo"),
    "linear": ("moco.linear", "linear classification on frozen features"),
    "finetune": ("moco.finetune", "fine-tune the whole network for classification"),
    "knn": ("moco.knn", "kNN classification with a checkpoint's features"),
    "convert": (
        "convert.convert_to_d2",
        "convert a checkpoint for Detectron2, and verify the result",
    ),
    "inspect": ("benchmarks.inspect_weights", "describe any weights, and what takes them"),
    "weights": ("convert.weights", "list pre-trained weights, fetch them by name"),
    "train": ("detection.train_net", "fine-tune a detector and evaluate it"),
    "datasets": ("detection.datasets.__main__", "list, fetch and check datasets"),
    "doctor": ("benchmarks.doctor", "check this machine, or a dataset before training"),
    "evaluate": ("benchmarks.evaluate", "compare backbones on your own dataset"),
    "rank": ("benchmarks.rank", "rank frozen backbones on your own dataset in minutes"),
    "suite": ("benchmarks.run_suite", "run every task from every init, over several seeds"),
    "watch": ("benchmarks.watch", "evaluate the checkpoints of a pre-training as they appear"),
    "table": ("benchmarks.make_table", "make the table of finished runs"),
    "plot": ("benchmarks.plot_curves", "plot the curves of pre-training runs"),
    "errors": ("benchmarks.error_types", "find which errors finished runs make"),
    "robustness": ("benchmarks.robustness", "evaluate finished runs on corrupted images"),
    "speed": ("benchmarks.speed.__main__", "measure speed and compare it with goals"),
    "configs": ("benchmarks.list_configs", "list the task files, recipes and suites"),
    "completion": ("benchmarks.completion", "print a script that completes in a shell"),
}

# Arguments of the usual commands as an example, in the order of use.
USUAL = {
    "doctor": "",
    "quickstart": "",
    "convert": "my_r50.pth.tar mine.pth",
    "evaluate": "--data my_dataset --init mine=mine.pth --init random",
    "suite": "voc --init mine=mine.pth --init random --trials 5",
    "table": "output/voc --out tables",
}

# moco/ cannot import convert/, so `main` passes these commands the function that reads weights.
READ_WEIGHTS = ("pretrain", "linear", "finetune", "knn")


def build_parser(every: bool = False) -> argparse.ArgumentParser:
    """Build the parser of the command's name.

    Args:
        every: Add the arguments of each command, which imports all of their modules.
    """
    parser = argparse.ArgumentParser(
        prog=NAME,
        description="Pre-train with MoCo, convert, fine-tune detectors, compare in a table.",
        epilog=f"{NAME} COMMAND --help describes a command.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, what) in COMMANDS.items():
        commands.add_parser(name, help=what)
        if every:
            commands.choices[name] = module_of(name).build_parser()
    return parser


def format_usual_commands() -> str:
    """Format the usual commands in the order of use, each with an example."""
    lines = ["The usual commands, in the order of use:"]
    for name, example in USUAL.items():
        lines += ["", f"  {COMMANDS[name][1]}", f"    {NAME} {name} {example}".rstrip()]
    return "\n".join([*lines, "", f"{NAME} --help lists all commands."])


def module_of(command: str) -> Any:
    """Import the module of a command, which has `build_parser` and `main`."""
    return importlib.import_module(COMMANDS[command][0])


def main(argv: Sequence[str] | None = None) -> int | None:
    """Run the command named by the first item of `argv`, and return its exit code.

    Without one, print the usual commands.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv:
        print(format_usual_commands())
        return 0
    name = build_parser().parse_args(argv[:1]).command
    run = module_of(name).main
    if name in READ_WEIGHTS:
        from convert.initial_weights import read_initial_weights

        run = functools.partial(run, read=read_initial_weights)
    code: int | None = run(argv[1:])
    return code


def cli(*command: str) -> None:
    """Run as the console script `moco-transfer`, or as its subcommand `command`."""
    sys.argv[:1] = [NAME, *command]
    run_cli(main)


if __name__ == "__main__":
    cli()
