"""What the training process is given: the items of each step, and their crops as tensors.

An item is (epoch, index of an image, view), view 0 for the query and 1 for the key. Its crop and
colors are a function of these and the seed, so neither the number of workers nor the batch, nor
which process makes it, changes it.

I number of items, P crop size in pixels.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from moco.common.errors import DataError
from moco.data.augment import Augmentation, crop_view, draw_view
from moco.data.images import Images, Order

REPLACEMENT_TRIES = 20
_VIEWS, _REPLACEMENT = range(2)  # independent random streams of one (seed, epoch, index)

Position = tuple[int, int]  # (epoch, index into the images)
Item = tuple[int, int, int]  # (epoch, index into the images, view)


class Batch(NamedTuple):
    """What the color part needs of I items, in their order, and which images were replaced."""

    pixels: Tensor  # (I, 3, P, P) uint8, the crops
    params: Tensor  # (I, NUM_PARAMS) float32
    bad: list[str]  # why images could not be decoded, with their names
    complete: bool = True  # False: a bad image was not replaced; there are no pixels


class Views(torch.utils.data.Dataset[Batch]):
    """Batches of augmented crops; indexed by all items of a batch at once.

    Args:
        images: the dataset.
        aug: what to draw; `seed`: with an item the only source of randomness.
        second: what to draw for view 1, with crops of the same side; None: `aug`.
        skip_bad: put another image in the place of one that cannot be decoded, chosen by
            (seed, index); otherwise the batch is incomplete. (An exception raised in a
            worker would reach the training process as a traceback in a string.)
        cache_bytes: memory for decoded images in this process.
    """

    def __init__(
        self,
        images: Images,
        aug: Augmentation,
        seed: int,
        skip_bad: bool = False,
        cache_bytes: int = 0,
        second: Augmentation | None = None,
    ) -> None:
        self._images = images
        self._augs = (aug, second or aug)
        self._seed, self._skip_bad = seed, skip_bad
        self._cache: dict[int, Tensor] = {}
        self._cache_bytes = cache_bytes

    def __len__(self) -> int:
        return len(self._images)

    def __getitems__(self, items: Sequence[Item]) -> Batch:
        """The whole batch. Each image of an epoch is decoded once, each item made once."""
        wanted: dict[Position, dict[int, list[int]]] = {}  # rows of each view of each image
        for row, (epoch, index, view) in enumerate(items):
            wanted.setdefault((epoch, index), {}).setdefault(view, []).append(row)
        P = self._augs[0].crop_px
        pixels = torch.empty(len(items), 3, P, P, dtype=torch.uint8)
        colors: list[list[float]] = [[]] * len(items)
        bad: list[str] = []
        for (epoch, index), views in wanted.items():
            image = self._image(epoch, index, bad)
            if image is None:
                return Batch(torch.empty(0), torch.empty(0), bad, complete=False)
            H, W, _ = image.shape
            rng = _generator(self._seed, epoch, index, _VIEWS)
            # All views of an image come from one stream: those before a wanted one are drawn too.
            for view in range(max(views) + 1):
                drawn = draw_view(rng, (W, H), self._augs[view])
                if view in views:
                    crop = crop_view(image, drawn, P)
                    for row in views[view]:
                        pixels[row], colors[row] = crop, drawn.colors
        return Batch(pixels, torch.tensor(colors), bad)

    def _image(self, epoch: int, index: int, bad: list[str]) -> Tensor | None:
        """The image or its replacement; what went wrong is added to `bad`."""
        try:
            return self._decoded(index)
        except DataError as error:
            bad.append(str(error))
        if self._skip_bad:
            # The same one in every epoch: a memory bank has one entry for both.
            others = _generator(self._seed, 0, index, _REPLACEMENT)
            for _ in range(REPLACEMENT_TRIES):
                try:
                    return self._decoded(int(others.random() * len(self)))
                except DataError as error:
                    bad.append(str(error))
        return None

    def _decoded(self, index: int) -> Tensor:
        """The image (H, W, 3) uint8."""
        image = self._cache.get(index)
        if image is None:
            image = self._images.read(index)
            if image.nbytes <= self._cache_bytes:
                self._cache_bytes -= image.nbytes
                self._cache[index] = image
        return image


class CenterCrops(torch.utils.data.Dataset[Tensor]):
    """The center of each image, (3, P, P) uint8, after resizing its shorter side.

    Bitwise identical to torchvision's `Resize(resize_px)` and `CenterCrop(crop_px)` on PIL
    images: the longer side is truncated, the offset of the crop rounded half to even.

    Args:
        resize_px: at least `crop_px`.
    """

    def __init__(self, images: Images, resize_px: int, crop_px: int) -> None:
        self._images, self._resize_px, self._crop_px = images, resize_px, crop_px

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Tensor:
        image = Image.fromarray(self._images.read(index).numpy())
        short, P = min(image.size), self._crop_px
        W, H = (int(self._resize_px * side / short) for side in image.size)
        if (W, H) != image.size:
            image = image.resize((W, H), Image.Resampling.BILINEAR)
        left, top = round((W - P) / 2), round((H - P) / 2)
        crop = image.crop((left, top, left + P, top + P))
        return torch.from_numpy(np.array(crop)).permute(2, 0, 1)


def positions_of_steps(
    images: Images, batch: int, seed: int, start: int, stop: int
) -> Iterator[list[Position]]:
    """Which images all processes together see in each step from `start` to `stop`.

    Each epoch's order is the images' own (`epoch_order`); its incomplete last batch is dropped.

    Args:
        images: the dataset, at least `batch` of them.
        batch: images per step of all processes together.
    """
    order: Order | None = None
    for step in range(start, stop):
        epoch, step_in_epoch = divmod(step, len(images) // batch)
        if order is None or step_in_epoch == 0:
            order = images.epoch_order(seed, epoch)
        first = step_in_epoch * batch
        yield [(epoch, index) for index in order[first : first + batch].tolist()]


def _generator(seed: int, epoch: int, index: int, stream: int) -> Random:
    """Independent random numbers for each combination; Random is quicker to seed than NumPy's."""
    return Random(f"{seed} {epoch} {index} {stream}")
