"""Checkpoints of a fine-tuning run: model, optimizer, iteration and random state of each process.

File names are Detectron2's (fvcore's PeriodicCheckpointer): `model_0000499.pth` after iteration
499, `model_final.pth` at the end, and `last_checkpoint` with the name of the newest. The weights
are under "model" with Detectron2's names, so that both engines and plain Detectron2 read them.
moco/engine/checkpoint.py writes and finds the files, as those of all trainings.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from detection.data.random_state import State, random_state
from detection.engine.weights import load_trained
from detection.modeling.focal_loss import moving_averages, restore_moving_averages
from moco.common import distributed
from moco.common.errors import UserError
from moco.engine import checkpoint
from moco.engine.checkpoint import OF_DETECTRON2, list_checkpoints

logger = logging.getLogger(__name__)

FINAL = "model_final.pth"
REQUIRED = {
    **dict.fromkeys(("model", "optimizer", "scaler", "recent"), Mapping),
    **dict.fromkeys(("iteration", "skipped"), int),
    "random": list,
    "engine": str,
}


def last_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that a run would resume from, or None before the first."""
    return next(reversed(list_checkpoints(folder, OF_DETECTRON2)), None)


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, iteration: int, **more: Any
) -> None:
    """Write the state after `iteration`, then `last_checkpoint`; all processes wait for it.

    `read_checkpoint` returns `more` with the rest of the contents.
    """
    ranks = distributed.gather_objects({**random_state(), **moving_averages(model)})
    if distributed.is_main():
        content = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "iteration": iteration,
            "random": ranks,
            **more,
        }
        checkpoint.save_checkpoint(path, content)
    distributed.barrier()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint of either engine; add `step`, the number of iterations done.

    Raises:
        DataError: If the file is missing, damaged, unsafe, or not a checkpoint of a run.
    """
    content = checkpoint.read_checkpoint(path, REQUIRED, "moco-transfer train")
    return {**content, "step": content["iteration"] + 1}


def restore(
    path: Path,
    content: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    engine: str,
) -> State | None:
    """Restore model and optimizer from the contents of a checkpoint.

    Args:
        path: Checkpoint file.
        content: Its contents.
        model: Model to restore.
        optimizer: Optimizer to restore.
        engine: Name of the engine that resumes.

    Returns:
        Random state of this process; None if another number of processes wrote the file.

    Raises:
        UserError: If the file is that of another model, or of the other engine.
    """
    if content["engine"] != engine:
        raise UserError(
            f"{path} was written by the {content['engine']} engine; resume with --engine "
            f"{content['engine']}"
        )
    load_trained(model, content["model"], path)
    model.load_state_dict(content["model"])  # Includes the counters of batch norm.
    try:
        optimizer.load_state_dict(content["optimizer"])
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{path}: its optimizer has other parameters ({error}); resume with the same SOLVER"
        ) from error
    ranks, processes, random = content["random"], distributed.world_size(), None
    if len(ranks) == processes:
        random = ranks[distributed.rank()]
    else:
        logger.warning(
            "%s: resumed with other images and random numbers, because %d processes wrote it and "
            "%d resume it",
            path,
            len(ranks),
            processes,
        )
    restore_moving_averages(model, random or {})
    return random
