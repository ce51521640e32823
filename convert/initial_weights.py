"""Any checkpoint that the converter recognizes, as the start of a pre-training (MODEL.WEIGHTS)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from convert.files import is_array, read_file, to_tensor, unwrapped
from convert.sources import Given
from convert.translate import translate
from moco.common.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from moco.pretraining.initial_weights import InitialWeights

# What facebookresearch/moco and this project save beside the query encoder's backbone.
_BESIDE = ("encoder_q.fc.", "encoder_k.", "queue")


def read_initial_weights(path: Path, stem: str) -> InitialWeights:
    """The backbone in a file; with head, key encoder and queue of a MoCo checkpoint.

    Args:
        stem: MODEL.STEM, for a 3x3 stem whose stride is not in the file.

    Raises:
        UserError, DataError: not recognized, damaged, or a network that pre-training cannot have.
    """
    from moco.classification.weights import init_name
    from moco.common.files import sha256_file
    from moco.pretraining.initial_weights import InitialWeights, check_queue

    raw = read_file(path)
    try:
        given = Given(stem=stem if stem != "imagenet" else None)
        found, converted = translate(path, raw, given)
    except UserError as error:
        raise type(error)(str(error).replace("--stem", "MODEL.STEM")) from error
    contract = converted.contract
    unlike = contract.architecture.in_torchvision() or contract.bn_folded
    if contract.pixels.channel_order != "RGB" or unlike:
        raise UserError(
            f"MODEL.WEIGHTS {path}: {contract.source}, {contract.convention()}; pre-training has "
            "RGB pixels, the stride in the 3x3 conv, and batch norm with statistics"
        )
    beside = _beside(raw, str(path))
    check_queue(beside, path)
    backbone = {f"encoder_q.{name}": tensor for name, tensor in found.state.items()}
    return InitialWeights(
        path=path,
        network=str(contract.architecture),
        tensors={**beside, **backbone},
        mean=tuple(round(value / 255, 6) for value in contract.pixels.mean),
        std=tuple(round(value / 255, 6) for value in contract.pixels.std),
        init=init_name(path),
        sha256=sha256_file(path),
        source=contract.source,
        notes=converted.notes,
    )


def _beside(raw: Any, where: str) -> dict[str, Tensor]:
    state = raw.get("state_dict") if isinstance(raw, Mapping) else None
    if not isinstance(state, Mapping):
        return {}
    return {
        name: to_tensor(key, value, where)
        for key, value in state.items()
        if (name := unwrapped(key)).startswith(_BESIDE) and is_array(value)
    }
