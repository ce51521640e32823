"""What is asked of every layout, whoever's it is."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from convert.families import resnet
from convert.sources import Given, Recognized, recognize
from moco.common.errors import DataError, UserError


def assert_is(found: Recognized, network: nn.Module, tensors: int) -> None:
    """The backbone is this network's, bit by bit, and has so many tensors."""
    state = {k: v for k, v in network.state_dict().items() if resnet.to_detectron2(k)}
    assert len(state) == tensors
    assert found.state.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(found.state[key], value), key


def check_encoder(source: Any, choice: str, tensors: int) -> None:
    """One choice of --encoder gives that network's very tensors and counts the others."""
    found = recognize(source.checkpoint, "a.file", Given(encoder=choice))
    assert found.contract.encoder == choice
    assert_is(found, source.networks[choice], tensors)
    others = source.networks.keys() - {choice}
    assert {f"{other} encoder" for other in others} <= found.dropped.keys()


def check_unknown_encoder(source: Any) -> None:
    """A choice that the file does not have is an error that names it."""
    with pytest.raises(UserError, match="--encoder rabbit"):
        recognize(source.checkpoint, "a.file", Given(encoder="rabbit"))


def check_leftovers(checkpoint: Any, path: tuple[str, ...]) -> None:
    """Keys beside the backbone are listed as ignored; one under its names is refused by name.

    `path`: keys to the default network's state dict.
    """
    checkpoint = state = copy.copy(checkpoint)
    for part in path:
        state[part] = copy.copy(state[part])
        state = state[part]
    before = recognize(checkpoint, "a.file")
    beside = {key: torch.ones(1) for key in ("surprise.weight", "module.surprise")}
    state.update(beside)
    found = recognize(checkpoint, "a.file")
    assert found.dropped == before.dropped | {"ignored": 2}
    assert found.state.keys() == before.state.keys()
    (note,) = (note for note in found.notes if note not in before.notes)
    assert all(repr(key) in note for key in beside)
    inside = before.named("layer4.0.conv1.weight") + ".gate"
    state[inside] = torch.ones(1)
    with pytest.raises(DataError, match="1 keys that neither") as error:
        recognize(checkpoint, "a.file")
    assert repr(inside) in str(error.value)


def check_beside(checkpoint: Any) -> None:
    """What is beside the state dict is listed as ignored, unless it holds convolutions."""
    before = recognize(checkpoint, "a.file")
    found = recognize(checkpoint | {"surprise": {"weight": torch.ones(1)}}, "a.file")
    assert found.dropped == before.dropped | {"ignored": 1}
    assert any("'surprise'" in note for note in found.notes)
    with pytest.raises(DataError, match=r"'surprise'.* ambiguous .*--encoder with one of") as error:
        recognize(checkpoint | {"surprise": {"weight": torch.ones(1, 1, 3, 3)}}, "a.file")
    assert str(error.value).endswith(f" {', '.join(before.encoders)}")
