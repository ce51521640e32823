"""Faster R-CNN with a C4 ResNet, equal to Detectron2's bit for bit on the CPU in fp32.

Every state-dict name is Detectron2's, so a model_final.pth of either engine loads into the other.
tests/detection/test_parity_*.py compare features, proposals, losses, gradients, batch-norm
statistics, weights after several steps and detections.

What torchvision's own FasterRCNN does differently, and where it is handled:
 1 rounds the anchors                                              rpn.GridAnchors
 2 orders the anchors of a cell by ratio, then size                rpn.GridAnchors
 3 takes the stride from image size // map size                    rpn.GridAnchors
 4 pads images to multiples of 32                                  Detector.preprocess
 5 RoIAlign without half-pixel alignment                           roi_heads.RoIAlignPooler
 7 infers the pooler's scale from the images                       roi_heads.RoIAlignPooler
 8 ranks proposals by sigmoid, minimum side 1e-3 px                rpn.RPN.filter_proposals
 9 RPN localisation loss smooth L1 with beta 1/9                   rpn.RPN.compute_loss
10 divides RPN losses by the number sampled                        rpn.RPN.compute_loss
11 box loss smooth L1 with beta 1/9                                roi_heads.Res5RoIHeads.losses
12 background is class 0                                           roi_heads.Res5RoIHeads
13 drops detections under 0.01 px; offsets labels in NMS           roi_heads ._detections
14 does not clip boxes after rescaling                             boxes.rescale
15 sorts the sampled regions by index                              roi_heads ...subsample
16 decodes boxes in the dtype of autocast                          boxes.Float32BoxCoder
17 resizes by F.interpolate, and 25 inside the model               data.py
18 normalises pixels of 0..1                                       Detector.preprocess
24 has another frozen batch norm                                   norm.FrozenBatchNorm
The missing numbers concern feature pyramids, dilation, masks and keypoints, not built here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList

from convert.backbone import ResNet, make_stage
from detection.embedded.boxes import nonempty, rescale
from detection.embedded.norm import freeze_stages, norm_layer
from detection.embedded.roi_heads import BoxPredictor, Res5RoIHeads, RoIAlignPooler
from detection.embedded.rpn import RPN, GridAnchors, RPNHead
from detection.embedded.supported import check_supported

FEATURE = "res4"  # C4: the one feature map that proposals and box head share


class Detector(nn.Module):
    """Backbone, proposals, box head.

    Args:
        pixel_mean, pixel_std: per channel, in 0..255 and in the order of the images' channels.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        backbone: ResNet,
        proposal_generator: RPN,
        roi_heads: Res5RoIHeads,
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.proposal_generator = proposal_generator
        self.roi_heads = roi_heads
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean).view(-1, 1, 1), False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std).view(-1, 1, 1), False)

    def forward(self, samples: list[dict[str, Any]]) -> Any:
        """A list of images, each a dict with "image" (3, H, W) in 0..255.

        Training: "boxes" (R, 4) in pixels of the image and "classes" (R,) in 0..K-1 as well;
        returns the losses by Detectron2's names.
        Otherwise: returns a dict per image with "boxes" (D, 4), "scores" and "classes" (D,), best
        first, in pixels of an image of "height" x "width" (the original's; default: as given).
        """
        images = self.preprocess([sample["image"] for sample in samples])
        features = self.backbone(images.tensors)
        if self.training:
            targets = [self._target(sample) for sample in samples]
            proposals, rpn_losses = self.proposal_generator(images, features, targets)
            _, box_losses = self.roi_heads(features, proposals, images.image_sizes, targets)
            return {**box_losses, **rpn_losses}
        proposals, _ = self.proposal_generator(images, features)
        detections, _ = self.roi_heads(features, proposals, images.image_sizes)
        return [
            _to_original(found, size, (sample.get("height", size[0]), sample.get("width", size[1])))
            for found, size, sample in zip(detections, images.image_sizes, samples, strict=True)
        ]

    def preprocess(self, images: list[Tensor]) -> ImageList:
        """Normalise, and pad with zeros at the right and bottom to the largest height and width."""
        normalised = [
            (image.to(self.pixel_mean.device) - self.pixel_mean) / self.pixel_std
            for image in images
        ]
        sizes = [(image.shape[-2], image.shape[-1]) for image in normalised]
        height, width = (max(side) for side in zip(*sizes, strict=True))
        batch = normalised[0].new_zeros(len(images), 3, height, width)
        for target, image in zip(batch, normalised, strict=True):
            target[:, : image.shape[-2], : image.shape[-1]].copy_(image)
        return ImageList(batch, sizes)

    def _target(self, sample: dict[str, Any]) -> dict[str, Tensor]:
        """torchvision's target: labels 1..K, 0 being background."""
        device = self.pixel_mean.device
        return {"boxes": sample["boxes"].to(device), "labels": sample["classes"].to(device) + 1}


def _to_original(
    found: dict[str, Tensor], size: tuple[int, int], original: tuple[int, int]
) -> dict[str, Tensor]:
    boxes = rescale(found["boxes"], size, original)
    keep = nonempty(boxes)
    return {
        "boxes": boxes[keep],
        "scores": found["scores"][keep],
        "classes": found["classes"][keep],
    }


def build_model(cfg: CfgNode) -> Detector:
    """The model that Detectron2 would build from the same keys, on MODEL.DEVICE.

    Under the same torch seed the initial weights of both are equal.

    Raises:
        UserError: a key has a value that this engine cannot honour.
    """
    check_supported(cfg)
    model, resnets, rpn, roi = cfg.MODEL, cfg.MODEL.RESNETS, cfg.MODEL.RPN, cfg.MODEL.ROI_HEADS
    norm = norm_layer(resnets.NORM)
    shared = {
        "res2_out_channels": resnets.RES2_OUT_CHANNELS,
        "num_groups": resnets.NUM_GROUPS,
        "width_per_group": resnets.WIDTH_PER_GROUP,
        "stride_in_1x1": resnets.STRIDE_IN_1X1,
        "norm_layer": norm,
    }
    backbone = ResNet(
        resnets.DEPTH,
        stem=resnets.STEM,
        stem_out_channels=resnets.STEM_OUT_CHANNELS,
        out_features=(FEATURE,),
        **shared,
    )
    freeze_stages(backbone, model.BACKBONE.FREEZE_AT)
    channels, stride = backbone.stage_channels[FEATURE], backbone.strides[FEATURE]

    anchors = GridAnchors(
        model.ANCHOR_GENERATOR.SIZES,
        model.ANCHOR_GENERATOR.ASPECT_RATIOS,
        [stride],
        model.ANCHOR_GENERATOR.OFFSET,
    )
    proposal_generator = RPN(
        in_features=(FEATURE,),
        rpn_head=RPNHead(channels, anchors.num_anchors_per_location()[0]),
        anchor_generator=anchors,
        iou_thresholds=tuple(rpn.IOU_THRESHOLDS),
        batch_size_per_image=rpn.BATCH_SIZE_PER_IMAGE,
        positive_fraction=rpn.POSITIVE_FRACTION,
        pre_nms_topk=(rpn.PRE_NMS_TOPK_TRAIN, rpn.PRE_NMS_TOPK_TEST),
        post_nms_topk=(rpn.POST_NMS_TOPK_TRAIN, rpn.POST_NMS_TOPK_TEST),
        nms_thresh=rpn.NMS_THRESH,
        bbox_reg_weights=tuple(rpn.BBOX_REG_WEIGHTS),
        smooth_l1_beta=rpn.SMOOTH_L1_BETA,
        min_size_px=model.PROPOSAL_GENERATOR.MIN_SIZE,
        loss_weight=rpn.LOSS_WEIGHT,
        loc_weight=rpn.BBOX_REG_LOSS_WEIGHT,
    )

    box = model.ROI_BOX_HEAD
    res5 = make_stage(resnets.DEPTH, "res5", in_channels=channels, **shared)
    out_channels = 8 * resnets.RES2_OUT_CHANNELS
    predictor = BoxPredictor(out_channels, roi.NUM_CLASSES)
    if roi.NAME == "Res5ROIHeadsExtraNorm":
        # Deviation: "the conv5 stage (including global pooling) followed by a BN layer" (MoCo,
        # appendix A.1) reads as BN after the pooling; the official code normalises the map before
        # it (detection/train_net.py), and so do we.
        res5.add_module("norm", norm(out_channels))
    roi_heads = Res5RoIHeads(
        in_feature=FEATURE,
        pooler=RoIAlignPooler(box.POOLER_RESOLUTION, stride, box.POOLER_SAMPLING_RATIO),
        res5=res5,
        box_predictor=predictor,
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
    )
    detector = Detector(backbone, proposal_generator, roi_heads, model.PIXEL_MEAN, model.PIXEL_STD)
    return detector.to(model.DEVICE)
