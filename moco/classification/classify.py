"""Command line shared by linear classification and fine-tuning.

A protocol is data (`moco.classification.config.Protocol`). moco/classification/run.py implements
the step and moco/engine/loop.py the loop around it. As in pre-training, OUTPUT_DIR receives
`config.yaml`, checkpoints, `metrics.json` and `run.json`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moco.classification.config import CROP_PX, Protocol, load_classify_cfg, with_weights
from moco.common import distributed
from moco.common.command import (
    AUTO,
    RANDOM,
    TrainingOptions,
    build_options,
    converter,
    parse_training_args,
    program,
    quote,
    training_parser,
)
from moco.common.errors import echo
from moco.common.files import detect_format
from moco.common.pretrained import check_weights
from moco.common.run import RunFolder
from moco.data.images import check_root
from moco.engine.config import check_processes

if TYPE_CHECKING:
    from moco.engine.weights import Reader


def build_parser(protocol: Protocol) -> argparse.ArgumentParser:
    """Build the argument parser of a protocol's command."""
    kind = protocol.kind
    parser = training_parser(kind, protocol.description)
    weights = (
        f"pre-trained weights that {converter()} recognizes: a file, a name or a URL "
        f"(see moco-transfer weights --help); or the word {RANDOM}"
    )
    parser.add_argument("--checkpoint", required=True, metavar="FILE", help=weights)
    init = "name of the weights in a table (default: the name of the file)"
    parser.add_argument("--init", default="", metavar="NAME", help=init)
    return parser


@dataclass(frozen=True)
class ClassifyOptions(TrainingOptions):
    """Options of a training on labels.

    Attributes:
        checkpoint: Pre-trained weights, or `RANDOM`.
        init: Name of the weights in a table; "" for the name of the file.
    """

    checkpoint: str
    init: str


def parse_args(protocol: Protocol, argv: Sequence[str]) -> ClassifyOptions:
    """Parse the arguments and turn flags of keys into `opts`; `KEY VALUE` pairs come last."""
    values = parse_training_args(build_parser(protocol), argv)
    lr = values["SOLVER.BASE_LR"]
    if values["checkpoint"] == RANDOM and lr is not None:  # --lr is the learning rate of this run
        values["opts"] = ["SOLVER.RANDOM_LR", lr, *values["opts"]]
    return build_options(values, ClassifyOptions)


def main(protocol: Protocol, argv: Sequence[str], read: "Reader") -> None:
    """Run the command of a protocol."""
    args = parse_args(protocol, argv)
    if distributed.restart_count():  # by torchrun --max-restarts, after a process has died
        args = replace(args, resume=args.resume or AUTO, overwrite=False)
    cfg = load_classify_cfg(protocol.defaults, args.config_file, args.opts)
    check_processes(cfg, distributed.launched_processes())
    check_root(cfg.DATA.ROOT, labeled=True)
    if args.checkpoint != RANDOM:
        check_weights(args.checkpoint)
    if args.resume not in (None, AUTO):
        detect_format(args.resume)
    main_process = distributed.launched_rank() == 0
    if main_process:
        echo(f"{protocol.kind}: {args.checkpoint} on {cfg.DATA.ROOT}, to {cfg.OUTPUT_DIR}")
    # Open the folder first, so that a used one is refused before torch is imported.
    with RunFolder(cfg.OUTPUT_DIR, bool(args.resume), args.overwrite, main_process) as folder:
        from moco.classification.run import Classification
        from moco.engine.device import pick_device
        from moco.engine.loop import train

        model = cfg.MODEL
        weights = read(
            args.checkpoint,
            model.ARCH,
            model.STEM,
            model.WIDTH,
            args.init,
            cfg.AUG.CROP_PX or CROP_PX,
        )
        for note in weights.notes if main_process else ():
            echo(f"note: {note}")
        cfg = with_weights(cfg, weights.spec, weights.mean, weights.std, weights.config)
        if main_process:
            print(f"crops of {cfg.AUG.CROP_PX} px", flush=True)
        with distributed.session(pick_device(cfg.DEVICE), cfg.DIST_TIMEOUT_SECONDS):
            training = Classification(cfg, protocol, weights)
            checkpoint = train(training, folder, args.resume, args.extend)
    if main_process:
        table = program("table")
        echo(f"checkpoint: {checkpoint}", f"next: {table} {quote(folder.path)}")
