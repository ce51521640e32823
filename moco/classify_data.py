"""Labelled pictures for classification: the crops of training and of evaluation.

n rows of this process, P crop size in pixels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from moco.augment import Augmentation
from moco.data import CentreCrops
from moco.errors import DataError
from moco.fileio import PathLike
from moco.inaturalist import find_inaturalist, read_inaturalist
from moco.pictures import LabelledSets, Pictures, labelled_sets


class Centres(NamedTuple):
    """Centre crops (n, 3, P, P) uint8; or why a picture could not be decoded."""

    pixels: Tensor
    bad: str | None = None


class CentreBatches(torch.utils.data.Dataset[Centres]):
    """Batches of :class:`moco.data.CentreCrops`; asked for the indices of a batch at once.

    An exception raised in a worker would reach the training process as a traceback in a string.
    """

    def __init__(self, pictures: Pictures, resize_px: int, crop_px: int) -> None:
        self._crops = CentreCrops(pictures, resize_px, crop_px)

    def __len__(self) -> int:
        return len(self._crops)

    def __getitems__(self, indices: Sequence[int]) -> Centres:
        """The batch, in the order of ``indices``."""
        try:
            return Centres(torch.stack([self._crops[index] for index in indices]))
        except DataError as error:
            return Centres(torch.empty(0), str(error))


def open_labelled(root: PathLike) -> LabelledSets:
    """iNaturalist 2018's own files, or what :func:`moco.pictures.labelled_sets` reads.

    Raises:
        DataError: missing, damaged, or nothing to train on.
    """
    folder = find_inaturalist(root)
    return read_inaturalist(folder) if folder else labelled_sets(root)


def crop_and_flip(cfg: CfgNode) -> Augmentation:
    """The keys under AUG: a random crop and a flip, no colours."""
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
