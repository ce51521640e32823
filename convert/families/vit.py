"""Plain vision transformers, as Detectron2's `ViT` (detectron2/modeling/backbone/vit.py).

That class has neither class token, registers nor final norm; they are dropped by rules. What only
other transformers have (rotary or relative positions, gated MLPs) is in no table of names, so a
file with it is refused by the tensor's name.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from convert.families.base import (
    FAMILIES,
    Family,
    Hints,
    Option,
    check_layer_norms,
    first_rule,
    later,
)
from convert.families.vit_architecture import FEATURE, PATCH_RULES, ViTArchitecture
from convert.families.vit_names import (
    CLASS_TOKEN,
    DROPPED,
    FINAL_NORM,
    REGISTERS,
    SCHEMES,
    known,
)
from moco.common.errors import DataError, UserError, shown

if TYPE_CHECKING:
    from torch import Tensor

LAYER_NORM_EPS = 1e-6  # of every project but transformers; it is in no file

HEADS = {
    "head.weight": "linear head",
    "heads.head.weight": "linear head",
    "head.0.weight": "MLP head",
    "": "no head",
}

# Of names as timm has them, e.g. "vit_small_patch16_224" (timm/models/vision_transformer.py,
# deit.py). MoCo v3's vit_small has 12, and no "_patch" in its name.
_TIMM_ARCH = re.compile(r"(?:vit|deit|deit3)_(tiny|small|base|large|huge)_patch\d+_\d+", re.ASCII)
_TIMM_HEADS = {"tiny": 3, "small": 6, "base": 12, "large": 16, "huge": 16}

# Words of the names that plain ones have in timm and in the projects of convert/layouts/.
_USUAL_HEADS = "ViT-B 12, ViT-L 16; ViT-S 6, but MoCo v3's 12"
_SIZES = ("tiny", "small", "base", "large", "huge", "giant", "s", "b", "l", "h", "g")
_PROJECTS = ("deit", "mae", "moco", "msn", "ibot", "dino", "dinov")
_PLAIN_NAMES = frozenset(("vit", "patch", "reg", "p", "dec", "d", *_PROJECTS, *_SIZES))

OPTIONS = (
    Option(
        "num_heads",
        None,
        "attention heads of a vision transformer, which no tensor tells: ViT-B has 12, ViT-L 16; "
        "ViT-S 6, but MoCo v3's 12 (default: the source's)",
        fixed=True,
    ),
    Option(
        "patch_size",
        None,
        "resize the patches of a vision transformer to N px, e.g. 14 to the 16 that detectors need "
        "(default: the source's)",
    ),
    Option(
        "patch_rule",
        {rule: rule for rule in PATCH_RULES},
        "how --patch-size resizes: pseudo-inverse as FlexiViT (arXiv 2212.08013), bicubic as an "
        f"image (default: {PATCH_RULES[0]})",
    ),
    Option(
        "image_size",
        None,
        "interpolate the positions of a vision transformer for images of N px "
        "(default: those of the source's patches)",
    ),
    Option(
        "fold_layer_scale",
        {"yes": True, "no": False},
        "fold a vision transformer's LayerScale into the layers before it, for stock Detectron2: "
        "the same features, but other parameters to fine-tune (default: no)",
    ),
)
# What only another transformer has -> whose it is.
OBSTACLES = {
    "relative positions, as BEiT's": "*relative_position_bias_table *relative_position_index "
    "rel_pos_bias.* *.relative_position_bias.*",
    "queries and values whose keys have no bias, as BEiT's": "*.q_bias *.v_bias",
    "a rotary position embedding, as DINOv3's": "rope.* rope_embed.*",
    "a key bias that is masked, as DINOv3's": "*.bias_mask",
    "a gated MLP": "*.w12.* *.w3.* *.weights_in.* *.weights_out.*",
    "a LayerScale as BEiT's and data2vec's": "*.lambda_1 *.lambda_2",
    "a distillation token": "dist_token *.distillation_token",
}
_TRANSFORMER = "a vision transformer in names that are not known here"
LOOKALIKES = (
    (
        "MoCo v3's transformer with a stem of convolutions, which no detector here has",
        "patch_embed.proj.0.weight",
        "blocks.0.norm1.weight",
    ),
    (_TRANSFORMER, "patch_embed.projection.weight", "layers.0.ln1.weight"),  # mmpretrain
    (
        "a DINOv3 in transformers' names, whose positions are rotary, so that there is no "
        "embeddings.position_embeddings",
        "embeddings.patch_embeddings.weight",
        "layer.0.norm1.weight",
    ),
    (
        "a Swin, which is no plain vision transformer",
        "patch_embed.proj.weight",
        "layers.0.blocks.0.norm1.weight",
    ),
    ("CLIP's vision transformer", "class_embedding", "transformer.resblocks.0.ln_1.weight"),
    (_TRANSFORMER, "embeddings.class_embedding", "encoder.layers.0.layer_norm1.weight"),  # HF CLIP
)


def recognize(state: Mapping[str, Tensor], hints: Hints) -> ViTArchitecture:
    """Recognize a vision transformer by its shapes, see `convert.families.base.Family`."""
    where, kind = hints.where, "not a plain vision transformer"
    width, channels, patch, patch_width = hints.shape(state, "patch_embed.proj.weight", 4, kind)
    if (channels, patch) != (3, patch_width):
        raise DataError(
            f"{where}: {hints.name('patch_embed.proj.weight')} has shape "
            f"{[width, channels, patch, patch_width]}, expected square patches of RGB"
        )
    blocks = {int(key.split(".")[1]) for key in state if key.startswith("blocks.")}
    if blocks != set(range(len(blocks))):
        missing = min(set(range(max(blocks))) - blocks)
        raise DataError(f"{where}: {hints.name(f'blocks.{missing}.')} is missing")
    if "pos_embed" not in state:
        raise DataError(
            f"{where}: {hints.name('pos_embed')} is missing; positions that are relative "
            "(BEiT) or rotary (DINOv3) have no place in a detector here"
        )
    _, positions, _ = hints.shape(state, "pos_embed", 3, kind)
    grid = math.isqrt(positions)
    class_position = grid * grid != positions
    if class_position and grid * grid != positions - 1:
        raise DataError(
            f"{where}: {hints.name('pos_embed')} has {positions} positions, expected a "
            "square, or one more for the class token"
        )
    said = hints.says
    for name, size in (("patch_size", patch), ("image_size", grid * patch), ("hidden_size", width)):
        if said.get(name, size) not in (size, [size, size]):
            raise DataError(
                f"{where}: config.json beside it says {name} {shown(said[name])}, but its tensors "
                f"{size}"
            )
    if said.get("hidden_act", "gelu") != "gelu":
        raise DataError(
            f"{where}: config.json beside it says hidden_act {shown(said['hidden_act'])}, and the "
            "networks here have gelu"
        )
    if "usual_eps" in said and "layer_norm_eps" not in said:
        hints.notes.append(
            f"no config.json is beside the file: LayerNorm eps {said['usual_eps']:g} is assumed, "
            "as transformers has it where a configuration does not say"
        )
    registers = [v for key, v in hints.tokens.items() if first_rule(key, DROPPED) == REGISTERS]
    return ViTArchitecture(
        embed_dim=width,
        depth=len(blocks),
        num_heads=_num_heads(width, hints),
        mlp_dim=hints.shape(state, "blocks.0.mlp.fc1.weight", 2, kind)[0],
        patch_size=patch,
        image_size=grid * patch,
        qkv_bias="blocks.0.attn.qkv.bias" in state,
        layer_scale="blocks.0.ls1.gamma" in state,
        class_position=class_position,
        layer_norm_eps=said.get("layer_norm_eps", said.get("usual_eps", LAYER_NORM_EPS)),
        class_token=CLASS_TOKEN in hints.dropped,
        registers=sum(tokens.numel() for tokens in registers) // width,
        final_norm=FINAL_NORM in hints.dropped,
    )


def _num_heads(width: int, hints: Hints) -> int:
    """What the option says, else the layout, else the file's name of the network."""
    where = hints.where
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
        f"tensor; give --num-heads as its training had it ({_USUAL_HEADS})"
    )


@FAMILIES.register()
@functools.cache
def vit() -> Family:
    """Plain vision transformers of any size."""
    return Family(
        name="vit",
        networks="plain vision transformers",
        architecture=ViTArchitecture,
        schemes=SCHEMES,
        dropped=DROPPED,
        heads=HEADS,
        to_detectron2=known,
        from_detectron2=known,
        recognize=recognize,
        build=later("convert.families.vit_network:ViT"),
        reference=later("convert.families.vit_network:reference"),
        features={"norm": FEATURE},
        options=OPTIONS,
        lookalikes=LOOKALIKES,
        obstacles=OBSTACLES,
        check_trained=functools.partial(check_layer_norms, pattern=r"norm[12]\.weight$"),
        image_size=lambda architecture: (architecture.image_size, architecture.image_size),
        tokens=(CLASS_TOKEN, REGISTERS),
        effect=later("convert.families.vit_network:effect_of_tokens"),
        adapt=later("convert.families.vit_changes:adapt"),
        untold=f"--num-heads where no name says it ({_USUAL_HEADS})",
        assumes="exact GELU, norms before the branches, no positions but those that are added",
        pixels="vision transformers of timm often have 127.5 for both: then give --mean 127.5 "
        "127.5 127.5 --std 127.5 127.5 127.5",
        words=("vit", "deit"),
        plain_names=_PLAIN_NAMES,
        source_features=later("convert.families.vit_network:source_features"),
    )
