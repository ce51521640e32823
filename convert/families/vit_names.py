"""How projects name the tensors of a plain vision transformer.

Inside the converter they have timm's names (timm/models/vision_transformer.py 1.0), which are also
those of Detectron2's `ViT` (detectron2/modeling/backbone/vit.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from convert.families.base import PLAIN, USUAL, Scheme

HUGGING_FACE = "huggingface/transformers"
TORCHVISION = "pytorch/vision ViT"

TENSORS = re.compile(
    r"pos_embed|patch_embed\.proj\.(weight|bias)|blocks\.(0|[1-9]\d{0,2})\."
    r"((norm[12]|attn\.(qkv|proj)|mlp\.fc[12])\.(weight|bias)|ls[12]\.gamma)",
    re.ASCII,
)
CLASS_TOKEN, REGISTERS, FINAL_NORM = "class token", "registers", "final norm"
# Detectron2's `ViT` has no place for these.
DROPPED = {
    CLASS_TOKEN: "cls_token",
    REGISTERS: "register_tokens reg_token",
    FINAL_NORM: "norm.weight norm.bias fc_norm.weight fc_norm.bias",
    "mask token": "mask_token masked_embed",
    "pooler": "pooler.*",
    "head": "head.* head_dist.* heads.*",
}
# Beginnings of names inside a transformer; one that `TENSORS` and DROPPED lack is another's.
_OWN = re.compile(
    r"(patch_embed|blocks|pos_embed|norm_pre|rel_pos_bias|rope|rope_embed|storage_tokens|"
    r"dist_token|attn_pool)\b"
)
# DeiT III's LayerScale: facebookresearch/deit models_v2.py, Layer_scale_init_Block.
_GAMMA = re.compile(r"(blocks\.\d+)\.gamma_([12])", re.ASCII)
# facebookresearch/dinov2 dinov2/models/vision_transformer.py, BlockChunk: chunk, then the number of
# the block in the whole network.
_CHUNKED = re.compile(r"blocks\.\d+\.(\d+\.)(?=norm|attn|mlp|ls)", re.ASCII)


def known(name: str) -> str | None:
    """The name itself where a backbone has it, or None."""
    return name if TENSORS.fullmatch(name) else None


def _timm(name: str) -> str | None:
    return known(_GAMMA.sub(r"\1.ls\2.gamma", name))


def _chunked(name: str) -> str | None:
    return known(_CHUNKED.sub(r"blocks.\1", name)) if _CHUNKED.match(name) else known(name)


def _table(
    top: Mapping[str, str],
    block: str,
    modules: Mapping[str, str],
    others: Mapping[str, str],
    **scheme: Any,
) -> Scheme:
    """A scheme of other names than timm's.

    Args:
        top: module or tensor outside the blocks -> timm's.
        block: how names in block 0 begin.
        modules: module of a block -> timm's; "attn.qkv#0" is the first part of timm's tensors.
        others: tensor of a block -> timm's.
        scheme: further fields of `Scheme`.
    """
    inside = dict(others)
    for theirs, own in modules.items():
        module, mark, part = own.partition("#")
        for tensor in ("weight", "bias"):
            inside[f"{theirs}.{tensor}"] = f"{module}.{tensor}{mark}{part}"
    in_block = re.compile(re.escape(block).replace("0", r"(0|[1-9]\d{0,2})") + "(.+)", re.ASCII)

    def rename(name: str) -> str | None:
        if match := in_block.fullmatch(name):
            own = inside.get(match[2])
            return f"blocks.{match[1]}.{own}" if own else None
        return _replaced(name, top.items())

    def original(name: str) -> str:
        if not name.startswith("blocks."):
            return _replaced(name, [(own, theirs) for theirs, own in top.items()]) or name
        _, number, tensor = name.split(".", 2)
        first: dict[str, str] = {}
        for theirs, own in inside.items():
            if own.partition("#")[0] == tensor:
                first.setdefault(own, theirs)
        return block.replace("0", number) + " + ".join(first.values())

    patches = next(theirs for theirs, own in top.items() if own == "patch_embed.proj")
    norm = next(theirs for theirs, own in inside.items() if own == "norm1.weight")
    begin = {name.split(".")[0] for name in (*top, block)}
    words = re.compile(rf"({'|'.join(sorted(begin))})\b")
    return Scheme((f"{patches}.weight", block + norm), rename, words, original, **scheme)


def _replaced(name: str, pairs: Iterable[tuple[str, str]]) -> str | None:
    """A name whose module is the first of a pair, with the second instead; None: there is none."""
    for old, new in pairs:
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def _hugging_face(block: str, before: str, after: str, mlp: str, eps: float) -> Scheme:
    """transformers' ViT, ViTMAE, ViTMSN and I-JEPA, or DINOv2 with and without registers.

    Files have the names of version 4 (models/vit/modeling_vit.py, models/dinov2/
    modeling_dinov2.py); networks have those of version 5 since then, which `torch.save` writes.

    Args:
        before, after: norms of a block; `mlp`: its two layers, a space between.
        eps: of the norms, the default of models/*/configuration_*.py.
    """
    first, second = mlp.split()
    modules = {before: "norm1", after: "norm2", first: "mlp.fc1", second: "mlp.fc2"}
    modules |= {"attention.output.dense": "attn.proj", "attention.o_proj": "attn.proj"}
    for part, word in enumerate(("query", "key", "value")):
        modules[f"attention.attention.{word}"] = f"attn.qkv#{part}"
        modules[f"attention.{word[0]}_proj"] = f"attn.qkv#{part}"
    return _table(
        {
            "embeddings.cls_token": "cls_token",
            "embeddings.register_tokens": "register_tokens",
            "embeddings.mask_token": "mask_token",
            "embeddings.position_embeddings": "pos_embed",
            "embeddings.patch_embeddings.projection": "patch_embed.proj",
            "layernorm": "norm",
            "pooler": "pooler",
        },
        block,
        modules,
        {f"layer_scale{i}.lambda1": f"ls{i}.gamma" for i in (1, 2)},
        plain=HUGGING_FACE,
        says={"usual_eps": eps},
        configured=True,
    )


_VIT_NORMS = ("layernorm_before", "layernorm_after")
_OLD_MLP, _MLP = "intermediate.dense output.dense", "mlp.fc1 mlp.fc2"
_FIRST = "patch_embed.proj.weight"
SCHEMES = {
    USUAL: Scheme((_FIRST, "blocks.0.norm1.weight"), _timm, _OWN, plain=PLAIN, configured=True),
    "chunked": Scheme((_FIRST, "blocks.0.0.norm1.weight"), _chunked, _OWN, plain=PLAIN),
    "transformers": _hugging_face("encoder.layer.0.", *_VIT_NORMS, _OLD_MLP, 1e-12),
    "transformers 5": _hugging_face("layers.0.", *_VIT_NORMS, _MLP, 1e-12),
    "transformers DINOv2": _hugging_face("encoder.layer.0.", "norm1", "norm2", _MLP, 1e-6),
    # torchvision/models/vision_transformer.py, whose builders have these heads.
    TORCHVISION: _table(
        {
            "class_token": "cls_token",
            "encoder.pos_embedding": "pos_embed",
            "conv_proj": "patch_embed.proj",
            "encoder.ln": "norm",
            "heads": "head",
        },
        "encoder.layers.encoder_layer_0.",
        {
            "ln_1": "norm1",
            "self_attention.out_proj": "attn.proj",
            "ln_2": "norm2",
            "mlp.0": "mlp.fc1",
            "mlp.3": "mlp.fc2",
            # Of its first version, as in published files.
            "mlp.linear_1": "mlp.fc1",
            "mlp.linear_2": "mlp.fc2",
        },
        {
            "self_attention.in_proj_weight": "attn.qkv.weight",
            "self_attention.in_proj_bias": "attn.qkv.bias",
        },
        plain=TORCHVISION,
        says={"num_heads": {768: 12, 1024: 16, 1280: 16}},
    ),
}
