"""Random augmentation of the two views of an image (sec. 3.3), sampled per (seed, epoch, index).

A view is computed in two parts. Crop, resizing and flip come first, image by image on uint8,
because images have different sizes. Color transforms follow on the training device, for a whole
batch at once. The parameters of each view are sampled beforehand from a separate generator, so
they depend neither on the number of data-loader workers nor on the batch.

N batch size, P crop size in pixels, H W image size in pixels.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moco.common.async_copy import to_device_async
from moco.data import opencv
from moco.data.opencv import BRIGHTNESS, CONTRAST, GRAYSCALE, HUE, LUMA, SATURATION

CROP_TRIES = 10  # torchvision's RandomResizedCrop
ORDERS = tuple(itertools.permutations((BRIGHTNESS, CONTRAST, SATURATION, HUE)))
# Columns of a view's color parameters. ORDER is an index into ORDERS, or -1 for no jitter; the
# next four are indexed by BRIGHTNESS..HUE; GRAY and SOLARIZE are 0 or 1; SIGMA_PX is 0 for no blur.
ORDER, FACTORS, GRAY, SIGMA_PX, SOLARIZE, NUM_PARAMS = 0, 1, 5, 6, 7, 8


@dataclass(frozen=True)
class Augmentation:
    """Distribution of one view's augmentation, with torchvision's definition of each operation.

    Attributes:
        gray_first: Use the order of MoCo v1 (gray, jitter) instead of that of v2 (jitter, gray,
            blur, solarize).
        crop_px: Side of the resized crop.
        crop_scale: Range of the crop's fraction of the image area.
        crop_ratio: Range of the crop's aspect ratio, width / height.
        flip_prob: Probability of a horizontal flip.
        jitter_prob: Probability of color jitter.
        jitter: Strength s of brightness, contrast and saturation (factor in 1 ± s) and of hue
            (shift in ± s of the color circle).
        gray_prob: Probability of conversion to grayscale.
        blur_prob: Probability of Gaussian blur.
        blur_sigma_px: Range of the blur's standard deviation.
        solarize_prob: Probability of solarization.
    """

    gray_first: bool
    crop_px: int
    crop_scale: tuple[float, float]
    crop_ratio: tuple[float, float]
    flip_prob: float
    jitter_prob: float
    jitter: tuple[float, float, float, float]
    gray_prob: float
    blur_prob: float
    blur_sigma_px: tuple[float, float]
    solarize_prob: float = 0.0


def sample_box(
    rng: Random, size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Sample a crop `(left, top, right, bottom)` of an image of `size` (W, H).

    The distribution is that of torchvision's RandomResizedCrop: the area and the logarithm of the
    aspect ratio are uniform. If none of ten samples fits into the image, the largest center crop
    with an aspect ratio in the range is returned.
    """
    W, H = size
    u = [rng.random() for _ in range(2 * CROP_TRIES + 2)]
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for t in range(CROP_TRIES):
        area = W * H * (scale[0] + (scale[1] - scale[0]) * u[2 * t])
        aspect = math.exp(low + (high - low) * u[2 * t + 1])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= W and 0 < h <= H:
            left, top = int(u[-2] * (W - w + 1)), int(u[-1] * (H - h + 1))
            return left, top, left + w, top + h
    w, h = W, H
    if W / H < ratio[0]:
        h = round(W / ratio[0])
    elif W / H > ratio[1]:
        w = round(H * ratio[1])
    left, top = (W - w) // 2, (H - h) // 2
    return left, top, left + w, top + h


def sample_colors(rng: Random, aug: Augmentation) -> list[float]:
    """Sample the color parameters (NUM_PARAMS,) of one view."""
    u = [rng.random() for _ in range(9)]
    jittered = u[0] < aug.jitter_prob and any(aug.jitter)
    order = int(u[1] * len(ORDERS)) if jittered else -1
    factors = [1 + s * (2 * v - 1) for s, v in zip(aug.jitter[:HUE], u[2:5], strict=True)]
    hue = aug.jitter[HUE] * (2 * u[5] - 1)
    gray = float(u[6] < aug.gray_prob)
    low, high = aug.blur_sigma_px
    sigma = low + (high - low) * u[8] if u[7] < aug.blur_prob else 0.0
    # Sample only if solarization is enabled, so that recipes without it keep their random numbers.
    solarized = aug.solarize_prob > 0 and rng.random() < aug.solarize_prob
    return [order, *factors, hue, gray, sigma, float(solarized)]


class View(NamedTuple):
    """Augmentation parameters of one view."""

    box: tuple[int, int, int, int]  # left, top, right, bottom of the crop in pixels of the image
    flip: bool
    colors: list[float]  # (NUM_PARAMS,)


def sample_view(rng: Random, size: tuple[int, int], aug: Augmentation) -> View:
    """Sample a view of an image of `size` (W, H).

    The number of calls of `rng` depends only on `aug`.
    """
    box = sample_box(rng, size, aug.crop_scale, aug.crop_ratio)
    return View(box, rng.random() < aug.flip_prob, sample_colors(rng, aug))


def crop_view(image: Tensor, view: View, crop_px: int) -> Tensor:
    """Crop, resize and flip an image (H, W, 3) uint8 to a view (3, P, P) uint8.

    Resizing uses torch's antialiased bilinear filter on uint8. It is faster than PIL's, which the
    official code uses, and differs from it by rounding, at most 1 of 255.
    """
    left, top, right, bottom = view.box
    crop = image[top:bottom, left:right].permute(2, 0, 1)[None]
    resized = F.interpolate(crop, (crop_px, crop_px), mode="bilinear", antialias=True)[0]
    return resized.flip(-1) if view.flip else resized


def apply_colors(
    pixels: Tensor,
    params: Tensor,
    aug: Augmentation,
    mean: Sequence[float] = (0.0, 0.0, 0.0),
    std: Sequence[float] = (1.0, 1.0, 1.0),
) -> Tensor:
    """Apply the color transforms to a batch of views and normalize it.

    Deviation: values stay float between the operations (PIL, in the official code, truncates to
    integers each time), and the blur is a Gaussian (PIL's is three box filters).

    Args:
        pixels: Crops (N, 3, P, P) uint8 on the training device.
        params: Color parameters (N, NUM_PARAMS) float32 on the CPU.
        aug: Augmentation that `params` were sampled from; determines the order of the operations.
        mean: Mean of each channel, for values in 0..1.
        std: Standard deviation of each channel, for values in 0..1.

    Returns:
        Views (N, 3, P, P) float32, which are in 0..1 before normalization.
    """
    out = torch.empty_like(pixels, dtype=torch.float32)
    views = params.tolist()
    sequences = [operations(int(view[ORDER]), bool(view[GRAY]), aug) for view in views]
    if pixels.device.type == "cpu" and opencv.AVAILABLE:
        factors = [view[FACTORS:GRAY] for view in views]
        sigmas = [view[SIGMA_PX] for view in views]
        solarized = [bool(view[SOLARIZE]) for view in views]
        to_normal = itertools.repeat(opencv.normalization_map(mean, std))
        work = (
            opencv.color_view,
            pixels.numpy(),
            sequences,
            factors,
            sigmas,
            solarized,
            to_normal,
            out.numpy(),
        )
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for _ in (pool.map if torch.get_num_threads() > 1 else map)(*work):
                pass
        return out
    sigma_px = params[:, SIGMA_PX].view(-1, 1, 1, 1)
    factor_columns = params[:, FACTORS:GRAY].T.reshape(GRAY - FACTORS, -1, 1, 1, 1)
    factor_columns = to_device_async(factor_columns, out.device)
    x = out.copy_(pixels).div_(255)
    _jitter(x, sequences, factor_columns)
    _apply(gaussian_blur, x, [n for n, view in enumerate(views) if view[SIGMA_PX] > 0], sigma_px)
    _apply(solarize, x, [n for n, view in enumerate(views) if view[SOLARIZE]])
    return normalize(x, mean, std)


def _jitter(x: Tensor, sequences: list[tuple[int, ...]], factors: Tensor) -> None:
    """Apply jitter and grayscale in place to views (N, 3, P, P) in 0..1.

    In round i, the views that share their i-th operation are processed together.
    """
    for i in range(max(map(len, sequences))):
        views_of: dict[int, list[int]] = {}
        for n, sequence in enumerate(sequences):
            if i < len(sequence):
                views_of.setdefault(sequence[i], []).append(n)
        for op, views in views_of.items():
            if op == GRAYSCALE:
                _apply(grayscale, x, views)
            else:
                _apply(_JITTERS[op], x, views, factors[op])


def _apply(
    operation: Callable[..., None], x: Tensor, views: list[int], *parameters: Tensor
) -> None:
    """Apply an operation in place to the given views of `x` (N, 3, P, P).

    Each parameter is a tensor (N, 1, 1, 1) with one value per view, on the CPU or on the device.
    """
    if len(views) == len(x):
        operation(x, *parameters)
    elif views:
        here = torch.tensor(views)
        index = to_device_async(here, x.device)
        selected = x[index]
        operation(selected, *(p[here if p.is_cpu else index] for p in parameters))
        x[index] = selected


def operations(order: int, gray: bool, aug: Augmentation) -> tuple[int, ...]:
    """Return the color operations of one view, in order.

    Saturation and hue do not change a gray image, so they are omitted after GRAYSCALE.

    Args:
        order: Index into ORDERS, or -1 for no jitter.
        gray: Convert the view to grayscale.
        aug: Augmentation of the view.
    """
    jitters = [op for op in ORDERS[order] if aug.jitter[op] > 0] if order >= 0 else []
    if not gray:
        return tuple(jitters)
    if aug.gray_first:
        return GRAYSCALE, *(op for op in jitters if op not in (SATURATION, HUE))
    return *jitters, GRAYSCALE


def luma(x: Tensor) -> Tensor:
    """Return the luma (N, 1, H, W) of RGB images (N, 3, H, W)."""
    r, g, b = x.unbind(dim=1)
    return (LUMA[0] * r).add_(g, alpha=LUMA[1]).add_(b, alpha=LUMA[2]).unsqueeze(1)


def grayscale(x: Tensor) -> None:
    """Convert images to grayscale in place.

    In this and the following operations, images are (N, 3, H, W) in 0..1, and parameters are
    (N, 1, 1, 1) with one value per image.
    """
    x.copy_(luma(x))


def adjust_brightness(x: Tensor, factor: Tensor) -> None:
    """Multiply all pixels by `factor`, in place."""
    x.mul_(factor).clamp_(0, 1)


def adjust_contrast(x: Tensor, factor: Tensor) -> None:
    """Multiply the distance of pixels from the mean gray value by `factor`, in place."""
    mean = luma(x.mean(dim=(2, 3), keepdim=True))  # (N, 1, 1, 1)
    x.mul_(factor).add_(mean * (1 - factor)).clamp_(0, 1)


def adjust_saturation(x: Tensor, factor: Tensor) -> None:
    """Multiply the distance of pixels from the grayscale image by `factor`, in place."""
    x.lerp_(luma(x), 1 - factor).clamp_(0, 1)


def adjust_hue(x: Tensor, shift: Tensor) -> None:
    """Shift the hue in place by the fraction `shift` of the color circle, in -1..1.

    Value and saturation of HSV do not change. V is the largest channel and D its distance to the
    smallest. The distance of the hue from red, in sixths of the circle, is
    1 + (g + b - r - smallest) / D, on the side that the sign of g - b gives. With h the new hue in
    0..1, the channels are V - D clamp(2 - |6h - 3|, 0, 1) for red and
    V - D clamp(|6h - c| - 1, 0, 1) for green (c = 2) and blue (c = 4).
    """
    r, g, b = x.unbind(dim=1)  # (N, H, W)
    V = torch.maximum(torch.maximum(r, g), b)
    low = torch.minimum(torch.minimum(r, g), b)
    D = V - low
    distance = (g + b).sub_(r).sub_(low).div_(D.clamp(min=1e-12)).add_(1)
    h = torch.copysign(distance, g - b).div_(6).add_(shift.view(-1, 1, 1) + 2).frac_()
    # clamp(t - 1, 0, 1) = clamp(t, 1, 2) - 1, and factoring out the 6 saves further operations.
    top = V + D
    torch.addcmul(V.sub_(D, alpha=2), (h - 1 / 2).abs_().clamp_(1 / 6, 1 / 3), D, value=6, out=r)
    torch.addcmul(top, (h - 1 / 3).abs_().clamp_(1 / 6, 1 / 3), D, value=-6, out=g)
    torch.addcmul(top, h.sub_(2 / 3).abs_().clamp_(1 / 6, 1 / 3), D, value=-6, out=b)


def gaussian_blur(x: Tensor, sigma_px: Tensor) -> None:
    """Convolve each image in place with a Gaussian of standard deviation `sigma_px` > 0.

    The kernel extends to three standard deviations, and the border is replicated as in PIL.
    `sigma_px` is on the CPU, which computes the kernels.
    """
    N, C, H, W = x.shape
    sigmas = sigma_px.flatten().tolist()
    R = math.ceil(3 * max(sigmas))
    kernels = []
    for sigma in sigmas:
        half = [
            math.exp(-0.5 * (i / sigma) ** 2) if i < 3 * sigma + 1 else 0.0 for i in range(R + 1)
        ]
        total = 2 * sum(half) - half[0]
        kernels.append([weight / total for weight in [*half[:0:-1], *half]])
    kernel = to_device_async(
        torch.tensor(kernels).view(N, 1, 1, -1).repeat_interleave(C, dim=0), x.device
    )
    padded = F.pad(x, (R, R, 0, 0), mode="replicate").view(1, N * C, H, -1)
    rows = F.conv2d(padded, kernel, groups=N * C).view(N, C, H, W)
    padded = F.pad(rows, (0, 0, R, R), mode="replicate").view(1, N * C, -1, W)
    x.copy_(F.conv2d(padded, kernel.mT, groups=N * C).view(N, C, H, W))


def solarize(x: Tensor) -> None:
    """Invert values of at least 0.5 in place, as PIL inverts values of at least 128 of 255."""
    torch.minimum(x, 1 - x, out=x)


def normalize(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalize images (N, 3, H, W) in 0..1 in place to `(x - mean) / std` per channel."""
    shift, scale = (
        to_device_async(torch.as_tensor(values, dtype=x.dtype).view(1, 3, 1, 1), x.device)
        for values in (mean, std)
    )
    return x.sub_(shift).div_(scale)


_JITTERS = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
