"""Checkpoints of a fine-tuning run: model, optimizer, iteration and random state.

Files and names are Detectron2's (fvcore's PeriodicCheckpointer): `model_0000499.pth` after
iteration 499, `model_final.pth` at the end, and `last_checkpoint` naming the newest. The weights
lie under "model" with Detectron2's names, so that either engine reads the other's model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from detection.weights import load_trained
from moco.errors import UserError
from moco.fileio import atomic_torch_save, atomic_write_text, load_torch

LAST = "last_checkpoint"
FINAL = "model_final.pth"


@dataclass
class RandomState:
    """torch's generators. The data's draws follow from the seed and the iteration."""

    cpu: Tensor
    cuda: list[Tensor]

    @classmethod
    def now(cls) -> RandomState:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(torch.get_rng_state(), cuda)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(self.cuda)


def save_checkpoint(
    folder: Path,
    name: str,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    iteration: int,
) -> Path:
    """Write `folder/name`, then `last_checkpoint`; `iteration` is the last one that was done."""
    random = RandomState.now()
    path = folder / name
    atomic_torch_save(
        path,
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "iteration": iteration,
            "random": {"cpu": random.cpu, "cuda": random.cuda},
        },
    )
    atomic_write_text(folder / LAST, name)
    return path


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run, or None before the first.

    Raises:
        UserError: `last_checkpoint` names a file outside the folder.
    """
    record = folder / LAST
    if not record.is_file():
        return None
    name = record.read_text().strip()
    if Path(name).name != name:
        raise UserError(f"{record}: {name!r} is not the name of a file in this folder")
    return folder / name


@dataclass
class Standing:
    """Where a run stands."""

    next_iteration: int
    random: RandomState


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Standing:
    """Put a checkpoint of this engine into model and optimizer.

    Raises:
        DataError: missing, damaged or unsafe file.
        UserError: of another model, or written by the other engine.
    """
    content = load_torch(path)
    wanted = ("model", "optimizer", "iteration", "random")
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
    return Standing(
        content["iteration"] + 1,
        RandomState(content["random"]["cpu"], content["random"]["cuda"]),
    )
