"""Arguments with which timm built a network: recorded, they are used, or the file is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from convert.backbone import load_backbone
from convert.convert_to_d2 import convert_file
from moco.common.errors import DataError

VIT: dict[str, Any] = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3}
VIT |= {"class_token": False, "global_pool": "avg"}  # detectors leave the token out
RESNET = {"channels": [16, 32, 64, 128]}
SWIN = {"img_size": 64, "window_size": 2, "depths": [1, 1, 2, 1], "embed_dim": 24}
CONVNEXT = {"depths": [1, 1, 1, 1], "dims": [16, 24, 32, 40]}
# Name, arguments that make it small, the argument in question, whether it converts.
CASES: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = [
    ("vit_tiny_patch16_224", VIT, {}, True),
    ("vit_tiny_patch16_224", VIT, {"num_heads": 6}, True),
    ("vit_tiny_patch16_224", VIT, {"act_layer": "quick_gelu"}, True),
    ("vit_tiny_patch16_224", VIT, {"qkv_bias": False}, True),
    ("vit_tiny_patch16_224", VIT, {"dynamic_img_size": True, "drop_path_rate": 0.1}, True),
    # The family of vision transformers lacks these: they are timm's own network.
    ("vit_tiny_patch16_224", VIT, {"act_layer": "relu"}, True),
    ("vit_tiny_patch16_224", VIT, {"img_size": [128, 32]}, True),
    ("vit_tiny_patch16_224", VIT, {"qk_norm": True}, True),
    ("resnet18", RESNET, {}, True),
    ("resnet18", RESNET, {"drop_rate": 0.5}, True),
    ("resnet18", RESNET, {"output_stride": 16}, False),
    ("resnet18", RESNET, {"act_layer": "gelu"}, True),
    ("swin_tiny_patch4_window7_224", SWIN, {}, True),
    ("swin_tiny_patch4_window7_224", SWIN, {"img_size": 128}, True),
    ("convnext_atto", CONVNEXT, {}, True),
    ("convnext_atto", CONVNEXT, {"act_layer": "relu"}, True),
    ("convnext_atto", CONVNEXT, {"norm_eps": 1e-2}, True),
]


def built(name: str, arguments: dict[str, Any]) -> nn.Module:
    """Build a network whose tensors all have an effect: layer scales of 1e-6 would hide blocks."""
    torch.manual_seed(0)
    net: nn.Module = timm.create_model(name, **arguments)
    with torch.no_grad():
        for key, value in net.state_dict().items():
            if key.endswith(("running_var", "gamma")) or (value.dim() == 1 and "weight" in key):
                value.uniform_(0.5, 1.5)
    return net.eval()


def in_config(folder: Path, net: nn.Module, name: str, arguments: Any) -> Path:
    """Save as timm's `save_for_hf` does."""
    config = {"architecture": name, "num_classes": 1000, "model_args": arguments}
    config["pretrained_cfg"] = {"mean": [0.5] * 3, "std": [0.25] * 3}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(net.state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


def in_args(folder: Path, net: nn.Module, name: str, arguments: Any) -> Path:
    """Save as timm's train.py does."""
    args = {"model": name, "model_kwargs": arguments, "mean": [0.5] * 3, "std": [0.25] * 3}
    saved = {"epoch": 3, "arch": name, "args": args, "state_dict": net.state_dict()}
    torch.save(saved, folder / "last.pth.tar")
    return folder / "last.pth.tar"


@pytest.mark.slow
@pytest.mark.parametrize("save", [in_config, in_args])
@pytest.mark.parametrize(("name", "base", "changed", "converts"), CASES)
def test_equal_or_refused_by_name(
    save: Callable[..., Path],
    name: str,
    base: dict[str, Any],
    changed: dict[str, Any],
    converts: bool,
    tmp_path: Path,
) -> None:
    net = built(name, base | changed)
    file = save(tmp_path, net, name, base | changed)
    if not converts:
        with pytest.raises(DataError) as caught:
            convert_file(file, tmp_path / "out.pth")
        [key] = changed
        assert key in str(caught.value)
        return
    backbone = load_backbone(file)
    side = changed.get("img_size", 64)
    size = (side, side) if isinstance(side, int) else side
    image = torch.rand(2, 3, *size)
    with torch.no_grad():
        pixels, options = (image - 0.5) / 0.25, {"intermediates_only": True, "norm": False}
        expected = net.forward_intermediates(pixels, **options)[-1]  # type: ignore[operator]
        found = list(backbone(image).values())[-1]
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.slow
def test_the_epsilon_of_timms_train_py(tmp_path: Path) -> None:
    """Its option --bn-eps is an argument of `create_model` as well."""
    name = "mobilenetv3_small_050"
    image = torch.rand(2, 3, 64, 96)
    for eps in (0.1, None):  # None is its default
        net = built(name, {} if eps is None else {"bn_eps": eps})
        args = {"model": name, "bn_eps": eps, "model_kwargs": {}, "mean": [0] * 3, "std": [1] * 3}
        saved = {"args": args, "arch": name, "state_dict": net.state_dict()}
        torch.save(saved, tmp_path / "last.pth.tar")
        backbone = load_backbone(tmp_path / "last.pth.tar")
        with torch.no_grad():
            expected = net.forward_intermediates(image, intermediates_only=True)  # type: ignore[operator]
            assert torch.allclose(backbone(image)["res5"], expected[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"checkpoint_path": "/etc/passwd"}, "checkpoint_path"),
        ({"pretrained": True}, "pretrained"),
        ({"pretrained_cfg_overlay": {"file": "other.bin"}}, "pretrained_cfg_overlay"),
        ({"features_only": True}, "features_only"),
        ({"depth": 10**9}, "depth"),
        ({"embed_dim": 10**9}, "embed_dim"),
        ({"act_layer": {"a": 1}}, "act_layer"),
        ({"no_such_argument": 1}, "no_such_argument"),
        (["depth"], "model_args: got a list, expected arguments by name"),
    ],
)
def test_arguments_that_are_not_a_networks(arguments: Any, named: str, tmp_path: Path) -> None:
    """They open files, build something huge, or are in no signature of timm."""
    file = in_config(tmp_path, built("resnet18", RESNET), "resnet18", arguments)
    with pytest.raises(DataError, match=named):
        convert_file(file, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()
