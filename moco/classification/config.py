"""Every key of the two classification protocols, with its unit and range, and the checks.

A protocol (moco/linear.py, moco/finetune.py) has defaults of its own for some of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from moco.common.cfgcheck import check_milestones
from moco.common.cfgnode import load_cfg
from moco.common.errors import DataError, shown
from moco.common.files import PathLike
from moco.engine import config as common_config

if TYPE_CHECKING:
    from moco.modeling.archs import Spec

CROP_PX = 224  # of weights that do not tell the crop of their training
MAX_CROP_PX = 4096
# As common_config.PLACES_AND_SPEED.
PLACES_AND_SPEED = (*common_config.PLACES_AND_SPEED, "EVAL.EVERY_EPOCHS")
# What the hash of the protocol leaves out: these, the seed, and what comes with the weights.
NOT_PROTOCOL = ("SEED", "AUG.MEAN", "AUG.STD", *PLACES_AND_SPEED)


@dataclass(frozen=True)
class Protocol:
    """One way to measure features by a classifier."""

    kind: str  # of the run record, and the first part of its metrics' names
    frozen: bool  # only the classifier is trained, and nothing else may change
    head_std: float | None  # of its initial weights, the bias being 0; None: torch's initialization
    defaults: Mapping[str, Any]  # values of keys, by dotted name
    description: str  # for `--help`


def default_cfg(protocol: Mapping[str, Any]) -> CfgNode:
    """All keys; `protocol` holds those of its defaults that are not common, by dotted name."""
    cfg = common_config.common_cfg()
    # Name of the table's task in run.json; the network's name is appended.
    cfg.TASK = ""
    # A folder with train/<class>/* and val/<class>/*, iNaturalist 2018's or CIFAR-10's own files.
    cfg.DATA.ROOT = ""

    # Training: a random crop and a flip. The paper is silent; these are torchvision's
    # RandomResizedCrop(224) and RandomHorizontalFlip(), as in main_lincls.py.
    cfg.AUG.CROP_SCALE = (0.08, 1.0)
    # 0: the side that this project's pre-training of the weights had, else 224.
    cfg.AUG.CROP_PX = 0
    # (): the weights' own where the checkpoint tells them, else ImageNet's.
    cfg.AUG.MEAN = ()
    cfg.AUG.STD = ()

    cfg.EVAL = CfgNode()
    # "1-crop" (sec. 4.1): torchvision's Resize(RESIZE_PX) and CenterCrop(CROP_PX). 0 means
    # AUG.CROP_PX for the crop, and 256/224 of the crop for the resizing.
    cfg.EVAL.RESIZE_PX = 0
    cfg.EVAL.CROP_PX = 0
    # After every this many epochs, >= 0, and always at the end; the last one is the result.
    cfg.EVAL.EVERY_EPOCHS = 1

    # "" and 0: as the checkpoint has it; with random weights ARCH must be set, and the others mean
    # imagenet and 1.
    cfg.MODEL.ARCH = ""
    cfg.MODEL.STEM = ""
    cfg.MODEL.WIDTH = 0.0

    # BASE_LR is for pre-trained weights, RANDOM_LR for a network that starts from random ones (0:
    # the same), so that one recipe has the paper's two learning rates.
    cfg.SOLVER.BASE_LR = 0.1
    cfg.SOLVER.RANDOM_LR = 0.0

    # The paper's: accuracies are compared with those that others measured in fp32.
    cfg.SOLVER.PRECISION = "fp32"
    cfg.SOLVER.CHANNELS_LAST = False

    cfg.SOLVER.MAX_EPOCHS = 100
    cfg.SOLVER.MILESTONES_EPOCHS = ()
    cfg.merge_from_list([word for pair in protocol.items() for word in pair])
    return cfg


def load_classify_cfg(
    protocol: Mapping[str, Any], config_file: PathLike | None, opts: Sequence[str]
) -> CfgNode:
    """A protocol's defaults, the YAML file, `KEY VALUE` pairs; checked (UserError) and frozen."""
    cfg = load_cfg(default_cfg(protocol), config_file, opts)
    common_config.check_common(cfg)
    at_least_0 = "SOLVER.RANDOM_LR MODEL.WIDTH EVAL.EVERY_EPOCHS EVAL.RESIZE_PX EVAL.CROP_PX"
    common_config.check_lowest(cfg, {0: at_least_0})
    if cfg.AUG.CROP_PX != 0:
        common_config.check_lowest(cfg, {8: "AUG.CROP_PX"})
    check_milestones(cfg, cfg.SOLVER.MAX_EPOCHS)
    return cfg


def with_weights(
    cfg: CfgNode,
    spec: "Spec",
    mean: Sequence[float],
    std: Sequence[float],
    pretraining: Mapping[str, Any],
) -> CfgNode:
    """Fill in the keys that were left to the weights: network, side of the crop, mean and std.

    Args:
        pretraining: configuration of the run that made the weights; empty where it is not known.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.update(spec.model_keys())
    if not cfg.AUG.CROP_PX:
        recorded = pretraining.get("AUG.CROP_PX", CROP_PX)
        if type(recorded) is not int or not 8 <= recorded <= MAX_CROP_PX:
            raise DataError(f"MODEL.WEIGHTS: their config has AUG.CROP_PX {shown(recorded)}")
        cfg.AUG.CROP_PX = recorded
    cfg.AUG.MEAN = tuple(cfg.AUG.MEAN) or tuple(mean)
    cfg.AUG.STD = tuple(cfg.AUG.STD) or tuple(std)
    cfg.freeze()
    return cfg


def scale_to_batch(cfg: CfgNode, random: bool) -> CfgNode:
    """Return the keys under SOLVER for the batch of the run (linear scaling).

    Learning rates are multiplied by the ratio of the batches, durations in steps divided by it.

    Args:
        random: the network starts from random weights, so that RANDOM_LR is its rate if it is set.
    """
    solver = cfg.SOLVER.clone()
    base = float((random and solver.RANDOM_LR) or solver.BASE_LR)
    solver.defrost()
    factor = solver.BATCH_SIZE / (solver.REFERENCE_BATCH_SIZE or solver.BATCH_SIZE)
    solver.BASE_LR = base * factor
    solver.WARMUP_ITERS = round(solver.WARMUP_ITERS / factor)
    solver.DECAY_EVERY_ITERS = max(1, round(solver.DECAY_EVERY_ITERS / factor))
    solver.freeze()
    return solver
