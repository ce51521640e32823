"""Digests of the start of a training: newly initialized tensors, frozen tensors, first batches.

Before the first step, two runs with equal digests differ only in their weights. Both engines write
the digests to OUTPUT_DIR during the training, and the run record copies them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from detection.config.trained import read_start
from detection.engine.weights import UNTRACKED, Coverage
from moco.common.files import atomic_write_json, sha256_state
from moco.common.run import DIGITS, FIRST_BATCHES, START_NAME

_STRIDE_PX = 8


class StartFile:
    """Writer of `OUTPUT_DIR/start.json`: adds `head`, `frozen` and, batch by batch, `batches`.

    Args:
        folder: OUTPUT_DIR; None on all processes but the main one.
        head: Result of `head_digests`.
        frozen: Result of `frozen_digest`.
        done: Number of iterations done. A resumed training continues the file; if that lacks
            batches, nothing is written, because they cannot be added any more.
    """

    def __init__(
        self,
        folder: Path | None,
        head: Mapping[str, str],
        frozen: Mapping[str, Any] | None = None,
        done: int = 0,
    ) -> None:
        self._path = folder / START_NAME if folder else None
        before = (read_start(folder) if folder else None) or {}
        self._content: dict[str, Any] = {**before, "head": dict(head), "batches": []}
        if frozen:
            self._content["frozen"] = dict(frozen)
        if done and folder is not None:
            batches = before.get("batches", [])
            if len(batches) < min(done, FIRST_BATCHES):
                self._path = None
            else:
                self._content = {**before, "batches": batches[:done]}

    def add(self, batch: Sequence[Mapping[str, Any]]) -> None:
        """Add the digest of the next batch: samples with `image` (C, H, W) uint8 and `image_id`."""
        if self._path is not None and len(self._content["batches"]) < FIRST_BATCHES:
            self._content["batches"].append(batch_digest(batch))
            atomic_write_json(self._path, self._content)


def head_digests(model: nn.Module, coverage: Coverage | None) -> dict[str, str]:
    """Return the digests by name of the tensors that start from scratch.

    Args:
        model: Model before its first step.
        coverage: Tensors loaded from the weights; None for random weights, where all tensors start
            from scratch.
    """
    state = model.state_dict()
    names = coverage.left_at_init if coverage else [n for n in state if UNTRACKED not in n]
    return {name: sha256_state({name: state[name]})[:DIGITS] for name in names}


def frozen_digest(model: nn.Module) -> dict[str, Any] | None:
    """Return number and digest of the backbone's frozen tensors; None if all are trained.

    Frozen tensors are parameters without gradient, and the buffers of modules without trained
    parameters, which are the statistics of frozen batch norm.
    """
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.partition(".")[0] != "backbone":
            continue
        own = dict(module.named_parameters(prefix=name, recurse=False))
        tensors |= {key: value for key, value in own.items() if not value.requires_grad}
        if not any(value.requires_grad for value in own.values()):
            tensors |= dict(module.named_buffers(prefix=name, recurse=False))
    if not any(
        isinstance(value, nn.Parameter) or "running_" in key for key, value in tensors.items()
    ):
        return None
    return {"tensors": len(tensors), "sha256": sha256_state(tensors)}


def check_frozen(start: dict[str, Any] | None, after: Mapping[str, Any] | None) -> None:
    """Check that training left the frozen tensors unchanged, and add their new digest to `start`.

    Raises:
        RuntimeError: If a frozen tensor has changed.
    """
    if start is None or "frozen" not in start:
        return
    before = start["frozen"]
    if after is None or after != before:
        raise RuntimeError(f"frozen tensors of the backbone have changed: {before}, now {after}")
    start["frozen"] = {**before, "sha256_after": after["sha256"]}


def batch_digest(batch: Sequence[Mapping[str, Any]]) -> str:
    """Return the digest of a batch: image ids in order, image sizes, and every eighth pixel.

    The pixels identify resizing, cropping and flipping. Each is the sum over its channels, because
    the channel order belongs to the weights.
    """
    digest = hashlib.sha256()
    for sample in batch:
        image = sample["image"]
        name = sample.get("image_id", Path(sample["file_name"]).name)
        digest.update(f"{name} {tuple(image.shape)}\n".encode())
        pixels = image[:, ::_STRIDE_PX, ::_STRIDE_PX].long().sum(dim=0)
        digest.update(pixels.numpy().tobytes())
    return digest.hexdigest()[:DIGITS]
