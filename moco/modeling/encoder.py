"""Encoder: a ResNet, or a ViT (moco/modeling/vit.py), with a projection head (sec. 3.3).

Class and parameter names are torchvision's, so that its tools and other projects' converters can
read the checkpoints.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchvision.models import ResNet as TorchvisionResNet
from torchvision.models.resnet import BasicBlock, Bottleneck

from moco.modeling.archs import ARCHS, Arch, EncoderSpec, Spec, ViTSpec
from moco.modeling.conv import Conv2d
from moco.modeling.grouped_bn import GroupedBatchNorm2d
from moco.modeling.synced_bn import SyncedBatchNorm2d
from moco.modeling.vit import ViT

NormLayer = Callable[[int], nn.Module]
HEADS = ("fc.", "head.")  # name prefixes of the projection head or classifier of ResNet and ViT
# Stride of the last stage's feature maps with each stem.
STRIDES = {"imagenet": 32, "stride2": 16, "cifar": 8}
COUNTER = ".num_batches_tracked"  # used only by a BN with momentum None


class ResNet(TorchvisionResNet):
    """torchvision's ResNet with any width, stem and number of basic blocks.

    The forward pass and the names are torchvision's. The modules are built here because its
    `__init__` is limited to 64 channels and one stem.
    """

    head_name: ClassVar[str] = "fc"

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
            in_channels = planes * arch.expansion
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.layer4.register_forward_pre_hook(_match_weight_layout)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc: nn.Module = nn.Identity()
        self.feature_dim = spec.feature_dim
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # torchvision's initialization
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                module.__class__ = Conv2d  # torchvision's blocks construct their convolutions


Encoder = ResNet | ViT


def build_backbone(spec: Spec, norm_layer: NormLayer = nn.BatchNorm2d) -> Encoder:
    """Build a randomly initialized network without head: (N, 3, H, W) → features (N, D)."""
    return ViT(spec) if isinstance(spec, ViTSpec) else ResNet(spec, norm_layer)


def set_head(encoder: Encoder, head: nn.Module) -> None:
    """Set the head of the features (N, D): `fc` of a ResNet, `head` of a ViT."""
    setattr(encoder, encoder.head_name, head)


def load_backbone(spec: Spec, state: Mapping[str, Tensor]) -> Encoder:
    """Build a network without head from the tensors of an encoder, in evaluation mode.

    Args:
        spec: Specification of the network.
        state: State of the whole encoder. The head is ignored, and missing batch counters are 0.

    Raises:
        RuntimeError: If the tensors belong to another network.
    """
    backbone = build_backbone(spec)
    counters = {k: v for k, v in backbone.state_dict().items() if k.endswith(COUNTER)}
    tensors = {name: x for name, x in state.items() if not name.startswith(HEADS)}
    backbone.load_state_dict(counters | tensors)
    return backbone.eval()


def build_encoder(spec: Spec, dim: int, mlp: bool, bn_splits: int = 1) -> Encoder:
    """Build a network with a projection head: images (N, 3, H, W) → (N, dim), not normalized.

    Args:
        spec: Specification of the network.
        dim: Output dimension C.
        mlp: Add a hidden layer as wide as the features and a ReLU before the last layer (MoCo
            v2), named `fc.0` and `fc.2` as in the official code.
        bn_splits: Number of BN groups in this process's part of the batch (`GroupedBatchNorm2d`);
            0 synchronizes BN over all processes (`SyncedBatchNorm2d`).
    """
    grouped = partial(GroupedBatchNorm2d, num_groups=bn_splits)
    norm: NormLayer = {0: SyncedBatchNorm2d, 1: nn.BatchNorm2d}.get(bn_splits, grouped)
    encoder = build_backbone(spec, norm)
    features = spec.feature_dim
    last = nn.Linear(features, dim)
    hidden = (nn.Linear(features, features), nn.ReLU()) if mlp else ()
    set_head(encoder, nn.Sequential(*hidden, last) if mlp else last)
    return encoder


def zero_init_residual(encoder: Encoder) -> None:
    """Set the scale of the last BN of every ResNet block to 0, so that blocks start as identity."""
    for module in encoder.modules():
        if isinstance(module, Bottleneck | BasicBlock):
            last = module.bn3 if isinstance(module, Bottleneck) else module.bn2
            nn.init.zeros_(last.weight)


def contiguous_last_stages(model: nn.Module, spec: Spec, num_images: int, crop_px: int) -> None:
    """Convert the last stage of channels_last ResNets to (N, C, H, W) if that is faster in bf16.

    float32 uses `moco.modeling.conv.Conv2d` instead. CPUs reorder the weights for every product,
    which is slower from channels_last. With many more weights than values in the feature maps, the
    reordering dominates.
    """
    if isinstance(spec, ViTSpec):
        return
    side = -(-crop_px // STRIDES[spec.stem])
    values = num_images * spec.feature_dim * side**2
    for encoder in model.modules():
        if not isinstance(encoder, ResNet):
            continue
        stage = encoder.layer4
        if sum(p.numel() for p in stage.parameters()) >= 16 * values:
            stage.to(memory_format=torch.contiguous_format)


def _match_weight_layout(stage: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Convert a stage's input to the memory layout of the weights, and the gradient back."""
    (x,) = inputs
    if x.is_contiguous() or not stage[0].conv2.weight.is_contiguous():  # type: ignore[index]
        return x
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.contiguous(memory_format=torch.channels_last))
    return x.contiguous()


def _stage(
    arch: Arch,
    in_channels: int,
    planes: int,
    depth: int,
    stride: int,
    norm_layer: NormLayer,
) -> nn.Sequential:
    """Build `depth` blocks; the first has `stride` and, if the shape changes, a projection."""
    block = Bottleneck if arch.bottleneck else BasicBlock
    out_channels = planes * arch.expansion
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
    blocks = [block(in_channels, planes, stride, downsample, **options)]
    blocks += [block(out_channels, planes, **options) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)
