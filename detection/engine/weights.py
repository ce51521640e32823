"""Loading of weights into a detector, and the check of its tensors afterwards.

Names, equal in both engines, have to match completely. The `BackboneType` of MODEL.BACKBONE.NAME
defines the target of a converted tensor: `stem.…` goes to `backbone.stem.…`, and the `res5.…` of a
C4 detector to `roi_heads.res5.…`, because it is the box head there.
"""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from convert.families.base import family_named, first_rule
from convert.read import read_file
from detection.modeling.backbones.base import BackboneType
from moco.common.errors import DataError, UserError, first_few
from moco.common.files import PathLike, named_objects
from moco.common.unpickler import OpaqueObject

logger = logging.getLogger(__name__)

UNTRACKED = "num_batches_tracked"


@dataclass(frozen=True)
class Coverage:
    """Origin of a detector's tensors after loading.

    Attributes:
        loaded: Number of tensors equal to the file's.
        left_at_init: Names of the tensors that start from scratch (RPN, extra norm, predictors).
    """

    loaded: int
    left_at_init: tuple[str, ...]


@dataclass(frozen=True)
class EngineResult:
    """Result of a training or an evaluation.

    Attributes:
        metrics: Values by canonical name (detection/evaluation/metrics.py), AP in 0..100; may be
            NaN.
        iterations: Number of iterations trained (`SOLVER.MAX_ITER`), 0 for evaluation only.
        seconds: Wall time of training and evaluation.
        coverage: Tensors loaded from the weights; None for random weights and evaluation only.
        frozen: Digest after training, see `detection.engine.start.frozen_digest`.
    """

    metrics: dict[str, float]
    iterations: int
    seconds: float
    coverage: Coverage | None
    frozen: dict[str, Any] | None = None


def read_trained(path: PathLike) -> dict[str, Tensor]:
    """Read the tensors of a trained detector, such as `model_final.pth` of either engine.

    Raises:
        DataError: If the file is unreadable, or not a mapping of names to tensors.
    """
    raw = read_file(path)
    model = raw.get("model", raw) if isinstance(raw, Mapping) else None
    if not isinstance(model, Mapping) or not model:
        raise DataError(f"{path}: not a trained detector; expected a mapping with key 'model'")
    if objects := [value.name for value in model.values() if isinstance(value, OpaqueObject)]:
        raise DataError(
            f"{path}: not a trained detector; it holds objects, made by {named_objects(objects)}"
        )
    try:
        return {str(name): torch.as_tensor(value) for name, value in model.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{path}: not a trained detector ({error})") from error


def load_trained(model: nn.Module, tensors: Mapping[str, Tensor], path: PathLike) -> None:
    """Load a whole trained detector strictly.

    Raises:
        UserError: If a tensor is missing, unknown or of another shape.
    """
    # Older versions of Detectron2 saved the buffers of the image normalization.
    ignored = re.compile(rf"{UNTRACKED}|^pixel_(mean|std)$")
    found = {name: value for name, value in tensors.items() if not ignored.search(name)}
    missing, unknown = _load(model, found, str(path))
    problems = [f"{name} is missing" for name in missing if UNTRACKED not in name]
    problems += [f"{name} is unknown" for name in unknown]
    if problems:
        raise UserError(f"{path} does not fit this detector: {first_few(problems)}")


def load_converted(
    model: nn.Module, converted: Mapping[str, Tensor], kind: BackboneType
) -> Coverage:
    """Copy a converted backbone into a detector, and check the detector's tensors.

    Args:
        model: Detector.
        converted: Tensors of the converted weights.
        kind: Type of the detector's backbone.

    Raises:
        UserError: If a tensor of the file has no target or another shape, or the file lacks a
            tensor of the backbone.
    """
    targets = target_names(model.state_dict(), converted, kind)
    _load(model, {name: converted[key] for key, name in targets.items()}, "MODEL.WEIGHTS")
    return check_coverage(model.state_dict(), converted, kind)


def _load(model: nn.Module, tensors: Mapping[str, Tensor], owner: str) -> Any:
    """Call a non-strict `load_state_dict`; raise UserError if shapes differ."""
    try:
        return model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split()[:40])
        raise UserError(f"{owner} does not fit this detector: {reason}") from error


def target_names(
    state: Collection[str], converted: Collection[str], kind: BackboneType
) -> dict[str, str]:
    """Return the detector's name for each converted key, except tokens that it leaves out.

    Raises:
        UserError: If the detector lacks another tensor.
    """
    family, targets, unmatched = family_named(kind.family), {}, []
    for key in converted:
        name = next((prefix + key for prefix in kind.prefixes if prefix + key in state), None)
        if name is None:
            if first_rule(key, family.dropped) not in family.tokens:
                unmatched.append(key)
        else:
            targets[key] = name
    if unmatched:
        raise UserError(f"MODEL.WEIGHTS: the detector has no tensors for {first_few(unmatched)}")
    return targets


def check_coverage(
    state: Mapping[str, Tensor], converted: Mapping[str, Tensor], kind: BackboneType
) -> Coverage:
    """Check a loaded detector against the file, tensor by tensor.

    Detectron2 only warns about a mismatch, so that a bad file would be evaluated as random weights
    under its name.

    Raises:
        UserError: If a tensor differs from the file's, or the file lacks a tensor of the backbone.
    """
    targets = target_names(state, converted, kind)
    different = [
        name
        for key, name in targets.items()
        if not torch.equal(state[name].cpu(), converted[key].to(state[name].dtype).cpu())
    ]
    if different:
        raise UserError(f"after loading MODEL.WEIGHTS these tensors differ: {first_few(different)}")
    rest = sorted(
        name for name in state if name not in set(targets.values()) and UNTRACKED not in name
    )
    # Only names that the family's files can contain: roi_heads.res5.norm is a new BN.
    own = family_named(kind.family).from_detectron2
    random = [
        name
        for name in rest
        if any(name.startswith(p) and own(name.removeprefix(p)) for p in kind.prefixes)
    ]
    if random:
        raise UserError(
            f"MODEL.WEIGHTS leaves tensors of the backbone at random: {first_few(random)}"
        )
    logger.info("%d tensors come from the weights, %d start from scratch", len(targets), len(rest))
    return Coverage(len(targets), tuple(rest))
