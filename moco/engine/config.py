"""Configuration shared by all trainings: pre-training, linear classification, fine-tuning."""

from collections.abc import Mapping
from typing import Any

from fvcore.common.config import CfgNode

from moco.common.cfgnode import cfg_sha256, differing, flatten
from moco.common.errors import UserError, lookup
from moco.common.keys import NOT_PROTOCOL, Keys, add_keys, check_keys, names_of
from moco.engine.keys import FORMER


def default_cfg(keys: Keys) -> CfgNode:
    """Return a configuration with the defaults of the keys."""
    cfg = CfgNode()
    add_keys(cfg, keys)
    return cfg


def check_values(cfg: CfgNode, keys: Keys) -> None:
    """Check the range of each key, and combinations of the common keys.

    Raises:
        UserError: If a value is out of range, or two values exclude each other.
    """
    from moco.engine.loggers import check_loggers
    from moco.engine.solver import OPTIMIZERS, SCHEDULES

    lookup(SCHEDULES, cfg.SOLVER.SCHEDULE, "SOLVER.SCHEDULE")
    lookup(OPTIMIZERS, cfg.SOLVER.OPTIMIZER, "SOLVER.OPTIMIZER")
    check_loggers(cfg.LOG.LOGGERS)
    check_keys(cfg, keys)
    if cfg.SOLVER.WARMUP_ITERS and cfg.SOLVER.WARMUP_EPOCHS:
        raise UserError("SOLVER.WARMUP_ITERS, SOLVER.WARMUP_EPOCHS: set one of them, the other 0")


def check_milestones(cfg: CfgNode, max_epochs: float | None) -> None:
    """Check that SOLVER.MILESTONES_EPOCHS increase and are below `max_epochs`.

    Args:
        cfg: Configuration of the run.
        max_epochs: Length of the run in epochs, or None if it is not known yet.

    Raises:
        UserError: If the milestones are not increasing integers, or one is never reached.
    """
    if cfg.SOLVER.SCHEDULE != "step":
        return
    milestones = tuple(cfg.SOLVER.MILESTONES_EPOCHS)
    if list(milestones) != sorted(set(milestones)) or any(
        isinstance(m, bool) or not isinstance(m, int) or m < 1 for m in milestones
    ):
        raise UserError(
            f"SOLVER.MILESTONES_EPOCHS: got {milestones}, expected increasing integers >= 1"
        )
    if max_epochs is not None and milestones and milestones[-1] >= max_epochs:
        raise UserError(
            f"SOLVER.MILESTONES_EPOCHS: {milestones[-1]} is never reached in "
            f"{max_epochs:g} epochs; lower it, set () for none, or set SOLVER.SCHEDULE cosine"
        )


def protocol_sha256(cfg: Mapping[str, Any], defaults: Mapping[str, Any], keys: Keys) -> str:
    """Hash the keys that must be equal in all runs of one table.

    Only values that differ from the defaults are hashed, so that a new key changes no hash.
    """
    left_out = (*names_of(keys, *NOT_PROTOCOL), *FORMER)
    return cfg_sha256(differing(flatten(cfg), flatten(defaults)), left_out)


def check_processes(cfg: CfgNode, world_size: int) -> None:
    """Check that the batch can be divided among the processes; raise UserError otherwise."""
    N = cfg.SOLVER.BATCH_SIZE
    if N % world_size:
        raise UserError(
            f"SOLVER.BATCH_SIZE: got {N}, expected a multiple of the {world_size} processes, "
            f"e.g. {N - N % world_size or world_size}"
        )
