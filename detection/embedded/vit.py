"""Vision transformers with a pyramid: ViTDet's simple one, and an FPN of four blocks' maps.

The transformer is convert/modeling/vit.py's.
"""

import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from convert.modeling.resnet import NormLayer
from convert.modeling.vit import ViT
from detection.embedded.backbone import BACKBONES, FPN, build_fpn
from detection.embedded.layers import NORMS, conv
from detection.modeling.backbones.vit import (
    MAPS,
    SCALES,
    architecture,
    ends_of_quarters,
    freeze,
    use,
)
from detection.modeling.vit_maps import FourMaps


def scaling(scale: float, dim: int, norm: NormLayer) -> tuple[list[nn.Module], int]:
    """Layers that scale a map of `dim` channels, and the number of channels that they leave."""
    if scale == 4:
        first = nn.ConvTranspose2d(dim, dim // 2, kernel_size=2, stride=2)
        second = nn.ConvTranspose2d(dim // 2, dim // 4, kernel_size=2, stride=2)
        return [first, norm(dim // 2), nn.GELU(), second], dim // 4
    if scale == 2:
        return [nn.ConvTranspose2d(dim, dim // 2, kernel_size=2, stride=2)], dim // 2
    return [nn.MaxPool2d(kernel_size=2, stride=2)] if scale == 0.5 else [], dim


class SimplePyramid(nn.Module):
    """(N, 3, H, W) -> {"p2": (N, C, H/4, W/4), ..., "p6"}, all of the transformer's last map.

    Equal to SimpleFeaturePyramid in detectron2/modeling/backbone/vit.py, which names its layers
    by their strides (simfp_2: 4 px), with p6 by max pooling.
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
        (x,) = self.net(images).values()
        maps = [layers(x) for name, layers in self.named_children() if name != "net"]
        maps.append(F.max_pool2d(maps[-1], kernel_size=1, stride=2))
        return dict(zip(MAPS, maps, strict=True))


class ViTFPN(nn.Module):
    """(N, 3, H, W) -> {"p2": (N, C, H/4, W/4), ..., "p6"}: an FPN over maps of four blocks."""

    def __init__(self, net: ViT, fpn: FPN) -> None:
        super().__init__()
        self.net, self.fpn = net, fpn
        self.strides, self.stage_channels = fpn.strides, fpn.stage_channels
        self.size_divisibility = fpn.size_divisibility

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps: dict[str, Tensor] = self.fpn(self.net(images))
        return maps


def build_vit(model: CfgNode, *, four_maps: bool = False) -> ViT:
    """The transformer of MODEL.VIT, with the last map or with those of four blocks."""
    out_blocks = ends_of_quarters(model.VIT.DEPTH) if four_maps else ()
    net = ViT(architecture(model), **use(model), out_blocks=out_blocks)
    freeze(net, model.BACKBONE.FREEZE_AT)
    return net


@BACKBONES.register()
def build_vit_sfp_backbone(model: CfgNode) -> SimplePyramid:
    return SimplePyramid(build_vit(model), model.FPN.OUT_CHANNELS, NORMS[model.FPN.NORM])


@BACKBONES.register()
def build_vit_fpn_backbone(model: CfgNode) -> ViTFPN:
    net = build_vit(model, four_maps=True)
    maps = FourMaps(model.VIT.EMBED_DIM, model.VIT.PATCH_SIZE)
    return ViTFPN(net, build_fpn(model, maps, list(maps.strides)))
