"""Losses and choice of regions as pure functions, equal to detectron2/modeling/roi_heads.

Shapes: N images, R regions of all images, K foreground classes. A region (R, 5) is the number of
its image and its box.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fvcore.nn import smooth_l1_loss
from torch import Tensor

from detection.embedded.boxes import Weights, encode
from detection.embedded.masks import crop_bitmaps, crop_polygons
from detection.embedded.rpn import Sizes

# "boxes" (D, 4), "scores" and "classes" (D,), "masks" (D, M, M) in 0..1, "keypoints"
Detections = dict[str, Tensor]


@dataclass(frozen=True)
class RegionRules:
    """How regions are sampled, learned and chosen: the keys of MODEL.ROI_*.

    Attributes:
        iou_threshold: regions with at least this IoU with an object are foreground.
        batch_size_per_image: regions sampled per image, of which `positive_fraction` foreground.
        sigmoid: every class has a binary loss and score of its own, else a softmax over them.
        federated_classes: the least number of classes that loss is about (if there are weights to
            sample them by).
        keypoint_normalizer: for each image, of the keypoint loss; None: the labeled keypoints.
    """

    num_classes: int
    iou_threshold: float
    batch_size_per_image: int
    positive_fraction: float
    bbox_reg_weights: Weights
    smooth_l1_beta: float
    box_reg_weight: float
    sigmoid: bool
    federated_classes: int
    score_thresh: float
    nms_thresh: float
    detections_per_image: int
    keypoint_normalizer: float | None
    keypoint_weight: float


class Regions(NamedTuple):
    """Regions of all images, and what they are of.

    Attributes:
        rois: (R, 5).
        classes: (R,) in 0..K; K is background.
        objects: (R,) index among the objects of all images; -1: none.
    """

    rois: Tensor
    classes: Tensor
    objects: Tensor


def box_losses(
    rules: RegionRules,
    predicted: tuple[Tensor, Tensor],
    regions: Regions,
    boxes: Tensor,
    class_weights: Tensor | None,
) -> dict[str, Tensor]:
    """The loss of the classes, and smooth L1 on the foreground regions / all regions.

    Args:
        predicted: logits (R, K + 1), deltas (R, 4 K) or (R, 4).
        boxes: (G, 4) of the objects of all images.
        class_weights: (K,), see `BoxPredictor`.
    """
    (logits, deltas), (rois, classes, objects) = predicted, regions
    (index,) = (objects >= 0).nonzero(as_tuple=True)
    deltas = deltas.unflatten(1, (-1, 4))
    column = classes[index] if deltas.shape[1] > 1 else 0
    wanted = encode(boxes[objects[index]], rois[index, 1:], rules.bbox_reg_weights)
    beta = rules.smooth_l1_beta
    loss_box = smooth_l1_loss(deltas[index, column], wanted, beta, reduction="sum")
    return {
        "loss_cls": class_loss(rules, logits, classes, class_weights),
        "loss_box_reg": loss_box / max(len(classes), 1) * rules.box_reg_weight,
    }


def class_loss(
    rules: RegionRules, logits: Tensor, classes: Tensor, weights: Tensor | None
) -> Tensor:
    """Cross-entropy, softmax or sigmoid, of logits (R, K + 1) and classes (R,).

    The federated loss is about the classes of these regions and, up to `rules.federated_classes`,
    others that are sampled by their weights (K,): on LVIS most classes are annotated on few images.
    From CenterNet2 (arXiv 2103.07461), as in detectron2/modeling/roi_heads/fast_rcnn.py.
    """
    if not len(classes):
        return logits.sum() * 0.0  # the mean over no region would be NaN
    if not rules.sigmoid:
        return F.cross_entropy(logits, classes)
    wanted = F.one_hot(classes, logits.shape[1])[:, :-1].to(logits)
    loss = F.binary_cross_entropy_with_logits(logits[:, :-1], wanted, reduction="none")
    if weights is not None:
        kept = classes.unique()
        if len(kept) < rules.federated_classes:
            odds = F.pad(weights.float(), (0, 1))  # background is not sampled
            odds[kept] = 0
            kept = torch.cat([kept, odds.multinomial(rules.federated_classes - len(kept))])
        loss = loss * torch.zeros_like(logits[0]).index_fill_(0, kept, 1.0)[:-1]
    return loss.sum() / len(loss)


def scores(rules: RegionRules, logits: Tensor) -> Tensor:
    """(R, K + 1) in 0..1."""
    return logits.sigmoid() if rules.sigmoid else F.softmax(logits, dim=-1)


def choose(
    rules: RegionRules,
    scores: Tensor,
    boxes: Tensor,
    proposals: Sequence[Tensor],
    image_sizes: Sizes,
) -> list[Detections]:
    """Boxes above the threshold, NMS within each class, the best of each image, best first.

    Args: scores (R, K + 1); boxes (R, 4 K) or (R, 4); R are the proposals of all images.
    """
    from torchvision.ops import batched_nms, clip_boxes_to_image

    numbers, num_classes = [len(own) for own in proposals], rules.num_classes
    all_boxes = boxes.unflatten(1, (-1, 4)).expand(-1, num_classes, -1).split(numbers)
    found = []
    for own, likely, size in zip(all_boxes, scores.split(numbers), image_sizes, strict=True):
        finite = torch.isfinite(own).all(dim=(1, 2)) & torch.isfinite(likely).all(dim=1)
        own, likely = clip_boxes_to_image(own[finite], size), likely[finite, :-1]
        chosen = likely > rules.score_thresh
        classes = chosen.nonzero()[:, 1]
        own, likely = own[chosen], likely[chosen]
        keep = batched_nms(own, likely, classes, rules.nms_thresh)
        keep = keep[: rules.detections_per_image]
        found.append({"boxes": own[keep], "scores": likely[keep], "classes": classes[keep]})
    return found


def by_image(boxes: Tensor, rois: Tensor, image_sizes: Sizes) -> list[Tensor]:
    """Boxes (R, 4), one for each region (R, 5) -> (., 4) of each image, clipped to it."""
    from torchvision.ops import clip_boxes_to_image

    return [
        clip_boxes_to_image(boxes[rois[:, 0] == image], size)
        for image, size in enumerate(image_sizes)
    ]


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
