"""The augmentations of MoCo v1, v2 and v3, from the papers and the official code."""

from dataclasses import replace

from moco.data.augment import Augmentation

# The paper, sec. 3.3, after InstDisc (arXiv 1805.01978): RandomResizedCrop(224, (.2, 1)),
# RandomGrayscale(.2), ColorJitter(.4, .4, .4, .4), RandomHorizontalFlip.
V1 = Augmentation(
    gray_first=True,
    crop_px=224,
    crop_scale=(0.2, 1.0),
    crop_ratio=(3 / 4, 4 / 3),
    flip_prob=0.5,
    jitter_prob=1.0,
    jitter=(0.4, 0.4, 0.4, 0.4),
    gray_prob=0.2,
    blur_prob=0.0,
    blur_sigma_px=(0.1, 2.0),
)
# MoCo v2 (arXiv 2003.04297; main_moco.py --aug-plus): RandomResizedCrop(224, (.2, 1)),
# ColorJitter(.4, .4, .4, .1) with p = .8, RandomGrayscale(.2), GaussianBlur(.1, 2.) with p = .5,
# RandomHorizontalFlip.
V2 = replace(V1, gray_first=False, jitter_prob=0.8, jitter=(0.4, 0.4, 0.4, 0.1), blur_prob=0.5)
# MoCo v3 (arXiv 2104.02057; main_moco.py), after BYOL: the two views differ in blur and
# solarization; for ViTs, the smallest crop has 8% of the area.
V3 = (
    replace(V2, jitter=(0.4, 0.4, 0.2, 0.1), blur_prob=1.0),
    replace(V2, jitter=(0.4, 0.4, 0.2, 0.1), blur_prob=0.1, solarize_prob=0.2),
)
