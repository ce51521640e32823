"""What a pre-training checkpoint holds, and going on from one. moco/engine/checkpoint.py has the
file.

W processes, B numbers in the running statistics of all BN layers.
"""

from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from moco.common import distributed
from moco.common.cfgnode import flatten
from moco.common.errors import DataError, UserError
from moco.engine.checkpoint import FORMAT, PREFIX
from moco.engine.training import check_same_run, find_checkpoint
from moco.modeling.encoder import EncoderSpec
from moco.modeling.mechanisms.base import Mechanism
from moco.pretraining.config import MAY_CHANGE


def checkpoint_content(
    cfg: CfgNode,
    model: Mechanism,
    spec: EncoderSpec,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    done: int,
    epoch: int,
    num_images: int,
    seconds: float,
) -> dict[str, Any]:
    """Everything the next step depends on. All processes call it together, all get the same.

    Order, views, BN shuffle and drawn negatives are functions of seed and step, so there is no
    state of a random number generator.

    Deviation: the running statistics in `state_dict` are the mean over the processes (the
    official code saves the first one's); each process's own, which it goes on with, are in
    `statistics`.
    """
    state = model.gathered_state()
    own = running_statistics(model)
    statistics = distributed.gather_rows(own[None])  # (W, B)
    state |= named_statistics(model, statistics.mean(dim=0))
    return {
        "epoch": epoch,
        "arch": spec.arch,
        "state_dict": {f"{PREFIX}{name}": value for name, value in state.items()},
        "optimizer": optimizer.state_dict(),
        "format": FORMAT,
        "encoder": {**spec.to_dict(), "dim": cfg.MOCO.DIM, "mlp": cfg.MOCO.MLP},
        "input": {
            "channel_order": "RGB",
            "mean": list(cfg.AUG.MEAN),
            "std": list(cfg.AUG.STD),
        },
        "step": done,
        "seed": cfg.SEED,
        "num_images": num_images,
        "seconds": seconds,
        "config": flatten(cfg),
        "processes": distributed.world_size(),
        "statistics": statistics,
        "scaler": scaler.state_dict(),
    }


def encoder_content(model: Mechanism, spec: EncoderSpec) -> dict[str, Any]:
    """What `moco.engine.checkpoint.load_backbone` needs of a checkpoint; all call it
    together."""
    statistics = distributed.gather_rows(running_statistics(model)[None]).mean(dim=0)
    state = dict(model.state_dict()) | named_statistics(model, statistics)
    weights = {f"{PREFIX}{name}": value for name, value in state.items() if name.startswith("enc")}
    return {"encoder": spec.to_dict(), "state_dict": weights}


def restore(
    resume: str,
    folder: Path,
    cfg: CfgNode,
    model: Mechanism,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    num_images: int,
    other_processes: bool,
    extend: bool,
) -> tuple[Path, dict[str, Any]] | None:
    """Load what `checkpoint_content` made, and return it with its path.

    None where there is no checkpoint to resume.

    Args:
        resume: `"auto"` for the newest checkpoint in `folder`, or a path.
        other_processes: go on although the number of processes is another one: the same batches
            and BN groups, and running statistics that start from the mean.
        extend: go on although the length of the run is another one.

    Raises:
        DataError: damaged, or made by a run on other data.
        UserError: made by a run with other keys, or by another number of processes.
    """
    found = find_checkpoint(resume, folder, FORMAT)
    if found is None:
        return None
    path, state = found
    check_same_run(path, state, cfg, num_images, MAY_CHANGE, extend)
    world = distributed.world_size()
    same_processes = state.get("processes") == world
    if not same_processes and not other_processes:
        raise UserError(
            f"{path}: was trained by {state.get('processes')} processes, this run has {world}; "
            "start as many, or add --other-processes to go on with the same batch on these"
        )
    weights = {name.removeprefix(PREFIX): value for name, value in state["state_dict"].items()}
    try:
        model.load_gathered_state(weights)
        if same_processes:
            own = state["statistics"][distributed.rank()]
            model.load_state_dict(named_statistics(model, own), strict=False)
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{path}: does not fit this model ({reason})") from error
    return path, state


def running_statistics(model: nn.Module) -> Tensor:
    """(B,) means and variances of all BN layers."""
    return torch.cat([buffer.flatten() for _, buffer in _statistics_buffers(model)])


def named_statistics(model: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """What `running_statistics` gave, under the names of the model's buffers."""
    buffers = _statistics_buffers(model)
    parts = flat.split([buffer.numel() for _, buffer in buffers])
    return {name: part for (name, _), part in zip(buffers, parts, strict=True)}


def _statistics_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    names = ("running_mean", "running_var")
    # Two encoders that are one network (end-to-end) have both names in the state.
    return [
        (name, buffer)
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name.endswith(names)
    ]
