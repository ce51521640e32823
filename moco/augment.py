"""Two random views of a picture (sec. 3.3), drawn per (seed, epoch, index).

Each view is made in two parts. Crop, resizing and flip come first, picture by picture, on uint8:
the only place where pictures of different sizes meet. The colours follow, a whole batch at once, on
the training device. What is done to a view is drawn beforehand from a generator of its
own, so neither the number of workers nor the batch changes it.

N batch, P crop size in pixels, H W pixels.
"""

import itertools
import math
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

VIEWS = 2  # query, key
CROP_TRIES = 10  # as torchvision's RandomResizedCrop
BRIGHTNESS, CONTRAST, SATURATION, HUE, GRAYSCALE = range(5)
ORDERS = tuple(itertools.permutations((BRIGHTNESS, CONTRAST, SATURATION, HUE)))
# Columns of a view's colour parameters. ORDER is an index into ORDERS, -1 for no jitter; the next
# four are indexed by BRIGHTNESS..HUE; GRAY is 0 or 1; SIGMA_PX is 0 for no blur.
ORDER, FACTORS, GRAY, SIGMA_PX, NUM_PARAMS = 0, 1, 5, 6, 7
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, PIL's and torchvision's weights


@dataclass(frozen=True)
class Augmentation:
    """What is drawn for a view. The operations' meaning is torchvision's.

    Attributes:
        gray_first: v1's order: grey, jitter. Otherwise v2's: jitter, grey, blur.
        jitter: strengths of brightness, contrast, saturation (factor in 1 ± s) and hue (shift of
            ± s of the circle).
        crop_scale: range of the crop's share of the area. crop_ratio: of its width / height.
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
V2 = Augmentation(
    gray_first=False,
    crop_px=224,
    crop_scale=(0.2, 1.0),
    crop_ratio=(3 / 4, 4 / 3),
    flip_prob=0.5,
    jitter_prob=0.8,
    jitter=(0.4, 0.4, 0.4, 0.1),
    gray_prob=0.2,
    blur_prob=0.5,
    blur_sigma_px=(0.1, 2.0),
)


def draw_box(
    rng: Random, size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """A random crop ``(left, top, right, bottom)`` of a picture of ``size`` (W, H).

    As torchvision's RandomResizedCrop: area uniform, log of the aspect ratio uniform, ten tries,
    then the largest centre crop with an aspect ratio in the range.
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


def draw_colors(rng: Random, aug: Augmentation) -> list[float]:
    """The colour parameters (NUM_PARAMS,) of one view."""
    u = [rng.random() for _ in range(9)]
    jittered = u[0] < aug.jitter_prob and any(aug.jitter)
    order = int(u[1] * len(ORDERS)) if jittered else -1
    factors = [1 + s * (2 * v - 1) for s, v in zip(aug.jitter[:HUE], u[2:5], strict=True)]
    hue = aug.jitter[HUE] * (2 * u[5] - 1)
    gray = float(u[6] < aug.gray_prob)
    low, high = aug.blur_sigma_px
    sigma = low + (high - low) * u[8] if u[7] < aug.blur_prob else 0.0
    return [order, *factors, hue, gray, sigma]


def draw_views(
    rng: Random, picture: Tensor, aug: Augmentation, pixels: Tensor, params: Tensor
) -> None:
    """Two views of a picture (H, W, 3) uint8, put into the two rows of the other tensors.

    Resizing is torch's antialiased bilinear filter on uint8, equal to PIL's in the official code
    up to 1 of 255 by rounding, and faster.

    Args:
        pixels: (2, 3, P, P) uint8, gets the crops.
        params: (2, NUM_PARAMS) float32, gets the colour parameters.
    """
    H, W, _ = picture.shape
    size = (aug.crop_px, aug.crop_px)
    for view in range(VIEWS):
        left, top, right, bottom = draw_box(rng, (W, H), aug.crop_scale, aug.crop_ratio)
        crop = picture[top:bottom, left:right].permute(2, 0, 1)[None]
        resized = F.interpolate(crop, size, mode="bilinear", antialias=True)[0]
        flip = rng.random() < aug.flip_prob
        pixels[view] = resized.flip(-1) if flip else resized
        params[view] = torch.tensor(draw_colors(rng, aug))


def apply_colors(pixels: Tensor, params: Tensor, aug: Augmentation) -> Tensor:
    """The colour part of a batch of views.

    Deviation: values stay float between the operations (PIL, in the official code, cuts off the
    fraction each time), and the blur is a Gaussian (PIL's is three box filters).

    Args:
        pixels: (N, 3, P, P) uint8 on the training device.
        params: (N, NUM_PARAMS) float32 on the CPU.

    Returns:
        (N, 3, P, P) float32 in 0..1.
    """
    # Views with the same operations become neighbours in x and are done together; on a CPU a group
    # of small pictures stays in the cache.
    groups: dict[tuple[int, ...], list[int]] = {}
    for n, (order, gray) in enumerate(params[:, [ORDER, GRAY]].int().tolist()):
        groups.setdefault(operations(order, bool(gray), aug), []).append(n)
    sorting = torch.tensor([n for members in groups.values() for n in members])
    x = pixels[sorting.to(pixels.device)].float().div_(255)
    factors = params[sorting, FACTORS:GRAY].to(pixels.device)
    start = 0
    for chosen, members in groups.items():
        part = slice(start, start + len(members))
        for op in chosen:
            if op == GRAYSCALE:
                grayscale(x[part])
            else:
                _JITTERS[op](x[part], factors[part, op].view(-1, 1, 1, 1))
        start += len(members)
    x = x[sorting.argsort().to(pixels.device)]
    blurred = params[:, SIGMA_PX].nonzero()[:, 0]
    if len(blurred):
        where = blurred.to(pixels.device)
        x[where] = gaussian_blur(x[where], params[blurred, SIGMA_PX])
    return x


def operations(order: int, gray: bool, aug: Augmentation) -> tuple[int, ...]:
    """The operations that change one view's colours, in order; see ORDER and GRAY.

    Saturation and hue leave a grey picture as it is and are left out after GRAYSCALE.
    """
    jitters = [op for op in ORDERS[order] if aug.jitter[op] > 0] if order >= 0 else []
    if not gray:
        return tuple(jitters)
    if aug.gray_first:
        return GRAYSCALE, *(op for op in jitters if op not in (SATURATION, HUE))
    return *jitters, GRAYSCALE


def luma(x: Tensor) -> Tensor:
    """Grey values (N, 1, H, W) of RGB pictures (N, 3, H, W)."""
    r, g, b = x.unbind(dim=1)
    return (LUMA[0] * r).add_(g, alpha=LUMA[1]).add_(b, alpha=LUMA[2]).unsqueeze(1)


def grayscale(x: Tensor) -> None:
    """Grey in place of colours. In place, as the next four.

    Pictures are (N, 3, H, W) in 0..1; factors and shifts, one per picture, are (N, 1, 1, 1).
    """
    x.copy_(luma(x))


def adjust_brightness(x: Tensor, factor: Tensor) -> None:
    """Pixels times ``factor``."""
    x.mul_(factor).clamp_(0, 1)


def adjust_contrast(x: Tensor, factor: Tensor) -> None:
    """Distance from the mean grey value times ``factor``."""
    mean = luma(x).mean(dim=(1, 2, 3), keepdim=True)
    x.mul_(factor).add_(mean * (1 - factor)).clamp_(0, 1)


def adjust_saturation(x: Tensor, factor: Tensor) -> None:
    """Distance from the grey picture times ``factor``."""
    gray = luma(x)
    x.mul_(factor).add_(gray.mul_(1 - factor)).clamp_(0, 1)


def adjust_hue(x: Tensor, shift: Tensor) -> None:
    """Hue moved by ``shift`` parts of the circle; HSV's value and saturation stay.

    With V the largest channel, D its distance to the smallest and h the hue in 0..6, a channel is
    ``V - D clamp(min(t, 4 - t), 0, 1)`` with ``t = (n + h) mod 6`` and n = 5, 3, 1 for r, g, b.
    """
    r, g, b = x.unbind(dim=1)  # (N, H, W)
    value, low = x.amax(dim=1), x.amin(dim=1)
    spread = value - low
    scale = spread.clamp(min=1e-12).reciprocal_()
    h = torch.where(
        value == r,
        (g - b).mul_(scale),
        torch.where(value == g, (b - r).mul_(scale).add_(2), (r - g).mul_(scale).add_(4)),
    )
    h.add_(shift.view(-1, 1, 1), alpha=6)
    for channel, n in enumerate((5, 3, 1)):
        t = (h + n).remainder_(6)
        x[:, channel] = value - torch.minimum(t, 4 - t).clamp_(0, 1).mul_(spread)


def gaussian_blur(x: Tensor, sigma_px: Tensor) -> Tensor:
    """Each picture (N, 3, H, W) convolved with a Gaussian of its own ``sigma_px`` (N,), on the CPU.

    The kernel reaches three of the largest sigmas; beyond the edge pixels are repeated, as in PIL.
    """
    N, C, H, W = x.shape
    radius = max(1, math.ceil(3 * float(sigma_px.max())))
    offsets = torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype)
    kernel = torch.exp(-0.5 * (offsets / sigma_px.view(-1, 1).to(x)) ** 2)
    kernel = kernel / kernel.sum(dim=1, keepdim=True)  # (N, taps)
    for pad, taps in (((radius, radius, 0, 0), (1, -1)), ((0, 0, radius, radius), (-1, 1))):
        padded = F.pad(x, pad, mode="replicate").reshape(N * C, 1, -1, W + pad[0] + pad[1])
        weight = kernel.repeat_interleave(C, dim=0).view(N * C, 1, *taps)
        x = F.conv2d(padded.transpose(0, 1), weight, groups=N * C).view(N, C, H, W)
    return x


def normalize(x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Per-channel ``(x - mean) / std`` of (N, 3, H, W) in 0..1, in place."""
    shape = (1, 3, 1, 1)
    shift, scale = x.new_tensor(mean).view(shape), x.new_tensor(std).view(shape)
    return x.sub_(shift).div_(scale)


_JITTERS = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
