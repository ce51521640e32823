"""The backbone against torchvision's ResNet and, where installed, Detectron2's: bitwise equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet as tv

from convert.families.resnet_network import FEATURES, ResNet, make_stage
from tests.oracles.checkpoints import official_names
from tests.oracles.resnets import make_resnet, randomize

TV_STAGE = {"layer1": "res2", "layer2": "res3", "layer3": "res4", "layer4": "res5"}


def renamed(source: nn.Module) -> dict[str, Tensor]:
    """torchvision's tensors under Detectron2's names, as the official converter has them."""
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


def d2_backbone(depth: int, **keys: Any) -> nn.Module:
    pytest.importorskip("detectron2", reason="Detectron2 is not installed")
    from detectron2.config import get_cfg
    from detectron2.layers import ShapeSpec
    from detectron2.modeling.backbone import build_resnet_backbone

    cfg = get_cfg()
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.RESNETS.DEPTH = depth
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 256 if depth >= 50 else 64
    cfg.MODEL.RESNETS.OUT_FEATURES = list(FEATURES)
    for key, value in keys.items():
        cfg.MODEL.RESNETS[key] = value
    return build_resnet_backbone(cfg, ShapeSpec(channels=3))


@pytest.mark.detectron2
@pytest.mark.parametrize(
    ("depth", "stride_in_1x1", "dilation"),
    [(18, False, 1), (50, False, 1), (50, True, 2)],
)
def test_bitwise_equal_to_detectron2(depth: int, stride_in_1x1: bool, dilation: int) -> None:
    torch.manual_seed(3)
    expected = d2_backbone(depth, STRIDE_IN_1X1=stride_in_1x1, RES5_DILATION=dilation)
    after_expected = torch.rand(1)
    torch.manual_seed(3)
    model = ResNet(
        depth,
        res2_out_channels=256 if depth >= 50 else 64,
        stride_in_1x1=stride_in_1x1,
        res5_dilation=dilation,
    )
    assert torch.equal(torch.rand(1), after_expected), "the random streams diverged"
    state = expected.state_dict()
    assert list(model.state_dict()) == list(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name

    randomize(expected)  # at (0, 1) a swapped mean and bias would not be seen
    model.load_state_dict(expected.state_dict())
    x = torch.randn(1, 3, 96, 64, generator=torch.Generator().manual_seed(0))
    shapes = expected.output_shape()
    for training in (False, True):
        features, reference = model.train(training)(x), expected.train(training)(x)
        for name in FEATURES:
            assert torch.equal(features[name], reference[name]), (name, training)
            assert shapes[name].stride == model.strides[name]
            assert shapes[name].channels == model.stage_channels[name]
    # One backward pass: the engines are promised to train alike.
    features["res5"].square().mean().backward()
    reference["res5"].square().mean().backward()
    for (name, p), (_, r) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert torch.equal(p.grad, r.grad), name


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
