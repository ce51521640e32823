"""Positions at other sizes than the grid's: each source's own interpolation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from convert.backbone import Backbone, load_backbone
from convert.contract import InputContract
from moco.common.errors import DataError
from tests.oracles.layouts_vit import randomize

# Grids of 4 x 4 patches of 16 px; the grid itself, a larger and a smaller one, and others.
SIZES = [(4, 4), (7, 7), (3, 3), (5, 9), (2, 7)]
VIT = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2, "image_size": 64}
DINO = {**VIT, "patch_size": 16, "mlp_ratio": 2}
TOWER = {**VIT, "patch_size": 16, "intermediate_size": 96}
TIMM = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3}


def hf(kind: str, **arguments: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**arguments)
    return randomize(getattr(transformers, f"{kind}Model")(config), 0).eval()


def of_transformers(net: Any, size: tuple[int, int]) -> Tensor:
    """Return the positions that a network adds to h x w patches, (1, h w, C)."""
    embeddings = net.embeddings if hasattr(net, "embeddings") else net.vision_model.embeddings
    height, width = size
    has_class = any("class_embedding" in n or "cls_token" in n for n, _ in net.named_parameters())
    tokens = torch.zeros(1, height * width + has_class, 48)
    found: Tensor = embeddings.interpolate_pos_encoding(tokens, 16 * height, 16 * width)
    return found[:, int(has_class) :]


def naflex(net: Any, size: tuple[int, int]) -> Tensor:
    """Return the positions that SigLIP 2's NaFlex adds."""
    embeddings = net.embeddings if hasattr(net, "embeddings") else net.vision_model.embeddings
    grid = embeddings.position_embedding.weight.reshape(4, 4, -1)
    shapes = torch.tensor([size])
    found: Tensor = embeddings.resize_positional_embeddings(grid, shapes, size[0] * size[1])
    return found


def dynamic(net: Any, size: tuple[int, int]) -> Tensor:
    """Return what timm's network with `dynamic_img_size` adds."""
    first = net.cls_token.detach().clone()
    with torch.no_grad():
        net.cls_token.zero_()
        found: Tensor = net._pos_embed(torch.zeros(1, *size, 48))
        net.cls_token.copy_(first)
    return found[:, 1:]


def saved(backbone: Backbone) -> dict[str, Any]:
    return dict(backbone.contract.to_dict()["architecture"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "positions", "rule"),
    [
        (lambda: hf("ViT", intermediate_size=96, **VIT), of_transformers, "bicubic"),
        (lambda: hf("Dinov2", **DINO), of_transformers, "bicubic"),
        (lambda: hf("CLIPVision", **TOWER), of_transformers, "bicubic"),
        (lambda: hf("SiglipVision", **TOWER), of_transformers, "bicubic"),
        (lambda: hf("Dinov2WithRegisters", **DINO), of_transformers, "bicubic_antialiased"),
        (lambda: hf("Siglip2Vision", num_patches=16, **TOWER), naflex, "bilinear_antialiased"),
        (
            lambda: randomize(
                timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **TIMM), 0
            ).eval(),
            dynamic,
            "bicubic_antialiased",
        ),
    ],
)  # fmt: skip
def test_positions_are_the_sources(make: Any, positions: Any, rule: str) -> None:
    net = make()
    backbone = load_backbone(net)
    assert saved(backbone).get("position_rule", "bicubic") == rule
    assert ("position_rule" in saved(backbone)) == (rule != "bicubic")
    for size in SIZES:
        with torch.no_grad():
            expected, own = positions(net, size), backbone.net.positions(size)
        assert own.shape == (1, *size, 48)
        assert (own.reshape(1, -1, 48) - expected.reshape(1, -1, 48)).abs().max() <= 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_naflex_is_known_by_its_patches(tmp_path: Path) -> None:
    """A state dict without a configuration has them as a linear layer."""
    torch.save(hf("Siglip2Vision", num_patches=16, **TOWER).state_dict(), tmp_path / "a.file")
    backbone = load_backbone(tmp_path / "a.file", num_heads=3)
    assert saved(backbone)["position_rule"] == "bilinear_antialiased"


def test_a_contract_of_an_unknown_rule_is_refused() -> None:
    net = timm.create_model("vit_tiny_patch16_224", **TIMM)
    contract = load_backbone(randomize(net, 0)).contract.to_dict()
    contract["architecture"]["position_rule"] = "nearest"
    with pytest.raises(DataError, match="position_rule: got 'nearest', expected one of bicubic"):
        InputContract.from_dict(contract)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("kind", ["DINOv3ViT", "Dinov2WithRegisters"])
def test_any_number_of_registers(kind: str, registers: int) -> None:
    arguments = TOWER if kind == "DINOv3ViT" else DINO
    net: nn.Module = hf(kind, **{**arguments, "num_register_tokens": registers})
    backbone = load_backbone(net)
    assert "itself, run on one image: " in backbone.notes[0]
    assert backbone(torch.rand(1, 3, 80, 48))["last_feat"].shape == (1, 48, 5, 3)
