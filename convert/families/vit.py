"""Plain vision transformers in timm's names, which are also Detectron2's for its `ViT`.

MAE, MoCo v3, DINO, DINOv2 and DeiT have them. Detectron2's class has neither class token, registers
nor final norm; they are dropped by rules. What only other transformers have (rotary or relative
positions, gated MLPs) is in no table, so a file with it is refused by the tensor's name.

Names: timm/models/vision_transformer.py (1.0) and detectron2/modeling/backbone/vit.py.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from convert.families.base import (
    FAMILIES,
    PLAIN,
    USUAL,
    Family,
    Hints,
    Option,
    Scheme,
    check_layer_norms,
    shape_of,
)
from convert.families.vit_architecture import FEATURE, ViTArchitecture
from moco.common.errors import DataError, UserError, shown

if TYPE_CHECKING:
    from torch import Tensor, nn

LAYER_NORM_EPS = 1e-6  # of every project above; it is in no file

_TENSORS = re.compile(
    r"pos_embed|patch_embed\.proj\.(weight|bias)|blocks\.(0|[1-9]\d{0,2})\."
    r"((norm[12]|attn\.(qkv|proj)|mlp\.fc[12])\.(weight|bias)|ls[12]\.gamma)",
    re.ASCII,
)
# Beginnings of names inside a transformer; one that `_TENSORS` and DROPPED lack is another's.
_OWN = re.compile(
    r"(patch_embed|blocks|pos_embed|norm_pre|rel_pos_bias|rope|rope_embed|storage_tokens|"
    r"dist_token|attn_pool)\b"
)
CLASS_TOKEN, REGISTERS = "class token", "registers"
DROPPED = {
    CLASS_TOKEN: "cls_token",
    REGISTERS: "register_tokens reg_token",
    "final norm": "norm.weight norm.bias fc_norm.weight fc_norm.bias",
    "mask token": "mask_token",
    "head": "head.* head_dist.*",
}
HEADS = {"head.weight": "linear head", "head.0.weight": "MLP head", "": "no head"}

# Of names as timm has them, e.g. "vit_small_patch16_224" (timm/models/vision_transformer.py,
# deit.py). MoCo v3's vit_small has 12, and no "_patch" in its name.
_TIMM_ARCH = re.compile(r"(?:vit|deit|deit3)_(tiny|small|base|large|huge)_patch\d+_\d+", re.ASCII)
_TIMM_HEADS = {"tiny": 3, "small": 6, "base": 12, "large": 16, "huge": 16}

OPTIONS = (
    Option(
        "num_heads",
        None,
        "attention heads of a vision transformer, which no tensor tells: ViT-B has 12, ViT-L 16; "
        "ViT-S 6, but MoCo v3's 12 (default: the source's)",
    ),
)
_TRANSFORMER = "a vision transformer in names that are not timm's"
LOOKALIKES = (
    (
        "MoCo v3's transformer with a stem of convolutions, which no detector here has",
        "patch_embed.proj.0.weight",
        "blocks.0.norm1.weight",
    ),
    (
        "a DINOv2 whose blocks are in chunks; its published files have them in one row",
        "patch_embed.proj.weight",
        "blocks.0.0.norm1.weight",
    ),
    (_TRANSFORMER, "patch_embed.projection.weight", "layers.0.ln1.weight"),  # mmpretrain
    (_TRANSFORMER, "conv_proj.weight", "class_token"),  # torchvision
    (_TRANSFORMER, "embeddings.cls_token", "encoder.layer.0.layernorm_before.weight"),  # HF ViT
    (_TRANSFORMER, "embeddings.cls_token", "encoder.layer.0.norm1.weight"),  # HF DINOv2
    (
        "a Swin, which is no plain vision transformer",
        "patch_embed.proj.weight",
        "layers.0.blocks.0.norm1.weight",
    ),
    ("CLIP's vision transformer", "class_embedding", "transformer.resblocks.0.ln_1.weight"),
    (_TRANSFORMER, "embeddings.class_embedding", "encoder.layers.0.layer_norm1.weight"),  # HF CLIP
)


def to_detectron2(key: str) -> str | None:
    """The name itself where the table has it, or None."""
    return key if _TENSORS.fullmatch(key) else None


def recognize(
    state: Mapping[str, Tensor],
    hints: Hints,
    where: str,
    named: Callable[[str], str],
    notes: list[str],
    warnings: list[str],
) -> ViTArchitecture:
    """Recognize a vision transformer by its shapes, see `convert.families.base.Family`."""

    def shape(key: str, count: int) -> tuple[int, ...]:
        kind = "not a plain vision transformer"
        return shape_of(state, key, count, f"{where}: {shown(named(key), 200)}", kind)

    width, channels, patch, patch_width = shape("patch_embed.proj.weight", 4)
    if (channels, patch) != (3, patch_width):
        raise DataError(
            f"{where}: {shown(named('patch_embed.proj.weight'), 200)} has shape "
            f"{[width, channels, patch, patch_width]}, expected square patches of RGB"
        )
    blocks = {int(key.split(".")[1]) for key in state if key.startswith("blocks.")}
    if blocks != set(range(len(blocks))):
        missing = min(set(range(max(blocks))) - blocks)
        raise DataError(f"{where}: {shown(named(f'blocks.{missing}.'), 200)} is missing")
    _, positions, _ = shape("pos_embed", 3)
    grid = math.isqrt(positions)
    class_position = grid * grid != positions
    if class_position and grid * grid != positions - 1:
        raise DataError(
            f"{where}: {shown(named('pos_embed'), 200)} has {positions} positions, expected a "
            "square, or one more for the class token"
        )
    if hints.assumed_pixels == "timm":
        warnings.append(
            "the file does not say how its pixels were normalized: ImageNet's mean and std are "
            "assumed, and vision transformers of timm often have 127.5 for both: then give --mean "
            "127.5 127.5 127.5 --std 127.5 127.5 127.5"
        )
    return ViTArchitecture(
        embed_dim=width,
        depth=len(blocks),
        num_heads=_num_heads(width, hints, where),
        mlp_dim=shape("blocks.0.mlp.fc1.weight", 2)[0],
        patch_size=patch,
        image_size=grid * patch,
        qkv_bias="blocks.0.attn.qkv.bias" in state,
        layer_scale="blocks.0.ls1.gamma" in state,
        class_position=class_position,
        layer_norm_eps=LAYER_NORM_EPS,
    )


def _num_heads(width: int, hints: Hints, where: str) -> int:
    """What the option says, else the layout, else the file's name of the network."""
    if "num_heads" in hints.asked:
        heads: int = hints.asked["num_heads"]
        if heads < 1 or width % heads:
            raise UserError(f"--num-heads {heads}: does not divide the width {width} of {where}")
        return heads
    if found := hints.says.get("num_heads", {}).get(width):
        return int(found)
    match = _TIMM_ARCH.fullmatch(hints.arch) if isinstance(hints.arch, str) else None
    if match and width % _TIMM_HEADS[match[1]] == 0:
        return _TIMM_HEADS[match[1]]
    raise UserError(
        f"{where}: a vision transformer of width {width}, whose number of attention heads is in no "
        "tensor; give --num-heads as its training had it (ViT-B 12, ViT-L 16; ViT-S 6, but MoCo "
        "v3's 12)"
    )


def with_options(
    architecture: ViTArchitecture, asked: Mapping[str, Any], where: str
) -> ViTArchitecture:
    """The architecture itself; raises UserError for other heads than it was converted with."""
    heads = asked.get("num_heads", architecture.num_heads)
    if heads != architecture.num_heads:
        raise UserError(
            f"--num-heads {heads}: {where} was converted with {architecture.num_heads} heads"
        )
    return architecture


@FAMILIES.register()
@functools.cache
def vit() -> Family:
    """Plain vision transformers of any size."""

    def build(architecture: ViTArchitecture) -> nn.Module:
        from convert.families.vit_network import ViT

        return ViT(architecture)

    def reference(architecture: ViTArchitecture) -> tuple[nn.Module, Mapping[str, str]]:
        from convert.families.vit_network import reference

        return reference(architecture), {"norm": FEATURE}

    def effect(
        architecture: ViTArchitecture, state: Mapping[str, Tensor], dropped: Mapping[str, Tensor]
    ) -> str:
        from convert.families.vit_network import effect_of_tokens

        return effect_of_tokens(architecture, state, dropped)

    return Family(
        name="vit",
        networks="plain vision transformers in timm's names (conversion only)",
        architecture=ViTArchitecture,
        schemes={
            USUAL: Scheme(
                ("patch_embed.proj.weight", "blocks.0.norm1.weight"),
                to_detectron2,
                _OWN,
                plain=PLAIN,
            )
        },
        dropped=DROPPED,
        heads=HEADS,
        to_detectron2=to_detectron2,
        from_detectron2=to_detectron2,
        recognize=recognize,
        with_options=with_options,
        build=build,
        reference=reference,
        options=OPTIONS,
        lookalikes=LOOKALIKES,
        check_trained=functools.partial(check_layer_norms, pattern=r"norm[12]\.weight$"),
        image_size=lambda architecture: (architecture.image_size, architecture.image_size),
        tokens=(CLASS_TOKEN, REGISTERS),
        effect=effect,
        in_engines=False,
    )
