"""ResNets and ResNeXts: architecture, names of tensors and recognition.

The family's own names are torchvision's. A name that is not in the tables is never guessed.

Names: torchvision/models/resnet.py and detectron2/modeling/backbone/resnet.py; the same mapping as
the official facebookresearch/moco@7397dfe detection/convert-pretrain-to-detectron2.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from convert.families.base import (
    HUGGING_FACE,
    PLAIN,
    PLAIN_DETECTRON2,
    USUAL,
    Architecture,
    Family,
    Hints,
    Names,
    Option,
    OtherNetworkError,
    Scheme,
    register,
    table_scheme,
)
from moco.common.errors import DataError, UserError, format_value
from moco.modeling.soundness import check_arch

if TYPE_CHECKING:
    from torch import Tensor, nn

# Blocks in res2..res5. 10 is this project's small network (one basic block per stage); the other
# rows are from Table 1 of "Deep Residual Learning for Image Recognition" (arXiv:1512.03385).
NUM_BLOCKS: dict[int, tuple[int, int, int, int]] = {
    10: (1, 1, 1, 1),
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
# Kernel size, stride of the convolution, stride of the whole stem (the ImageNet stem max-pools).
STEMS: dict[str, tuple[int, int, int]] = {
    "imagenet": (7, 2, 4),
    "cifar": (3, 1, 1),
    "stride2": (3, 2, 2),
}


def is_bottleneck(depth: int) -> bool:
    """Return whether a ResNet of this depth has bottlenecks (50 and deeper), not basic blocks."""
    return depth >= 50


@dataclasses.dataclass(frozen=True)
class ResNetArchitecture(Architecture):
    """Architecture of a ResNet, with the fields of Detectron2's MODEL.RESNETS.

    Raises:
        UserError: If a value is out of its range.
    """

    stride_in_1x1: bool  # False: the stride is in the 3x3 conv (torchvision)
    depth: int  # 10, 18, 34, 50, 101 or 152
    stem: str  # "imagenet" 7x7/2 + max-pool, "cifar" 3x3/1, "stride2" 3x3/2
    stem_out_channels: int
    res2_out_channels: int
    num_groups: int
    width_per_group: int  # channels per group of res2's 3x3 conv; 64 for basic blocks

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("depth", tuple(NUM_BLOCKS)), ("stem", tuple(STEMS))):
            value = getattr(self, name)
            if value not in choices:
                raise UserError(
                    f"{name}: got {format_value(value)}, expected one of {list(choices)}"
                )
        if not is_bottleneck(self.depth) and self.num_groups != 1:
            raise UserError(
                f"num_groups: got {self.num_groups}, but ResNet-{self.depth} has basic blocks, "
                "which have no groups"
            )

    def __str__(self) -> str:
        text = f"ResNet-{self.depth}"
        if self.stem != "imagenet":
            text += f", {self.stem} stem"
        if self.stem_out_channels != 64:
            text += f", {self.stem_out_channels} stem channels"
        if self.num_groups != 1 or (is_bottleneck(self.depth) and self.width_per_group != 64):
            text += f", {self.num_groups} groups of {self.width_per_group}"
        return text

    def d2_keys(self) -> dict[str, Any]:
        """Return the keys MODEL.RESNETS.* of the fields."""
        return {f"MODEL.RESNETS.{k.upper()}": v for k, v in dataclasses.asdict(self).items()}

    def details(self) -> str:
        """Describe where the stride is."""
        return f"stride in the {'1x1' if self.stride_in_1x1 else '3x3'}"

    def lost_options(self) -> list[str]:
        """Return --stem for the stem of stride 2, which has the shape of the CIFAR stem."""
        return ["--stem stride2"] if self.stem == "stride2" else []

    def task_key(self) -> tuple[str, str]:
        """Return MODEL.RESNETS.DEPTH, which distinguishes the tasks."""
        return "MODEL.RESNETS.DEPTH", "ResNet-{}"

    def in_torchvision(self) -> str:
        """Return why torchvision's ResNet differs if the stride is in the 1x1 conv."""
        if not self.stride_in_1x1:
            return ""
        return (
            f"the stride of this {self} is in the 1x1 conv, and torchvision has no such network: "
            "its own would load these tensors but compute other features"
        )

    def example_task(self) -> tuple[str, dict[str, Any], str]:
        """Return the VOC task of ResNet-50, or of ResNet-18 for basic blocks."""
        if is_bottleneck(self.depth):
            file, depth, channels, data = "R_50_C4_24k", 50, 256, ""
        else:
            file, depth, channels = "R_18_C4_small", 18, 64
            data = "DATASETS.VOC_DIR path/to/voc "
        # The stride stays in place, so that random weights get the same network.
        usual = ResNetArchitecture(self.stride_in_1x1, depth, "imagenet", 64, channels, 1, 64)
        return f"configs/voc/faster_rcnn_{file}.yaml", usual.d2_keys(), data


# Modules of a block: torchvision's -> Detectron2's. The tables below prefix them with the numbers
# of stage and block; "*" is the block's.
BLOCK_MODULES = {
    "conv1": "conv1",
    "bn1": "conv1.norm",
    "conv2": "conv2",
    "bn2": "conv2.norm",
    "conv3": "conv3",
    "bn3": "conv3.norm",
    "downsample.0": "shortcut",
    "downsample.1": "shortcut.norm",
}
# Names in CIFAR ResNets, kuangliu/pytorch-cifar@49b7aa9 models/resnet.py, and in lightly's ResNet
# (lightly/models/resnet.py).
SHORTCUT_BLOCK_MODULES = {name.replace("downsample", "shortcut"): name for name in BLOCK_MODULES}
STAGES = {"layer1": "res2", "layer2": "res3", "layer3": "res4", "layer4": "res5"}
CONV_TENSORS = ("weight",)
NORM_TENSORS = ("weight", "bias", "running_mean", "running_var")


def modules(
    stem: tuple[str, str], stages: Iterable[str], block: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Return pairs of an external module name and torchvision's.

    Args:
        stem: External names of conv1 and bn1.
        stages: Prefixes of the four stages, with "*" for the block.
        block: External names of a block's modules -> torchvision's.
    """
    return [
        *zip(stem, ("conv1", "bn1"), strict=True),
        *(
            (f"{external}.{module}", f"{own}.*.{of_torchvision}")
            for external, own in zip(stages, STAGES, strict=True)
            for module, of_torchvision in block.items()
        ),
    ]


def tensors(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield pairs of tensors of `modules`: one per convolution, four per batch norm."""
    for external, own in pairs:
        is_norm = own.rpartition(".")[2].startswith("bn") or own.endswith("downsample.1")
        for tensor in NORM_TENSORS if is_norm else CONV_TENSORS:
            yield f"{external}.{tensor}", f"{own}.{tensor}"


_SAME = {name: name for name in BLOCK_MODULES}
_INVERSE = {new: old for old, new in BLOCK_MODULES.items()}
_OF_TORCHVISION = [f"{stage}.*" for stage in STAGES]
TORCHVISION = Names(
    tensors(
        [
            *modules(("conv1", "bn1"), _OF_TORCHVISION, _SAME),
            *modules(("conv1", "bn1"), _OF_TORCHVISION, SHORTCUT_BLOCK_MODULES),
        ]
    )
)
DETECTRON2 = Names(
    tensors(
        modules(
            ("stem.conv1", "stem.conv1.norm"), [f"{new}.*" for new in STAGES.values()], _INVERSE
        )
    )
)


_FIRST = ("conv1.weight", "layer1.0.conv1.weight")


def _numbered(first: int, block: Mapping[str, str]) -> Scheme:
    """Return the scheme of a ResNet's children in an nn.Sequential, followed by a head.

    `first` is the index of the first stage.
    """
    stages = [f"{first + i}.*" for i in range(4)]
    names = Names(tensors(modules(("0", "1"), stages, block)))
    return table_scheme(names, _FIRST, rf"[0-{first + 3}]\.")


# Separius/SimCLRv2-Pytorch@f4c2f41 resnet.py; batch norms are the first of two in a Sequential.
_SIMCLR_V2 = Names(
    tensors(
        modules(
            ("net.0.0", "net.0.1.0"),
            [f"net.{i}.blocks.*" for i in range(1, 5)],
            {
                "net.0": "conv1",
                "net.1.0": "bn1",
                "net.2": "conv2",
                "net.3.0": "bn2",
                "net.4": "conv3",
                "net.5.0": "bn3",
                "projection.shortcut": "downsample.0",
                "projection.bn.0": "downsample.1",
            },
        )
    )
)
# transformers 5.23 models/resnet/modeling_resnet.py.
_HUGGING_FACE = Names(
    tensors(
        modules(
            ("embedder.embedder.convolution", "embedder.embedder.normalization"),
            [f"encoder.stages.{i}.layers.*" for i in range(4)],
            {
                **{f"layer.{i}.convolution": f"conv{i + 1}" for i in range(3)},
                **{f"layer.{i}.normalization": f"bn{i + 1}" for i in range(3)},
                "shortcut.convolution": "downsample.0",
                "shortcut.normalization": "downsample.1",
            },
        )
    )
)
# Caffe2's names, bottlenecks only: detectron2/checkpoint/c2_model_loading.py,
# convert_basic_c2_names. Detectron2's files keep the statistics; Detectron's fold them into scale
# and bias (facebookresearch/Detectron tools/pickle_caffe_blobs.py, remove_spatial_bn_layers).
_CAFFE2_BRANCHES = {
    "branch2a": ("conv1", "bn1"),
    "branch2b": ("conv2", "bn2"),
    "branch2c": ("conv3", "bn3"),
    "branch1": ("downsample.0", "downsample.1"),
}


def _caffe2(norm_tensors: Mapping[str, str]) -> Scheme:
    """Return the scheme of Caffe2's names; other names belong to a detector.

    Args:
        norm_tensors: Caffe2's names of the tensors of batch norms -> torchvision's.
    """
    pairs = [("conv1_w", "conv1.weight")]
    pairs += [(f"res_conv1_bn_{old}", f"bn1.{new}") for old, new in norm_tensors.items()]
    for i, stage in enumerate(STAGES, start=2):
        for branch, (conv, norm) in _CAFFE2_BRANCHES.items():
            external, own = f"res{i}_*_{branch}", f"{stage}.*"
            pairs += [(f"{external}_w", f"{own}.{conv}.weight")]
            pairs += [(f"{external}_bn_{a}", f"{own}.{norm}.{b}") for a, b in norm_tensors.items()]
    first = ("conv1_w", f"res2_0_branch2a_bn_{next(iter(norm_tensors))}")
    return Scheme(first, Names(pairs).own, re.compile(""))


# Tensors next to a backbone that a detector does not use. An MLP head is fc.0.*, fc.2.*
# (moco/builder.py).
DROPPED = {
    "head": "fc.*",
    "linear head": "linear.*",  # of CIFAR networks
    "last linear head": "last_linear.*",  # Cadene/pretrained-models.pytorch
    "numbered head": "9.*",  # the last child of UNPOOLED_STAGES, after a Flatten
    "batch counter": "*.num_batches_tracked",
    "average counter": "n_averaged*",  # torch.optim.swa_utils.AveragedModel
}
HEADS = {
    "fc.weight": "linear head",
    "fc.0.weight": "MLP head",
    "stem.fc.weight": "linear head",
    "stem.fc.0.weight": "MLP head",
    "fc1000_w": "linear head",
    "9.weight": "linear head",
    "": "no fc",
}

OPTIONS = (
    Option(
        "stride_in_1x1",
        {"yes": True, "no": False},
        "yes: stride in the first 1x1 conv of a bottleneck (MSRA); no: in the 3x3 conv "
        "(torchvision) (default: the source's)",
        convention=True,
    ),
    Option(
        "stem",
        {stem: stem for stem in STEMS},
        "stem of the network if the tensors do not determine it: a 3x3 stem is assumed to be "
        "cifar (stride 1) unless the checkpoint or this option has stride2",
        fixed=True,
    ),
)

_DEEP_STEM = (
    "a ResNet whose stem is three 3x3 convolutions (ResNet-C, -D, -S or -T), while the backbones "
    "here have one convolution"
)
_REGNET = "a RegNet"
LOOKALIKES = (
    (  # openai/CLIP, open_clip
        "CLIP's ResNet, whose stem is three 3x3 convolutions and whose pooling is attention",
        "conv3.weight",
        "attnpool.positional_embedding",
    ),
    (_DEEP_STEM, "conv1.0.weight", "layer1.0.conv1.weight"),  # timm's resnet50d
    (_DEEP_STEM, "stem.0.weight", "layer1.0.conv1.weight"),  # mmpretrain's ResNetV1d
    (_REGNET, "stem.0.weight", "trunk_output.block1.block1-0.f.a.0.weight"),  # torchvision
    (_REGNET, "stem.conv.weight", "s1.b1.conv1.conv.weight"),  # timm
)


_OWN = re.compile(r"(conv|bn|layer)\d|(downsample|shortcut|stem)\b|res(\d|_conv)|net\.\d", re.ASCII)
# "4.0.conv1.weight" is layer1 of torchvision's ResNet but layer3 of lightly's, so the scheme whose
# first stage has the lowest index comes first, as it has the higher indices, too.
SCHEMES = {
    USUAL: Scheme(
        ("conv1.weight", "layer1.0.conv1.weight"),
        TORCHVISION.own,
        _OWN,
        plain=PLAIN,
        without="attnpool.positional_embedding",  # CLIP's
        has_reference_names=True,
    ),
    # Any other name may be part of a detector.
    "detectron2": table_scheme(DETECTRON2, _FIRST, "", PLAIN_DETECTRON2),
    # lightly's own ResNet, whose ReLU is not a module and which has no max-pool.
    "lightly": _numbered(2, SHORTCUT_BLOCK_MODULES),
    # Without the max-pool: 2 is ReLU (facebookresearch/moco, branch colab-notebook).
    "unpooled": _numbered(3, _SAME),
    # nn.Sequential(*list(torchvision_resnet.children())[:-1]): 2 and 3 are ReLU and max-pool.
    "numbered": _numbered(4, _SAME),
    "simclr v2": Scheme(("net.0.0.weight", "net.1.blocks.0.net.0.weight"), _SIMCLR_V2.own, _OWN),
    "transformers": table_scheme(
        _HUGGING_FACE,
        _FIRST,
        r"(embedder|encoder)\b",
        HUGGING_FACE,
        metadata={
            "of_transformers": True,
            "no_3x3_stem": "transformers' ResNets have a 7x7 stem, its RegNets are not supported",
        },
    ),
    "caffe2": _caffe2(
        {
            "gamma": "weight",
            "beta": "bias",
            "running_mean": "running_mean",
            "running_var": "running_var",
        }
    ),
    "caffe2 folded": _caffe2({"s": "weight", "b": "bias"}),
}


def _stride_of_transformers(hints: Hints) -> bool:
    """Return whether transformers' configuration puts strides in the 1x1 conv of bottlenecks."""
    found = hints.metadata
    if "of_transformers" not in found:
        return False
    if "model_type" not in found:
        hints.notes.append(
            "no config.json next to the file: assuming the stride in the 3x3 conv, the default of "
            "transformers"
        )
    return bool(found.get("downsample_in_bottleneck"))


def _stem(kernel_size: int, hints: Hints) -> str:
    where = hints.where
    possible = [name for name, (size, _, _) in STEMS.items() if size == kernel_size]
    size = f"conv1.weight is {kernel_size}x{kernel_size}"
    if not possible:
        raise DataError(f"{where}: {size}, expected 7x7 or 3x3")
    recorded, requested = hints.metadata.get("stem"), hints.requested.get("stem")
    if recorded is not None:
        if recorded not in possible:
            raise DataError(f"{where}: records stem {recorded!r}, but {size}")
        possible = [recorded]
    if requested is not None and requested not in possible:
        raise UserError(f"--stem {requested}: {where} can only have {' or '.join(possible)}")
    if requested is None and len(possible) > 1:
        hints.warnings.append(
            f"the file does not record the stride of its 3x3 stem: assuming {possible[0]!r} "
            f"(stride 1); if it has stride 2, convert again with --stem {possible[1]}"
        )
    return requested or possible[0]


@register
class ResNetFamily(Family):
    """ResNet-10, 18, 34, 50, 101 and 152 of any width, and ResNeXts."""

    name = "resnet"
    networks = "ResNets and ResNeXts (10, 18, 34, 50, 101, 152 layers, of any width)"
    architecture = ResNetArchitecture
    schemes = SCHEMES
    dropped = DROPPED
    heads = HEADS
    owner = "torchvision's ResNet"
    features = MappingProxyType({"maxpool": "stem", **STAGES})
    detectron2 = DETECTRON2
    options = OPTIONS
    lookalikes = LOOKALIKES
    assumes = "ReLU, max-pooling and strides as torchvision has them"
    words = ("resn", "resnext")
    plain_names = frozenset(("resnet", "resnext", "wide", "res", "rn", "r", "w", "x", "d"))
    model_types = ("resnet",)

    def recognize(self, state: Mapping[str, Tensor], hints: Hints) -> ResNetArchitecture:
        """Return the architecture of a ResNet, see `Family.recognize`."""

        def shape(key: str) -> tuple[int, ...]:
            return hints.shape(state, key, 4, "not a ResNet, or not the whole of it")

        where = hints.where
        blocks = tuple(
            len({key.split(".")[1] for key in state if key.startswith(f"{stage}.")})
            for stage in STAGES
        )
        missing = [stage for stage, count in zip(STAGES, blocks, strict=True) if not count]
        if missing == ["layer4"] and shape("conv1.weight")[::2] == (16, 3):
            layers = 3 if "layer1.0.conv3.weight" in state else 2
            raise DataError(
                f"{where}: a ResNet-{layers * sum(blocks) + 2} of three stages for CIFAR, whose "
                "maps have strides 1, 2 and 4; detectors need four stages, of strides 4 to 32"
            )
        if missing:
            texts = [hints.name(f"{stage}.0.conv1.weight") for stage in missing]
            raise DataError(
                f"{where}: {', '.join(missing)} is missing; not the whole of a ResNet (no "
                f"{', '.join(texts)})"
            )
        bottleneck = "layer1.0.conv3.weight" in state
        depths = [
            d for d, n in NUM_BLOCKS.items() if n == blocks and is_bottleneck(d) == bottleneck
        ]
        if not depths:
            kind = "bottleneck" if bottleneck else "basic"
            raise OtherNetworkError(
                f"{where}: {list(blocks)} {kind} blocks, not one of ResNet-{sorted(NUM_BLOCKS)}"
            )
        stem_channels, image_channels, kernel_size, _ = shape("conv1.weight")
        first = hints.name("conv1.weight")
        if image_channels != 3:
            raise DataError(f"{where}: {first} takes {image_channels} channels, expected 3 (RGB)")
        # Basic blocks have no groups; these are Detectron2's defaults.
        groups, width = 1, 64
        if bottleneck:
            width = shape("layer1.0.conv2.weight")[1]
            groups = max(1, shape("layer1.0.conv1.weight")[0] // width)
        channels = {
            "depth": depths[0],
            "stem_out_channels": stem_channels,
            "res2_out_channels": shape(f"layer1.0.conv{3 if bottleneck else 2}.weight")[0],
            "num_groups": groups,
            "width_per_group": width,
        }
        check_arch(hints.arch, channels, where, hints.notes, hints.warnings)
        recorded_width = hints.metadata.get("width")
        if recorded_width is not None and 64 * recorded_width != stem_channels:
            raise DataError(
                f"{where}: records width {recorded_width!r}, but {first} has {stem_channels} "
                "channels, expected 64 x width"
            )
        stem = _stem(kernel_size, hints)
        if kernel_size == 3 and "no_3x3_stem" in hints.metadata:
            raise DataError(f"{where}: a CIFAR network; {hints.metadata['no_3x3_stem']}")
        if kernel_size == 3 and hints.assumed_pixels:
            hints.warnings.append(
                f"assuming the pixel normalization of {hints.assumed_pixels}, which networks with "
                "a 3x3 stem rarely use; set --mean and --std if it differs"
            )
        known = {"stride_in_1x1": _stride_of_transformers(hints) and bottleneck, **hints.metadata}
        stride_in_1x1 = {**known, **hints.requested}["stride_in_1x1"]
        if stride_in_1x1 and not bottleneck:
            raise UserError(
                f"--stride-in-1x1 yes: {where} is a ResNet of basic blocks, which have no 1x1 conv"
            )
        return ResNetArchitecture(stride_in_1x1=stride_in_1x1, stem=stem, **channels)

    def build(self, architecture: ResNetArchitecture) -> nn.Module:
        """Build Detectron2's ResNet."""
        from convert.modeling.resnet import build

        return build(architecture)

    def reference(self, architecture: ResNetArchitecture) -> nn.Module:
        """Build torchvision's ResNet."""
        from convert.modeling.resnet import torchvision_resnet

        return torchvision_resnet(architecture)
