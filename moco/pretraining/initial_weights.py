"""Weights that a pre-training starts from instead of random ones (MODEL.WEIGHTS).

convert/initial_weights.py reads the file; here they get into a mechanism.
"""

import dataclasses
from typing import Any

from moco.common.command import RANDOM
from moco.engine.weights import InitialWeights
from moco.modeling.encoder import COUNTER, HEAD
from moco.modeling.mechanisms.base import Mechanism

QUERY, KEY, QUEUE = "encoder_q.", "encoder_k.", {"queue", "queue_ptr"}


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
    """
    assert weights.state is not None
    state = model.state_dict()
    given = {**weights.beside, **{QUERY + name: x for name, x in weights.state.items()}}
    names = {name for name in state if not name.endswith(COUNTER)}
    query, key = ({name for name in names if name.startswith(start)} for start in (QUERY, KEY))
    head = {name for name in query if name.startswith(QUERY + HEAD)}

    def fits(wanted: set[str]) -> bool:
        shapes = {name: given[name].shape for name in wanted & given.keys()}
        return bool(wanted) and shapes == {name: state[name].shape for name in wanted}

    has_head = fits(head) and not any(n.startswith(QUERY + HEAD) for n in given.keys() - head)
    has_key = model.has_key_encoder and has_head and fits(key)
    has_queue = has_key and fits(QUEUE & names)
    parts = ((has_head, head), (has_key, key), (has_queue, QUEUE))
    taken = (query - head).union(*(part for has, part in parts if has))
    loaded = {name: given[name] for name in taken}
    missing = [] if has_head else ["the head"]
    if "queue" in state and not has_queue:
        missing.append("the queue")
    if model.has_key_encoder and not has_key:
        missing.append("the key encoder (a copy of the query encoder)")
        for name, own in {**state, **loaded}.items():
            if name.startswith(QUERY):
                loaded[KEY + name.removeprefix(QUERY)] = own.clone()
    model.load_state_dict(loaded, strict=False)
    notes = list(weights.notes)
    if missing:
        notes.append(f"MODEL.WEIGHTS: not from the file: {', '.join(missing)}")
    pixels = zip((*weights.mean, *weights.std), (*mean, *std), strict=True)
    if any(abs(theirs - ours) > 1e-3 for theirs, ours in pixels):
        notes.append(
            f"MODEL.WEIGHTS: its network saw pixels of mean {weights.mean} and std {weights.std}, "
            "this run normalizes by AUG.MEAN and AUG.STD"
        )
    coverage = {"loaded": len(loaded), "left_at_init": sorted(names - loaded.keys())}
    return Start(weights.init, weights.sha256, weights.source, coverage, notes)
