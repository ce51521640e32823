"""Pure functions of regions: losses, postprocessing, masks and keypoints; equal to Detectron2's.

See detectron2/modeling/roi_heads, structures/{masks,keypoints}.py and layers/mask_ops.py. Keypoint
heatmaps are torchvision's. Its masks are not used: they are soft, not aligned, and pasted at whole
pixels.

Shapes: N images, R regions, K foreground classes, M or S cells per side of a mask or heatmap, H W
pixels. Regions of all images (R, 5) are the index of the image and the box; boxes of one image
(R, 4) are x1, y1, x2, y2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from fvcore.nn import smooth_l1_loss
from torch import Tensor

from detection.data.sample import Polygons, draw_polygons
from detection.embedded.boxes import Weights, encode
from detection.embedded.rpn import Sizes


def crop_polygons(objects: Sequence[Polygons], boxes: Tensor, size: int) -> Tensor:
    """Rasterize R objects within their boxes (R, 4), `size` cells per side: (R, M, M) bool."""
    masks = torch.zeros(len(boxes), size, size, dtype=torch.bool)
    for mask, polygons, box in zip(masks, objects, boxes.cpu().numpy(), strict=True):
        sides = np.maximum(box[2:] - box[:2], 0.1)
        # As in Detectron2, corner and scale are in fp32 and the polygon in fp64.
        moved = [(p.reshape(-1, 2) - box[:2]) * (size / sides) for p in polygons]
        mask.copy_(torch.from_numpy(draw_polygons([p.ravel() for p in moved], (size, size))))
    return masks.to(boxes.device)


def crop_bitmaps(objects: Sequence[Tensor], boxes: Tensor, size: int) -> Tensor:
    """Crop the bitmaps (H, W) of R objects to their boxes (R, 4): (R, M, M) bool."""
    from torchvision.ops import roi_align

    crops = [
        roi_align(bitmap[None, None].float(), [box[None]], size, aligned=True)[0]
        for bitmap, box in zip(objects, boxes, strict=True)
    ]
    return torch.cat(crops) >= 0.5


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Paste masks (R, M, M) in 0..1 into their boxes (R, 4): (R, H, W) bool in an image of `size`.

    Each mask is computed separately, near its box only.
    """
    pasted = torch.zeros(len(masks), *size, dtype=torch.bool, device=masks.device)
    for target, mask, box in zip(pasted, masks, boxes, strict=True):
        x0, y0 = (int(low) for low in (box[:2].floor() - 1).clamp(min=0))
        x1, y1 = (
            int(min(high, limit))
            for high, limit in zip(box[2:].ceil() + 1, size[::-1], strict=True)
        )
        x, y = (
            # Pixel centers, in -1..1 across the box.
            (torch.arange(start, stop, device=box.device) + 0.5 - low) / (high - low) * 2 - 1
            for start, stop, low, high in ((x0, x1, box[0], box[2]), (y0, y1, box[1], box[3]))
        )
        grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
        near = F.grid_sample(mask[None, None], grid[None].to(mask.dtype), align_corners=False)
        target[y0:y1, x0:x1] = near[0, 0] >= 0.5
    return pasted


def contain_visible(keypoints: Tensor, boxes: Tensor) -> Tensor:
    """Return which regions (R, 4) contain a labeled keypoint of their object (R, number, 3)."""
    x, y, visibility = keypoints.unbind(dim=2)
    left, top, right, bottom = boxes[:, :, None].unbind(dim=1)
    inside = (x >= left) & (x <= right) & (y >= top) & (y <= bottom)
    return (inside & (visibility >= 1)).any(dim=1)


def locate_keypoints(heatmaps: Tensor, boxes: Tensor) -> Tensor:
    """Locate keypoints by logits (R, number, S, S) in boxes (R, 4): (R, number, 3) of x, y, score.

    The score is the peak's share in a softmax over the map, with the peak of the interpolated map.
    """
    from torchvision.models.detection.roi_heads import heatmaps_to_keypoints

    points, peaks = heatmaps_to_keypoints(heatmaps, boxes)
    shares = 1 / (heatmaps - peaks[:, :, None, None]).exp().sum(dim=(2, 3))
    return torch.cat([points[:, :, :2], shares[:, :, None]], dim=2)


# "boxes" (D, 4), "scores" and "classes" (D,), "masks" (D, M, M) in 0..1, "keypoints"
Detections = dict[str, Tensor]


@dataclass(frozen=True)
class RegionRules:
    """Settings of sampling, losses and postprocessing of regions, from MODEL.ROI_*.

    Attributes:
        iou_threshold: Regions with at least this IoU with an object are foreground.
        batch_size_per_image: Regions sampled per image, at most `positive_fraction` of them
            foreground.
        sigmoid: Use a binary loss and score per class instead of a softmax over the classes.
        federated_classes: Minimum number of classes in the federated loss, which is used if there
            are weights to sample classes by.
        keypoint_normalizer: Normalizer of the keypoint loss per image; None normalizes by the
            number of labeled keypoints.
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
    """Regions of all images with their classes and objects.

    Attributes:
        rois: (R, 5).
        classes: (R,) in 0..K; K is background.
        objects: (R,) index among the objects of all images; -1 for none.
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
    """Compute the classification loss and the box loss of the foreground regions.

    The box loss is smooth L1, summed over the foreground and divided by the number of all regions.

    Args:
        rules: Settings of the losses.
        predicted: Logits (R, K + 1) and deltas (R, 4 K) or (R, 4).
        regions: R regions with their classes and objects.
        boxes: (G, 4) of the objects of all images.
        class_weights: (K,), see `BoxPredictor`.
    """
    (logits, deltas), (rois, classes, objects) = predicted, regions
    (index,) = (objects >= 0).nonzero(as_tuple=True)
    deltas = deltas.unflatten(1, (-1, 4))
    column = classes[index] if deltas.shape[1] > 1 else 0
    target = encode(boxes[objects[index]], rois[index, 1:], rules.bbox_reg_weights)
    beta = rules.smooth_l1_beta
    loss_box = smooth_l1_loss(deltas[index, column], target, beta, reduction="sum")
    return {
        "loss_cls": class_loss(rules, logits, classes, class_weights),
        "loss_box_reg": loss_box / max(len(classes), 1) * rules.box_reg_weight,
    }


def class_loss(
    rules: RegionRules, logits: Tensor, classes: Tensor, weights: Tensor | None
) -> Tensor:
    """Compute the cross-entropy, softmax or sigmoid, of logits (R, K + 1) and classes (R,).

    With `weights` (K,) it is the federated loss: over the classes of these regions and, up to
    `rules.federated_classes`, others sampled by their weights, because LVIS annotates most classes
    on few images. From CenterNet2 (arXiv 2103.07461), as in
    detectron2/modeling/roi_heads/fast_rcnn.py.
    """
    if not len(classes):
        return logits.sum() * 0.0  # the mean over no regions would be NaN
    if not rules.sigmoid:
        return F.cross_entropy(logits, classes)
    target = F.one_hot(classes, logits.shape[1])[:, :-1].to(logits)
    loss = F.binary_cross_entropy_with_logits(logits[:, :-1], target, reduction="none")
    if weights is not None:
        kept = classes.unique()
        if len(kept) < rules.federated_classes:
            odds = F.pad(weights.float(), (0, 1))  # background is not sampled
            odds[kept] = 0
            kept = torch.cat([kept, odds.multinomial(rules.federated_classes - len(kept))])
        loss = loss * torch.zeros_like(logits[0]).index_fill_(0, kept, 1.0)[:-1]
    return loss.sum() / len(loss)


def to_scores(rules: RegionRules, logits: Tensor) -> Tensor:
    """Convert logits (R, K + 1) to scores in 0..1."""
    return logits.sigmoid() if rules.sigmoid else F.softmax(logits, dim=-1)


def select_detections(
    rules: RegionRules,
    scores: Tensor,
    boxes: Tensor,
    proposals: Sequence[Tensor],
    image_sizes: Sizes,
) -> list[Detections]:
    """Select detections per image, best first: score threshold, NMS within each class, top k.

    Args:
        rules: Settings of the postprocessing.
        scores: (R, K + 1) of the proposals of all images.
        boxes: (R, 4 K) or (R, 4).
        proposals: Boxes (., 4) of each image, R in all.
        image_sizes: Sizes to which boxes are clipped.
    """
    from torchvision.ops import batched_nms, clip_boxes_to_image

    numbers, num_classes = [len(part) for part in proposals], rules.num_classes
    all_boxes = boxes.unflatten(1, (-1, 4)).expand(-1, num_classes, -1).split(numbers)
    detections = []
    all_scores = scores.split(numbers)
    for boxes, scores, size in zip(all_boxes, all_scores, image_sizes, strict=True):
        finite = torch.isfinite(boxes).all(dim=(1, 2)) & torch.isfinite(scores).all(dim=1)
        boxes, scores = clip_boxes_to_image(boxes[finite], size), scores[finite, :-1]
        chosen = scores > rules.score_thresh
        classes = chosen.nonzero()[:, 1]
        boxes, scores = boxes[chosen], scores[chosen]
        keep = batched_nms(boxes, scores, classes, rules.nms_thresh)
        keep = keep[: rules.detections_per_image]
        detections.append({"boxes": boxes[keep], "scores": scores[keep], "classes": classes[keep]})
    return detections


def split_by_image(boxes: Tensor, rois: Tensor, image_sizes: Sizes) -> list[Tensor]:
    """Split boxes (R, 4) by the image of their regions (R, 5), and clip them to the image."""
    from torchvision.ops import clip_boxes_to_image

    return [
        clip_boxes_to_image(boxes[rois[:, 0] == image], size)
        for image, size in enumerate(image_sizes)
    ]


def join_images(boxes: Sequence[Tensor]) -> Tensor:
    """Concatenate the boxes (., 4) of each image to regions (R, 5): index of the image, and box."""
    return torch.cat([F.pad(part, (1, 0), value=float(image)) for image, part in enumerate(boxes)])


def select_class(masks: Tensor, classes: Tensor) -> Tensor:
    """Select from the masks of all classes (R, K, M, M) those of the classes (R,): (R, M, M)."""
    return masks[torch.arange(len(masks), device=masks.device), classes]


def mask_loss(logits: Tensor, classes: Tensor, masks: Sequence[Any], boxes: Tensor) -> Tensor:
    """Compute the binary cross-entropy of the masks of the regions' classes.

    Args:
        logits: (R, K, M, M) of R foreground regions.
        classes: (R,).
        masks: Mask of each region's object; see `roi_heads.Target`.
        boxes: (R, 4) of the regions.
    """
    if not len(logits):
        return logits.sum() * 0
    crop = crop_bitmaps if isinstance(masks[0], Tensor) else crop_polygons
    target = crop(masks, boxes, logits.shape[-1]).float()
    return F.binary_cross_entropy_with_logits(select_class(logits, classes), target)
