"""Ordinary checkpoints: what training scripts save next to a backbone never makes it ambiguous."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from convert.contract import Overrides
from convert.inspect_file import inspect_file
from convert.recognize import Recognition, recognize
from moco.common.errors import DataError
from tests.convert.layout_checks import assert_is
from tests.oracles import layouts_projects
from tests.oracles.checkpoints import official
from tests.oracles.layouts import wrapped
from tests.oracles.resnets import make_resnet

Save = Callable[..., Path]
TENSORS = 100  # a ResNet-18's, without its batch counters
CIFAR = ((125.307, 122.961, 113.8575), (51.5865, 50.847, 51.255))


def taken(raw: Any, net: nn.Module, encoder: str | None = None) -> Recognition:
    found = recognize(raw, "a.file", Overrides(encoder=encoder))
    assert_is(found, net, TENSORS)
    return found


def ignored(found: Recognition) -> list[str]:
    """Return the names that the report lists as ignored, after comparing their count."""
    listed = [note for note in found.notes if note.startswith("ignored")]
    keys = re.findall("'([^']+)'", "".join(listed))
    assert found.dropped.get("ignored", 0) == len(keys)
    return keys


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("module.predictor.0.weight", "predictor"),
        ("module.surprise.weight", "ignored"),
        ("module.encoder_k.projector.3.bias", "key encoder"),
    ],
)
def test_one_more_tensor_in_a_moco_checkpoint(key: str, rule: str) -> None:
    checkpoint = official()
    before = recognize(official(), "a.file").dropped
    checkpoint["state_dict"][key] = torch.ones(4, 4)
    found = recognize(checkpoint, "a.file")
    assert (found.contract.source, found.contract.encoder) == ("facebookresearch/moco", "query")
    assert len(found.state) == 100
    assert found.dropped == before | {rule: before.get(rule, 0) + 1}


@pytest.mark.parametrize("where", ["", "again/", "state_dict/module.trunk."])
def test_the_same_network_under_another_name(where: str) -> None:
    """Equal tensors are one network, wherever they are."""
    checkpoint = official()
    holder, _, prefix = where.rpartition("/")
    target = checkpoint.setdefault(holder, {}) if holder else checkpoint
    target.update(
        {
            key.replace("module.encoder_q.", prefix): value
            for key, value in checkpoint["state_dict"].items()
            if key.startswith("module.encoder_q.") and "fc." not in key
        }
    )
    found = recognize(checkpoint, "a.file")
    assert (found.encoders, found.contract.encoder) == (("query", "key"), "query")
    assert found.dropped["second name of the query encoder"] > 0 and not ignored(found)


def test_a_file_of_very_many_networks() -> None:
    """Each would be compared with each."""
    first = ("conv1.weight", "layer1.0.conv1.weight")
    state = {f"{i}.{key}": torch.ones(1) for i in range(5000) for key in first}
    with pytest.raises(DataError, match="5000 networks, expected at most 32"):
        recognize({"state_dict": state}, "a.file")


@pytest.mark.parametrize("name", ["prototypes.weight", "predictor.0.weight", "surprise"])
def test_inside_a_networks_prefix_every_tensor_counts(name: str) -> None:
    """Whatever it is called: it may be a part that changes the features."""
    checkpoint = official()
    checkpoint["state_dict"][f"module.encoder_q.{name}"] = torch.ones(4, 4)
    with pytest.raises(DataError, match=rf"1 keys .* by a rule: 'module\.encoder_q\.{name}'"):
        recognize(checkpoint, "a.file")


@pytest.mark.parametrize("key", ["decoder.0.weight", "neck.conv.weight", "encoder.1.weight"])
def test_convolutions_are_never_passed_over_by_a_rule(key: str) -> None:
    """A decoder's may be of a segmentation network, whose backbone is dilated."""
    state = {f"encoder.0.{k}": value for k, value in make_resnet().state_dict().items()}
    recognize({"state_dict": state | {key: torch.ones(4, 4, 1, 1)}}, "a.file")
    with pytest.raises(DataError, match=rf"'{key}': convolutions outside .* ambiguous"):
        recognize({"state_dict": state | {key: torch.ones(4, 4, 3, 3)}}, "a.file")


def test_a_head_of_1x1_convolutions() -> None:
    net = make_resnet()
    raw = {"state_dict": {**net.state_dict(), "dense_head.0.weight": torch.ones(16, 64, 1, 1)}}
    assert ignored(taken(raw, net)) == ["dense_head.0.weight"]


@pytest.mark.parametrize(
    "key", ["layer1.0.se.fc1.weight", "conv2.weight", "bn1.scale", "layer5.0.conv1.weight"]
)
def test_what_has_a_backbones_names_is_never_passed_over(key: str) -> None:
    with pytest.raises(DataError, match=f"1 keys that are neither .*'{re.escape(key)}'"):
        recognize({"state_dict": {**make_resnet().state_dict(), key: torch.ones(1)}}, "a.file")


# Two that could be meant.


def choices_of(raw: Any) -> list[str]:
    """Return the names that the refusal of an ambiguous file lists."""
    with pytest.raises(DataError, match="ambiguous") as caught:
        recognize(raw, "a.file")
    listed = re.search("--encoder with one of (.*)", str(caught.value))
    assert listed
    return listed[1].split(", ")


def test_every_listed_name_works(save: Save) -> None:
    """A third network in a checkpoint of the official code, under a key or among the others."""
    third = make_resnet(seed=7)
    inside = official()
    inside["state_dict"] |= wrapped(third, "module.copy.")
    for raw in ({**official(), "another": wrapped(third, "module.")}, inside):
        names = choices_of(raw)
        assert names[:2] == ["query", "key"] and len(names) == 3
        for name in names:
            found = recognize(raw, "a.file", Overrides(encoder=name))
            assert found.contract.encoder == name
            assert any(f"{other} encoder" in found.dropped for other in names if other != name)
        taken(raw, third, names[2])
        out = inspect_file(save(raw))
        assert all(f"--encoder {name}" in out for name in names)


def test_convolutions_of_a_network_that_is_not_known() -> None:
    other = {"stage.0.conv.weight": torch.ones(8, 8, 3, 3), "stage.0.conv.bias": torch.ones(8)}
    for raw in (
        {**official(), "generator": other},
        {**official(), "state_dict": {**official()["state_dict"], **other}},
    ):
        assert choices_of(raw) == ["query", "key"]
        found = recognize(raw, "a.file", Overrides(encoder="query"))
        assert len(found.state) == 100 and ignored(found)
        assert any("dilated" in warning for warning in found.warnings)


def test_names_that_a_terminal_would_act_on(save: Save) -> None:
    raw = {"a\x1b[31m": make_resnet().state_dict(), "b": make_resnet(seed=1).state_dict()}
    names = choices_of(raw)
    assert all(name.isprintable() for name in names)
    taken(raw, make_resnet(), names[0])


# An average and its model: the average is taken.


@pytest.mark.parametrize(
    ("model", "average"),
    [("state_dict", "state_dict_ema"), ("ema", "model"), ("net", "swa")],
)
def test_an_average_next_to_its_model(model: str, average: str) -> None:
    """The note says how to get the model; golden verdicts have further names, in another order."""
    model, average = (average, model) if model == "ema" else (model, average)
    nets = {model: make_resnet(seed=0), average: make_resnet(seed=1)}
    raw = {key: wrapped(net, "module.") for key, net in nets.items()}
    found = taken(raw, nets[average])
    assert found.contract.encoder == average
    (other,) = {*found.encoders} - {average}
    assert any("average" in note and f"--encoder {other}" in note for note in found.notes)
    taken(raw, nets[model], other)


@pytest.mark.parametrize("choice", ["query", "key"])
def test_the_official_cifar_notebook(choice: str) -> None:
    made = layouts_projects.made("cifar notebook")
    taken(made.checkpoint, made.networks[choice], choice)


WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_at_any_level(wrapper: str) -> None:
    """torch.compile, FSDP and activation checkpointing of a network, an encoder, or each block."""
    plain = official()
    block = re.compile(r"(layer\d\.\d\.)")
    for change in (
        lambda key: wrapper + key,
        lambda key: re.sub(r"(encoder_[qk]\.)", rf"\1{wrapper}", key),
        lambda key: re.sub(block, rf"\1{wrapper}", key),
        lambda key: wrapper + re.sub(block, rf"\1{wrapper}", key),
    ):
        state = {change(key): value for key, value in plain["state_dict"].items()}
        found = recognize({**plain, "state_dict": state}, "a.file")
        expected = recognize(plain, "a.file")
        assert found.contract.source == expected.contract.source
        assert found.dropped == expected.dropped
        assert found.state.keys() == expected.state.keys()
        assert all(torch.equal(found.state[key], value) for key, value in expected.state.items())


@pytest.mark.parametrize("container", ["net", None])
def test_kuangliu_cifar(container: str | None) -> None:
    """kuangliu/pytorch-cifar main.py, models/resnet.py: shortcut.* and linear."""
    net = make_resnet(stem="cifar")
    state = {
        "module." + key.replace("downsample", "shortcut").replace("fc.", "linear."): value
        for key, value in net.state_dict().items()
    }
    raw = {container: state, "acc": 95.4, "epoch": 199} if container else state
    found = taken(raw, net)
    assert found.dropped["linear head"] == 2
    assert any("3x3 stem" in warning for warning in found.warnings)


def test_an_average_in_the_state_of_a_callback() -> None:
    """As callbacks of Lightning that have their own `state_dict` save it."""
    average = {f"net.{k}": v for k, v in make_resnet(18, seed=1).state_dict().items()}
    raw = {
        "state_dict": {f"net.{k}": v for k, v in make_resnet(18).state_dict().items()},
        "callbacks": {"EMACallback": {"ema_state_dict": average, "decay": 0.999}},
        "pytorch-lightning_version": "2.5.0",
    }
    found = recognize(raw, "x")
    assert torch.equal(found.state["conv1.weight"], average["net.conv1.weight"])
    assert any("was chosen as the moving average" in note for note in found.notes)


def test_an_average_without_names_is_said_to_be_unused() -> None:
    """As fadel/pytorch_ema and diffusers' EMAModel save it."""
    net = make_resnet(18)
    average = {"decay": 0.9, "num_updates": 3, "shadow_params": [*net.parameters()]}
    found = recognize({"model": net.state_dict(), "ema": average}, "x")
    assert torch.equal(found.state["conv1.weight"], net.state_dict()["conv1.weight"])
    assert any("'ema' looks like a moving average" in text for text in found.warnings)
