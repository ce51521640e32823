"""ConvNeXt V1 and V2: architecture, names of tensors and recognition.

The family's own names are timm's, which detectors here use as well. Parts that only other variants
have (a stem of overlapping convolutions, norms without a shift) are in no table, so a file with
them is refused by the tensor's name or shape.

Names: timm/models/convnext.py (1.0), torchvision/models/convnext.py, and the official
facebookresearch/ConvNeXt@048efce models/convnext.py and ConvNeXt-V2@2553895 models/convnextv2.py;
transformers 5.23 models/convnext, models/convnextv2 and models/dinov3_convnext.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
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
)
from moco.common.keys import Keys, Role

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class ConvNeXtArchitecture(StagedArchitecture):
    """Architecture of a ConvNeXt V1 or V2.

    Attributes:
        depths: Number of blocks in each of the four stages.
        dims: Number of channels in each stage.
        layer_scale: True if blocks have LayerScale, as in V1.
        grn: True if their MLPs have a global response normalization, as in V2.
        layer_norm_eps: Epsilon of LayerNorm.

    Raises:
        UserError: If a value is out of its range.
    """

    depths: tuple[int, ...]
    dims: tuple[int, ...]
    layer_scale: bool
    grn: bool
    layer_norm_eps: float

    def __str__(self) -> str:
        blocks, widths = ("-".join(map(str, values)) for values in (self.depths, self.dims))
        return f"ConvNeXt{' V2' if self.grn else ''} of {blocks} blocks, widths {widths}"

    def details(self) -> str:
        """Describe the epsilon of LayerNorm."""
        return f"LayerNorm eps {self.layer_norm_eps:g}"

    def task_key(self) -> tuple[str, str]:
        """Return MODEL.CONVNEXT.DIMS, which distinguishes the sizes."""
        return "MODEL.CONVNEXT.DIMS", "ConvNeXt of widths {}"

    def example_task(self) -> tuple[str, dict[str, Any], str]:
        """Return the COCO task of ConvNeXt-T, or the VOC task for timm's smaller networks."""
        file, depths, width, data = "coco/mask_rcnn_ConvNeXt_T_FPN_3x", [3, 3, 9, 3], 96, ""
        if self.dims[0] < width:  # timm's small ones
            file, depths, width = "voc/faster_rcnn_ConvNeXt_A_small", [2, 2, 6, 2], 40
            data = "DATASETS.VOC_DIR path/to/voc "
        dims = [width * 2**stage for stage in range(len(FEATURES))]
        keys = {"MODEL.CONVNEXT.DEPTHS": depths, "MODEL.CONVNEXT.DIMS": dims}
        return f"configs/{file}.yaml", keys, data


OFFICIAL, TORCHVISION = "official", "torchvision"  # names of schemes


def _pairs(
    layers: Iterable[tuple[str, str]], stages: Iterable[str], parts: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Yield pairs of an external name and timm's.

    Args:
        layers: The two modules of the stem, and those between the stages.
        stages: Prefixes of the blocks of each stage.
        parts: Tensors of a block, in the order of `_PARTS`.
    """
    for modules, own in zip(layers, _numbered(_LAYERS), strict=True):
        yield from zip(_with_bias(*modules), _with_bias(*own), strict=True)
    for i, external in enumerate(stages):
        for part, tensor in zip(parts, _PARTS, strict=False):
            yield f"{external}.*.{part}", f"stages.{i}.blocks.*.{tensor}"


def _numbered(layers: Iterable[str]) -> list[tuple[str, str]]:
    return [(f"{layer}.0", f"{layer}.1") for layer in layers]


def _with_bias(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{tensor}" for name in names for tensor in ("weight", "bias"))


_PARTS = (*_with_bias("conv_dw", "norm", "mlp.fc1", "mlp.fc2"), "gamma", *_with_bias("mlp.grn"))
_LAYERS = ["stem", *(f"stages.{i}.downsample" for i in range(1, 4))]
TIMM = Names(_pairs(_numbered(_LAYERS), [f"stages.{i}.blocks" for i in range(4)], _PARTS))
OFFICIAL_NAMES = Names(
    _pairs(
        _numbered(f"downsample_layers.{i}" for i in range(4)),
        [f"stages.{i}" for i in range(4)],
        (*_with_bias("dwconv", "norm", "pwconv1", "pwconv2"), "gamma", "grn.gamma", "grn.beta"),
    )
)
TORCHVISION_NAMES = Names(
    _pairs(
        _numbered(f"features.{2 * i}" for i in range(4)),
        [f"features.{2 * i + 1}" for i in range(4)],
        (*_with_bias("block.0", "block.2", "block.3", "block.5"), "layer_scale"),
    )
)

# transformers' ConvNeXt and ConvNeXt V2, and its DINOv3.
HUGGING_FACE_NAMES = Names(
    _pairs(
        [
            ("embeddings.patch_embeddings", "embeddings.layernorm"),
            *_numbered(f"encoder.stages.{i}.downsampling_layer" for i in range(1, 4)),
        ],
        [f"encoder.stages.{i}.layers" for i in range(4)],
        (
            *_with_bias("dwconv", "layernorm", "pwconv1", "pwconv2"),
            "layer_scale_parameter",
            *_with_bias("grn"),
        ),
    )
)
DINOV3_NAMES = Names(
    _pairs(
        _numbered(f"stages.{i}.downsample_layers" for i in range(4)),
        [f"stages.{i}.layers" for i in range(4)],
        (
            *_with_bias("depthwise_conv", "layer_norm", "pointwise_conv1", "pointwise_conv2"),
            "gamma",
        ),
    )
)

DROPPED = {
    # Meta's DINOv3 has the final norm twice, as the last of four of which three are identities.
    "final norm": "norm.weight norm.bias norms.3.* norm_pre.* head.norm.* classifier.0.* "
    "layernorm.weight layernorm.bias layer_norm.weight layer_norm.bias",
    "head": "head.* fc.* classifier.*",
}
HEADS = {
    "head.fc.weight": "linear head",
    "head.weight": "linear head",
    "classifier.2.weight": "linear head",
    "fc.weight": "linear head",
    "": "no head",
}
_SIZES = ("atto", "femto", "pico", "nano", "tiny", "small", "base", "large", "huge")
_OTHER_NAMES = "a ConvNeXt in names that are not known here"
LOOKALIKES = (
    (
        _OTHER_NAMES,  # mmpretrain
        "downsample_layers.0.0.weight",
        "stages.0.0.depthwise_conv.weight",
    ),
)


def reshape_tensor(name: str, value: Tensor) -> Tensor:
    """Remove the axes of size 1 that some projects add to a tensor.

    LayerScale is (C, 1, 1) in torchvision, GRN (1, 1, 1, C) in the official code, and a linear
    layer (C, C', 1, 1) in timm's small networks, which compute it as a convolution.
    """
    if name.endswith((".fc1.weight", ".fc2.weight")) and value.shape[2:] == (1, 1):
        return value.flatten(1)
    return value.squeeze() if name.endswith(".gamma") or ".grn." in name else value


def _scheme(names: Names, own: str, plain: str = PLAIN, **metadata: Any) -> Scheme:
    return table_scheme(
        names,
        ("stem.0.weight", "stages.0.blocks.0.conv_dw.weight"),
        own,
        plain,
        metadata=metadata,
        reshape_tensor=reshape_tensor,
        has_reference_names=names is TIMM,
    )


SCHEMES = {
    USUAL: _scheme(TIMM, r"(stem|stages)\b"),
    OFFICIAL: _scheme(OFFICIAL_NAMES, r"(downsample_layers|stages)\b"),
    TORCHVISION: _scheme(TORCHVISION_NAMES, r"features\b"),
    "transformers": _scheme(HUGGING_FACE_NAMES, r"(embeddings|encoder)\b", HUGGING_FACE),
    "transformers DINOv3": _scheme(DINOV3_NAMES, r"stages\b", HUGGING_FACE, one_eps=True),
}


# Keys of a detector's configuration.
TASK_KEYS: Keys = {
    "MODEL.CONVNEXT.DEPTHS": contract_key(
        [3, 3, 9, 3], "Blocks of the four stages.", role=Role.PROTOCOL
    ),
    "MODEL.CONVNEXT.DIMS": contract_key(
        [96, 192, 384, 768], "Channels of the four stages.", role=Role.PROTOCOL
    ),
    "MODEL.CONVNEXT.LAYER_SCALE": contract_key(True, "Use LayerScale (V1)."),
    "MODEL.CONVNEXT.GRN": contract_key(False, "Use global response normalization (V2)."),
    "MODEL.CONVNEXT.LAYER_NORM_EPS": contract_key(1e-6, "Epsilon of LayerNorm."),
    "MODEL.CONVNEXT.DROP_PATH": DROP_PATH,
}


def _network() -> type[nn.Module]:
    from convert.modeling.convnext import ConvNeXt

    return ConvNeXt


@register
class ConvNeXtFamily(Family):
    """ConvNeXts of any size."""

    name = "convnext"
    networks = (
        "ConvNeXts (V1, V2 and DINOv3's, in the names of timm, torchvision, transformers or the "
        "official code)"
    )
    architecture = ConvNeXtArchitecture
    schemes = SCHEMES
    dropped = DROPPED
    heads = HEADS
    owner = "timm's ConvNeXt"
    features = MappingProxyType({f"stages.{i}": feature for i, feature in enumerate(FEATURES)})
    detectron2 = TIMM
    norms = r"(norm|stem\.1)\.weight$"
    keys = TASK_KEYS
    pyramid = Pyramid(
        _network,
        network_arguments(ConvNeXtArchitecture, "MODEL.CONVNEXT"),
        num_parts=lambda keys: 1 + len(FEATURES),
    )
    lookalikes = LOOKALIKES
    assumes = "exact GELU"
    words = ("convnext",)
    plain_names = frozenset(("convnext", "convnextv", *_SIZES))
    model_types = ("convnext", "convnextv2", "dinov3_convnext")

    def recognize(self, state: Mapping[str, Tensor], hints: Hints) -> ConvNeXtArchitecture:
        """Return the architecture of a ConvNeXt, see `Family.recognize`."""
        depths, dims, kind = [], [], "not the whole of a ConvNeXt"
        for start in (f"stages.{i}.blocks." for i in range(4)):
            depths.append(count_blocks(state, hints, start, "conv_dw.weight", kind))
            dims.append(hints.shape(state, f"{start}0.conv_dw.weight", 4, kind)[0])
        # Only timm's convnext_xxlarge, which is CLIP's, has another value than 1e-6. The eps in
        # transformers' configurations is that of the final norm, except in DINOv3's, where it is
        # that of all norms.
        eps = 1e-5 if depths == [3, 4, 30, 3] else 1e-6
        if "one_eps" in hints.metadata:
            eps = hints.metadata.get("layer_norm_eps", eps)
        first = "stages.0.blocks.0."
        layer_scale, grn = f"{first}gamma" in state, f"{first}mlp.grn.weight" in state
        return ConvNeXtArchitecture(tuple(depths), tuple(dims), layer_scale, grn, eps)

    def build(self, architecture: ConvNeXtArchitecture) -> nn.Module:
        """Build the network that both engines train."""
        return _network()(architecture)

    def reference(self, architecture: ConvNeXtArchitecture) -> nn.Module:
        """Build timm's own class."""
        from convert.modeling.convnext import reference

        return reference(architecture)
