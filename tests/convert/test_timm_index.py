"""timm's networks that fit a file, and those of other features that fit it as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torchvision.models import get_model, get_model_weights

from convert.convert_to_d2 import convert_file, convert_in_memory
from convert.families.timm_index import digests, format_names, index
from convert.inspect_file import inspect_file
from convert.modeling.timm_network import whole_network
from convert.verify import build_backbone, read_converted
from moco.common.errors import DataError, UserError
from moco.modeling.soundness import fixed_image
from tests.convert.test_named import weights
from tests.golden.regenerate_timm_index import has_maps, shapes_of
from tests.oracles.resnets import as_if_trained

same_timm = pytest.mark.skipif(
    timm.__version__ != index().version, reason="the index is of another version of timm"
)
SPREAD = timm.list_models()[::46]


def of_torchvision(name: str) -> nn.Module:
    """Return torchvision's network as if it was trained."""
    torch.manual_seed(0)
    return as_if_trained(get_model(name, num_classes=7).eval())


@same_timm
def test_the_index_has_every_network() -> None:
    assert [*index().rows] == timm.list_models()


@same_timm
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.slow] if i % 6 else []) for i, x in enumerate(SPREAD)],
)
def test_lines_are_those_of_the_installed_timm(name: str) -> None:
    row, shapes = index().rows[name], shapes_of(whole_network(name))
    assert tuple(digests(shapes, index().classifiers)) == row[:3]
    assert (row.maps == "maps") == has_maps(name)


def test_networks_of_equal_tensors() -> None:
    """Counted by hand from the names and shapes of timm 1.0.31."""
    its = index()
    groups = [its.named(exact=row.exact) for row in its.rows.values()]
    assert ["efficientnet_lite0", "tf_efficientnet_lite0"] in groups
    assert its.twins("resnet50") == ["resnetaa50", "resnetblur50"]
    assert its.twins("efficientnet_b0") == ["efficientnet_blur_b0", "tf_efficientnet_b0"]
    assert its.twins("deit_base_patch16_224") == []  # vit_base_patch16_224 is the same network
    assert its.twins("regnety_004") == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "tf_efficientnet_lite0",
            "its tensors are those of timm's efficientnet_lite0, tf_efficientnet_lite0, whose "
            "features differ; give --timm-model with the name of its network",
        ),
        ("seresnet18", "are those of timm's seresnet18; give --timm-model with the name of its"),
        ("mixer_s32_224", "are those of timm's mixer_s32_224; give --timm-model with the name of"),
        ("levit_128s", "are those of timm's levit_128s, without maps for a pyramid"),
    ],
)
@pytest.mark.parametrize("start", ["", "student.net."])
def test_a_refusal_names_the_networks_that_fit(
    name: str, text: str, start: str, tmp_path: Path
) -> None:
    state = {f"{start}{key}": value for key, value in weights(name).items()}
    torch.save({"model": state, "step": torch.ones(2)}, tmp_path / "some.file")
    with pytest.raises(DataError) as error:
        convert_file(tmp_path / "some.file", tmp_path / "out.pth")
    assert text in str(error.value)


def test_networks_of_another_size_or_with_other_names(tmp_path: Path) -> None:
    state = weights("test_efficientnet_ln")
    other = {"head.mlp.weight": torch.ones(3, 3), **state}
    renamed = {f"x_{key}": value for key, value in state.items()}
    for content, text in (
        (
            other,
            "are like those of timm's test_efficientnet_gn, test_efficientnet_ln, but its size",
        ),
        (
            renamed,
            "have, in order, the shapes of timm's test_efficientnet_gn, test_efficientnet_ln",
        ),
    ):
        torch.save(content, tmp_path / "some.file")
        with pytest.raises(DataError, match=text):
            convert_file(tmp_path / "some.file", tmp_path / "out.pth")


def test_another_version_of_timm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(weights("seresnet18"), tmp_path / "some.file")
    monkeypatch.setattr("importlib.metadata.version", lambda package: "9.9")
    text = rf"timm's seresnet18 \(of timm {index().version}; 9.9 is installed\); give"
    with pytest.raises(DataError, match=text):
        convert_file(tmp_path / "some.file", tmp_path / "out.pth")


@same_timm
def test_more_than_five_names_are_counted() -> None:
    assert format_names([*"abcdefg"]) == "timm's a, b, c, d, e and 2 more"


@pytest.mark.parametrize("name", ["squeezenet1_1", "shufflenet_v2_x0_5"])
def test_a_network_of_torchvision_that_no_family_has(name: str, tmp_path: Path) -> None:
    torch.save(get_model(name).state_dict(), tmp_path / "some.file")
    with pytest.raises(DataError, match=f"torchvision's {name} by the names and shapes"):
        convert_file(tmp_path / "some.file", tmp_path / "out.pth")


@pytest.mark.parametrize(
    ("name", "options", "twins"),
    [
        ("resnet18", {}, "could also be timm's resnetblur18, whose features differ"),
        (
            "test_efficientnet_gn",
            {"timm_model": "test_efficientnet_gn"},
            "could also be timm's test_efficientnet_ln, whose features differ",
        ),
    ],
)
def test_nothing_is_verified_if_networks_of_other_features_fit(
    name: str, options: dict[str, Any], twins: str, tmp_path: Path
) -> None:
    """A name in the file decides; an option does not, because it is a guess as well."""
    plain, named = tmp_path / "plain.pth", tmp_path / "named.pth"
    state = weights(name)
    torch.save(state, plain)
    torch.save({"state_dict": state, "arch": name, "version": 2, "epoch": 1}, named)
    text = convert_file(plain, tmp_path / "out.pth", **options).text()
    (assumed,) = [line for line in text.splitlines() if line.startswith("assumed")]
    assert twins in assumed and "\nverified" not in text and "\nequal " in text
    (note, *_) = convert_in_memory(plain, **options).notes
    assert twins in note
    if not options:
        assert twins in inspect_file(plain)
    text = convert_file(named, tmp_path / "out.pth").text()
    assert "\nverified" in text and "whose features differ" not in text


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"activation": "gelu"}])
def test_vision_transformers_that_differ(options: dict[str, Any], tmp_path: Path) -> None:
    """They differ in the activation, so that this option decides."""
    torch.save(weights("vit_base_patch16_gap_224"), tmp_path / "a.pth")
    report = convert_file(tmp_path / "a.pth", tmp_path / "out.pth", num_heads=12, **options)
    both = "any of timm's vit_base_patch16_gap_224, vit_base_patch16_siglip_gap_224, whose features"
    assert (both in report.assumed) == (not options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "timm_name"),
    [
        ("mobilenet_v2", "mobilenetv2_100"),
        ("efficientnet_b1", "efficientnet_b1"),  # tf_efficientnet_b1 pads otherwise
        ("mnasnet1_0", "mnasnet_100"),
        ("mobilenet_v3_small", "mobilenetv3_small_100"),  # with another epsilon
        ("regnet_y_400mf", "regnety_004"),  # by timm's own map of names
    ],
)
@pytest.mark.parametrize("start", ["", "module.backbone."])
def test_a_network_of_torchvision_with_other_names(
    name: str, timm_name: str, start: str, tmp_path: Path
) -> None:
    """The converted backbone has the maps of torchvision's own network, and its pixels.

    Those of timm's EfficientNet-B1 are others.
    """
    net = of_torchvision(name)
    state = {f"{start}{key}": value for key, value in net.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "a.pth")
    report = convert_file(tmp_path / "a.pth", tmp_path / "out.pth")
    assert report.contract.d2_keys()["MODEL.TIMM.NAME"] == timm_name
    assert report.contract.source == "torchvision"
    pixels = get_model_weights(name).DEFAULT.transforms()
    assert report.contract.pixels.mean == pytest.approx([255 * x for x in pixels.mean])
    assert report.contract.pixels.std == pytest.approx([255 * x for x in pixels.std])
    assert "mean and std are" not in report.text()
    assert f"torchvision's {name}" in report.notes[0]
    assert "\nverified" not in report.text() and f"torchvision's {name}" in report.assumed
    converted = read_converted(tmp_path / "out.pth")
    backbone = build_backbone(converted.contract)
    backbone.load_state_dict(converted.model, strict=False)
    outputs: list[torch.Tensor] = []
    for module in net.modules():
        module.register_forward_hook(lambda module, inputs, output: outputs.append(output.clone()))
    image = fixed_image((64, 96))
    with torch.no_grad():
        net(image)
        for value in backbone.eval()(image).values():
            same_size = [each for each in outputs if each.shape == value.shape]
            assert min(float((each - value).abs().max()) for each in same_size) < 1e-5


def test_two_networks_of_torchvision(tmp_path: Path) -> None:
    state = of_torchvision("mobilenet_v2").state_dict()
    torch.save({"model": state, "model_ema": state}, tmp_path / "a.pth")
    with pytest.raises(DataError, match=r"2 networks of torchvision .* in 'model', 'model_ema'; "):
        convert_file(tmp_path / "a.pth", tmp_path / "out.pth")


def test_a_network_that_timm_builds_in_two_ways(tmp_path: Path) -> None:
    """fbnetc_100 has another epsilon if its published weights are loaded."""
    state = weights("fbnetc_100")
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(UserError, match="timm builds another network for its published weights"):
        convert_file(tmp_path / "a.pth", tmp_path / "out.pth", timm_model="fbnetc_100")
    torch.save({"state_dict": state, "arch": "fbnetc_100", "version": 2}, tmp_path / "a.pth")
    with pytest.raises(DataError, match="timm builds another network for its published weights"):
        convert_file(tmp_path / "a.pth", tmp_path / "out.pth")
