"""Vision transformers: plain, under ViTDet's simple pyramid, or under an FPN of four maps.

Maps of a pyramid are named p2 to p6 for any patch size, as those of a ResNet for any stride of its
stem. With patches of 16 px they have strides of 4 to 64 px.

MODEL.BACKBONE.FREEZE_AT counts the embeddings (patches, positions, tokens, a norm after them) as 1
part, and each block as 1. The relative positions of frozen blocks remain 0, which has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fvcore.common.config import CfgNode

from convert.families.vit import FEATURE, KEYS, ViTArchitecture
from detection.modeling.backbones.base import BACKBONE_TYPES, BackboneType
from moco.common.errors import UserError

if TYPE_CHECKING:
    from convert.modeling.vit import ViT

Network = TypeVar("Network", bound="ViT")
SCALES = (4.0, 2.0, 1.0, 0.5)  # of the pyramid's maps, relative to the transformer's
BLOCK = "block"  # beginning of the name of a block's map
STAGES = ("res2", "res3", "res4", "res5")  # the maps under a pyramid, as those of a ResNet
MAPS = ("p2", "p3", "p4", "p5", "p6")


def ends_of_quarters(depth: int) -> tuple[int, ...]:
    """Return the last block of each of four equal parts, e.g. (2, 5, 8, 11) of 12 blocks.

    These blocks have global attention (arXiv 2203.16527 and 2111.11429), and their maps are those
    of the pyramid of four.
    """
    return tuple(depth * (part + 1) // 4 - 1 for part in range(4))


def architecture(model: CfgNode) -> ViTArchitecture:
    """Return the architecture in MODEL.VIT, with the tokens that the detector keeps.

    Raises:
        UserError: If a value is out of range or contradicts another one.
    """
    fields = {field: model.VIT[key] for field, key in KEYS.items()}
    fields["tokens"] *= model.VIT.KEEP_TOKENS
    try:
        return ViTArchitecture(**fields)
    except UserError as error:
        raise UserError(f"MODEL.VIT: {error}") from error


def detector_arguments(model: CfgNode) -> dict[str, Any]:
    """Return the arguments of `ViT` that a detector adds to the architecture.

    The relative positions of global blocks are as many as a padded square image needs or, without
    such padding, a pre-training image; for other sizes they are interpolated, as in Detectron2.
    """
    keys = model.VIT
    image_size = model.BACKBONE.SQUARE_PAD or keys.PRETRAIN_IMAGE_SIZE
    return {
        "window_size": keys.WINDOW_SIZE,
        "global_blocks": tuple(keys.GLOBAL_BLOCKS) or ends_of_quarters(keys.DEPTH),
        "rel_pos_grid": image_size // keys.PATCH_SIZE if keys.REL_POS else 0,
        "drop_path": keys.DROP_PATH,
        "checkpoint_blocks": keys.CHECKPOINT_BLOCKS,
        "rope_rescale": keys.ROPE_RESCALE,
    }


def build_vit(network: type[Network], model: CfgNode, out_blocks: Sequence[int] = ()) -> Network:
    """Build the transformer of MODEL.VIT, with its last map or with those of some blocks.

    Args:
        network: Class of the transformer, `ViT` or an engine's subclass.
        model: Node MODEL of the config.
        out_blocks: Blocks whose maps are returned; empty: the last block.

    Raises:
        UserError: If MODEL.VIT describes no valid network.
    """
    net = network(architecture(model), **detector_arguments(model), out_blocks=out_blocks)
    _freeze(net, model.BACKBONE.FREEZE_AT)
    return net


def _freeze(net: ViT, freeze_at: int) -> None:
    """Freeze the first MODEL.BACKBONE.FREEZE_AT parts, or all if it is negative (in place)."""
    for embedding in net.embeddings().values():
        embedding.requires_grad = freeze_at == 0
    net.norm_pre.requires_grad_(freeze_at == 0)
    parts = [net.patch_embed, *net.blocks]
    for part in parts[: len(parts) if freeze_at < 0 else freeze_at]:
        part.requires_grad_(False)


def build_plain(network: type[Network], model: CfgNode) -> Network:
    """Build the transformer with the maps in MODEL.SEM_SEG_HEAD.IN_FEATURES, as `build_vit`.

    Blocks above the last of these maps are computed, too, but never trained.
    """
    names = model.SEM_SEG_HEAD.IN_FEATURES
    blocks = [int(name.removeprefix(BLOCK)) for name in names if name != FEATURE]
    net = build_vit(network, model, blocks)
    if blocks:
        net.blocks[max(blocks) + 1 :].requires_grad_(False)
    return net


def _plain_maps(cfg: CfgNode) -> list[str]:
    names, depth = list(cfg.MODEL.SEM_SEG_HEAD.IN_FEATURES), cfg.MODEL.VIT.DEPTH
    every = [f"{BLOCK}{i}" for i in range(depth)]
    if names != [FEATURE] and (not names or names != [b for b in every if b in names]):
        raise UserError(
            f"MODEL.SEM_SEG_HEAD.IN_FEATURES {names}: {cfg.MODEL.BACKBONE.NAME} has [{FEATURE!r}], "
            f"or blocks of {every[0]} to {every[-1]} in ascending order"
        )
    _check_keys(cfg)
    return names


def _maps(cfg: CfgNode) -> list[str]:
    depth, patch = cfg.MODEL.VIT.DEPTH, cfg.MODEL.VIT.PATCH_SIZE
    if patch < 4 or patch & (patch - 1):
        raise UserError(
            f"MODEL.VIT.PATCH_SIZE {patch}: a pyramid halves from map to map, which needs patches "
            "of 4, 8, 16 or another power of two px; convert the weights to such patches"
        )
    if depth < len(SCALES):
        raise UserError(f"MODEL.VIT.DEPTH {depth}: expected at least {len(SCALES)} blocks")
    _check_keys(cfg)
    return list(MAPS)


def _check_keys(cfg: CfgNode) -> None:
    keys, depth = cfg.MODEL.VIT, cfg.MODEL.VIT.DEPTH
    blocks, window = list(keys.GLOBAL_BLOCKS), keys.WINDOW_SIZE
    architecture(cfg.MODEL)
    if any(type(block) is not int or not 0 <= block < depth for block in blocks):
        raise UserError(f"MODEL.VIT.GLOBAL_BLOCKS {blocks}: expected indices of 0..{depth - 1}")
    if window < 0:
        raise UserError(f"MODEL.VIT.WINDOW_SIZE {window}: expected 0 or more patches")
    if keys.KEEP_TOKENS and keys.REL_POS:
        raise UserError(
            "MODEL.VIT.REL_POS True: tokens have no relative positions; set it to False, or "
            "MODEL.VIT.KEEP_TOKENS"
        )
    if keys.ROPE_RESCALE and (keys.ROPE_RESCALE < 1 or not keys.ROTARY):
        raise UserError(
            f"MODEL.VIT.ROPE_RESCALE {keys.ROPE_RESCALE}: expected 0 for none, or 1 or more, which "
            "needs MODEL.VIT.ROTARY"
        )
    if not 0 <= keys.DROP_PATH < 1:
        raise UserError(f"MODEL.VIT.DROP_PATH {keys.DROP_PATH}: expected 0 or more, less than 1")


def _num_parts(cfg: CfgNode) -> int:
    depth: int = cfg.MODEL.VIT.DEPTH
    return 1 + depth


def check_simple_norm(cfg: CfgNode) -> None:
    """Raise UserError if MODEL.FPN.NORM is no norm, which a simple pyramid needs."""
    if not cfg.MODEL.FPN.NORM:
        raise UserError(
            "MODEL.FPN.NORM '': the simple pyramid needs norms; set it to LN, as ViTDet"
        )


def stages(model: CfgNode) -> list[str]:
    """Return the stages under a pyramid: MODEL.FPN.IN_FEATURES, by default all four.

    Raises:
        UserError: If they are not the last ones.
    """
    names = list(model.FPN.IN_FEATURES) or [*STAGES]
    if names != [*STAGES[-len(names) :]]:
        raise UserError(f"MODEL.FPN.IN_FEATURES {names}: expected the last ones of {[*STAGES]}")
    return names


def pyramid_maps(model: CfgNode) -> list[str]:
    """Return the maps of a pyramid: one for each of its stages, and a coarser one."""
    return [*MAPS[-len(stages(model)) - 1 :]]


def simple_scales(model: CfgNode) -> tuple[float, ...]:
    """Return the scales of a simple pyramid's maps, relative to the transformer's."""
    return SCALES[-len(stages(model)) :]


def _simple_maps(cfg: CfgNode) -> list[str]:
    check_simple_norm(cfg)
    _maps(cfg)
    return pyramid_maps(cfg.MODEL)


def _four_maps(cfg: CfgNode) -> list[str]:
    if (dim := cfg.MODEL.VIT.EMBED_DIM) % 32:
        raise UserError(
            f"MODEL.VIT.EMBED_DIM {dim}: {cfg.MODEL.BACKBONE.NAME} has group norms of 32 groups, "
            "which need a multiple of 32"
        )
    return _maps(cfg)


def _under_pyramid(maps: Callable[[CfgNode], list[str]]) -> BackboneType:
    return BackboneType(
        "vit", ("backbone.net.",), maps, _num_parts, freezes_whole=True, pyramid=True
    )


@BACKBONE_TYPES.register()
def build_vit_backbone() -> BackboneType:
    """Return the type of a plain transformer, for heads of semantic segmentation."""
    return BackboneType("vit", ("backbone.",), _plain_maps, _num_parts, freezes_whole=True)


@BACKBONE_TYPES.register()
def build_vit_sfp_backbone() -> BackboneType:
    """Return the type of ViTDet's simple feature pyramid of the last map (arXiv 2203.16527)."""
    return _under_pyramid(_simple_maps)


@BACKBONE_TYPES.register()
def build_vit_fpn_backbone() -> BackboneType:
    """Return the type of an FPN over four blocks' maps (arXiv 2111.11429)."""
    return _under_pyramid(_four_maps)
