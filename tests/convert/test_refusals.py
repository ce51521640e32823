"""Refusals of the converter, each with one line: strictness, mix-ups, payloads."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convert.convert_to_d2 import convert_file
from convert.read import read_file
from convert.recognize import recognize
from tests.oracles.checkpoints import detectron2_layout, official
from tests.oracles.layouts import wrapped
from tests.oracles.resnets import make_resnet

# Every key and every tensor counts.


def test_keys_outside_the_encoders() -> None:
    checkpoint = official()
    checkpoint["state_dict"]["module.surprise.weight"] = torch.ones(2, 2)
    checkpoint["state_dict"][3] = torch.ones(2)
    (note,) = recognize(checkpoint, "x").notes
    assert note.startswith("ignored") and note.endswith("'module.surprise.weight', 3")


def test_an_unknown_arch_is_decided_by_the_tensors(save: Any, tmp_path: Path) -> None:
    report = convert_file(save({**official(), "arch": "rn18"}), tmp_path / "out.pth")
    assert report.contract.architecture.depth == 18
    assert report.notes == ["the file names arch 'rn18'; the tensors decide"]


def test_numpy_state_dicts_are_read(tmp_path: Path) -> None:
    state = {key: value.numpy() for key, value in make_resnet().state_dict().items()}
    state["bn1.weight"] = state["bn1.weight"].astype(">f4")
    (tmp_path / "x").write_bytes(pickle.dumps(state, protocol=5))  # 5 keeps the byte order
    assert convert_file(tmp_path / "x", tmp_path / "out.pth").mapped == 100


# Names of tensors, and of what a file looks like.


def test_tensors_are_named_as_in_the_file() -> None:
    """Missing tensors are named by the layout, with the wrappers of the other tensors."""
    plain = make_resnet(50).state_dict()
    net = make_resnet(50)
    numbered = nn.Sequential(*list(net.children())[:-1]).state_dict()
    unpooled = nn.Sequential(
        *(m for n, m in net.named_children() if n not in ("maxpool", "fc"))
    ).state_dict()
    cases = {
        "module._orig_mod.layer2.0.downsample.1.bias": wrapped(net, "module._orig_mod."),
        "net.layer2.0.shortcut.1.bias": {
            "net." + key.replace("downsample", "shortcut"): value for key, value in plain.items()
        },
        "f.5.0.downsample.1.bias": {f"f.{key}": value for key, value in numbered.items()},
        "f.4.0.downsample.1.bias": {f"f.{key}": value for key, value in unpooled.items()},
    }
    for key, state in cases.items():
        raw = {k: v for k, v in state.items() if k != key}
        assert len(raw) == len(state) - 1, key
        assert recognize(raw, "x").named("layer2.0.downsample.1.bias") == key
        assert recognize(state, "x").named("layer2.0.downsample.1.bias") == key
    raw = detectron2_layout(net)
    assert recognize(raw, "x").named("layer2.0.downsample.1.bias") == "res3.0.shortcut.norm.bias"


def test_a_part_of_sharded_weights(refuse: Callable[..., str], save: Any, tmp_path: Path) -> None:
    """Its blocks would be those of a shorter, whole network."""
    state = {f"blocks.{i}.norm1.weight": torch.ones(4) for i in range(2)}
    part = save(state, "model-00001-of-00002.safetensors")
    refuse(part, r"part 1 of 2; give the index that lists all parts")
    listed = dict.fromkeys(state, part.name) | {"norm.weight": "model-00002-of-00002.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    whole = save(state | {"norm.weight": torch.ones(4)}, "whole.pth")
    assert len(read_file(whole)) == 3  # next to the same network in parts
