"""RetinaNet head with its losses and postprocessing (arXiv 1708.02002).

Equal to detectron2/modeling/meta_arch/{retinanet,dense_detector}.py; torchvision's RetinaNet has
other names, anchors and normalizers of the losses, and no moving average.

Shapes: N images, K classes, A anchors per cell, C channels, H W cells of a feature map, G = H W A
anchors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from fvcore.nn import sigmoid_focal_loss_jit, smooth_l1_loss
from torch import Tensor, nn

from convert.modeling.resnet import NormLayer
from detection.embedded.backbone import Backbone
from detection.embedded.boxes import Weights, decode, encode, match
from detection.embedded.layers import norm_layer, normal_fill
from detection.embedded.regions import Detections
from detection.embedded.roi_heads import Target
from detection.embedded.rpn import Anchors, Sizes, build_anchors, flatten_anchors


@dataclass(frozen=True)
class DenseRules:
    """Settings of labels, losses and postprocessing of anchors, from MODEL.RETINANET.

    Attributes:
        iou_thresholds: An anchor with an IoU below the first is background, from the second on it
            belongs to the object, and between the two it is ignored.
        focal_alpha: Weight of an anchor's own class; the others have 1 - alpha.
        focal_gamma: The loss at probability p of the right answer is multiplied by (1 - p)^gamma.
        topk_candidates: Number of best scores per map that are decoded, before NMS.
    """

    num_classes: int
    iou_thresholds: tuple[float, float]
    bbox_reg_weights: Weights
    smooth_l1_beta: float
    focal_alpha: float
    focal_gamma: float
    score_thresh: float
    topk_candidates: int
    nms_thresh: float
    detections_per_image: int


class RetinaNetHead(nn.Module):
    """RetinaNet head: two towers of convolutions, shared by all feature maps.

    Args:
        in_features: Names of the feature maps.
        anchors: Anchors of these maps.
        rules: Settings of labels, losses and postprocessing.
        channels: C.
        num_convs: Number of 3x3 convolutions of each tower.
        norm: Norm after each of them.
        prior: Initial probability of every class.

    Attributes:
        loss_normalizer: Moving average of the number of foreground anchors in a batch, by which the
            losses are divided. Each process has its own, as in Detectron2. It is updated by every
            pass in training mode, including those of PreciseBN.
    """

    def __init__(
        self,
        in_features: Sequence[str],
        anchors: Anchors,
        rules: DenseRules,
        channels: int,
        num_convs: int,
        norm: NormLayer | None,
        prior: float,
    ) -> None:
        super().__init__()
        self.in_features, self.anchors, self.rules = tuple(in_features), anchors, rules
        self.loss_normalizer = 100.0
        num_anchors = len(anchors.cells[0])
        towers: tuple[list[nn.Module], list[nn.Module]] = ([], [])
        for _ in range(num_convs):
            for tower in towers:
                tower.append(nn.Conv2d(channels, channels, 3, padding=1))
                tower += [norm(channels)] if norm else []
                tower.append(nn.ReLU())
        self.cls_subnet, self.bbox_subnet = (nn.Sequential(*tower) for tower in towers)
        self.cls_score = nn.Conv2d(channels, num_anchors * rules.num_classes, 3, padding=1)
        self.bbox_pred = nn.Conv2d(channels, num_anchors * 4, 3, padding=1)
        for layer in (*self.cls_subnet, *self.bbox_subnet, self.cls_score, self.bbox_pred):
            if isinstance(layer, nn.Conv2d):
                normal_fill(layer, std=0.01)
        nn.init.constant_(self.cls_score.get_parameter("bias"), -math.log((1 - prior) / prior))

    def forward(self, maps: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return for each map logits (N, G, K) and deltas (N, G, 4)."""
        logits = [self.cls_score(self.cls_subnet(x)) for x in maps]
        deltas = [self.bbox_pred(self.bbox_subnet(x)) for x in maps]
        num_classes = self.rules.num_classes
        return [flatten_anchors(x, num_classes) for x in logits], [
            flatten_anchors(x, 4) for x in deltas
        ]

    def losses(
        self, features: Mapping[str, Tensor], targets: Sequence[Target]
    ) -> dict[str, Tensor]:
        """Compute the focal loss of all anchors not ignored, and smooth L1 of the foreground."""
        rules, maps = self.rules, [features[name] for name in self.in_features]
        logits, deltas = (torch.cat(list(outputs), dim=1) for outputs in self(maps))
        anchors = torch.cat(self.anchors(maps))
        labels, box_targets = [], []
        for target in targets:
            matched = match(target["boxes"], anchors, rules.iou_thresholds, each_object=True)
            # Background is the last class, which index -1 selects.
            classes = F.pad(target["classes"], (0, 1), value=rules.num_classes)
            label = classes[matched.clamp(min=-1)]
            label[matched == -2] = -1
            labels.append(label)
            positive = matched >= 0
            objects = target["boxes"][matched[positive]]
            box_targets.append(encode(objects, anchors[positive], rules.bbox_reg_weights))
        all_labels = torch.stack(labels)  # (N, G)
        valid = all_labels >= 0
        positive = valid & (all_labels != rules.num_classes)
        number = max(int(positive.sum()), 1)
        self.loss_normalizer = self.loss_normalizer * 0.9 + number * (1 - 0.9)
        one_hot = F.one_hot(all_labels[valid], rules.num_classes + 1)[:, :-1]
        alpha, gamma, beta = rules.focal_alpha, rules.focal_gamma, rules.smooth_l1_beta
        loss_cls = sigmoid_focal_loss_jit(logits[valid], one_hot.to(logits), alpha, gamma, "sum")
        loss_box = smooth_l1_loss(deltas[positive], torch.cat(box_targets), beta, reduction="sum")
        return {
            "loss_cls": loss_cls / self.loss_normalizer,
            "loss_box_reg": loss_box / self.loss_normalizer,
        }

    def detect(self, features: Mapping[str, Tensor], image_sizes: Sizes) -> list[Detections]:
        """Return the detections of each image, best first; boxes are not clipped to the image."""
        maps = [features[name] for name in self.in_features]
        logits, deltas = self(maps)
        anchors = self.anchors(maps)
        return [
            self.choose([x[image].sigmoid() for x in logits], [x[image] for x in deltas], anchors)
            for image in range(len(image_sizes))
        ]

    def choose(
        self, scores: Sequence[Tensor], deltas: Sequence[Tensor], anchors: Sequence[Tensor]
    ) -> Detections:
        """Select detections of one image: top k of each map, NMS within each class, top k of all.

        Args:
            scores: (G, K) of each map.
            deltas: (G, 4) of each map.
            anchors: (G, 4) of each map.
        """
        from torchvision.ops import batched_nms

        rules, parts = self.rules, []
        for map_scores, map_deltas, boxes in zip(scores, deltas, anchors, strict=True):
            chosen = map_scores > rules.score_thresh
            best = map_scores[chosen].topk(min(int(chosen.sum()), rules.topk_candidates))
            index, classes = chosen.nonzero()[best.indices].unbind(dim=1)
            decoded = decode(map_deltas[index], boxes[index], rules.bbox_reg_weights)
            parts.append((decoded, best.values, classes))
        boxes, values, classes = (torch.cat(part) for part in zip(*parts, strict=True))
        keep = batched_nms(boxes, values, classes, rules.nms_thresh)
        keep = keep[: rules.detections_per_image]
        return {"boxes": boxes[keep], "scores": values[keep], "classes": classes[keep]}


def build_retinanet_head(cfg: CfgNode, backbone: Backbone) -> RetinaNetHead:
    """Build the head of MODEL.RETINANET and its anchors."""
    keys, names = cfg.MODEL.RETINANET, list(cfg.MODEL.RETINANET.IN_FEATURES)
    rules = DenseRules(
        num_classes=keys.NUM_CLASSES,
        iou_thresholds=(keys.IOU_THRESHOLDS[0], keys.IOU_THRESHOLDS[-1]),
        bbox_reg_weights=tuple(keys.BBOX_REG_WEIGHTS),
        smooth_l1_beta=keys.SMOOTH_L1_LOSS_BETA,
        focal_alpha=keys.FOCAL_LOSS_ALPHA,
        focal_gamma=keys.FOCAL_LOSS_GAMMA,
        score_thresh=keys.SCORE_THRESH_TEST,
        topk_candidates=keys.TOPK_CANDIDATES_TEST,
        nms_thresh=keys.NMS_THRESH_TEST,
        detections_per_image=cfg.TEST.DETECTIONS_PER_IMAGE,
    )
    return RetinaNetHead(
        names,
        build_anchors(cfg.MODEL, names, backbone),
        rules,
        backbone.stage_channels[names[0]],
        keys.NUM_CONVS,
        norm_layer(keys.NORM),
        keys.PRIOR_PROB,
    )
