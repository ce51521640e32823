"""Two augmented views of a JPEG, decoded in one process with one thread."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.speed import reference
from benchmarks.speed.measure import Setting, interleaved
from benchmarks.speed.results import Result, compare
from moco.data.augment import V1, V2, Augmentation, apply_colors
from moco.data.images import find_images, open_images
from moco.data.views import Views

IMAGENET_PX = (500, 375)  # of a typical image of ImageNet
BATCH = 16


def two_views(setting: Setting, goal: str, with_colors: bool) -> list[Result]:
    """With colors, or without those that the training device can compute."""
    rows = []
    root = photographs(setting)
    paths = find_images(root)
    W, H = np.mean([Image.open(path).size for path in paths], axis=0)
    kib = np.mean([path.stat().st_size for path in paths]) / 1024
    of = f"{len(paths)} files, in the mean {W:.0f} x {H:.0f} px and {kib:.0f} KiB"
    for kind, aug in (("v1", V1), ("v2", V2)):
        contenders: dict[str, Callable[[], object]] = {
            "reference": partial(list, reference.loader(str(root), kind, BATCH)),
            "ours": partial(_our_loader, root, aug, with_colors),
        }
        if with_colors:
            with suppress(ImportError):
                contenders["lightly"] = partial(list, _lightly_loader(root, kind))
        found = interleaved(contenders, setting.rounds)
        seconds = {name: value / len(paths) for name, value in found.items()}
        rows.append(compare(goal, seconds, sizes=f"{kind}; {of}"))
        if with_colors:
            rows.append(compare("lightly views", seconds, reference="lightly", sizes=kind))
    return rows


@cache
def photographs(setting: Setting) -> Path:
    """A folder `0/*.jpg` of the user's images, or of generated ones."""
    count = 4 if setting.quick else 48
    folder = setting.scratch / "images" / "0"
    folder.mkdir(parents=True)
    if setting.images is None:
        generate_images(folder, count)
    else:
        for i, path in enumerate(find_images(setting.images)[:count]):
            (folder / f"{i:03d}{path.suffix}").symlink_to(path.resolve())
    return folder.parent


def generate_images(folder: Path, count: int) -> None:
    """JPEG files of ImageNet's typical size in pixels and bytes, with a photograph's spectrum."""
    W, H = IMAGENET_PX
    rng = np.random.default_rng(0)
    fy, fx = np.fft.fftfreq(H)[:, None], np.fft.rfftfreq(W)[None]
    spectrum = 1 / np.maximum(np.hypot(fx, fy), 1 / W) ** 1.2
    for i in range(count):
        noise = rng.normal(size=(3, H, W))
        shape = np.fft.irfft2(np.fft.rfft2(noise) * spectrum, s=(H, W))
        shape[1:] = 0.3 * shape[1:] + shape[:1]  # channels that resemble each other
        shape = (shape - shape.mean((1, 2), keepdims=True)) / shape.std((1, 2), keepdims=True)
        pixels = np.clip(128 + 56 * shape, 0, 255).astype(np.uint8).transpose(1, 2, 0)
        Image.fromarray(pixels).save(folder / f"{i:03d}.jpg", quality=95)


def _our_loader(root: Path, aug: Augmentation, with_colors: bool) -> None:
    images = open_images(root)
    views = Views(images, aug, seed=0)
    for first in range(0, len(images), BATCH):
        indices = range(first, min(first + BATCH, len(images)))
        batch = views.__getitems__([(0, i, view) for view in (0, 1) for i in indices])
        if with_colors:
            apply_colors(batch.pixels, batch.params, aug, reference.MEAN, reference.STD)


def _lightly_loader(root: Path, kind: str) -> Iterable[object]:
    """Two views by lightly's transforms, without its own progress and command line."""
    from lightly.transforms import MoCoV1Transform, MoCoV2Transform

    transform = MoCoV1Transform() if kind == "v1" else MoCoV2Transform()
    dataset = reference.ImageFolder(str(root), transform)
    return torch.utils.data.DataLoader(dataset, batch_size=BATCH)
