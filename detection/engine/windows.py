"""Semantic segmentation of an image in overlapping windows (TEST.SEM_SEG_WINDOW), on both engines.

With a stride it is mmsegmentation's `slide` mode (mmseg/models/segmentors/encoder_decoder.py),
without one the windows of arXiv 2404.12172 (tue-mps/benchmark-vfm-ss,
training/lightning_module.py).
"""

from collections.abc import Callable, Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from detection.data.sample import Sample

Predict = Callable[[Sequence[Sample]], Sequence[dict[str, Tensor]]]


def starts(size: int, side: int, stride: int) -> list[int]:
    """Return where windows of `side` px start along an image's side of `size` px.

    They are `stride` apart, except the last one, which ends with the image; with stride 0, as few
    as cover the image are evenly spaced.
    """
    if size <= side:
        return [0]
    if stride:
        number = -(-(size - side) // stride) + 1
        return [min(i * stride, size - side) for i in range(number)]
    number = -(-size // side)
    return [int(i * (size - side) / (number - 1)) for i in range(number)]


def predict_in_windows(
    predict: Predict, sample: Sample, side: int, stride: int
) -> dict[str, Tensor]:
    """Return the scores of an image, averaged over windows, in the original image's size.

    Args:
        predict: Returns "sem_seg" (K, H, W) for each sample, in its `height` and `width`.
        sample: Sample of one image.
        side: Side of the windows, px of the sample's image.
        stride: See `starts`.
    """
    image = sample["image"]
    height, width = image.shape[-2:]
    total = counts = torch.zeros(())
    for top, left in product(starts(height, side, stride), starts(width, side, stride)):
        window = image[:, top : top + side, left : left + side]
        h, w = window.shape[-2:]
        part: Sample = {**sample, "image": window.contiguous(), "height": h, "width": w}
        scores = predict([part])[0]["sem_seg"]
        if not total.ndim:
            total = scores.new_zeros(len(scores), height, width)
            counts = scores.new_zeros(height, width)
        total[:, top : top + h, left : left + w] += scores
        counts[top : top + h, left : left + w] += 1
    original = sample.get("height", height), sample.get("width", width)
    mean = (total / counts)[None]
    return {"sem_seg": F.interpolate(mean, original, mode="bilinear", align_corners=False)[0]}
