"""Vision transformers under ViTDet's simple feature pyramid, and under an FPN of four blocks' maps.

The transformer itself is in convert/modeling/vit.py.
"""

import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from convert.modeling.resnet import NormLayer
from convert.modeling.vit import ViT
from detection.embedded.backbone import BACKBONES, FPN, build_fpn
from detection.embedded.layers import NORMS, conv
from detection.modeling.backbones.vit import MAPS, SCALES, build_plain, build_vit, ends_of_quarters
from detection.modeling.vit_maps import FourMaps


def scaling(scale: float, dim: int, norm: NormLayer) -> tuple[list[nn.Module], int]:
    """Return layers that scale a map of `dim` channels, and the number of their output channels."""
    if scale == 4:
        first = nn.ConvTranspose2d(dim, dim // 2, kernel_size=2, stride=2)
        second = nn.ConvTranspose2d(dim // 2, dim // 4, kernel_size=2, stride=2)
        return [first, norm(dim // 2), nn.GELU(), second], dim // 4
    if scale == 2:
        return [nn.ConvTranspose2d(dim, dim // 2, kernel_size=2, stride=2)], dim // 2
    return [nn.MaxPool2d(kernel_size=2, stride=2)] if scale == 0.5 else [], dim


class SimplePyramid(nn.Module):
    """Simple feature pyramid of a ViT: (N, 3, H, W) -> {"p2": (N, C, H/4, W/4), ..., "p6"}.

    Equal to SimpleFeaturePyramid in detectron2/modeling/backbone/vit.py, which names its layers by
    log2 of their stride (simfp_2: 4 px); p6 is max-pooled.
    """

    def __init__(self, net: ViT, channels: int, norm: NormLayer) -> None:
        super().__init__()
        self.net = net
        ((name, stride),) = net.strides.items()
        dim = net.stage_channels[name]
        strides = [int(stride / scale) for scale in SCALES]
        for scale, own in zip(SCALES, strides, strict=True):
            layers, out = scaling(scale, dim, norm)
            layers += [conv(out, channels, 1, norm), conv(channels, channels, 3, norm)]
            self.add_module(f"simfp_{own.bit_length() - 1}", nn.Sequential(*layers))
        self.strides = dict(zip(MAPS, [*strides, 2 * strides[-1]], strict=True))
        self.stage_channels = dict.fromkeys(MAPS, channels)
        self.size_divisibility = strides[-1]

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Map images to p2..p6."""
        (x,) = self.net(images).values()
        maps = [layers(x) for name, layers in self.named_children() if name != "net"]
        maps.append(F.max_pool2d(maps[-1], kernel_size=1, stride=2))
        return dict(zip(MAPS, maps, strict=True))


class ViTFPN(nn.Module):
    """FPN over maps of four blocks: (N, 3, H, W) -> {"p2": (N, C, H/4, W/4), ..., "p6"}."""

    def __init__(self, net: ViT, fpn: FPN) -> None:
        super().__init__()
        self.net, self.fpn = net, fpn
        self.strides, self.stage_channels = fpn.strides, fpn.stage_channels
        self.size_divisibility = fpn.size_divisibility

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Map images to p2..p6."""
        maps: dict[str, Tensor] = self.fpn(self.net(images))
        return maps


class PlainViT(ViT):
    """Vision transformer without a pyramid."""

    @property
    def size_divisibility(self) -> int:
        """Number of pixels that both sides of a batch are a multiple of, a patch's."""
        return next(iter(self.strides.values()))


@BACKBONES.register()
def build_vit_backbone(model: CfgNode) -> PlainViT:
    """Build a plain vision transformer."""
    return build_plain(PlainViT, model)


@BACKBONES.register()
def build_vit_sfp_backbone(model: CfgNode) -> SimplePyramid:
    """Build ViTDet's simple feature pyramid (arXiv 2203.16527)."""
    return SimplePyramid(build_vit(ViT, model), model.FPN.OUT_CHANNELS, NORMS[model.FPN.NORM])


@BACKBONES.register()
def build_vit_fpn_backbone(model: CfgNode) -> ViTFPN:
    """Build a feature pyramid network over the maps of four blocks (arXiv 2111.11429)."""
    net = build_vit(ViT, model, ends_of_quarters(model.VIT.DEPTH))
    maps = FourMaps(model.VIT.EMBED_DIM, model.VIT.PATCH_SIZE)
    return ViTFPN(net, build_fpn(model, maps, list(maps.strides)))
