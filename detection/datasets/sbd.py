"""Conversion of SBD's masks (Hariharan et al. 2011) to VOC2012's train_aug: MATLAB → PNG files.

train_aug contains all images with a mask in VOC2012 or SBD except those of VOC's val. If an image
has a mask in VOC2012, that one is used: it marks the borders of objects as ignored, SBD's does not.
"""

import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from detection.datasets.layout import read_ids
from moco.common.errors import DataError
from moco.common.progress import Progress


def make_train_aug(sbd: Path, voc: Path, made: Path) -> None:
    """Write SegmentationClassAug/*.png and ImageSets/Segmentation/train_aug.txt into `made`.

    Args:
        sbd: Folder with `train.txt`, `val.txt`, `cls/<id>.mat`.
        voc: The folder VOC2012.
        made: Folder for the output.

    Raises:
        DataError: If a list or mask is missing or damaged.
    """
    lists = voc / "ImageSets" / "Segmentation"
    train, val = ({*read_ids(lists / f"{name}.txt")} for name in ("train", "val"))
    extra = {i for name in ("train", "val") for i in read_ids(sbd / f"{name}.txt")}
    ids = sorted((train | extra) - val)
    masks = made / "SegmentationClassAug"
    masks.mkdir(parents=True)
    with Progress(len(ids), "masks of train_aug", "img") as progress:
        for image_id in ids:
            file = f"{image_id}.png"
            if image_id in train:
                shutil.copyfile(voc / "SegmentationClass" / file, masks / file)
            else:
                mask = _read_mask(sbd / "cls" / f"{image_id}.mat")
                Image.fromarray(mask).save(masks / file)
            progress.update()
    new_list = made / "ImageSets" / "Segmentation" / "train_aug.txt"
    new_list.parent.mkdir(parents=True)
    new_list.write_text("".join(f"{image_id}\n" for image_id in ids), encoding="utf-8")


def _read_mask(path: Path) -> np.ndarray:
    """Read a mask of SBD as class ids (H, W) uint8, 0..20."""
    from scipy.io import loadmat

    try:
        mask = loadmat(path, variable_names=["GTcls"])["GTcls"]["Segmentation"][0, 0]
    except Exception as error:  # scipy raises many types, all with the same meaning here
        raise DataError(f"{path}: not a mask of SBD, or damaged ({error})") from error
    if mask.dtype != np.uint8 or mask.ndim != 2:
        raise DataError(f"{path}: expected (H, W) of uint8, got {mask.shape} of {mask.dtype}")
    return mask
