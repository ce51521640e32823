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

from detection.data.sem_seg import Augmentation
from detection.datasets.labels import read_labels
from detection.modeling.fcn16s import FCN16s, only_feature
from detection.modeling.fcn16s import FCN16sHead as Head


@SEM_SEG_HEADS_REGISTRY.register()
class FCN16sHead(FCN16s):
    """MODEL.SEM_SEG_HEAD.NAME FCN16sHead, for `SemanticSegmentor`; see
    detection/modeling/fcn16s.py."""

    def __init__(self, cfg: CfgNode, input_shape: dict[str, ShapeSpec]) -> None:
        settings = cfg.MODEL.SEM_SEG_HEAD
        strides = {name: shape.stride for name, shape in input_shape.items()}
        name = only_feature(settings.IN_FEATURES, strides)
        head = Head(
            input_shape[name].channels,
            settings.NUM_CLASSES,
            channels=settings.CONVS_DIM,
            norm=lambda channels: get_norm(settings.NORM, channels),
        )
        # SemanticSegmentor pads labels with `ignore_value`.
        super().__init__(head, name, settings.IGNORE_VALUE, settings.LOSS_WEIGHT)


class SemSegMapper:
    """A record → image (3, H, W) uint8 and, in training, labels (H, W) int64.

    Args:
        augmentation: None for evaluation, which is at the original size.
        channel_order: "RGB" or "BGR".
    """

    def __init__(self, augmentation: Augmentation | None, channel_order: str) -> None:
        self.augmentation, self.channel_order = augmentation, channel_order

    def __call__(self, record: Mapping[str, Any]) -> dict[str, Any]:
        sample = copy.copy(dict(record))
        image = detection_utils.read_image(record["file_name"], format=self.channel_order)
        detection_utils.check_image_size(sample, image)
        if self.augmentation is not None:
            labels = read_labels(record["sem_seg_file_name"])
            # Detectron2 seeds numpy's own stream in every worker.
            draw = self.augmentation.draw(np.random)
            image, labels = self.augmentation.apply(image, labels, draw)
            sample["sem_seg"] = torch.as_tensor(labels.astype("int64"))
        sample["image"] = torch.as_tensor(np.ascontiguousarray(image.transpose(2, 0, 1)))
        return sample


def build_mapper(cfg: CfgNode, *, training: bool) -> SemSegMapper:
    """The mapper of a task whose MODEL.META_ARCHITECTURE is SemanticSegmentor."""
    augmentation = Augmentation.from_config(cfg)
    return SemSegMapper(augmentation if training else None, cfg.INPUT.FORMAT)
