"""Heads of semantic segmentation registered in Detectron2: FCN-16s, linear, UPerNet."""

from functools import partial

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec, get_norm
from detectron2.modeling import SEM_SEG_HEADS_REGISTRY

from detection.modeling.fcn16s import FCN16s, only_feature
from detection.modeling.fcn16s import FCN16sHead as Head
from detection.modeling.sem_seg_heads import SegmentationHead, build_head


@SEM_SEG_HEADS_REGISTRY.register()
class FCN16sHead(FCN16s):
    """FCN-16s head for `SemanticSegmentor`; see detection/modeling/fcn16s.py."""

    def __init__(self, cfg: CfgNode, input_shape: dict[str, ShapeSpec]) -> None:
        settings = cfg.MODEL.SEM_SEG_HEAD
        strides = {name: shape.stride for name, shape in input_shape.items()}
        name = only_feature(settings.IN_FEATURES, strides)
        head = Head(
            input_shape[name].channels,
            settings.NUM_CLASSES,
            channels=settings.CONVS_DIM,
            norm=lambda channels: get_norm(settings.NORM, channels),
        )
        # SemanticSegmentor pads labels with `ignore_value`.
        super().__init__(head, name, settings.IGNORE_VALUE, settings.LOSS_WEIGHT)


def _build(cfg: CfgNode, input_shape: dict[str, ShapeSpec]) -> SegmentationHead:
    settings = cfg.MODEL.SEM_SEG_HEAD
    return build_head(
        settings,
        {name: shape.channels for name, shape in input_shape.items()},
        {name: shape.stride for name, shape in input_shape.items()},
        partial(get_norm, settings.NORM) if settings.NORM else None,
    )


@SEM_SEG_HEADS_REGISTRY.register()
def LinearHead(cfg: CfgNode, input_shape: dict[str, ShapeSpec]) -> SegmentationHead:  # noqa: N802
    """Build the linear head for `SemanticSegmentor`; see detection/modeling/sem_seg_heads.py."""
    return _build(cfg, input_shape)


@SEM_SEG_HEADS_REGISTRY.register()
def UPerHead(cfg: CfgNode, input_shape: dict[str, ShapeSpec]) -> SegmentationHead:  # noqa: N802
    """Build UPerNet's head for `SemanticSegmentor`; see detection/modeling/sem_seg_heads.py."""
    return _build(cfg, input_shape)
