"""Networks with the tensors of plain ones: refused by name, or the report says what is assumed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.convert_to_d2 import convert_file
from convert.metadata import recorded_names
from convert.verify import build_backbone, read_converted
from moco.common.errors import DataError, UserError
from moco.modeling.soundness import fixed_image
from tests.oracles.resnets import as_if_trained

PLACES = {
    "arch": lambda name, state: {"state_dict": state, "arch": name, "version": 2, "epoch": 1},
    "args.model": lambda name, state: {"state_dict": state, "args": {"model": name}},
    "hyper_parameters.backbone.name": lambda name, state: {
        "state_dict": state,
        "hyper_parameters": {"backbone": {"name": name}},
    },
    "config.json next to it": lambda name, state: state,
}


def weights(name: str) -> dict[str, torch.Tensor]:
    """Timm's network of a name as if it was trained."""
    import timm

    torch.manual_seed(0)
    return as_if_trained(timm.create_model(name, num_classes=2)).state_dict()


def write(folder: Path, name: str, place: str) -> Path:
    """Write a file that names its network in a place, or not at all."""
    file = folder / "some.file"
    torch.save(PLACES.get(place, lambda name, state: state)(name, weights(name)), file)
    if place == "config.json next to it":
        (folder / "config.json").write_text(json.dumps({"architecture": name}))
    return file


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(("resnetblur18", place) for place in PLACES),
        ("resnet18d", "arch"),
        ("seresnet18", "arch"),
        ("resnet26", "arch"),  # a plain name, but other blocks
        pytest.param("resnet50_clip_gap", "arch", marks=pytest.mark.slow),  # no head by default
    ],
)
@pytest.mark.slow
def test_a_network_that_only_timm_has(name: str, place: str, tmp_path: Path) -> None:
    """Its features are those of timm's forward pass, although some have the tensors of a ResNet."""
    from timm import create_model

    file = write(tmp_path, name, place)
    report = convert_file(file, tmp_path / "out.pth")
    assert report.contract.d2_keys()["MODEL.TIMM.NAME"] == name
    assert f"{place} names {name}, which no family but timm has" in report.notes[0]
    source, image = create_model(name, num_classes=2).eval(), fixed_image((64, 96))
    source.load_state_dict(weights(name))
    converted = read_converted(tmp_path / "out.pth")
    backbone = build_backbone(converted.contract)
    backbone.load_state_dict(converted.model, strict=False)
    with torch.no_grad():
        expected = source.forward_intermediates(image, intermediates_only=True)[-4:]
        for value, other in zip(backbone.eval()(image).values(), expected, strict=True):
            torch.testing.assert_close(value, other)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("pit_ti_224", "arch"),
        ("crossvit_tiny_240", "args.model"),
        ("levit_128s", "arch"),
    ],
)
def test_a_network_without_a_pyramid_is_refused_by_its_name(
    name: str, place: str, tmp_path: Path
) -> None:
    file = write(tmp_path, name, place)
    with pytest.raises(DataError, match=rf"{place} names {name}, but .*its maps have") as error:
        convert_file(file, tmp_path / "out.pth")
    assert "\n" not in str(error.value) and not (tmp_path / "out.pth").exists()


def test_an_option_and_a_record_that_differ(tmp_path: Path) -> None:
    file = write(tmp_path, "resnetblur18", "arch")  # which has a ResNet-18's tensors
    convert_file(file, tmp_path / "out.pth", timm_model="resnetblur18.untrained")
    with pytest.raises(UserError, match=r"--timm-model resnet18: .* arch names resnetblur18"):
        convert_file(file, tmp_path / "other.pth", timm_model="resnet18")


def test_a_tag_that_timm_has_not(tmp_path: Path) -> None:
    file = write(tmp_path, "test_resnet", "")
    with pytest.raises(UserError, match="no tag 'none' of it"):
        convert_file(file, tmp_path / "out.pth", timm_model="test_resnet.none")


@pytest.mark.slow
def test_without_a_name_the_refusal_ends_with_those_that_fit(tmp_path: Path) -> None:
    state = {f"net.{key}": value for key, value in weights("seresnet18").items()}
    torch.save({"model": state, "step": torch.ones(2)}, tmp_path / "some.file")
    with pytest.raises(DataError, match="timm's seresnet18; give --timm-model with"):
        convert_file(tmp_path / "some.file", tmp_path / "out.pth")
    convert_file(tmp_path / "some.file", tmp_path / "out.pth", timm_model="seresnet18")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("resnet18", "args.model"),
        ("vit_tiny_patch16_224", "arch"),
        ("convnext_atto", "config.json next to it"),
        ("convnext_tiny_hnf", "config.json next to it"),  # whose name timm alone explains
        ("vit_small_patch14_reg4_dinov2", "config.json next to it"),  # its heads are timm's
    ],
)
@pytest.mark.slow
def test_a_plain_network_is_verified(name: str, place: str, tmp_path: Path) -> None:
    file = write(tmp_path, name, place)
    text = convert_file(file, tmp_path / "out.pth", mean=[127.5] * 3, std=[127.5] * 3).text()
    assert "\nassumed " not in text
    assert "timm's own network of that name agrees" in text or "hnf" not in name


@pytest.mark.parametrize(
    ("name", "assumed", "options"),
    [
        ("resnetblur18", "ReLU, max-pooling and strides as torchvision", {}),
        ("vit_tiny_patch16_224", "exact GELU, pre-norm", {"num_heads": 3}),
        ("convnext_atto", "exact GELU", {}),
    ],
)
def test_without_a_name_the_report_says_what_is_assumed(
    name: str, assumed: str, options: Any, tmp_path: Path
) -> None:
    file = write(tmp_path, name, "")
    text = convert_file(file, tmp_path / "out.pth", **options).text()
    (line,) = [line for line in text.splitlines() if line.startswith("assumed")]
    assert f" {assumed}" in line and "mean [123.675, 116.28, 103.53]" in line
    assert ("eps 1e-06" in line) == ("resnet" not in name)


@pytest.mark.slow
def test_pixels_that_no_file_says_have_their_option(tmp_path: Path) -> None:
    """Most vision transformers of timm have others than ImageNet's."""
    file = write(tmp_path, "vit_tiny_patch16_224", "")
    advice = "give --mean 127.5 127.5 127.5 --std 127.5 127.5 127.5"
    assert advice in convert_file(file, tmp_path / "out.pth", num_heads=3).text()
    given = {"mean": [127.5] * 3, "std": [127.5] * 3, "channel_order": "RGB"}
    text = convert_file(file, tmp_path / "out.pth", num_heads=3, **given).text()
    assert "--mean" not in text


def test_where_names_are() -> None:
    raw = {"arch": "timm/ResNet50.tv_in1k", "args": {"model": "a", "lr": 1}, "model": {"w": 1}}
    assert recorded_names(raw, "b.c") == {
        "config.json next to it": "b",
        "arch": "resnet50",
        "args.model": "a",
    }
    assert recorded_names(raw, None, tags=True)["arch"] == "resnet50.tv_in1k"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pixels"),
    [
        ("vit_tiny_patch16_224", "vit_tiny_patch16_224"),
        ("eva02_tiny_patch14_224.mim_in22k", "eva02_tiny_patch14_224.mim_in22k"),
        ("resnet18", "resnet18"),
    ],
)
def test_a_recorded_name_of_timm_gives_its_pixels(name: str, pixels: str) -> None:
    """Timm's train.py records None for the network's own mean and std."""
    from timm.models import get_pretrained_cfg

    from convert.families.timm import named_pixels

    notes: list[str] = []
    found = named_pixels({"args.model": name}, notes)
    own = get_pretrained_cfg(pixels)
    assert own is not None
    for values, expected in zip(found, (own.mean, own.std), strict=True):
        assert values == pytest.approx([255 * value for value in expected], abs=1e-5)
    assert notes == [f"mean and std are those of timm's {name}, which args.model names"]


@pytest.mark.slow
def test_timms_checkpoint_without_pixels_has_those_of_its_network(tmp_path: Path) -> None:
    args = argparse.Namespace(model="vit_tiny_patch16_224", mean=None, std=None)
    content = {"epoch": 1, "arch": args.model, "version": 2, "args": args}
    torch.save({**content, "state_dict": weights(args.model)}, tmp_path / "a.file")
    contract = convert_file(tmp_path / "a.file", tmp_path / "out.pth").contract
    assert (contract.pixels.mean, contract.pixels.std) == ((127.5,) * 3, (127.5,) * 3)
