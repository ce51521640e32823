"""Command line of MoCo pre-training.

    python -m benchmarks pretrain --config-file configs/pretrain/small_r18.yaml DATA.ROOT my/images

moco/engine/keys.py documents every key; moco/pretraining/run.py has the training step,
moco/engine/loop.py the loop. OUTPUT_DIR receives `config.yaml`, `checkpoint_%04d.pth.tar`,
`last_checkpoint` (name of the newest checkpoint), `metrics.json` (a JSON line per log step) and, at
the end, `run.json`. The same command with `--resume` continues an interrupted run; on a CPU with
the same number of threads, the result is bitwise identical to that of an uninterrupted run.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moco.common import command, distributed
from moco.common.errors import echo
from moco.common.files import detect_format
from moco.common.pretrained import check_weights
from moco.common.run import RunFolder
from moco.data.images import check_root
from moco.pretraining.config import check_processes, load_pretrain_cfg

if TYPE_CHECKING:
    from moco.engine.weights import Reader

# Flags of the official code, and a few more, as aliases of keys.
VALUES = {
    **command.VALUES,
    ("--moco-dim",): "MOCO.DIM",
    ("--moco-k",): "MOCO.K",
    ("--moco-m",): "MOCO.M",
    ("--moco-t",): "MOCO.T",
    ("--bn-splits",): "MOCO.BN_SPLITS",
}
SWITCHES = {
    "--mlp": ("MOCO.MLP", "True"),
    "--aug-plus": ("AUG.KIND", "v2"),
    "--cos": ("SOLVER.SCHEDULE", "cosine"),
    "--symmetric": ("MOCO.SYMMETRIC", "True"),
}


def build_parser() -> argparse.ArgumentParser:
    """Build the command's argument parser."""
    parser = command.training_parser(
        "pretrain",
        "MoCo pre-training, in one process or under torchrun. Keys: moco/engine/keys.py.",
        VALUES,
    )
    parser.add_argument(
        "--other-processes",
        action="store_true",
        help="resume a checkpoint of another number of processes",
    )
    for flag, pair in SWITCHES.items():
        add, text = parser.add_argument, " ".join(pair)
        add(flag, action="append_const", dest="switched", default=[], const=pair, help=text)
    return parser


@dataclass(frozen=True)
class PretrainOptions(command.TrainingOptions):
    """Options of a pre-training.

    Attributes:
        other_processes: Whether to resume a checkpoint of another number of processes.
    """

    other_processes: bool


def parse_args(argv: Sequence[str]) -> PretrainOptions:
    """Parse arguments and turn the flags into `opts`; explicit `KEY VALUE` pairs come last."""
    values = command.parse_training_args(build_parser(), argv, VALUES)
    switched = [text for pair in values["switched"] for text in pair]
    return command.build_options({**values, "opts": switched + values["opts"]}, PretrainOptions)


def main(argv: Sequence[str], read: "Reader") -> None:
    """Run the command `moco-transfer pretrain`."""
    args = parse_args(argv)
    if (
        distributed.restart_count()
    ):  # torchrun --max-restarts: after a failure all processes start again
        args = replace(args, resume=args.resume or command.AUTO, overwrite=False)
    cfg = load_pretrain_cfg(args.config_file, args.opts)
    check_processes(cfg, distributed.launched_processes())
    check_root(cfg.DATA.ROOT)
    if cfg.DATA.KNN_ROOT:
        check_root(cfg.DATA.KNN_ROOT, labeled=True)
    pretrained = cfg.MODEL.WEIGHTS not in ("", command.RANDOM)
    if pretrained:
        check_weights(cfg.MODEL.WEIGHTS)
    if args.resume not in (None, command.AUTO):
        detect_format(args.resume)
    main_process = distributed.launched_rank() == 0
    if main_process:
        echo(f"pre-train: {cfg.MODEL.ARCH} on {cfg.DATA.ROOT}, to {cfg.OUTPUT_DIR}")
    # The folder is opened first, so that a used one is refused before torch is imported.
    with RunFolder(cfg.OUTPUT_DIR, bool(args.resume), args.overwrite, main_process) as folder:
        from moco.engine.device import pick_device
        from moco.engine.loop import train
        from moco.pretraining.run import Pretraining

        weights, model = None, cfg.MODEL
        if pretrained:
            weights = read(model.WEIGHTS, model.ARCH, model.STEM, model.WIDTH)
        with distributed.session(pick_device(cfg.DEVICE), cfg.DIST_TIMEOUT_SECONDS):
            training = Pretraining(cfg, folder, weights)
            checkpoint = train(training, folder, args.resume, args.extend, args.other_processes)
    if main_process:
        convert = command.program("convert")
        paths = command.quote(checkpoint, folder.path / "backbone.pth")
        echo(f"checkpoint: {checkpoint}", f"next: {convert} {paths}")


if __name__ == "__main__":
    from benchmarks.__main__ import cli

    cli("pretrain")
