"""Pre-training with momentum contrast: the command line and the loop.

    python -m moco.pretrain --config-file configs/pretrain/small_r18.yaml DATA.ROOT my/images

moco/pretraining/config.py describes every key. OUTPUT_DIR gets `config.yaml`,
`checkpoint_%04d.pth.tar`,
`last_checkpoint` (the newest one's name), `metrics.json` (a JSON line per log step) and, when
all is done, `run.json`. The same command with `--resume` goes on where a run was interrupted;
on a CPU, with as many threads, the result is that of an uninterrupted run to the last bit.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moco.common import command
from moco.common.errors import run_cli

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

    from moco.common.run import RunFolder
    from moco.pretraining.initial_weights import InitialWeights

# Flags of the official code, and a few of this project's, as other names of keys.
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


def pretrain(
    cfg: "CfgNode",
    folder: "RunFolder",
    resume: str | None = None,
    other_processes: bool = False,
    extend: bool = False,
    weights: "InitialWeights | None" = None,
) -> Path:
    """Train, save, evaluate; returns the path of the last checkpoint.

    Args:
        cfg: checked keys (`moco.pretraining.config.load_pretrain_cfg`).
        folder: open and locked.
        resume: None to start from scratch, `"auto"` for the newest checkpoint in the folder (from
            scratch where there is none), or the path of a checkpoint.
        other_processes: resume although the checkpoint was made by another number of processes.
        extend: the checkpoint's run may have been a shorter one.
        weights: of MODEL.WEIGHTS, where a new run starts; None: from scratch.

    Raises:
        DataError, NumericError, UserError: the newest checkpoint stays as it was.
        Preempted, KeyboardInterrupt: on SIGTERM, SIGINT, SOLVER.STOP_AT_ITERS; the step was saved.
    """
    from moco.engine.stop import stop_signals
    from moco.pretraining.run import PretrainRun

    run = PretrainRun(cfg, folder, resume, other_processes, extend, weights)
    run.evaluate_if_missed()
    with run.progress() as bar, stop_signals() as stop:
        for step, batch in enumerate(run.batches(), start=run.step):
            lr = run.set_learning_rate(step)
            values = run.forward_backward(batch, step, stop.received)
            run.update()
            run.log(values, lr, step)
            bar.update(run.batch_size, **run.shown)
            run.save_if_due(step, values.stop)
            run.evaluate_if_due(step)
    return run.finish()


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command.training_parser(
        "python -m moco.pretrain",
        "MoCo pre-training, in one process or torchrun's. Keys: moco/pretraining/config.py.",
        VALUES,
    )
    parser.add_argument(
        "--other-processes",
        action="store_true",
        help="resume although another number of processes made the checkpoint",
    )
    for flag, (key, value) in SWITCHES.items():
        parser.add_argument(flag, action="store_true", help=f"{key} {value}")
    return parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments with the flags turned into `opts`; explicit `KEY VALUE` pairs come last."""
    args = command.parse_training_args(build_parser(), argv, VALUES)
    switched = [
        word
        for flag, pair in SWITCHES.items()
        if getattr(args, flag.strip("-").replace("-", "_"))
        for word in pair
    ]
    args.opts = switched + args.opts
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """The command `python -m moco.pretrain`."""
    args = parse_args(argv)

    from moco.common import distributed
    from moco.common.files import format_of
    from moco.common.run import RunFolder
    from moco.data.images import check_present
    from moco.pretraining.config import check_processes, load_pretrain_cfg, pick_device

    if distributed.restarted():  # torchrun --max-restarts: a process died, all start again
        args.resume, args.overwrite = args.resume or command.AUTO, False
    cfg = load_pretrain_cfg(args.config_file, args.opts)
    check_processes(cfg, distributed.launched_processes())
    check_present(cfg.DATA.ROOT)
    if cfg.DATA.KNN_ROOT:
        check_present(cfg.DATA.KNN_ROOT, labeled=True)
    if args.resume not in (None, command.AUTO):
        format_of(args.resume)
    main_process = distributed.launched_rank() == 0
    if main_process:
        print(f"pre-train: {cfg.MODEL.ARCH} on {cfg.DATA.ROOT}, to {cfg.OUTPUT_DIR}", flush=True)
    # The folder first: a used one is refused at once, before torch is imported.
    with RunFolder(cfg.OUTPUT_DIR, bool(args.resume), args.overwrite, main_process) as folder:
        weights = None
        if cfg.MODEL.WEIGHTS:
            # The one place where this room calls on the next: at the edge of its command.
            from convert.initial_weights import read_initial_weights

            weights = read_initial_weights(Path(cfg.MODEL.WEIGHTS), cfg.MODEL.STEM)
        with distributed.session(pick_device(cfg.DEVICE), cfg.DIST_TIMEOUT_SECONDS):
            checkpoint = pretrain(
                cfg, folder, args.resume, args.other_processes, args.extend, weights
            )
    if main_process:
        print(f"checkpoint: {checkpoint}")
        print(f"next: python convert/convert_to_d2.py {checkpoint} {folder.path / 'backbone.pth'}")


if __name__ == "__main__":
    run_cli(main)
