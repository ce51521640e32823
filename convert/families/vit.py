"""Plain vision transformers, as Detectron2's `ViT` (detectron2/modeling/backbone/vit.py).

That class has neither class token, registers nor final norm; they are dropped by rules. What only
other transformers have (rotary or relative positions, gated MLPs) is in no table of names, so a
file with it is refused by the tensor's name. Inside the converter tensors have timm's names
(timm/models/vision_transformer.py 1.0), which are also those of Detectron2's class.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from convert.families.base import (
    FAMILIES,
    PLAIN,
    USUAL,
    Adapted,
    Architecture,
    Family,
    Hints,
    Names,
    Option,
    Scheme,
    check_layer_norms,
    first_rule,
    later,
)
from moco.common.errors import DataError, UserError, shown

if TYPE_CHECKING:
    from torch import Tensor

FEATURE = "last_feat"  # Detectron2's name
# How patches are resized, the default first; see convert/families/vit.py.
PATCH_RULES = ("pseudo-inverse", "bicubic")
# Fields of the architecture -> their keys below MODEL.VIT. The other fields are about the source.
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
}


@dataclasses.dataclass(frozen=True)
class ViTArchitecture(Architecture):
    """A plain vision transformer; raises UserError out of its range.

    Attributes:
        mlp_dim: hidden width of the MLPs.
        image_size: px, for which the position embedding was trained.
        qkv_bias: whether queries, keys and values have a bias.
        layer_scale: whether blocks have LayerScale.
        class_position: whether the position embedding has a first slot, for the class token.
        class_token, registers, final_norm: what the source has, and the backbone here has not;
            registers are counted.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, whole in (("num_heads", "embed_dim"), ("patch_size", "image_size")):
            if getattr(self, whole) % getattr(self, name):
                raise UserError(
                    f"{name}: got {getattr(self, name)}, which does not divide {whole} "
                    f"{getattr(self, whole)}"
                )

    def __str__(self) -> str:
        text = f"ViT of {self.depth} blocks, width {self.embed_dim}, {self.num_heads} heads"
        return text + (", LayerScale" if self.layer_scale else "")

    def d2_keys(self) -> dict[str, Any]:
        its = dataclasses.asdict(self)
        return {f"MODEL.VIT.{key}": its[name] for name, key in KEYS.items()}

    def details(self) -> str:
        slot = "with" if self.class_position else "without"
        lacks = [
            *(["class token"] if self.class_token else []),
            *([f"{self.registers} registers"] if self.registers else []),
            *(["final norm"] if self.final_norm else []),
        ]
        return (
            f"patches of {self.patch_size} px, positions of {self.image_size} px images {slot} a "
            f"class slot, LayerNorm eps {self.layer_norm_eps:g}"
            + (f", without the source's {', '.join(lacks)}" if lacks else "")
        )

    def lost_options(self) -> list[str]:
        return [f"--num-heads {self.num_heads}"]

    def task_key(self) -> tuple[str, str]:
        return "MODEL.VIT.EMBED_DIM", "ViT of width {}"

    def example_task(self) -> tuple[str, dict[str, Any], str]:
        keys = {"EMBED_DIM": 192, "DEPTH": 12, "NUM_HEADS": 3, "MLP_DIM": 768}
        keys = {f"MODEL.VIT.{name}": value for name, value in keys.items()}
        data = "DATASETS.VOC_DIR path/to/voc "
        return "configs/voc/faster_rcnn_ViT_Ti_small.yaml", keys, data


HUGGING_FACE = "huggingface/transformers"
TORCHVISION = "pytorch/vision ViT"

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
# Beginnings of names inside a transformer; one that the tables and DROPPED lack is another's.
_OWN = re.compile(
    r"(patch_embed|blocks|pos_embed|norm_pre|rel_pos_bias|rope|rope_embed|storage_tokens|"
    r"dist_token|attn_pool)\b"
)


def _with_bias(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of tensors from those of modules; "attn.qkv#0" is a part of its tensors."""
    for theirs, own in names.items():
        module, mark, part = own.partition("#")
        for tensor in ("weight", "bias"):
            yield f"{theirs}.{tensor}", f"{module}.{tensor}{mark}{part}"


_BLOCK = {name: name for name in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}


def _in_block(start: str, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(f"{start}{theirs}", f"blocks.*.{own}") for theirs, own in pairs]


def _timms(start: str) -> Names:
    """Return timm's names, where those of a block begin so."""
    own = [*_with_bias(_BLOCK), *((f"ls{i}.gamma", f"ls{i}.gamma") for i in (1, 2))]
    # DeiT III's LayerScale: facebookresearch/deit models_v2.py, Layer_scale_init_Block.
    deit = [(f"gamma_{i}", f"ls{i}.gamma") for i in (1, 2)]
    top = [("pos_embed", "pos_embed"), *_with_bias({"patch_embed.proj": "patch_embed.proj"})]
    return Names([*top, *_in_block(start, [*own, *deit])])


TIMM = _timms("blocks.*.")
# facebookresearch/dinov2 dinov2/models/vision_transformer.py, BlockChunk: chunk, then the number of
# the block in the whole network.
CHUNKED = _timms("blocks.?.*.")


def known(name: str) -> str | None:
    """Return the name itself where a backbone has it, or None."""
    return name if TIMM.own(name) == name else None


def _table(
    top: Mapping[str, str],
    block: str,
    modules: Mapping[str, str],
    others: Mapping[str, str],
    **scheme: Any,
) -> Scheme:
    """Return a scheme of other names than timm's.

    Args:
        top: tensor outside the blocks -> timm's; and of these modules.
        block: how names in a block begin, "*" its number.
        modules: module of a block -> timm's.
        others: tensor of a block -> timm's.
        scheme: further fields of `Scheme`.
    """
    tensors = {theirs: own for theirs, own in top.items() if own in _TENSORS}
    pairs = [*tensors.items(), *_with_bias({k: v for k, v in top.items() if k not in tensors})]
    pairs += _in_block(block, [*_with_bias(modules), *others.items()])
    names = Names(pairs)
    begin = {theirs.split(".")[0] for theirs, _ in pairs}
    words = re.compile(rf"({'|'.join(sorted(begin))})\b")
    first, norm = (names.theirs(n) or "" for n in (_FIRST, "blocks.0.norm1.weight"))
    return Scheme(
        (first, norm), names.own, words, lambda name: names.theirs(name) or name, **scheme
    )


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
        },
        block,
        modules,
        {f"layer_scale{i}.lambda1": f"ls{i}.gamma" for i in (1, 2)},
        plain=HUGGING_FACE,
        says={"usual_eps": eps},
    )


_FIRST = "patch_embed.proj.weight"
_TENSORS = ("cls_token", "register_tokens", "mask_token", "pos_embed")  # the others are modules
_VIT_NORMS = ("layernorm_before", "layernorm_after")
_OLD_MLP, _MLP = "intermediate.dense output.dense", "mlp.fc1 mlp.fc2"
SCHEMES = {
    USUAL: Scheme((_FIRST, "blocks.0.norm1.weight"), TIMM.own, _OWN, plain=PLAIN, is_owners=True),
    "chunked": Scheme((_FIRST, "blocks.0.0.norm1.weight"), CHUNKED.own, _OWN, plain=PLAIN),
    "transformers": _hugging_face("encoder.layer.*.", *_VIT_NORMS, _OLD_MLP, 1e-12),
    "transformers 5": _hugging_face("layers.*.", *_VIT_NORMS, _MLP, 1e-12),
    "transformers DINOv2": _hugging_face("encoder.layer.*.", "norm1", "norm2", _MLP, 1e-6),
    # torchvision/models/vision_transformer.py, whose builders have these heads.
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

# Words of the names that plain ones have in timm and in the projects of convert/projects.py.
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
    """Return what the option says, else the project, else the file's name of the network."""
    where = hints.where
    if "num_heads" in hints.asked:
        heads: int = hints.asked["num_heads"]
        if heads < 1 or width % heads:
            raise UserError(f"--num-heads {heads}: does not divide the width {width} of {where}")
        return heads
    known = hints.says.get("num_heads", {}).get(width) or hints.says.get("timm")
    if known and width % known == 0:
        return int(known)
    match = _TIMM_ARCH.fullmatch(hints.arch) if isinstance(hints.arch, str) else None
    if match and width % _TIMM_HEADS[match[1]] == 0:
        return _TIMM_HEADS[match[1]]
    raise UserError(
        f"{where}: a vision transformer of width {width}, whose number of attention heads is in no "
        f"tensor; give --num-heads as its training had it ({_USUAL_HEADS})"
    )


PATCHES, POSITIONS = "patch_embed.proj.weight", "pos_embed"
# Larger images are for the detector, which interpolates positions itself.
MAX_PATCH_PX, MAX_IMAGE_PX = 64, 1024


def adapt(
    architecture: ViTArchitecture, state: dict[str, Tensor], asked: Mapping[str, Any], where: str
) -> Adapted:
    """Resize patches and positions, then fold LayerScale, as far as the options request it.

    Patches of another size keep the grid, so the image size grows with them unless it is given,
    too. Raises UserError: sizes that do not fit, or no LayerScale; DataError: damaged tensors.
    """
    a, changes = architecture, []
    patch = _size("patch_size", asked, a.patch_size, MAX_PATCH_PX)
    rule = asked.get("patch_rule", PATCH_RULES[0])
    image = _size("image_size", asked, a.image_size // a.patch_size * patch, MAX_IMAGE_PX)
    if image % patch:
        raise UserError(f"--image-size {image}: is not a multiple of the patch size {patch}")
    if patch != a.patch_size:
        if rule not in RULES:
            raise UserError(f"--patch-rule: got {rule!r}, expected one of {', '.join(RULES)}")
        state = {**state, PATCHES: RULES[rule](_float32(state, PATCHES, where), patch)}
        changes.append(f"patches {a.patch_size} to {patch} px by {rule}")
    elif "patch_rule" in asked:
        raise UserError(f"--patch-rule: {where} keeps its patches; give --patch-size, too")
    old, new = a.image_size // a.patch_size, image // patch
    if new != old:
        positions = resize_positions(_float32(state, POSITIONS, where), new, a.class_position)
        state = {**state, POSITIONS: positions}
        changes.append(f"positions {old}x{old} to {new}x{new} by bicubic interpolation")
    a = dataclasses.replace(a, patch_size=patch, image_size=image)
    proof = (a, state)
    if asked.get("fold_layer_scale"):
        if not a.layer_scale:
            raise UserError(f"--fold-layer-scale: {where} has no LayerScale")
        a, state = dataclasses.replace(a, layer_scale=False), fold_layer_scale(state)
        changes.append("LayerScale folded")
    return Adapted(a, state, tuple(changes), proof)


def _size(name: str, asked: Mapping[str, Any], otherwise: int, largest: int) -> int:
    size: int = asked.get(name, otherwise)
    if name in asked and not 1 <= size <= largest:
        raise UserError(f"--{name.replace('_', '-')} {size}: expected 1..{largest} px")
    return size


def _float32(state: Mapping[str, Tensor], key: str, where: str) -> Tensor:
    if str(state[key].dtype) != "torch.float32":
        raise DataError(f"{where}: {key} is {state[key].dtype}, expected floating point")
    return state[key]


def resize_patches(kernel: Tensor, size: int) -> Tensor:
    """The kernel whose response to a resized patch is nearest to the old one's to the patch.

    PI-resize (FlexiViT, arXiv 2212.08013, Eq. 4): with the bilinear resize x -> B x it is
    (B^T)^+ w; where patches grow, the responses are equal. B is the Kronecker product of a matrix
    with itself, so its pseudo-inverse is that of theirs.

    kernel: (C, 3, p, p) -> (C, 3, size, size).
    """
    import torch
    import torch.nn.functional as F

    basis = torch.eye(kernel.shape[-1], dtype=torch.float64)[None]
    # (p, size): row i is the i-th unit vector, resized.
    resized = F.interpolate(basis, size=size, mode="linear", align_corners=False)[0]
    inverse = torch.linalg.pinv(resized)  # (size, p)
    return (inverse @ kernel.double() @ inverse.T).to(kernel.dtype)


def interpolate_patches(kernel: Tensor, size: int) -> Tensor:
    """Resize the kernel as an image, bicubic: (C, 3, p, p) -> (C, 3, size, size)."""
    import torch.nn.functional as F

    return F.interpolate(kernel, size=(size, size), mode="bicubic", align_corners=False)


def resize_positions(positions: Tensor, grid: int, class_position: bool) -> Tensor:
    """Positions for another square grid, as detectron2/modeling/backbone/utils.py, get_abs_pos.

    The class token's slot stays as it is. (1, n, C) -> (1, grid * grid + class_position, C).
    """
    import torch
    import torch.nn.functional as F

    first, rest = positions[:, : int(class_position)], positions[:, int(class_position) :]
    side = round(rest.shape[1] ** 0.5)
    grids = rest.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    grids = F.interpolate(grids, size=(grid, grid), mode="bicubic", align_corners=False)
    return torch.cat([first, grids.flatten(2).transpose(1, 2)], dim=1).contiguous()


def fold_layer_scale(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same function without LayerScale: gamma * (W x + b) = (gamma W) x + gamma b.

    Deviation: what is fine-tuned has other parameters than the source, so the optimizer's steps
    and weight decay act on another network.

    Raises DataError: tensors whose shapes do not fit.
    """
    folded = {key: value for key, value in state.items() if not key.endswith(".gamma")}
    for scale, module in (("ls1", "attn.proj"), ("ls2", "mlp.fc2")):
        for key in [key for key in state if key.endswith(f".{scale}.gamma")]:
            name, gamma = f"{key.removesuffix(f'{scale}.gamma')}{module}", state[key]
            for tensor in (f"{name}.weight", f"{name}.bias"):
                if tensor not in state:
                    continue  # the check of the whole network names it
                old = state[tensor]
                if old.shape[:1] != gamma.shape:
                    raise DataError(f"{key}: {list(gamma.shape)} does not fit {list(old.shape)}")
                folded[tensor] = (gamma[:, None] if old.dim() == 2 else gamma) * old
    return folded


RULES = dict(zip(PATCH_RULES, (resize_patches, interpolate_patches), strict=True))


_NOT_PROTOCOL = (
    "NUM_HEADS",
    "QKV_BIAS",
    "LAYER_SCALE",
    "CLASS_POSITION",
    "PRETRAIN_IMAGE_SIZE",
    "LAYER_NORM_EPS",
    "CHECKPOINT_BLOCKS",
)
# Of a detector's configuration.
TASK_KEYS: dict[str, Any] = {
    # A vision transformer, ViT-B by default. The first ten keys are set by the weights' contract.
    "MODEL.VIT.PATCH_SIZE": 16,  # px; a power of two from 4
    "MODEL.VIT.EMBED_DIM": 768,
    "MODEL.VIT.DEPTH": 12,  # number of blocks
    "MODEL.VIT.NUM_HEADS": 12,
    "MODEL.VIT.MLP_DIM": 3072,  # hidden width of the MLPs
    "MODEL.VIT.QKV_BIAS": True,
    "MODEL.VIT.LAYER_SCALE": False,
    # Whether the position embedding has a first slot, for a class token (which is not used).
    "MODEL.VIT.CLASS_POSITION": True,
    "MODEL.VIT.PRETRAIN_IMAGE_SIZE": 224,  # px, of the position embedding
    "MODEL.VIT.LAYER_NORM_EPS": 1e-6,
    # Side of the windows that attention is within, in patches; 0: it is global in every block.
    "MODEL.VIT.WINDOW_SIZE": 14,
    # Blocks with global attention all the same, from 0; empty: the ends of four equal parts.
    "MODEL.VIT.GLOBAL_BLOCKS": [],
    # Decomposed relative positions in every attention (arXiv 2112.01526), 0 at initialization.
    "MODEL.VIT.REL_POS": True,
    "MODEL.VIT.DROP_PATH": 0.0,  # of the last block, rising linearly from 0 at the first; 0..1
    # Compute a block's activations again in the backward pass: less memory, more time.
    "MODEL.VIT.CHECKPOINT_BLOCKS": False,
}


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
        build=later("convert.modeling.vit:ViT"),
        reference=later("convert.modeling.vit:reference"),
        owner="timm's VisionTransformer",
        keys=TASK_KEYS,
        not_protocol=tuple(f"MODEL.VIT.{name}" for name in _NOT_PROTOCOL),
        features={"norm": FEATURE},
        options=OPTIONS,
        lookalikes=LOOKALIKES,
        obstacles=OBSTACLES,
        check_trained=functools.partial(check_layer_norms, pattern=r"norm[12]\.weight$"),
        image_size=lambda architecture: (architecture.image_size, architecture.image_size),
        tokens=(CLASS_TOKEN, REGISTERS),
        effect=later("convert.modeling.vit:effect_of_tokens"),
        adapt=later("convert.families.vit:adapt"),
        untold=f"--num-heads where no name says it ({_USUAL_HEADS})",
        assumes="exact GELU, norms before the branches, no positions but those that are added",
        pixels="vision transformers of timm often have 127.5 for both: then give --mean 127.5 "
        "127.5 127.5 --std 127.5 127.5 127.5",
        words=("vit", "deit"),
        plain_names=_PLAIN_NAMES,
        source_features=later("convert.modeling.vit:source_features"),
    )
