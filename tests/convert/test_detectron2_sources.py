"""Weights that Detectron2 publishes or other converters wrote: MSRA's, torchvision's, MoCo's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fvcore.common.config import CfgNode
from torch import nn
from torchvision.models import resnet as tv

from convert import translate, verify
from convert.convert_to_d2 import convert_file, convert_in_memory
from convert.families import resnet
from convert.read import read_file
from convert.recognize import recognize
from convert.verify import build_backbone, read_converted
from moco.common.errors import DataError
from tests.convert.layout_checks import assert_has_pixels, assert_is
from tests.oracles.checkpoints import caffe2, detectron2_layout, official, official_names, own
from tests.oracles.resnets import make_resnet

MSRA_MEAN, MSRA_STD = (103.53, 116.28, 123.675), (1.0, 1.0, 1.0)


def assert_backbone(model: dict[str, torch.Tensor], net: nn.Module, folded: bool = False) -> None:
    """Assert that the converted tensors are the network's, under the official names."""
    expected = {
        official_names(key): value
        for key, value in net.state_dict().items()
        if not key.startswith("fc.") and "num_batches" not in key
    }
    assert model.keys() == expected.keys()
    for key, value in expected.items():
        if key.endswith(("running_mean", "running_var")) and folded:
            assert bool((model[key] == key.endswith("running_var")).all()), key
        elif not folded or not key.endswith((".norm.weight", ".norm.bias")):
            assert torch.equal(model[key], value), key


@pytest.mark.parametrize(("suffix", "wrapped", "protocol"), [(".pth", False, 2), (".pkl", True, 5)])
def test_msra_with_statistics(
    suffix: str, wrapped: bool, protocol: int, save_pickle: Any, tmp_path: Path
) -> None:
    net = make_resnet(50)
    blobs = caffe2(net)
    content = {"model": blobs, "__author__": "Caffe2"} if wrapped else blobs
    src = save_pickle({**content} if wrapped else blobs, protocol=protocol)
    report = convert_file(src, tmp_path / f"out{suffix}")
    converted = read_converted(tmp_path / f"out{suffix}")
    assert_backbone(converted.model, net)
    contract = converted.contract
    assert (contract.source, contract.encoder) == ("detectron2/MSRA", "single")
    assert (contract.pixels.mean, contract.pixels.std) == (MSRA_MEAN, MSRA_STD)
    assert (contract.pixels.channel_order, contract.architecture.stride_in_1x1) == ("BGR", True)
    network = contract.architecture
    assert (network.depth, network.num_groups, network.width_per_group) == (50, 1, 8)
    assert not contract.bn_folded and converted.notes == ()
    assert report.notes == [
        "conv1_b (up to 0.25) is dropped, as in Detectron2, whose networks have no such bias"
    ]
    assert all(check.bitwise for check in report.features.values())
    assert (
        "BGR, scale 0..255, mean [103.53, 116.28, 123.675], std [1, 1, 1], stride in the 1x1"
        in report.text()
    )


def test_msra_with_folded_statistics(save_pickle: Any, tmp_path: Path) -> None:
    net = make_resnet(50)
    report = convert_file(save_pickle(caffe2(net, folded=True)), tmp_path / "out.pth")
    converted = read_converted(tmp_path / "out.pth")
    assert_backbone(converted.model, net, folded=True)
    assert converted.contract.source == "detectron/MSRA (BN folded)"
    assert converted.contract.bn_folded
    assert converted.contract.pixels.channel_order == "BGR"
    assert converted.contract.architecture.stride_in_1x1
    assert "BN statistics start at 0 and 1" in converted.notes[0]
    assert "BN statistics start at 0 and 1 (106 tensors)" in report.text()
    # In eval mode it is the network with its statistics, up to the epsilon of a BN.
    kept = convert_in_memory(save_pickle(caffe2(net)))
    image = torch.randn(1, 3, 64, 64)
    outputs = []
    for one in (converted, kept):
        backbone = build_backbone(one.contract).eval()
        backbone.load_state_dict(one.model, strict=False)
        with torch.no_grad():
            outputs.append(backbone(image)["res5"])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-2, atol=1e-3)


@pytest.mark.detectron2
@pytest.mark.parametrize("folded", [False, True])
def test_msra_names_are_detectron2s_own(folded: bool, detectron2: Any) -> None:
    from detectron2.checkpoint.c2_model_loading import convert_basic_c2_names

    ours = resnet.SCHEMES["caffe2 folded" if folded else "caffe2"].rename
    tensors = ("w", "bn_s", "bn_b") if folded else ("w", "bn_gamma", "bn_running_var")
    names = ["conv1_w", *(f"res_conv1_{tensor}" for tensor in tensors[1:])]
    for stage, blocks in zip((2, 3, 4, 5), (3, 8, 36, 3), strict=True):  # ResNet-152
        for block in range(blocks):
            for part in ("1", "2a", "2b", "2c"):
                names += [f"res{stage}_{block}_branch{part}_{tensor}" for tensor in tensors]
    for key, theirs in zip(names, convert_basic_c2_names(names), strict=True):
        assert resnet.ResNetFamily().to_detectron2(ours(key) or "") == theirs


@pytest.mark.parametrize(
    ("author", "head", "source"),
    [
        # Golden verdicts have the other authors.
        ("torchvision", "linear head", "detectron2/torchvision"),
        ("MOCO", "MLP head", "facebookresearch/moco (converted)"),
        ("MOCO", "no fc", "facebookresearch/moco (converted)"),
    ],
)
def test_detectron2s_layout_of_known_authors(author: str, head: str, source: str) -> None:
    net = make_resnet()
    if head == "MLP head":
        net.fc = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), net.fc)
    elif head == "no fc":
        net.fc = nn.Identity()
    found = recognize(detectron2_layout(net, author), "a.file")
    assert (found.contract.source, found.contract.encoder, found.head) == (source, "single", head)
    assert found.dropped.get("head", 0) == len(list(net.fc.parameters()))
    assert found.dropped["batch counter"] == 20
    assert_is(found, net, 100)
    assert_has_pixels(found)


@pytest.mark.parametrize("kind", ["torchvision", "official", "own", "msra", "layout"])
def test_in_memory_is_what_a_file_would_hold(
    kind: str, save: Any, save_pickle: Any, tmp_path: Path
) -> None:
    src = {
        "torchvision": lambda: save(make_resnet(18).state_dict()),
        "official": lambda: save(official()),
        "own": lambda: save(own()),
        "msra": lambda: save_pickle(caffe2(make_resnet(50))),
        "layout": lambda: save_pickle(detectron2_layout(make_resnet(50))),
    }[kind]()
    report = convert_file(src, tmp_path / "out.pth")
    expected = read_converted(tmp_path / "out.pth")
    for converted in (convert_in_memory(src), convert_in_memory(src, read_file(src))):
        assert converted.contract == expected.contract
        assert converted.model.keys() == expected.model.keys()
        for key, value in expected.model.items():
            assert torch.equal(converted.model[key], value)
        first, *rest = converted.notes
        assert f"converted: {report.contract.source} checkpoint" in first
        assert f"{report.mapped} tensors; features of one image bitwise equal" in first
        assert ("query encoder" in first) == (kind in ("official", "own"))
        assert rest == report.notes


def test_in_memory_is_verified(save: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    src = save(official())
    build = verify.build_backbone

    def other(contract: Any) -> nn.Module:
        net = build(contract)
        net.res3[1].conv1.dilation = net.res3[1].conv1.padding = (2, 2)
        return net

    monkeypatch.setattr(verify, "build_backbone", other)
    with pytest.raises(DataError, match="verification failed at res3"):
        convert_in_memory(src)


def test_torchvisions_v2_is_named_by_the_hash_of_its_file(
    save: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = save(make_resnet().state_dict())
    assert not any("IMAGENET1K_V2" in note for note in convert_in_memory(src).notes)
    monkeypatch.setattr(translate, "digests", lambda path: ("11ad3fa6" + "0" * 56, {}))
    assert any("IMAGENET1K_V2" in note for note in convert_in_memory(src).notes)


@pytest.mark.detectron2
@pytest.mark.parametrize("folded", [False, True])
def test_detectron2_loads_the_same_tensors(folded: bool, save_pickle: Any, detectron2: Any) -> None:
    """A full-size R-50 in MSRA's layout: its checkpointer and ours fill a C4 detector alike."""
    from detectron2.checkpoint import DetectionCheckpointer
    from detectron2.config import get_cfg
    from detectron2.modeling import build_model

    torch.manual_seed(0)
    net = tv.resnet50(num_classes=10)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-1, 1)
                module.running_var.uniform_(0.5, 2)
    path = save_pickle(caffe2(net, folded=folded), "R-50.pkl")
    converted = convert_in_memory(path)
    keys: CfgNode = get_cfg()
    keys.MODEL.DEVICE = "cpu"
    keys.MODEL.BACKBONE.FREEZE_AT = 0
    keys.MODEL.RESNETS.NORM = "BN"
    values = converted.contract.d2_keys()
    del values["MODEL.RESNETS.STEM"]
    defaults = get_cfg()
    for key, value in values.items():
        node = defaults
        for part in key.split("."):
            node = node[part]
        # The contract of MSRA's network is what Detectron2's defaults were made for.
        assert node == value, key
    theirs = build_model(keys)
    DetectionCheckpointer(theirs).load(str(path))
    state = theirs.state_dict()
    for key, value in converted.model.items():
        place = ("roi_heads." if key.startswith("res5") else "backbone.") + key
        assert torch.equal(state[place], value), key
