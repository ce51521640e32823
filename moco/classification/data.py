"""Labeled images for classification: the crops of training and of evaluation.

n rows of this process, P crop size in pixels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from moco.common.errors import DataError
from moco.common.files import PathLike
from moco.data.augment import Augmentation
from moco.data.images import Images, LabeledSets, labeled_sets
from moco.data.inaturalist import find_inaturalist, read_inaturalist
from moco.data.views import CenterCrops


class Centers(NamedTuple):
    """Center crops (n, 3, P, P) uint8; or why an image could not be decoded."""

    pixels: Tensor
    bad: str | None = None


class CenterBatches(torch.utils.data.Dataset[Centers]):
    """Batches of `moco.data.views.CenterCrops`; asked for the indices of a batch at once.

    An exception raised in a worker would reach the training process as a traceback in a string.
    """

    def __init__(self, images: Images, resize_px: int, crop_px: int) -> None:
        self._crops = CenterCrops(images, resize_px, crop_px)

    def __len__(self) -> int:
        return len(self._crops)

    def __getitems__(self, indices: Sequence[int]) -> Centers:
        """The batch, in the order of `indices`."""
        try:
            return Centers(torch.stack([self._crops[index] for index in indices]))
        except DataError as error:
            return Centers(torch.empty(0), str(error))


def open_labeled(root: PathLike) -> LabeledSets:
    """iNaturalist 2018's own files, or what `moco.data.images.labeled_sets` reads.

    Raises:
        DataError: missing, damaged, or nothing to train on.
    """
    folder = find_inaturalist(root)
    return read_inaturalist(folder) if folder else labeled_sets(root)


def crop_and_flip(cfg: CfgNode) -> Augmentation:
    """The keys under AUG: a random crop and a flip, no colors."""
    return Augmentation(
        gray_first=False,
        crop_px=cfg.AUG.CROP_PX,
        crop_scale=tuple(cfg.AUG.CROP_SCALE),
        crop_ratio=tuple(cfg.AUG.CROP_RATIO),
        flip_prob=cfg.AUG.FLIP_PROB,
        jitter_prob=0.0,
        jitter=(0.0, 0.0, 0.0, 0.0),
        gray_prob=0.0,
        blur_prob=0.0,
        blur_sigma_px=(0.1, 2.0),
    )
