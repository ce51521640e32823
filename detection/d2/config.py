"""Detectron2's config with this project's keys, and what must hold before Detectron2 builds it."""

from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import (
    BACKBONE_REGISTRY,
    META_ARCH_REGISTRY,
    ROI_HEADS_REGISTRY,
    SEM_SEG_HEADS_REGISTRY,
)

from convert.families.resnet_network import NUM_BLOCKS, STEMS
from detection.config.checks import check_basic_blocks, check_box_head
from detection.config.task import add_transfer_config
from detection.config.weights import apply_contract, apply_random, read_weights
from detection.d2 import densepose
from detection.d2.resnet import builder_name, detectron2_has
from detection.d2.vit import require_timm
from detection.modeling.backbones import backbone_type, check_backbone
from detection.modeling.norms import norm_keys
from moco.common.cfgnode import flatten
from moco.common.errors import UserError

# The names that detectron2.layers.get_norm takes.
_NORMS = ("", "BN", "SyncBN", "FrozenBN", "GN", "nnSyncBN", "naiveSyncBN", "naiveSyncBN_N", "LN")


def transfer_defaults(*, dense_pose: bool = False) -> CfgNode:
    """Detectron2's defaults with this project's own keys, and DensePose's where they are needed."""
    cfg = get_cfg()
    if dense_pose:
        densepose.add_keys(cfg)
    add_transfer_config(cfg)
    return cfg


def apply_weights(cfg: CfgNode) -> None:
    """Let `cfg` feed and build what MODEL.WEIGHTS holds (in place), for a custom train_net.py.

    Color order, mean, std, the stride's place, depth and width follow the weights' contract, and
    MODEL.BACKBONE.NAME becomes this project's builder where Detectron2's has no such network. What
    opens MODEL.WEIGHTS then is Detectron2's loader: give a converted file or one of its own names.

    Raises:
        UserError, DataError: see `detection.config.weights.read_weights`; UserError also for a
            MODEL.BACKBONE.NAME that cannot have this network.
    """
    kind = backbone_type(cfg.MODEL.BACKBONE.NAME)
    weights = read_weights(cfg.MODEL.WEIGHTS, kind.timm_model(cfg))
    if weights is None:
        apply_random(cfg, explicit=())
    else:
        apply_contract(cfg, weights.contract, explicit=())
    cfg.MODEL.BACKBONE.NAME = builder_name(cfg)


def check_transfer_config(cfg: CfgNode) -> None:
    """Raise UserError for what Detectron2 would answer with an assertion or another network."""
    resnets, values = cfg.MODEL.RESNETS, flatten(cfg)
    for key, known in (("STEM", STEMS), ("DEPTH", NUM_BLOCKS)):
        if resnets[key] not in known:
            choices = ", ".join(map(str, known))
            raise UserError(f"MODEL.RESNETS.{key}: got {resnets[key]}, choices are {choices}")
    check_basic_blocks(cfg)
    check_box_head(cfg)
    for key, registry in (
        ("MODEL.META_ARCHITECTURE", META_ARCH_REGISTRY),
        ("MODEL.BACKBONE.NAME", BACKBONE_REGISTRY),
        ("MODEL.ROI_HEADS.NAME", ROI_HEADS_REGISTRY),
        ("MODEL.SEM_SEG_HEAD.NAME", SEM_SEG_HEADS_REGISTRY),
    ):
        if values[key] not in registry:
            choices = ", ".join(known for known, _ in registry)
            raise UserError(f"{key}: got {values[key]!r}, choices are {choices}")
    check_backbone(cfg)
    if backbone_type(cfg.MODEL.BACKBONE.NAME).family == "vit":
        require_timm()
    builder_name(cfg)
    if not detectron2_has(cfg) and any(resnets.DEFORM_ON_PER_STAGE):
        raise UserError(
            f"MODEL.RESNETS.DEFORM_ON_PER_STAGE {resnets.DEFORM_ON_PER_STAGE}: not with a ResNet-"
            f"{resnets.DEPTH}, {resnets.STEM} stem; set all to False"
        )
    for key in norm_keys(cfg):
        if values[key] not in _NORMS:
            raise UserError(f"{key}: got {values[key]!r}, choices are {', '.join(_NORMS)}")
    if cfg.TEST.EXPECTED_RESULTS:
        raise UserError("TEST.EXPECTED_RESULTS: this train_net.py has no such thing; remove it")
    _check_test_aug(cfg)
    if cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor":
        if cfg.INPUT.CROP.ENABLED:
            raise UserError("INPUT.CROP: semantic segmentation crops by INPUT.SEM_SEG_CROP_SIZE")
        if cfg.INPUT.RANDOM_FLIP not in ("horizontal", "none"):
            raise UserError(
                f"INPUT.RANDOM_FLIP: got {cfg.INPUT.RANDOM_FLIP!r}, semantic segmentation has "
                "horizontal, none"
            )


def _check_test_aug(cfg: CfgNode) -> None:
    """Raise UserError for models that Detectron2's GeneralizedRCNNWithTTA cannot wrap."""
    model = cfg.MODEL
    for key, fits in (
        ("MODEL.META_ARCHITECTURE", model.META_ARCHITECTURE == "GeneralizedRCNN"),
        ("MODEL.KEYPOINT_ON", not model.KEYPOINT_ON),
        ("MODEL.LOAD_PROPOSALS", not model.LOAD_PROPOSALS),
        ("MODEL.DENSEPOSE_ON", not model.get("DENSEPOSE_ON", False)),
    ):
        if cfg.TEST.AUG.ENABLED and not fits:
            raise UserError(
                f"TEST.AUG.ENABLED: Detectron2 has no test-time augmentation for {key} "
                f"{flatten(cfg)[key]}; set it to False"
            )


def with_builder(cfg: CfgNode) -> CfgNode:
    """`cfg` with the builder that can make its backbone in MODEL.BACKBONE.NAME (a frozen copy).

    A task and its records keep Detectron2's name, which the embedded engine knows, too.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.BACKBONE.NAME = builder_name(cfg)
    cfg.freeze()
    return cfg
