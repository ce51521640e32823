"""What is asked of every layout, whoever's it is."""

from typing import Any

import pytest
import torch
from torch import nn

from convert import keymap
from convert.sources import Given, Recognised, recognise
from moco.errors import UserError


def assert_is(found: Recognised, network: nn.Module, tensors: int) -> None:
    """The trunk is this network's, bit by bit, and has so many tensors."""
    state = {k: v for k, v in network.state_dict().items() if keymap.to_detectron2(k)}
    assert len(state) == tensors
    assert found.state.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(found.state[key], value), key


def check_encoder(source: Any, choice: str, tensors: int) -> None:
    """One choice of --encoder gives that network's very tensors and counts the others."""
    found = recognise(source.checkpoint, "a.file", Given(encoder=choice))
    assert found.encoder == choice
    assert_is(found, source.networks[choice], tensors)
    others = source.networks.keys() - {choice}
    assert {f"{other} encoder" for other in others} <= found.dropped.keys()


def check_unknown_encoder(source: Any) -> None:
    """A choice that the file does not have is an error that names it."""
    with pytest.raises(UserError, match="--encoder rabbit"):
        recognise(source.checkpoint, "a.file", Given(encoder="rabbit"))
