"""The backbone against torchvision's ResNet: bitwise equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet as tv

from convert.modeling.resnet import FEATURES, ResNet, make_stage
from tests.oracles.checkpoints import official_names
from tests.oracles.resnets import make_resnet

TV_STAGE = {"layer1": "res2", "layer2": "res3", "layer3": "res4", "layer4": "res5"}


def renamed(source: nn.Module) -> dict[str, Tensor]:
    """Torchvision's tensors under Detectron2's names, as the official converter has them."""
    return {official_names(k): v for k, v in source.state_dict().items() if not k.startswith("fc.")}


def torchvision_features(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        x = net.maxpool(net.relu(net.bn1(net.conv1(x))))
        features = {"stem": x}
        for layer, stage in TV_STAGE.items():
            x = net.get_submodule(layer)(x)
            features[stage] = x
    return features


@pytest.mark.parametrize(
    ("depth", "stem", "base", "shape"),
    [
        (10, "cifar", 24, {"stem_out_channels": 24, "res2_out_channels": 24}),
        (10, "stride2", 32, {"stem_out_channels": 32, "res2_out_channels": 32}),
        (18, "imagenet", 64, {"res2_out_channels": 64}),
        (34, "cifar", 16, {"stem_out_channels": 16, "res2_out_channels": 16}),
        (50, "imagenet", 64, {}),
        (
            50,
            "stride2",
            16,
            {"stem_out_channels": 16, "res2_out_channels": 64, "width_per_group": 16},
        ),
    ],
)
def test_bitwise_equal_to_torchvision(
    depth: int, stem: str, base: int, shape: dict[str, int]
) -> None:
    source = make_resnet(depth, stem=stem, base=base)
    model = ResNet(depth, stem=stem, **shape).eval()
    model.load_state_dict(renamed(source))
    x = torch.randn(2, 3, 96, 64, generator=torch.Generator().manual_seed(0))
    expected = torchvision_features(source, x)
    with torch.no_grad():
        actual = model(x)
    assert tuple(actual) == FEATURES
    for name in FEATURES:
        assert torch.equal(actual[name], expected[name]), name
        assert actual[name].shape[1] == model.stage_channels[name]
        assert 96 // actual[name].shape[2] == model.strides[name]


@pytest.mark.parametrize(
    ("factory", "shape"),
    [
        (tv.resnext50_32x4d, {"num_groups": 32, "width_per_group": 4}),
        (tv.wide_resnet50_2, {"width_per_group": 128}),
    ],
)
def test_groups_and_wide_bottlenecks(factory: Any, shape: dict[str, int]) -> None:
    source = factory(weights=None)
    model = ResNet(50, **shape)
    assert {n: v.shape for n, v in model.state_dict().items()} == {
        n: v.shape for n, v in renamed(source).items()
    }
    assert model.res5[0].conv2.groups == source.layer4[0].conv2.groups


def test_random_stream_does_not_depend_on_the_features_asked_for() -> None:
    torch.manual_seed(0)
    full = ResNet(10, stem_out_channels=8, res2_out_channels=8)
    after_full = torch.rand(1)
    torch.manual_seed(0)
    c4 = ResNet(10, stem_out_channels=8, res2_out_channels=8, out_features=["res4"])
    assert torch.equal(torch.rand(1), after_full)
    assert not hasattr(c4, "res5")
    for name, value in c4.state_dict().items():
        assert torch.equal(value, full.state_dict()[name]), name
    assert tuple(c4(torch.zeros(2, 3, 64, 64))) == ("res4",)


def test_res5_box_head_is_the_stage() -> None:
    head = make_stage(50, "res5", in_channels=64, res2_out_channels=16, width_per_group=4)
    backbone = ResNet(50, stem_out_channels=4, res2_out_channels=16, width_per_group=4)
    assert {n: v.shape for n, v in head.state_dict().items()} == {
        n: v.shape for n, v in backbone.res5.state_dict().items()
    }
    assert head(torch.zeros(2, 64, 14, 14)).shape == (2, 128, 7, 7)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"depth": 20},
        {"depth": 18, "stem": "vgg"},
        {"depth": 50, "res5_dilation": 4},
        {"depth": 18, "res5_dilation": 2},
        {"depth": 18, "num_groups": 2},
        {"depth": 18, "out_features": []},
        {"depth": 18, "out_features": ["res6"]},
    ],
)
def test_arguments_out_of_range(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got"):
        ResNet(**kwargs)
