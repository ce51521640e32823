"""State of a process's random streams, in a form that a checkpoint can hold."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

State = Mapping[str, Any]


def seed_all(seed: int) -> None:
    """Seed all random streams of this process, as Detectron2's `seed_all_rng`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> State:
    """Return the state of all random streams, on GPU that of the current device."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "python": random.getstate(),
    }


def restore_random(state: State) -> None:
    """Restore all random streams to a state that `random_state` returned."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


@contextmanager
def private_random() -> Iterator[None]:
    """Restore all random streams at the end, so that sampling inside does not advance them."""
    before = random_state()
    try:
        yield
    finally:
        restore_random(before)
