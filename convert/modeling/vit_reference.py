"""Reference implementation of vision transformers: timm's classes, which share no code with `ViT`.

Shapes: N images, C channels, h w patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from convert.families.vit import TOKENS, ViTArchitecture, tensors_in_timm
from convert.families.vit_names import PERIODS
from convert.modeling.reference import on_meta_device
from moco.common.errors import DataError
from moco.modeling import soundness


class _AsMap(nn.Module):
    """Reshape of the tokens of a square grid to a map, (N, prefix + h w, C) -> (N, C, h, w)."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, self.prefix :]
        side = round(x.shape[1] ** 0.5)
        return x.transpose(1, 2).reshape(len(x), -1, side, side)


def reference(architecture: ViTArchitecture, prefix: tuple[int, int] | None = None) -> nn.Module:
    """Build timm's own class; class token and registers get no position embedding.

    The class is `VisionTransformer`, or `Eva` for rotary positions. The module `norm` outputs the
    map after the last block, without a final norm.

    Args:
        architecture: Architecture.
        prefix: Numbers of class tokens and registers, by default the architecture's.
    """
    a = architecture
    class_tokens, registers = prefix or (min(a.tokens, 1), max(a.tokens - 1, 0))
    from timm.layers.mlp import SwiGLUPacked
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    arguments: dict[str, Any] = {
        "img_size": a.image_size,
        "patch_size": a.patch_size,
        "num_classes": 0,
        "global_pool": "",
        "embed_dim": a.embed_dim,
        "depth": a.depth,
        "num_heads": a.num_heads,
        "qkv_bias": a.qkv_bias,
        "init_values": 1.0 if a.layer_scale else None,
        "class_token": class_tokens > 0,
        "norm_layer": partial(nn.LayerNorm, eps=a.layer_norm_eps),
        "mlp_ratio": Fraction(a.mlp_dim, a.embed_dim),  # exact, where a float would round
    }
    net: Any
    if a.rotary:
        net = Eva(
            **arguments,
            num_reg_tokens=registers,
            swiglu_mlp=a.swiglu,
            swiglu_align_to=1,
            use_abs_pos_emb=False,
            use_rot_pos_emb=True,
            rope_type="dinov3",
            rope_rotate_half=True,
            dynamic_img_size=True,
        )
        net.register_load_state_dict_pre_hook(partial(_fill_eva, a))
    else:
        if a.swiglu:
            arguments |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU}
            arguments["mlp_ratio"] *= 2
        else:
            arguments["act_layer"] = a.activation
        arguments |= {"pre_norm": a.pre_norm, "no_embed_class": True}
        net = VisionTransformer(**arguments, reg_tokens=registers)
        if a.patch_bias == a.pre_norm:  # timm's class has a bias unless it has that norm
            sizes = a.embed_dim, a.patch_size, a.patch_size
            net.patch_embed.proj = nn.Conv2d(3, *sizes, bias=a.patch_bias)
    if a.class_position:
        net.register_load_state_dict_pre_hook(_drop_class_position)
    net.norm = _AsMap(class_tokens + registers)
    module: nn.Module = net
    return module


def _drop_class_position(module: nn.Module, state: dict[str, Tensor], *_: Any) -> None:
    first, state["pos_embed"] = state["pos_embed"].tensor_split([1], dim=1)
    if "cls_token" in state:
        state["cls_token"] = state["cls_token"] + first


def _fill_eva(a: ViTArchitecture, module: Any, state: dict[str, Tensor], *_: Any) -> None:
    """Rename tensors as in timm, and set those that are not parameters of timm's class."""
    module.rope.periods = state[PERIODS]
    for i, block in enumerate(module.blocks):
        if a.qkv_bias:
            block.attn.k_bias = state[f"blocks.{i}.attn.qkv.bias"].chunk(3)[1]
    renamed = tensors_in_timm(a, dict(state), ())
    state.clear()
    state.update(renamed)


def _with_tokens(
    architecture: ViTArchitecture, state: Mapping[str, Tensor], tokens: Mapping[str, Tensor]
) -> nn.Module:
    """Return the reference with these tensors and tokens (1, n, C), in eval mode.

    Raises:
        DataError: If a token has another shape or is not finite.
    """
    for name, value in tokens.items():
        if value.dim() != 3 or (len(value), value.shape[2]) != (1, architecture.embed_dim):
            raise DataError(
                f"{name}: got shape {list(value.shape)}, expected [1, n, {architecture.embed_dim}]"
            )
        if problem := soundness.describe_problem(name, value):
            raise DataError(f"{name}: {problem}")
    kept = {name: value for name, value in state.items() if name not in TOKENS}
    whole = {**kept, **tokens}
    class_tokens, registers = (tokens[name].shape[1] if name in tokens else 0 for name in TOKENS)
    with on_meta_device():
        net = reference(architecture, (class_tokens, registers))
    net.load_state_dict(whole, strict=True, assign=True)
    return net.eval()


def token_features(
    architecture: ViTArchitecture,
    state: Mapping[str, Tensor],
    tokens: Mapping[str, Tensor],
    image: Tensor,
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the last block of timm's networks by name, and the tokens after that block."""
    net: Any = _with_tokens(architecture, state, tokens)
    net.norm = nn.Identity()
    return {f"blocks.{architecture.depth - 1}": "tokens"}, {"tokens": net(image)}


def effect_of_tokens(
    architecture: ViTArchitecture, state: Mapping[str, Tensor], tokens: Mapping[str, Tensor]
) -> str:
    """Describe how the last map of one image changes without these class token and registers.

    Raises:
        DataError: If a token has another shape or is not finite.
    """
    image = soundness.fixed_image((architecture.image_size, architecture.image_size))
    with torch.no_grad():
        maps = [_with_tokens(architecture, state, its)(image) for its in ({}, tokens)]
    change = float((maps[0] - maps[1]).norm() / maps[1].norm())
    largest = float((maps[0] - maps[1]).abs().max())
    names = " and ".join(sorted(tokens))  # safetensors have no defined order
    how = "detectors do not use it"
    if architecture.tokens:
        how = "detectors use it if MODEL.VIT.KEEP_TOKENS is True"
    return (
        f"{names}: {how}; without it the last map of one image changes by "
        f"{100 * change:.3g} % (norm of the difference; largest {largest:.3g})"
    )
