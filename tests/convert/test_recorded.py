"""Metadata in files: it is used, or refused where it contradicts the tensors."""

from __future__ import annotations

import argparse
import dataclasses
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


OVERRIDES = Overrides.of(
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
    with pytest.raises(DataError, match=r"to_rgb=False \(BGR\), mean=\[103\.53.*state dict; give"):
        recognize(raw, "x")
    assert recognize(raw, "x", OVERRIDES).contract.pixels.channel_order == "BGR"


RGB = (
    "img_norm_cfg = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True)"
)
CAFFE = "model = dict(backbone=dict(type='ResNet', depth=50, style='caffe'))"
BGR = "dict(mean=[103.53, 116.28, 123.675], std=[1.0, 1.0, 1.0], to_rgb=False)"
CIFAR = "dict(mean=[125.307, 122.961, 113.8575], std=[51.5865, 50.847, 51.255], to_rgb=False)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CAFFE, "style='caffe'"),
        (BGR, r"to_rgb=False \(BGR\), mean=\[103\.53"),
        (CIFAR, r"mean=\[125\.307.*std=\[51\.5865"),
        (RGB + CAFFE, "style='caffe'"),
    ],
)
def test_an_mm_configuration_that_contradicts(text: str, words: str) -> None:
    raw = {"meta": {"cfg": text}, "state_dict": state("backbone.", depth=50)}
    with pytest.raises(DataError, match=f"configuration has .*{words}.*give --mean --std --ch"):
        recognize(raw, "x")
    given = dataclasses.replace(OVERRIDES, options={"stride_in_1x1": True})
    assert recognize(raw, "x", given).contract.architecture.stride_in_1x1


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
    net = {resnet.to_detectron2(key) or key: value for key, value in state().items()}
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
    assert "no use " in out
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
