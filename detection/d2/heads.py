"""Heads registered in Detectron2: the C4 box head of the paper, and semantic segmentation."""

from functools import partial
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec, get_norm
from detectron2.modeling import ROI_HEADS_REGISTRY, SEM_SEG_HEADS_REGISTRY
from detectron2.modeling.backbone import ResNet
from detectron2.modeling.backbone.resnet import BasicBlock
from detectron2.modeling.roi_heads import Res5ROIHeads, build_mask_head
from detectron2.modeling.roi_heads.fast_rcnn import FastRCNNOutputLayers
from torch import nn

from convert.modeling.resnet import NUM_BLOCKS, is_bottleneck
from detection.modeling.fcn16s import FCN16s, only_feature
from detection.modeling.fcn16s import FCN16sHead as Head
from detection.modeling.sem_seg_heads import SegmentationHead, build_head


@ROI_HEADS_REGISTRY.register()
class Res5ROIHeadsExtraNorm(Res5ROIHeads):
    """`Res5ROIHeads` with one more norm, named `res5.norm` as in the official MoCo code.

    (R, C4, P, P) pooled regions → res5 and norm (R, C5, P/2, P/2) → mean (R, C5) → scores, deltas.

    Deviation: the paper says "the conv5 stage (including global pooling) followed by a BN layer"
    (appendix A.1), which can be read as a norm after the pooling. The official code normalizes
    res5's map before it is pooled (facebookresearch/moco, detection/train_net.py), and so does
    this class.
    """

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: dict[str, ShapeSpec]) -> dict[str, Any]:
        """Return the constructor's arguments: those of `Res5ROIHeads`, with the norm in res5."""
        resnets = cfg.MODEL.RESNETS
        channels = resnets.RES2_OUT_CHANNELS * 8
        if is_bottleneck(resnets.DEPTH):
            ret = super().from_config(cfg, input_shape)
        else:
            # Detectron2 builds three bottleneck blocks for every depth. They are replaced here, and
            # take their random numbers from a copy of the stream, so that with the same seed both
            # engines have the same initial weights.
            with torch.random.fork_rng(devices=[]):
                ret = super().from_config(cfg, input_shape)
            num_blocks = NUM_BLOCKS[resnets.DEPTH][-1]
            blocks = ResNet.make_stage(
                BasicBlock,
                num_blocks,
                stride_per_block=[2] + [1] * (num_blocks - 1),
                in_channels=channels // 2,
                out_channels=channels,
                norm=resnets.NORM,
            )
            ret["res5"] = nn.Sequential(*blocks)
            ret["box_predictor"] = FastRCNNOutputLayers(
                cfg, ShapeSpec(channels=channels, height=1, width=1)
            )
            if cfg.MODEL.MASK_ON:
                ret["mask_head"] = build_mask_head(cfg, ShapeSpec(channels=channels))
        ret["res5"].add_module("norm", get_norm(resnets.NORM, channels))
        return ret


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
