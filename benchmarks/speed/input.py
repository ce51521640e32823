"""Speed of the input pipeline: two augmented views of a JPEG, in one process and thread."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.speed import reference
from benchmarks.speed.measure import Row, Setting, Timing, compare, interleaved
from moco.data.augment import Augmentation, apply_colors
from moco.data.images import find_images, open_images
from moco.data.views import Views
from moco.pretraining.config import default_cfg
from moco.pretraining.run import augmentations_from

BATCH = 16


def views(setting: Setting) -> list[Row]:
    """Measure files → two normalized views; ours also without colors, which a GPU can apply."""
    rows, root = [], photographs(setting)
    paths = find_images(root)
    W, H = np.mean([Image.open(path).size for path in paths], axis=0)
    kib = np.mean([path.stat().st_size for path in paths]) / 1024
    of = f"{len(paths)} files, in the mean {W:.0f} x {H:.0f} px and {kib:.0f} KiB"
    for kind in ("v1", "v2"):
        aug, _ = augmentations_from(default_cfg(kind))
        contenders: dict[str, Callable[[], object]] = {
            "ours": partial(our_loader, root, aug, with_colors=True),
            "colors left to the device": partial(our_loader, root, aug, with_colors=False),
            "official code": partial(list, reference.loader(str(root), kind, BATCH)),
        }
        found = interleaved(contenders, setting.rounds)
        sides = {name: Timing(t.seconds / len(paths), t.noise) for name, t in found.items()}
        for name, goal in (("ours", 3.0), ("colors left to the device", 4.0)):
            rows.append(
                compare(f"two views of a JPEG, {kind}, {name}; {of}", sides, name, goal=goal)
            )
    return rows


def photographs(setting: Setting) -> Path:
    """Make a folder `0/*.jpg` of the user's images or of generated images."""
    count = 4 if setting.quick else 96
    folder = setting.scratch / "images" / "0"
    folder.mkdir(parents=True)
    for i in range(0 if setting.images else count):
        write_image(folder / f"{i:03d}.jpg", (640, 480), seed=i)
    for i, path in enumerate(find_images(setting.images)[:count] if setting.images else ()):
        (folder / f"{i:03d}{path.suffix}").symlink_to(path.resolve())
    return folder.parent


def write_image(path: Path, size: tuple[int, int], seed: int) -> None:
    """Write noise with the spectrum of a photograph as a JPEG file of `size` (width, height)."""
    W, H = size
    frequencies = np.hypot(np.fft.fftfreq(H)[:, None], np.fft.rfftfreq(W))
    noise = np.random.default_rng(seed).normal(size=(3, H, W))
    noise[1:] = 0.3 * noise[1:] + noise[:1]  # correlated channels
    spectrum = np.fft.rfft2(noise) / np.maximum(frequencies, 1 / W) ** 1.2
    spectrum[:, 0, 0] = 0
    shape = np.fft.irfft2(spectrum, s=(H, W))
    pixels = np.clip(128 + 56 * shape / shape.std((1, 2), keepdims=True), 0, 255)
    Image.fromarray(pixels.astype(np.uint8).transpose(1, 2, 0)).save(path, quality=95)


def our_loader(root: Path, aug: Augmentation, *, with_colors: bool) -> None:
    """Make two views of every image with pre-training's data pipeline."""
    images = open_images(root)
    views = Views(images, aug, seed=0)
    for first in range(0, len(images), BATCH):
        indices = range(first, min(first + BATCH, len(images)))
        batch = views.__getitems__([(0, i, view) for view in (0, 1) for i in indices])
        if with_colors:
            apply_colors(batch.pixels, batch.params, aug, reference.MEAN, reference.STD)


CASES = {"views": views}
