"""Every format that is written: bitwise round trips, and what a format cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torchvision.models import resnet as tv

from convert.convert_to_d2 import convert_file, main
from convert.read import read_file
from convert.verify import read_converted
from moco.common.errors import UserError
from tests.oracles.checkpoints import detectron2_layout, official, own
from tests.oracles.resnets import make_resnet

Save = Callable[..., Path]


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key].view(torch.int32), other[key].view(torch.int32)) for key in one
    )


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.slow
def test_any_round_trip_is_bitwise_equal(depth: int, save: Save, tmp_path: Path) -> None:
    checkpoint = official(depth=depth)
    prefix = "module.encoder_q."
    expected = {
        key.removeprefix(prefix): value
        for key, value in checkpoint["state_dict"].items()
        if key.startswith(prefix) and ".fc." not in key and "num_batches" not in key
    }
    name = save(checkpoint)
    steps = [
        ("a.pth", "detectron2"),
        ("b.pkl", "detectron2"),
        ("c.safetensors", "detectron2"),
        ("d.safetensors", "torchvision"),
        ("e.pth", "detectron2"),
        ("f.pth", "torchvision"),
        ("g.safetensors", "detectron2"),
    ]
    first = None
    for step, to in steps:
        report = convert_file(name, tmp_path / step, to=to)
        name = tmp_path / step
        assert all(check.bitwise for check in report.features.values())
        if to == "torchvision":
            assert same_bits(read_file(name), expected)
            continue
        converted = read_converted(name)
        first = first or converted
        assert same_bits(converted.model, first.model)
        if step < "d":  # the contract travels with Detectron2's names
            assert converted.contract == first.contract
            assert converted.contract.source == "facebookresearch/moco"


def test_torchvision_loads_its_own(save: Save, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = tv.resnet18(num_classes=3).train()
    net(torch.randn(2, 3, 64, 64))
    convert_file(save(net.state_dict()), tmp_path / "a.pth")
    convert_file(tmp_path / "a.pth", tmp_path / "b.pth", to="torchvision")
    again = tv.resnet18(num_classes=3)
    state = torch.load(tmp_path / "b.pth", weights_only=True)
    missing, unexpected = again.load_state_dict(state, strict=False)
    assert {key.split(".")[0] for key in missing if "num_batches" not in key} == {"fc"}
    assert unexpected == []
    again.fc = net.fc
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(again.eval()(image), net.eval()(image))


def test_safetensors_are_readable_by_the_package(save: Save, tmp_path: Path) -> None:
    convert_file(save(official()), tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.get_tensor("stem.conv1.weight").shape == (8, 3, 7, 7)


def test_a_plain_state_dict_says_what_it_lost(save: Save, tmp_path: Path) -> None:
    report = convert_file(save(own()), tmp_path / "a.pth", to="torchvision")
    (note,) = report.notes
    assert "--mean 102 127.5 153 --std 51 63.75 76.5" in note
    again = convert_file(
        tmp_path / "a.pth", tmp_path / "b.pth", mean=[102, 127.5, 153], std=[51, 63.75, 76.5]
    )
    assert again.contract.pixels.mean == (102.0, 127.5, 153.0)
    plain = convert_file(save(make_resnet().state_dict()), tmp_path / "c.pth", to="torchvision")
    assert not any("--mean" in note for note in plain.notes), "what everybody assumes"
    assert "-m benchmarks linear --config-file" in plain.next_command()


def test_overwrite(save: Save, tmp_path: Path) -> None:
    src = save(official())
    dst = tmp_path / "a.pth"
    convert_file(src, dst, to="torchvision")
    before = dst.read_bytes()
    with pytest.raises(UserError, match="--overwrite"):
        convert_file(src, dst)
    assert dst.read_bytes() == before
    with pytest.raises(UserError, match="output is the input file"):
        convert_file(dst, dst, overwrite=True)
    report = convert_file(src, dst, overwrite=True)
    assert report.notes == ["replaced a file of that name"]
    assert read_converted(dst).contract.source == "facebookresearch/moco"


def test_a_converted_file_keeps_its_contract_or_takes_the_command_lines(
    save: Save, tmp_path: Path
) -> None:
    src = save(official())
    first = convert_file(src, tmp_path / "a.pth", encoder="key").contract
    assert convert_file(tmp_path / "a.pth", tmp_path / "b.pkl", encoder="key").contract == first
    changed = convert_file(tmp_path / "a.pth", tmp_path / "c.pth", mean=[1, 2, 3]).contract
    assert (changed.pixels.mean, changed.pixels.std) == ((1.0, 2.0, 3.0), first.pixels.std)
    assert changed.source_sha256 == first.source_sha256
    for wrong in ({"encoder": "query"}, {"stem": "cifar"}):
        (flag,) = wrong
        with pytest.raises(UserError, match=f"--{flag} .* was converted with {flag}"):
            convert_file(tmp_path / "a.pth", tmp_path / "d.pth", **wrong)


def test_the_convention_of_nobodys_weights_must_be_given(save: Save, tmp_path: Path) -> None:
    """A backbone in Detectron2's names that says nothing about its input."""
    src = save(detectron2_layout(make_resnet(50), author="ACME"))
    full = {
        "mean": [103.53, 116.28, 123.675],
        "std": [1, 1, 1],
        "channel_order": "BGR",
        "stride_in_1x1": True,
    }
    contract = convert_file(src, tmp_path / "a.pth", **full).contract
    assert (contract.pixels.channel_order, contract.architecture.stride_in_1x1) == ("BGR", True)
    assert contract.pixels.std == (1.0, 1.0, 1.0)


def test_scale_of_the_command_line(save: Save, tmp_path: Path) -> None:
    src, dst = str(save(official())), str(tmp_path / "a.pth")
    options = "--mean 0 0.5 1 --std 0.2 0.4 1 --scale 1 --stride-in-1x1 no"
    main([src, dst, *options.split()])
    contract = read_converted(dst).contract
    assert contract.pixels.mean == (0.0, 127.5, 255.0)
    assert contract.pixels.std == (51.0, 102.0, 255.0)
