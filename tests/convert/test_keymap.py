"""The table, read both ways, against the official converter and the networks themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.models import resnet as tv

from convert.families import resnet
from convert.families.base import LEFT_AT_INIT, first_rule
from convert.modeling.resnet import ResNet, is_bottleneck
from tests.oracles.checkpoints import official_names

FACTORIES = {
    18: tv.resnet18,
    34: tv.resnet34,
    50: tv.resnet50,
    101: tv.resnet101,
    152: tv.resnet152,
}


@pytest.mark.parametrize("depth", FACTORIES)
def test_every_tensor_both_ways(depth: int) -> None:
    with torch.device("meta"):
        source = FACTORIES[depth](num_classes=3).state_dict()
        target = ResNet(depth, res2_out_channels=256 if is_bottleneck(depth) else 64).state_dict()
    mapped = {}
    for key, value in source.items():
        new = resnet.ResNetFamily().to_detectron2(key)
        assert (new is None) == (first_rule(key, resnet.DROPPED) is not None), key
        if new is not None:
            assert new == official_names(key)
            assert resnet.ResNetFamily().from_detectron2(new) == key
            assert target[new].shape == value.shape
            mapped[new] = key
    left = {key for key in target if first_rule(key, LEFT_AT_INIT)}
    assert mapped.keys() | left == target.keys()
    assert not mapped.keys() & left
    assert {
        resnet.ResNetFamily().to_detectron2(resnet.ResNetFamily().from_detectron2(key) or "")
        for key in mapped
    } == set(mapped)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "conv1",
        "conv1.bias",
        "conv2.weight",
        "bn1.num_batches_tracked",
        "stem.conv1.weight",
        "layer5.0.conv1.weight",
        "layer1.conv1.weight",
        "layer1.x.conv1.weight",
        "layer1.01.conv1.weight",
        "layer1.-1.conv1.weight",
        "layer1.0.conv4.weight",
        "layer1.0.conv1.running_mean",
        "layer1.0.downsample.2.weight",
        "layer1.0.conv1.weight.weight",
        "module.layer1.0.conv1.weight",
        "layer1.*.conv1.weight",
        "1." * 50_000 + "weight",  # as many pairs of numbers would take hours
    ],
    ids=lambda key: key[:40],
)
def test_unknown_names_are_not_guessed(key: str) -> None:
    assert resnet.ResNetFamily().to_detectron2(key) is None


@pytest.mark.parametrize(
    "key", ["conv1.weight", "res1.0.conv1.weight", "res2.0.bn1.weight", "res2.0.conv1.norm", "norm"]
)
def test_unknown_targets_are_not_guessed(key: str) -> None:
    assert resnet.ResNetFamily().from_detectron2(key) is None


@pytest.mark.parametrize(
    ("key", "rules", "rule"),
    [
        ("fc.weight", resnet.DROPPED, "head"),
        ("fc.2.bias", resnet.DROPPED, "head"),
        ("layer1.0.bn1.num_batches_tracked", resnet.DROPPED, "batch counter"),
        ("layer1.0.conv1.weight", resnet.DROPPED, None),
        ("layer1.0.fc.weight", resnet.DROPPED, None),
        ("res2.0.conv1.norm.num_batches_tracked", LEFT_AT_INIT, "batch counter"),
        ("res2.0.conv1.norm.running_mean", LEFT_AT_INIT, None),
    ],
)
def test_rules_have_names(key: str, rules: dict[str, str], rule: str | None) -> None:
    assert first_rule(key, rules) == rule


PARTS = sorted(
    {*resnet.STAGES, *resnet.BLOCK_MODULES, *resnet.NORM_TENSORS, "fc", "0", "1", "10", "00", "٣"}
)


@given(st.one_of(st.text(), st.lists(st.sampled_from(PARTS), max_size=5).map(".".join)))
def test_whatever_maps_maps_back(key: str) -> None:
    new = resnet.ResNetFamily().to_detectron2(key)
    assert new is None or resnet.ResNetFamily().from_detectron2(new) == key
    old = resnet.ResNetFamily().from_detectron2(key)
    assert old is None or resnet.ResNetFamily().to_detectron2(old) == key
