"""Checkpoints of a fine-tuning run: model, optimizer, iteration and random state of each process.

File names are Detectron2's (fvcore's PeriodicCheckpointer): `model_0000499.pth` after iteration
499, `model_final.pth` at the end, and `last_checkpoint` with the name of the newest. The weights
are under "model" with Detectron2's names, so that both engines and plain Detectron2 read them.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from detection.data.random_state import State, random_state
from detection.engine.weights import load_trained
from detection.modeling.focal_loss import moving_averages, restore_moving_averages
from moco.common import distributed
from moco.common.errors import DataError, UserError
from moco.common.files import load_torch
from moco.engine import checkpoint

logger = logging.getLogger(__name__)


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, iteration: int, **more: Any
) -> None:
    """Write the state after `iteration`, then `last_checkpoint`; all processes wait for it.

    `load_checkpoint` returns `more` with the rest of the contents.
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


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, engine: str
) -> tuple[int, State | None, dict[str, Any]]:
    """Load a checkpoint into model and optimizer.

    Args:
        path: Checkpoint file.
        model: Model to restore.
        optimizer: Optimizer to restore.
        engine: Name of the engine that resumes.

    Returns:
        The next iteration; the random state of this process, None if another number of processes
        wrote the file; the contents of the file.

    Raises:
        DataError: If the file is missing, damaged, unsafe, or not a checkpoint of a run.
        UserError: If the file is that of another model, or of the other engine.
    """
    content = load_torch(path)
    wanted = ("model", "optimizer", "iteration", "random", "engine")
    missing = [key for key in wanted if not isinstance(content, dict) or key not in content]
    if missing:
        raise DataError(
            f"{path}: has no {', '.join(missing)}, so it is not a checkpoint of this project's "
            "runs; correct last_checkpoint, or start from scratch with --overwrite"
        )
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
    return content["iteration"] + 1, random, content
