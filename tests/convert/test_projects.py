"""Every project of convert/projects.py in a generated file: every value has a place.

What each network is and needs is in tests/golden/convert_verdicts.yaml.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.contract import Given
from convert.projects import PROJECTS
from convert.read import read_file
from convert.translate import Recognized, recognize
from moco.common.errors import DataError, UserError
from tests.convert.layout_checks import MAKERS, made
from tests.oracles import layouts_fair, layouts_frameworks

NO_PIXELS = "meta's configuration names no mean and std: ImageNet's are assumed"
FILES = pytest.mark.parametrize("name", MAKERS)


def write(name: str, save: Callable[..., Path]) -> Path:
    with layouts_fair.pickles_as_main(), layouts_frameworks.pickles_as_mmengine():
        return save(made(name).checkpoint)


def holder(checkpoint: Any, found: Recognized) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of a file, and the copy's dict that the network is in, to be changed."""
    checkpoint = state = copy.copy(checkpoint)
    for key in found.keys:
        state[key] = copy.copy(state[key])
        state = state[key]
    return checkpoint, state


@FILES
def test_what_is_beside_its_networks_is_known(name: str, save: Callable[..., Path]) -> None:
    raw = read_file(write(name, save))
    found = recognize(raw, "a.file")
    assert "ignored" not in found.dropped
    (note,) = {row.note for row in PROJECTS if row.name == found.contract.source} - {""} or [""]
    expected = {note, NO_PIXELS if "meta" in raw and not note else ""} - {""}
    assert {*found.notes} <= expected and note in (*found.notes, "")
    networks = made(name).networks
    for choice in networks:
        found = recognize(raw, "a.file", Given(encoder=choice))
        assert {f"{other} encoder" for other in networks.keys() - {choice}} <= found.dropped.keys()


@pytest.mark.parametrize("name", ["moco-v3", "simsiam"])
def test_unknown_encoder(name: str) -> None:
    with pytest.raises(UserError, match="--encoder rabbit"):
        recognize(made(name).checkpoint, "a.file", Given(encoder="rabbit"))


@FILES
def test_leftover_keys_are_named(name: str) -> None:
    """Keys beside the backbone are listed as ignored; one under its names is refused by name."""
    before = recognize(made(name).checkpoint, "a.file")
    checkpoint, state = holder(made(name).checkpoint, before)
    beside = {key: torch.ones(1) for key in ("surprise.weight", "module.surprise")}
    state.update(beside)
    found = recognize(checkpoint, "a.file")
    assert found.dropped == before.dropped | {"ignored": 2}
    assert found.state.keys() == before.state.keys()
    (note,) = (note for note in found.notes if note not in before.notes)
    assert all(repr(key) in note for key in beside)
    inside = before.named("layer4.0.conv1.weight") + ".gate"
    state[inside] = torch.ones(1)
    with pytest.raises(DataError) as error:
        recognize(checkpoint, "a.file")
    assert repr(inside) in str(error.value)


@FILES
def test_tensors_beside_it_are_named(name: str) -> None:
    """What is beside the state dict is listed as ignored, unless it holds convolutions."""
    checkpoint = made(name).checkpoint
    before = recognize(checkpoint, "a.file")
    found = recognize(checkpoint | {"surprise": {"weight": torch.ones(1)}}, "a.file")
    assert found.dropped == before.dropped | {"ignored": 1}
    assert any("'surprise'" in note for note in found.notes)
    with pytest.raises(DataError, match=r"'surprise'.* ambiguous .*--encoder with one of") as error:
        recognize(checkpoint | {"surprise": {"weight": torch.ones(1, 1, 3, 3)}}, "a.file")
    assert str(error.value).endswith(f" {', '.join(before.encoders)}")
