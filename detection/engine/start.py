"""Digests of the start of a training: frozen tensors and the first batch.

Both engines write them to OUTPUT_DIR at the first iteration, and the run record copies them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from detection.config.trained import read_start
from moco.common.files import atomic_write_json, sha256_state
from moco.common.run import DIGITS, START_NAME

_STRIDE_PX = 8


def write_start(folder: Path, model: nn.Module, batch: Sequence[Mapping[str, Any]]) -> None:
    """Add `frozen` and the digest of the first batch to `start.json`, before the first step.

    Args:
        folder: OUTPUT_DIR.
        model: Model with its initial weights.
        batch: Samples with `image` (C, H, W) uint8 and `image_id`.
    """
    # A list, as earlier records have the digests of eight batches.
    content = {**(read_start(folder) or {}), "batches": [batch_digest(batch)]}
    if frozen := frozen_digest(model):
        content["frozen"] = frozen
    atomic_write_json(folder / START_NAME, content)


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
