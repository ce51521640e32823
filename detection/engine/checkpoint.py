"""Checkpoints of a fine-tuning run: model, optimizer, iteration and every process's random state.

Files and names are Detectron2's (fvcore's PeriodicCheckpointer): `model_0000499.pth` after
iteration 499, `model_final.pth` at the end, and `last_checkpoint` naming the newest. The weights
are under "model" with Detectron2's names, so that either engine reads the other's model.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from detection.data.random_state import State, random_state
from detection.engine.weights import load_trained
from detection.modeling.focal_loss import moving_averages, restore_moving_averages
from moco.common import distributed
from moco.common.errors import UserError
from moco.common.files import load_torch
from moco.engine import checkpoint

logger = logging.getLogger(__name__)

Recent = Mapping[str, Sequence[float]]  # what the next line of metrics.json is smoothed over


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, iteration: int, recent: Recent
) -> None:
    """Write the state after `iteration`, then `last_checkpoint`; all processes wait for it."""
    ranks = distributed.gather_objects({**random_state(), **moving_averages(model)})
    if distributed.is_main():
        content = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "iteration": iteration,
            "random": ranks,
            "recent": recent,
        }
        checkpoint.save_checkpoint(path, content)
    distributed.barrier()


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, State | None, Recent]:
    """Load a checkpoint of this engine into model and optimizer.

    Returns:
        The next iteration; this process's random state, None where another number of processes
        wrote it; `recent`.

    Raises:
        DataError: missing, damaged or unsafe file.
        UserError: of another model, or written by the other engine.
    """
    content = load_torch(path)
    wanted = ("model", "optimizer", "iteration", "random", "recent")
    missing = [key for key in wanted if not isinstance(content, dict) or key not in content]
    if missing:
        raise UserError(
            f"{path}: cannot be resumed by the embedded engine (no {', '.join(missing)}); "
            "resume with the engine that wrote it"
        )
    load_trained(model, content["model"], path)
    model.load_state_dict(content["model"])  # with the counters of batch norm as well
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
            "%s: resumed with other images and random numbers (number of processes that wrote it: "
            "%d, now: %d)",
            path,
            len(ranks),
            processes,
        )
    restore_moving_averages(model, random or {})
    return content["iteration"] + 1, random, content["recent"]
