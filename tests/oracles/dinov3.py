"""DINOv3's vision transformers of transformers, in the names of several sources."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convert.families.vit import periods
from tests.oracles.layouts_vit import randomize

WIDTH, DEPTH, HEADS, PATCH = 64, 2, 4, 4  # those of the oracle
MLP, TOKENS = 96, 5
IMAGE = (24, 40)  # neither square nor that of the proof


def transformers_dinov3(*, gated: bool = False) -> nn.Module:
    """Build transformers' own class, of a tiny network, gated or not."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DINOv3ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=MLP,
        patch_size=PATCH,
        num_register_tokens=TOKENS - 1,
        use_gated_mlp=gated,
        hidden_act="silu" if gated else "gelu",
    )
    net: nn.Module = randomize(transformers.DINOv3ViTModel(config), 0).eval()
    return net


def old_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name tensors as in the published files of transformers."""
    return {name.removeprefix("model."): value for name, value in state.items()}


def metas(state: dict[str, Tensor], stored: Tensor | None = None) -> dict[str, Tensor]:
    """Name the tensors of transformers' class as dinov3's own does (vision_transformer.py).

    A bias of keys is in the file, but masked.
    """
    names = {
        r"embeddings.(cls|mask)_token": r"\1_token",
        "embeddings.register_tokens": "storage_tokens",
        "embeddings.patch_embeddings": "patch_embed.proj",
        r"model.layer": "blocks",
        r"layer_scale(\d).lambda1": r"ls\1.gamma",
        "attention.o_proj": "attn.proj",
    }
    gated = any("gate_proj" in name for name in state)
    first, last = ("w2", "w3") if gated else ("fc1", "fc2")
    names |= {"gate_proj": "w1", "up_proj": first, "down_proj": last}
    new = {}
    for name, value in state.items():
        for old, its in names.items():
            name = re.sub(old, its, name)
        new[name] = value
    for i in range(DEPTH):
        start = f"blocks.{i}.attention."
        for kind in ("weight", "bias"):
            q, k, v = (new.pop(f"{start}{part}_proj.{kind}", torch.ones(WIDTH)) for part in "qkv")
            new[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat([q, k, v])
        one = torch.ones(WIDTH)
        new[f"blocks.{i}.attn.qkv.bias_mask"] = torch.cat([one, 0 * one, one])
    new["mask_token"] = new["mask_token"][:, 0]
    new["rope_embed.periods"] = periods(WIDTH // HEADS).bfloat16() if stored is None else stored
    new["local_cls_norm.weight"] = new["local_cls_norm.bias"] = torch.ones(WIDTH)
    return new


def stored_periods(net: Any) -> None:
    """Give a network the periods of `metas`, which are rounded as in Meta's files, in place."""
    stored = periods(WIDTH // HEADS).bfloat16().float()
    assert not torch.equal(stored, periods(WIDTH // HEADS))
    net.rope_embeddings.inv_freq = 1 / stored


def transformers_map(net: Any, image: Tensor) -> Tensor:
    """Return the map after the last block, before the final norm: (1, C, h, w)."""
    with torch.no_grad():
        states = net.model(net.embeddings(image), position_embeddings=net.rope_embeddings(image))
    return as_map(states.last_hidden_state, image)


def as_map(tokens: Tensor, image: Tensor) -> Tensor:
    """Return the map of the patches of an image: (1, T + h w, C) -> (1, C, h, w)."""
    size = [side // PATCH for side in image.shape[2:]]
    return tokens[:, TOKENS:].transpose(1, 2).unflatten(2, size)
