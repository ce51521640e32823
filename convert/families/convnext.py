"""ConvNeXts, version 1 and 2: their architecture, the names of their tensors, their recognition.

The family's own names are timm's, which detectors here have, too. What only other variants have (a
stem of overlapping convolutions, norms without a shift) is in no table, so a file with it is
refused by the tensor's name or shape.

Names: timm/models/convnext.py (1.0), torchvision/models/convnext.py, and the official
facebookresearch/ConvNeXt@048efce models/convnext.py and ConvNeXt-V2@2553895 models/convnextv2.py.
"""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from convert.families.base import (
    FAMILIES,
    PLAIN,
    USUAL,
    Architecture,
    Family,
    Hints,
    Names,
    Pyramid,
    Scheme,
    check_layer_norms,
    later,
)
from moco.common.errors import DataError, UserError, shown

if TYPE_CHECKING:
    from torch import Tensor

FEATURES = ("res2", "res3", "res4", "res5")  # Detectron2's words, of strides 4 to 32


@dataclasses.dataclass(frozen=True)
class ConvNeXtArchitecture(Architecture):
    """A ConvNeXt, or a ConvNeXt V2; raises UserError out of its range.

    Attributes:
        depths: number of blocks in each of the four stages.
        dims: their channels.
        layer_scale: whether blocks have LayerScale, as version 1.
        grn: whether their MLPs have a global response normalization, as version 2.
    """

    depths: tuple[int, ...]
    dims: tuple[int, ...]
    layer_scale: bool
    grn: bool
    layer_norm_eps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("depths", "dims"):
            values = getattr(self, name)
            four = isinstance(values, list | tuple) and len(values) == len(FEATURES)
            if not four or not all(type(v) is int and 1 <= v <= 2**16 for v in values):
                raise UserError(f"{name}: got {shown(values)}, expected four numbers, 1..65536")
            object.__setattr__(self, name, tuple(values))

    def __str__(self) -> str:
        blocks, widths = ("-".join(map(str, values)) for values in (self.depths, self.dims))
        return f"ConvNeXt{' V2' if self.grn else ''} of {blocks} blocks, widths {widths}"

    def d2_keys(self) -> dict[str, Any]:
        return {
            f"MODEL.CONVNEXT.{name.upper()}": list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
        }

    def details(self) -> str:
        return f"LayerNorm eps {self.layer_norm_eps:g}"

    def task_key(self) -> tuple[str, str]:
        return "MODEL.CONVNEXT.DIMS", "ConvNeXt of widths {}"

    def example_task(self) -> tuple[str, dict[str, Any], str]:
        file, depths, width, data = "coco/mask_rcnn_ConvNeXt_T_FPN_3x", [3, 3, 9, 3], 96, ""
        if self.dims[0] < width:  # timm's small ones
            file, depths, width = "voc/faster_rcnn_ConvNeXt_A_small", [2, 2, 6, 2], 40
            data = "DATASETS.VOC_DIR path/to/voc "
        dims = [width * 2**stage for stage in range(len(FEATURES))]
        keys = {"MODEL.CONVNEXT.DEPTHS": depths, "MODEL.CONVNEXT.DIMS": dims}
        return f"configs/{file}.yaml", keys, data


OFFICIAL, TORCHVISION = "official", "torchvision"  # names of schemes


def _pairs(
    layers: Iterable[str], stages: Iterable[str], parts: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Yield pairs of another's tensor and timm's.

    Args:
        layers: how the names of the stem and of the convolutions between the stages begin.
        stages: how those of the blocks begin.
        parts: what is in a block, in the order of `_PARTS`.
    """
    for theirs, own in zip(layers, _LAYERS, strict=True):
        for tensor in ("0.weight", "0.bias", "1.weight", "1.bias"):
            yield f"{theirs}.{tensor}", f"{own}.{tensor}"
    for i, theirs in enumerate(stages):
        for part, own in zip(parts, _PARTS, strict=False):
            yield f"{theirs}.*.{part}", f"stages.{i}.blocks.*.{own}"


def _with_bias(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{tensor}" for name in names for tensor in ("weight", "bias"))


_PARTS = (*_with_bias("conv_dw", "norm", "mlp.fc1", "mlp.fc2"), "gamma", *_with_bias("mlp.grn"))
_LAYERS = ["stem", *(f"stages.{i}.downsample" for i in range(1, 4))]
TIMM = Names(_pairs(_LAYERS, [f"stages.{i}.blocks" for i in range(4)], _PARTS))
OFFICIAL_NAMES = Names(
    _pairs(
        [f"downsample_layers.{i}" for i in range(4)],
        [f"stages.{i}" for i in range(4)],
        (*_with_bias("dwconv", "norm", "pwconv1", "pwconv2"), "gamma", "grn.gamma", "grn.beta"),
    )
)
TORCHVISION_NAMES = Names(
    _pairs(
        [f"features.{2 * i}" for i in range(4)],
        [f"features.{2 * i + 1}" for i in range(4)],
        (*_with_bias("block.0", "block.2", "block.3", "block.5"), "layer_scale"),
    )
)

DROPPED = {
    "final norm": "norm.weight norm.bias norm_pre.* head.norm.* classifier.0.*",
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
_OTHER_NAMES = "a ConvNeXt in names that are not timm's, torchvision's or the official ones"
LOOKALIKES = (
    (
        _OTHER_NAMES,  # transformers
        "embeddings.patch_embeddings.weight",
        "encoder.stages.0.layers.0.dwconv.weight",
    ),
    (
        _OTHER_NAMES,  # mmpretrain
        "downsample_layers.0.0.weight",
        "stages.0.0.depthwise_conv.weight",
    ),
)


def _scheme(names: Names, own: str) -> Scheme:
    first = ("stem.0.weight", "stages.0.blocks.0.conv_dw.weight")
    return Scheme(
        (names.theirs(first[0]) or "", names.theirs(first[1]) or ""),
        names.own,
        re.compile(own),
        lambda name: names.theirs(name) or name,
        PLAIN,
        is_owners=names is TIMM,
    )


SCHEMES = {
    USUAL: _scheme(TIMM, r"(stem|stages)\b"),
    OFFICIAL: _scheme(OFFICIAL_NAMES, r"(downsample_layers|stages)\b"),
    TORCHVISION: _scheme(TORCHVISION_NAMES, r"features\b"),
}


def to_detectron2(key: str) -> str | None:
    """Return the name itself where the table has it, or None."""
    return TIMM.own(key)


def in_own_shape(name: str, value: Tensor) -> Tensor:
    """A tensor without the axes of size 1 that some projects give it.

    LayerScale is (C, 1, 1) in torchvision, GRN (1, 1, 1, C) in the official code, a linear layer
    (C, C', 1, 1) where timm's small networks compute it as a convolution.
    """
    if name.endswith((".fc1.weight", ".fc2.weight")) and value.shape[2:] == (1, 1):
        return value.flatten(1)
    return value.squeeze() if name.endswith(".gamma") or ".grn." in name else value


def recognize(state: Mapping[str, Tensor], hints: Hints) -> ConvNeXtArchitecture:
    """Recognize a ConvNeXt by its shapes, see `convert.families.base.Family`."""
    depths, dims = [], []
    for start in (f"stages.{i}.blocks." for i in range(4)):
        blocks = {int(key.removeprefix(start).split(".")[0]) for key in state if start in key}
        if missing := sorted(set(range(max(blocks, default=0) + 1)) - blocks):
            key = hints.name(f"{start}{missing[0]}.conv_dw.weight")
            raise DataError(f"{hints.where}: {key} is missing; not the whole of a ConvNeXt")
        key = f"{start}0.conv_dw.weight"
        depths.append(len(blocks))
        dims.append(hints.shape(state, key, 4, "not the whole of a ConvNeXt")[0])
    # timm's convnext_xxlarge, CLIP's, is the only one with another; it is in no file.
    eps = 1e-5 if depths == [3, 4, 30, 3] else 1e-6
    first = "stages.0.blocks.0."
    layer_scale, grn = f"{first}gamma" in state, f"{first}mlp.grn.weight" in state
    return ConvNeXtArchitecture(tuple(depths), tuple(dims), layer_scale, grn, eps)


# Of a detector's configuration.
TASK_KEYS: dict[str, Any] = {
    # ConvNeXt: blocks and channels of the four stages, LayerScale (V1), global response
    # normalization (V2) and LayerNorm's epsilon. Set by the weights' contract.
    "MODEL.CONVNEXT.DEPTHS": [3, 3, 9, 3],
    "MODEL.CONVNEXT.DIMS": [96, 192, 384, 768],
    "MODEL.CONVNEXT.LAYER_SCALE": True,
    "MODEL.CONVNEXT.GRN": False,
    "MODEL.CONVNEXT.LAYER_NORM_EPS": 1e-6,
    # Probability that its last block is skipped for an image, in training; it grows from 0 with the
    # blocks before. 0 to below 1.
    "MODEL.CONVNEXT.DROP_PATH": 0.0,
}


def _arguments(keys: Any, freeze_at: int) -> dict[str, Any]:
    """Return the arguments of `convert.modeling.convnext.ConvNeXt` in a detector."""
    c = keys
    if not 0 <= c.DROP_PATH < 1:
        raise UserError(f"MODEL.CONVNEXT.DROP_PATH: got {c.DROP_PATH}, expected 0 to below 1")
    try:
        architecture = ConvNeXtArchitecture(
            c.DEPTHS, c.DIMS, c.LAYER_SCALE, c.GRN, c.LAYER_NORM_EPS
        )
    except UserError as error:
        raise UserError(f"MODEL.CONVNEXT: {error}") from error
    return {
        "architecture": architecture,
        "drop_path": c.DROP_PATH,
        "output_norms": True,
        "freeze_at": freeze_at,
    }


@FAMILIES.register()
@functools.cache
def convnext() -> Family:
    """ConvNeXts of any size."""
    return Family(
        name="convnext",
        networks="ConvNeXts (V1 and V2, in the names of timm, torchvision or the official code)",
        architecture=ConvNeXtArchitecture,
        schemes=SCHEMES,
        dropped=DROPPED,
        heads=HEADS,
        to_detectron2=to_detectron2,
        from_detectron2=to_detectron2,
        recognize=recognize,
        build=later("convert.modeling.convnext:ConvNeXt"),
        reference=later("convert.modeling.convnext:reference"),
        owner="timm's ConvNeXt",
        keys=TASK_KEYS,
        not_protocol=tuple(
            f"MODEL.CONVNEXT.{name}" for name in ("LAYER_SCALE", "GRN", "LAYER_NORM_EPS")
        ),
        pyramid=Pyramid(
            lambda: pkgutil.resolve_name("convert.modeling.convnext:ConvNeXt"),
            _arguments,
            num_parts=1 + len(FEATURES),
        ),
        features={f"stages.{i}": feature for i, feature in enumerate(FEATURES)},
        lookalikes=LOOKALIKES,
        check_trained=functools.partial(check_layer_norms, pattern=r"(norm|stem\.1)\.weight$"),
        in_own_shape=in_own_shape,
        assumes="exact GELU",
        words=("convnext",),
        plain_names=frozenset(("convnext", "convnextv", *_SIZES)),
        in_timm={f"stages.{i}": feature for i, feature in enumerate(FEATURES)},
    )
