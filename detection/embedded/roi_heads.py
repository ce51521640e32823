"""RoI heads with losses and postprocessing, equal to detectron2/modeling/roi_heads.

The structure is that of torchvision's RoIHeads, but regions, their classes and objects are one
tensor each for the whole batch. model.py lists the other differences.

Shapes: N images, R regions of all images, K foreground classes, P pooled cells per side. Regions
(R, 5) are the index of the image and the box.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from detection.data.sample import nonempty
from detection.datasets import read_split
from detection.embedded.backbone import Backbone, build_res5
from detection.embedded.boxes import decode, match, sample
from detection.embedded.heads import BoxPredictor, box_head, keypoint_head, mask_head
from detection.embedded.layers import norm_layer
from detection.embedded.regions import (
    Detections,
    RegionRules,
    Regions,
    box_losses,
    contain_visible,
    join_images,
    locate_keypoints,
    mask_loss,
    select_class,
    select_detections,
    split_by_image,
    to_scores,
)
from detection.embedded.rpn import Sizes
from detection.modeling.roi_align import roi_align

# "boxes" (G, 4), "classes" (G,), and for their heads "masks" (a list of polygons for each object,
# or bitmaps (G, H, W)) and "keypoints" (G, number, 3).
Target = Mapping[str, Any]


@dataclass(frozen=True)
class Pooler:
    """RoIAlign with half-pixel alignment, from the feature map that fits the size of the region.

    Attributes:
        size: P.
        strides: Strides of the maps, each twice the one before.
        sampling_ratio: Points per cell and side; 0 takes one per pixel.
    """

    size: int
    strides: tuple[int, ...]
    sampling_ratio: int

    def __call__(self, maps: Sequence[Tensor], rois: Tensor) -> Tensor:
        """Pool the maps (N, C, H, W) in regions (R, 5): (R, C, P, P)."""
        if len(maps) == 1:
            return roi_align(maps[0], rois, self.size, 1 / self.strides[0], self.sampling_ratio)
        levels = self.levels(rois[:, 1:])
        pooled = maps[0].new_zeros(len(rois), maps[0].shape[1], self.size, self.size)
        for level, (features, stride) in enumerate(zip(maps, self.strides, strict=True)):
            (index,) = (levels == level).nonzero(as_tuple=True)
            part = roi_align(features, rois[index], self.size, 1 / stride, self.sampling_ratio)
            pooled.index_put_((index,), part)
        return pooled

    def levels(self, boxes: Tensor) -> Tensor:
        """Return the index (R,) of each box's map; 224 px belong to stride 16 (FPN, equation 1)."""
        sides = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1).sqrt()
        level = torch.floor(4 + torch.log2(sides / 224 + 1e-8)).long()
        first = self.strides[0].bit_length() - 1
        return level.clamp(first, first + len(self.strides) - 1) - first


class RoIHeads(nn.Module):
    """RoI heads: a box head and, optionally, a mask head and a keypoint head.

    Equal to Detectron2's StandardROIHeads, where each head has its own pooler, and Res5ROIHeads
    (C4), where all regions go through res5 and the mask head uses the same maps as the box head.

    Args:
        in_features: Names of the feature maps.
        rules: Settings of sampling, losses and postprocessing.
        poolers: Poolers of the "box", "mask" and "keypoint" head; C4 has no "mask".
        box_head: (R, C, P, P) -> (R, D), for the predictor.
        box_predictor: (R, D) -> logits and deltas.
        res5: In C4, (R, C, P, P) -> (R, C', P', P'); with the extra norm of Res5ROIHeadsExtraNorm,
            a Sequential whose last module is named `norm`.
        mask_head: (R, C, P, P) -> logits (R, K, 2P, 2P).
        keypoint_head: (R, C, P, P) -> heatmaps (R, number, 4P, 4P).
    """

    def __init__(
        self,
        in_features: Sequence[str],
        rules: RegionRules,
        poolers: Mapping[str, Pooler],
        box_head: nn.Module,
        box_predictor: nn.Module,
        *,
        res5: nn.Module | None = None,
        mask_head: nn.Module | None = None,
        keypoint_head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.rules, self.poolers = tuple(in_features), rules, dict(poolers)
        self.box_head, self.res5 = box_head, res5
        self.box_predictor: Any = box_predictor
        self.mask_head, self.keypoint_head = mask_head, keypoint_head

    def losses(
        self,
        features: Mapping[str, Tensor],
        proposals: Sequence[Tensor],
        targets: Sequence[Target],
        image_sizes: Sizes,
    ) -> dict[str, Tensor]:
        """Sample the proposals (., 4) of each image, and compute the losses of all heads."""
        maps = [features[name] for name in self.in_features]
        sampled = self.sample_regions(proposals, targets)
        losses, pooled = self.box_losses(maps, sampled, targets, image_sizes)
        (chosen,) = (sampled.objects >= 0).nonzero(as_tuple=True)
        foreground, classes, objects = (part[chosen] for part in sampled)
        if self.mask_head is not None:
            pool = self.poolers.get("mask")
            cells = pooled[chosen] if pool is None else pool(maps, foreground)
            masks = [mask for t in targets for mask in t["masks"]]
            masks = [masks[index] for index in objects.tolist()]
            logits = self.mask_head(cells)
            losses["loss_mask"] = mask_loss(logits, classes, masks, foreground[:, 1:])
        if self.keypoint_head is not None:
            points = torch.cat([t["keypoints"] for t in targets])[objects]
            visible = contain_visible(points, foreground[:, 1:])
            rois, points = foreground[visible], points[visible]
            heatmaps = self.keypoint_head(self.poolers["keypoint"](maps, rois))
            loss = self.keypoint_loss(heatmaps, points, rois[:, 1:], len(targets))
            losses["loss_keypoint"] = loss
        return losses

    def detect(
        self, features: Mapping[str, Tensor], proposals: Sequence[Tensor], image_sizes: Sizes
    ) -> list[Detections]:
        """Detect boxes, then masks and keypoints in the boxes that are kept."""
        maps = [features[name] for name in self.in_features]
        found = self.detect_boxes(maps, proposals, image_sizes)
        rois = join_images([one["boxes"] for one in found])
        more = {}
        if self.mask_head is not None:
            pool = self.poolers.get("mask", self.pool_boxes)
            classes = torch.cat([one["classes"] for one in found])
            more["masks"] = select_class(self.mask_head(pool(maps, rois)), classes).sigmoid()
        if self.keypoint_head is not None:
            heatmaps = self.keypoint_head(self.poolers["keypoint"](maps, rois))
            more["keypoints"] = locate_keypoints(heatmaps, rois[:, 1:])
        numbers = [len(one["boxes"]) for one in found]
        for name, values in more.items():
            for one, own in zip(found, values.split(numbers), strict=True):
                one[name] = own
        return found

    def pool_boxes(self, maps: Sequence[Tensor], rois: Tensor) -> Tensor:
        """Return the input (R, C, P, P) of the box head for regions (R, 5)."""
        pooled = self.poolers["box"](maps, rois)
        return pooled if self.res5 is None else self.res5(pooled)

    def sample_regions(self, proposals: Sequence[Tensor], targets: Sequence[Target]) -> Regions:
        """Sample proposals per image, foreground first; ground-truth boxes are added to them."""
        rules, thresholds = self.rules, (self.rules.iou_threshold,) * 2
        regions, objects, first = [], [], 0
        for boxes, target in zip(proposals, targets, strict=True):
            boxes = torch.cat([boxes, target["boxes"]])
            matched = match(target["boxes"], boxes, thresholds, each_object=False)
            chosen = sample(matched, rules.batch_size_per_image, rules.positive_fraction)
            regions.append(boxes[torch.cat(chosen)])
            objects += [matched[chosen[0]] + first, matched[chosen[1]]]
            first += len(target["boxes"])
        index = torch.cat(objects)
        return Regions(
            join_images(regions), object_classes(index, targets, rules.num_classes), index
        )

    def box_losses(
        self,
        maps: Sequence[Tensor],
        regions: Regions,
        targets: Sequence[Target],
        image_sizes: Sizes,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the losses of the box head and its input (R, C, P, P)."""
        pooled = self.pool_boxes(maps, regions.rois)
        predicted = self.box_predictor(self.box_head(pooled))
        objects = torch.cat([t["boxes"] for t in targets])
        weights = self.box_predictor.fed_loss_cls_weights
        return box_losses(self.rules, predicted, regions, objects, weights), pooled

    def detect_boxes(
        self, maps: Sequence[Tensor], proposals: Sequence[Tensor], image_sizes: Sizes
    ) -> list[Detections]:
        """Return the boxes, scores and classes detected in each image."""
        pooled = self.pool_boxes(maps, join_images(proposals))
        logits, deltas = self.box_predictor(self.box_head(pooled))
        boxes = decode(deltas, torch.cat(list(proposals)), self.rules.bbox_reg_weights)
        return select_detections(
            self.rules, to_scores(self.rules, logits), boxes, proposals, image_sizes
        )

    def keypoint_loss(
        self, heatmaps: Tensor, keypoints: Tensor, boxes: Tensor, num_images: int
    ) -> Tensor:
        """Compute the cross-entropy over a heatmap's cells of the keypoints inside their region.

        Args:
            heatmaps: Logits (R, number, S, S).
            keypoints: (R, number, 3) of each region's object.
            boxes: (R, 4) of the regions.
            num_images: N.
        """
        from torchvision.models.detection.roi_heads import keypoints_to_heatmap

        cells, valid = keypoints_to_heatmap(keypoints, boxes, heatmaps.shape[-1])
        (index,) = valid.flatten().nonzero(as_tuple=True)
        if not len(index):
            return heatmaps.sum() * 0
        logits = heatmaps.flatten(0, 1).flatten(1)[index]
        loss = F.cross_entropy(logits, cells.flatten()[index], reduction="sum")
        per_image = self.rules.keypoint_normalizer
        normalizer = len(index) if per_image is None else per_image * num_images
        return loss / normalizer * self.rules.keypoint_weight


class CascadeRoIHeads(RoIHeads):
    """Cascade R-CNN (arXiv 1712.00726): each stage's box head refines the boxes of the one before.

    Equal to detectron2/modeling/roi_heads/cascade_rcnn.py. Mask and keypoint heads train on the
    sampled proposals and predict in the last stage's boxes.

    Args:
        in_features: Names of the feature maps.
        stages: Settings of each stage, which differ in IoU threshold and weights of the deltas.
        poolers: See `RoIHeads`.
        box_heads: One for each stage.
        box_predictors: One for each stage; deltas are (R, 4).
        **heads: Mask and keypoint head; see `RoIHeads`.
    """

    def __init__(
        self,
        in_features: Sequence[str],
        stages: Sequence[RegionRules],
        poolers: Mapping[str, Pooler],
        box_heads: Sequence[nn.Module],
        box_predictors: Sequence[BoxPredictor],
        **heads: nn.Module,
    ) -> None:
        modules = nn.ModuleList(box_heads), nn.ModuleList(box_predictors)
        super().__init__(in_features, stages[0], poolers, *modules, **heads)
        self.stages = tuple(stages)

    def run_stage(self, number: int, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Predict logits (R, K + 1) and deltas (R, 4) from (R, C, P, P) in a stage."""
        if pooled.requires_grad:  # the losses are summed; the feature maps get their mean gradient
            pooled.register_hook(lambda gradient: gradient * (1.0 / len(self.stages)))
        predicted: tuple[Tensor, Tensor] = self.box_predictor[number](
            self.box_head.get_submodule(str(number))(pooled)
        )
        return predicted

    def box_losses(
        self,
        maps: Sequence[Tensor],
        regions: Regions,
        targets: Sequence[Target],
        image_sizes: Sizes,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the losses of all stages, and the input (R, C, P, P) of the first."""
        objects = torch.cat([t["boxes"] for t in targets])
        first = pooled = self.pool_boxes(maps, regions.rois)
        losses: dict[str, Tensor] = {}
        boxes: list[Tensor] = []
        for number, rules in enumerate(self.stages):
            if number:
                regions = match_regions(boxes, targets, rules)
                pooled = self.pool_boxes(maps, regions.rois)
            predicted = self.run_stage(number, pooled)
            weights = self.box_predictor[number].fed_loss_cls_weights
            stage = box_losses(rules, predicted, regions, objects, weights)
            losses |= {f"{name}_stage{number}": loss for name, loss in stage.items()}
            rois = regions.rois
            refined = decode(predicted[1].detach(), rois[:, 1:], rules.bbox_reg_weights)
            boxes = [part[nonempty(part)] for part in split_by_image(refined, rois, image_sizes)]
        return losses, first

    def detect_boxes(
        self, maps: Sequence[Tensor], proposals: Sequence[Tensor], image_sizes: Sizes
    ) -> list[Detections]:
        """Combine the mean of the stages' scores with the boxes of the last stage."""
        rois, stage_scores = join_images(proposals), []
        for number, rules in enumerate(self.stages):
            logits, deltas = self.run_stage(number, self.pool_boxes(maps, rois))
            stage_scores.append(to_scores(rules, logits))
            boxes = decode(deltas, rois[:, 1:], rules.bbox_reg_weights)
            # Empty boxes stay, because a region has the same row in every stage's scores.
            rois = join_images(split_by_image(boxes, rois, image_sizes))
        mean = sum(stage_scores[1:], stage_scores[0]) * (1.0 / len(self.stages))
        return select_detections(self.rules, mean, boxes, proposals, image_sizes)


def object_classes(objects: Tensor, targets: Sequence[Target], num_classes: int) -> Tensor:
    """Return the classes (R,) of the batch's objects with these indices (R,); -1 is background."""
    # Background is appended last, which index -1 selects.
    background = objects.new_full((1,), num_classes)
    return torch.cat([*(t["classes"] for t in targets), background])[objects]


def match_regions(
    boxes: Sequence[Tensor], targets: Sequence[Target], rules: RegionRules
) -> Regions:
    """Match all boxes (., 4) of each image to objects, without sampling."""
    objects, first = [], 0
    for part, target in zip(boxes, targets, strict=True):
        matched = match(target["boxes"], part, (rules.iou_threshold,) * 2, each_object=False)
        objects.append(torch.where(matched < 0, matched, matched + first))
        first += len(target["boxes"])
    index = torch.cat(objects)
    return Regions(join_images(boxes), object_classes(index, targets, rules.num_classes), index)


def _build_rules(cfg: CfgNode) -> RegionRules:
    roi, box, points = cfg.MODEL.ROI_HEADS, cfg.MODEL.ROI_BOX_HEAD, cfg.MODEL.ROI_KEYPOINT_HEAD
    nominal = points.NUM_KEYPOINTS * roi.BATCH_SIZE_PER_IMAGE * roi.POSITIVE_FRACTION
    return RegionRules(
        num_classes=roi.NUM_CLASSES,
        iou_threshold=roi.IOU_THRESHOLDS[0],
        batch_size_per_image=roi.BATCH_SIZE_PER_IMAGE,
        positive_fraction=roi.POSITIVE_FRACTION,
        bbox_reg_weights=tuple(box.BBOX_REG_WEIGHTS),
        smooth_l1_beta=box.SMOOTH_L1_BETA,
        box_reg_weight=box.BBOX_REG_LOSS_WEIGHT,
        sigmoid=box.USE_SIGMOID_CE,
        federated_classes=box.FED_LOSS_NUM_CLASSES,
        score_thresh=roi.SCORE_THRESH_TEST,
        nms_thresh=roi.NMS_THRESH_TEST,
        detections_per_image=cfg.TEST.DETECTIONS_PER_IMAGE,
        keypoint_normalizer=None if points.NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS else nominal,
        keypoint_weight=points.LOSS_WEIGHT,
    )


def _build_box_predictor(cfg: CfgNode, features: int) -> BoxPredictor:
    """Build the box predictor, with class weights for the federated loss.

    A class's weight is its number of training images to a power.
    """
    box, weights = cfg.MODEL.ROI_BOX_HEAD, None
    if box.USE_FED_LOSS:
        counts = read_split(cfg.DATASETS.TRAIN[0], cfg).metadata["class_image_count"]
        images = [count["image_count"] for count in sorted(counts, key=lambda count: count["id"])]
        weights = torch.tensor(images).float() ** box.FED_LOSS_FREQ_WEIGHT_POWER
    return BoxPredictor(
        features,
        cfg.MODEL.ROI_HEADS.NUM_CLASSES,
        class_agnostic=box.CLS_AGNOSTIC_BBOX_REG,
        class_weights=weights,
    )


def _build_box_head(box: CfgNode, channels: int) -> tuple[nn.Sequential, int]:
    """Build MODEL.ROI_BOX_HEAD, and return it with the number of its features."""
    conv_dims, fc_dims = [box.CONV_DIM] * box.NUM_CONV, [box.FC_DIM] * box.NUM_FC
    return box_head(channels, box.POOLER_RESOLUTION, conv_dims, fc_dims, norm_layer(box.NORM))


def build_roi_heads(cfg: CfgNode, backbone: Backbone) -> RoIHeads:
    """Build MODEL.ROI_HEADS with the box head and, if they are on, mask and keypoint head."""
    model, roi, box = cfg.MODEL, cfg.MODEL.ROI_HEADS, cfg.MODEL.ROI_BOX_HEAD
    mask, points, rules = model.ROI_MASK_HEAD, model.ROI_KEYPOINT_HEAD, _build_rules(cfg)
    strides = tuple(backbone.strides[name] for name in roi.IN_FEATURES)
    poolers = {
        name: Pooler(head.POOLER_RESOLUTION, strides, head.POOLER_SAMPLING_RATIO)
        for name, head in (("box", box), ("mask", mask), ("keypoint", points))
    }
    channels = backbone.stage_channels[roi.IN_FEATURES[0]]
    others: dict[str, nn.Module] = {}
    box_heads: list[nn.Module] = []
    predictors: list[BoxPredictor] = []
    cascade, stages = model.ROI_BOX_CASCADE_HEAD, [rules]
    if roi.NAME == "CascadeROIHeads":
        stages = [
            replace(rules, iou_threshold=iou, bbox_reg_weights=tuple(weights))
            for iou, weights in zip(cascade.IOUS, cascade.BBOX_REG_WEIGHTS, strict=True)
        ]
    if roi.NAME in ("StandardROIHeads", "CascadeROIHeads"):
        for _ in stages:
            head, features = _build_box_head(box, channels)
            box_heads.append(head)
            predictors.append(_build_box_predictor(cfg, features))
    else:
        del poolers["mask"]
        others["res5"] = build_res5(model, channels)
        channels = 8 * model.RESNETS.RES2_OUT_CHANNELS
        box_heads.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
        predictors.append(_build_box_predictor(cfg, channels))
    if model.MASK_ON:
        dims, norm = [mask.CONV_DIM] * (mask.NUM_CONV + 1), norm_layer(mask.NORM)
        others["mask_head"] = mask_head(channels, roi.NUM_CLASSES, dims, norm)
    if model.KEYPOINT_ON:
        others["keypoint_head"] = keypoint_head(channels, points.NUM_KEYPOINTS, points.CONV_DIMS)
    if roi.NAME == "CascadeROIHeads":
        return CascadeRoIHeads(roi.IN_FEATURES, stages, poolers, box_heads, predictors, **others)
    return RoIHeads(roi.IN_FEATURES, rules, poolers, box_heads[0], predictors[0], **others)
