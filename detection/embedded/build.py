"""Builder of a model from a config; each component's builder is in its own file."""

from fvcore.common.config import CfgNode

from detection.embedded import vit as vit  # registers its backbones
from detection.embedded.backbone import BACKBONES, Backbone
from detection.embedded.model import (
    DenseDetector,
    Detector,
    Images,
    Model,
    Segmenter,
    build_sem_seg_head,
)
from detection.embedded.retinanet import build_retinanet_head
from detection.embedded.roi_heads import build_roi_heads
from detection.embedded.rpn import build_rpn
from detection.embedded.supported import check_supported
from detection.modeling.focal_loss import compile_focal_loss
from detection.modeling.memory_format import set_memory_format


def build_model(cfg: CfgNode) -> Model:
    """Build the model that Detectron2 builds from the same keys, on MODEL.DEVICE.

    With the same torch seed, both have the same initial weights.

    Raises:
        UserError: If a key has a value that this engine does not support.
    """
    check_supported(cfg)
    backbone: Backbone = BACKBONES.get(cfg.MODEL.BACKBONE.NAME)(cfg.MODEL)
    square_pad = cfg.MODEL.BACKBONE.SQUARE_PAD
    mean, std = cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD
    images = Images(mean, std, backbone.size_divisibility, square_pad)
    if cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor":
        model: Model = Segmenter(images, backbone, build_sem_seg_head(cfg.MODEL, backbone))
    elif cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
        model = DenseDetector(images, backbone, build_retinanet_head(cfg, backbone))
        compile_focal_loss(cfg.MODEL.DEVICE)
    else:
        rpn, roi_heads = build_rpn(cfg.MODEL, backbone), build_roi_heads(cfg, backbone)
        model = Detector(images, backbone, rpn, roi_heads)
    set_memory_format(model, cfg)
    return model.to(cfg.MODEL.DEVICE)
