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

from convert.contract import Overrides
from convert.projects import PROJECTS
from convert.read import get_nested, read_file
from convert.recognize import Recognition, recognize
from moco.common.errors import DataError, UserError
from tests.oracles import layouts
from tests.oracles.layouts_projects import LAYOUTS, made

NO_PIXELS = "the configuration in meta has no mean and std: assuming ImageNet's"
FILES = pytest.mark.parametrize("name", LAYOUTS)


# Keys that the generator composes, as they are in the projects' files.
KEYS = {
    "simclr v2": "resnet/net.2.blocks.0.net.2.weight resnet/net.1.blocks.0.projection.bn.0.bias",
    "barlowtwins": "model/module.backbone.layer2.0.conv2.weight model/module.bn.running_mean",
    "swav lists of prototypes": "state_dict/module.prototypes.prototypes2.weight",
    "dino": "student/module.head.last_layer.weight_g teacher/module.backbone.bn1.weight",
    "vissl ema": "classy_state_dict/ema_model/model/trunk/_feature_blocks.layer2.0.conv2.weight",
    "vissl dino": "loss/momentum_teacher.module.trunk._feature_blocks.conv1.weight loss/center",
    "densecl": "state_dict/encoder_k.1.mlp2.0.weight state_dict/backbone.layer2.0.conv2.weight",
    "openselfsup byol": "state_dict/target_net.0.conv1.weight state_dict/neck.mlp.0.weight",
    "mmselfsup 1.x moco": "state_dict/encoder_k.module.0.conv1.weight state_dict/encoder_k.steps",
    "mmpretrain ema": "ema_state_dict/module.backbone.conv1.weight state_dict/head.fc.weight",
    "solo-learn older": "state_dict/momentum_encoder.conv1.weight state_dict/classifier.weight",
    "torchvision references ema": "model_ema/module.conv1.weight model_ema/n_averaged",
    "cifar notebook": "state_dict/encoder_q.net.4.0.conv2.weight state_dict/encoder_k.net.9.bias",
}


@pytest.mark.parametrize("name", KEYS)
def test_generated_files_have_the_projects_keys(name: str) -> None:
    for key in KEYS[name].split():
        assert torch.is_tensor(get_nested(made(name).checkpoint, key.split("/"))), key


def write(name: str, save: Callable[..., Path]) -> Path:
    with layouts.pickles_as_main(), layouts.pickles_as_mmengine():
        return save(made(name).checkpoint)


def holder(checkpoint: Any, found: Recognition) -> tuple[dict[str, Any], dict[str, Any]]:
    """Copy a file, and return it with its dict that contains the network, to be changed."""
    checkpoint = state = copy.copy(checkpoint)
    for key in found.keys:
        state[key] = copy.copy(state[key])
        state = state[key]
    return checkpoint, state


@FILES
def test_what_is_next_to_its_networks_is_known(name: str, save: Callable[..., Path]) -> None:
    raw = read_file(write(name, save))
    found = recognize(raw, "a.file")
    assert "ignored" not in found.dropped
    (note,) = {row.note for row in PROJECTS if row.name == found.contract.source} - {""} or [""]
    expected = {note, NO_PIXELS if "meta" in raw and not note else ""} - {""}
    assert {*found.notes} <= expected and note in (*found.notes, "")
    networks = made(name).networks
    for choice in networks:
        found = recognize(raw, "a.file", Overrides(encoder=choice))
        assert {f"{other} encoder" for other in networks.keys() - {choice}} <= found.dropped.keys()


@pytest.mark.parametrize("name", ["moco-v3", "simsiam"])
def test_unknown_encoder(name: str) -> None:
    with pytest.raises(UserError, match="--encoder rabbit"):
        recognize(made(name).checkpoint, "a.file", Overrides(encoder="rabbit"))


@FILES
def test_leftover_keys_are_named(name: str) -> None:
    """Keys next to the backbone are listed as ignored; one under its names is refused by name."""
    before = recognize(made(name).checkpoint, "a.file")
    checkpoint, state = holder(made(name).checkpoint, before)
    extra = {key: torch.ones(1) for key in ("surprise.weight", "module.surprise")}
    state.update(extra)
    found = recognize(checkpoint, "a.file")
    assert found.dropped == before.dropped | {"ignored": 2}
    assert found.state.keys() == before.state.keys()
    (note,) = (note for note in found.notes if note not in before.notes)
    assert all(repr(key) in note for key in extra)
    inside = before.named("layer4.0.conv1.weight") + ".gate"
    state[inside] = torch.ones(1)
    with pytest.raises(DataError) as error:
        recognize(checkpoint, "a.file")
    assert repr(inside) in str(error.value)


@FILES
def test_other_tensors_are_named(name: str) -> None:
    """Tensors outside the state dict are listed as ignored, unless they are convolutions."""
    checkpoint = made(name).checkpoint
    before = recognize(checkpoint, "a.file")
    found = recognize(checkpoint | {"surprise": {"weight": torch.ones(1)}}, "a.file")
    assert found.dropped == before.dropped | {"ignored": 1}
    assert any("'surprise'" in note for note in found.notes)
    with pytest.raises(DataError, match=r"'surprise'.* ambiguous .*--encoder with one of") as error:
        recognize(checkpoint | {"surprise": {"weight": torch.ones(1, 1, 3, 3)}}, "a.file")
    assert str(error.value).endswith(f" {', '.join(before.encoders)}")
