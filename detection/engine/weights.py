"""Weights into a detector, and proof of what it then holds.

Names (the same in both engines) are matched whole: where a converted tensor goes is said by the
`BackboneType` of MODEL.BACKBONE.NAME, e.g. `stem.…` to `backbone.stem.…`, and the `res5.…` of a C4
detector to `roi_heads.res5.…`, because there it is the box head.
"""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from convert.families.base import family_named
from convert.read import read_file
from detection.modeling.backbones.base import BackboneType
from moco.common.errors import DataError, UserError, first_few
from moco.common.files import PathLike, named_objects
from moco.common.unpickler import Inert

logger = logging.getLogger(__name__)

UNTRACKED = "num_batches_tracked"


@dataclass(frozen=True)
class Coverage:
    """What a detector's tensors hold after loading.

    Attributes:
        loaded: number of tensors equal to the file's.
        left_at_init: names of the tensors that start from scratch (RPN, extra norm, predictors).
    """

    loaded: int
    left_at_init: tuple[str, ...]


@dataclass(frozen=True)
class EngineResult:
    """What an engine hands back.

    Attributes:
        metrics: canonical name (detection/evaluation/metrics.py) → value, AP in 0..100; may be NaN.
        iterations: number of the last iteration trained (`SOLVER.MAX_ITER`), 0 for evaluation.
        seconds: wall time of training and evaluation.
        coverage: None for random weights and for evaluation only.
        frozen: after training, see `detection.engine.start.frozen_digest`.
    """

    metrics: dict[str, float]
    iterations: int
    seconds: float
    coverage: Coverage | None
    frozen: dict[str, Any] | None = None


def read_trained(path: PathLike) -> dict[str, Tensor]:
    """Tensors of a trained detector, `model_final.pth` of either engine, or another format.

    Raises:
        DataError: unreadable, or not a mapping of names to tensors.
    """
    raw = read_file(path)
    model = raw.get("model", raw) if isinstance(raw, Mapping) else None
    if not isinstance(model, Mapping) or not model:
        raise DataError(f"{path}: not a trained detector; expected a mapping with key 'model'")
    if objects := [value.name for value in model.values() if isinstance(value, Inert)]:
        raise DataError(
            f"{path}: not a trained detector; it holds objects, made by {named_objects(objects)}"
        )
    try:
        return {str(name): torch.as_tensor(value) for name, value in model.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{path}: not a trained detector ({error})") from error


def load_trained(model: nn.Module, tensors: Mapping[str, Tensor], path: PathLike) -> None:
    """Load a whole trained detector, nothing missing, nothing left over.

    Raises:
        UserError: naming the first tensors that do not fit.
    """
    # Buffers of the image normalization are in models saved by older Detectron2.
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
    """Copy a converted backbone into a detector and check what it then holds.

    `kind`: of the detector's backbone.

    Raises:
        UserError: a tensor of the file has no place or another shape, or a tensor of the backbone
            is not in the file.
    """
    targets = target_names(model.state_dict(), converted, kind)
    _load(model, {targets[key]: value for key, value in converted.items()}, "MODEL.WEIGHTS")
    return check_coverage(model.state_dict(), converted, kind)


def _load(model: nn.Module, tensors: Mapping[str, Tensor], owner: str) -> Any:
    """`load_state_dict`, not strict, with an error for users where shapes differ."""
    try:
        return model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split()[:40])
        raise UserError(f"{owner} does not fit this detector: {reason}") from error


def target_names(
    state: Collection[str], converted: Collection[str], kind: BackboneType
) -> dict[str, str]:
    """Converted key → the detector's name for it.

    Raises:
        UserError: keys without a place.
    """
    targets, without = {}, []
    for key in converted:
        name = next((prefix + key for prefix in kind.prefixes if prefix + key in state), None)
        if name is None:
            without.append(key)
        else:
            targets[key] = name
    if without:
        raise UserError(f"MODEL.WEIGHTS: the detector has no place for {first_few(without)}")
    return targets


def check_coverage(
    state: Mapping[str, Tensor], converted: Mapping[str, Tensor], kind: BackboneType
) -> Coverage:
    """Compare a loaded detector with the file, tensor by tensor.

    Detectron2 only warns about a mismatch, so a bad file would become a random row with a name.

    Raises:
        UserError: a tensor that differs from the file's, or a backbone tensor the file does not
            have.
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
    # What its files could have, and no more: roi_heads.res5.norm is a new BN.
    own = family_named(kind.family).from_detectron2
    random = [
        name
        for name in rest
        if any(name.startswith(p) and own(name.removeprefix(p)) for p in kind.prefixes)
    ]
    if random:
        raise UserError(f"MODEL.WEIGHTS leaves these at random: {first_few(random)}")
    logger.info("%d tensors come from the weights, %d start from scratch", len(targets), len(rest))
    return Coverage(len(targets), tuple(rest))
