"""What linear classification and fine-tuning share: their command line and their loop.

A protocol is data (`Protocol`); moco/classification/config.py describes every key.
OUTPUT_DIR gets
what a pre-training's gets: `config.yaml`, checkpoints, `metrics.json`, `run.json`.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moco.common.command import AUTO, parse_training_args, training_parser

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

    from moco.classification.weights import Weights
    from moco.common.run import RunFolder


@dataclass(frozen=True)
class Protocol:
    """One way to measure features by a classifier.

    Attributes:
        kind: of the run record, and the first part of its metrics' names.
        frozen: only the classifier is trained, and nothing else may change.
        head_std: standard deviation of the classifier's initial weights, its bias being 0; None
            leaves torch's initialization.
        defaults: values of keys, by dotted name.
        description: for `--help`.
    """

    kind: str
    frozen: bool
    head_std: float | None
    defaults: Mapping[str, Any]
    description: str


def classify(
    cfg: "CfgNode",
    protocol: Protocol,
    weights: "Weights",
    folder: "RunFolder",
    resume: str | None = None,
    extend: bool = False,
) -> Path:
    """Train, save, evaluate; returns the path of the last checkpoint.

    Args:
        cfg: checked keys, with the network of `weights`.
        folder: open and locked.
        resume: None to start from scratch, `"auto"` for the newest checkpoint in the folder (from
            scratch where there is none), or the path of a checkpoint.
        extend: the checkpoint's run may have been a shorter one.

    Raises:
        DataError, NumericError, UserError: the newest checkpoint stays as it was.
        Preempted, KeyboardInterrupt: on SIGTERM, SIGINT, SOLVER.STOP_AT_ITERS; the step was saved.
        AssertionError: a frozen network changed, in a parameter or a buffer.
    """
    from moco.classification.run import ClassifyRun
    from moco.engine.stop import stop_signals

    run = ClassifyRun(cfg, protocol, weights, folder, resume, extend)
    run.evaluate_if_missed()
    with run.progress() as bar, stop_signals() as stop:
        for step, batch in enumerate(run.batches(), start=run.step):
            lr = run.set_learning_rate(step)
            values = run.forward_backward(batch, step, stop.received)
            run.update()
            run.log(values, lr, step)
            bar.update(run.batch_size, **run.shown)
            run.check_frozen_if_due(step)
            run.save_if_due(step, values.stop)
            run.evaluate_if_due(step)
    return run.finish()


def build_parser(protocol: Protocol) -> argparse.ArgumentParser:
    """The command line."""
    parser = training_parser(f"python -m moco.{protocol.kind}", protocol.description)
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="FILE",
        help="pre-trained weights of this project, facebookresearch/moco or torchvision; "
        "or the word random",
    )
    parser.add_argument(
        "--init", default="", metavar="NAME", help="of the weights in a table (default: the file's)"
    )
    return parser


def parse_args(protocol: Protocol, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments with the aliases turned into `opts`; explicit `KEY VALUE` pairs come last."""
    args = parse_training_args(build_parser(protocol), argv)
    lr = getattr(args, "SOLVER.BASE_LR")
    if args.checkpoint == "random" and lr is not None:  # --lr is the one that this run has
        args.opts = ["SOLVER.RANDOM_LR", lr, *args.opts]
    return args


def main(protocol: Protocol, argv: Sequence[str] | None = None) -> None:
    """The command of a protocol."""
    args = parse_args(protocol, argv)

    from moco.classification.config import load_classify_cfg, with_weights
    from moco.common import distributed
    from moco.common.errors import UserError
    from moco.common.files import format_of
    from moco.common.run import RunFolder
    from moco.data.images import check_present
    from moco.pretraining.config import pick_device

    if distributed.restarted():  # torchrun --max-restarts: a process died, all start again
        args.resume, args.overwrite = args.resume or AUTO, False
    cfg = load_classify_cfg(protocol.defaults, args.config_file, args.opts)
    processes = distributed.launched_processes()
    if cfg.SOLVER.BATCH_SIZE % processes:
        raise UserError(
            f"SOLVER.BATCH_SIZE: got {cfg.SOLVER.BATCH_SIZE}, expected a multiple of the "
            f"{processes} processes"
        )
    check_present(cfg.DATA.ROOT, labeled=True)
    for file in {args.checkpoint, args.resume} - {"random", AUTO, None}:
        format_of(Path(file).expanduser())
    main_process = distributed.launched_rank() == 0
    if main_process:
        print(
            f"{protocol.kind}: {args.checkpoint} on {cfg.DATA.ROOT}, to {cfg.OUTPUT_DIR}",
            flush=True,
        )
    # The folder first: a used one is refused at once, before torch is imported.
    with RunFolder(cfg.OUTPUT_DIR, bool(args.resume), args.overwrite, main_process) as folder:
        from moco.classification.weights import read_weights

        weights = read_weights(
            args.checkpoint, cfg.MODEL.ARCH, cfg.MODEL.STEM, cfg.MODEL.WIDTH, args.init
        )
        for warning in weights.warnings if main_process else ():
            print(f"warning: {warning}", flush=True)
        cfg = with_weights(cfg, weights.spec, weights.mean, weights.std)
        with distributed.session(pick_device(cfg.DEVICE), cfg.DIST_TIMEOUT_SECONDS):
            checkpoint = classify(cfg, protocol, weights, folder, args.resume, args.extend)
    if main_process:
        print(f"checkpoint: {checkpoint}")
        print(f"next: python -m benchmarks.make_table {folder.path}")
