"""Labeled images for classification, and the crops of training."""

from fvcore.common.config import CfgNode

from moco.common.files import PathLike
from moco.data.augment import Augmentation
from moco.data.images import LabeledSets, labeled_sets
from moco.data.inaturalist import find_inaturalist, read_inaturalist


def open_labeled(root: PathLike) -> LabeledSets:
    """Read iNaturalist 2018 in its published layout, or else by `labeled_sets`.

    Raises:
        DataError: If files are missing or damaged, or there are no images.
    """
    folder = find_inaturalist(root)
    return read_inaturalist(folder) if folder else labeled_sets(root)


def crop_and_flip(cfg: CfgNode) -> Augmentation:
    """Return the augmentation by the keys under AUG: random crop and flip, no color transforms."""
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
