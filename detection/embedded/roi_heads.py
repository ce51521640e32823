"""From region proposals to losses or detections, equal to detectron2/modeling/roi_heads.

Arranged as torchvision's RoIHeads, but regions, their classes and objects are those of the whole
batch in one tensor each. What else differs, and why, is listed in model.py.

Shapes: N images, R regions of all images, K foreground classes, P pooled cells per side. A region
(R, 5) is the number of its image and its box.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from fvcore.nn import smooth_l1_loss
from torch import Tensor, nn

from detection.embedded.backbone import Backbone, build_res5
from detection.embedded.boxes import Weights, decode, encode, match, sample
from detection.embedded.heads import BoxPredictor, box_head, keypoint_head, mask_head
from detection.embedded.layers import norm_layer
from detection.embedded.masks import crop_bitmaps, crop_polygons, locate_keypoints, visible_in
from detection.embedded.rpn import Sizes
from detection.modeling.roi_align import roi_align

# "boxes" (G, 4), "classes" (G,), and where a head learns them "masks" (a list of polygons for each
# object, or bitmaps (G, H, W)) and "keypoints" (G, number, 3).
Target = Mapping[str, Any]
# "boxes" (D, 4), "scores" and "classes" (D,), "masks" (D, M, M) in 0..1, "keypoints"
Detections = dict[str, Tensor]


@dataclass(frozen=True)
class RegionRules:
    """How regions are sampled, learned and chosen: the keys of MODEL.ROI_*.

    Attributes:
        iou_threshold: regions with at least this IoU with an object are foreground.
        batch_size_per_image: regions sampled per image, of which `positive_fraction` foreground.
        keypoint_normalizer: for each image, of the keypoint loss; None: the labeled keypoints.
    """

    num_classes: int
    iou_threshold: float
    batch_size_per_image: int
    positive_fraction: float
    bbox_reg_weights: Weights
    smooth_l1_beta: float
    box_reg_weight: float
    score_thresh: float
    nms_thresh: float
    detections_per_image: int
    keypoint_normalizer: float | None
    keypoint_weight: float


@dataclass(frozen=True)
class Pooler:
    """RoIAlign with half-pixel alignment; of several maps, a region takes the one of its size.

    Attributes:
        size: P.
        strides: of the maps, each twice the one before.
        sampling_ratio: points per cell and side; 0: as many as there are pixels.
    """

    size: int
    strides: tuple[int, ...]
    sampling_ratio: int

    def __call__(self, maps: Sequence[Tensor], rois: Tensor) -> Tensor:
        """Maps (N, C, H, W) and regions (R, 5), image and box -> (R, C, P, P)."""
        if len(maps) == 1:
            return roi_align(maps[0], rois, self.size, 1 / self.strides[0], self.sampling_ratio)
        levels = self.levels(rois[:, 1:])
        pooled = maps[0].new_zeros(len(rois), maps[0].shape[1], self.size, self.size)
        for level, (features, stride) in enumerate(zip(maps, self.strides, strict=True)):
            (index,) = (levels == level).nonzero(as_tuple=True)
            own = roi_align(features, rois[index], self.size, 1 / stride, self.sampling_ratio)
            pooled.index_put_((index,), own)
        return pooled

    def levels(self, boxes: Tensor) -> Tensor:
        """(R,) number of the map: a box of 224 px belongs to stride 16 (FPN's equation 1)."""
        sides = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1).sqrt()
        level = torch.floor(4 + torch.log2(sides / 224 + 1e-8)).long()
        first = self.strides[0].bit_length() - 1
        return level.clamp(first, first + len(self.strides) - 1) - first


class RoIHeads(nn.Module):
    """What a box head, and where given a mask and a keypoint head, learn of regions and find there.

    Detectron2's StandardROIHeads, where each head has a pooler of its own; and its Res5ROIHeads
    (C4), where all regions go through res5 and the mask head shares its maps with the boxes'.

    Args:
        poolers: of the "box", "mask" and "keypoint" head; no "mask" in C4.
        box_head: (R, C, P, P) -> (R, D), for the predictor.
        res5: in C4 (R, C, P, P) -> (R, C', P', P'); with the extra norm of Res5ROIHeadsExtraNorm
            it is a Sequential whose last module is named `norm`.
    """

    def __init__(
        self,
        in_features: Sequence[str],
        rules: RegionRules,
        poolers: Mapping[str, Pooler],
        box_head: nn.Module,
        box_predictor: BoxPredictor,
        *,
        res5: nn.Module | None = None,
        mask_head: nn.Module | None = None,
        keypoint_head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.rules, self.poolers = tuple(in_features), rules, dict(poolers)
        self.box_head, self.box_predictor, self.res5 = box_head, box_predictor, res5
        self.mask_head, self.keypoint_head = mask_head, keypoint_head

    def losses(
        self, features: Mapping[str, Tensor], proposals: Sequence[Tensor], targets: Sequence[Target]
    ) -> dict[str, Tensor]:
        """The loss of every head on a sample of the proposals (., 4) of each image."""
        maps = [features[name] for name in self.in_features]
        rois, classes, objects = self.sample_regions(proposals, targets)
        pooled = self.pool_boxes(maps, rois)
        logits, deltas = self.box_predictor(self.box_head(pooled))
        chosen = objects >= 0
        foreground, objects = rois[chosen], objects[chosen]
        wanted = torch.cat([t["boxes"] for t in targets])[objects]
        losses = self.box_losses(logits, deltas, classes, foreground[:, 1:], wanted)
        if self.mask_head is not None:
            pool = self.poolers.get("mask")
            own = pooled[chosen] if pool is None else pool(maps, foreground)
            masks = [mask for t in targets for mask in t["masks"]]
            masks = [masks[index] for index in objects.tolist()]
            logits = self.mask_head(own)
            losses["loss_mask"] = mask_loss(logits, classes[chosen], masks, foreground[:, 1:])
        if self.keypoint_head is not None:
            points = torch.cat([t["keypoints"] for t in targets])[objects]
            seen = visible_in(points, foreground[:, 1:])
            rois, points = foreground[seen], points[seen]
            heatmaps = self.keypoint_head(self.poolers["keypoint"](maps, rois))
            loss = self.keypoint_loss(heatmaps, points, rois[:, 1:], len(targets))
            losses["loss_keypoint"] = loss
        return losses

    def detect(
        self, features: Mapping[str, Tensor], proposals: Sequence[Tensor], image_sizes: Sizes
    ) -> list[Detections]:
        """Boxes first; then masks and keypoints of those that are left."""
        maps = [features[name] for name in self.in_features]
        pooled = self.pool_boxes(maps, with_image(proposals))
        logits, deltas = self.box_predictor(self.box_head(pooled))
        found = self.choose(logits, deltas, proposals, image_sizes)
        rois = with_image([one["boxes"] for one in found])
        more = {}
        if self.mask_head is not None:
            pool = self.poolers.get("mask", self.pool_boxes)
            classes = torch.cat([one["classes"] for one in found])
            more["masks"] = own_class(self.mask_head(pool(maps, rois)), classes).sigmoid()
        if self.keypoint_head is not None:
            heatmaps = self.keypoint_head(self.poolers["keypoint"](maps, rois))
            more["keypoints"] = locate_keypoints(heatmaps, rois[:, 1:])
        numbers = [len(one["boxes"]) for one in found]
        for name, values in more.items():
            for one, own in zip(found, values.split(numbers), strict=True):
                one[name] = own
        return found

    def pool_boxes(self, maps: Sequence[Tensor], rois: Tensor) -> Tensor:
        """(R, C, P, P) of regions (R, 5); what the box head gets."""
        pooled = self.poolers["box"](maps, rois)
        return pooled if self.res5 is None else self.res5(pooled)

    def sample_regions(
        self, proposals: Sequence[Tensor], targets: Sequence[Target]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Regions (R, 5), their classes (R,), and which (R,) of the batch's objects, -1 for none.

        Of each image foreground before background; the objects' own boxes are among the proposals.
        """
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
        # Background is the last class, and so what the object -1 has.
        background = index.new_tensor([rules.num_classes])
        classes = torch.cat([*(t["classes"] for t in targets), background])
        return with_image(regions), classes[index], index

    def box_losses(
        self, logits: Tensor, deltas: Tensor, classes: Tensor, boxes: Tensor, objects: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy, and smooth L1 on the foreground regions / all regions.

        Args:
            logits: (R, K + 1).
            deltas: (R, 4 K).
            classes: (R,)
            boxes: (., 4), of the foreground regions.
            objects: (., 4), what these should become.
        """
        rules = self.rules
        (index,) = (classes < rules.num_classes).nonzero(as_tuple=True)
        predicted = deltas.view(-1, rules.num_classes, 4)[index, classes[index]]
        wanted = encode(objects, boxes, rules.bbox_reg_weights)
        loss_box = smooth_l1_loss(predicted, wanted, rules.smooth_l1_beta, reduction="sum")
        # The mean over no region would be NaN.
        loss_cls = F.cross_entropy(logits, classes) if len(classes) else logits.sum() * 0.0
        return {
            "loss_cls": loss_cls,
            "loss_box_reg": loss_box / max(len(classes), 1) * rules.box_reg_weight,
        }

    def keypoint_loss(
        self, heatmaps: Tensor, keypoints: Tensor, boxes: Tensor, num_images: int
    ) -> Tensor:
        """Cross-entropy over the cells of (R, number, S, S) for keypoints inside their region.

        Args: the object's keypoints (R, number, 3) in boxes (R, 4).
        """
        from torchvision.models.detection.roi_heads import keypoints_to_heatmap

        cells, valid = keypoints_to_heatmap(keypoints, boxes, heatmaps.shape[-1])
        (index,) = valid.flatten().nonzero(as_tuple=True)
        if not len(index):
            return heatmaps.sum() * 0
        logits = heatmaps.flatten(0, 1).flatten(1)[index]
        loss = F.cross_entropy(logits, cells.flatten()[index], reduction="sum")
        nominal = self.rules.keypoint_normalizer
        normalizer = len(index) if nominal is None else nominal * num_images
        return loss / normalizer * self.rules.keypoint_weight

    def choose(
        self, logits: Tensor, deltas: Tensor, proposals: Sequence[Tensor], image_sizes: Sizes
    ) -> list[Detections]:
        """Boxes above the threshold, NMS within each class, the best of each image, best first.

        Args: logits (R, K + 1); deltas (R, 4 K).
        """
        from torchvision.ops import batched_nms, clip_boxes_to_image

        rules = self.rules
        numbers = [len(boxes) for boxes in proposals]
        decoded = decode(deltas, torch.cat(list(proposals)), rules.bbox_reg_weights)
        all_boxes = decoded.view(-1, rules.num_classes, 4).split(numbers)
        all_scores = F.softmax(logits, dim=-1).split(numbers)
        found = []
        for boxes, scores, size in zip(all_boxes, all_scores, image_sizes, strict=True):
            finite = torch.isfinite(boxes).all(dim=(1, 2)) & torch.isfinite(scores).all(dim=1)
            boxes, scores = clip_boxes_to_image(boxes[finite], size), scores[finite, :-1]
            chosen = scores > rules.score_thresh
            classes = chosen.nonzero()[:, 1]
            boxes, scores = boxes[chosen], scores[chosen]
            keep = batched_nms(boxes, scores, classes, rules.nms_thresh)
            keep = keep[: rules.detections_per_image]
            found.append({"boxes": boxes[keep], "scores": scores[keep], "classes": classes[keep]})
        return found


def with_image(boxes: Sequence[Tensor]) -> Tensor:
    """Boxes (., 4) of each image -> regions (R, 5) of all: number of the image, and box."""
    return torch.cat([F.pad(own, (1, 0), value=float(image)) for image, own in enumerate(boxes)])


def own_class(masks: Tensor, classes: Tensor) -> Tensor:
    """Of a mask for every class (R, K, M, M) that of the class (R,): (R, M, M)."""
    return masks[torch.arange(len(masks), device=masks.device), classes]


def mask_loss(logits: Tensor, classes: Tensor, masks: Sequence[Any], boxes: Tensor) -> Tensor:
    """Binary cross-entropy of the class's mask, over the foreground regions.

    Args: logits (R, K, M, M); classes (R,); the object's mask in R boxes (R, 4) (see Target).
    """
    if not len(logits):
        return logits.sum() * 0
    crop = crop_bitmaps if isinstance(masks[0], Tensor) else crop_polygons
    wanted = crop(masks, boxes, logits.shape[-1]).float()
    return F.binary_cross_entropy_with_logits(own_class(logits, classes), wanted)


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
        name: Pooler(own.POOLER_RESOLUTION, strides, own.POOLER_SAMPLING_RATIO)
        for name, own in (("box", box), ("mask", mask), ("keypoint", points))
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
