"""Configuration of linear classification and fine-tuning (keys: moco/engine/keys.py).

Each protocol (moco/linear.py, moco/finetune.py) overrides some of the defaults.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from moco.common.cfgnode import load_cfg
from moco.common.errors import DataError, format_value
from moco.common.files import PathLike
from moco.engine import config as common_config
from moco.engine.keys import CLASSIFICATION

if TYPE_CHECKING:
    from moco.modeling.archs import Spec

CROP_PX = 224  # for weights that do not record the crop size of their training
MAX_CROP_PX = 4096
# Defaults of both protocols that differ from those of pre-training.
_DEFAULTS: dict[str, Any] = {
    # The paper gives no range; main_lincls.py uses torchvision's RandomResizedCrop(224).
    "AUG.CROP_SCALE": (0.08, 1.0),
    "SOLVER.BASE_LR": 0.1,
    # Published accuracies, which results are compared with, were measured in fp32.
    "SOLVER.PRECISION": "fp32",
    "SOLVER.CHANNELS_LAST": False,
    "SOLVER.MAX_EPOCHS": 100,
    "SOLVER.MILESTONES_EPOCHS": (),
}


@dataclass(frozen=True)
class Protocol:
    """Protocol that measures features by training a classifier.

    Attributes:
        kind: Kind of the run record and prefix of the names of metrics.
        frozen: Train only the classifier and check that nothing else changes.
        head_std: Standard deviation of the classifier's initial weights, with bias 0; None for
            torch's initialization.
        defaults: Default values of keys by dotted name.
        description: Description in `--help`.
    """

    kind: str
    frozen: bool
    head_std: float | None
    defaults: Mapping[str, Any]
    description: str


def default_cfg(protocol: Mapping[str, Any]) -> CfgNode:
    """Return the default configuration of a protocol (`Protocol.defaults`)."""
    cfg = common_config.default_cfg(CLASSIFICATION)
    overrides = {**_DEFAULTS, **protocol}
    cfg.merge_from_list([item for pair in overrides.items() for item in pair])
    return cfg


def load_classify_cfg(
    protocol: Mapping[str, Any], config_file: PathLike | None, opts: Sequence[str]
) -> CfgNode:
    """Merge a protocol's defaults, YAML file and `KEY VALUE` pairs; check and freeze the result.

    Raises:
        UserError: If a key is unknown or a value is invalid.
    """
    cfg = load_cfg(default_cfg(protocol), config_file, opts)
    common_config.check_values(cfg, CLASSIFICATION)
    common_config.check_milestones(cfg, cfg.SOLVER.MAX_EPOCHS)
    return cfg


def with_weights(
    cfg: CfgNode,
    spec: "Spec",
    mean: Sequence[float],
    std: Sequence[float],
    pretraining: Mapping[str, Any],
) -> CfgNode:
    """Fill in the keys that depend on the weights: network, crop size, mean and std.

    Args:
        cfg: Configuration of the run.
        spec: Specification of the network.
        mean: Mean of each channel that the weights were trained with.
        std: Standard deviation of each channel that the weights were trained with.
        pretraining: Configuration of the run that produced the weights; empty if unknown.

    Raises:
        DataError: If the recorded crop size is invalid.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.update(spec.model_keys())
    if not cfg.AUG.CROP_PX:
        recorded = pretraining.get("AUG.CROP_PX", CROP_PX)
        if type(recorded) is not int or not 8 <= recorded <= MAX_CROP_PX:
            raise DataError(
                f"MODEL.WEIGHTS: AUG.CROP_PX in the recorded config: got {format_value(recorded)}, "
                f"expected an integer in 8..{MAX_CROP_PX}"
            )
        cfg.AUG.CROP_PX = recorded
    cfg.AUG.MEAN = tuple(cfg.AUG.MEAN) or tuple(mean)
    cfg.AUG.STD = tuple(cfg.AUG.STD) or tuple(std)
    cfg.freeze()
    return cfg


def scale_to_batch(cfg: CfgNode, random: bool) -> CfgNode:
    """Scale the keys under SOLVER linearly to the batch size of the run.

    Learning rates are multiplied by the ratio of the batch sizes, and durations in steps are
    divided by it.

    Args:
        cfg: Configuration of the run.
        random: Use RANDOM_LR, if it is set, because the network is randomly initialized.
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
