"""Every key of a pre-training run, with its unit and range, and the checks across keys.

The defaults are the paper's but for SOLVER.PRECISION: ResNet-50, 200 epochs of batch 256,
K = 65536, augmentation v1.
"""

import math
from collections.abc import Sequence
from typing import Any

from fvcore.common.config import CfgNode

from moco.common.cfgcheck import (
    check_choice,
    check_interval,
    check_milestones,
    check_numbers,
    check_range,
    get,
)
from moco.common.cfgnode import load_cfg
from moco.common.errors import UserError, plural
from moco.common.files import PathLike
from moco.common.registry import lookup
from moco.engine import config as common_config
from moco.modeling.archs import ARCHS, STEMS, VITS, spec_of
from moco.modeling.mechanisms import MECHANISMS

# Keys under AUG in which MoCo v2 (arXiv 2003.04297; main_moco.py --aug-plus) differs from v1.
AUG_V2: dict[str, Any] = {"KIND": "v2", "JITTER_PROB": 0.8, "HUE": 0.1, "BLUR_PROB": 0.5}
# MoCo v3's (arXiv 2104.02057; its main_moco.py).
AUG_V3 = {
    **AUG_V2,
    "KIND": "v3",
    "SATURATION": 0.2,
    "BLUR_PROB": 1.0,
    "BLUR_PROB_2": 0.1,
    "SOLARIZE_PROB_2": 0.2,
}
AUGS: dict[str, dict[str, Any]] = {"v1": {}, "v2": AUG_V2, "v3": AUG_V3}
LOWEST = {
    0: "SOLVER.MAX_ITERS KNN.EVERY_EPOCHS KNN.RESIZE_PX KNN.CROP_PX",
    8: "AUG.CROP_PX",
    1: "SOLVER.ACCUMULATE DATA.SHARD_WINDOW KNN.K MOCO.DIM MOCO.MLP_DIM MOCO.K MOCO.BN_SPLITS",
}
# As common_config.PLACES_AND_SPEED.
PLACES_AND_SPEED = (
    *common_config.PLACES_AND_SPEED,
    "DATA.KNN_ROOT",
    "MODEL.WEIGHTS",  # a resumed run compares what is in the file
    "MOCO.SHUFFLE_BY",
    "KNN",
)
NOT_PROTOCOL = ("SEED", *PLACES_AND_SPEED)  # what the hash of the protocol leaves out
# What a resumed run may change besides: it concerns only images that the run has not met yet.
MAY_CHANGE = (*PLACES_AND_SPEED, "DATA.BAD_IMAGES", "DATA.MAX_BAD_FRACTION")
_IN_BATCH = ("end_to_end", "moco_v3")  # mechanisms whose dictionary is the batch


def default_cfg(aug: str = "v1") -> CfgNode:
    """All keys with their defaults; those under AUG are the paper's (v1), v2's or v3's."""
    cfg = common_config.common_cfg()
    cfg.OUTPUT_DIR = "output/pretrain"
    # A folder of images (nested or flat; its train/ is used where it has one), a .txt file with
    # one path per line, relative to the file, tar shards (a folder of them, one, or a pattern such
    # as shards/train-{000000..000146}.tar), or CIFAR-10's own folder (cifar-10-batches-py).
    cfg.DATA.ROOT = ""
    # What to do with an image that cannot be decoded: fail (naming it) or skip (another one of
    # the dataset takes its place).
    cfg.DATA.BAD_IMAGES = "fail"
    # With skip: share of the dataset that may be bad, 0..1; beyond it the run stops.
    cfg.DATA.MAX_BAD_FRACTION = 0.001
    # Folder with train/<class>/* and val/<class>/*, or CIFAR-10's own, for the kNN monitor; ""
    # turns it off.
    cfg.DATA.KNN_ROOT = ""
    # Where DATA.ROOT are tar shards: this many of them are shuffled together, >= 1.
    cfg.DATA.SHARD_WINDOW = 16

    # v1: gray, then jitter (the paper, sec. 3.3). v2: jitter, then gray, then blur (MoCo v2). v3:
    # as v2, then solarization, and the two views differ (MoCo v3; for ViTs its CROP_SCALE is
    # (0.08, 1)).
    # The keys below take that kind's values unless they are set. AUG.MEAN and STD are written into
    # the checkpoint for the converter.
    cfg.AUG.KIND = "v1"
    # Probability of applying the four jitters (together), 0..1.
    cfg.AUG.JITTER_PROB = 1.0
    # Factors are sampled from 1 ± these, >= 0; hue is shifted by up to this part of the circle,
    # 0..0.5. The four are applied in random order.
    cfg.AUG.BRIGHTNESS = 0.4
    cfg.AUG.CONTRAST = 0.4
    cfg.AUG.SATURATION = 0.4
    cfg.AUG.HUE = 0.4
    # Probability of turning the image gray, 0..1.
    cfg.AUG.GRAY_PROB = 0.2
    # Probability of a Gaussian blur, 0..1, and the range of its sigma in pixels.
    cfg.AUG.BLUR_PROB = 0.0
    cfg.AUG.BLUR_SIGMA_PX = (0.1, 2.0)
    # Probability of inverting the values from a half on, 0..1, after the blur.
    cfg.AUG.SOLARIZE_PROB = 0.0
    # Of the second view, which is the key's in the first pass, 0..1; -1: as of the first view.
    cfg.AUG.BLUR_PROB_2 = -1.0
    cfg.AUG.SOLARIZE_PROB_2 = -1.0
    cfg.AUG.update(AUGS[aug])

    # Start from these weights: any file that convert/convert_to_d2.py recognizes, or a name or
    # address of one (`moco-transfer weights --help`); "": from scratch. Head, key encoder and queue
    # come along where the file has them in the run's shapes.
    cfg.MODEL.WEIGHTS = ""
    # Each block of a ResNet starts as the identity (MoCo v3's do).
    cfg.MODEL.ZERO_INIT_RESIDUAL = False
    # The patch projection of a ViT stays random, which keeps the training stable (MoCo v3, sec. 4).
    cfg.MODEL.FREEZE_PATCH_EMBED = False

    cfg.MOCO = CfgNode()
    # Dimension C of queries and keys.
    cfg.MOCO.DIM = 128
    # Which of the paper's three mechanisms (Fig. 2): momentum_queue (MoCo), end_to_end or
    # memory_bank; or moco_v3 (arXiv 2104.02057).
    cfg.MOCO.MECHANISM = "momentum_queue"
    # Size K of the dictionary. momentum_queue: length of the queue, which holds at least one step's
    # keys; a batch need not divide it. memory_bank: negatives per step. end_to_end and
    # moco_v3: has to be SOLVER.BATCH_SIZE.
    cfg.MOCO.K = 65536
    # momentum_queue: momentum m of the key encoder, 0 <= m < 1 (eq. 2). moco_v3: at the start; it
    # rises to 1 by half a cosine.
    cfg.MOCO.M = 0.999
    # memory_bank: momentum of an entry, 0 <= momentum < 1 (InstDisc, arXiv 1805.01978).
    cfg.MOCO.BANK_MOMENTUM = 0.5
    # end_to_end: the key encoder is the query encoder. False: two networks, each with its gradient.
    cfg.MOCO.SHARED_ENCODER = True
    # info_nce (eq. 1) or, for memory_bank, nce (InstDisc's).
    cfg.MOCO.LOSS = "info_nce"
    # Each view is query once and key once, and the two losses are added (the official CIFAR
    # notebook's option, and how moco_v3 is published); a queue then takes 2 N keys per step. Not
    # for memory_bank.
    cfg.MOCO.SYMMETRIC = False
    # Temperature, > 0 (eq. 1).
    cfg.MOCO.T = 0.07
    # A two-layer head instead of a linear one (MoCo v2); moco_v3 has heads of its own.
    cfg.MOCO.MLP = False
    # moco_v3: hidden width of the projection head and the prediction head.
    cfg.MOCO.MLP_DIM = 4096
    # Batch normalization sees the batch of all processes in this many groups, as the paper's 8 GPUs
    # do, whatever the number of processes; a multiple of that number, and divides the batch. 1 is
    # BN of the whole batch, synchronized between the processes: moco_v3 has to have it, and the
    # paper's mechanisms cheat with it (sec. 3.3).
    cfg.MOCO.BN_SPLITS = 8
    # Shuffle the keys between the groups (sec. 3.3, Shuffling BN); False is the ablation of the
    # appendix. memory_bank and moco_v3 do not need it.
    cfg.MOCO.SHUFFLE_BN = True
    # With several processes: index (each loads the key views that it encodes; no image moves and
    # each is decoded twice) or all_to_all (views move between processes as 8-bit pixels). The same
    # results.
    cfg.MOCO.SHUFFLE_BY = "index"

    # Parts into which each process cuts its share of the batch to save memory: the same gradients
    # and dictionary; BN's running statistics, which are for evaluation, move once per part. A
    # divisor of the process's BN groups; not for end_to_end and moco_v3, nor for nce.
    cfg.SOLVER.ACCUMULATE = 1
    # Length of the run in steps instead of MAX_EPOCHS; 0: MAX_EPOCHS.
    cfg.SOLVER.MAX_ITERS = 0

    cfg.KNN = CfgNode()
    # Classify DATA.KNN_ROOT every this many epochs; 0 = only at the end.
    cfg.KNN.EVERY_EPOCHS = 0
    # Neighbors and temperature of their votes (InstDisc, arXiv 1805.01978, sec. 3.4).
    cfg.KNN.K = 200
    cfg.KNN.T = 0.1
    # torchvision's Resize(RESIZE_PX) and CenterCrop(CROP_PX). 0 means
    # AUG.CROP_PX for the crop, and 256/224 of the crop for the resizing.
    cfg.KNN.RESIZE_PX = 0
    cfg.KNN.CROP_PX = 0
    return cfg


def load_pretrain_cfg(config_file: PathLike | None, opts: Sequence[str]) -> CfgNode:
    """Defaults, then the YAML file, then `KEY VALUE` pairs; checked (UserError) and frozen."""
    cfg = load_cfg(default_cfg(), config_file, opts)
    check_choice(cfg, "AUG.KIND", tuple(AUGS))
    if cfg.AUG.KIND != "v1":
        cfg = load_cfg(default_cfg(cfg.AUG.KIND), config_file, opts)
    common_config.check_common(cfg)
    check_choice(cfg, "MODEL.ARCH", (*ARCHS, *VITS))
    check_choice(cfg, "MODEL.STEM", STEMS)
    spec_of(cfg.MODEL.ARCH, cfg.MODEL.STEM, cfg.MODEL.WIDTH, cfg.AUG.CROP_PX)
    if cfg.MODEL.FREEZE_PATCH_EMBED and cfg.MODEL.ARCH not in VITS:
        raise UserError(
            f"MODEL.FREEZE_PATCH_EMBED: {cfg.MODEL.ARCH} has no patches; set it to False"
        )
    lookup(MECHANISMS, cfg.MOCO.MECHANISM, "MOCO.MECHANISM")
    check_choice(cfg, "MOCO.LOSS", ("info_nce", "nce"))
    check_choice(cfg, "MOCO.SHUFFLE_BY", ("index", "all_to_all"))
    check_choice(cfg, "DATA.BAD_IMAGES", ("fail", "skip"))
    common_config.check_lowest(cfg, LOWEST)
    strengths = ("BRIGHTNESS", "CONTRAST", "SATURATION")
    for key in ("JITTER_PROB", "GRAY_PROB", "BLUR_PROB", "SOLARIZE_PROB", *strengths):
        check_range(cfg, f"AUG.{key}", low=0, high=1)
    for key in ("AUG.BLUR_PROB_2", "AUG.SOLARIZE_PROB_2"):
        if get(cfg, key) != -1:
            check_range(cfg, key, low=0, high=1)
    check_range(cfg, "AUG.HUE", low=0, high=0.5)
    check_range(cfg, "DATA.MAX_BAD_FRACTION", low=0, high=1)
    check_interval(cfg, "AUG.BLUR_SIGMA_PX")
    for key in ("AUG.MEAN", "AUG.STD"):
        check_numbers(cfg, key, 3)
    for key in ("MOCO.T", "KNN.T"):
        if not 0 < get(cfg, key) < math.inf:
            raise UserError(f"{key}: got {get(cfg, key)}, expected a temperature > 0, finite")
    for key in ("MOCO.M", "MOCO.BANK_MOMENTUM"):
        common_config.check_momentum(cfg, key)
    _check_mechanism(cfg)
    N, G = cfg.SOLVER.BATCH_SIZE, cfg.MOCO.BN_SPLITS
    if N % G or N // G < 2:
        largest = max(d for d in range(1, min(G, N // 2) + 1) if N % d == 0)
        raise UserError(
            f"MOCO.BN_SPLITS: {G} groups of SOLVER.BATCH_SIZE {N}, expected a divisor with 2 or "
            f"more images a group; the next smaller one is {largest}"
        )
    check_milestones(cfg, None if cfg.SOLVER.MAX_ITERS else cfg.SOLVER.MAX_EPOCHS)
    return cfg


def scale_to_batch(cfg: CfgNode) -> tuple[CfgNode, list[str]]:
    """The keys under SOLVER for the batch of the run by linear scaling (sec. 4.1).

    Returns:
        The keys; notes: what was scaled, and what is not equivalent to the reference for all that.
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
    """The batch and its BN groups can be divided among the processes, else UserError."""
    common_config.check_processes(cfg, world_size)
    G, parts = cfg.MOCO.BN_SPLITS, cfg.SOLVER.ACCUMULATE
    if G % (world_size * parts) and (G, parts) != (1, 1):
        raise UserError(
            f"MOCO.BN_SPLITS: got {G}, expected a multiple of {world_size * parts}: "
            f"{plural(world_size, 'process')} x {plural(parts, 'part')} (SOLVER.ACCUMULATE), each "
            "normalizes its own images"
        )


def _check_mechanism(cfg: CfgNode) -> None:
    """Keys that a mechanism needs otherwise, or has no use for."""
    moco, N = cfg.MOCO, cfg.SOLVER.BATCH_SIZE
    if moco.MECHANISM == "momentum_queue":
        keys_per_step = 2 * N if moco.SYMMETRIC else N
        if moco.K < keys_per_step:
            per_step = "2 x SOLVER.BATCH_SIZE" if moco.SYMMETRIC else "SOLVER.BATCH_SIZE"
            raise UserError(
                f"MOCO.K: got {moco.K}, expected at least {per_step} ({keys_per_step}): "
                "the queue holds whole batches"
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
