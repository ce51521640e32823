"""The box head of a C4 detector: RoIAlign on res4, res5 on every region, one predictor.

torchvision's RoIHeads with Detectron2's choices (rows 5, 11-16 of the list in the docstring of
detection/embedded/model.py); the reference is detectron2/modeling/roi_heads/roi_heads.py and
fast_rcnn.py.

Shapes: N images, R regions of all images, K foreground classes, P pooled cells per side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fvcore.nn import smooth_l1_loss
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.ops import batched_nms, clip_boxes_to_image, roi_align

from detection.embedded.boxes import Float32BoxCoder


class RoIAlignPooler(nn.Module):
    """RoIAlign with half-pixel alignment from one feature map; the scale comes from its stride."""

    def __init__(self, output_size: int, stride: int, sampling_ratio: int) -> None:
        super().__init__()
        self.output_size, self.scale, self.sampling_ratio = (
            output_size,
            1.0 / stride,
            sampling_ratio,
        )

    def forward(self, features: Tensor, boxes: list[Tensor]) -> Tensor:
        """(N, C, H, W) and N tensors of boxes -> (R, C, P, P)."""
        return roi_align(
            features,
            boxes,
            self.output_size,
            spatial_scale=self.scale,
            sampling_ratio=self.sampling_ratio,
            aligned=True,
        )


class BoxPredictor(nn.Module):
    """(R, C) -> class logits (R, K + 1), background last, and deltas (R, 4 K)."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.cls_score = nn.Linear(in_channels, num_classes + 1)
        self.bbox_pred = nn.Linear(in_channels, num_classes * 4)
        nn.init.normal_(self.cls_score.weight, std=0.01)
        nn.init.normal_(self.bbox_pred.weight, std=0.001)
        nn.init.zeros_(self.cls_score.bias)
        nn.init.zeros_(self.bbox_pred.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.cls_score(x), self.bbox_pred(x)


class Res5RoIHeads(RoIHeads):
    """Regions -> losses when training, detections otherwise.

    Args (the keys of Detectron2's MODEL.ROI_HEADS and ROI_BOX_HEAD):
        in_feature: name of the feature map the regions are pooled from.
        res5: (R, C, P, P) -> (R, C', P', P'); with the extra norm of Res5ROIHeadsExtraNorm it is
            a Sequential whose last module is named `norm`.
        iou_threshold: regions with at least this IoU with an object are foreground.
        batch_size_per_image: regions sampled per image, of which `positive_fraction` foreground.
    """

    def __init__(
        self,
        *,
        in_feature: str,
        pooler: RoIAlignPooler,
        res5: nn.Module,
        box_predictor: BoxPredictor,
        num_classes: int,
        iou_threshold: float,
        batch_size_per_image: int,
        positive_fraction: float,
        bbox_reg_weights: tuple[float, float, float, float],
        smooth_l1_beta: float,
        box_reg_weight: float,
        score_thresh: float,
        nms_thresh: float,
        detections_per_image: int,
    ) -> None:
        super().__init__(
            box_roi_pool=pooler,
            box_head=None,  # `res5` below: the name in Detectron2's files
            box_predictor=box_predictor,
            fg_iou_thresh=iou_threshold,
            bg_iou_thresh=iou_threshold,
            batch_size_per_image=batch_size_per_image,
            positive_fraction=positive_fraction,
            bbox_reg_weights=bbox_reg_weights,
            score_thresh=score_thresh,
            nms_thresh=nms_thresh,
            detections_per_img=detections_per_image,
        )
        self.in_feature = in_feature
        self.res5 = res5
        self.num_classes = num_classes
        self.batch_size_per_image = batch_size_per_image
        self.positive_fraction = positive_fraction
        self.smooth_l1_beta = smooth_l1_beta
        self.box_reg_weight = box_reg_weight
        self.box_coder = Float32BoxCoder(bbox_reg_weights)

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Detections per image ("boxes", "scores", "classes" in 0..K-1), or the losses.

        `targets` hold "boxes" (R, 4) and "labels" (R,) in 1..K, 0 being background: torchvision's
        convention, turned into Detectron2's (background last) for the losses.
        """
        if self.training:
            proposals, _, labels, wanted = self.select_training_samples(proposals, targets)
        pooled = self.box_roi_pool(features[self.in_feature], proposals)
        predictions = self.box_predictor(self.res5(pooled).mean(dim=[2, 3]))
        logits, deltas = (x.float() for x in predictions)  # under autocast they are not
        if self.training:
            classes = torch.cat(labels) - 1
            classes[classes < 0] = self.num_classes
            return [], self.losses(logits, deltas, classes, torch.cat(list(wanted)))
        boxes, scores, classes_per_image = self.postprocess_detections(
            logits, deltas, proposals, image_shapes
        )
        return [
            {"boxes": b, "scores": s, "classes": c}
            for b, s, c in zip(boxes, scores, classes_per_image, strict=True)
        ], {}

    def subsample(self, labels: list[Tensor]) -> list[Tensor]:
        """Indices of the sample of each image: foreground, then background, in random order.

        The order of the regions decides the order of every sum over them. torchvision sorts them;
        the draws themselves are the same (subsample_labels in detectron2/modeling/sampling.py).
        """
        samples = []
        for image_labels in labels:
            foreground = (image_labels >= 1).nonzero().squeeze(1)
            background = (image_labels == 0).nonzero().squeeze(1)
            wanted = int(self.batch_size_per_image * self.positive_fraction)
            num_foreground = min(len(foreground), wanted)
            num_background = min(len(background), self.batch_size_per_image - num_foreground)
            device = image_labels.device
            order = torch.randperm(len(foreground), device=device)[:num_foreground]
            foreground = foreground[order]
            order = torch.randperm(len(background), device=device)[:num_background]
            samples.append(torch.cat([foreground, background[order]]))
        return samples

    def losses(
        self, logits: Tensor, deltas: Tensor, classes: Tensor, wanted: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy, and smooth L1 on the foreground regions / all regions.

        Args: logits (R, K + 1); deltas (R, 4 K); classes (R,) in 0..K; wanted deltas (R, 4).
        """
        foreground = (classes < self.num_classes).nonzero().squeeze(1)
        predicted = deltas.view(-1, self.num_classes, 4)[foreground, classes[foreground]]
        loss_box = smooth_l1_loss(
            predicted, wanted[foreground], beta=self.smooth_l1_beta, reduction="sum"
        )
        # The mean over no region would be NaN.
        loss_cls = F.cross_entropy(logits, classes) if len(classes) else logits.sum() * 0.0
        return {
            "loss_cls": loss_cls,
            "loss_box_reg": loss_box / max(len(classes), 1) * self.box_reg_weight,
        }

    def postprocess_detections(
        self,
        class_logits: Tensor,
        box_regression: Tensor,
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Boxes (D, 4), scores (D,) and classes (D,) in 0..K-1 of each image, best first."""
        regions_per_image = [len(boxes) for boxes in proposals]
        # torchvision's decode keeps one column for no class at all when there is no region.
        decoded = self.box_coder.decode(box_regression, proposals).view(-1, self.num_classes, 4)
        results = [
            self._detections(boxes, scores, size)
            for boxes, scores, size in zip(
                decoded.split(regions_per_image),
                F.softmax(class_logits, dim=-1).split(regions_per_image),
                image_shapes,
                strict=True,
            )
        ]
        boxes, scores, classes = (list(column) for column in zip(*results, strict=True))
        return boxes, scores, classes

    def _detections(
        self, boxes: Tensor, scores: Tensor, size: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes (R, K, 4) and scores (R, K + 1) of one image -> its detections."""
        valid = torch.isfinite(boxes).all(dim=(1, 2)) & torch.isfinite(scores).all(dim=1)
        boxes, scores = clip_boxes_to_image(boxes[valid], size), scores[valid, :-1]
        region, classes = (scores > self.score_thresh).nonzero(as_tuple=True)
        boxes, scores = boxes[region, classes], scores[region, classes]
        keep = batched_nms(boxes.float(), scores, classes, self.nms_thresh)
        keep = keep[: self.detections_per_img]
        return boxes[keep], scores[keep], classes[keep]
