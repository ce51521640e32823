"""DINOv3's vision transformers: features equal to timm's and transformers' own classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convert.convert_to_d2 import convert_file
from convert.families.vit import FEATURE
from convert.verify import build_backbone, read_converted
from moco.common.errors import DataError, UserError
from moco.modeling.soundness import fixed_image
from tests.oracles.dinov3 import (
    HEADS,
    IMAGE,
    MLP,
    TOKENS,
    WIDTH,
    as_map,
    metas,
    old_names,
    stored_periods,
    transformers_dinov3,
    transformers_map,
)
from tests.oracles.layouts_vit import dinov3_state, timm_dinov3


def converted_map(source: Any, folder: Path, name: str = "a.file", **options: Any) -> Tensor:
    """Convert a state dict, and return the last map of an image that is not square."""
    torch.save(source, folder / name)
    report = convert_file(folder / name, folder / "out.pth", **options)
    assert report.features[FEATURE].max_abs_diff < 1e-5
    converted = read_converted(folder / "out.pth")
    net = build_backbone(converted.contract)
    net.load_state_dict(converted.model, strict=True)
    with torch.no_grad():
        features: Tensor = net.eval()(fixed_image(IMAGE))[FEATURE]
    return features


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("gated", [False, True], ids=["mlp", "swiglu"])
@pytest.mark.parametrize("qkv_bias", [False, True], ids=["", "qkvb"])
def test_timms_own_class_gives_the_same(gated: bool, qkv_bias: bool, tmp_path: Path) -> None:
    net: Any = timm_dinov3(gated=gated, qkv_bias=qkv_bias)
    features = converted_map(net.state_dict(), tmp_path, num_heads=HEADS)
    net.norm = nn.Identity()
    with torch.no_grad():
        assert_close(features, as_map(net.forward_features(fixed_image(IMAGE)), fixed_image(IMAGE)))
    a = read_converted(tmp_path / "out.pth").contract.architecture
    assert (a.rotary, a.tokens, a.layer_norm_eps, a.layer_scale) == (True, TOKENS, 1e-5, True)
    assert (a.swiglu, a.mlp_dim, a.qkv_bias) == (gated, MLP, qkv_bias)


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True], ids=["mlp", "swiglu"])
@pytest.mark.parametrize("names", [dict, old_names, metas], ids=["new", "old", "meta"])
def test_transformers_own_class_gives_the_same(
    names: Callable[[dict[str, Tensor]], dict[str, Tensor]], gated: bool, tmp_path: Path
) -> None:
    net: Any = transformers_dinov3(gated=gated)
    features = converted_map(names(net.state_dict()), tmp_path, num_heads=HEADS)
    if names is metas:
        stored_periods(net)
    assert_close(features, transformers_map(net, fixed_image(IMAGE)))


def made(**changes: Any) -> dict[str, Tensor]:
    """Return a state dict in Meta's names, with changes; None removes a tensor."""
    state = {**dinov3_state(timm_dinov3()), **changes}
    return {name: value for name, value in state.items() if value is not None}


def test_biases_are_left_out_if_all_are_zero_under_their_masks(tmp_path: Path) -> None:
    torch.save(made(), tmp_path / "a.file")
    report = convert_file(tmp_path / "a.file", tmp_path / "out.pth", num_heads=HEADS)
    converted = read_converted(tmp_path / "out.pth")
    assert not converted.contract.architecture.qkv_bias
    assert any("all are zero" in note for note in report.notes)
    assert torch.equal(converted.model["rope.periods"], made()["rope_embed.periods"].float())
    bias = made()["blocks.1.attn.qkv.bias"]
    bias[0] = 0.5
    torch.save(made(**{"blocks.1.attn.qkv.bias": bias}), tmp_path / "a.file")
    convert_file(tmp_path / "a.file", tmp_path / "out.pth", num_heads=HEADS)
    kept = read_converted(tmp_path / "out.pth").model["blocks.1.attn.qkv.bias"]
    assert kept[0] == 0.5 and not kept[1:].any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"blocks.1.attn.qkv.bias_mask": torch.full((3 * WIDTH,), torch.nan)}, "bias_mask.*NaN"),
        ({"blocks.1.attn.qkv.bias": None}, "bias_mask"),
        ({"cls_token": None}, "without a class token"),
        ({"rope_embed.periods": torch.ones(3)}, r"shape \[3\].*periods"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Tensor | None], words: str, tmp_path: Path
) -> None:
    torch.save(made(**changes), tmp_path / "a.file")
    with pytest.raises(DataError, match=words):
        convert_file(tmp_path / "a.file", tmp_path / "out.pth", num_heads=HEADS)


@pytest.mark.parametrize(
    ("config", "words"), [({"rope_theta": 50.0}, "rope_theta 50"), ({"hidden_act": "silu"}, "gelu")]
)
def test_a_configuration_that_contradicts_it(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    torch.save(made(), tmp_path / "a.file")
    config = {
        "model_type": "dinov3_vit",
        "num_attention_heads": HEADS,
        "hidden_size": WIDTH,
    } | config
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=words):
        convert_file(tmp_path / "a.file", tmp_path / "out.pth")


def test_there_are_no_positions_to_resize_but_patches(tmp_path: Path) -> None:
    torch.save(made(), tmp_path / "a.file")
    with pytest.raises(UserError, match="rotary positions, which are for any size"):
        convert_file(tmp_path / "a.file", tmp_path / "out.pth", num_heads=HEADS, image_size=64)
    report = convert_file(tmp_path / "a.file", tmp_path / "out.pth", num_heads=HEADS, patch_size=8)
    assert report.contract.architecture.patch_size == 8


def test_pixels_of_satellite_images_are_those_of_the_name(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("a_sat493m-1.pth", "a_lvd1689m-1.pth")}
    reports = {}
    for name, path in files.items():
        torch.save(made(), path)
        reports[name] = convert_file(path, tmp_path / "out.pth", num_heads=HEADS)
    satellite, web = reports.values()
    assert satellite.contract.pixels.mean == (109.65, 104.805, 75.48)
    assert any("sat493m" in note for note in satellite.notes)
    assert not any("--mean" in warning for warning in satellite.warnings)
    assert web.contract.pixels.mean == (123.675, 116.28, 103.53)
    assert any("--mean 109.65 104.805 75.48" in warning for warning in web.warnings)


def test_heads_are_those_of_its_code(tmp_path: Path) -> None:
    net = timm_dinov3(embed_dim=384, num_heads=6, depth=1)
    torch.save(net.state_dict(), tmp_path / "a.file")
    report = convert_file(tmp_path / "a.file", tmp_path / "out.pth")
    assert report.contract.architecture.num_heads == 6
    torch.save(timm_dinov3().state_dict(), tmp_path / "a.file")
    with pytest.raises(UserError, match="--num-heads"):
        convert_file(tmp_path / "a.file", tmp_path / "out.pth")
