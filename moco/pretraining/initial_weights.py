"""Weights that a pre-training starts from instead of random ones (MODEL.WEIGHTS).

convert/initial_weights.py reads the file; here they get into a mechanism.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moco.common.command import RANDOM
from moco.common.errors import DataError, UserError
from moco.engine.weights import InitialWeights
from moco.modeling.encoder import COUNTER, HEAD
from moco.modeling.mechanisms.base import Mechanism

QUERY, KEY = "encoder_q.", "encoder_k."
QUEUE = ("queue", "queue_ptr")


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run started, for its record and its checkpoints; the fields are the record's."""

    init: str = RANDOM
    weights_sha256: str | None = None
    weights_source: str | None = None
    coverage: dict[str, Any] | None = None
    notes: list[str] = dataclasses.field(default_factory=list)


def load_weights(
    model: Mechanism, weights: InitialWeights, mean: tuple[float, ...], std: tuple[float, ...]
) -> Start:
    """Put a file's weights into a mechanism of the same network that has just been built.

    The head is taken if it has the run's shape, the key encoder if the head was, the queue if the
    key encoder was: a queue of keys means something beside its own encoder only. Without its own
    weights the key encoder starts as a copy of the query encoder.

    Args:
        mean, std: AUG.MEAN and AUG.STD.
    """
    assert weights.state is not None
    state = model.state_dict()
    given = {**weights.beside, **{QUERY + name: x for name, x in weights.state.items()}}
    names = {name for name in state if not name.endswith(COUNTER)}

    def fits(wanted: set[str]) -> bool:
        return bool(wanted) and all(
            name in given and given[name].shape == state[name].shape for name in wanted
        )

    head = {name for name in state if name.startswith(QUERY + HEAD)}
    key = {name for name in names if name.startswith(KEY)}
    taken = {name for name in names if name.startswith(QUERY)} - head
    notes, missing = list(weights.notes), []
    has_head = fits(head) and not any(n.startswith(QUERY + HEAD) for n in given.keys() - head)
    has_key = model.has_key_encoder and has_head and fits(key)
    if has_head:
        taken |= head
    else:
        missing.append("the head")
    if has_key:
        taken |= key
    if has_key and fits(set(QUEUE) & state.keys()):
        taken |= set(QUEUE)
    elif "queue" in state:
        missing.append("the queue")
    loaded = {name: given[name] for name in taken}
    if model.has_key_encoder and not has_key:
        own = {**state, **loaded}
        loaded |= {
            KEY + n.removeprefix(QUERY): own[n].clone() for n in state if n.startswith(QUERY)
        }
        missing.append("the key encoder (a copy of the query encoder)")
    model.load_state_dict(loaded, strict=False)
    if missing:
        notes.append(f"MODEL.WEIGHTS: not from the file: {', '.join(missing)}")
    if any(
        abs(a - b) > 1e-3 for a, b in zip((*weights.mean, *weights.std), (*mean, *std), strict=True)
    ):
        notes.append(
            f"MODEL.WEIGHTS: its network saw pixels of mean {weights.mean} and std {weights.std}, "
            "this run normalizes by AUG.MEAN and AUG.STD"
        )
    anew = sorted(name for name in names if name not in loaded)
    coverage = {"loaded": len(loaded), "left_at_init": anew}
    return Start(weights.init, weights.sha256, weights.source, coverage, notes)


def resumed_start(path: Path, state: Mapping[str, Any], weights: InitialWeights | None) -> Start:
    """What a checkpoint says of its run's start.

    Raises:
        UserError: its run started from other weights. DataError: damaged.
    """
    try:
        start = Start(**state.get("start", {}))
    except TypeError as error:
        raise DataError(f"{path}: a malformed 'start'") from error
    mine = weights.sha256 if weights else None
    if start.weights_sha256 != mine:
        raise UserError(
            f"{path}: its run started from weights of sha256 {start.weights_sha256}, and "
            f"MODEL.WEIGHTS is of {mine}; give the same, or set another OUTPUT_DIR"
        )
    return start


def check_queue(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise DataError for values that no training can leave."""
    bad = [n for n, x in tensors.items() if x.is_floating_point() and not bool(x.isfinite().all())]
    if bad:
        raise DataError(f"{path}: not finite: {min(bad)}")
    queue, pointer = tensors.get("queue"), tensors.get("queue_ptr")
    if queue is None or pointer is None:
        return
    inside = queue.dim() == 2 and pointer.numel() == 1 and pointer.dtype == torch.long
    if not (inside and 0 <= int(pointer) < queue.shape[1]):
        raise DataError(f"{path}: queue_ptr does not point into the queue")
