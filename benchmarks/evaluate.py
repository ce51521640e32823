"""Command from a folder of images with boxes to a table of backbones.

moco-transfer evaluate --data DIR --init mine=FILE --init random

The command finds the layout of the dataset, a task that fits the weights, and a budget for its
classes and images, prints these choices, and runs the suite of this task with all options of
`moco-transfer suite`; --dry-run stops before the runs. To know the hours, 20 iterations are timed
once for a folder, unless the runs are computed elsewhere (--executor slurm, --plan).
"""

import argparse
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import ceil
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import run_suite
from benchmarks.run_suite import SuiteOptions, add_arguments
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.runs import Programs
from benchmarks.suites.suite import EMBEDDED, Suite
from benchmarks.suites.suite_file import as_name, parse_inits, read_suite
from convert.families.base import TIMM, Architecture
from moco.common.cfgnode import flatten, read_yaml, split_assignments
from moco.common.command import RANDOM, command_parser, parse_options
from moco.common.errors import UserError, echo, plural, run_cli
from moco.common.files import expand_home
from moco.common.shipped import display_name, resolve

# Images of a schedule for each class, and passes over the data. Random weights left a floor of AP 0
# after 400 to 1,200 images a class (docs/guides/believable.md). Limits of the iterations: the most
# are those of the paper for VOC.
IMAGES_PER_CLASS, EPOCHS, LEAST, MOST = 1200, 4, 300, 24_000
EVALUATIONS = 4  # in equal steps along the schedule, which show whether AP still rises
DECAYS = (3 / 4, 11 / 12)  # of the schedule; VOC's are at 18k and 22k of 24k iterations
SEEDS = 3
LAYOUTS = "folder of the dataset, in VOC's layout, YOLO's or COCO's, or a folder that has it"


def budget(
    images: int, classes: int, batch: int, warmup: int, iterations: int | None = None
) -> dict[str, Any]:
    """Compute the keys of a schedule for a dataset.

    Args:
        images: Number of training images.
        classes: Number of classes.
        batch: Images per iteration.
        warmup: Iterations of the task's warm-up, which is shortened to a tenth of the schedule.
        iterations: Length of the schedule; None: follows from the numbers of images and classes.
    """
    if iterations is None:
        seen = max(IMAGES_PER_CLASS * classes, EPOCHS * images)
        iterations = min(max(ceil(seen / batch), LEAST), MOST)
    return {
        "SOLVER.MAX_ITER": iterations,
        "SOLVER.STEPS": tuple(round(share * iterations) for share in DECAYS),
        "SOLVER.WARMUP_ITERS": min(warmup, iterations // 10),
        "TEST.EVAL_PERIOD": max(iterations // EVALUATIONS, 1),
    }


def choose(
    data: Path, weights: str, task: str | None, opts: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Choose the task file and its keys, and print what is run.

    Args:
        data: Folder of the dataset.
        weights: Weights whose backbone the task must fit.
        task: Task file or its shipped name; None: the example task of the backbone.
        opts: `KEY VALUE` overrides, which replace what is chosen.

    Returns:
        The task file, and the chosen keys, without `opts`.

    Raises:
        UserError: If the weights fit no task, or the task is for another kind of dataset.
        DataError: If the dataset or the weights are missing or damaged.
    """
    architecture = read_backbone(weights, task, opts)
    example, _, _ = architecture.example_task()
    title = task or f"{display_name(example)}, the example for a {architecture}"
    return choose_schedule(data, task or example, architecture.keys_to_set(), opts, title)


def read_backbone(weights: str, task: str | None, opts: Sequence[str]) -> Architecture:
    """Return the architecture of weights.

    Args:
        weights: Value of `--init`.
        task: Task file or its shipped name, whose network the weights may not name; None: any.
        opts: `KEY VALUE` overrides, which may name the network.

    Raises:
        UserError: If the weights are of no known network.
        DataError: If they are missing or damaged.
    """
    from detection.config.weights import read_weights

    converted = read_weights(weights, **_options(task, dict(_given(opts))))
    assert converted is not None
    return converted.contract.architecture


def _given(opts: Sequence[str]) -> list[tuple[str, str | None]]:
    words = split_assignments(opts)
    return list(zip_longest(words[::2], words[1::2]))


def choose_schedule(
    data: Path, task: str, network: Mapping[str, Any], opts: Sequence[str], title: str
) -> tuple[str, dict[str, Any]]:
    """Choose the keys of data and schedule, and print what is run.

    Args:
        data: Folder of the dataset.
        task: Task file or its shipped name.
        network: Keys of the network.
        opts: `KEY VALUE` overrides, which replace what is chosen.
        title: Description of the task.

    Returns:
        The task file, and the chosen keys, without `opts`.

    Raises:
        UserError: If the task is for another kind of dataset.
        DataError: If the dataset is missing or damaged.
    """
    from detection.config.task import load_task
    from detection.datasets import cache_clear, find_custom, read_split

    cache_clear()  # files may have changed since an earlier call in this process
    found, given = find_custom(data), _given(opts)
    keys = {**found, **network}
    file = str(resolve(task).absolute())

    def load(without: Container[str] = ()) -> CfgNode:
        pairs = [*keys.items(), ("MODEL.WEIGHTS", RANDOM)]
        pairs += [pair for pair in given if pair[0] not in without]
        chosen = [str(word) for pair in pairs for word in pair if word is not None]
        return load_task(file, chosen, EMBEDDED).cfg

    # The steps of the task file may not fit the given length.
    cfg = load(without=budget(1, 1, 1, 0))
    train = read_split(cfg.DATASETS.TRAIN[0], cfg)
    images, classes = len(train.records), len(train.classes)
    length = dict(given).get("SOLVER.MAX_ITER") or ""
    iterations = int(length) if length.isdecimal() else None
    keys |= budget(images, classes, cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.WARMUP_ITERS, iterations)
    cfg = load()
    solver = cfg.SOLVER
    epochs = solver.MAX_ITER * solver.IMS_PER_BATCH / images
    echo(
        f"data: {' '.join(map(' '.join, found.items()))}, {plural(images, 'training image')}, "
        f"{plural(classes, 'class')}; evaluated on {', '.join(cfg.DATASETS.TEST)}",
        f"task: {title}",
        f"budget: {solver.MAX_ITER} iterations of {solver.IMS_PER_BATCH} images, "
        f"{epochs:.4g} epochs, steps at {tuple(solver.STEPS)}, evaluated every "
        f"{cfg.TEST.EVAL_PERIOD}; --opts replaces any of it",
    )
    return file, keys


def _options(task: str | None, given: Mapping[str, str | None]) -> dict[str, str]:
    """Return the options for reading weights: family timm for tasks with networks of timm.

    The weights or `given` name the network; the name in the task file is an example.
    """
    from detection.modeling.backbones import backbone_type

    if name := given.get("MODEL.TIMM.NAME"):
        return {"family": TIMM, "timm_model": name}
    keys = flatten(read_yaml(resolve(task))) if task else {}
    is_timm = backbone_type(keys.get("MODEL.BACKBONE.NAME", "")).family == TIMM
    return {"family": TIMM} if is_timm else {}


def chosen_suite(
    data: Path, inits: Sequence[str], task: str | None, opts: Sequence[str], trials: int = SEEDS
) -> Suite:
    """Choose the task of a dataset, print what is run, and return the suite of this task.

    Args:
        data: Folder of the dataset, which the suite is named after.
        inits: Rows as for `--init`; the task is chosen for the first that is not random.
        task: Task file or its shipped name; None: the example task of the backbone.
        opts: `KEY VALUE` overrides, which replace what is chosen; they are not yet in the suite.
        trials: Seeds per row.

    Raises:
        UserError: If all rows are random, the weights fit no task, or the task is for another kind
            of dataset.
        DataError: If the dataset or the weights are missing or damaged.
    """
    rows = parse_inits(inits)
    weights = trained_rows(rows, "evaluate")
    return suite_of(data, choose(data, next(iter(weights.values())), task, opts), rows, trials)


def trained_rows(rows: Mapping[str, str], command: str) -> dict[str, str]:
    """Return the rows that are not random; raise UserError if all are."""
    if weights := {name: text for name, text in rows.items() if text != RANDOM}:
        return weights
    raise UserError(
        f"{command}: give the weights to {command}, e.g. --init mine=FILE --init random"
    )


def suite_of(
    data: Path,
    chosen: tuple[str, Mapping[str, Any]],
    rows: dict[str, str],
    trials: int,
    **task: str,
) -> Suite:
    """Return the suite of a task file with keys, named after the folder of a dataset."""
    file, keys = chosen
    content = {"tasks": [{"config": file, "overrides": keys, **task}], "trials": trials}
    return replace(read_suite(content, Path(as_name(data.resolve().name))), inits=rows)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `moco-transfer evaluate`."""
    parser = command_parser(
        "evaluate",
        "Compare backbones on your own dataset: the layout, a task and a budget are "
        "chosen and printed. After an interruption, the same command continues.",
    )
    parser.add_argument("--data", type=expand_home, required=True, metavar="DIR", help=LAYOUTS)
    task = "task file or its shipped name (default: the example for the first weights' backbone)"
    parser.add_argument("--task", metavar="FILE", help=task)
    add_arguments(parser, trials=SEEDS)
    return parser


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(SuiteOptions):
    """Options of the command `evaluate`; `build_parser` explains them."""

    data: Path
    task: str | None = None
    trials: int = SEEDS


def main(argv: Sequence[str] | None = None, programs: Programs | None = None) -> None:
    """Choose the task, and run its suite."""
    args = parse_options(build_parser(), argv, EvaluateOptions)
    data = args.data
    suite = chosen_suite(data, args.init, args.task, args.opts, args.trials)
    folder = SuiteFolder(args.output or Path("output", data.resolve().name))
    suite = run_suite.configure_suite(suite, args)
    timing = not args.seconds_per_iteration
    run_suite.run(suite, folder, args, programs or Programs(), timing=timing)


if __name__ == "__main__":
    run_cli(main)
