"""Detectron2's ViT with a pyramid, from a configuration: its own is for LazyConfig alone.

Differences from detectron2/modeling/backbone/vit.py, which the embedded engine shares:
activation checkpointing is torch's, not fairscale's; LayerScale; the maps of several blocks; and a
batch is padded to what the pyramid needs, which a misspelled key there prevents.
"""

from collections.abc import Collection, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.modeling.backbone.utils import get_abs_pos
from detectron2.modeling.backbone.vit import SimpleFeaturePyramid, ViT
from torch import Tensor, nn

from convert.families.vit import FEATURE, ViTArchitecture
from convert.modeling.vit import LayerScale, run_blocks
from detection.d2.fpn import StageFPN, WithShapes, build_fpn
from detection.modeling.backbones.vit import (
    MAPS,
    SCALES,
    architecture,
    ends_of_quarters,
    freeze,
    use,
)
from detection.modeling.vit_maps import FourMaps


class TransferViT(ViT):
    """Detectron2's ViT, with what the module's first lines say.

    Arguments and results as those of `convert.modeling.vit.ViT`.
    """

    def __init__(
        self,
        a: ViTArchitecture,
        *,
        window_size: int,
        global_blocks: Collection[int],
        rel_pos_grid: int,
        drop_path: float,
        checkpoint_blocks: bool,
        out_blocks: Sequence[int] = (),
    ) -> None:
        super().__init__(
            img_size=rel_pos_grid * a.patch_size,
            patch_size=a.patch_size,
            embed_dim=a.embed_dim,
            depth=a.depth,
            num_heads=a.num_heads,
            mlp_ratio=Fraction(a.mlp_dim, a.embed_dim),  # without rounding
            qkv_bias=a.qkv_bias,
            drop_path_rate=drop_path,
            norm_layer=partial(nn.LayerNorm, eps=a.layer_norm_eps),
            use_rel_pos=rel_pos_grid > 0,
            window_size=window_size,
            window_block_indexes=set(range(a.depth)) - set(global_blocks),
            pretrain_img_size=a.image_size,
            pretrain_use_cls_token=a.class_position,
        )
        self.checkpoint_blocks, self.out_blocks = checkpoint_blocks, tuple(out_blocks)
        names = [f"block{i}" for i in out_blocks] or [FEATURE]
        self._shape = dict.fromkeys(names, ShapeSpec(channels=a.embed_dim, stride=a.patch_size))
        if a.layer_scale:
            for block in self.blocks:
                block.ls1, block.ls2 = LayerScale(a.embed_dim), LayerScale(a.embed_dim)
                # A factor per channel: within windows or after them is the same.
                block.attn.register_forward_hook(partial(_scaled, block.ls1))
                block.mlp.register_forward_hook(partial(_scaled, block.ls2))

    def output_shape(self) -> dict[str, ShapeSpec]:
        return self._shape

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.patch_embed(x)
        x = x + get_abs_pos(self.pos_embed, self.pretrain_use_cls_token, (x.shape[1], x.shape[2]))
        return run_blocks(self.blocks, x, self.checkpoint_blocks, self.out_blocks)


def _scaled(scale: LayerScale, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    scaled: Tensor = scale(output)
    return scaled


class SimplePyramid(SimpleFeaturePyramid):
    """Detectron2's, of p2 to p6 whatever the patches' size, padded to whole cells of p5."""

    def __init__(self, net: ViT, channels: int, norm: str, square_pad: int) -> None:
        top = LastLevelMaxPool()
        super().__init__(net, FEATURE, channels, SCALES, top, norm=norm, square_pad=square_pad)
        strides = [shape.stride for shape in self.output_shape().values()]
        self._out_features = list(MAPS)
        self._out_feature_strides = dict(zip(MAPS, strides, strict=True))
        self._out_feature_channels = dict.fromkeys(MAPS, channels)

    @property
    def size_divisibility(self) -> int:
        # Deviation: Detectron2's pads to whole cells only where it pads to a square.
        return self._out_feature_strides["p5"]


class _Maps(FourMaps, WithShapes):
    """The same as a backbone of Detectron2."""


class ViTFPN(Backbone):
    """(N, 3, H, W) -> {"p2": (N, C, H/4, W/4), ..., "p6"}: an FPN over maps of four blocks."""

    def __init__(self, net: ViT, fpn: StageFPN) -> None:
        super().__init__()
        self.net, self.fpn = net, fpn

    @property
    def size_divisibility(self) -> int:
        divisor: int = self.fpn.size_divisibility
        return divisor

    @property
    def padding_constraints(self) -> dict[str, int]:
        constraints: dict[str, int] = self.fpn.padding_constraints
        return constraints

    def output_shape(self) -> dict[str, ShapeSpec]:
        shape: dict[str, ShapeSpec] = self.fpn.output_shape()
        return shape

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps: dict[str, Tensor] = self.fpn(self.net(images))
        return maps


def build_vit(model: CfgNode, *, four_maps: bool = False) -> TransferViT:
    """Build the transformer of MODEL.VIT, with the last map or with those of four blocks.

    Raises:
        UserError: no such network.
    """
    out_blocks = ends_of_quarters(model.VIT.DEPTH) if four_maps else ()
    net = TransferViT(architecture(model), **use(model), out_blocks=out_blocks)
    freeze(net, model.BACKBONE.FREEZE_AT)
    return net


@BACKBONE_REGISTRY.register()
def build_vit_sfp_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> SimplePyramid:
    """ViTDet's simple feature pyramid (arXiv 2203.16527)."""
    model = cfg.MODEL
    net, square_pad = build_vit(model), model.BACKBONE.SQUARE_PAD
    return SimplePyramid(net, model.FPN.OUT_CHANNELS, model.FPN.NORM, square_pad)


@BACKBONE_REGISTRY.register()
def build_vit_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> ViTFPN:
    """A feature pyramid network of the maps of four blocks (arXiv 2111.11429)."""
    net, keys = build_vit(cfg.MODEL, four_maps=True), cfg.MODEL.VIT
    maps = _Maps(keys.EMBED_DIM, keys.PATCH_SIZE)
    return ViTFPN(net, build_fpn(cfg, maps, list(maps.strides)))
