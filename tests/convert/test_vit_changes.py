"""Sizes that are changed and LayerScale that is folded on request, by rules that are listed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from convert.contract import Overrides
from convert.convert_to_d2 import convert_file
from convert.families.vit import (
    fold_layer_scale,
    interpolate_patches,
    resize_patches,
    resize_positions,
)
from convert.inspect_file import inspect_file
from convert.recognize import recognize
from convert.verify import check_features, read_converted
from moco.common.errors import DataError
from tests.convert.test_vit import FROM_FILE, make_state

KERNEL = torch.randn(5, 3, 14, 14, generator=torch.Generator().manual_seed(0))


def test_larger_patches_respond_as_the_old_ones() -> None:
    """FlexiViT's reason for the pseudo-inverse: <resize(x), w'> = <x, w> for every x."""
    x = torch.randn(7, 3, 14, 14, generator=torch.Generator().manual_seed(1))
    larger = F.interpolate(x, size=(16, 16), mode="bilinear", align_corners=False)
    old = F.conv2d(x, KERNEL)
    new = F.conv2d(larger, resize_patches(KERNEL, 16))
    torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)
    other = F.conv2d(larger, interpolate_patches(KERNEL, 16))
    assert float((other - old).abs().max()) > 1


@pytest.mark.parametrize("size", [7, 12, 16, 20])
def test_patches_are_resized_as_by_timm(size: int) -> None:
    import timm

    theirs = timm.layers.resample_patch_embed(KERNEL, [size, size], "bilinear", antialias=False)
    torch.testing.assert_close(resize_patches(KERNEL, size), theirs, rtol=1e-4, atol=1e-4)


def test_positions_keep_the_class_slot() -> None:
    positions = torch.randn(1, 17, 6, generator=torch.Generator().manual_seed(0))
    larger = resize_positions(positions, 7, class_position=True)
    assert larger.shape == (1, 50, 6)
    assert torch.equal(larger[:, 0], positions[:, 0])
    assert torch.equal(larger[:, 1:], resize_positions(positions[:, 1:], 7, class_position=False))
    grid = positions[0, 1:].reshape(4, 4, 6).permute(2, 0, 1)[None]
    cell = F.interpolate(grid, size=(7, 7), mode="bicubic", align_corners=False)[0, :, 2, 5]
    assert torch.equal(larger[0, 1 + 2 * 7 + 5], cell)


@pytest.mark.parametrize(
    ("asked", "sizes", "source"),
    [
        ({"patch_size": 6}, (6, 24), "patches 4 to 6 px by pseudo-inverse"),
        ({"patch_size": 6, "patch_rule": "bicubic"}, (6, 24), "patches 4 to 6 px by bicubic"),
        ({"image_size": 24}, (4, 24), "positions 4x4 to 6x6 by bicubic interpolation"),
        ({"patch_size": 8, "image_size": 16}, (8, 16),
         "patches 4 to 8 px by pseudo-inverse; positions 4x4 to 2x2 by bicubic interpolation"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("again", [False, True])
def test_sizes_are_changed_and_listed(
    asked: dict[str, Any], sizes: tuple[int, int], source: str, again: bool, tmp_path: Path
) -> None:
    src, out = tmp_path / "a.file", tmp_path / "out.pth"
    torch.save(make_state(), src)
    if again:  # of a file that was converted already
        convert_file(src, out, num_heads=3)
        src, out = out, tmp_path / "again.pth"
    report = convert_file(src, out, num_heads=3, **asked)
    converted = read_converted(out)
    patch, image = sizes
    expected = dataclasses.replace(FROM_FILE, patch_size=patch, image_size=image)
    assert converted.contract.architecture == expected
    assert converted.contract.source == f"state dict ({source})"
    assert converted.model["patch_embed.proj.weight"].shape[2:] == (patch, patch)
    assert converted.model["pos_embed"].shape[1] == (image // patch) ** 2 + 1
    assert report.features["last_feat"].stride == patch
    assert all(f"changed as requested: {part}" in report.notes for part in source.split("; "))
    assert source in inspect_file(out)


@pytest.mark.parametrize(
    ("damage", "asked"),
    [
        ({"pos_embed": torch.ones(1, 17, 24, dtype=torch.int64)}, {"image_size": 24}),
        ({"patch_embed.proj.weight": torch.ones(24, 3, 4, 4, dtype=torch.int8)}, {"patch_size": 6}),
        ({"blocks.1.ls1.gamma": torch.ones(3)}, {"fold_layer_scale": True}),
        ({"blocks.1.mlp.fc2.bias": torch.ones(())}, {"fold_layer_scale": True}),
    ],
    ids=str,
)
def test_damaged_tensors_are_not_changed(damage: dict[str, Any], asked: dict[str, Any]) -> None:
    state = make_state(layer_scale=True) | damage
    (key,) = damage
    with pytest.raises(DataError, match="blocks.1.ls" if "blocks" in key else key):
        recognize(state, "a.file", Overrides.from_options(num_heads=3, **asked), "0" * 64)


def test_layer_scale_is_folded_on_request_alone(tmp_path: Path) -> None:
    state, src, out = make_state(layer_scale=True), tmp_path / "a.file", tmp_path / "out.pth"
    torch.save(state, src)
    convert_file(src, out, num_heads=3)
    assert torch.equal(read_converted(out).model["blocks.1.ls2.gamma"], state["blocks.1.ls2.gamma"])
    report = convert_file(src, out, num_heads=3, fold_layer_scale=True)
    folded = read_converted(out)
    assert folded.contract.architecture == FROM_FILE
    assert not [key for key in folded.model if ".ls" in key]
    weight = state["blocks.0.ls1.gamma"][:, None] * state["blocks.0.attn.proj.weight"]
    assert torch.equal(folded.model["blocks.0.attn.proj.weight"], weight)
    # The proof is against the network with its LayerScale.
    assert report.features["last_feat"].max_abs_diff < 1e-4
    assert "changed as requested: LayerScale folded" in report.notes
    found = recognize(state, "a.file", Overrides.from_options(num_heads=3), "0" * 64)
    spoiled = fold_layer_scale({**state, "blocks.1.ls2.gamma": torch.ones(24)})
    model = {key: spoiled[key] for key in folded.model}
    with pytest.raises(DataError, match="features differ"):
        check_features(*found.source_network(), dataclasses.replace(folded, model=model), "a.file")
