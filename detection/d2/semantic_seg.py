"""FCN-16s for Detectron2: the head behind its registry."""

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec, get_norm
from detectron2.modeling import SEM_SEG_HEADS_REGISTRY

from detection.modeling.fcn16s import FCN16s, only_feature
from detection.modeling.fcn16s import FCN16sHead as Head


@SEM_SEG_HEADS_REGISTRY.register()
class FCN16sHead(FCN16s):
    """MODEL.SEM_SEG_HEAD.NAME FCN16sHead, for `SemanticSegmentor`; see
    detection/modeling/fcn16s.py."""

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
