"""Conversion of checkpoints to verified files: sources, formats, overrides, command line."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from convert import verify, write
from convert.convert_to_d2 import convert_file, main
from convert.families import resnet
from convert.families.base import Names
from convert.modeling import resnet as backbone
from convert.recognize import recognize
from convert.verify import read_converted
from moco.common.errors import DataError
from moco.common.files import sha256_file
from moco.engine.checkpoint import FORMAT, checkpoint_name, save_checkpoint
from moco.modeling.encoder import EncoderSpec, build_encoder, load_backbone
from tests.oracles.checkpoints import official, official_names, own
from tests.oracles.resnets import make_resnet

IMAGENET_MEAN, IMAGENET_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)

Save = Callable[..., Path]


def expected_model(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return what the official converter writes, without head and counters."""
    return {
        official_names(key.removeprefix(prefix)): value
        for key, value in state.items()
        if key.startswith(prefix) and ".fc." not in "." + key and "num_batches" not in key
    }


def assert_same_model(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


@pytest.mark.parametrize(("version", "suffix"), [(1, ".pth"), (2, ".pkl")])
def test_official_moco(version: int, suffix: str, save: Save, tmp_path: Path) -> None:
    checkpoint = official(version)
    src, dst = save(checkpoint), tmp_path / "new" / f"out{suffix}"
    report = convert_file(src, dst)
    converted = read_converted(dst)
    assert_same_model(
        converted.model, expected_model(checkpoint["state_dict"], "module.encoder_q.")
    )
    contract = converted.contract
    assert contract == report.contract
    assert (contract.source, contract.encoder) == ("facebookresearch/moco", "query")
    assert (contract.pixels.mean, contract.pixels.std) == (IMAGENET_MEAN, IMAGENET_STD)
    assert (contract.pixels.channel_order, contract.architecture.stride_in_1x1) == ("RGB", False)
    network = contract.architecture
    assert (network.depth, network.stem, network.stem_out_channels) == (18, "imagenet", 8)
    assert contract.source_sha256 == sha256_file(src)
    assert report.epoch == 200
    assert report.head == {1: "linear head", 2: "MLP head"}[version]
    assert all(check.bitwise and check.max_abs_diff == 0 for check in report.features.values())
    assert report.output_sha256 == sha256_file(dst)


@pytest.mark.parametrize("holder", ["runs/best", "module.student", "a/b.module.c"])
def test_a_network_below_a_key_of_any_name(holder: str, save: Save, tmp_path: Path) -> None:
    """A slash in the key of a dict, or a wrapper's name, is no level of nesting."""
    state = make_resnet(18).state_dict()
    convert_file(save({holder: {"net": state}}), tmp_path / "below.pth")
    convert_file(save(state, "plain.file"), tmp_path / "plain.pth")
    below, plain = (read_converted(tmp_path / f"{name}.pth").model for name in ("below", "plain"))
    assert below.keys() == plain.keys()
    assert all(torch.equal(below[key], plain[key]) for key in plain)


def test_pkl_is_the_official_converters_and_numpy_only(save: Save, tmp_path: Path) -> None:
    convert_file(save(official()), tmp_path / "out.pkl")
    with open(tmp_path / "out.pkl", "rb") as file:
        content = pickle.load(file, encoding="latin1")  # as DetectionCheckpointer opens it
    assert set(content) == {"model", "__author__", "matching_heuristics", "contract"}
    assert content["matching_heuristics"] is True
    assert all(type(value) is np.ndarray for value in content["model"].values())
    assert all(value.flags.writeable for value in content["model"].values())


@pytest.mark.parametrize(
    ("arch", "stem", "width"),
    [
        ("resnet10", "stride2", 0.375),
        ("resnet18", "cifar", 0.125),
        ("resnet50", "imagenet", 0.125),
        ("resnet101", "imagenet", 0.125),
        ("resnext50_32x8d", "imagenet", 0.125),
        ("resnext50_32x8d", "imagenet", 0.25),
    ],
)
def test_what_pretraining_really_writes(arch: str, stem: str, width: float, tmp_path: Path) -> None:
    spec = EncoderSpec(arch, stem, width)
    encoder = build_encoder(spec, dim=16, mlp=True, bn_splits=2)
    encoder.to(memory_format=torch.channels_last)
    with torch.no_grad():
        encoder.train()(torch.randn(4, 3, 32, 32))  # moves the running statistics
    state = {
        f"module.encoder_{name}.{key}": value
        for name in "qk"
        for key, value in encoder.state_dict().items()
    }
    checkpoint = {
        **own(),
        "arch": arch,
        "state_dict": {**state, "module.queue": torch.randn(16, 32)},
        "format": FORMAT,
        "encoder": {**dataclasses.asdict(spec), "dim": 16, "mlp": True},
    }
    save_checkpoint(tmp_path / checkpoint_name(3), checkpoint)
    report = convert_file(tmp_path / checkpoint_name(3), tmp_path / "out.pth")
    assert report.notes == []
    converted = read_converted(tmp_path / "out.pth")
    backbone = verify.build_backbone(converted.contract).eval()
    backbone.load_state_dict(converted.model, strict=False)
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        pooled = backbone(image)["res5"].mean(dim=(2, 3))
        expected = load_backbone(spec, encoder.state_dict())(image)
    torch.testing.assert_close(pooled, expected)


def test_a_3x3_stem_of_unknown_stride_is_said_aloud(
    save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src = save(make_resnet(stem="stride2").state_dict())
    assert main([str(src), str(tmp_path / "out.pth")]) == 0
    assert "assuming 'cifar'" in capsys.readouterr().out
    assert read_converted(tmp_path / "out.pth").contract.architecture.stem == "cifar"
    report = convert_file(src, tmp_path / "out.pth", stem="stride2")
    assert report.contract.architecture.stem == "stride2"
    assert report.notes[-1] == "replaced a file of that name"
    (warning,) = report.warnings
    assert "3x3 stem rarely" in warning


def test_views_do_not_drag_their_storage_along(save: Save, tmp_path: Path) -> None:
    state = make_resnet().state_dict()
    plain = convert_file(save(state, "a"), tmp_path / "a.pth")
    big = torch.zeros(2_000_000)
    big[:8] = state["bn1.weight"]
    views = {**state, "bn1.weight": big[:8]}
    views["conv1.weight"] = state["conv1.weight"].to(memory_format=torch.channels_last)
    convert_file(save(views, "b"), tmp_path / "b.pth")
    size_a, size_b = ((tmp_path / n).stat().st_size for n in ("a.pth", "b.pth"))
    assert abs(size_a - size_b) < 1000
    assert_same_model(
        read_converted(tmp_path / "b.pth").model, read_converted(plain.output_path).model
    )


# A failed verification leaves nothing behind and what was there untouched.


def assert_fails_without_a_trace(src: Path, tmp_path: Path, reason: str, **kwargs: Any) -> None:
    old = tmp_path / "old.pth"
    before, files = old.read_bytes(), sorted(tmp_path.rglob("*"))
    for dst in (old, tmp_path / "new.pth"):
        with pytest.raises(DataError, match=reason):
            convert_file(src, dst, **kwargs)
    assert old.read_bytes() == before
    assert sorted(tmp_path.rglob("*")) == files


@pytest.fixture
def converted_before(save: Save, tmp_path: Path) -> Path:
    src = save(official())
    convert_file(src, tmp_path / "old.pth")
    return src


def test_a_wrong_row_of_the_table_is_seen_in_the_features(
    converted_before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both have the same shape, and swapping them both ways survives the round trip.
    block = {new: old for old, new in resnet.BLOCK_MODULES.items()}
    block |= {"conv2.norm": "bn1", "conv1.norm": "bn2"}
    stages = [f"{stage}.*" for stage in resnet.STAGES.values()]
    swapped = resnet.modules(("stem.conv1", "stem.conv1.norm"), stages, block)
    monkeypatch.setattr(resnet.ResNetFamily, "detectron2", Names(resnet.tensors(swapped)))
    assert_fails_without_a_trace(
        converted_before, tmp_path, "failed at res2 of the embedded backbone: features differ"
    )


def test_one_changed_bit_is_seen_when_read_back(
    converted_before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = write.write

    def corrupt(path: Path, converted: verify.Converted, to: str) -> None:
        converted = copy.deepcopy(converted)
        converted.model["res3.0.conv1.weight"].view(-1).view(torch.int32)[0] ^= 1
        original(path, converted, to)

    monkeypatch.setattr(write, "write", corrupt)
    assert_fails_without_a_trace(
        converted_before, tmp_path, r"verification failed.*'layer2\.0\.conv1\.weight'"
    )


@pytest.mark.parametrize(
    ("change", "where"),
    [({"stride_in_1x1": True}, "res3"), ({"num_groups": 2, "width_per_group": 4}, None)],
)
def test_a_wrong_contract_is_seen_in_the_features(
    change: dict[str, Any], where: str | None
) -> None:
    found = recognize(make_resnet(50).state_dict(), "x")
    contract, right = found.contract, found.contract.architecture
    model = {
        resnet.ResNetFamily().to_detectron2(key) or "": value for key, value in found.state.items()
    }
    good = verify.Converted(model, contract)
    assert verify.check_features(found.state, right, good, "x")["res5"].bitwise
    wrong = dataclasses.replace(contract, architecture=dataclasses.replace(right, **change))
    if where is None:
        with pytest.raises(DataError, match="shape"):
            verify.check_model(model, wrong, "x")
    else:
        with pytest.raises(DataError, match=f"verification failed at {where}"):
            verify.check_features(found.state, right, verify.Converted(model, wrong), "x")


def test_a_wrong_stride_is_seen_in_the_features(
    converted_before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(backbone.STEMS, "imagenet", (7, 2, 2))  # no max-pool
    assert_fails_without_a_trace(
        converted_before, tmp_path, "verification failed at stem of .* do not both have stride 2"
    )


def test_minus_zero_is_another_bit_pattern(
    converted_before: Path, save: Save, tmp_path: Path
) -> None:
    converted = read_converted(tmp_path / "old.pth")
    source = recognize(official(), "x").state
    verify.check_round_trip(source, converted, "x")
    source["bn1.bias"] = torch.zeros(8)
    converted.model["stem.conv1.norm.bias"] = -torch.zeros(8)
    with pytest.raises(DataError, match=r"'bn1\.bias'"):
        verify.check_round_trip(source, converted, "x")


def test_features_that_are_not_finite(converted_before: Path, save: Save, tmp_path: Path) -> None:
    checkpoint = official()
    checkpoint["state_dict"]["module.encoder_q.layer3.0.bn1.weight"].fill_(3e38)
    src = save(checkpoint, "big")
    assert_fails_without_a_trace(
        src, tmp_path, "failed at res4 of .*: the source's own features are not"
    )
