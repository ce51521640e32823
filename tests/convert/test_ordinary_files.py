"""Ordinary checkpoints: what training scripts save beside a backbone never makes it ambiguous."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convert.contract import Given
from convert.convert_to_d2 import convert_file
from convert.inspect_file import inspect_file
from convert.read import read_file
from convert.translate import Recognized, recognize
from moco.common.errors import DataError
from tests.convert.layout_checks import assert_is
from tests.oracles import layouts_frameworks
from tests.oracles.checkpoints import official
from tests.oracles.layouts_frameworks import wrapped
from tests.oracles.resnets import headless, make_resnet, sgd_state

Save = Callable[..., Path]
TENSORS = 100  # a ResNet-18's, without its batch counters
CIFAR = ((125.307, 122.961, 113.8575), (51.5865, 50.847, 51.255))


def taken(raw: Any, net: nn.Module, encoder: str | None = None) -> Recognized:
    found = recognize(raw, "a.file", Given(encoder=encoder))
    assert_is(found, net, TENSORS)
    return found


def ignored(found: Recognized) -> list[str]:
    """The names that the report lists as ignored, as many as it counts."""
    listed = [note for note in found.notes if note.startswith("ignored")]
    keys = re.findall("'([^']+)'", "".join(listed))
    assert found.dropped.get("ignored", 0) == len(keys)
    return keys


def tutorial(net: nn.Module) -> dict[str, Any]:
    """pytorch.org, Saving and Loading Models: a general checkpoint."""
    return {
        "epoch": 5,
        "model_state_dict": net.state_dict(),
        "optimizer_state_dict": sgd_state(net),
        "loss": torch.tensor(0.4, requires_grad=True),
    }


def test_the_tutorials_checkpoint(save: Save, tmp_path: Path) -> None:
    net = make_resnet()
    src = save(tutorial(net))
    found = taken(read_file(src), net)
    assert found.dropped["optimizer"] == found.dropped["loss"] == 1
    report = convert_file(src, tmp_path / "out.pth")
    assert "1 loss" in report.text() and report.contract.source == "state dict"


@pytest.mark.parametrize(
    ("name", "wrap"),
    [("optim_dict", lambda s: s), ("solver", lambda s: [s]), ("g", lambda s: {"sgd": s})],
)
def test_optimizers_under_any_name(name: str, wrap: Any) -> None:
    """SGD's momentum has the shapes of convolutions; no weights are there."""
    net = make_resnet()
    found = taken({"state_dict": net.state_dict(), name: wrap(sgd_state(net))}, net)
    assert found.dropped["optimizer"] == 1 and not ignored(found)


def test_optimizer_states_by_the_names_of_parameters() -> None:
    """As FSDP's optim_state_dict."""
    net = make_resnet()
    moments = {key: {"exp_avg": torch.ones_like(v)} for key, v in net.named_parameters()}
    raw = {"model": net.state_dict(), "o": {"state": moments, "param_groups": [{"lr": 0.1}]}}
    assert taken(raw, net).dropped["optimizer"] == 1


BESIDE = {
    "best_acc1": torch.tensor(71.5),
    "best_prec1": torch.tensor(71.5),
    "rng": torch.zeros(5056, dtype=torch.uint8),
    "cuda_rng_state": [torch.zeros(16, dtype=torch.uint8)],
    "class_weights": torch.ones(10),
    "keys": torch.ones(16, 32),
    "metrics": {"top1": torch.tensor(1.0), "confusion": torch.ones(10, 10)},
    "samples": torch.ones(4, 3, 8, 8),
    "head": {"weight": torch.ones(10, 64), "bias": torch.ones(10)},
    "shadow": [torch.ones(8, 3, 7, 7)],  # torch_ema: tensors without names
}


@pytest.mark.parametrize("name", BESIDE)
def test_tensors_beside_the_network(name: str) -> None:
    """In a checkpoint of no one's, of torchvision's names alone, and of the official code."""
    net = make_resnet()
    raws = [{"state_dict": net.state_dict()}, net.state_dict()]
    pairs = [(taken(raw, net), taken({**raw, name: BESIDE[name]}, net)) for raw in raws]
    moco = official()
    pairs += [(recognize(moco, "a.file"), recognize({**moco, name: BESIDE[name]}, "a.file"))]
    assert pairs[-1][1].contract.source == "facebookresearch/moco"
    rule = {"best_acc1": "training record", "head": "head"}.get(name, "ignored")
    for before, found in pairs:
        assert found.dropped == before.dropped | {rule: before.dropped.get(rule, 0) + 1}
        assert ignored(found) == ([name] if rule == "ignored" else [])


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
    with pytest.raises(DataError, match="5000 networks, more than any checkpoint has"):
        recognize({"state_dict": state}, "a.file")


@pytest.mark.parametrize("name", ["prototypes.weight", "predictor.0.weight", "surprise"])
def test_inside_a_networks_prefix_every_tensor_counts(name: str) -> None:
    """Whatever it is called: it may be a part that changes the features."""
    checkpoint = official()
    checkpoint["state_dict"][f"module.encoder_q.{name}"] = torch.ones(4, 4)
    with pytest.raises(DataError, match=rf"1 keys .* knows: 'module\.encoder_q\.{name}'"):
        recognize(checkpoint, "a.file")


@pytest.mark.parametrize("key", ["decoder.0.weight", "neck.conv.weight", "encoder.1.weight"])
def test_convolutions_are_never_passed_over_by_a_rule(key: str) -> None:
    """A decoder's may be of a segmentation network, whose backbone is dilated."""
    state = {f"encoder.0.{k}": value for k, value in make_resnet().state_dict().items()}
    recognize({"state_dict": state | {key: torch.ones(4, 4, 1, 1)}}, "a.file")
    with pytest.raises(DataError, match=rf"'{key}': convolutions beside .* ambiguous"):
        recognize({"state_dict": state | {key: torch.ones(4, 4, 3, 3)}}, "a.file")


def test_a_head_of_1x1_convolutions() -> None:
    net = make_resnet()
    raw = {"state_dict": {**net.state_dict(), "dense_head.0.weight": torch.ones(16, 64, 1, 1)}}
    assert ignored(taken(raw, net)) == ["dense_head.0.weight"]


@pytest.mark.parametrize(
    "key", ["layer1.0.se.fc1.weight", "conv2.weight", "bn1.scale", "layer5.0.conv1.weight"]
)
def test_what_has_a_backbones_names_is_never_passed_over(key: str) -> None:
    with pytest.raises(DataError, match=f"1 keys that neither .*'{re.escape(key)}'"):
        recognize({"state_dict": {**make_resnet().state_dict(), key: torch.ones(1)}}, "a.file")


# Two that could be meant.


def choices_of(raw: Any) -> list[str]:
    """The names that the refusal of an ambiguous file lists."""
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
            found = recognize(raw, "a.file", Given(encoder=name))
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
        found = recognize(raw, "a.file", Given(encoder="query"))
        assert len(found.state) == 100 and ignored(found)
        assert any("dilated" in warning for warning in found.warnings)


def test_names_that_a_terminal_would_act_on(save: Save) -> None:
    raw = {"a\x1b[31m": make_resnet().state_dict(), "b": make_resnet(seed=1).state_dict()}
    names = choices_of(raw)
    assert all(name.isprintable() for name in names)
    taken(raw, make_resnet(), names[0])


# An average beside its model: the average is taken.


@pytest.mark.parametrize(
    ("model", "average"),
    [
        ("state_dict", "state_dict_ema"),
        ("state_dict", "ema_state_dict"),
        ("model", "model_ema"),
        ("model", "ema"),
        ("net", "swa"),
    ],
)
@pytest.mark.parametrize("beside", [{}, {"arch": "resnet18", "best_acc1": torch.tensor(1.0)}])
def test_an_average_beside_its_model(model: str, average: str, beside: dict[str, Any]) -> None:
    nets = {model: make_resnet(seed=0), average: make_resnet(seed=1)}
    raw = {key: wrapped(net, "module.") for key, net in nets.items()}
    if beside and model == "state_dict":
        raw |= beside  # pytorch/examples with an average
    if beside:
        raw = {key: raw[key] for key in [*list(raw)[1:], next(iter(raw))]}  # in any order
    found = taken(raw, nets[average])
    assert found.contract.encoder == average
    (other,) = {*found.encoders} - {average}
    assert any("average" in note and f"--encoder {other}" in note for note in found.notes)
    taken(raw, nets[model], other)


def test_an_average_among_the_keys_of_its_model() -> None:
    """lucidrains/ema-pytorch: online_model.* and ema_model.*, and two counters."""
    nets = {"online_model": headless(seed=0), "ema_model": headless(seed=1)}
    state: dict[str, Tensor] = {"initted": torch.tensor([True]), "step": torch.tensor([3])}
    for name, net in nets.items():
        state |= wrapped(net, f"{name}.")
    found = taken({"ema": state}, nets["ema_model"])
    assert sorted(ignored(found)) == ["initted", "step"]
    assert found.contract.encoder == "ema.ema_model"
    taken({"ema": state}, nets["online_model"], "ema.online_model")


# Layouts.


@pytest.mark.parametrize("choice", ["query", "key"])
def test_the_official_cifar_notebook(choice: str, save: Save, tmp_path: Path) -> None:
    made = layouts_frameworks.cifar_notebook()
    raw = read_file(save(made.checkpoint))
    found = recognize(raw, "a.file", Given(encoder=choice))
    assert found.contract.source == "facebookresearch/moco (CIFAR notebook)"
    assert (found.contract.encoder, found.encoders) == (choice, ("query", "key"))
    pixels = found.contract.pixels
    assert (pixels.mean, pixels.std, found.contract.architecture.stem) == (*CIFAR, "cifar")
    assert (found.epoch, found.head, found.warnings, found.notes) == (200, "linear head", [], [])
    state = made.networks[choice].state_dict()
    assert found.state.keys() == {
        key for key in state if not key.startswith("fc.") and "num_b" not in key
    }
    assert all(torch.equal(found.state[key], state[key]) for key in found.state)
    other = {"query": "key", "key": "query"}[choice]
    assert found.dropped == {
        "batch counter": 20,
        "numbered head": 2,
        f"{other} encoder": 122,
        "queue": 2,
        "training record": 1,
        "optimizer": 1,
    }
    if choice == "query":
        assert convert_file(save(made.checkpoint), tmp_path / "out.pth").mapped == 100


def test_the_notebooks_numbering_elsewhere() -> None:
    """leftthomas/SimCLR: f.0, f.1, f.3 .. f.6 of a ResNet without max-pool, and a projection g."""
    net = make_resnet(stem="cifar")
    children = [m for n, m in net.named_children() if n not in ("maxpool", "fc")]
    state = wrapped(nn.Sequential(*children), "f.") | {"g.0.weight": torch.ones(16, 64)}
    found = taken(state, net)
    assert ignored(found) == ["g.0.weight"]


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
