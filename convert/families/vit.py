"""Plain vision transformers, as in Detectron2's `ViT` (detectron2/modeling/backbone/vit.py).

That class has no class token, registers, rotary positions or gated MLPs; the network of
convert/modeling/vit.py, which equals it otherwise, has them. Names in files are in vit_names.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from convert.families.base import (
    Adapted,
    Architecture,
    Family,
    Hints,
    Option,
    OtherNetworkError,
    contract_key,
    count_blocks,
    register,
)
from convert.families.vit_names import DETECTRON2, PERIODS, SCHEMES
from moco.common.errors import DataError, UserError, format_value
from moco.common.keys import Key, Keys, Role, one_of

if TYPE_CHECKING:
    from torch import Tensor, nn

BICUBIC, ANTIALIASED, BILINEAR = "bicubic", "bicubic_antialiased", "bilinear_antialiased"
# Rules for resizing positions -> arguments of `interpolate`, Detectron2's (get_abs_pos) first.
POSITION_RULES: dict[str, dict[str, Any]] = {
    BICUBIC: {"mode": "bicubic"},
    ANTIALIASED: {"mode": "bicubic", "antialias": True},
    BILINEAR: {"mode": "bilinear", "antialias": True},
}
FEATURE = "last_feat"  # Detectron2's name
# Activations of MLPs by transformers' names. The two others approximate the first, `gelu`.
GELU = "gelu"
ACTIVATIONS = {"gelu": GELU, "quick_gelu": "quick_gelu", "gelu_pytorch_tanh": "gelu_tanh"}
PATCHES, POSITIONS = "patch_embed.proj.weight", "pos_embed"
TOKENS = ("cls_token", "reg_token")
THETA = 100  # base of the periods of DINOv3's rotary positions
GRID = 14  # of the images that a network with rotary positions is verified with
# Fields of the architecture -> keys under MODEL.VIT. The other fields describe the source.
KEYS = {
    "embed_dim": "EMBED_DIM",
    "depth": "DEPTH",
    "num_heads": "NUM_HEADS",
    "mlp_dim": "MLP_DIM",
    "patch_size": "PATCH_SIZE",
    "image_size": "PRETRAIN_IMAGE_SIZE",
    "qkv_bias": "QKV_BIAS",
    "layer_scale": "LAYER_SCALE",
    "class_position": "CLASS_POSITION",
    "layer_norm_eps": "LAYER_NORM_EPS",
    "swiglu": "SWIGLU",
    "rotary": "ROTARY",
    "tokens": "TOKENS",
    "activation": "ACTIVATION",
    "pre_norm": "PRE_NORM",
    "patch_bias": "PATCH_BIAS",
    "position_rule": "POSITION_RULE",
}


def resize_patches(kernel: Tensor, size: int) -> Tensor:
    """Resize the patch kernel by PI-resize: (C, 3, p, p) -> (C, 3, size, size).

    FlexiViT, arXiv 2212.08013, Eq. 4: with the bilinear resize x -> B x the kernel is (B^T)^+ w,
    whose response to a resized patch is closest to the old response; if patches grow, both are
    equal. B is the Kronecker product of a matrix with itself, so its pseudo-inverse is the
    product of that matrix's pseudo-inverse with itself.
    """
    import torch
    import torch.nn.functional as F

    basis = torch.eye(kernel.shape[-1], dtype=torch.float64)[None]
    # (p, size): row i is the resized i-th unit vector.
    resized = F.interpolate(basis, size=size, mode="linear", align_corners=False)[0]
    inverse = torch.linalg.pinv(resized)  # (size, p)
    return (inverse @ kernel.double() @ inverse.T).to(kernel.dtype)


def interpolate_patches(kernel: Tensor, size: int) -> Tensor:
    """Resize the patch kernel bicubically: (C, 3, p, p) -> (C, 3, size, size)."""
    import torch.nn.functional as F

    return F.interpolate(kernel, size=(size, size), mode="bicubic", align_corners=False)


# Rules for resizing patches, the default first.
PATCH_RULES = {"pseudo-inverse": resize_patches, "bicubic": interpolate_patches}


@dataclasses.dataclass(frozen=True)
class ViTArchitecture(Architecture):
    """Architecture of a plain vision transformer.

    Attributes:
        embed_dim: Width.
        depth: Number of blocks.
        num_heads: Number of attention heads.
        mlp_dim: Hidden width of the MLPs.
        patch_size: Side of a patch, in px.
        image_size: Side of the images that the position embedding was trained for, in px.
        qkv_bias: True if queries, keys and values have a bias.
        layer_scale: True if blocks have LayerScale.
        class_position: True if the position embedding starts with a slot for the class token.
        layer_norm_eps: Epsilon of LayerNorm.
        swiglu: True if the MLPs are gated, with SiLU (arXiv 2002.05202); `mlp_dim` is the width
            after the gate.
        rotary: True if positions are rotary, as DINOv3's, instead of added ones.
        tokens: Number of tokens before the patches: the class token, then registers.
        activation: Activation of the MLPs, a value of `ACTIVATIONS`.
        pre_norm: True if there is a norm before the first block, as in CLIP.
        patch_bias: True if the patch embedding has a bias.
        position_rule: Rule by which the source resizes positions for images of other sizes, one
            of `POSITION_RULES`.
        class_token, registers, final_norm: Parts of the source that the backbone here lacks;
            `registers` is their number.

    Raises:
        UserError: If a value is out of its range.
    """

    embed_dim: int
    depth: int
    num_heads: int
    mlp_dim: int
    patch_size: int
    image_size: int
    qkv_bias: bool
    layer_scale: bool
    class_position: bool
    layer_norm_eps: float
    class_token: bool = False
    registers: int = 0
    final_norm: bool = False
    swiglu: bool = False
    rotary: bool = False
    tokens: int = 0
    activation: str = GELU
    pre_norm: bool = False
    patch_bias: bool = True
    position_rule: str = BICUBIC

    def __post_init__(self) -> None:
        super().__post_init__()
        texts = {"activation": ACTIVATIONS.values(), "position_rule": POSITION_RULES}
        for name, choices in texts.items():
            if (value := getattr(self, name)) not in choices:
                raise UserError(
                    f"{name}: got {format_value(value)}, expected one of {', '.join(choices)}"
                )
        for name, whole in (("num_heads", "embed_dim"), ("patch_size", "image_size")):
            if getattr(self, whole) % getattr(self, name):
                raise UserError(
                    f"{name}: got {getattr(self, name)}, which does not divide {whole} "
                    f"{getattr(self, whole)}"
                )
        if self.rotary and self.embed_dim // self.num_heads % 4:
            raise UserError(
                f"num_heads: got {self.num_heads}, but rotary positions need heads of a multiple "
                f"of 4 channels, and the width is {self.embed_dim}"
            )

    def __str__(self) -> str:
        text = f"ViT of {self.depth} blocks, width {self.embed_dim}, {self.num_heads} heads"
        text += ", LayerScale" if self.layer_scale else ""
        text += ", SwiGLU" if self.swiglu else ""
        return text + (", rotary positions" if self.rotary else "")

    def d2_keys(self) -> dict[str, Any]:
        """Return the keys MODEL.VIT.* in `KEYS`."""
        fields = dataclasses.asdict(self)
        return {f"MODEL.VIT.{key}": fields[name] for name, key in KEYS.items()}

    def details(self) -> str:
        """Describe patches, positions, epsilon and the dropped parts of the source."""
        slot = "with" if self.class_position else "without"
        positions = f"positions of {self.image_size} px images {slot} a class slot"
        lacks = [
            *(["class token"] if self.class_token else []),
            *([f"{self.registers} registers"] if self.registers else []),
            *(["final norm"] if self.final_norm else []),
        ]
        how = self.position_rule.replace("_", " and ")
        special = [
            *([f"activation {self.activation}"] if self.activation != GELU else []),
            *(["a norm before the blocks"] if self.pre_norm else []),
            *(["no bias of patches"] if not self.patch_bias else []),
            *([f"positions resized {how}"] if self.position_rule != BICUBIC else []),
        ]
        return (
            f"patches of {self.patch_size} px, {'' if self.rotary else f'{positions}, '}"
            f"LayerNorm eps {self.layer_norm_eps:g}"
            + (f", class token and {self.tokens - 1} registers" if self.tokens else "")
            + "".join(f", {what}" for what in special)
            + (f", without the source's {', '.join(lacks)}" if lacks else "")
        )

    def lost_options(self) -> list[str]:
        """Return --num-heads and --activation, which no tensor determines."""
        return [f"--num-heads {self.num_heads}", f"--activation {self.activation}"]

    def task_key(self) -> tuple[str, str]:
        """Return MODEL.VIT.EMBED_DIM, which distinguishes the sizes."""
        return "MODEL.VIT.EMBED_DIM", "ViT of width {}"

    def example_task(self) -> tuple[str, dict[str, Any], str]:
        """Return the VOC task of ViT-Ti."""
        keys = {"EMBED_DIM": 192, "DEPTH": 12, "NUM_HEADS": 3, "MLP_DIM": 768}
        keys = {f"MODEL.VIT.{name}": value for name, value in keys.items()}
        data = "DATASETS.VOC_DIR path/to/voc "
        return "configs/voc/faster_rcnn_ViT_Ti_small.yaml", keys, data


CLASS_TOKEN, REGISTERS, FINAL_NORM = "class token", "registers", "final norm"
ATTENTION_POOL = "attention pool"
# Detectron2's `ViT` does not have these.
DROPPED = {
    CLASS_TOKEN: "cls_token",
    REGISTERS: "reg_token",
    FINAL_NORM: "norm.weight norm.bias fc_norm.weight fc_norm.bias",
    "mask token": "mask_token masked_embed",
    "pooler": "pooler.*",
    # Of SigLIP, in timm's and transformers' names.
    ATTENTION_POOL: "attn_pool.latent attn_pool.q.* attn_pool.kv.* attn_pool.proj.* "
    "attn_pool.norm.* attn_pool.mlp.* head.probe head.attention.* head.layernorm.* head.mlp.*",
    "head": "head.* head_dist.* heads.*",
}
LAYER_NORM_EPS = 1e-6  # of every project except transformers; no file records it

HEADS = {
    "head.weight": "linear head",
    "heads.head.weight": "linear head",
    "head.0.weight": "MLP head",
    "proj": "linear projection",
    "attn_pool.latent": ATTENTION_POOL,
    "head.probe": ATTENTION_POOL,
    "": "no head",
}

# Model names of timm, e.g. "vit_small_patch16_224" (timm/models/vision_transformer.py, deit.py).
# MoCo v3's vit_small has 12 heads, and no "_patch" in its name.
_TIMM_ARCH = re.compile(r"(?:vit|deit|deit3)_(tiny|small|base|large|huge)_patch\d+_\d+", re.ASCII)
_TIMM_HEADS = {"tiny": 3, "small": 6, "base": 12, "large": 16, "huge": 16}

_USUAL_HEADS = "ViT-B 12, ViT-L 16; ViT-S 6, but MoCo v3's 12"
# Words in names of plain networks, in timm and in the projects of convert/projects.py.
_SIZES = ("tiny", "small", "base", "large", "huge", "giant", "s", "b", "l", "h", "g")
_PROJECTS = ("deit", "mae", "moco", "msn", "ibot", "dino", "dinov")
_PLAIN_NAMES = frozenset(("vit", "patch", "reg", "p", "dec", "d", *_PROJECTS, *_SIZES))

OPTIONS = (
    Option(
        "num_heads",
        None,
        "number of attention heads of a vision transformer, which no tensor determines: ViT-B has "
        "12, ViT-L 16; ViT-S 6, but MoCo v3's 12 (default: the source's)",
        fixed=True,
    ),
    Option(
        "activation",
        {name: name for name in ACTIVATIONS.values()},
        "activation of a vision transformer's MLPs, which no tensor determines: OpenAI's CLIP, "
        "MetaCLIP and DFN have quick_gelu, LAION's CLIPs gelu, SigLIP gelu_tanh (default: the "
        "source's)",
        fixed=True,
        in_timm="act_layer",
    ),
    Option(
        "patch_size",
        None,
        "resize the patches of a vision transformer to N px, e.g. from 14 to 16 for a detector "
        "(default: the source's)",
    ),
    Option(
        "patch_rule",
        {rule: rule for rule in PATCH_RULES},
        "how --patch-size resizes: pseudo-inverse as in FlexiViT (arXiv 2212.08013), or bicubic "
        f"interpolation (default: {next(iter(PATCH_RULES))})",
    ),
    Option(
        "image_size",
        None,
        "interpolate the position embedding of a vision transformer for images of N px "
        "(default: as many patches as the source has)",
    ),
    Option(
        "fold_layer_scale",
        {"yes": True, "no": False},
        "fold a vision transformer's LayerScale into the layers before it, for stock Detectron2: "
        "the same features, but other parameters to fine-tune (default: no)",
    ),
)
# Description of a part that only other transformers have -> patterns of its names.
OBSTACLES = {
    "a table of relative positions, as BEiT's and data2vec's,": "*relative_position_bias_table "
    "*relative_position_index rel_pos_bias.* *.relative_position_bias.*",
    "queries and values whose keys have no bias, as BEiT's": "*.q_bias *.v_bias",
    "a rotary position embedding other than DINOv3's": "rope.* rope_embed.*",
    "a gated MLP with parts that DINOv2's and DINOv3's lack": "*.fc1_g.* *.fc1_x.* *.mlp.norm.*",
    "a LayerScale as BEiT's and data2vec's": "*.lambda_1 *.lambda_2",
    "an MViTv2, which Detectron2 itself has (modeling/backbone/mvit.py),": "*.attn.pool_[qkv].* "
    "*.attn.norm_[qkv].*",
    "a distillation token": "dist_token *.distillation_token",
    "a Perception Encoder, whose positions are rotary as well,": "attn_pool.probe "
    "attn_pool.layernorm.*",
}
LOOKALIKES = (
    (
        "MoCo v3's transformer with a stem of convolutions, which no detector here has",
        "patch_embed.proj.0.weight",
        "blocks.0.norm1.weight",
    ),
    (  # mmpretrain
        "a vision transformer in names that are not known here",
        "patch_embed.projection.weight",
        "layers.0.ln1.weight",
    ),
    (
        "an MViTv2, which Detectron2 itself has (modeling/backbone/mvit.py)",
        "patch_embed.proj.weight",
        "stages.0.blocks.0.attn.pool_q.weight",
    ),
)


def _position_rule(metadata: Mapping[str, Any], is_dinov2_with_registers: bool) -> str:
    """Return the rule by which the source resizes positions.

    timm's networks of a fixed size refuse other images and get Detectron2's rule.
    """
    if PATCHES in metadata.get("reshaped", ()):  # a linear layer of pixels: SigLIP 2's NaFlex
        return BILINEAR
    is_antialiased = is_dinov2_with_registers or metadata.get("dynamic_img_size")
    return ANTIALIASED if is_antialiased else BICUBIC


def _check_recorded(option: str, given: Any, recorded: Any, where: str) -> None:
    """Raise UserError if an option contradicts the record in a file or next to it."""
    if given != recorded:
        raise UserError(
            f"--{option} {given}: {where} or the configuration next to it records {recorded}; "
            "leave the option out, or correct the configuration"
        )


def _activation(hints: Hints, *, is_known: bool) -> str:
    """Return the activation from the option, config.json, or the naming scheme."""
    metadata, where = hints.metadata, hints.where
    if is_known:
        if "activation" in hints.requested:
            raise UserError(f"--activation: that of {where} is known by the kind of its network")
        return GELU
    if "activation" in hints.requested:
        requested: str = hints.requested["activation"]
        stated = hints.recorded.get("hidden_act")
        if stated is not None:
            stated = ACTIVATIONS.get(str(stated), format_value(stated))
            _check_recorded("activation", requested, stated, where)
        return requested
    recorded = metadata.get("hidden_act")
    if recorded is None and "model_type" in metadata:
        recorded = metadata.get("usual_activation")
    if recorded is not None:
        if not isinstance(recorded, str) or recorded not in ACTIVATIONS:
            raise DataError(
                f"{where}: config.json next to it has hidden_act {format_value(recorded)}, but the "
                f"networks here have {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[recorded]
    known: str = metadata.get("activation", GELU)
    if (trained := metadata.get("trained_with", known)) != known:
        hints.warnings.append(
            f"timm's network of this name has {known}, but its weights were trained with "
            f"{trained}; --activation {trained} gives the features of their training"
        )
    if not known:
        raise UserError(
            f"{where}: its names are those of networks with several activations, which no tensor "
            "determines; give --activation as its training had it (OpenAI, MetaCLIP, DFN "
            "quick_gelu; LAION gelu; SigLIP gelu_tanh, in some of timm's gelu), or its config.json",
            option="activation",
        )
    return known


def _grid(state: Mapping[str, Tensor], hints: Hints) -> tuple[int, bool]:
    """Return the side of the position embedding, and whether it has a slot for the class token."""
    if POSITIONS not in state:
        raise OtherNetworkError(
            f"{hints.where}: {hints.name(POSITIONS)} is missing; relative (BEiT) or rotary "
            "positions other than DINOv3's are not supported"
        )
    positions = hints.shape(state, POSITIONS, 3, "not a plain vision transformer")[1]
    grid = math.isqrt(positions)
    class_position = grid * grid != positions
    if class_position and grid * grid != positions - 1:
        raise DataError(
            f"{hints.where}: {hints.name(POSITIONS)} has {positions} positions, expected a "
            "square, or one more for the class token"
        )
    return grid, class_position


def periods(head_dim: int) -> Tensor:
    """Return the periods of DINOv3's rotary positions, (head_dim / 4,), in float32.

    They are 100 ** (2 i / (head_dim / 2)), see dinov3/layers/rope_position_encoding.py.
    """
    import torch

    count = head_dim // 4
    return THETA ** (torch.arange(count, dtype=torch.float32) / count)


def _mask_biases(state: dict[str, Tensor], hints: Hints) -> None:
    """Multiply biases by their masks, whose part for keys is 0 in DINOv3 (in place)."""
    for key in [key for key in state if key.endswith(".bias_mask")]:
        mask, bias = state.pop(key), state.get(key.removesuffix("_mask"))
        if bias is None or bias.shape != mask.shape or not bool(mask.isfinite().all()):
            raise DataError(
                f"{hints.where}: {hints.name(key)} is no mask of "
                f"{hints.name(key.removesuffix('_mask'))}: it has NaN, as a "
                "network that was never initialized, or another shape"
            )
        state[key.removesuffix("_mask")] = bias * mask


def _join_biases(state: dict[str, Tensor], hints: Hints) -> None:
    """Join biases of queries, keys and values; a part that no block has is 0 (in place)."""
    parts = [part for part in "qkv" if f"blocks.0.attn.{part}_bias" in state]
    for block in sorted({key.rpartition(".attn.")[0] for key in state if ".attn." in key}):
        names = {part: f"{block}.attn.{part}_bias" for part in parts}
        if missing := [name for name in names.values() if name not in state]:
            raise DataError(f"{hints.where}: {hints.name(missing[0])} is missing")
        found = {part: state.pop(name) for part, name in names.items()}
        if found:
            import torch

            zero = torch.zeros_like(next(iter(found.values())))
            state[f"{block}.attn.qkv.bias"] = torch.cat([found.get(p, zero) for p in "qkv"])


def _num_heads(width: int, hints: Hints) -> int:
    """Return the number of heads from the option, the metadata, or the name of the network."""
    where = hints.where
    if "num_heads" in hints.requested:
        heads: int = hints.requested["num_heads"]
        if heads < 1 or width % heads:
            raise UserError(f"--num-heads {heads}: does not divide the width {width} of {where}")
        stated = hints.recorded.get("num_attention_heads", heads)
        _check_recorded("num-heads", heads, stated, where)
        return heads
    if recorded := hints.recorded.get("num_attention_heads"):
        if width % recorded:
            raise DataError(
                f"{where}: records {recorded} attention heads, which do not divide its width "
                f"{width}"
            )
        return int(recorded)
    known = hints.metadata.get("num_heads", {}).get(width) or hints.metadata.get("timm")
    if known and width % known == 0:
        return int(known)
    match = _TIMM_ARCH.fullmatch(hints.arch) if isinstance(hints.arch, str) else None
    if match and width % _TIMM_HEADS[match[1]] == 0:
        return _TIMM_HEADS[match[1]]
    named = f" named {format_value(hints.arch)}" if isinstance(hints.arch, str) else ""
    raise UserError(
        f"{where}: a vision transformer{named} of width {width}, whose number of attention heads "
        f"no tensor determines; give --num-heads as its training had it ({_USUAL_HEADS})",
        option="num_heads",
    )


# A detector interpolates positions itself, so larger images are not needed here.
MAX_PATCH_PX, MAX_IMAGE_PX = 64, 1024


def _size(name: str, requested: Mapping[str, Any], otherwise: int, largest: int) -> int:
    size: int = requested.get(name, otherwise)
    if name in requested and not 1 <= size <= largest:
        raise UserError(f"--{name.replace('_', '-')} {size}: expected 1..{largest} px")
    return size


def _float32(state: Mapping[str, Tensor], key: str, where: str) -> Tensor:
    if str(state[key].dtype) != "torch.float32":
        raise DataError(f"{where}: {key} is {state[key].dtype}, expected floating point")
    return state[key]


def tensors_in_timm(
    architecture: ViTArchitecture, tensors: dict[str, Tensor], names: Collection[str]
) -> dict[str, Tensor]:
    """Return tensors by the names of timm's network; see `Family.tensors_in_timm`.

    timm has rotary positions in `Eva` (timm/models/eva.py), without a tensor for the periods.
    """
    if not architecture.rotary:
        return tensors
    renamed: dict[str, Tensor] = {}
    for name, value in tensors.items():
        block = name.removesuffix(".attn.qkv.bias") if name.endswith(".attn.qkv.bias") else ""
        if name == PERIODS:
            continue
        if block:
            parts = value.chunk(3)
            renamed |= {f"{block}.attn.q_bias": parts[0], f"{block}.attn.v_bias": parts[2]}
        elif architecture.swiglu and ".mlp.fc1." in name:
            gate, other = value.chunk(2)
            renamed |= {name.replace("fc1", "fc1_g"): gate, name.replace("fc1", "fc1_x"): other}
        else:
            own = re.sub(r"\.ls(\d)\.gamma$", r".gamma_\1", name)
            renamed[own] = value
    for name in names - renamed.keys():
        if name.endswith((".q_bias", ".v_bias")):  # left out because they are zero
            renamed[name] = tensors[PATCHES].new_zeros(architecture.embed_dim)
    return renamed


def fold_layer_scale(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fold LayerScale into the layers before it: gamma * (W x + b) = (gamma W) x + gamma b.

    Deviation: the fine-tuned network has other parameters than the source, so the optimizer's
    steps and weight decay act on another network.

    Raises:
        DataError: If shapes of tensors do not fit.
    """
    folded = {key: value for key, value in state.items() if not key.endswith(".gamma")}
    for scale, module in (("ls1", "attn.proj"), ("ls2", "mlp.fc2")):
        for key in [key for key in state if key.endswith(f".{scale}.gamma")]:
            name, gamma = f"{key.removesuffix(f'{scale}.gamma')}{module}", state[key]
            for tensor in (f"{name}.weight", f"{name}.bias"):
                if tensor not in state:
                    continue  # the check of the whole network reports it
                old = state[tensor]
                if old.shape[:1] != gamma.shape:
                    raise DataError(
                        f"{key}: got shape {list(gamma.shape)}, expected {list(old.shape[:1])}"
                    )
                folded[tensor] = (gamma[:, None] if old.dim() == 2 else gamma) * old
    return folded


# Keys of a detector's configuration; ViT-B by default.
TASK_KEYS: Keys = {
    "MODEL.VIT.PATCH_SIZE": contract_key(
        16, "Side of a patch, px: a power of two from 4.", role=Role.PROTOCOL
    ),
    "MODEL.VIT.EMBED_DIM": contract_key(768, "Width.", role=Role.PROTOCOL),
    "MODEL.VIT.DEPTH": contract_key(12, "Number of blocks.", role=Role.PROTOCOL),
    "MODEL.VIT.NUM_HEADS": contract_key(12, "Number of attention heads."),
    "MODEL.VIT.MLP_DIM": contract_key(3072, "Hidden width of the MLPs.", role=Role.PROTOCOL),
    "MODEL.VIT.QKV_BIAS": contract_key(True, "Use a bias in queries, keys and values."),
    "MODEL.VIT.LAYER_SCALE": contract_key(False, "Use LayerScale."),
    "MODEL.VIT.CLASS_POSITION": contract_key(
        True, "The position embedding starts with a slot for a class token (which is not used)."
    ),
    "MODEL.VIT.PRETRAIN_IMAGE_SIZE": contract_key(
        224, "Side of the images that the position embedding is for, px."
    ),
    "MODEL.VIT.LAYER_NORM_EPS": contract_key(1e-6, "Epsilon of LayerNorm."),
    "MODEL.VIT.ACTIVATION": contract_key(
        GELU, "Activation of the MLPs.", one_of(*ACTIVATIONS.values())
    ),
    "MODEL.VIT.PRE_NORM": contract_key(False, "Use a norm before the first block, as CLIP."),
    "MODEL.VIT.PATCH_BIAS": contract_key(True, "Use a bias in the patch embedding."),
    "MODEL.VIT.POSITION_RULE": contract_key(
        BICUBIC,
        "Interpolation of the position embedding for images of other sizes; Detectron2's is "
        "bicubic.",
        one_of(*POSITION_RULES),
    ),
    "MODEL.VIT.SWIGLU": contract_key(
        False, "Gate the MLPs with SiLU; MLP_DIM is the width after it."
    ),
    "MODEL.VIT.ROTARY": contract_key(
        False,
        "Use the rotary positions of DINOv3 (arXiv 2508.10104), with coordinates of the whole"
        " map in windows, too, instead of added ones.",
    ),
    "MODEL.VIT.TOKENS": contract_key(
        0, "Number of tokens in the weights: the class token, then registers."
    ),
    "MODEL.VIT.KEEP_TOKENS": Key(
        False,
        "Keep these tokens before the patches in every block. Each window has copies, which count "
        "as one token together and are averaged. False: leave the tokens out, as ViTDet.",
    ),
    "MODEL.VIT.ROPE_RESCALE": Key(
        0.0,
        "Multiply the coordinates of rotary positions by a random number in each block while "
        "training, log-uniform in [1/N, N]; DINOv3's pre-training has 2. 0: never.",
    ),
    "MODEL.VIT.WINDOW_SIZE": Key(
        14, "Side of the attention windows, in patches; 0: global attention in every block."
    ),
    "MODEL.VIT.GLOBAL_BLOCKS": Key(
        [], "Indices of blocks with global attention, from 0; empty: the last of each quarter."
    ),
    "MODEL.VIT.REL_POS": Key(
        True,
        "Use decomposed relative positions in every attention (arXiv 2112.01526); they start at 0.",
    ),
    "MODEL.VIT.DROP_PATH": Key(
        0.0,
        "Stochastic depth: drop probability of the last block, in [0, 1); increases linearly from "
        "0 at the first block.",
        tunable=True,
    ),
    "MODEL.VIT.CHECKPOINT_BLOCKS": Key(
        False,
        "Recompute a block's activations in the backward pass: less memory, more time.",
        role=Role.WEIGHTS,
    ),
}


@register
class ViTFamily(Family):
    """Plain vision transformers of any size."""

    name = "vit"
    networks = "plain vision transformers"
    architecture = ViTArchitecture
    schemes = SCHEMES
    dropped = DROPPED
    heads = HEADS
    owner = "timm's own class"
    features = MappingProxyType({"norm": FEATURE})
    detectron2 = DETECTRON2
    norms = r"norm[12]\.weight$"
    keys = TASK_KEYS
    options = OPTIONS
    lookalikes = LOOKALIKES
    obstacles = OBSTACLES
    tokens = (CLASS_TOKEN, REGISTERS)
    required_option = f"--num-heads if the network has no name ({_USUAL_HEADS})"
    assumes = "pre-norm, additive positions of a square grid only"
    pixels = (
        "vision transformers of timm often have 127.5 for both: if so, give --mean 127.5 127.5 "
        "127.5 --std 127.5 127.5 127.5"
    )
    words = ("vit", "deit")
    plain_names = _PLAIN_NAMES
    model_types = (
        *("vit", "vit_mae", "vit_msn", "ijepa"),
        *("dinov2", "dinov2_with_registers", "dinov3_vit"),
        *("clip", "clip_vision_model", "altclip_vision_model", "chinese_clip_vision_model"),
        *("siglip", "siglip_vision_model"),
        *("siglip2", "siglip2_vision_model", "metaclip_2", "metaclip_2_vision_model"),
    )

    def recognize(self, state: Mapping[str, Tensor], hints: Hints) -> ViTArchitecture:
        """Return the architecture of a vision transformer, see `Family.recognize`."""
        where, kind = hints.where, "not a plain vision transformer"
        width, channels, patch, patch_width = hints.shape(state, "patch_embed.proj.weight", 4, kind)
        if (channels, patch) != (3, patch_width):
            raise DataError(
                f"{where}: {hints.name('patch_embed.proj.weight')} has shape "
                f"{[width, channels, patch, patch_width]}, expected square patches of RGB"
            )
        depth = count_blocks(state, hints, "blocks.", "norm1.weight", kind)
        metadata = hints.metadata
        rotary = "rotary" in metadata
        grid, class_position = (GRID, False) if rotary else _grid(state, hints)
        hidden, mlp_dim = (
            hints.shape(state, f"blocks.0.mlp.{name}.weight", 2, kind)[i]
            for i, name in enumerate(("fc1", "fc2"))
        )
        swiglu = hidden == 2 * mlp_dim
        pre_norm = "norm_pre.weight" in state
        if pre_norm and (ATTENTION_POOL in hints.dropped or FINAL_NORM not in hints.dropped):
            raise DataError(
                f"{where}: {hints.name('norm_pre.weight')} but not the final norm alone at the "
                "end, so it may be a Perception Encoder, whose positions are rotary as well; "
                "CLIP's whole tower is supported"
            )
        if "usual_eps" in metadata and "layer_norm_eps" not in metadata:
            hints.notes.append(
                f"no config.json next to the file has it: assuming LayerNorm eps "
                f"{metadata['usual_eps']:g}, the default of transformers"
            )
        if "pixels" in metadata and hints.assumed_pixels:
            hints.notes.append(f"assuming {metadata['pixels']}")
        registers = None if "reg_token" in state else hints.tokens.get("reg_token")
        # timm's registers have slots in the positions, or the class token has none either.
        registers_of_dinov2 = class_position and "reg_token" in {*state, *hints.tokens}
        return ViTArchitecture(
            embed_dim=width,
            depth=depth,
            num_heads=_num_heads(width, hints),
            mlp_dim=mlp_dim if swiglu else hidden,
            patch_size=patch,
            image_size=grid * patch,
            qkv_bias="blocks.0.attn.qkv.bias" in state,
            layer_scale="blocks.0.ls1.gamma" in state,
            class_position=class_position,
            layer_norm_eps=metadata.get(
                "layer_norm_eps", metadata.get("usual_eps", LAYER_NORM_EPS)
            ),
            class_token=CLASS_TOKEN in hints.dropped,
            registers=0 if registers is None else registers.numel() // width,
            final_norm=FINAL_NORM in hints.dropped,
            activation=_activation(hints, is_known=rotary or swiglu),
            pre_norm=pre_norm,
            patch_bias="patch_embed.proj.bias" in state,
            swiglu=swiglu,
            rotary=rotary,
            tokens=sum(state[name].numel() for name in TOKENS if name in state) // width,
            position_rule=BICUBIC if rotary else _position_rule(metadata, registers_of_dinov2),
        )

    def build(self, architecture: ViTArchitecture) -> nn.Module:
        """Build the network that both engines train."""
        from convert.modeling.vit import ViT

        return ViT(architecture)

    def reference(self, architecture: ViTArchitecture) -> nn.Module:
        """Build timm's own class."""
        from convert.modeling.vit_reference import reference

        return reference(architecture)

    def image_size(self, architecture: ViTArchitecture) -> tuple[int, int]:
        """Return the size of the images that the positions are for."""
        return architecture.image_size, architecture.image_size

    def complete(self, state: dict[str, Tensor], hints: Hints) -> dict[str, Tensor]:
        """Return the tensors of the backbone; see `Family.complete`.

        A network with a class token and registers keeps both. DINOv3's biases are multiplied by
        their masks, concatenated, and left out if all are zero, as in most of its networks. The
        periods of rotary positions are the file's or, if it has none, those of DINOv3's code.

        Raises:
            DataError: If masks or biases do not fit, or a mask has NaN.
        """
        tokens = {name: hints.tokens[name] for name in TOKENS if name in hints.tokens}
        is_rotary = "rotary" in hints.metadata
        if len(tokens) == len(TOKENS) or is_rotary:
            state = {**state, **tokens}
        if not is_rotary:
            return state
        if TOKENS[0] not in tokens:
            raise DataError(
                f"{hints.where}: rotary positions without a class token; of such networks only "
                "DINOv3's are supported"
            )
        _mask_biases(state, hints)
        _join_biases(state, hints)
        biases = [key for key in state if key.endswith("attn.qkv.bias")]
        if biases and not any(bool(state[key].any()) for key in biases):
            state = {key: value for key, value in state.items() if key not in biases}
            hints.notes.append("the biases of queries, keys and values are left out: all are zero")
        if PERIODS not in state:
            width = hints.shape(state, PATCHES, 4, "not a vision transformer")[0]
            state[PERIODS] = periods(width // _num_heads(width, hints))
            hints.notes.append(
                "the periods of rotary positions are not in the file: computed in float32 from "
                f"base {THETA}; Meta's files have them rounded to bfloat16"
            )
        return state

    def source_features(
        self,
        architecture: ViTArchitecture,
        state: Mapping[str, Tensor],
        tokens: Mapping[str, Tensor],
        image: Tensor,
    ) -> tuple[Mapping[str, str], Mapping[str, Tensor]]:
        """Compute the tokens after the last block, see `Family.source_features`."""
        from convert.modeling.vit_reference import token_features

        return token_features(architecture, state, tokens, image)

    def effect_of_tokens(
        self,
        architecture: ViTArchitecture,
        state: Mapping[str, Tensor],
        tokens: Mapping[str, Tensor],
    ) -> str:
        """Describe how much the last map changes without class token and registers."""
        from convert.modeling.vit_reference import effect_of_tokens

        return effect_of_tokens(architecture, state, tokens)

    def tensors_in_timm(
        self, architecture: ViTArchitecture, tensors: dict[str, Tensor], names: Collection[str]
    ) -> dict[str, Tensor]:
        """Return tensors by the names of timm's `VisionTransformer` or `Eva`."""
        return tensors_in_timm(architecture, tensors, names)

    def adapt(
        self,
        architecture: ViTArchitecture,
        state: dict[str, Tensor],
        requested: Mapping[str, Any],
        where: str,
    ) -> Adapted:
        """Resize patches and positions, then fold LayerScale, if the options request it.

        A new patch size keeps the grid, so the image size scales with the patch size unless an
        option requests another one.

        Deviation: with other sizes, a detector does not start from the pre-trained tensors
        themselves.

        Raises:
            UserError: If sizes do not fit, or there is no LayerScale to fold.
            DataError: If tensors are damaged.
        """
        a, changes = architecture, []
        patch = _size("patch_size", requested, a.patch_size, MAX_PATCH_PX)
        rule = requested.get("patch_rule", next(iter(PATCH_RULES)))
        image = _size("image_size", requested, a.image_size // a.patch_size * patch, MAX_IMAGE_PX)
        if image % patch:
            raise UserError(f"--image-size {image}: expected a multiple of the patch size {patch}")
        if patch != a.patch_size:
            if rule not in PATCH_RULES:
                raise UserError(
                    f"--patch-rule: got {rule!r}, expected one of {', '.join(PATCH_RULES)}"
                )
            state = {**state, PATCHES: PATCH_RULES[rule](_float32(state, PATCHES, where), patch)}
            changes.append(f"patches {a.patch_size} to {patch} px by {rule}")
        elif "patch_rule" in requested:
            raise UserError(
                f"--patch-rule: {where} keeps its patch size; give --patch-size as well"
            )
        old, new = a.image_size // a.patch_size, image // patch
        if new != old and a.rotary:
            raise UserError(f"--image-size: {where} has rotary positions, which are for any size")
        if new != old:
            positions = _float32(state, POSITIONS, where)
            positions = resize_positions(positions, new, a.class_position, a.position_rule)
            state = {**state, POSITIONS: positions}
            how = a.position_rule.replace("_", " and ")
            changes.append(f"positions {old}x{old} to {new}x{new} by {how} interpolation")
        a = dataclasses.replace(a, patch_size=patch, image_size=image)
        compared = (a, state)
        if requested.get("fold_layer_scale"):
            if not a.layer_scale:
                raise UserError(f"--fold-layer-scale: {where} has no LayerScale")
            a, state = dataclasses.replace(a, layer_scale=False), fold_layer_scale(state)
            changes.append("LayerScale folded")
        return Adapted(a, state, tuple(changes), compared)


def resize_positions(
    positions: Tensor, grid: int, class_position: bool, rule: str = BICUBIC
) -> Tensor:
    """Interpolate positions for another square grid; the class token's slot is kept.

    (1, n, C) -> (1, grid * grid + class_position, C).
    """
    import torch

    first, rest = positions[:, : int(class_position)], positions[:, int(class_position) :]
    side = round(rest.shape[1] ** 0.5)
    resized = resize_map(rest.unflatten(1, (side, side)), (grid, grid), rule)
    return torch.cat([first, resized.flatten(1, 2)], dim=1).contiguous()


def resize_map(positions: Tensor, size: tuple[int, int], rule: str) -> Tensor:
    """Interpolate a map of positions by one of `POSITION_RULES`, (1, H, W, C) -> (1, h, w, C)."""
    import torch.nn.functional as F

    resized = F.interpolate(positions.permute(0, 3, 1, 2), size, **POSITION_RULES[rule])
    return resized.permute(0, 2, 3, 1)
