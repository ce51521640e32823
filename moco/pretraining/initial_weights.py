"""Weights that a pre-training starts from instead of random ones (MODEL.WEIGHTS).

convert/initial_weights.py reads the file; here they get into a mechanism.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moco.common.errors import DataError, UserError
from moco.modeling.mechanisms.base import Mechanism

QUERY, KEY, HEAD = "encoder_q.", "encoder_k.", "fc."
QUEUE = ("queue", "queue_ptr")
COUNTER = ".num_batches_tracked"  # only a BN with momentum None reads it


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """What a file holds.

    Attributes:
        path: of the file.
        network: for people, e.g. `ResNet-50`.
        tensors: by a mechanism's names: the backbone of `encoder_q` as a whole; heads,
            `encoder_k` and `queue` as far as the file has them.
        mean, std: what the network's pixels of 0..1 were normalized by, RGB.
        init: name in a table.
        sha256: of the file. source: of which layout it is.
        notes: what a reader of the result has to know.
    """

    path: Path
    network: str
    tensors: dict[str, Tensor]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    init: str
    sha256: str
    source: str
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run started, for its record and its checkpoints; the fields are the record's."""

    init: str = "random"
    weights_sha256: str | None = None
    weights_source: str | None = None
    coverage: dict[str, Any] | None = None
    notes: list[str] = dataclasses.field(default_factory=list)


def load_weights(
    model: Mechanism, weights: InitialWeights, mean: tuple[float, ...], std: tuple[float, ...]
) -> Start:
    """Put a file's weights into a mechanism that has just been built.

    The head is taken if it has the run's shape, the key encoder if the head was, the queue if the
    key encoder was: a queue of keys means something beside its own encoder only. Without its own
    weights the key encoder starts as a copy of the query encoder.

    Args:
        mean, std: AUG.MEAN and AUG.STD.

    Raises:
        UserError: the file's backbone is not the run's.
    """
    state, given = model.state_dict(), weights.tensors
    backbone = {n for n in state if n.startswith(QUERY) and not n.startswith(QUERY + HEAD)}
    backbone = {name for name in backbone if not name.endswith(COUNTER)}
    theirs = {n for n in given if n.startswith(QUERY) and not n.startswith(QUERY + HEAD)}
    wrong = backbone ^ theirs
    wrong |= {n for n in backbone & theirs if state[n].shape != given[n].shape}
    if wrong:
        raise UserError(
            f"MODEL.WEIGHTS {weights.path}: a {weights.network}, not the network of MODEL.ARCH, "
            f"STEM and WIDTH ({len(wrong)} tensors differ, e.g. {min(wrong)}); set them to match"
        )

    def fits(names: set[str]) -> bool:
        return bool(names) and all(n in given and given[n].shape == state[n].shape for n in names)

    head = {name for name in state if name.startswith(QUERY + HEAD)}
    taken, notes, missing = set(backbone), list(weights.notes), []
    has_head = fits(head) and not any(n.startswith(QUERY + HEAD) for n in given.keys() - head)
    taken |= head if has_head else set()
    if not has_head:
        missing.append("the head")
    has_key = False
    if model.has_key_encoder:
        key = {name for name in state if name.startswith(KEY) and not name.endswith(COUNTER)}
        has_key = has_head and fits(key)
        taken |= key if has_key else set()
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
    anew = sorted(n for n in state.keys() - loaded.keys() if not n.endswith(COUNTER))
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
