"""Vision transformers under Detectron2's simple feature pyramid, or its FPN, from a yacs config.

Detectron2 itself needs LazyConfig. The transformer is in convert/modeling/vit.py, for both engines.
"""

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from torch import Tensor

from convert.modeling.vit import ViT
from detection.d2.fpn import SimplePyramid, StageFPN, WithShapes, build_fpn
from detection.modeling.backbones.vit import build_plain, build_vit, ends_of_quarters
from detection.modeling.vit_maps import FourMaps


class ViTBackbone(ViT, WithShapes):
    """`ViT` as a Detectron2 backbone."""


class _Maps(FourMaps, WithShapes):
    """`FourMaps` as a Detectron2 backbone."""


class ViTFPN(Backbone):
    """FPN over maps of four blocks: (N, 3, H, W) -> {"p2": (N, C, H/4, W/4), ..., "p6"}."""

    def __init__(self, net: ViTBackbone, fpn: StageFPN) -> None:
        super().__init__()
        self.net, self.fpn = net, fpn

    @property
    def size_divisibility(self) -> int:
        """Number of pixels that both sides of a batch are a multiple of, the FPN's."""
        divisor: int = self.fpn.size_divisibility
        return divisor

    @property
    def padding_constraints(self) -> dict[str, int]:
        """Padding constraints of the FPN."""
        constraints: dict[str, int] = self.fpn.padding_constraints
        return constraints

    def output_shape(self) -> dict[str, ShapeSpec]:
        """Return channels and strides of the FPN's maps."""
        shape: dict[str, ShapeSpec] = self.fpn.output_shape()
        return shape

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Map images to the FPN's maps."""
        maps: dict[str, Tensor] = self.fpn(self.net(images))
        return maps


class PlainViT(ViTBackbone):
    """`ViT` without a pyramid."""

    @property
    def size_divisibility(self) -> int:
        """Number of pixels that both sides of a batch are a multiple of, a patch's."""
        return next(iter(self.strides.values()))


@BACKBONE_REGISTRY.register()
def build_vit_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> PlainViT:
    """Build a plain vision transformer."""
    return build_plain(PlainViT, cfg.MODEL)


@BACKBONE_REGISTRY.register()
def build_vit_sfp_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> SimplePyramid:
    """Build ViTDet's simple feature pyramid (arXiv 2203.16527)."""
    model = cfg.MODEL
    net, square_pad = build_vit(ViTBackbone, model), model.BACKBONE.SQUARE_PAD
    return SimplePyramid(net, model.FPN.OUT_CHANNELS, model.FPN.NORM, square_pad)


@BACKBONE_REGISTRY.register()
def build_vit_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> ViTFPN:
    """Build a feature pyramid network over the maps of four blocks (arXiv 2111.11429)."""
    keys = cfg.MODEL.VIT
    net = build_vit(ViTBackbone, cfg.MODEL, ends_of_quarters(keys.DEPTH))
    maps = _Maps(keys.EMBED_DIM, keys.PATCH_SIZE)
    return ViTFPN(net, build_fpn(cfg, maps, list(maps.strides)))
