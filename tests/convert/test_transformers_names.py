"""ResNets and ConvNeXts of `transformers`, converted by their names; Meta's DINOv3 ConvNeXt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convert.convert_to_d2 import convert_file
from convert.modeling.convnext import ConvNeXt
from convert.verify import build_backbone, read_converted
from moco.common.errors import DataError
from moco.modeling.soundness import fixed_image
from tests.oracles import layouts_transformers as theirs

pytest.importorskip("transformers")


def convert(net: nn.Module, folder: Path, **config: Any) -> Any:
    """Convert what a network saves, next to its configuration, and return both feature lists."""
    torch.save(net.state_dict(), folder / "pytorch_model.bin")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    report = convert_file(folder / "pytorch_model.bin", folder / "out.pth")
    return report, features(folder / "out.pth"), theirs.stages(net, fixed_image((64, 96)))


def features(path: Path) -> list[Tensor]:
    """Return res2 to res5 of the converted backbone."""
    converted = read_converted(path)
    backbone = build_backbone(converted.contract)
    backbone.load_state_dict(converted.model, strict=False)
    with torch.no_grad():
        found = backbone.eval()(fixed_image((64, 96)))
    return [found[name] for name in ("res2", "res3", "res4", "res5")]


def assert_equal(made: list[Tensor], expected: list[Tensor]) -> None:
    for value, other in zip(made, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("config", "depth"),
    [({"layer_type": "basic"}, 18), ({}, 50), ({"downsample_in_bottleneck": True}, 50)],
)
def test_resnets(config: dict[str, Any], depth: int, head: bool, tmp_path: Path) -> None:
    net = theirs.resnet(head=head, **config)
    report, made, expected = convert(net, tmp_path, model_type="resnet", **config)
    assert_equal(made, expected)
    assert report.contract.source == "huggingface/transformers"
    architecture = report.contract.architecture
    assert architecture.depth == depth
    assert architecture.stride_in_1x1 == config.get("downsample_in_bottleneck", False)
    assert report.dropped.get("classifier", 0) == 2 * head
    assert not any("assuming the stride" in note for note in report.notes)


def test_a_resnet_without_its_configuration(tmp_path: Path) -> None:
    report, made, expected = convert(theirs.resnet(), tmp_path)
    assert_equal(made, expected)
    assert any("assuming the stride in the 3x3" in note for note in report.notes)


@pytest.mark.parametrize(
    ("key", "value"),
    [("downsample_in_first_stage", True), ("hidden_act", "gelu"), ("model_type", "regnet")],
)
def test_another_resnet_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a 'regnet'" if key == "model_type" else f"{key} "):
        convert(theirs.resnet(), tmp_path, **{"model_type": "resnet", key: value})


def test_a_regnet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="RegNets are not supported"):
        convert(theirs.regnet(), tmp_path)


@pytest.mark.parametrize("kind", ["v1", "v1 with a head", "v2", "dinov3", "dinov3 backbone"])
def test_convnexts(kind: str, tmp_path: Path) -> None:
    net = theirs.convnext(kind)
    config = {"model_type": "convnext", "hidden_act": "gelu", "layer_norm_eps": 1e-12}
    if "dinov3" in kind:
        config |= {"layer_norm_eps": theirs.DINOV3_EPS}
    report, made, expected = convert(net, tmp_path, **config)
    assert_equal(made, expected)
    architecture = report.contract.architecture
    assert report.contract.source == "huggingface/transformers"
    assert (architecture.grn, architecture.layer_scale) == (kind == "v2", kind != "v2")
    assert architecture.layer_norm_eps == (theirs.DINOV3_EPS if "dinov3" in kind else 1e-6)


def test_another_activation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="hidden_act 'relu'"):
        convert(theirs.convnext("v1"), tmp_path, model_type="convnext", hidden_act="relu")


def test_metas_dinov3(tmp_path: Path) -> None:
    """Its names are the official ones, with a second name of the final norm."""
    net = theirs.convnext("dinov3")
    torch.save(theirs.as_meta_names(net.state_dict()), tmp_path / "a.pth")
    report = convert_file(tmp_path / "a.pth", tmp_path / "out.pth")
    assert report.contract.source == "facebookresearch/dinov3"
    assert report.dropped == {"final norm": 4}
    own = ConvNeXt(report.contract.architecture)
    own.load_state_dict(read_converted(tmp_path / "out.pth").model)
    theirs.set_eps(net, 1e-6)
    with torch.no_grad():
        made = list(own.eval()(fixed_image((64, 96))).values())
    assert_equal(made, theirs.stages(net, fixed_image((64, 96))))
