"""FCN-16s for Detectron2: the head behind its registry, and the mapper of its data."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import detection_utils
from detectron2.layers import ShapeSpec, get_norm
from detectron2.modeling import SEM_SEG_HEADS_REGISTRY
from torch import Tensor, nn

from detection.fcn16s import STRIDE, pixel_loss, upsample
from detection.fcn16s import FCN16sHead as Head
from detection.labels import read_labels
from detection.sem_seg_data import Augmentation
from moco.errors import UserError


@SEM_SEG_HEADS_REGISTRY.register()
class FCN16sHead(nn.Module):
    """MODEL.SEM_SEG_HEAD.NAME FCN16sHead, for ``SemanticSegmentor``; see detection/fcn16s.py.

    In training (None, {"loss_sem_seg": loss}), in evaluation (scores (N, K, H, W), {}).
    """

    def __init__(self, cfg: CfgNode, input_shape: dict[str, ShapeSpec]) -> None:
        super().__init__()
        settings = cfg.MODEL.SEM_SEG_HEAD
        names = list(settings.IN_FEATURES)
        if len(names) != 1 or names[0] not in input_shape or input_shape[names[0]].stride != STRIDE:
            strides = {name: shape.stride for name, shape in input_shape.items()}
            raise UserError(
                f"MODEL.SEM_SEG_HEAD.IN_FEATURES: got {names}, expected one feature map of stride "
                f"{STRIDE}; the backbone has {strides} (res5 with MODEL.RESNETS.RES5_DILATION 2)"
            )
        self.in_feature = names[0]
        self.ignore_value = settings.IGNORE_VALUE  # SemanticSegmentor pads labels with it
        self.loss_weight = settings.LOSS_WEIGHT
        self.head = Head(
            input_shape[self.in_feature].channels,
            settings.NUM_CLASSES,
            channels=settings.CONVS_DIM,
            norm=lambda channels: get_norm(settings.NORM, channels),
        )

    def forward(
        self, features: Mapping[str, Tensor], targets: Tensor | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        scores = self.head(features[self.in_feature])
        if self.training:
            assert targets is not None
            loss = pixel_loss(scores, targets, self.ignore_value)
            return None, {"loss_sem_seg": loss * self.loss_weight}
        # SemanticSegmentor cuts the picture's own size out of this.
        size = (scores.shape[-2] * STRIDE, scores.shape[-1] * STRIDE)
        return upsample(scores, size), {}


class SemSegMapper:
    """A record → picture (3, H, W) uint8 and, in training, labels (H, W) int64.

    Args:
        augmentation: None for evaluation, which is at the original size.
        channel_order: "RGB" or "BGR".
    """

    def __init__(self, augmentation: Augmentation | None, channel_order: str) -> None:
        self.augmentation, self.channel_order = augmentation, channel_order

    def __call__(self, record: Mapping[str, Any]) -> dict[str, Any]:
        sample = copy.copy(dict(record))
        picture = detection_utils.read_image(record["file_name"], format=self.channel_order)
        detection_utils.check_image_size(sample, picture)
        if self.augmentation is not None:
            labels = read_labels(record["sem_seg_file_name"])
            # Detectron2 seeds numpy's own stream in every worker.
            draw = self.augmentation.draw(np.random)
            picture, labels = self.augmentation.apply(picture, labels, draw)
            sample["sem_seg"] = torch.as_tensor(labels.astype("int64"))
        sample["image"] = torch.as_tensor(np.ascontiguousarray(picture.transpose(2, 0, 1)))
        return sample


def build_mapper(cfg: CfgNode, *, training: bool) -> SemSegMapper:
    """The mapper of a task whose MODEL.META_ARCHITECTURE is SemanticSegmentor."""
    augmentation = Augmentation(
        scale_range=tuple(cfg.INPUT.SEM_SEG_SCALE_RANGE),
        flip=cfg.INPUT.RANDOM_FLIP == "horizontal",
        crop_px=cfg.INPUT.SEM_SEG_CROP_SIZE,
        pad_value=tuple(cfg.MODEL.PIXEL_MEAN),  # zero once normalised
        ignore_value=cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE,
    )
    return SemSegMapper(augmentation if training else None, cfg.INPUT.FORMAT)
