"""Vision transformers under the simple pyramid of ViTDet, and under a pyramid of four maps.

Maps are p2 to p6 whatever the patches' size, as those of a ResNet whatever its stem's stride; of
strides 4 to 64 px with the usual 16 px.

MODEL.BACKBONE.FREEZE_AT counts 1 for the embeddings of patches and positions, and 1 for each block;
the relative positions of frozen blocks stay at their 0, which is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from convert.families.vit import KEYS, ViTArchitecture
from detection.modeling.backbones.base import BACKBONE_TYPES, BackboneType
from moco.common.errors import UserError

if TYPE_CHECKING:
    from torch import nn

SCALES = (4.0, 2.0, 1.0, 0.5)  # of the pyramid's maps, relative to the transformer's
MAPS = ("p2", "p3", "p4", "p5", "p6")


def ends_of_quarters(depth: int) -> tuple[int, ...]:
    """Indices of the last block of each of four equal parts, e.g. (2, 5, 8, 11) of 12 blocks.

    Global attention is there (arXiv 2203.16527 and 2111.11429), and so are the maps of the pyramid
    of four.
    """
    return tuple(depth * (part + 1) // 4 - 1 for part in range(4))


def architecture(model: CfgNode) -> ViTArchitecture:
    """The network that MODEL.VIT describes, without how a detector uses it.

    Raises:
        UserError: a value out of its range, or in contradiction with another one.
    """
    try:
        return ViTArchitecture(**{field: model.VIT[key] for field, key in KEYS.items()})
    except UserError as error:
        raise UserError(f"MODEL.VIT: {error}") from error


def use(model: CfgNode) -> dict[str, Any]:
    """How a detector uses the network: arguments of both engines' ViT beside the architecture.

    Relative positions of global blocks start with as many as a padded square image needs, else as
    an image of the pre-training; others are interpolated, as in Detectron2.
    """
    keys = model.VIT
    image_size = model.BACKBONE.SQUARE_PAD or keys.PRETRAIN_IMAGE_SIZE
    return {
        "window_size": keys.WINDOW_SIZE,
        "global_blocks": tuple(keys.GLOBAL_BLOCKS) or ends_of_quarters(keys.DEPTH),
        "rel_pos_grid": image_size // keys.PATCH_SIZE if keys.REL_POS else 0,
        "drop_path": keys.DROP_PATH,
        "checkpoint_blocks": keys.CHECKPOINT_BLOCKS,
    }


def freeze(net: nn.Module, freeze_at: int) -> None:
    """Stop the gradients of MODEL.BACKBONE.FREEZE_AT leading parts of a ViT of either engine."""
    parts = [net.get_submodule("patch_embed"), *net.get_submodule("blocks").children()]
    net.get_parameter("pos_embed").requires_grad = freeze_at == 0
    for part in parts[:freeze_at]:
        part.requires_grad_(False)


def _maps(cfg: CfgNode) -> list[str]:
    keys, depth, patch = cfg.MODEL.VIT, cfg.MODEL.VIT.DEPTH, cfg.MODEL.VIT.PATCH_SIZE
    blocks, window = list(keys.GLOBAL_BLOCKS), keys.WINDOW_SIZE
    if patch < 4 or patch & (patch - 1):
        raise UserError(
            f"MODEL.VIT.PATCH_SIZE {patch}: a pyramid halves from map to map, which needs patches "
            "of 4, 8, 16 or another power of two px; convert the weights to such patches"
        )
    architecture(cfg.MODEL)
    if depth < len(SCALES):
        raise UserError(f"MODEL.VIT.DEPTH {depth}: expected at least {len(SCALES)} blocks")
    if any(type(block) is not int or not 0 <= block < depth for block in blocks):
        raise UserError(f"MODEL.VIT.GLOBAL_BLOCKS {blocks}: expected indices of 0..{depth - 1}")
    if window < 0:
        raise UserError(f"MODEL.VIT.WINDOW_SIZE {window}: expected 0 or more patches")
    if not 0 <= keys.DROP_PATH < 1:
        raise UserError(f"MODEL.VIT.DROP_PATH {keys.DROP_PATH}: expected 0 or more, less than 1")
    return list(MAPS)


def _num_parts(cfg: CfgNode) -> int:
    depth: int = cfg.MODEL.VIT.DEPTH
    return 1 + depth


def _simple_maps(cfg: CfgNode) -> list[str]:
    if not cfg.MODEL.FPN.NORM:
        raise UserError("MODEL.FPN.NORM '': the simple pyramid always has norms; set LN, as ViTDet")
    return _maps(cfg)


def _four_maps(cfg: CfgNode) -> list[str]:
    if (dim := cfg.MODEL.VIT.EMBED_DIM) % 32:
        raise UserError(
            f"MODEL.VIT.EMBED_DIM {dim}: {cfg.MODEL.BACKBONE.NAME} has group norms of 32 groups, "
            "which need a multiple of 32"
        )
    return _maps(cfg)


@BACKBONE_TYPES.register()
def build_vit_sfp_backbone() -> BackboneType:
    """ViTDet's simple feature pyramid of the last map (arXiv 2203.16527)."""
    return BackboneType("vit", ("backbone.net.",), _simple_maps, _num_parts, pyramid=True)


@BACKBONE_TYPES.register()
def build_vit_fpn_backbone() -> BackboneType:
    """Feature pyramid network of four blocks' maps (arXiv 2111.11429)."""
    return BackboneType("vit", ("backbone.net.",), _four_maps, _num_parts, pyramid=True)
