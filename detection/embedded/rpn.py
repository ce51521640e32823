"""Region proposals: torchvision's RegionProposalNetwork with Detectron2's choices.

The differences handled here are rows 1-3, 8-10 and 16 of the list in the docstring of
detection/embedded/model.py; the reference is detectron2/modeling/proposal_generator/rpn.py.

Shapes: N images, A anchors per cell, C channels, H W cells of the feature map, G = H W A anchors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from fvcore.nn import smooth_l1_loss
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork, concat_box_prediction_layers
from torchvision.ops import batched_nms, clip_boxes_to_image

from detection.embedded.boxes import Float32BoxCoder, nonempty


class GridAnchors(AnchorGenerator):
    """Unrounded anchors, sizes outermost, on a grid of fixed stride.

    As DefaultAnchorGenerator in detectron2/modeling/anchor_generator.py.

    Args:
        sizes: per feature map, the square roots of the areas in pixels.
        aspect_ratios: per feature map, height / width.
        strides: pixels per cell of each feature map.
        offset: of the first anchor's centre from the corner of the image, in strides, [0, 1).
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[float]],
        aspect_ratios: Sequence[Sequence[float]],
        strides: Sequence[int],
        offset: float = 0.0,
    ) -> None:
        super().__init__(
            tuple(tuple(s) for s in sizes), tuple(tuple(ratios) for ratios in aspect_ratios)
        )
        self.strides = tuple(strides)
        self.offset = offset

    def generate_anchors(
        self,
        scales: Sequence[float],
        aspect_ratios: Sequence[float],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """(A, 4) anchors around the origin."""
        anchors = []
        for size in scales:
            for ratio in aspect_ratios:
                width = math.sqrt(size**2.0 / ratio)
                height = ratio * width
                anchors.append([-width / 2.0, -height / 2.0, width / 2.0, height / 2.0])
        return torch.tensor(anchors, dtype=dtype, device=device)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """One (G, 4) tensor for each image, all equal."""
        self.set_cell_anchors(torch.float32, feature_maps[0].device)
        anchors = []
        for cell, stride, features in zip(
            self.cell_anchors, self.strides, feature_maps, strict=True
        ):
            y, x = (
                torch.arange(
                    self.offset * stride,
                    cells * stride,
                    step=stride,
                    dtype=torch.float32,
                    device=features.device,
                )
                for cells in features.shape[-2:]
            )
            y, x = torch.meshgrid(y, x, indexing="ij")
            shifts = torch.stack((x, y, x, y), dim=-1).reshape(-1, 1, 4)
            anchors.append((shifts + cell).reshape(-1, 4))
        return [torch.cat(anchors)] * len(image_list.image_sizes)


class RPNHead(nn.Module):
    """3x3 convolution, then objectness and deltas by 1x1; Detectron2's names and initialisation."""

    def __init__(self, in_channels: int, num_anchors: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, in_channels, kernel_size=3, padding=1)
        self.objectness_logits = nn.Conv2d(in_channels, num_anchors, kernel_size=1)
        self.anchor_deltas = nn.Conv2d(in_channels, num_anchors * 4, kernel_size=1)
        for layer in (self.conv, self.objectness_logits, self.anchor_deltas):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, features: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Feature maps (N, C, H, W) -> per map logits (N, A, H, W) and deltas (N, 4 A, H, W)."""
        hidden = [F.relu(self.conv(x)) for x in features]
        return [self.objectness_logits(h) for h in hidden], [self.anchor_deltas(h) for h in hidden]


class RPN(RegionProposalNetwork):
    """Proposals ranked by logit; losses summed over the sample and divided by its nominal size.

    Args (the keys of Detectron2's MODEL.RPN):
        in_features: names of the feature maps used.
        batch_size_per_image: anchors sampled per image, of which `positive_fraction` foreground.
        pre_nms_topk, post_nms_topk: proposals kept per image, (training, testing).
        min_size_px: proposals need sides longer than this.
        loc_weight: of the localisation loss; `loss_weight` multiplies both losses.
    """

    def __init__(
        self,
        *,
        in_features: Sequence[str],
        rpn_head: RPNHead,
        anchor_generator: GridAnchors,
        iou_thresholds: tuple[float, float],
        batch_size_per_image: int,
        positive_fraction: float,
        pre_nms_topk: tuple[int, int],
        post_nms_topk: tuple[int, int],
        nms_thresh: float,
        bbox_reg_weights: tuple[float, float, float, float],
        smooth_l1_beta: float,
        min_size_px: float,
        loss_weight: float,
        loc_weight: float,
    ) -> None:
        low, high = iou_thresholds
        super().__init__(
            anchor_generator,
            None,  # `rpn_head` below: the name in Detectron2's files
            high,
            low,
            batch_size_per_image,
            positive_fraction,
            {"training": pre_nms_topk[0], "testing": pre_nms_topk[1]},
            {"training": post_nms_topk[0], "testing": post_nms_topk[1]},
            nms_thresh,
        )
        self.in_features = tuple(in_features)
        self.rpn_head = rpn_head
        self.box_coder = Float32BoxCoder(bbox_reg_weights)
        self.batch_size_per_image = batch_size_per_image
        self.smooth_l1_beta = smooth_l1_beta
        self.min_size_px = min_size_px
        self.loss_weights = (loss_weight, loss_weight * loc_weight)

    def forward(
        self,
        images: ImageList,
        features: dict[str, Tensor],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Proposals per image, best first, each (R, 4); and the losses when training."""
        maps = [features[name] for name in self.in_features]
        logits, deltas = self.rpn_head(maps)
        anchors = self.anchor_generator(images, maps)
        num_anchors_per_level = [x[0].numel() for x in logits]
        logits, deltas = (x.float() for x in concat_box_prediction_layers(logits, deltas))
        losses = {}
        if self.training:
            assert targets is not None
            labels, matched_boxes = self.assign_targets_to_anchors(anchors, targets)
            wanted = self.box_coder.encode(matched_boxes, anchors)
            loss_cls, loss_loc = self.compute_loss(logits, deltas, labels, list(wanted))
            losses = {"loss_rpn_cls": loss_cls, "loss_rpn_loc": loss_loc}
        boxes = self.box_coder.decode(deltas.detach(), anchors).view(len(anchors), -1, 4)
        proposals, _ = self.filter_proposals(
            boxes, logits, images.image_sizes, num_anchors_per_level
        )
        return proposals, losses

    def compute_loss(
        self,
        objectness: Tensor,
        pred_bbox_deltas: Tensor,
        labels: list[Tensor],
        regression_targets: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Sums over the sampled anchors, in the order of the anchors, / (sample size x images)."""
        positive, negative = (torch.cat(mask).bool() for mask in self.fg_bg_sampler(labels))
        sampled = positive | negative
        loss_cls = F.binary_cross_entropy_with_logits(
            objectness.flatten()[sampled], torch.cat(labels)[sampled], reduction="sum"
        )
        loss_loc = smooth_l1_loss(
            pred_bbox_deltas[positive],
            torch.cat(regression_targets)[positive],
            beta=self.smooth_l1_beta,
            reduction="sum",
        )
        normalizer = self.batch_size_per_image * len(labels)
        weight_cls, weight_loc = self.loss_weights
        return loss_cls / normalizer * weight_cls, loss_loc / normalizer * weight_loc

    def filter_proposals(
        self,
        proposals: Tensor,
        objectness: Tensor,
        image_shapes: list[tuple[int, int]],
        num_anchors_per_level: list[int],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Top-k by logit, clip, drop empty boxes, NMS, top-k.

        Raises:
            FloatingPointError: in training, boxes or logits that are not finite.
        """
        logits = objectness.detach().reshape(len(proposals), -1)
        kept_boxes, kept_logits, kept_levels = [], [], []
        level_boxes = proposals.split(num_anchors_per_level, dim=1)
        level_logits = logits.split(num_anchors_per_level, dim=1)
        for number, (b, s) in enumerate(zip(level_boxes, level_logits, strict=True)):
            top, index = s.topk(min(s.shape[1], self.pre_nms_top_n()), dim=1)
            kept_boxes.append(b.take_along_dim(index[:, :, None], dim=1))
            kept_logits.append(top)
            kept_levels.append(torch.full_like(index[0], number))
        levels = torch.cat(kept_levels)
        results = []
        for boxes, scores, size in zip(
            torch.cat(kept_boxes, dim=1), torch.cat(kept_logits, dim=1), image_shapes, strict=True
        ):
            valid = torch.isfinite(boxes).all(dim=1) & torch.isfinite(scores)
            if self.training and not valid.all():
                raise FloatingPointError("region proposals are not finite")
            boxes = clip_boxes_to_image(boxes, size)
            valid &= nonempty(boxes, self.min_size_px)
            boxes, scores, level = boxes[valid], scores[valid], levels[valid]
            keep = batched_nms(boxes.float(), scores, level, self.nms_thresh)
            keep = keep[: self.post_nms_top_n()]
            results.append((boxes[keep], scores[keep]))
        return [boxes for boxes, _ in results], [scores for _, scores in results]
