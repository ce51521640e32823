"""Configuration of a pre-training run and checks across the keys (moco/engine/keys.py)."""

from collections.abc import Sequence
from typing import Any

from fvcore.common.config import CfgNode

from moco.common.cfgnode import load_cfg
from moco.common.errors import UserError, lookup, plural
from moco.common.files import PathLike
from moco.engine import config as common_config
from moco.engine.keys import PRETRAIN
from moco.modeling.archs import VITS, build_spec
from moco.modeling.mechanisms import MECHANISMS

# Keys under AUG in which MoCo v2 (arXiv 2003.04297; main_moco.py --aug-plus) differs from v1.
AUG_V2: dict[str, Any] = {"KIND": "v2", "JITTER_PROB": 0.8, "HUE": 0.1, "BLUR_PROB": 0.5}
# Keys of MoCo v3 (arXiv 2104.02057; the official main_moco.py).
AUG_V3 = {
    **AUG_V2,
    "KIND": "v3",
    "SATURATION": 0.2,
    "BLUR_PROB": 1.0,
    "BLUR_PROB_2": 0.1,
    "SOLARIZE_PROB_2": 0.2,
}
AUGS: dict[str, dict[str, Any]] = {"v1": {}, "v2": AUG_V2, "v3": AUG_V3}
_IN_BATCH = ("end_to_end", "moco_v3")  # mechanisms whose dictionary is the batch


def default_cfg(aug: str = "v1") -> CfgNode:
    """Return the default configuration, with AUG as in the paper (v1), MoCo v2 or MoCo v3."""
    cfg = common_config.default_cfg(PRETRAIN)
    cfg.OUTPUT_DIR = "output/pretrain"
    cfg.AUG.update(AUGS[aug])
    return cfg


def load_pretrain_cfg(config_file: PathLike | None, opts: Sequence[str]) -> CfgNode:
    """Merge defaults, YAML file and `KEY VALUE` pairs into a checked and frozen configuration.

    Raises:
        UserError: If a key is unknown, or a value is invalid or contradicts another one.
    """
    cfg = load_cfg(default_cfg(), config_file, opts)
    common_config.check_values(cfg, PRETRAIN)
    if cfg.AUG.KIND != "v1":
        cfg = load_cfg(default_cfg(cfg.AUG.KIND), config_file, opts)
    build_spec(cfg.MODEL.ARCH, cfg.MODEL.STEM, cfg.MODEL.WIDTH, cfg.AUG.CROP_PX)
    if cfg.MODEL.FREEZE_PATCH_EMBED and cfg.MODEL.ARCH not in VITS:
        raise UserError(
            f"MODEL.FREEZE_PATCH_EMBED: {cfg.MODEL.ARCH} has no patches; set it to False"
        )
    lookup(MECHANISMS, cfg.MOCO.MECHANISM, "MOCO.MECHANISM")
    _check_mechanism(cfg)
    N, G = cfg.SOLVER.BATCH_SIZE, cfg.MOCO.BN_SPLITS
    if N % G or N // G < 2:
        largest = max(d for d in range(1, min(G, N // 2) + 1) if N % d == 0)
        raise UserError(
            f"MOCO.BN_SPLITS: got {G}, expected a divisor of SOLVER.BATCH_SIZE ({N}) with 2 or "
            f"more images a group; the next smaller one is {largest}"
        )
    common_config.check_milestones(cfg, None if cfg.SOLVER.MAX_ITERS else cfg.SOLVER.MAX_EPOCHS)
    return cfg


def scale_to_batch(cfg: CfgNode) -> tuple[CfgNode, list[str]]:
    """Scale the keys under SOLVER linearly to the batch size of the run (sec. 4.1).

    Returns:
        Scaled keys, and notes on what was scaled and what still differs from the reference.
    """
    solver = cfg.SOLVER.clone()
    N, reference = solver.BATCH_SIZE, solver.REFERENCE_BATCH_SIZE or solver.BATCH_SIZE
    if N == reference:
        return solver, []
    factor = N / reference
    solver.defrost()
    solver.BASE_LR *= factor
    if solver.MAX_ITERS:
        solver.MAX_ITERS = max(1, round(solver.MAX_ITERS / factor))
    solver.WARMUP_ITERS = round(solver.WARMUP_ITERS / factor)
    solver.DECAY_EVERY_ITERS = max(1, round(solver.DECAY_EVERY_ITERS / factor))
    solver.freeze()
    different = [f"BN statistics over {N // cfg.MOCO.BN_SPLITS} images a group"]
    if cfg.MOCO.MECHANISM == "momentum_queue":
        different += [
            f"the queue holds {cfg.MOCO.K / N:g} steps instead of {cfg.MOCO.K / reference:g}",
            f"m {cfg.MOCO.M:g} is applied every {N} images instead of every {reference}",
        ]
    if cfg.MOCO.MECHANISM in _IN_BATCH:
        different.append(f"{N - 1} negatives")
    if cfg.MOCO.MECHANISM == "moco_v3":
        different.append(
            f"m from {cfg.MOCO.M:g} is applied every {N} images, not every {reference}"
        )
    return solver, [
        f"a batch of {N} instead of {reference}: learning rate {solver.BASE_LR:g} instead of "
        f"{cfg.SOLVER.BASE_LR:g} (linear scaling; SOLVER.REFERENCE_BATCH_SIZE 0 turns it off)",
        f"not equivalent to a batch of {reference}: {'; '.join(different)}",
    ]


def check_processes(cfg: CfgNode, world_size: int) -> None:
    """Check that the batch and the BN groups can be divided among the processes.

    Raises:
        UserError: If the batch or the groups cannot be divided.
    """
    common_config.check_processes(cfg, world_size)
    G, parts = cfg.MOCO.BN_SPLITS, cfg.SOLVER.ACCUMULATE
    if G % (world_size * parts) and (G, parts) != (1, 1):
        raise UserError(
            f"MOCO.BN_SPLITS: got {G}, expected a multiple of {world_size * parts}: each of "
            f"{plural(world_size, 'process')} x {plural(parts, 'part')} (SOLVER.ACCUMULATE) "
            "normalizes its own images"
        )


def _check_mechanism(cfg: CfgNode) -> None:
    """Check that the other keys are compatible with the mechanism."""
    moco, N = cfg.MOCO, cfg.SOLVER.BATCH_SIZE
    if moco.MECHANISM == "momentum_queue":
        keys_per_step = 2 * N if moco.SYMMETRIC else N
        if moco.K < keys_per_step:
            per_step = "2 x SOLVER.BATCH_SIZE" if moco.SYMMETRIC else "SOLVER.BATCH_SIZE"
            raise UserError(
                f"MOCO.K: got {moco.K}, expected at least {per_step} ({keys_per_step}): "
                "the queue consists of whole batches"
            )
    if moco.MECHANISM in _IN_BATCH and moco.K != N:
        raise UserError(
            f"MOCO.K: got {moco.K}, expected SOLVER.BATCH_SIZE ({N}): "
            f"{moco.MECHANISM} has the batch as its dictionary"
        )
    if cfg.SOLVER.ACCUMULATE > 1 and (moco.MECHANISM in _IN_BATCH or moco.LOSS == "nce"):
        raise UserError(
            f"SOLVER.ACCUMULATE: got {cfg.SOLVER.ACCUMULATE}, expected 1: "
            f"{' and '.join(_IN_BATCH)} have the whole batch as their dictionary, and nce takes "
            "its constant from it"
        )
    if moco.MECHANISM == "moco_v3" and moco.BN_SPLITS != 1:
        raise UserError(
            f"MOCO.BN_SPLITS: got {moco.BN_SPLITS}, expected 1: moco_v3 normalizes over the whole "
            "batch, on any number of processes"
        )
    if moco.MECHANISM != "memory_bank" and moco.LOSS != "info_nce":
        raise UserError(f"MOCO.LOSS: {moco.LOSS} is for MOCO.MECHANISM memory_bank; use info_nce")
    if moco.MECHANISM == "memory_bank" and moco.SYMMETRIC:
        raise UserError("MOCO.SYMMETRIC: memory_bank encodes no keys; set it to False")
