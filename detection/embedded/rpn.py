"""Region proposal network with anchors, losses and proposal selection.

Equal to detectron2/modeling/{anchor_generator,proposal_generator/rpn}.py; model.py lists the
differences to torchvision's RegionProposalNetwork.

Shapes: N images, A anchors per cell, C channels, H W cells of a feature map, G = H W A anchors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from fvcore.nn import smooth_l1_loss
from torch import Tensor, nn

from detection.data.sample import nonempty
from detection.embedded.backbone import Backbone
from detection.embedded.boxes import Weights, decode, encode, match, sample
from detection.embedded.layers import conv, normal_fill
from moco.common.async_copy import to_device_async

Sizes = Sequence[tuple[int, int]]  # height and width of each image


def cell_anchors(sizes_px: Sequence[float], aspect_ratios: Sequence[float]) -> Tensor:
    """Return the anchors (A, 4) around the origin, sizes outermost; a ratio is height / width."""
    anchors = []
    for size, ratio in product(sizes_px, aspect_ratios):
        width = math.sqrt(size**2.0 / ratio)
        height = ratio * width
        anchors.append([-width / 2.0, -height / 2.0, width / 2.0, height / 2.0])
    return torch.tensor(anchors)


def grid_anchors(cell: Tensor, stride: int, offset: float, size: tuple[int, int]) -> Tensor:
    """Repeat the anchors (A, 4) of one cell in all cells of a map of `size` (H, W): (H W A, 4)."""
    y, x = (
        torch.arange(
            offset * stride, cells * stride, stride, dtype=torch.float32, device=cell.device
        )
        for cells in size
    )
    y, x = torch.meshgrid(y, x, indexing="ij")
    return (torch.stack((x, y, x, y), dim=-1).reshape(-1, 1, 4) + cell).reshape(-1, 4)


@dataclass(frozen=True)
class Anchors:
    """Anchor generator of all feature maps.

    Attributes:
        cells: Anchors (A, 4) of one cell, for each map.
        strides: Stride of each map, px.
        offset: Distance of the first anchor's center from the corner of the image, in strides,
            in [0, 1).
    """

    cells: tuple[Tensor, ...]
    strides: tuple[int, ...]
    offset: float

    def __call__(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return the anchors (G, 4) of each map (N, C, H, W)."""
        return [
            grid_anchors(
                to_device_async(cell, x.device), stride, self.offset, (x.shape[-2], x.shape[-1])
            )
            for cell, stride, x in zip(self.cells, self.strides, maps, strict=True)
        ]


def flatten_anchors(outputs: Tensor, size: int) -> Tensor:
    """Rearrange (N, A * size, H, W) to (N, G, size), in fp32 and in the order of the anchors."""
    outputs = outputs.view(len(outputs), -1, size, *outputs.shape[-2:])
    return outputs.permute(0, 3, 4, 1, 2).flatten(1, -2).float()


class RPNHead(nn.Module):
    """RPN head: 3x3 convolutions with ReLU, then 1x1 ones for objectness and deltas.

    Args:
        channels: C of all feature maps.
        num_anchors: A.
        conv_dims: Output channels of each 3x3 convolution; -1 keeps the number of its input.
    """

    def __init__(self, channels: int, num_anchors: int, conv_dims: Sequence[int]) -> None:
        super().__init__()
        hidden = nn.Sequential()
        for number, dim in enumerate(conv_dims):
            out_channels = channels if dim == -1 else dim
            hidden.add_module(f"conv{number}", conv(channels, out_channels, 3))
            channels = out_channels
        # As in Detectron2, a single convolution has no number in its name.
        self.conv = hidden if len(hidden) > 1 else hidden[0]
        self.objectness_logits = conv(channels, num_anchors, 1)
        self.anchor_deltas = conv(channels, num_anchors * 4, 1)
        for layer in (*hidden, self.objectness_logits, self.anchor_deltas):
            normal_fill(layer, std=0.01)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Predict logits (N, G) and deltas (N, G, 4) from a map (N, C, H, W)."""
        for layer in self.conv if isinstance(self.conv, nn.Sequential) else [self.conv]:
            features = F.relu(layer(features))
        logits = flatten_anchors(self.objectness_logits(features), 1).squeeze(-1)
        return logits, flatten_anchors(self.anchor_deltas(features), 4)


@dataclass(frozen=True)
class ProposalRules:
    """Settings of anchor labels, losses and proposal selection, from MODEL.RPN.

    Attributes:
        batch_size_per_image: Anchors sampled per image, at most `positive_fraction` of them
            foreground.
        pre_nms_topk: Proposals kept per map before NMS, (testing, training).
        post_nms_topk: Proposals kept per image after NMS, (testing, training).
        min_size_px: Both sides of a proposal must be longer than this.
        loss_weight: Weight of both losses.
        loc_weight: Additional weight of the localization loss.
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
    """Region proposal network.

    Args:
        in_features: Names of the feature maps.
        rpn_head: Predicts objectness and deltas on each map.
        anchors: Anchors of these maps.
        rules: Settings of labels, losses and proposal selection.
    """

    def __init__(
        self,
        in_features: Sequence[str],
        rpn_head: RPNHead,
        anchors: Anchors,
        rules: ProposalRules,
    ) -> None:
        super().__init__()
        self.in_features, self.rpn_head = tuple(in_features), rpn_head
        self.anchors, self.rules = anchors, rules

    def forward(
        self,
        features: Mapping[str, Tensor],
        image_sizes: Sizes,
        objects: Sequence[Tensor] | None = None,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the proposals (., 4) of each image, best first, and in training the losses.

        Args:
            features: Feature maps (N, C, H, W) by name.
            image_sizes: Sizes to which proposals are clipped.
            objects: Ground-truth boxes (., 4) of each image, in training.
        """
        maps = [features[name] for name in self.in_features]
        anchors = self.anchors(maps)
        logits, deltas = zip(*(self.rpn_head(x) for x in maps), strict=True)
        losses = {}
        if objects is not None:
            losses = self.losses(
                torch.cat(logits, dim=1), torch.cat(deltas, dim=1), torch.cat(anchors), objects
            )
        return self.choose(logits, deltas, anchors, image_sizes), losses

    def losses(
        self, logits: Tensor, deltas: Tensor, anchors: Tensor, objects: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Sum the losses over the sampled anchors, and divide by the sample size and N.

        Args:
            logits: (N, G) of all maps.
            deltas: (N, G, 4) of all maps.
            anchors: (G, 4) of all maps.
            objects: Ground-truth boxes (., 4) of each image.
        """
        rules = self.rules
        labels, box_targets = [], []
        for boxes in objects:
            matched = match(boxes, anchors, rules.iou_thresholds, each_object=True)
            chosen = sample(matched, rules.batch_size_per_image, rules.positive_fraction)
            label = torch.full_like(matched, -1)
            labels.append(label.index_fill_(0, chosen[0], 1).index_fill_(0, chosen[1], 0))
            # Anchors that are not foreground may have any box; it enters no loss.
            best = boxes[matched.clamp(min=0)] if len(boxes) else anchors
            box_targets.append(encode(best, anchors, rules.bbox_reg_weights))
        label, target = torch.stack(labels), torch.stack(box_targets)
        # Indices, not masks: each use of a mask would wait for a GPU to count it.
        sampled, positive = (x.nonzero(as_tuple=True) for x in (label >= 0, label == 1))
        loss_cls = F.binary_cross_entropy_with_logits(
            logits[sampled], label[sampled].float(), reduction="sum"
        )
        beta = rules.smooth_l1_beta
        loss_loc = smooth_l1_loss(deltas[positive], target[positive], beta, reduction="sum")
        normalizer = rules.batch_size_per_image * len(objects)
        return {
            "loss_rpn_cls": loss_cls / normalizer * rules.loss_weight,
            "loss_rpn_loc": loss_loc / normalizer * (rules.loc_weight * rules.loss_weight),
        }

    @torch.no_grad()
    def choose(
        self,
        logits: Sequence[Tensor],
        deltas: Sequence[Tensor],
        anchors: Sequence[Tensor],
        image_sizes: Sizes,
    ) -> list[Tensor]:
        """Select proposals: top k of each map, clipped, not empty, after NMS top k of all.

        Args:
            logits: (N, G) of each map.
            deltas: (N, G, 4) of each map.
            anchors: (G, 4) of each map.
            image_sizes: Sizes to which proposals are clipped.

        Raises:
            FloatingPointError: If boxes or logits are not finite, in training.
        """
        from torchvision.ops import batched_nms, clip_boxes_to_image

        rules = self.rules
        before, after = rules.pre_nms_topk[self.training], rules.post_nms_topk[self.training]
        best_logits, best_boxes, levels = [], [], []
        for level, (s, d, a) in enumerate(zip(logits, deltas, anchors, strict=True)):
            boxes = decode(d.reshape(-1, 4), a.repeat(len(d), 1), rules.bbox_reg_weights)
            top = s.topk(min(s.shape[1], before), dim=1)
            best_logits.append(top.values)
            best_boxes.append(boxes.view_as(d).take_along_dim(top.indices[:, :, None], dim=1))
            levels.append(torch.full_like(top.indices[0], level))
        all_levels = torch.cat(levels)
        all_logits, all_boxes = torch.cat(best_logits, dim=1), torch.cat(best_boxes, dim=1)
        proposals = []
        for scores, boxes, size in zip(all_logits, all_boxes, image_sizes, strict=True):
            finite = torch.isfinite(boxes).all(dim=1) & torch.isfinite(scores)
            if self.training and not finite.all():
                raise FloatingPointError("region proposals are not finite")
            boxes = clip_boxes_to_image(boxes, size)
            valid = finite & nonempty(boxes, rules.min_size_px)
            (index,) = valid.nonzero(as_tuple=True)
            boxes = boxes[index]
            keep = batched_nms(boxes, scores[index], all_levels[index], rules.nms_thresh)
            proposals.append(boxes[keep[:after]])
        return proposals


def build_anchors(model: CfgNode, names: Sequence[str], backbone: Backbone) -> Anchors:
    """Build MODEL.ANCHOR_GENERATOR for the feature maps of these names."""
    keys = model.ANCHOR_GENERATOR
    # There is one list for all maps, or one for each.
    sizes, ratios = (
        [*values] * (len(names) if len(values) == 1 else 1)
        for values in (keys.SIZES, keys.ASPECT_RATIOS)
    )
    cells = tuple(cell_anchors(s, r) for s, r in zip(sizes, ratios, strict=True))
    return Anchors(cells, tuple(backbone.strides[name] for name in names), keys.OFFSET)


def build_rpn(model: CfgNode, backbone: Backbone) -> RPN:
    """Build MODEL.RPN and its anchors."""
    rpn, names = model.RPN, list(model.RPN.IN_FEATURES)
    anchors, channels = build_anchors(model, names, backbone), backbone.stage_channels[names[0]]
    return RPN(
        names,
        RPNHead(channels, len(anchors.cells[0]), rpn.CONV_DIMS),
        anchors,
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
