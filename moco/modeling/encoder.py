"""The encoder: a ResNet (or a ViT, moco/modeling/vit.py) and a head that projects its features to C
dimensions (sec. 3.3).

Class and parameter names are torchvision's, so its tools and other projects' converters read the
checkpoints.
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
HEADS = ("fc.", "head.")  # projection head or classifier, of a ResNet and of a ViT
# Side of the last stage's maps, as a part of the image's.
STRIDES = {"imagenet": 32, "stride2": 16, "cifar": 8}
COUNTER = ".num_batches_tracked"  # only a BN with momentum None reads it


class ResNet(TorchvisionResNet):
    """torchvision's ResNet, forward and names, with any width, stem and number of basic blocks.

    Its `__init__` fixes 64 channels and the stem, so the modules are made here.
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
        self.layer4.register_forward_pre_hook(_as_weights)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc: nn.Module = nn.Identity()
        self.feature_dim = spec.feature_dim
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # torchvision's initialization
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                module.__class__ = Conv2d  # torchvision's blocks make their own


Encoder = ResNet | ViT


def build_backbone(spec: Spec, norm_layer: NormLayer = nn.BatchNorm2d) -> Encoder:
    """A randomly initialized network without head: images (N, 3, H, W) → features (N, D)."""
    return ViT(spec) if isinstance(spec, ViTSpec) else ResNet(spec, norm_layer)


def set_head(encoder: Encoder, head: nn.Module) -> None:
    """Features (N, D) leave the encoder through `head`: `fc` of a ResNet, `head` of a ViT."""
    setattr(encoder, encoder.head_name, head)


def load_backbone(spec: Spec, state: Mapping[str, Tensor]) -> Encoder:
    """A network without head, in evaluation mode, that has the tensors of `state`.

    Args:
        state: the whole of an encoder; its head is left out, and batch counters that it does not
            have start at 0.

    Raises:
        RuntimeError: another network's tensors.
    """
    backbone = build_backbone(spec)
    counters = {k: v for k, v in backbone.state_dict().items() if k.endswith(COUNTER)}
    tensors = {name: x for name, x in state.items() if not name.startswith(HEADS)}
    backbone.load_state_dict(counters | tensors)
    return backbone.eval()


def build_encoder(spec: Spec, dim: int, mlp: bool, bn_splits: int = 1) -> Encoder:
    """A network with a projection head: images (N, 3, H, W) → (N, dim), unnormalized.

    Args:
        dim: output dimension C.
        mlp: a hidden layer of the features' width and a ReLU before the last layer (MoCo v2);
            named `fc.0` and `fc.2` as in the official code.
        bn_splits: groups in which BN sees this process's part of the batch (`GroupedBatchNorm2d`);
            0: BN sees the batch of all processes (`SyncedBatchNorm2d`).
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
    """Every block of a ResNet starts as the identity: the scale of its last BN is 0."""
    for module in encoder.modules():
        if isinstance(module, Bottleneck | BasicBlock):
            last = module.bn3 if isinstance(module, Bottleneck) else module.bn2
            nn.init.zeros_(last.weight)


def contiguous_last_stages(model: nn.Module, spec: Spec, num_images: int, crop_px: int) -> None:
    """Return the last stages of ResNets in channels_last to (N, C, H, W) where that is faster.

    In bf16: float32 has `moco.modeling.conv.Conv2d`. A CPU brings the weights into an order of its
    own for every product, which takes it longer from channels_last; where there are many more
    weights than values in the maps that decides.
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


def _as_weights(stage: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """A stage's input in the memory layout of its weights, its gradient in that of the input."""
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
    """`depth` blocks, the first with `stride` and a projection where the shape changes."""
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
