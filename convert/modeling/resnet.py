"""ResNet backbone in Detectron2's layout, without Detectron2, and its reference implementation.

Parameter names, the order of creation (and with it the random stream of initialization under a
seed) and the arithmetic of `ResNet` follow detectron2/modeling/backbone/resnet.py. It shares no
code with torchvision's ResNet, so that their agreement on an image (convert/verify.py) is evidence
and not a tautology. The embedded detection engine trains this class.

Shapes: N images, C channels, H W pixels. `stride` of a feature map: input pixels per cell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch.nn.functional as F
from torch import Tensor, nn

from convert.families.resnet import (
    NUM_BLOCKS,
    STEMS,
    ResNetArchitecture,
    is_bottleneck,
)
from moco.common.errors import DataError

if TYPE_CHECKING:
    from torchvision.models import resnet as tv

NormLayer = Callable[[int], nn.Module]

STAGES = ("res2", "res3", "res4", "res5")
FEATURES = ("stem", *STAGES)


class ConvNorm(nn.Conv2d):
    """Convolution without bias followed by a normalization, with tensors `weight` and `norm.*`.

    (N, C_in, H, W) -> (N, C_out, H', W').
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        norm_layer: NormLayer,
        *,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=dilation * (kernel_size // 2),
            dilation=dilation,
            groups=groups,
            bias=False,
        )
        self.norm = norm_layer(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the convolution and the normalization."""
        return cast(Tensor, self.norm(super().forward(x)))


def c2_msra_fill(conv: ConvNorm) -> None:
    """Apply He initialization with mode "fan_out", as fvcore.nn.weight_init.c2_msra_fill."""
    if not conv.weight.is_meta:  # on meta, normal_ would import torch's compiler, which is slow
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")


class Stem(nn.Module):
    """Layers before res2: (N, 3, H, W) -> (N, C, H / stride, W / stride).

    `imagenet` is Detectron2's BasicStem (7x7 stride 2, max-pool); `cifar` is 3x3 stride 1 and
    `stride2` 3x3 stride 2, both without a max-pool.
    """

    def __init__(self, out_channels: int, kind: str, norm_layer: NormLayer) -> None:
        super().__init__()
        kernel_size, conv_stride, self.stride = STEMS[kind]
        self.max_pool = self.stride != conv_stride
        self.conv1 = ConvNorm(3, out_channels, kernel_size, norm_layer, stride=conv_stride)
        c2_msra_fill(self.conv1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply convolution, ReLU and, for `imagenet`, max-pooling."""
        x = F.relu_(self.conv1(x))
        return F.max_pool2d(x, kernel_size=3, stride=2, padding=1) if self.max_pool else x


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, in ResNet-10, 18 and 34."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        stride: int,
        norm_layer: NormLayer,
    ) -> None:
        super().__init__()
        # Created first and initialized last as in Detectron2, because the random stream depends on
        # it.
        self.shortcut = _shortcut(in_channels, out_channels, stride, norm_layer)
        self.conv1 = ConvNorm(in_channels, out_channels, 3, norm_layer, stride=stride)
        self.conv2 = ConvNorm(out_channels, out_channels, 3, norm_layer)
        for conv in (self.conv1, self.conv2, self.shortcut):
            if conv is not None:
                c2_msra_fill(conv)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block: (N, C, H, W) -> (N, C', H', W')."""
        out = F.relu_(self.conv1(x))
        out = self.conv2(out)
        out += x if self.shortcut is None else self.shortcut(x)
        return F.relu_(out)


class BottleneckBlock(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut, in ResNet-50, 101 and 152.

    A stride > 1 is in the first 1x1 conv (`stride_in_1x1`: MSRA's models, Detectron2's default) or
    in the 3x3 conv (torchvision's models, so every MoCo model).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        bottleneck_channels: int,
        stride: int,
        num_groups: int,
        stride_in_1x1: bool,
        dilation: int,
        norm_layer: NormLayer,
    ) -> None:
        super().__init__()
        stride_1x1, stride_3x3 = (stride, 1) if stride_in_1x1 else (1, stride)
        self.shortcut = _shortcut(in_channels, out_channels, stride, norm_layer)
        self.conv1 = ConvNorm(in_channels, bottleneck_channels, 1, norm_layer, stride=stride_1x1)
        self.conv2 = ConvNorm(
            bottleneck_channels,
            bottleneck_channels,
            3,
            norm_layer,
            stride=stride_3x3,
            dilation=dilation,
            groups=num_groups,
        )
        self.conv3 = ConvNorm(bottleneck_channels, out_channels, 1, norm_layer)
        for conv in (self.conv1, self.conv2, self.conv3, self.shortcut):
            if conv is not None:
                c2_msra_fill(conv)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block: (N, C, H, W) -> (N, C', H', W')."""
        out = F.relu_(self.conv1(x))
        out = F.relu_(self.conv2(out))
        out = self.conv3(out)
        out += x if self.shortcut is None else self.shortcut(x)
        return F.relu_(out)


def _shortcut(
    in_channels: int, out_channels: int, stride: int, norm_layer: NormLayer
) -> ConvNorm | None:
    # Detectron2 adds a projection only if the channels change, whatever the stride.
    if in_channels == out_channels:
        return None
    return ConvNorm(in_channels, out_channels, 1, norm_layer, stride=stride)


def make_stage(
    depth: int,
    stage: str,
    *,
    in_channels: int,
    res2_out_channels: int,
    num_groups: int = 1,
    width_per_group: int = 64,
    stride_in_1x1: bool = False,
    dilation: int = 1,
    norm_layer: NormLayer = nn.BatchNorm2d,
) -> nn.Sequential:
    """Build stage "res2" .. "res5" of a ResNet: (N, in_channels, H, W) -> (N, C, H', W').

    C doubles from stage to stage, starting at `res2_out_channels`. The stride is 1 in res2 and in
    a dilated stage, else 2, and is in the first block. Detectron2's C4 box head is the res5 of
    this function with `in_channels` = the channels of res4 (Res5ROIHeads._build_res5_block).
    """
    index = STAGES.index(stage)
    factor = 2**index
    out_channels = res2_out_channels * factor
    first_stride = 1 if index == 0 or dilation > 1 else 2
    blocks: list[nn.Module] = []
    for i in range(NUM_BLOCKS[depth][index]):
        stride = first_stride if i == 0 else 1
        if is_bottleneck(depth):
            block: nn.Module = BottleneckBlock(
                in_channels,
                out_channels,
                bottleneck_channels=num_groups * width_per_group * factor,
                stride=stride,
                num_groups=num_groups,
                stride_in_1x1=stride_in_1x1,
                dilation=dilation,
                norm_layer=norm_layer,
            )
        elif dilation != 1 or num_groups != 1:
            raise ValueError(
                f"ResNet-{depth} has basic blocks: expected dilation 1 and 1 group, "
                f"got dilation {dilation} and {num_groups} groups"
            )
        else:
            block = BasicBlock(in_channels, out_channels, stride=stride, norm_layer=norm_layer)
        blocks.append(block)
        in_channels = out_channels
    return nn.Sequential(*blocks)


class ResNet(nn.Module):
    """ResNet backbone: (N, 3, H, W) normalized pixels -> {"stem", "res2", …: (N, C, h, w)}.

    Arguments have the names of Detectron2's MODEL.RESNETS; `stem` is this project's own key. It is
    initialized as in Detectron2 from the same random stream, so both are equal under a seed.

    Args:
        depth: 10, 18, 34, 50, 101 or 152.
        stem: "imagenet", "cifar" or "stride2".
        stem_out_channels: Channels of the stem.
        res2_out_channels: Channels of res2, which double in each further stage.
        num_groups: Groups of the 3x3 convolutions.
        width_per_group: Channels per group in res2.
        stride_in_1x1: Place strides in the first 1x1 convolutions.
        res5_dilation: 1, or 2 for a res5 of stride 1 with dilated 3x3 convolutions.
        norm_layer: Function from a number of channels to a normalization layer.
        out_features: Features that `forward` returns; stages after the last one are not kept.

    Attributes:
        strides: Strides of all kept features, by name.
        stage_channels: Channels of all kept features, by name.

    Raises:
        ValueError: If an argument is out of its range.
    """

    size_divisibility = 1  # images need no padding

    def __init__(
        self,
        depth: int,
        *,
        stem: str = "imagenet",
        stem_out_channels: int = 64,
        res2_out_channels: int = 256,
        num_groups: int = 1,
        width_per_group: int = 64,
        stride_in_1x1: bool = False,
        res5_dilation: int = 1,
        norm_layer: NormLayer = nn.BatchNorm2d,
        out_features: Sequence[str] = FEATURES,
    ) -> None:
        super().__init__()
        if depth not in NUM_BLOCKS:
            raise ValueError(f"depth: got {depth}, expected one of {sorted(NUM_BLOCKS)}")
        if stem not in STEMS:
            raise ValueError(f"stem: got {stem!r}, expected one of {sorted(STEMS)}")
        if res5_dilation not in (1, 2):
            raise ValueError(f"res5_dilation: got {res5_dilation}, expected 1 or 2")
        if not out_features or not set(out_features) <= set(FEATURES):
            raise ValueError(f"out_features: got {list(out_features)}, choices {FEATURES}")
        self.out_features = tuple(out_features)
        self.stem = Stem(stem_out_channels, stem, norm_layer)
        self.strides = {"stem": self.stem.stride}
        self.stage_channels = {"stem": stem_out_channels}
        last = max(FEATURES.index(name) for name in out_features)
        in_channels, stride = stem_out_channels, self.stem.stride
        for index, name in enumerate(STAGES):
            dilation = res5_dilation if name == "res5" else 1
            # Stages that are not kept are created as well, as in Detectron2, because they consume
            # random numbers that initialize what is built after the backbone.
            stage = make_stage(
                depth,
                name,
                in_channels=in_channels,
                res2_out_channels=res2_out_channels,
                num_groups=num_groups,
                width_per_group=width_per_group,
                stride_in_1x1=stride_in_1x1,
                dilation=dilation,
                norm_layer=norm_layer,
            )
            in_channels = res2_out_channels * 2**index
            if FEATURES.index(name) > last:
                continue
            self.add_module(name, stage)
            stride *= 1 if index == 0 or dilation > 1 else 2
            self.strides[name] = stride
            self.stage_channels[name] = in_channels
        self.stage_names = STAGES[:last]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the features in `out_features`."""
        outputs: dict[str, Tensor] = {}
        x = self.stem(x)
        if "stem" in self.out_features:
            # No copy is needed, because later stages do not modify their input.
            outputs["stem"] = x
        for name in self.stage_names:
            x = self.get_submodule(name)(x)
            if name in self.out_features:
                outputs[name] = x
        return outputs


def build(architecture: ResNetArchitecture) -> ResNet:
    """Build the backbone of an input contract, with all features."""
    return ResNet(**dataclasses.asdict(architecture))


def torchvision_resnet(architecture: ResNetArchitecture) -> tv.ResNet:
    """Build torchvision's own ResNet without fc.

    Raises:
        DataError: If torchvision has no such network.
    """
    from torchvision.models import resnet as tv  # takes longer to import than torch

    bottleneck, blocks = is_bottleneck(architecture.depth), NUM_BLOCKS[architecture.depth]
    block: type[tv.Bottleneck | tv.BasicBlock] = tv.Bottleneck if bottleneck else tv.BasicBlock
    planes, rest = divmod(architecture.res2_out_channels, block.expansion)
    # torchvision defines the width of a group for 64 planes.
    width, uneven = divmod(64 * architecture.width_per_group, planes) if bottleneck else (64, 0)
    if rest or uneven:
        raise DataError(
            f"cannot verify: no torchvision ResNet has {architecture.res2_out_channels} channels "
            f"in res2 with {architecture.num_groups} groups of {architecture.width_per_group}"
        )
    net = tv.ResNet(block, list(blocks), groups=architecture.num_groups, width_per_group=width)
    net.fc = nn.Identity()
    channels = architecture.stem_out_channels
    if architecture.stem == "imagenet":
        net.conv1 = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
    else:
        stride = {"cifar": 1, "stride2": 2}[architecture.stem]
        net.conv1 = nn.Conv2d(3, channels, 3, stride, 1, bias=False)
        net.maxpool = nn.Identity()
    if (channels, planes) != (64, 64):
        # torchvision has no argument for the number of channels, so rebuild the stages.
        net.bn1 = nn.BatchNorm2d(channels)
        net.inplanes = channels
        for i, count in enumerate(blocks):
            stage = net._make_layer(block, planes * 2**i, count, stride=1 if i == 0 else 2)
            setattr(net, f"layer{i + 1}", stage)
    if architecture.stride_in_1x1:
        # As in the original ResNets of He et al.; torchvision has no argument for it.
        for module in net.modules():
            if isinstance(module, tv.Bottleneck):
                module.conv1.stride, module.conv2.stride = module.conv2.stride, (1, 1)
    return net
