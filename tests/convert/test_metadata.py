"""Metadata in files: it is used, or refused where it contradicts the tensors."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.models import resnet as tv
from torchvision.models.segmentation import deeplabv3_resnet50

from convert.contract import IMAGENET_MEAN, IMAGENET_STD, Overrides
from convert.convert_to_d2 import convert_file
from convert.families import resnet
from convert.inspect_file import inspect_file
from convert.read import read_file
from convert.recognize import recognize
from moco.common.errors import DataError
from tests.oracles.checkpoints import caffe2, official
from tests.oracles.convert_damaged import NARROW
from tests.oracles.resnets import make_resnet, randomize

Save = Callable[..., Path]


OVERRIDES = Overrides.from_options(
    mean=(1.0, 2.0, 3.0), std=(1.0, 1.0, 1.0), channel_order="BGR", stride_in_1x1=False
)


def state(prefix: str = "", **kwargs: Any) -> dict[str, torch.Tensor]:
    return {prefix + key: value for key, value in make_resnet(**kwargs).state_dict().items()}


# Pixels that the file itself names.


@pytest.mark.parametrize("mean", [(0.5, 0.5, 0.5), None])
def test_timms_own_arguments(mean: Any, save: Save) -> None:
    """Timm's train.py: --mean and --std override the model's."""
    content = {
        "epoch": 9,
        "arch": "resnet18",
        "state_dict": state(base=64),
        "version": 2,
        "args": argparse.Namespace(mean=mean, std=[0.25, 0.5, 0.5] if mean else None),
    }
    found = recognize(read_file(save(content)), "x")
    assert found.contract.source == "timm"
    assert found.contract.pixels.mean == ((127.5,) * 3 if mean else IMAGENET_MEAN)
    assert found.contract.pixels.std == ((63.75, 127.5, 127.5) if mean else IMAGENET_STD)


@pytest.mark.parametrize("scale", [1, 255])
def test_anyones_arguments(scale: int) -> None:
    """A training script's that nobody knows."""
    args = {"mean": [0.5 * scale] * 3, "std": [0.25 * scale] * 3, "lr": 0.1}
    found = recognize({"weights": state("net."), "args": args}, "x")
    assert found.contract.source == "state dict" and not found.warnings
    assert (found.contract.pixels.mean, found.contract.pixels.std) == ((127.5,) * 3, (63.75,) * 3)
    alone = recognize({"weights": state("net."), "args": {"mean": args["mean"]}}, "x")
    assert alone.contract.pixels.mean == IMAGENET_MEAN and "assuming ImageNet" in alone.warnings[0]


def test_anyones_configuration() -> None:
    """mmcv's, of a network under a prefix that no project of OpenMMLab has."""
    raw = {"meta": {"config": BGR}, "weights": state("net.", depth=50)}
    pixels = recognize(raw, "x").contract.pixels
    assert (pixels.mean, pixels.std) == ((103.53, 116.28, 123.675), (1.0,) * 3)
    assert pixels.channel_order == "BGR"


RGB = (
    "img_norm_cfg = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True)"
)
BGR = "dict(mean=[103.53, 116.28, 123.675], std=[1.0, 1.0, 1.0], to_rgb=False)"
HALF = "mean=[127.5, 127.5, 127.5], std=(64, 64, 64)"
PIPELINE = f"norm = dict({HALF})\nt = [dict(type='Normalize', **norm)]\nd = dict(train=t, val=t)"


def of_mm(text: str) -> dict[str, Any]:
    return {"meta": {"cfg": text}, "state_dict": state("backbone.", depth=50)}


@pytest.mark.parametrize(
    ("text", "mean", "order"),
    [
        (RGB, IMAGENET_MEAN[0], "RGB"),
        ("x = dict(mean=[0.5, 0.5, 0.5], std=[0.25, 0.25, 0.25])", 127.5, "RGB"),
        (f"x = {{'mean': [127.5] + [], 'to_rgb': False}}\ny = dict({HALF})", 127.5, "RGB"),
        (PIPELINE, 127.5, "RGB"),
        (f"model = dict(data_preprocessor=dict({HALF}))", 127.5, "BGR"),
        (f"data_preprocessor = dict({HALF}, bgr_to_rgb=True)", 127.5, "RGB"),
        (f"data_preprocessor = dict({HALF}, to_rgb=True)", 127.5, "RGB"),
    ],
)
def test_pixels_of_an_mm_configuration(text: str, mean: float, order: str) -> None:
    """As mmcv's Normalize (RGB by default) and mmengine's data_preprocessor (BGR) read them."""
    pixels = recognize(of_mm(text), "x").contract.pixels
    assert (pixels.mean[0], pixels.channel_order) == (mean, order)


@pytest.mark.parametrize(
    ("text", "std"),
    [
        ("img_norm_cfg = dict(mean=[0, 0, 0], std=[255.0, 255.0, 255.0])", 255),
        ("img_norm_cfg = dict(mean=[0, 0, 0], std=[1, 1, 1])", 255),  # torchvision's
        ("model = dict(data_preprocessor=dict(mean=[0, 0, 0], std=[255, 255, 255]))", 255),
        ("model = dict(data_preprocessor=dict(mean=[0, 0, 0], std=[1, 1, 1]))", 1),
    ],
)
def test_pixels_that_are_scaled_alone(text: str, std: float) -> None:
    """Mmcv's and mmengine's normalizations are for 0..255, torchvision's for 0..1."""
    pixels = recognize(of_mm(text), "x").contract.pixels
    assert (pixels.mean[0], pixels.std[0]) == (0, std)


@pytest.mark.parametrize("text", ["x = dict(", f"{RGB}\ny = dict({HALF})", "x = 1\n" * 50_000])
def test_an_mm_configuration_that_cannot_be_read(text: str) -> None:
    with pytest.raises(DataError, match=r"configuration has .*give --mean --std --ch"):
        recognize(of_mm(text), "x")
    assert recognize(of_mm(text), "x", OVERRIDES).contract.pixels.channel_order == "BGR"


def test_an_mm_configuration_is_not_executed(tmp_path: Path) -> None:
    file = tmp_path / "made"
    recognize(of_mm(f"{RGB}\n__import__('pathlib').Path({str(file)!r}).touch()"), "x")
    assert not file.exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("repeated", ["[{0}, {0}, {0}, {0}]", "dict(a={0}, b={0}, c={0}, d={0})"])
def test_names_that_hold_each_other_take_no_time(repeated: str) -> None:
    """Written out, the last of them would have 4 ** 60 values."""
    lines = [f"x{i + 1} = {repeated.format(f'x{i}')}" for i in range(60)]
    found = recognize(of_mm("\n".join([RGB, "x0 = dict(k=1)", *lines])), "x")
    assert found.contract.pixels.mean == IMAGENET_MEAN


def test_dicts_that_are_merged_too_often_are_refused() -> None:
    many = ", ".join(f"k{i}=1" for i in range(1000))
    with pytest.raises(DataError, match="configuration has no literals"):
        recognize(of_mm(f"{RGB}\nx = dict({many})\n" + "dict(**x)\n" * 1000), "x")


def test_the_stride_of_an_mm_configuration() -> None:
    text = "model = dict(backbone=dict(type='mmdet.ResNet', depth=50, style='caffe'))"
    assert recognize(of_mm(text), "x").contract.architecture.stride_in_1x1
    with pytest.raises(DataError, match=r"meta\.config has style 'caffe', but its tensors have py"):
        recognize(of_mm(text), "x", OVERRIDES)


@pytest.mark.parametrize(
    ("backbone", "named"),
    [
        ("strides=(1, 2, 1, 1)", "strides"),
        ("dilations=(1, 1, 2, 4)", "dilations"),
        ("deep_stem=True", "deep_stem"),
        ("norm_cfg=dict(type='BN', eps=0.001)", "norm_cfg"),
        ("norm_cfg=dict(type='GN', num_groups=32)", "norm_cfg"),
        ("act_cfg=dict(type='GELU')", "act_cfg"),
        ("dcn=dict(type='DCN')", "dcn"),
        ("new_argument=0", "'new_argument'"),
        ("type='Res2Net'", "type"),
        ("depth=101", "depth"),
        ("avg_down=1 + 0", "avg_down"),
    ],
)
def test_a_backbone_of_openmmlab_with_other_features(backbone: str, named: str) -> None:
    usual = "norm_cfg=dict(type='SyncBN', requires_grad=True), style='pytorch', frozen_stages=-1"
    its = f"type='ResNet', depth=50, out_indices=(0, 1, 2, 3), strides=(1, 2, 2, 2), {usual}"
    text = "model = dict(type='MoCo', backbone={**dict(%s), **dict(%s)})"
    assert recognize(of_mm(text % (its, "")), "x")
    with pytest.raises(DataError, match=rf"meta\.config has {named} "):
        recognize(of_mm(text % (its, backbone)), "x")


# Networks that are not what their names and shapes say.


def test_a_segmentation_network_is_dilated() -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = deeplabv3_resnet50(weights=None, weights_backbone=None, aux_loss=False)
    raw = {key: torch.ones(()).expand(value.shape) for key, value in shapes.state_dict().items()}
    with pytest.raises(DataError, match=r"keys that are neither .*'classifier\.0\.convs"):
        recognize(raw, "x")


def test_a_flat_dict_is_said_to_say_little() -> None:
    (note,) = recognize(state(), "x").notes
    assert "dilated, anti-aliased and caffe-style networks have the same ones" in note
    assert "3x3 stem" in recognize(state(stem="cifar"), "x").warnings[-1]


def test_fairs_resnext() -> None:
    """X-101-32x8d.pkl has Caffe2's names and a convention of its own."""
    with torch.device("meta"):
        net = tv.resnext101_32x8d()
    net = net.to_empty(device="cpu")
    torch.manual_seed(0)
    randomize(net)
    found = recognize(caffe2(net), "x")
    assert found.contract.source == "detectron2/FAIR X-101-32x8d"
    assert not found.contract.architecture.stride_in_1x1
    assert found.contract.pixels.channel_order == "BGR"
    assert found.contract.pixels.std == (57.375, 57.12, 58.395)


# Other tensors than the backbone, and missing ones.


@pytest.mark.parametrize("key", ["last_linear.weight", "linear.bias", "n_averaged"])
def test_other_names_of_heads_and_counters(key: str) -> None:
    assert len(recognize({**state(), key: torch.ones(2)}, "x").state) == 100


def test_a_detector_without_a_dict_around_it() -> None:
    net = {resnet.ResNetFamily().to_detectron2(key) or key: value for key, value in state().items()}
    raw = {f"backbone.bottom_up.{key}": value for key, value in net.items()}
    with pytest.raises(DataError, match="a detection model, not a pre-trained backbone"):
        recognize(raw, "x")


# Made to mislead.


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source": "x\x1b[2J"}, "source: got .* expected one line of text"),
        ({"encoder": "x\nnext  rm"}, "encoder: got .* expected one line of text"),
        ({"source_sha256": "x"}, "expected 64 hexadecimal digits"),
        ({"pixel_mean": [10**250, 0, 0]}, "expected three finite numbers"),
        ({"architecture": {**NARROW, "num_groups": 5}}, "has basic blocks, which have no groups"),
        ({"version": ["x" * 10**6] * 50}, "version a list"),
    ],
)
def test_a_forged_contract(
    change: dict[str, Any], reason: str, save: Save, save_pickle: Any, tmp_path: Path
) -> None:
    convert_file(save(official()), tmp_path / "out.pth")
    content = torch.load(tmp_path / "out.pth", weights_only=True)
    content["contract"].update(change)
    content["model"] = {key: value.numpy() for key, value in content["model"].items()}
    out = inspect_file(save_pickle(content))
    assert "not usable " in out
    assert re.search(reason, out.splitlines()[-1])
    assert "\x1b" not in out


def test_tied_tensors_as_safetensors(save: Save, tmp_path: Path) -> None:
    raw = state()
    raw["layer1.0.bn1.weight"] = raw["layer1.0.bn2.weight"]
    convert_file(save(raw), tmp_path / "a.safetensors")
    model = read_file(tmp_path / "a.safetensors")["model"]
    assert torch.equal(model["res2.0.conv1.norm.weight"], raw["layer1.0.bn2.weight"])


def test_inspect_names_no_default_where_there_is_none(save: Save) -> None:
    out = inspect_file(save({"a": state(), "b": state(seed=1)}))
    assert "; default" not in out
    assert "network       a: " in out and "; --encoder a" in out and "; --encoder b" in out
    assert "problem       2 networks" in out
