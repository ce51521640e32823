"""Names of the tensors of vision transformers, by naming scheme.

The family's own names are timm's (timm/models/vision_transformer.py 1.0), which Detectron2's class
has as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from convert.families.base import HUGGING_FACE, PLAIN, USUAL, Names, Scheme, weights_and_biases

if TYPE_CHECKING:
    from torch import Tensor

PERIODS = "rope.periods"  # of rotary positions
TORCHVISION = "pytorch/vision ViT"
DINOV3 = "facebookresearch/dinov3"
CLIP = "openai/CLIP or open_clip"

# Prefixes of names inside a transformer. Names in neither the tables nor DROPPED belong to another
# network.
_OWN = re.compile(
    r"(patch_embed|blocks|pos_embed|norm_pre|rel_pos_bias|rope|rope_embed|storage_tokens|"
    r"dist_token|attn_pool)\b"
)


_BLOCK = {name: name for name in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}


def _block_pairs(start: str, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(f"{start}{external}", f"blocks.*.{own}") for external, own in pairs]


def _timm_names(start: str, *modules: str) -> Names:
    """Return the table of timm's names, with this prefix of a block and further modules."""
    own = [*weights_and_biases(_BLOCK), *((f"ls{i}.gamma", f"ls{i}.gamma") for i in (1, 2))]
    # DeiT III's LayerScale: facebookresearch/deit models_v2.py, Layer_scale_init_Block.
    deit = [(f"gamma_{i}", f"ls{i}.gamma") for i in (1, 2)]
    # facebookresearch/dinov2 dinov2/layers/swiglu_ffn.py, and the name of the registers there.
    dinov2 = [*weights_and_biases({"mlp.w12": "mlp.fc1", "mlp.w3": "mlp.fc2"})]
    modules = ("patch_embed.proj", *modules)
    top = [("pos_embed", "pos_embed"), *weights_and_biases({name: name for name in modules})]
    top += [(token, token) for token in ("cls_token", "reg_token")]
    top.append(("register_tokens", "reg_token"))
    return Names([*top, *_block_pairs(start, [*own, *deit, *dinov2])])


TIMM = _timm_names("blocks.*.", "norm_pre")
# facebookresearch/dinov2 dinov2/models/vision_transformer.py, BlockChunk: number of the chunk, then
# number of the block in the whole network.
CHUNKED = _timm_names("blocks.?.*.")


# Detectron2's class has timm's names; this project's class has the periods as well.
DETECTRON2 = Names([(name, name) for name in (PERIODS, *TIMM.own_names)])


def _table(
    top: Mapping[str, str],
    block: str,
    modules: Mapping[str, str],
    others: Mapping[str, str],
    first: tuple[str, str] | None = None,
    **scheme: Any,
) -> Scheme:
    """Return a scheme of names other than timm's.

    Args:
        top: Tensors and modules outside the blocks -> timm's.
        block: Prefix of a block, with "*" for its number.
        modules: Modules of a block -> timm's.
        others: Tensors of a block -> timm's.
        first: `Scheme.first`; by default the patches and the first norm.
        scheme: Further fields of `Scheme`.
    """
    tensors = {external: own for external, own in top.items() if own in _TENSORS}
    pairs = [
        *tensors.items(),
        *weights_and_biases({k: v for k, v in top.items() if k not in tensors}),
    ]
    pairs += _block_pairs(block, [*weights_and_biases(modules), *others.items()])
    names = Names(pairs)
    begin = {"attn_pool", *(external.split(".")[0] for external, _ in pairs)}
    words = re.compile(rf"({'|'.join(sorted(begin))})\b")
    patches, norm = (names.external(n) or "" for n in (_FIRST, "blocks.0.norm1.weight"))
    return Scheme(
        first or (patches, norm),
        names.own,
        words,
        lambda name: names.external(name) or name,
        **scheme,
    )


# transformers' version 5.
_GATED = {"mlp.gate_proj": "mlp.fc1#0", "mlp.up_proj": "mlp.fc1#1", "mlp.down_proj": "mlp.fc2"}


def _hugging_face(block: str, before: str, after: str, mlp: str, eps: float) -> Scheme:
    """Return the scheme of transformers' ViT, ViTMAE, ViTMSN and I-JEPA, or of its DINOv2.

    Published files have the names of version 4 (models/vit/modeling_vit.py, models/dinov2/
    modeling_dinov2.py). Networks of version 5 have other ones, which `torch.save` writes.

    Args:
        block: Prefix of a block, with "*" for its number.
        before: Name of the norm before attention.
        after: Name of the norm after attention.
        mlp: Names of the two layers of the MLP, separated by a space.
        eps: Epsilon of the norms, the default in models/*/configuration_*.py.
    """
    first, second = mlp.split()
    modules = {before: "norm1", after: "norm2", first: "mlp.fc1", second: "mlp.fc2"}
    # DINOv2 giant's.
    modules |= {"mlp.weights_in": "mlp.fc1", "mlp.weights_out": "mlp.fc2", **_GATED}
    modules |= {"attention.output.dense": "attn.proj", "attention.o_proj": "attn.proj"}
    for part, word in enumerate(("query", "key", "value")):
        modules[f"attention.attention.{word}"] = f"attn.qkv#{part}"
        modules[f"attention.{word[0]}_proj"] = f"attn.qkv#{part}"
    return _table(
        {
            "embeddings.cls_token": "cls_token",
            "embeddings.register_tokens": "reg_token",
            "embeddings.mask_token": "mask_token",
            "embeddings.position_embeddings": "pos_embed",
            "embeddings.patch_embeddings.projection": "patch_embed.proj",
            "layernorm": "norm",
        },
        block,
        modules,
        {f"layer_scale{i}.lambda1": f"ls{i}.gamma" for i in (1, 2)},
        plain=HUGGING_FACE,
        metadata={"usual_eps": eps},
    )


def _add_batch_axis(name: str, value: Tensor) -> Tensor:
    """Add the dimension that CLIP's class token (C) and positions (n, C) lack.

    SigLIP 2's NaFlex has a linear layer of pixels (row, column, color) for patches.
    """
    if value.dim() == {"cls_token": 1, "pos_embed": 2}.get(name):
        return value[None, None] if value.dim() == 1 else value[None]
    side = round((value.shape[-1] / 3) ** 0.5) if value.dim() == 2 else 0
    if name == _FIRST and value.shape[1:] == (3 * side * side,) and side:
        return value.reshape(-1, side, side, 3).permute(0, 3, 1, 2).contiguous()
    return value


def _two_towers(
    top: Mapping[str, str],
    block: str,
    modules: Mapping[str, str],
    others: Mapping[str, str],
    **scheme: Any,
) -> Scheme:
    """Return the scheme of an image tower next to a text tower; for arguments see `_table`."""
    return _table(
        top, block, modules, others, beside=TEXT_TOWER, reshape_tensor=_add_batch_axis, **scheme
    )


def _hugging_face_tower(top: Mapping[str, str], **scheme: Any) -> Scheme:
    """Return the scheme of transformers' CLIPVisionModel and SiglipVisionModel.

    models/clip/modeling_clip.py, models/siglip/modeling_siglip.py, models/siglip2/
    modeling_siglip2.py.

    Args:
        top: Tensors and modules that only one of them has -> timm's.
        scheme: Further fields of `Scheme`.
    """
    modules = {"layer_norm1": "norm1", "layer_norm2": "norm2"}
    modules |= {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2", "self_attn.out_proj": "attn.proj"}
    for part, word in enumerate("qkv"):
        modules[f"self_attn.{word}_proj"] = f"attn.qkv#{part}"
    usual = {
        "embeddings.patch_embedding": "patch_embed.proj",
        "embeddings.position_embedding.weight": "pos_embed",
        "post_layernorm": "norm",
    }
    return _two_towers(
        {**usual, **top},
        "encoder.layers.*.",
        modules,
        {},
        plain=HUGGING_FACE,
        dropped={"numbers of positions": "embeddings.position_ids"},
        **scheme,
    )


_FIRST = "patch_embed.proj.weight"
_TENSORS = (
    "cls_token",
    "reg_token",
    "mask_token",
    "pos_embed",
    PERIODS,
)  # all other entries of `top` are modules
_VIT_NORMS = ("layernorm_before", "layernorm_after")
_OLD_MLP, _MLP = "intermediate.dense output.dense", "mlp.fc1 mlp.fc2"
# Other parts of files of two-tower networks. OpenAI's TorchScript archives have sizes, too.
TEXT_TOWER = {
    "text tower": "text_model.* text.* text_decoder.* text_projection* transformer.* "
    "token_embedding.* positional_embedding ln_final.* attn_mask",
    "projection": "visual_projection.* visual.head.*",
    "temperature": "logit_scale logit_bias",
    "sizes": "input_resolution context_length vocab_size",
}
# For pixels 0..255: openai/CLIP@d05afc4 clip/clip.py, _transform; open_clip/constants.py; SigLIP's:
# google-research/big_vision@0127fb6 configs/proj/image_text/common.py, value_range(-1,1).
CLIP_MEAN, CLIP_STD = (122.770938, 116.746013, 104.093736), (68.500533, 66.632158, 70.323163)
HALF = (127.5, 127.5, 127.5)
_CLIP_PIXELS: dict[str, Any] = {"mean": CLIP_MEAN, "std": CLIP_STD}
_SIGLIP_PIXELS: dict[str, Any] = {"mean": HALF, "std": HALF}
# By width: mlfoundations/open_clip@89fb801 src/open_clip/model_configs/ViT-*.json (head_width, by
# default 64), timm's TinyCLIP; google-research/big_vision@0127fb6 models/vit.py, decode_variant.
_CLIP_HEADS = {256: 4, 384: 6, 512: 8, 640: 10, 768: 12, 896: 14, 1024: 16, 1280: 16, 1408: 16}
_CLIP_HEADS |= {1664: 16, 1792: 16}
_SIGLIP_HEADS = {768: 12, 1024: 16, 1152: 16, 1536: 16}
# Activation "" has to be recorded or given, because networks of several have the same names.
_CLIP: dict[str, Any] = {
    "activation": "",
    "layer_norm_eps": 1e-5,
    "num_heads": _CLIP_HEADS,
    "pixels": "CLIP's mean and std, which CLIPA (ImageNet's) and LAION's ViT-L/14 in timm (127.5) "
    "do not have",
}
# Facts that no tensor of a DINOv3 determines: facebookresearch/dinov3 dinov3/hub/backbones.py and
# layers/rms_norm.py ("layernormbf16" has 1e-5).
_OF_DINOV3 = {
    "rotary": True,
    "layer_norm_eps": 1e-5,
    "num_heads": {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 20, 4096: 32},
}
# Mean and std of SAT-493M (dinov3 README.md), for pixels 0..255; the others have ImageNet's.
_SATELLITE = {"sat493m": ((109.65, 104.805, 75.48), (54.315, 39.78, 36.465))}


def _dinov3(
    top: Mapping[str, str],
    block: str,
    modules: Mapping[str, str],
    others: Mapping[str, str],
    first: tuple[str, str],
    plain: str,
) -> Scheme:
    """Return a scheme of DINOv3's vision transformers; for the arguments see `_table`."""
    return _table(
        {**top, "norm": "norm"},
        block,
        {"norm1": "norm1", "norm2": "norm2", **modules},
        others,
        first,
        plain=plain,
        without="pos_embed",
        metadata=_OF_DINOV3,
        dropped={"norm of local crops": "local_cls_norm.* cls_norm.*"},
        named_pixels=_SATELLITE,
    )


def _dinov3_of_hugging_face(blocks: str, *, gated: bool) -> Scheme:
    """Return the scheme of transformers' DINOv3 (models/dinov3_vit/modeling_dinov3_vit.py)."""
    mlp = _GATED if gated else {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
    words = dict(zip("qkv", range(3), strict=True))
    top = {"cls_token": "cls_token", "register_tokens": "reg_token", "mask_token": "mask_token"}
    return _dinov3(
        {f"embeddings.{name}": own for name, own in top.items()}
        | {"embeddings.patch_embeddings": "patch_embed.proj"},
        f"{blocks}.*.",
        {"attention.o_proj": "attn.proj", **mlp},
        {f"attention.{w}_proj.weight": f"attn.qkv.weight#{i}" for w, i in words.items()}
        | {f"attention.{w}_proj.bias": f"attn.{w}_bias" for w in words}
        | {f"layer_scale{i}.lambda1": f"ls{i}.gamma" for i in (1, 2)},
        (
            "embeddings.patch_embeddings.weight",
            f"{blocks}.0.mlp.gate_proj.weight" if gated else f"{blocks}.0.norm1.weight",
        ),
        HUGGING_FACE,
    )


_TOKENS = {"cls_token": "cls_token", "mask_token": "mask_token"}
_PATCHES = {"patch_embed.proj": "patch_embed.proj"}
_MLPS = {name: name for name in ("mlp.fc1", "mlp.fc2")}
# These come before other schemes, which have some of the same names.
_ROTARY = {
    # facebookresearch/dinov3 dinov3/models/vision_transformer.py, layers/{attention,ffn_layers}.py.
    DINOV3: _dinov3(
        {**_TOKENS, **_PATCHES, "storage_tokens": "reg_token", "rope_embed.periods": PERIODS},
        "blocks.*.",
        {"attn.qkv": "attn.qkv", "attn.proj": "attn.proj", **_MLPS}
        | {"mlp.w1": "mlp.fc1#0", "mlp.w2": "mlp.fc1#1", "mlp.w3": "mlp.fc2"},
        {"attn.qkv.bias_mask": "attn.qkv.bias_mask"}
        | {f"ls{i}.gamma": f"ls{i}.gamma" for i in (1, 2)},
        ("storage_tokens", "blocks.0.norm1.weight"),
        DINOV3,
    ),
    # timm/models/eva.py, Eva.
    "timm DINOv3": _dinov3(
        {**_TOKENS, **_PATCHES, "reg_token": "reg_token"},
        "blocks.*.",
        {"attn.proj": "attn.proj", **_MLPS} | {"mlp.fc1_g": "mlp.fc1#0", "mlp.fc1_x": "mlp.fc1#1"},
        {"attn.qkv.weight": "attn.qkv.weight"}
        | {f"attn.{part}_bias": f"attn.{part}_bias" for part in "qv"}
        | {f"gamma_{i}": f"ls{i}.gamma" for i in (1, 2)},
        ("reg_token", "blocks.0.gamma_1"),
        PLAIN,
    ),
    **{
        f"{library} DINOv3{', gated' if gated else ''}": _dinov3_of_hugging_face(
            blocks, gated=gated
        )
        for library, blocks in (("transformers 5", "model.layer"), ("transformers", "layer"))
        for gated in (True, False)
    },
}
SCHEMES = {
    **_ROTARY,
    # timm/models/vision_transformer.py, vit_*_clip_* and vit_*_siglip_*.
    "timm CLIP": Scheme(
        ("norm_pre.weight", "blocks.0.norm1.weight"),
        TIMM.own,
        _OWN,
        plain=PLAIN,
        metadata=_CLIP,
        beside=TEXT_TOWER,
        has_reference_names=True,
        **_CLIP_PIXELS,
    ),
    "timm SigLIP": Scheme(
        ("attn_pool.latent", "blocks.0.norm1.weight"),
        TIMM.own,
        _OWN,
        plain=PLAIN,
        metadata={"activation": "", "num_heads": _SIGLIP_HEADS},
        beside=TEXT_TOWER,
        has_reference_names=True,
        **_SIGLIP_PIXELS,
    ),
    USUAL: Scheme(
        (_FIRST, "blocks.0.norm1.weight"), TIMM.own, _OWN, plain=PLAIN, has_reference_names=True
    ),
    "chunked": Scheme((_FIRST, "blocks.0.0.norm1.weight"), CHUNKED.own, _OWN, plain=PLAIN),
    "transformers": _hugging_face("encoder.layer.*.", *_VIT_NORMS, _OLD_MLP, 1e-12),
    "transformers 5": _hugging_face("layers.*.", *_VIT_NORMS, _MLP, 1e-12),
    "transformers DINOv2": _hugging_face("encoder.layer.*.", "norm1", "norm2", _MLP, 1e-6),
    # torchvision/models/vision_transformer.py, whose builders have these numbers of heads.
    TORCHVISION: _table(
        {
            "class_token": "cls_token",
            "encoder.pos_embedding": "pos_embed",
            "conv_proj": "patch_embed.proj",
            "encoder.ln": "norm",
        },
        "encoder.layers.encoder_layer_*.",
        {
            "ln_1": "norm1",
            "self_attention.out_proj": "attn.proj",
            "ln_2": "norm2",
            "mlp.0": "mlp.fc1",
            "mlp.3": "mlp.fc2",
            # Names of its first version, as in published files.
            "mlp.linear_1": "mlp.fc1",
            "mlp.linear_2": "mlp.fc2",
        },
        {
            "self_attention.in_proj_weight": "attn.qkv.weight",
            "self_attention.in_proj_bias": "attn.qkv.bias",
        },
        plain=TORCHVISION,
        metadata={"num_heads": {768: 12, 1024: 16, 1280: 16}},
    ),
    # openai/CLIP@d05afc4 clip/model.py, VisionTransformer; mlfoundations/open_clip@89fb801
    # src/open_clip/transformer.py, whose ViT-M-16-alt has LayerScale and whose CoCa has a pooler.
    CLIP: _two_towers(
        {
            "class_embedding": "cls_token",
            "positional_embedding": "pos_embed",
            "conv1": "patch_embed.proj",
            "ln_pre": "norm_pre",
            "ln_post": "norm",
        },
        "transformer.resblocks.*.",
        {
            "ln_1": "norm1",
            "attn.out_proj": "attn.proj",
            "ln_2": "norm2",
            "mlp.c_fc": "mlp.fc1",
            "mlp.c_proj": "mlp.fc2",
        },
        {
            "attn.in_proj_weight": "attn.qkv.weight",
            "attn.in_proj_bias": "attn.qkv.bias",
            **{f"ls_{i}.gamma": f"ls{i}.gamma" for i in (1, 2)},
        },
        plain=CLIP,
        dropped={
            "projection": "proj",
            "CoCa's pooler": "attn_pool.query attn_pool.attn.* attn_pool.ln_q.* attn_pool.ln_k.* "
            "attn_pool_contrastive.*",
        },
        metadata=_CLIP,
        **_CLIP_PIXELS,
    ),
    "transformers SigLIP": _hugging_face_tower(
        {},
        without="embeddings.class_embedding",
        metadata={"activation": "gelu_tanh", "usual_eps": 1e-6, "num_heads": _SIGLIP_HEADS},
        **_SIGLIP_PIXELS,
    ),
    # CLIPVisionConfig's default activation is taken if there is a config.json that has none.
    "transformers CLIP": _hugging_face_tower(
        {"embeddings.class_embedding": "cls_token", "pre_layrnorm": "norm_pre"},
        metadata={**_CLIP, "usual_activation": "quick_gelu"},
        **_CLIP_PIXELS,
    ),
}
