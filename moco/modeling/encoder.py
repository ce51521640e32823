"""The encoder: a ResNet and a head that projects its pooled features to C dimensions (sec. 3.3).

Class and parameter names are torchvision's, so its tools and everybody's converters read the
checkpoints.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torchvision.models import ResNet as TorchvisionResNet
from torchvision.models.resnet import BasicBlock, Bottleneck

from moco.common.errors import UserError
from moco.modeling.grouped_bn import GroupedBatchNorm2d

NormLayer = Callable[[int], nn.Module]


class Arch(NamedTuple):
    """A ResNet: its block, blocks per stage, and the groups of a bottleneck's 3x3 convolution.

    `width_per_group` is torchvision's: channels of a group for 64 planes.
    """

    block: type[BasicBlock] | type[Bottleneck]
    depths: tuple[int, int, int, int]
    groups: int = 1
    width_per_group: int = 64


ARCHS: dict[str, Arch] = {
    "resnet10": Arch(BasicBlock, (1, 1, 1, 1)),
    "resnet18": Arch(BasicBlock, (2, 2, 2, 2)),
    "resnet34": Arch(BasicBlock, (3, 4, 6, 3)),
    "resnet50": Arch(Bottleneck, (3, 4, 6, 3)),
    "resnet101": Arch(Bottleneck, (3, 4, 23, 3)),
    # RX50 of table 1, ResNeXt-50-32x8d.
    "resnext50_32x8d": Arch(Bottleneck, (3, 4, 6, 3), groups=32, width_per_group=8),
}
STEMS = ("imagenet", "stride2", "cifar")
MIN_STEM_CHANNELS = 8


@dataclass(frozen=True)
class EncoderSpec:
    """Which ResNet.

    Attributes:
        arch: a name in `ARCHS`; `resnet10` has one basic block per stage.
        stem: `imagenet` (7x7, stride 2, max-pool: stride 4), `stride2` (3x3, stride 2, no
            max-pool) or `cifar` (3x3, stride 1, no max-pool).
        width: multiplies every channel count; 1 is the usual 64 channels after the stem. A
            `resnet50` of width 2 and 4 is R50w2x and R50w4x of table 1.

    Raises:
        UserError: unknown name, or a width that gives no whole number of channels.
    """

    arch: str
    stem: str = "imagenet"
    width: float = 1.0

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise UserError(f"arch: got {self.arch!r}, choices are {', '.join(ARCHS)}")
        if self.stem not in STEMS:
            raise UserError(f"stem: got {self.stem!r}, choices are {', '.join(STEMS)}")
        if not (self.width > 0 and (64 * self.width).is_integer() and 64 * self.width >= 8):
            raise UserError(
                f"width: got {self.width}, expected 64 * width to be a whole number "
                f">= {MIN_STEM_CHANNELS}, e.g. 0.375 (24 channels)"
            )

    @property
    def stem_channels(self) -> int:
        """Channels after the stem."""
        return round(64 * self.width)

    @property
    def feature_dim(self) -> int:
        """Channels of the last stage, the dimension of the pooled features."""
        return 8 * self.stem_channels * ARCHS[self.arch].block.expansion

    @property
    def name(self) -> str:
        """`resnet50`, `resnet50w2`, `resnet18_cifar`: rows of one table have one network."""
        width = "" if self.width == 1 else f"w{self.width:g}"
        stem = "" if self.stem == "imagenet" else f"_{self.stem}"
        return f"{self.arch}{width}{stem}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint; `EncoderSpec(**d)` reads them back."""
        return asdict(self)


class ResNet(TorchvisionResNet):
    """torchvision's ResNet, forward and names, with any width, stem and number of basic blocks.

    Its `__init__` fixes 64 channels and the stem, so the modules are made here.
    """

    def __init__(self, spec: EncoderSpec, norm_layer: NormLayer) -> None:
        nn.Module.__init__(self)
        arch = ARCHS[spec.arch]
        channels = spec.stem_channels
        if spec.stem == "imagenet":
            self.conv1 = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        else:
            stride = 2 if spec.stem == "stride2" else 1
            self.conv1 = nn.Conv2d(3, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = norm_layer(channels)
        self.relu = nn.ReLU(inplace=True)
        pooled = spec.stem == "imagenet"
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if pooled else nn.Identity()
        in_channels = channels
        stages = []
        for i, depth in enumerate(arch.depths):
            planes = channels * 2**i
            stride = 1 if i == 0 else 2
            stages.append(_stage(arch, in_channels, planes, depth, stride, norm_layer))
            in_channels = planes * arch.block.expansion
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Identity()
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # torchvision's initialization
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def build_backbone(spec: EncoderSpec, norm_layer: NormLayer = nn.BatchNorm2d) -> ResNet:
    """A randomly initialized ResNet without head: images (N, 3, H, W) → features (N, D)."""
    return ResNet(spec, norm_layer)


def build_encoder(spec: EncoderSpec, dim: int, mlp: bool, bn_splits: int = 1) -> ResNet:
    """A ResNet whose `fc` is the projection head: images (N, 3, H, W) → (N, dim), unnormalized.

    Args:
        dim: output dimension C.
        mlp: a hidden layer of the features' width and a ReLU before the last layer (MoCo v2);
            named `fc.0` and `fc.2` as in the official code.
        bn_splits: groups in which BN sees the batch (`GroupedBatchNorm2d`).
    """
    norm = nn.BatchNorm2d if bn_splits == 1 else partial(GroupedBatchNorm2d, num_groups=bn_splits)
    encoder = ResNet(spec, norm)
    features = spec.feature_dim
    last = nn.Linear(features, dim)
    encoder.fc = (
        nn.Sequential(nn.Linear(features, features), nn.ReLU(), last)  # type: ignore[assignment]
        if mlp
        else last
    )
    return encoder


def _stage(
    arch: Arch,
    in_channels: int,
    planes: int,
    depth: int,
    stride: int,
    norm_layer: NormLayer,
) -> nn.Sequential:
    """`depth` blocks, the first with `stride` and a projection where the shape changes."""
    out_channels = planes * arch.block.expansion
    downsample = None
    if stride != 1 or in_channels != out_channels:
        downsample = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
            norm_layer(out_channels),
        )
    options: dict[str, Any] = {
        "groups": arch.groups,
        "base_width": arch.width_per_group,
        "norm_layer": norm_layer,
    }
    blocks = [arch.block(in_channels, planes, stride, downsample, **options)]
    blocks += [arch.block(out_channels, planes, **options) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)
