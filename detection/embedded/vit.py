"""Vision transformers under ViTDet's simple feature pyramid, and under an FPN of four blocks' maps.

The transformer itself is in convert/modeling/vit.py.
"""

from fvcore.common.config import CfgNode
from torch import Tensor, nn

from convert.modeling.vit import ViT
from detection.embedded.backbone import BACKBONES, FPN, SimplePyramid, build_fpn
from detection.embedded.layers import NORMS
from detection.modeling.backbones.vit import build_plain, build_vit, ends_of_quarters
from detection.modeling.vit_maps import FourMaps


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
