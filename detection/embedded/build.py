"""A model from a configuration: the one place of the model part that knows keys."""

from __future__ import annotations

from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import nn

from convert.families.resnet_network import ResNet, make_stage
from detection.embedded.backbone import FPN, Backbone, DilatedC5
from detection.embedded.heads import BoxPredictor, box_head, keypoint_head, mask_head
from detection.embedded.layers import NORMS, freeze_stages, norm_layer
from detection.embedded.model import Detector, Images, Model, Segmenter
from detection.embedded.roi_heads import Pooler, RegionRules, RoIHeads
from detection.embedded.rpn import RPN, ProposalRules, RPNHead, cell_anchors
from detection.embedded.supported import check_supported
from detection.modeling.fcn16s import FCN16s, FCN16sHead, only_feature


def build_model(cfg: CfgNode) -> Model:
    """The model that Detectron2 would build from the same keys, on MODEL.DEVICE.

    Under the same torch seed the initial weights of both are equal.

    Raises:
        UserError: a key has a value that this engine cannot honor.
    """
    check_supported(cfg)
    backbone = build_backbone(cfg.MODEL)
    images = Images(cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD, backbone.size_divisibility)
    if cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor":
        model: Model = Segmenter(images, backbone, build_sem_seg_head(cfg.MODEL, backbone))
    else:
        proposal_generator = build_rpn(cfg.MODEL, backbone)
        model = Detector(images, backbone, proposal_generator, build_roi_heads(cfg, backbone))
    if cfg.MODEL.CHANNELS_LAST:
        model.to(memory_format=torch.channels_last)
    return model.to(cfg.MODEL.DEVICE)


def build_backbone(model: CfgNode) -> Backbone:
    """MODEL.BACKBONE, RESNETS and FPN."""
    resnets = model.RESNETS
    resnet = ResNet(
        resnets.DEPTH,
        stem=resnets.STEM,
        stem_out_channels=resnets.STEM_OUT_CHANNELS,
        res5_dilation=resnets.RES5_DILATION,
        out_features=resnets.OUT_FEATURES,
        **_blocks(model),
    )
    freeze_stages(resnet, model.BACKBONE.FREEZE_AT)
    if model.BACKBONE.NAME == "build_resnet_fpn_backbone":
        fpn = model.FPN
        norm = norm_layer(fpn.NORM)
        return FPN(resnet, fpn.IN_FEATURES, fpn.OUT_CHANNELS, norm, fpn.FUSE_TYPE)
    if model.BACKBONE.NAME == "build_resnet_dilated_c5_backbone":
        return DilatedC5(resnet, NORMS[resnets.NORM])
    return resnet


def _blocks(model: CfgNode) -> dict[str, Any]:
    """What the stages of a backbone and the res5 of a C4 head have in common."""
    return {
        "res2_out_channels": model.RESNETS.RES2_OUT_CHANNELS,
        "num_groups": model.RESNETS.NUM_GROUPS,
        "width_per_group": model.RESNETS.WIDTH_PER_GROUP,
        "stride_in_1x1": model.RESNETS.STRIDE_IN_1X1,
        "norm_layer": norm_layer(model.RESNETS.NORM),
    }


def build_rpn(model: CfgNode, backbone: Backbone) -> RPN:
    """MODEL.RPN and ANCHOR_GENERATOR."""
    rpn, anchors, names = model.RPN, model.ANCHOR_GENERATOR, list(model.RPN.IN_FEATURES)
    # One list serves all maps, or each has its own.
    sizes, ratios = (
        [*values] * (len(names) if len(values) == 1 else 1)
        for values in (anchors.SIZES, anchors.ASPECT_RATIOS)
    )
    cells = [cell_anchors(s, r) for s, r in zip(sizes, ratios, strict=True)]
    return RPN(
        names,
        RPNHead(backbone.stage_channels[names[0]], len(cells[0])),
        cells,
        [backbone.strides[name] for name in names],
        anchors.OFFSET,
        ProposalRules(
            iou_thresholds=tuple(rpn.IOU_THRESHOLDS),
            batch_size_per_image=rpn.BATCH_SIZE_PER_IMAGE,
            positive_fraction=rpn.POSITIVE_FRACTION,
            pre_nms_topk=(rpn.PRE_NMS_TOPK_TEST, rpn.PRE_NMS_TOPK_TRAIN),
            post_nms_topk=(rpn.POST_NMS_TOPK_TEST, rpn.POST_NMS_TOPK_TRAIN),
            nms_thresh=rpn.NMS_THRESH,
            min_size_px=model.PROPOSAL_GENERATOR.MIN_SIZE,
            bbox_reg_weights=tuple(rpn.BBOX_REG_WEIGHTS),
            smooth_l1_beta=rpn.SMOOTH_L1_BETA,
            loss_weight=rpn.LOSS_WEIGHT,
            loc_weight=rpn.BBOX_REG_LOSS_WEIGHT,
        ),
    )


def build_roi_heads(cfg: CfgNode, backbone: Backbone) -> RoIHeads:
    """MODEL.ROI_HEADS and the heads that are on."""
    model, roi, box = cfg.MODEL, cfg.MODEL.ROI_HEADS, cfg.MODEL.ROI_BOX_HEAD
    mask, points = model.ROI_MASK_HEAD, model.ROI_KEYPOINT_HEAD
    nominal = points.NUM_KEYPOINTS * roi.BATCH_SIZE_PER_IMAGE * roi.POSITIVE_FRACTION
    rules = RegionRules(
        num_classes=roi.NUM_CLASSES,
        iou_threshold=roi.IOU_THRESHOLDS[0],
        batch_size_per_image=roi.BATCH_SIZE_PER_IMAGE,
        positive_fraction=roi.POSITIVE_FRACTION,
        bbox_reg_weights=tuple(box.BBOX_REG_WEIGHTS),
        smooth_l1_beta=box.SMOOTH_L1_BETA,
        box_reg_weight=box.BBOX_REG_LOSS_WEIGHT,
        score_thresh=roi.SCORE_THRESH_TEST,
        nms_thresh=roi.NMS_THRESH_TEST,
        detections_per_image=cfg.TEST.DETECTIONS_PER_IMAGE,
        keypoint_normalizer=None if points.NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS else nominal,
        keypoint_weight=points.LOSS_WEIGHT,
    )
    strides = tuple(backbone.strides[name] for name in roi.IN_FEATURES)
    poolers = {
        name: Pooler(settings.POOLER_RESOLUTION, strides, settings.POOLER_SAMPLING_RATIO)
        for name, settings in (("box", box), ("mask", mask), ("keypoint", points))
    }
    channels = backbone.stage_channels[roi.IN_FEATURES[0]]
    heads: dict[str, nn.Module] = {}
    if roi.NAME == "StandardROIHeads":
        conv_dims, fc_dims = [box.CONV_DIM] * box.NUM_CONV, [box.FC_DIM] * box.NUM_FC
        norm = norm_layer(box.NORM)
        head, features = box_head(channels, box.POOLER_RESOLUTION, conv_dims, fc_dims, norm)
    else:
        del poolers["mask"]
        heads["res5"] = build_res5(model, channels)
        channels = features = 8 * model.RESNETS.RES2_OUT_CHANNELS
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    predictor = BoxPredictor(features, roi.NUM_CLASSES)
    if model.MASK_ON:
        dims, norm = [mask.CONV_DIM] * (mask.NUM_CONV + 1), norm_layer(mask.NORM)
        heads["mask_head"] = mask_head(channels, roi.NUM_CLASSES, dims, norm)
    if model.KEYPOINT_ON:
        heads["keypoint_head"] = keypoint_head(channels, points.NUM_KEYPOINTS, points.CONV_DIMS)
    return RoIHeads(roi.IN_FEATURES, rules, poolers, head, predictor, **heads)


def build_res5(model: CfgNode, channels: int) -> nn.Sequential:
    """The box head of C4, a ResNet's last stage on regions of res4."""
    blocks = _blocks(model)
    res5 = make_stage(model.RESNETS.DEPTH, "res5", in_channels=channels, **blocks)
    if model.ROI_HEADS.NAME == "Res5ROIHeadsExtraNorm":
        # Deviation: "the conv5 stage (including global pooling) followed by a BN layer" (MoCo,
        # appendix A.1) reads as BN after the pooling; the official code normalizes the map
        # before it (detection/train_net.py), and so do we.
        res5.add_module("norm", blocks["norm_layer"](8 * model.RESNETS.RES2_OUT_CHANNELS))
    return res5


def build_sem_seg_head(model: CfgNode, backbone: Backbone) -> FCN16s:
    """MODEL.SEM_SEG_HEAD."""
    settings = model.SEM_SEG_HEAD
    name = only_feature(settings.IN_FEATURES, backbone.strides)
    head = FCN16sHead(
        backbone.stage_channels[name],
        settings.NUM_CLASSES,
        channels=settings.CONVS_DIM,
        norm=NORMS[settings.NORM],
    )
    return FCN16s(head, name, settings.IGNORE_VALUE, settings.LOSS_WEIGHT)
