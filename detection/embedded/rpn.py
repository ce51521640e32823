"""Region proposals, equal to detectron2/modeling/{anchor_generator,proposal_generator/rpn}.py.

Shapes: N images, A anchors per cell, C channels, H W cells of a feature map, G = H W A anchors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from fvcore.nn import smooth_l1_loss
from torch import Tensor, nn
from torchvision.ops import batched_nms, clip_boxes_to_image

from detection.embedded.boxes import Weights, decode, encode, match, nonempty, sample
from detection.embedded.layers import Conv

Sizes = Sequence[tuple[int, int]]  # height and width of each image


def cell_anchors(sizes_px: Sequence[float], aspect_ratios: Sequence[float]) -> Tensor:
    """(A, 4) anchors around the origin, sizes outermost; a ratio is height / width."""
    anchors = []
    for size in sizes_px:
        for ratio in aspect_ratios:
            width = math.sqrt(size**2.0 / ratio)
            height = ratio * width
            anchors.append([-width / 2.0, -height / 2.0, width / 2.0, height / 2.0])
    return torch.tensor(anchors)


def grid_anchors(cell: Tensor, stride: int, offset: float, size: tuple[int, int]) -> Tensor:
    """The anchors (A, 4) of one cell -> (H W A, 4) in all cells of a map of `size` (H, W)."""
    y, x = (
        torch.arange(offset * stride, cells * stride, stride, dtype=torch.float32) for cells in size
    )
    y, x = torch.meshgrid(y.to(cell.device), x.to(cell.device), indexing="ij")
    return (torch.stack((x, y, x, y), dim=-1).reshape(-1, 1, 4) + cell).reshape(-1, 4)


class RPNHead(nn.Module):
    """3x3 convolution, then objectness and deltas by 1x1, the same for all maps."""

    def __init__(self, channels: int, num_anchors: int) -> None:
        super().__init__()
        self.conv = Conv(channels, channels, 3, relu=True)
        self.objectness_logits = Conv(channels, num_anchors, 1)
        self.anchor_deltas = Conv(channels, num_anchors * 4, 1)
        for layer in (self.conv, self.objectness_logits, self.anchor_deltas):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C, H, W) -> logits (N, G) and deltas (N, G, 4), in the order of the anchors."""
        N, _, H, W = features.shape
        hidden = self.conv(features)
        logits = self.objectness_logits(hidden).permute(0, 2, 3, 1).flatten(1)
        deltas = self.anchor_deltas(hidden).view(N, -1, 4, H, W)
        return logits.float(), deltas.permute(0, 3, 4, 1, 2).flatten(1, -2).float()


@dataclass(frozen=True)
class ProposalRules:
    """How anchors are labelled, and proposals chosen: the keys of Detectron2's MODEL.RPN.

    Attributes:
        batch_size_per_image: anchors sampled per image, of which `positive_fraction` foreground.
        pre_nms_topk, post_nms_topk: proposals kept per map and per image: (training, testing).
        min_size_px: proposals need sides longer than this.
        loc_weight: of the localisation loss; `loss_weight` multiplies both losses.
    """

    iou_thresholds: tuple[float, float]
    batch_size_per_image: int
    positive_fraction: float
    pre_nms_topk: tuple[int, int]
    post_nms_topk: tuple[int, int]
    nms_thresh: float
    min_size_px: float
    bbox_reg_weights: Weights
    smooth_l1_beta: float
    loss_weight: float
    loc_weight: float


class RPN(nn.Module):
    """Feature maps -> proposals per image, best first, and the losses when there are objects.

    Args:
        in_features: names of the feature maps; cells (A, 4), strides: one for each of them.
        offset: of the first anchor's centre from the corner of the image, in strides, [0, 1).
    """

    def __init__(
        self,
        in_features: Sequence[str],
        rpn_head: RPNHead,
        cells: Sequence[Tensor],
        strides: Sequence[int],
        offset: float,
        rules: ProposalRules,
    ) -> None:
        super().__init__()
        self.in_features, self.rpn_head, self.rules = tuple(in_features), rpn_head, rules
        self.cells, self.strides, self.offset = list(cells), list(strides), offset

    def anchors(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """(G, 4) for each map."""
        return [
            grid_anchors(cell.to(x.device), stride, self.offset, (x.shape[-2], x.shape[-1]))
            for cell, stride, x in zip(self.cells, self.strides, maps, strict=True)
        ]

    def forward(
        self,
        features: Mapping[str, Tensor],
        image_sizes: Sizes,
        objects: Sequence[Tensor] | None = None,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """`objects`: boxes (., 4) of each image, in training."""
        maps = [features[name] for name in self.in_features]
        anchors = self.anchors(maps)
        logits, deltas = map(list, zip(*(self.rpn_head(x) for x in maps), strict=True))
        losses = {}
        if objects is not None:
            losses = rpn_losses(
                torch.cat(logits, dim=1),
                torch.cat(deltas, dim=1),
                torch.cat(anchors),
                objects,
                self.rules,
            )
        with torch.no_grad():
            boxes = [
                decode(d.reshape(-1, 4), a.repeat(len(d), 1), self.rules.bbox_reg_weights)
                for d, a in zip(deltas, anchors, strict=True)
            ]
            proposals = choose_proposals(
                [b.view(*s.shape, 4) for b, s in zip(boxes, logits, strict=True)],
                logits,
                image_sizes,
                self.rules,
                training=objects is not None,
            )
        return proposals, losses


def rpn_losses(
    logits: Tensor,
    deltas: Tensor,
    anchors: Tensor,
    objects: Sequence[Tensor],
    rules: ProposalRules,
) -> dict[str, Tensor]:
    """Sums over the sampled anchors, in the order of the anchors, / (sample size x images).

    Args: logits (N, G), deltas (N, G, 4), anchors (G, 4) of all maps.
    """
    labels, wanted = [], []
    for boxes in objects:
        index, all_labels = match(boxes, anchors, rules.iou_thresholds, each_object=True)
        positive, negative = sample(all_labels, rules.batch_size_per_image, rules.positive_fraction)
        labels.append(torch.full_like(all_labels, -1).index_fill_(0, positive, 1))
        labels[-1][negative] = 0
        # Without objects nothing is positive and any box will do.
        wanted.append(
            encode(boxes[index] if len(boxes) else anchors, anchors, rules.bbox_reg_weights)
        )
    label, positive = torch.stack(labels), torch.stack(labels) == 1
    loss_cls = F.binary_cross_entropy_with_logits(
        logits[label >= 0], label[label >= 0].float(), reduction="sum"
    )
    loss_loc = smooth_l1_loss(
        deltas[positive], torch.stack(wanted)[positive], beta=rules.smooth_l1_beta, reduction="sum"
    )
    normalizer = rules.batch_size_per_image * len(objects)
    return {
        "loss_rpn_cls": loss_cls / normalizer * rules.loss_weight,
        "loss_rpn_loc": loss_loc / normalizer * (rules.loc_weight * rules.loss_weight),
    }


def choose_proposals(
    boxes: Sequence[Tensor],
    logits: Sequence[Tensor],
    image_sizes: Sizes,
    rules: ProposalRules,
    *,
    training: bool,
) -> list[Tensor]:
    """Top-k by logit in each map, clip, drop empty boxes, NMS within each map, top-k of all.

    Args: of each map boxes (N, G, 4) and logits (N, G).

    Raises:
        FloatingPointError: in training, boxes or logits that are not finite.
    """
    before, after = (
        topk[0 if training else 1] for topk in (rules.pre_nms_topk, rules.post_nms_topk)
    )
    best = [s.topk(min(s.shape[1], before), dim=1) for s in logits]
    levels = torch.cat([torch.full_like(top.indices[0], i) for i, top in enumerate(best)])
    all_logits = torch.cat([top.values for top in best], dim=1)
    all_boxes = torch.cat(
        [
            b.take_along_dim(top.indices[:, :, None], dim=1)
            for b, top in zip(boxes, best, strict=True)
        ],
        dim=1,
    )
    proposals = []
    for box, scores, size in zip(all_boxes, all_logits, image_sizes, strict=True):
        finite = torch.isfinite(box).all(dim=1) & torch.isfinite(scores)
        if training and not finite.all():
            raise FloatingPointError("region proposals are not finite")
        box = clip_boxes_to_image(box, size)
        valid = finite & nonempty(box, rules.min_size_px)
        box = box[valid]
        proposals.append(
            box[batched_nms(box, scores[valid], levels[valid], rules.nms_thresh)[:after]]
        )
    return proposals
