"""Tiny Swins in the layouts of the projects that write them, and damaged ones.

Nothing here shares a table with convert/.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import torch
from torch import Tensor

from tests.oracles.convert_files import File, converted, without

WIDTH, DEPTHS, HEADS, WINDOW = 12, (1, 2, 3, 2), (1, 2, 3, 6), 3
TABLE = "layers.2.blocks.0.attn.relative_position_bias_table"


def official(prefix: str = "", *, seed: int = 0, qkv_bias: bool = True) -> dict[str, Tensor]:
    """Return a Swin as microsoft/Swin-Transformer@f82860b models/swin_transformer.py names it."""
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (WIDTH, 3, 4, 4)}
    vectors = {"patch_embed.proj.bias": WIDTH}
    norms = {"patch_embed.norm": WIDTH, "norm": 8 * WIDTH}
    for i, (depth, heads) in enumerate(zip(DEPTHS, HEADS, strict=True)):
        dim = WIDTH * 2**i
        for block in (f"layers.{i}.blocks.{j}" for j in range(depth)):
            shapes[f"{block}.attn.relative_position_bias_table"] = ((2 * WINDOW - 1) ** 2, heads)
            norms |= {f"{block}.norm1": dim, f"{block}.norm2": dim}
            for name, rows, columns in (
                ("attn.qkv", 3 * dim, dim),
                ("attn.proj", dim, dim),
                ("mlp.fc1", 4 * dim, dim),
                ("mlp.fc2", dim, 4 * dim),
            ):
                shapes[f"{block}.{name}.weight"] = (rows, columns)
                if qkv_bias or name != "attn.qkv":
                    vectors[f"{block}.{name}.bias"] = rows
        if i < 3:
            shapes[f"layers.{i}.downsample.reduction.weight"] = (2 * dim, 4 * dim)
            norms[f"layers.{i}.downsample.norm"] = 4 * dim
    shapes |= {name: (size,) for name, size in vectors.items()}
    shapes |= {f"{name}.{part}": (size,) for name, size in norms.items() for part in BOTH}
    shapes |= {"head.weight": (5, 8 * WIDTH), "head.bias": (5,)}
    generator = torch.Generator().manual_seed(seed)
    state = {k: 0.3 * torch.randn(shape, generator=generator) for k, shape in shapes.items()}
    for i, depth in enumerate(DEPTHS):
        for j in range(depth):
            index = torch.zeros(WINDOW**2, WINDOW**2, dtype=torch.int64)
            state[f"layers.{i}.blocks.{j}.attn.relative_position_index"] = index
            if j % 2:
                state[f"layers.{i}.blocks.{j}.attn_mask"] = torch.zeros(4, WINDOW**2, WINDOW**2)
    return {prefix + key: value for key, value in state.items()}


BOTH = ("weight", "bias")


def backbone(**others: Any) -> dict[str, Tensor]:
    """`official` without head and buffers, as an encoder of self-supervised code."""
    return {k: v for k, v in official(**others).items() if not re.search("head|index|mask", k)}


def renamed(state: dict[str, Tensor], *pairs: tuple[str, str]) -> dict[str, Tensor]:
    """Replace patterns in the names of tensors, in this order."""
    result = {}
    for key, value in state.items():
        for pattern, text in pairs:
            key = re.sub(pattern, text, key)
        result[key] = value
    return result


def timm() -> dict[str, Tensor]:
    """`official` as timm names it: the merging belongs to the next stage."""
    state = {}
    for key, value in official().items():
        if match := re.fullmatch(r"layers\.(\d)(\.downsample\..*)", key):
            key = f"layers.{int(match[1]) + 1}{match[2]}"
        if not re.search("relative_position_index|attn_mask", key):
            state[key.replace("head.", "head.fc.")] = value
    return state


def transformers(prefix: str = "", *, version: int = 4, qkv_bias: bool = True) -> dict[str, Tensor]:
    """`official` as transformers' SwinModel saves it (4), or as its modules are named (5)."""
    before = [
        (r"\bhead\.", "classifier."),
        (r"^norm\.", "layernorm."),
        ("norm1", "layernorm_before"),
        ("norm2", "layernorm_after"),
        ("patch_embed.proj", "embeddings.patch_embeddings.projection"),
        ("patch_embed.norm", "embeddings.norm"),
        ("^layers", "encoder.layers"),
    ]
    old = [
        ("attn.proj", "attention.output.dense"),
        ("attn.relative", "attention.self.relative"),
        ("mlp.fc1", "intermediate.dense"),
        ("mlp.fc2", "output.dense"),
    ]
    new = [
        ("attn.proj", "attention.o_proj"),
        ("attn.relative", "attention.relative_position_bias.relative"),
    ]
    state = {}
    words = ("self.query", "self.key", "self.value") if version == 4 else ("q", "k", "v")
    end = "" if version == 4 else "_proj"
    pairs = [*before, *(old if version == 4 else new)]
    for key, value in renamed(official(qkv_bias=qkv_bias), *pairs).items():
        if "attn_mask" in key or (version == 5 and key.endswith("index")):
            continue
        start = "" if key.startswith("classifier") else prefix
        if "attn.qkv" not in key:
            state[start + key] = value
            continue
        for part, word in zip(value.chunk(3), words, strict=True):
            state[start + key.replace("attn.qkv", f"attention.{word}{end}")] = part
    return state


def torchvision() -> dict[str, Tensor]:
    """`official` as torchvision's SwinTransformer names it."""
    state = {}
    for key, value in official().items():
        if match := re.fullmatch(r"layers\.(\d)\.(blocks|downsample)\.(.*)", key):
            number = 2 * int(match[1]) + (1 if match[2] == "blocks" else 2)
            key = f"features.{number}.{match[3]}".replace("mlp.fc1", "mlp.0")
            key = key.replace("mlp.fc2", "mlp.3")
        key = key.replace("patch_embed.proj", "features.0.0")
        if "attn_mask" not in key:
            state[key.replace("patch_embed.norm", "features.0.2")] = value
    return state


def detectron2() -> dict[str, Tensor]:
    """`official` as the backbone of a detector: with norms of its maps, without a head."""
    norms = {f"norm{i}.{part}": torch.rand(WIDTH * 2**i) for i in range(4) for part in BOTH}
    return without(official(), "norm.", "head.") | norms


def moby() -> dict[str, Any]:
    """SwinTransformer/Transformer-SSL@4510de1 models/moby.py and utils.py:65."""
    state = backbone(prefix="encoder.") | backbone(prefix="encoder_k.", seed=1)
    for name in ("projector", "projector_k", "predictor"):
        state[f"{name}.linear_hidden.0.weight"] = torch.ones(4, 8 * WIDTH)
        state[f"{name}.linear_hidden.1.running_mean"] = torch.ones(4)
    state |= {"queue1": torch.ones(4, 8), "queue2": torch.ones(4, 8)}
    state["queue_ptr"] = torch.zeros(1, dtype=torch.int64)
    return {"model": state, **_training()}


def simmim() -> dict[str, Any]:
    """microsoft/Swin-Transformer@f82860b models/simmim.py and utils_simmim.py."""
    state = backbone(prefix="encoder.")
    state |= {"encoder.mask_token": torch.ones(1, 1, WIDTH)}
    state |= {"decoder.0.weight": torch.ones(8, 8 * WIDTH, 1, 1), "decoder.0.bias": torch.ones(8)}
    return {"model": state, **_training()}


def _training() -> dict[str, Any]:
    return {
        "optimizer": {"state": {}, "param_groups": []},
        "lr_scheduler": {"num_updates": 3},
        "max_accuracy": 0.0,
        "scaler": {"scale": 65536.0},
        "epoch": 299,
        "config": {"MODEL": {"TYPE": "swin"}},
    }


def swins() -> dict[str, File]:
    """Return files that the converter accepts."""
    config = {"model_type": "swin", "hidden_size": 8 * WIDTH, "num_heads": list(HEADS)}
    config |= {"hidden_act": "gelu", "layer_norm_eps": 1e-5}
    pixels = json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    return {
        "official, published": File(lambda: {"model": official()}),
        "official, training": File(lambda: {"model": official(), **_training()}),
        "official, without a query bias": File(lambda: {"model": official(qkv_bias=False)}),
        "official, of nobody": File(lambda: official("net.")),
        "timm": File(timm),
        "timm, with its name": File(
            lambda: {"state_dict": timm(), "arch": "swin_tiny_patch4_window7_224", "version": 2}
        ),
        "transformers": File(lambda: transformers("swin.")),
        "transformers, model alone": File(transformers),
        "transformers 5": File(functools.partial(transformers, "swin.", version=5)),
        "transformers, with its configuration": File(
            lambda: transformers("swin."),
            name="pytorch_model.bin",
            sidecars={"config.json": json.dumps(config), "preprocessor_config.json": pixels},
        ),
        "torchvision": File(torchvision),
        "Detectron2's backbone": File(detectron2),
        "MoBY": File(moby),
        "MoBY's key encoder": File(moby, {"encoder": "key"}),
        "SimMIM": File(simmim),
        "converted": File(lambda: converted(lambda: {"model": official()}, {})),
    }


def damaged_swins() -> dict[str, File]:
    """Return files that the converter refuses."""
    v2 = renamed(official(), (r"relative_position_bias_table", "logit_scale"))
    changes: dict[str, tuple[str, Any]] = {
        "without a table": (TABLE, None),
        "without a weight": ("layers.1.blocks.1.attn.proj.weight", None),
        "without a norm of patches": ("patch_embed.norm.weight", None),
        "a table of 24 positions": (TABLE, torch.ones(24, 3)),
        "a table of another window": (TABLE, torch.ones(49, 3)),
        "a table of 5 heads": (TABLE, torch.ones(25, 5)),
        "a table of one head less": (TABLE, torch.ones(25, 2)),
        "gray": ("patch_embed.proj.weight", torch.ones(WIDTH, 1, 4, 4)),
        "video": ("patch_embed.proj.weight", torch.ones(WIDTH, 3, 2, 4, 4)),
        "absolute positions": ("absolute_pos_embed", torch.ones(1, 9, WIDTH)),
        "one tensor more": ("layers.0.blocks.0.attn.q_norm.weight", torch.ones(3)),
    }
    files = {
        name: File(
            lambda key=key, value=value: {
                "model": {k: v for k, v in {**official(), key: value}.items() if v is not None}
            }
        )
        for name, (key, value) in changes.items()
    }
    trained = {
        k: torch.full_like(v, k.endswith("weight")) if v.dim() == 1 else v
        for k, v in official().items()
    }
    config = {"model_type": "swin", "hidden_act": "gelu"}
    wrong = {"hidden_act": "relu", "layer_norm_eps": 1e-6, "hidden_size": 768, "patch_size": 2}
    for name, value in wrong.items():
        files[f"config.json: {name}"] = File(
            transformers,
            name="pytorch_model.bin",
            sidecars={"config.json": json.dumps({**config, name: value})},
        )
    return files | {
        "without a block": File(lambda: {"model": without(official(), "layers.2.blocks.0.")}),
        "without a stage": File(lambda: {"model": without(official(), "layers.3.")}),
        "never trained": File(lambda: {"model": trained}),
        "V2": File(lambda: {"model": v2}),
        "V2, transformers": File(
            lambda: renamed(transformers(), (r"relative_position_bias_table", "logit_scale"))
        ),
        "V2, torchvision": File(
            lambda: renamed(torchvision(), (r"relative_position_bias_table", "logit_scale"))
        ),
        "mmpretrain": File(
            lambda: renamed(
                backbone(),
                (r"^layers", "stages"),
                (r"patch_embed\.proj", "patch_embed.projection"),
                (r"attn\.", "attn.w_msa."),
            )
        ),
    }
