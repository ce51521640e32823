"""Swin Transformer V1: architecture, names of tensors and recognition.

The family's own names are timm's, whose stages start with the merging of patches. Detectors have
Detectron2's names, which are the official ones and in which stages end with the merging.

Names: microsoft/Swin-Transformer@f82860b models/swin_transformer.py, which detectron2 0.6 modeling/
backbone/swin.py has as well; timm/models/swin_transformer.py (1.0.31), transformers/models/swin/
modeling_swin.py (4.57 and 5.23), torchvision/models/swin_transformer.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from convert.families.base import (
    DROP_PATH,
    FEATURES,
    HUGGING_FACE,
    PLAIN,
    USUAL,
    Family,
    Hints,
    Names,
    Pyramid,
    Scheme,
    StagedArchitecture,
    contract_key,
    count_blocks,
    network_arguments,
    register,
    table_scheme,
    weights_and_biases,
)
from moco.common.errors import DataError, UserError, format_value
from moco.common.keys import Keys, Role

if TYPE_CHECKING:
    from torch import Tensor, nn

PATCH_PX = 4
LAYER_NORM_EPS = 1e-5  # of every implementation


@dataclasses.dataclass(frozen=True)
class SwinArchitecture(StagedArchitecture):
    """Architecture of a Swin V1.

    Attributes:
        embed_dim: Number of channels of the first stage; each further one has twice as many.
        depths: Number of blocks in each of the four stages.
        num_heads: Number of attention heads in each stage.
        window_size: Side of a window, in cells.
        qkv_bias: True if queries, keys and values have a bias.

    Raises:
        UserError: If a value is out of its range.
    """

    embed_dim: int
    depths: tuple[int, ...]
    num_heads: tuple[int, ...]
    window_size: int
    qkv_bias: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(dim % heads for dim, heads in zip(self.dims, self.num_heads, strict=True)):
            raise UserError(
                f"num_heads: got {list(self.num_heads)}, which do not divide the widths "
                f"{list(self.dims)}"
            )

    @property
    def dims(self) -> tuple[int, ...]:
        """Number of channels of each stage."""
        return tuple(self.embed_dim * 2**i for i in range(len(FEATURES)))

    def __str__(self) -> str:
        blocks = "-".join(map(str, self.depths))
        return f"Swin of {blocks} blocks, width {self.embed_dim}, windows of {self.window_size}"

    def details(self) -> str:
        """Describe the heads, and a missing bias."""
        heads = "-".join(map(str, self.num_heads))
        return f"{heads} heads" + ("" if self.qkv_bias else ", no bias of queries, keys and values")

    def task_key(self) -> tuple[str, str]:
        """Return MODEL.SWIN.EMBED_DIM, which distinguishes the sizes."""
        return "MODEL.SWIN.EMBED_DIM", "Swin of width {}"

    def example_task(self) -> tuple[str, dict[str, Any], str]:
        """Return the COCO task of Swin-T."""
        keys = {"EMBED_DIM": 96, "DEPTHS": [2, 2, 6, 2], "NUM_HEADS": [3, 6, 12, 24]}
        keys = {f"MODEL.SWIN.{name}": value for name, value in keys.items()}
        return "configs/coco/mask_rcnn_Swin_T_FPN_3x.yaml", keys, ""


def verification_size(architecture: SwinArchitecture) -> tuple[int, int]:
    """Return the height and width, in px, of an image whose last map is two windows.

    All maps are whole windows, because timm's class pads other maps after the shift, not before.
    """
    side = PATCH_PX * 2 ** (len(FEATURES) - 1) * architecture.window_size
    return side, 2 * side


_TABLE = "attn.relative_position_bias_table"
_FIRST = ("patch_embed.proj.weight", f"layers.0.blocks.0.{_TABLE}")
_BLOCK = {name: name for name in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")}


def _names(
    proj: str,
    norm: str,
    merging: Callable[[int], str],
    blocks: Callable[[int], str],
    modules: Mapping[str, str],
    tables: Iterable[str] = (_TABLE,),
) -> Names:
    """Return the table of names.

    Args:
        proj: Convolution of the patches.
        norm: Norm after the convolution.
        merging: Map from a stage to the name of the merging before it.
        blocks: Map from a stage to the prefix of the blocks.
        modules: Modules of a block -> timm's.
        tables: Names of a block's bias table.
    """
    pairs = [*weights_and_biases({proj: "patch_embed.proj", norm: "patch_embed.norm"})]
    for i in range(1, len(FEATURES)):
        own = f"layers.{i}.downsample"
        pairs += weights_and_biases({f"{merging(i)}.norm": f"{own}.norm"})
        pairs.append((f"{merging(i)}.reduction.weight", f"{own}.reduction.weight"))
    for i in range(len(FEATURES)):
        parts = [*((table, _TABLE) for table in tables), *weights_and_biases(modules)]
        pairs += [(f"{blocks(i)}.*.{part}", f"layers.{i}.blocks.*.{own}") for part, own in parts]
    return Names(pairs)


_PATCHES = ("patch_embed.proj", "patch_embed.norm")
TIMM = _names(*_PATCHES, lambda i: f"layers.{i}.downsample", lambda i: f"layers.{i}.blocks", _BLOCK)
OFFICIAL = _names(
    *_PATCHES, lambda i: f"layers.{i - 1}.downsample", lambda i: f"layers.{i}.blocks", _BLOCK
)
# Published files have the names of version 4, state dicts of networks of version 5 the second ones.
TRANSFORMERS = _names(
    "embeddings.patch_embeddings.projection",
    "embeddings.norm",
    lambda i: f"encoder.layers.{i - 1}.downsample",
    lambda i: f"encoder.layers.{i}.blocks",
    {
        "layernorm_before": "norm1",
        **{f"attention.self.{w}": f"attn.qkv#{i}" for i, w in enumerate(("query", "key", "value"))},
        **{f"attention.{w}_proj": f"attn.qkv#{i}" for i, w in enumerate("qkv")},
        "attention.output.dense": "attn.proj",
        "attention.o_proj": "attn.proj",
        "layernorm_after": "norm2",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
    },
    (
        "attention.self.relative_position_bias_table",
        "attention.relative_position_bias.relative_position_bias_table",
    ),
)
TORCHVISION = _names(
    "features.0.0",
    "features.0.2",
    lambda i: f"features.{2 * i}",
    lambda i: f"features.{2 * i + 1}",
    {**_BLOCK, "mlp.0": "mlp.fc1", "mlp.3": "mlp.fc2"},
)

DROPPED = {
    # The index follows from the size of the window. The mask is for images of one size.
    "window index and mask": "*.relative_position_index *.attn_mask",
    "final norm": "norm.weight norm.bias layernorm.weight layernorm.bias",
    "output norms": "norm[0-3].weight norm[0-3].bias hidden_states_norms.*",
    "head": "head.* classifier.*",
}
HEADS = {
    "head.fc.weight": "linear head",
    "head.weight": "linear head",
    "classifier.weight": "linear head",
    "": "no head",
}
# Description of a part that only other networks have -> patterns of its names.
OBSTACLES = {
    "an absolute position embedding": "absolute_pos_embed embeddings.position_embeddings",
    "a mixture of experts": "*.moe_layer.* *.mlp.experts.*",
}
_V2 = "a Swin V2 (cosine attention, norms after the branches), of which only V1 is supported"
LOOKALIKES = (
    (_V2, "patch_embed.proj.weight", "layers.0.blocks.0.attn.logit_scale"),
    (_V2, "patch_embed.proj.weight", "stages.0.blocks.0.attn.logit_scale"),  # timm's swinv2_cr
    (
        _V2,
        "embeddings.patch_embeddings.projection.weight",
        "encoder.layers.0.blocks.0.attention.self.logit_scale",
    ),
    (_V2, "features.0.0.weight", "features.1.0.attn.logit_scale"),
    (
        "a Swin in names that are not known here",  # mmpretrain and mmdetection 3
        "patch_embed.projection.weight",
        "stages.0.blocks.0.attn.w_msa.relative_position_bias_table",
    ),
)


def _scheme(
    names: Names, own: str, first: tuple[str, str] = _FIRST, plain: str = PLAIN, **others: Any
) -> Scheme:
    return table_scheme(names, first, own, plain, has_reference_names=names is TIMM, **others)


MICROSOFT = "microsoft"  # name of a scheme
# In the official names a first stage has a merging, in timm's a last one.
_FIRST_MERGING, _LAST_MERGING = (f"layers.{i}.downsample.reduction.weight" for i in (1, 3))
_OWN = r"(patch_embed|layers|absolute_pos_embed)\b"
SCHEMES = {
    MICROSOFT: _scheme(OFFICIAL, _OWN, (_FIRST_MERGING, _FIRST[1])),
    USUAL: _scheme(TIMM, _OWN, (_LAST_MERGING, _FIRST[1])),
    "transformers": _scheme(
        TRANSFORMERS,
        r"(embeddings|encoder)\b",
        (_FIRST[0], "layers.0.blocks.0.norm1.weight"),
        HUGGING_FACE,
        without="encoder.layers.0.blocks.0.attention.self.logit_scale",  # V2's
    ),
    "torchvision": _scheme(TORCHVISION, r"features\b"),
}


# Keys of a detector's configuration.
TASK_KEYS: Keys = {
    "MODEL.SWIN.EMBED_DIM": contract_key(
        96, "Channels of the first of four stages.", role=Role.PROTOCOL
    ),
    "MODEL.SWIN.DEPTHS": contract_key(
        [2, 2, 6, 2], "Blocks of the four stages.", role=Role.PROTOCOL
    ),
    "MODEL.SWIN.NUM_HEADS": contract_key(
        [3, 6, 12, 24], "Attention heads of the four stages.", role=Role.PROTOCOL
    ),
    "MODEL.SWIN.WINDOW_SIZE": contract_key(7, "Side of a window, in cells."),
    "MODEL.SWIN.QKV_BIAS": contract_key(True, "Use a bias of queries, keys and values."),
    "MODEL.SWIN.DROP_PATH": DROP_PATH,
}


def _network() -> type[nn.Module]:
    from convert.modeling.swin import Swin

    return Swin


@register
class SwinFamily(Family):
    """Swin Transformers V1 of any size."""

    name = "swin"
    networks = "Swins (V1, in the names of the official code, timm, transformers or torchvision)"
    architecture = SwinArchitecture
    schemes = SCHEMES
    dropped = DROPPED
    heads = HEADS
    owner = "timm's Swin"
    features = MappingProxyType({name: name for name in FEATURES})
    detectron2 = OFFICIAL
    norms = r"norm\d?\.weight$"
    keys = TASK_KEYS
    pyramid = Pyramid(
        _network,
        network_arguments(SwinArchitecture, "MODEL.SWIN"),
        num_parts=lambda keys: 1 + len(FEATURES),
    )
    lookalikes = LOOKALIKES
    obstacles = OBSTACLES
    is_windowed = True
    assumes = "exact GELU"
    words = ("swin",)
    plain_names = frozenset(
        ("swin", "patch", "window", "tiny", "small", "base", "large", "t", "s", "b")
    )
    model_types = ("swin",)

    def recognize(self, state: Mapping[str, Tensor], hints: Hints) -> SwinArchitecture:
        """Return the architecture of a Swin, see `Family.recognize`."""
        where, kind = hints.where, "not the whole of a Swin"
        width = hints.shape(state, _FIRST[0], 4, kind)[0]
        depths, heads, windows = [], [], []
        for i, start in enumerate(f"layers.{i}.blocks." for i in range(len(FEATURES))):
            depths.append(count_blocks(state, hints, start, _TABLE, kind))
            key = f"{start}0.{_TABLE}"
            rows, number = hints.shape(state, key, 2, kind)
            window = (math.isqrt(rows) + 1) // 2
            if rows != (2 * window - 1) ** 2 or (width * 2**i) % number:
                raise DataError(
                    f"{where}: {hints.name(key)} has shape {[rows, number]}, expected (2w - 1)^2 "
                    "positions of a window of w cells, and heads that divide "
                    f"{width * 2**i} channels"
                )
            heads.append(number)
            windows.append(window)
        if len(set(windows)) > 1:
            name = f" of {format_value(hints.arch)}" if hints.arch else ""
            raise DataError(
                f"{where}: the stages{name} have windows of {windows} cells; Swins of several "
                "window sizes are not supported"
            )
        hints.notes.append(
            "windows are shifted at every size, as in the official detectors; the classifier "
            "shifts none in a map of a single window"
        )
        qkv_bias = "layers.0.blocks.0.attn.qkv.bias" in state
        return SwinArchitecture(width, tuple(depths), tuple(heads), windows[0], qkv_bias)

    def build(self, architecture: SwinArchitecture) -> nn.Module:
        """Build the network that both engines train."""
        return _network()(architecture)

    def reference(self, architecture: SwinArchitecture) -> nn.Module:
        """Build timm's own class."""
        from convert.modeling.swin import reference

        return reference(architecture)

    def image_size(self, architecture: SwinArchitecture) -> tuple[int, int]:
        """Return the size of an image whose last map is two windows."""
        return verification_size(architecture)

    def source_features(
        self,
        architecture: SwinArchitecture,
        state: Mapping[str, Tensor],
        tokens: Mapping[str, Tensor],
        image: Tensor,
    ) -> tuple[Mapping[str, str], Mapping[str, Tensor]]:
        """Compute the features of a classifier, see `Family.source_features`."""
        from convert.modeling.swin import classifier_features

        return classifier_features(architecture, state, image)
