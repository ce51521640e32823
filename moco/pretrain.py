"""Pre-training with momentum contrast: the command line and the loop.

    python -m moco.pretrain --config-file configs/pretrain/small_r18.yaml DATA.ROOT my/pictures

moco/config.py describes every key. OUTPUT_DIR gets ``config.yaml``, ``checkpoint_%04d.pth.tar``,
``last_checkpoint`` (the newest one's name), ``metrics.json`` (a JSON line per log step) and, when
all is done, ``run.json``. The same command with ``--resume`` goes on where a run was interrupted;
on a CPU, with as many threads, the result is that of an uninterrupted run to the last bit.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moco.errors import run_cli

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

    from moco.run import RunFolder

AUTO = "auto"  # resume from the newest checkpoint in OUTPUT_DIR
# Flags of the official code, as other names of keys.
VALUES = {
    ("-a", "--arch"): "MODEL.ARCH",
    ("-j", "--workers"): "DATA.NUM_WORKERS",
    ("-b", "--batch-size"): "SOLVER.BATCH_SIZE",
    ("--lr", "--learning-rate"): "SOLVER.BASE_LR",
    ("--momentum",): "SOLVER.MOMENTUM",
    ("--wd", "--weight-decay"): "SOLVER.WEIGHT_DECAY",
    ("--epochs",): "SOLVER.MAX_EPOCHS",
    ("--seed",): "SEED",
    ("--moco-dim",): "MOCO.DIM",
    ("--moco-k",): "MOCO.K",
    ("--moco-m",): "MOCO.M",
    ("--moco-t",): "MOCO.T",
    ("--bn-splits",): "MOCO.BN_SPLITS",
    ("--dist-timeout",): "DIST_TIMEOUT_SECONDS",
}
SWITCHES = {
    "--mlp": ("MOCO.MLP", "True"),
    "--aug-plus": ("AUG.KIND", "v2"),
    "--cos": ("SOLVER.SCHEDULE", "cosine"),
    "--symmetric": ("MOCO.SYMMETRIC", "True"),
}
_KEY = re.compile(r"[A-Z][A-Z_]*(\.[A-Z][A-Z0-9_]*)*")


def pretrain(
    cfg: "CfgNode", folder: "RunFolder", resume: str | None = None, other_processes: bool = False
) -> Path:
    """Train, save, evaluate; returns the path of the last checkpoint.

    Args:
        cfg: checked keys (:func:`moco.config.load_pretrain_cfg`).
        folder: open and locked.
        resume: None to start anew, ``"auto"`` for the newest checkpoint in the folder (a new
            start where there is none), or the path of a checkpoint.
        other_processes: resume although the checkpoint was made by another number of processes.

    Raises:
        DataError, NumericError, UserError: the newest checkpoint stays as it was.
        Preempted, KeyboardInterrupt: on SIGTERM, SIGINT, SOLVER.STOP_AT_ITERS; the step was saved.
    """
    from moco.pretrain_run import PretrainRun
    from moco.training import stop_signals

    run = PretrainRun(cfg, folder, resume, other_processes)
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
    parser = argparse.ArgumentParser(
        prog="python -m moco.pretrain",
        description="MoCo pre-training, in one process or torchrun's. Keys: moco/config.py.",
    )
    parser.add_argument("--config-file", metavar="YAML", help="recipe, see configs/pretrain/")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=AUTO,
        metavar="FILE",
        help="go on from the newest checkpoint in OUTPUT_DIR, or from this one",
    )
    parser.add_argument(
        "--other-processes",
        action="store_true",
        help="resume although another number of processes made the checkpoint",
    )
    parser.add_argument("--overwrite", action="store_true", help="start anew in a used OUTPUT_DIR")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    for flags, key in VALUES.items():
        parser.add_argument(*flags, dest=key, metavar="VALUE", help=key)
    for flag, (key, value) in SWITCHES.items():
        parser.add_argument(flag, action="store_true", help=f"{key} {value}")
    parser.add_argument(
        "--schedule", nargs="*", metavar="EPOCH", help="SOLVER.MILESTONES_EPOCHS, e.g. 120 160"
    )
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="e.g. DATA.ROOT my/pictures")
    return parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments with the aliases turned into ``opts``; explicit ``KEY VALUE`` pairs come last."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for i, word in enumerate(argv[:-1]):
        if word == "--resume" and _KEY.fullmatch(argv[i + 1]):
            argv[i] = f"--resume={AUTO}"  # the next word is a key, not a checkpoint
    args = build_parser().parse_intermixed_args(argv)
    opts = []
    for key in VALUES.values():
        if getattr(args, key) is not None:
            opts += [key, getattr(args, key)]
    if getattr(args, "SOLVER.BASE_LR") is not None:  # meant as it is, whatever the batch
        opts += ["SOLVER.REFERENCE_BATCH_SIZE", "0"]
    for flag, pair in SWITCHES.items():
        if getattr(args, flag.strip("-").replace("-", "_")):
            opts += pair
    if args.schedule is not None:
        epochs = [word for word in args.schedule if word.isdigit()]
        args.opts += args.schedule[len(epochs) :]
        opts += ["SOLVER.MILESTONES_EPOCHS", f"({''.join(f'{epoch},' for epoch in epochs)})"]
    args.opts = opts + args.opts
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """The command ``python -m moco.pretrain``."""
    args = parse_args(argv)

    from moco import distributed
    from moco.config import check_processes, load_pretrain_cfg, pick_device
    from moco.run import RunFolder

    if distributed.restarted():  # torchrun --max-restarts: a process died, all start again
        args.resume, args.overwrite = args.resume or AUTO, False
    cfg = load_pretrain_cfg(args.config_file, args.opts)
    check_processes(cfg, distributed.launched_processes())
    main_process = distributed.launched_rank() == 0
    # The folder first: a used one is refused at once, before torch is imported.
    with RunFolder(cfg.OUTPUT_DIR, bool(args.resume), args.overwrite, main_process) as folder:
        with distributed.session(pick_device(cfg.DEVICE), cfg.DIST_TIMEOUT_SECONDS):
            checkpoint = pretrain(cfg, folder, args.resume, args.other_processes)
    if main_process:
        print(f"checkpoint: {checkpoint}")
        print(f"next: python convert/convert_to_d2.py {checkpoint} {folder.path / 'backbone.pth'}")


if __name__ == "__main__":
    run_cli(main)
