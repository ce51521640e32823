"""Command that ranks frozen backbones on a dataset in minutes.

moco-transfer rank --data DIR --init mine=FILE --init other=timm://NAME --init random

Each backbone stays frozen under a small detector, which is trained, so that the maps of an image
are computed once for all seeds. All are of one architecture, as are the random weights. Beside AP,
the table has LogME, which trains nothing. docs/guides/rank.md says how the ranks of frozen
backbones agree with those of fine-tuned ones.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import run_suite
from benchmarks.evaluate import (
    LAYOUTS,
    SEEDS,
    choose_schedule,
    read_backbone,
    suite_of,
    trained_rows,
)
from benchmarks.run_suite import SuiteOptions, add_arguments
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.runs import Programs
from benchmarks.suites.suite import Suite
from benchmarks.suites.suite_file import as_name, parse_inits
from convert.families.base import Architecture
from moco.common.cfgnode import flatten, read_yaml
from moco.common.command import command_parser, parse_options
from moco.common.errors import UserError, echo, run_cli
from moco.common.files import expand_home
from moco.common.shipped import resolve

TASK = "voc/frozen_small"
SQUARE_PX = 320  # of the images of TASK, at most
TRUST = (
    "note: the backbones were frozen; on 4 datasets these ranks agreed with those of fine-tuned "
    "backbones at Kendall's τ = 0.44 to 0.94 over 9 to 11 inits each, and the largest inversion "
    "was 3.4 AP (docs/guides/rank.md); fine-tune the best few with `evaluate`"
)


def frozen_keys(architecture: Architecture) -> dict[str, Any]:
    """Return the keys that put a frozen backbone of an architecture into `TASK`."""
    from detection.config.task import default_task
    from detection.modeling.backbones import backbone_type

    example, _, _ = architecture.example_task()
    # Example tasks of ResNets are C4's, which have no pyramid and the default builder.
    given = flatten(read_yaml(resolve(example)))
    name = given.get("MODEL.BACKBONE.NAME", "build_resnet_fpn_backbone")
    kind = backbone_type(name)
    frozen = -1 if kind.freezes_whole else kind.num_parts(default_task())
    keys = {
        "MODEL.BACKBONE.NAME": name,
        "MODEL.BACKBONE.FREEZE_AT": frozen,
        **architecture.d2_keys(),
        **architecture.keys_to_set(),
    }
    if name.endswith("_sfp_backbone"):
        keys.setdefault("MODEL.BACKBONE.SQUARE_PAD", SQUARE_PX)
    if name.startswith("build_vit_"):
        # As the network was pre-trained: every block sees the whole image, with its tokens.
        keys |= {
            "MODEL.VIT.WINDOW_SIZE": 0,
            "MODEL.VIT.REL_POS": False,
            "MODEL.VIT.KEEP_TOKENS": keys["MODEL.VIT.TOKENS"] > 0,
        }
    return keys


def ranked_suite(
    data: Path, inits: Sequence[str], opts: Sequence[str], trials: int = SEEDS
) -> Suite:
    """Choose the task of the backbones, print what is run, and return its suite.

    Args:
        data: Folder of the dataset, which the suite is named after.
        inits: Rows as for `--init`.
        opts: `KEY VALUE` overrides, which replace what is chosen; they are not yet in the suite.
        trials: Seeds per row.

    Raises:
        UserError: If all rows are random, or of several architectures.
        DataError: If the dataset or weights are missing or damaged.
    """
    rows = parse_inits(inits)
    backbones = {
        name: read_backbone(text, TASK, opts) for name, text in trained_rows(rows, "rank").items()
    }
    (first, architecture), *others = backbones.items()
    for name, other in others:
        if str(other) != str(architecture):
            raise UserError(
                f"rank: --init {first} is a {architecture}, {name} a {other}, whose tasks are two "
                "protocols; rank each architecture by a command and --output of its own; "
                "`moco-transfer table` makes one page of all"
            )
    keys = {**frozen_keys(architecture), "TEST.LOGME": True}
    chosen = choose_schedule(data, TASK, keys, opts, f"{TASK} with a frozen {architecture}")
    # One name for each protocol, so that a table may have several datasets and architectures.
    name = as_name(f"{data.resolve().name} frozen {architecture}")
    return suite_of(data, chosen, rows, trials, name=name)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `moco-transfer rank`."""
    parser = command_parser(
        "rank",
        "Rank frozen backbones on your own dataset in minutes: a small detector is "
        "trained on their cached feature maps. After an interruption, the same command continues.",
    )
    parser.add_argument("--data", type=expand_home, required=True, metavar="DIR", help=LAYOUTS)
    add_arguments(parser, trials=SEEDS)
    return parser


@dataclass(frozen=True, kw_only=True)
class RankOptions(SuiteOptions):
    """Options of the command `rank`; `build_parser` explains them."""

    data: Path
    trials: int = SEEDS


def main(argv: Sequence[str] | None = None, programs: Programs | None = None) -> None:
    """Choose the tasks, and run their suite."""
    args = parse_options(build_parser(), argv, RankOptions)
    data = args.data
    suite = ranked_suite(data, args.init, args.opts, args.trials)
    folder = SuiteFolder(args.output or Path("output", f"{data.resolve().name}_rank"))
    suite = run_suite.configure_suite(suite, args)
    timing = not args.seconds_per_iteration
    echo("forecasts count no cached maps, so they are upper bounds")
    run_suite.run(suite, folder, args, programs or Programs(), timing=timing)
    if not (args.dry_run or args.plan):
        echo(TRUST)


if __name__ == "__main__":
    run_cli(main)
