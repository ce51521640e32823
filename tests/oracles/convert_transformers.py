"""Vision transformers and ConvNeXts that the converter accepts, next to convert_files.py."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchvision.models import convnext as tv_convnext

from tests.oracles import layouts_transformers, layouts_vit
from tests.oracles.convert_files import File, converted, without


def transformers() -> dict[str, File]:
    """Return files of vision transformers."""
    small = functools.partial(vit, width=384, depth=1, mlp=8)
    base = functools.partial(vit, width=768, depth=1, mlp=8)
    config = {"model_type": "vit", "hidden_size": 24, "num_attention_heads": 3}
    heads = {"num_heads": 3}
    half = json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    files = {
        "moco-v3, ViT-S with 12 heads": File(
            lambda: {
                "state_dict": small("module.base_encoder.")
                | small("module.momentum_encoder.", seed=1),
                "arch": "vit_small",
            }
        ),
        "dino": File(
            lambda: {
                "teacher": small("backbone."),
                "student": small("module.backbone.", seed=1),
                "dino_loss": {},
            }
        ),
        "mae": File(
            lambda: {
                "model": base()
                | {"mask_token": torch.ones(1, 1, 8), "decoder_pred.weight": torch.ones(8, 8)}
            }
        ),
        "timm": File(
            lambda: {"state_dict": small(), "version": 2, "arch": "vit_small_patch16_224"},
        ),
        "plain": File(vit, heads),
        "converted": File(lambda: converted(vit, heads)),
        "12 heads": File(lambda: {"model": vit()}, {"num_heads": 12}),
        "registers": File(lambda: vit(registers=4), heads),
        "DINOv3": File(
            lambda: layouts_vit.dinov3_state(layouts_vit.timm_dinov3()), {"num_heads": 4}
        ),
        "LayerScale": File(lambda: with_layer_scale(vit()), heads),
        "LayerScale, folded": File(
            lambda: with_layer_scale(vit()), {**heads, "fold_layer_scale": True}
        ),
        "LayerScale, other names": File(
            lambda: {
                k.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): v
                for k, v in with_layer_scale(vit()).items()
            },
            heads,
        ),
        "blocks in chunks": File(lambda: layouts_vit.chunked(vit()), heads),
        "patches resized": File(vit, {**heads, "patch_size": 6}),
        "patches by bicubic": File(vit, {**heads, "patch_size": 6, "patch_rule": "bicubic"}),
        "positions resized": File(vit, {**heads, "image_size": 24}),
        "transformers' names": File(transformers_vit, heads),
        "transformers, with its configuration": File(
            transformers_vit,
            name="pytorch_model.bin",
            sidecars={
                "config.json": json.dumps({**config, "layer_norm_eps": 1e-5}),
                "preprocessor_config.json": half,
            },
        ),
        "torchvision": File(lambda: layouts_vit.torchvision_vit(0).state_dict(), heads),
        "openai/CLIP": File(lambda: _clip() | dict.fromkeys(_CLIP_SIZES, torch.tensor(7)), heads),
        "open_clip": File(lambda: {"state_dict": _clip()}, {**heads, "activation": "gelu"}),
        "torchvision, ViT-B": File(lambda: layouts_vit.torchvision_vit(0, 768, 12).state_dict()),
    }
    for name, config in (
        ("basic blocks", {"layer_type": "basic"}),
        ("stride in the 1x1", {"downsample_in_bottleneck": True}),
    ):
        files[f"transformers' ResNet, {name}"] = File(
            lambda config=config: layouts_transformers.resnet(head=True, **config).state_dict(),
            name="pytorch_model.bin",
            sidecars={"config.json": json.dumps({"model_type": "resnet", **config})},
            needs=("transformers",),
        )
    for name, make, width, number in (
        ("ibot", layouts_vit.ibot, 384, 6),
        ("msn", layouts_vit.msn, 384, 6),
        ("dinov2", functools.partial(layouts_vit.dinov2, in_chunks=False), 384, 6),
        ("dinov3", layouts_vit.dinov3, 384, 6),
        ("dinov2 in chunks", functools.partial(layouts_vit.dinov2, in_chunks=True), 384, 6),
        ("solo-learn", layouts_vit.solo_mae, 768, 12),
    ):
        files[name] = File(functools.partial(make, width, number))
    return files


_CLIP_SIZES = ("input_resolution", "context_length", "vocab_size")


def _clip() -> dict[str, Tensor]:
    return layouts_vit.two_towers(layouts_vit.randomize(layouts_vit.ClipTower(nn.GELU()), 0))


def convnexts() -> dict[str, File]:
    """Return files of ConvNeXts of both versions."""
    files = {
        "torchvision": File(torchvision_convnext),
        "converted": File(lambda: converted(convnext, {})),
        "official, with an average": File(
            lambda: {
                "model": official_convnext(),
                "model_ema": {key: value + 1 for key, value in official_convnext().items()},
                "epoch": 9,
                "args": {},
            }
        ),
    }
    for kind in ("v1 with a head", "v2", "dinov3"):
        files[f"transformers, {kind}"] = File(
            lambda kind=kind: layouts_transformers.convnext(kind).state_dict(),
            needs=("transformers",),
        )
    files["Meta's DINOv3"] = File(
        lambda: layouts_transformers.as_meta_names(
            layouts_transformers.convnext("dinov3").state_dict()
        ),
        needs=("transformers",),
    )
    for version, grn in (("v1", False), ("v2", True)):
        theirs = functools.partial(official_convnext, grn=grn)
        ours = functools.partial(convnext, grn=grn)
        files |= {
            f"{version}, official": File(lambda theirs=theirs: {"model": theirs()}),
            f"{version}, timm": File(
                lambda ours=ours: {"state_dict": ours(), "arch": "convnext_atto", "version": 2},
            ),
            f"{version}, of nobody": File(lambda ours=ours: ours("net.")),
            f"{version}, SparK": File(
                lambda theirs=theirs: {
                    "module": {
                        **theirs("sparse_encoder.sp_cnn."),
                        "config": {"a": 1},
                        "dense_decoder.proj.weight": torch.ones(8, 8, 3, 3),
                        "densify_norms.0.weight": torch.ones(8),
                        "mask_tokens.0": torch.ones(1, 8, 1, 1),
                        "norm_black": torch.ones(1, 3, 9, 9),
                    },
                    "is_pretrain": True,
                    "arch": "convnext_small",
                }
            ),
        }
    return files


def vit(
    prefix: str = "",
    width: int = 24,
    depth: int = 2,
    mlp: int = 72,
    registers: int = 0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return a vision transformer in timm's names: patches of 4 px, images of 16 px."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 17, width),
        "patch_embed.proj.weight": (width, 3, 4, 4),
        "patch_embed.proj.bias": (width,),
    }
    if registers:
        shapes["register_tokens"] = (1, registers, width)
    for i in range(depth):
        for name, rows, columns in (
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.fc1", mlp, width),
            ("mlp.fc2", width, mlp),
        ):
            shapes[f"blocks.{i}.{name}.weight"] = (rows, columns)
            shapes[f"blocks.{i}.{name}.bias"] = (rows,)
        for norm in ("norm1", "norm2"):
            shapes |= {f"blocks.{i}.{norm}.{part}": (width,) for part in ("weight", "bias")}
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    shapes |= {"head.weight": (5, width), "head.bias": (5,)}
    return _random(shapes, prefix, seed)


def with_layer_scale(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add timm's `ls1.gamma` and `ls2.gamma` to each of two blocks."""
    return state | {f"blocks.{i}.ls{k}.gamma": torch.rand(24) for i in (0, 1) for k in (1, 2)}


def transformers_vit() -> dict[str, Tensor]:
    """`vit` as transformers' ViTModel names it, with query, key and value apart."""
    names = {
        "pos_embed": "embeddings.position_embeddings",
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "cls_token": "embeddings.cls_token",
        "blocks.": "encoder.layer.",
        "attn.proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "norm.": "layernorm.",
    }
    state = {}
    for key, value in without(vit(), "head.").items():
        for old, new in names.items():
            key = key.replace(old, new)
        if "attn.qkv" not in key:
            state[key] = value
            continue
        for part, word in zip(value.chunk(3), ("query", "key", "value"), strict=True):
            state[key.replace("attn.qkv", f"attention.attention.{word}")] = part
    return state


def convnext(prefix: str = "", *, grn: bool = False) -> dict[str, Tensor]:
    """Return a ConvNeXt in timm's names, V2 with `grn`."""
    depths, dims = (1, 2, 1, 1), (8, 12, 16, 24)
    shapes: dict[str, tuple[int, ...]] = {"stem.0.weight": (8, 3, 4, 4), "stem.0.bias": (8,)}
    shapes |= {"stem.1.weight": (8,), "stem.1.bias": (8,)}
    for i, (depth, width) in enumerate(zip(depths, dims, strict=True)):
        if i:
            before = dims[i - 1]
            start = f"stages.{i}.downsample"
            shapes |= {f"{start}.0.weight": (before,), f"{start}.0.bias": (before,)}
            shapes |= {f"{start}.1.weight": (width, before, 2, 2), f"{start}.1.bias": (width,)}
        for j in range(depth):
            its: dict[str, tuple[int, ...]] = {} if grn else {"gamma": (width,)}
            its |= {"conv_dw.weight": (width, 1, 7, 7), "conv_dw.bias": (width,)}
            its |= {"norm.weight": (width,), "norm.bias": (width,)}
            its |= {"mlp.fc1.weight": (4 * width, width), "mlp.fc1.bias": (4 * width,)}
            if grn:
                its |= {"mlp.grn.weight": (4 * width,), "mlp.grn.bias": (4 * width,)}
            its |= {"mlp.fc2.weight": (width, 4 * width), "mlp.fc2.bias": (width,)}
            shapes |= {f"stages.{i}.blocks.{j}.{name}": shape for name, shape in its.items()}
    shapes |= {"head.norm.weight": (24,), "head.norm.bias": (24,)}
    return _random(shapes | {"head.fc.weight": (5, 24), "head.fc.bias": (5,)}, prefix)


def official_convnext(prefix: str = "", *, grn: bool = False) -> dict[str, Tensor]:
    """Return it in the names of facebookresearch/ConvNeXt and ConvNeXt-V2."""
    names = {
        "stem.": "downsample_layers.0.",
        "blocks.": "",
        "conv_dw": "dwconv",
        "mlp.fc1": "pwconv1",
        "mlp.fc2": "pwconv2",
        "mlp.grn.weight": "grn.gamma",
        "mlp.grn.bias": "grn.beta",
        "head.norm": "norm",
        "head.fc": "head",
    }
    state = {}
    for key, value in convnext(grn=grn).items():
        if ".downsample." in key:
            _, stage, _, rest = key.split(".", 3)
            key = f"downsample_layers.{stage}.{rest}"
        for old, new in names.items():
            key = key.replace(old, new)
        state[prefix + key] = value[None, None, None] if ".grn." in key else value
    return state


def torchvision_convnext() -> dict[str, Tensor]:
    """Torchvision's own class."""
    blocks = ((8, 12, 1), (12, 16, 2), (16, 24, 1), (24, None, 1))
    net = tv_convnext.ConvNeXt([tv_convnext.CNBlockConfig(*block) for block in blocks])  # type: ignore[arg-type]
    return _random({key: tuple(value.shape) for key, value in net.state_dict().items()})


def _random(
    shapes: Mapping[str, tuple[int, ...]], prefix: str = "", seed: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {prefix + k: 0.3 * torch.randn(s, generator=generator) for k, s in shapes.items()}
