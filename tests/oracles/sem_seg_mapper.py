"""FCN-16s's mapper for plain Detectron2, whose own cannot scale by a ratio and pad labels."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import detection_utils

from detection.data.sem_seg import Augmentation
from detection.datasets.labels import read_labels


class SemSegMapper:
    """Mapper from a record to an image (3, H, W) uint8 and, in training, labels (H, W) int64.

    Args:
        augmentation: None in evaluation, which is at the original size.
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
            params = self.augmentation.sample_params(np.random)
            image, labels = self.augmentation.apply(image, labels, params)
            sample["sem_seg"] = torch.as_tensor(labels.astype("int64"))
        sample["image"] = torch.as_tensor(np.ascontiguousarray(image.transpose(2, 0, 1)))
        return sample


def build_mapper(cfg: CfgNode, *, training: bool) -> SemSegMapper:
    """Build the mapper of a task with MODEL.META_ARCHITECTURE SemanticSegmentor."""
    augmentation = Augmentation.from_config(cfg)
    return SemSegMapper(augmentation if training else None, cfg.INPUT.FORMAT)
