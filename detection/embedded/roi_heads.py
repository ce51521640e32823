"""From region proposals to losses or detections, equal to detectron2/modeling/roi_heads.

Two arrangements: `StandardRoIHeads` pools for each head by itself, in `Res5RoIHeads` (C4) boxes
and masks share one res5. What both do to sample, learn and choose are functions.

Shapes: N images, R regions of all images, K foreground classes, P pooled cells per side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fvcore.nn import smooth_l1_loss
from torch import Tensor, nn
from torchvision.ops import batched_nms, clip_boxes_to_image, roi_align

from detection.embedded import masks as mask_ops
from detection.embedded.boxes import Weights, decode, encode, match, sample
from detection.embedded.heads import BoxPredictor
from detection.embedded.rpn import Sizes

# "boxes" (G, 4), "classes" (G,), and where a head learns them "masks" (a list of polygons for each
# object, or bitmaps (G, H, W)) and "keypoints" (G, number, 3).
Target = Mapping[str, Any]
# "boxes" (D, 4), "scores" and "classes" (D,), "masks" (D, M, M) in 0..1, "keypoints"
Detections = dict[str, Tensor]


@dataclass(frozen=True)
class RegionRules:
    """How regions are sampled, learnt and chosen: the keys of MODEL.ROI_HEADS and ROI_BOX_HEAD.

    Attributes:
        iou_threshold: regions with at least this IoU with an object are foreground.
        batch_size_per_image: regions sampled per image, of which `positive_fraction` foreground.
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

    def __call__(self, maps: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        """Maps (N, C, H, W) and the boxes of N images -> (R, C, P, P)."""
        regions = torch.cat(
            [F.pad(b, (1, 0), value=float(image)) for image, b in enumerate(boxes)]
        )  # (R, 5): image and box
        if len(maps) == 1:
            return self._align(maps[0], regions, self.strides[0])
        levels = self.levels(regions[:, 1:])
        pooled = maps[0].new_zeros(len(regions), maps[0].shape[1], self.size, self.size)
        for level, (features, stride) in enumerate(zip(maps, self.strides, strict=True)):
            (index,) = (levels == level).nonzero(as_tuple=True)
            pooled.index_put_((index,), self._align(features, regions[index], stride))
        return pooled

    def levels(self, boxes: Tensor) -> Tensor:
        """(R,) number of the map: a box of 224 px belongs to stride 16 (FPN's equation 1)."""
        sides = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1).sqrt()
        level = torch.floor(4 + torch.log2(sides / 224 + 1e-8)).long()
        first = self.strides[0].bit_length() - 1
        return level.clamp(first, first + len(self.strides) - 1) - first

    def _align(self, features: Tensor, regions: Tensor, stride: int) -> Tensor:
        return roi_align(features, regions, self.size, 1.0 / stride, self.sampling_ratio, True)


class Regions(NamedTuple):
    """Regions of one image to learn from: boxes (R, 4), classes (R,) in 0..K, K being background,
    and the index (R,) of their object, which means nothing for background."""

    boxes: Tensor
    classes: Tensor
    objects: Tensor

    def where(self, chosen: Tensor) -> Regions:
        return Regions(*(values[chosen] for values in self))


class RoIHeads(nn.Module):
    """Samples regions in training; what its heads do is the business of its two kinds.

    Args:
        in_features: names of the maps that regions are pooled from.
    """

    def __init__(self, in_features: Sequence[str], rules: RegionRules) -> None:
        super().__init__()
        self.in_features, self.rules = tuple(in_features), rules

    def forward(
        self,
        features: Mapping[str, Tensor],
        proposals: Sequence[Tensor],
        image_sizes: Sizes,
        targets: Sequence[Target] | None = None,
    ) -> tuple[list[Detections], dict[str, Tensor]]:
        """Detections per image; or, with targets, the losses."""
        maps = [features[name] for name in self.in_features]
        if targets is None:
            return self.detect(maps, proposals, image_sizes), {}
        pairs = zip(proposals, targets, strict=True)
        regions = [sample_regions(boxes, target, self.rules) for boxes, target in pairs]
        return [], self.losses(maps, regions, targets)

    def losses(
        self, maps: Sequence[Tensor], regions: Sequence[Regions], targets: Sequence[Target]
    ) -> dict[str, Tensor]:
        """The loss of every head."""
        raise NotImplementedError

    def detect(
        self, maps: Sequence[Tensor], proposals: Sequence[Tensor], image_sizes: Sizes
    ) -> list[Detections]:
        """Boxes first; then masks and keypoints of those that are left."""
        raise NotImplementedError


class StandardRoIHeads(RoIHeads):
    """A box head, and mask and keypoint heads where they are given, each with its own pooler.

    Args:
        keypoint_normalizer: for each image, of the keypoint loss; None: the labelled keypoints.
    """

    def __init__(
        self,
        in_features: Sequence[str],
        rules: RegionRules,
        box_pooler: Pooler,
        box_head: nn.Module,
        box_predictor: BoxPredictor,
        *,
        mask_pooler: Pooler,
        mask_head: nn.Module | None = None,
        keypoint_pooler: Pooler,
        keypoint_head: nn.Module | None = None,
        keypoint_normalizer: float | None = None,
        keypoint_weight: float = 1.0,
    ) -> None:
        super().__init__(in_features, rules)
        self.box_pooler, self.box_head, self.box_predictor = box_pooler, box_head, box_predictor
        self.mask_pooler, self.mask_head = mask_pooler, mask_head
        self.keypoint_pooler, self.keypoint_head = keypoint_pooler, keypoint_head
        self.keypoint_normalizer, self.keypoint_weight = keypoint_normalizer, keypoint_weight

    def losses(
        self, maps: Sequence[Tensor], regions: Sequence[Regions], targets: Sequence[Target]
    ) -> dict[str, Tensor]:
        pooled = self.box_pooler(maps, [r.boxes for r in regions])
        logits, deltas = self.box_predictor(self.box_head(pooled))
        losses = box_losses(logits, deltas, regions, targets, self.rules)
        foreground = [r.where(r.classes < self.rules.num_classes) for r in regions]
        if self.mask_head is not None:
            pooled = self.mask_pooler(maps, [r.boxes for r in foreground])
            losses["loss_mask"] = mask_loss(self.mask_head(pooled), foreground, targets)
        if self.keypoint_head is not None:
            seen = [with_keypoints(r, t) for r, t in zip(foreground, targets, strict=True)]
            heatmaps = self.keypoint_head(self.keypoint_pooler(maps, [r.boxes for r in seen]))
            loss = keypoint_loss(heatmaps, seen, targets, self.keypoint_normalizer)
            losses["loss_keypoint"] = loss * self.keypoint_weight
        return losses

    def detect(
        self, maps: Sequence[Tensor], proposals: Sequence[Tensor], image_sizes: Sizes
    ) -> list[Detections]:
        logits, deltas = self.box_predictor(self.box_head(self.box_pooler(maps, proposals)))
        found = choose_detections(logits, deltas, proposals, image_sizes, self.rules)
        boxes = [one["boxes"] for one in found]
        if self.mask_head is not None:
            add_masks(found, self.mask_head(self.mask_pooler(maps, boxes)))
        if self.keypoint_head is not None:
            add_keypoints(found, self.keypoint_head(self.keypoint_pooler(maps, boxes)))
        return found


class Res5RoIHeads(RoIHeads):
    """C4: res5 on every region; boxes from its mean, masks from its map.

    Args:
        res5: (R, C, P, P) -> (R, C', P', P'); with the extra norm of Res5ROIHeadsExtraNorm it is
            a Sequential whose last module is named `norm`.
    """

    def __init__(
        self,
        in_features: Sequence[str],
        rules: RegionRules,
        pooler: Pooler,
        res5: nn.Module,
        box_predictor: BoxPredictor,
        mask_head: nn.Module | None = None,
    ) -> None:
        super().__init__(in_features, rules)
        self.pooler, self.res5, self.box_predictor = pooler, res5, box_predictor
        self.mask_head = mask_head

    def losses(
        self, maps: Sequence[Tensor], regions: Sequence[Regions], targets: Sequence[Target]
    ) -> dict[str, Tensor]:
        shared = self.res5(self.pooler(maps, [r.boxes for r in regions]))
        logits, deltas = self.box_predictor(shared.mean(dim=[2, 3]))
        losses = box_losses(logits, deltas, regions, targets, self.rules)
        if self.mask_head is not None:
            chosen = [r.classes < self.rules.num_classes for r in regions]
            foreground = [r.where(own) for r, own in zip(regions, chosen, strict=True)]
            masks = self.mask_head(shared[torch.cat(chosen)])
            losses["loss_mask"] = mask_loss(masks, foreground, targets)
        return losses

    def detect(
        self, maps: Sequence[Tensor], proposals: Sequence[Tensor], image_sizes: Sizes
    ) -> list[Detections]:
        shared = self.res5(self.pooler(maps, proposals))
        logits, deltas = self.box_predictor(shared.mean(dim=[2, 3]))
        found = choose_detections(logits, deltas, proposals, image_sizes, self.rules)
        if self.mask_head is not None:
            shared = self.res5(self.pooler(maps, [one["boxes"] for one in found]))
            add_masks(found, self.mask_head(shared))
        return found


def sample_regions(proposals: Tensor, target: Target, rules: RegionRules) -> Regions:
    """Foreground, then background, of one image; the objects' own boxes are among the proposals."""
    boxes = torch.cat([proposals, target["boxes"]])
    thresholds = (rules.iou_threshold, rules.iou_threshold)
    objects, labels = match(target["boxes"], boxes, thresholds, each_object=False)
    classes = torch.full_like(objects, rules.num_classes)
    if len(target["classes"]):
        classes = torch.where(labels == 1, target["classes"][objects], classes)
    drawn = sample(labels, rules.batch_size_per_image, rules.positive_fraction)
    return Regions(boxes, classes, objects).where(torch.cat(drawn))


def with_keypoints(regions: Regions, target: Target) -> Regions:
    """Of foreground regions those that hold a labelled keypoint of their object."""
    if not len(regions.boxes):
        return regions
    keypoints = target["keypoints"][regions.objects]
    return regions.where(mask_ops.visible_in(keypoints, regions.boxes))


def box_losses(
    logits: Tensor,
    deltas: Tensor,
    regions: Sequence[Regions],
    targets: Sequence[Target],
    rules: RegionRules,
) -> dict[str, Tensor]:
    """Cross-entropy, and smooth L1 on the foreground regions / all regions.

    Args: logits (R, K + 1); deltas (R, 4 K).
    """
    K = rules.num_classes
    classes = torch.cat([r.classes for r in regions])
    (index,) = (classes < K).nonzero(as_tuple=True)
    foreground = [r.where(r.classes < K) for r in regions]
    wanted = encode(
        torch.cat([t["boxes"][r.objects] for r, t in zip(foreground, targets, strict=True)]),
        torch.cat([r.boxes for r in foreground]),
        rules.bbox_reg_weights,
    )
    predicted = deltas.view(-1, K, 4)[index, classes[index]]
    loss_box = smooth_l1_loss(predicted, wanted, beta=rules.smooth_l1_beta, reduction="sum")
    # The mean over no region would be NaN.
    loss_cls = F.cross_entropy(logits, classes) if len(classes) else logits.sum() * 0.0
    return {
        "loss_cls": loss_cls,
        "loss_box_reg": loss_box / max(len(classes), 1) * rules.box_reg_weight,
    }


def mask_loss(logits: Tensor, regions: Sequence[Regions], targets: Sequence[Target]) -> Tensor:
    """Binary cross-entropy of the true class's mask; logits (R, K, M, M) of foreground regions."""
    if not len(logits):
        return logits.sum() * 0
    size, wanted = logits.shape[-1], []
    for r, target in zip(regions, targets, strict=True):
        if not len(r.boxes):
            continue
        if isinstance(target["masks"], Tensor):
            wanted.append(mask_ops.crop_bitmaps(target["masks"], r.objects, r.boxes, size))
        else:
            polygons = [target["masks"][index] for index in r.objects.tolist()]
            wanted.append(mask_ops.crop_polygons(polygons, r.boxes, size))
    classes = torch.cat([r.classes for r in regions])
    own = logits[torch.arange(len(logits), device=logits.device), classes]
    return F.binary_cross_entropy_with_logits(own, torch.cat(wanted).float())


def keypoint_loss(
    heatmaps: Tensor,
    regions: Sequence[Regions],
    targets: Sequence[Target],
    normalizer: float | None,
) -> Tensor:
    """Cross-entropy over the cells of (R, number, S, S) for every keypoint that lies in its region.

    Divided by `normalizer` for each image, or by the number of such keypoints.
    """
    size, cells, valid = heatmaps.shape[-1], [], []
    for r, target in zip(regions, targets, strict=True):
        if len(r.boxes):
            found = mask_ops.keypoint_cells(target["keypoints"][r.objects], r.boxes, size)
            cells.append(found[0].flatten())
            valid.append(found[1].flatten())
    if not cells or not torch.cat(valid).any():
        return heatmaps.sum() * 0
    (index,) = torch.cat(valid).nonzero(as_tuple=True)
    logits = heatmaps.reshape(-1, size * size)[index]
    loss = F.cross_entropy(logits, torch.cat(cells)[index], reduction="sum")
    return loss / (len(index) if normalizer is None else normalizer * len(targets))


def choose_detections(
    logits: Tensor,
    deltas: Tensor,
    proposals: Sequence[Tensor],
    image_sizes: Sizes,
    rules: RegionRules,
) -> list[Detections]:
    """Boxes above the threshold, NMS within each class, the best of each image, best first.

    Args: logits (R, K + 1); deltas (R, 4 K).
    """
    numbers = [len(boxes) for boxes in proposals]
    decoded = decode(deltas, torch.cat(list(proposals)), rules.bbox_reg_weights)
    per_image = zip(
        decoded.view(-1, rules.num_classes, 4).split(numbers),
        F.softmax(logits, dim=-1).split(numbers),
        image_sizes,
        strict=True,
    )
    found = []
    for boxes, scores, size in per_image:
        finite = torch.isfinite(boxes).all(dim=(1, 2)) & torch.isfinite(scores).all(dim=1)
        boxes, scores = clip_boxes_to_image(boxes[finite], size), scores[finite, :-1]
        chosen = scores > rules.score_thresh
        classes = chosen.nonzero()[:, 1]
        boxes, scores = boxes[chosen], scores[chosen]
        keep = batched_nms(boxes, scores, classes, rules.nms_thresh)
        keep = keep[: rules.detections_per_image]
        found.append({"boxes": boxes[keep], "scores": scores[keep], "classes": classes[keep]})
    return found


def add_masks(found: Sequence[Detections], logits: Tensor) -> None:
    """Give every detection the mask (M, M) of its class, from (R, K, M, M)."""
    classes = torch.cat([one["classes"] for one in found])
    own = logits[torch.arange(len(logits), device=logits.device), classes].sigmoid()
    for one, masks in zip(found, own.split([len(o["classes"]) for o in found]), strict=True):
        one["masks"] = masks


def add_keypoints(found: Sequence[Detections], heatmaps: Tensor) -> None:
    """Give every detection its keypoints, from (R, number, S, S)."""
    points = mask_ops.locate_keypoints(heatmaps, torch.cat([one["boxes"] for one in found]))
    for one, own in zip(found, points.split([len(o["classes"]) for o in found]), strict=True):
        one["keypoints"] = own
