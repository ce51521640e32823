"""Datasets of augmented views and of center crops, and the images of each training step.

An item is (epoch, index of an image, view), with view 0 for the query and 1 for the key. Its crop
and colors are a function of the item and the seed, so they depend neither on the number of
data-loader workers, nor on the batch, nor on the process that computes them.

I number of items, P crop size in pixels.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from moco.common.errors import DataError
from moco.data.augment import Augmentation, crop_view, sample_view
from moco.data.images import Images, Order

REPLACEMENT_TRIES = 20
_VIEWS, _REPLACEMENT = range(2)  # independent random streams of one (seed, epoch, index)

Position = tuple[int, int]  # (epoch, index into the images)
Item = tuple[int, int, int]  # (epoch, index into the images, view)


class Batch(NamedTuple):
    """Crops and color parameters of I items, in the order of the items."""

    pixels: Tensor  # (I, 3, P, P) uint8
    params: Tensor  # (I, NUM_PARAMS) float32
    bad: list[str]  # one message per image that could not be decoded, starting with its name
    complete: bool = True  # False if a bad image was not replaced; `pixels` is empty then


class Views(torch.utils.data.Dataset[Batch]):
    """Dataset of augmented crops, indexed by all items of a batch at once.

    Args:
        images: Source of the images.
        aug: Augmentation of the views.
        seed: Seed that, together with an item, determines the item's augmentation.
        skip_bad: Replace an image that cannot be decoded by another one, chosen by (seed, index).
            Otherwise the batch is returned incomplete, because an exception raised in a worker
            would reach the training process as a traceback in a string.
        cache_bytes: Memory for decoded images in this process.
        second: Augmentation of view 1, with the same crop size; `aug` if None.
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
        """Return a batch; each image is decoded once, and equal items are computed once."""
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
            # All views of an image share one random stream, so earlier views are sampled too.
            for view in range(max(views) + 1):
                sampled = sample_view(rng, (W, H), self._augs[view])
                if view in views:
                    crop = crop_view(image, sampled, P)
                    for row in views[view]:
                        pixels[row], colors[row] = crop, sampled.colors
        return Batch(pixels, torch.tensor(colors), bad)

    def _image(self, epoch: int, index: int, bad: list[str]) -> Tensor | None:
        """Return an image, a replacement, or None; errors are appended to `bad`."""
        try:
            return self._decoded(index)
        except DataError as error:
            bad.append(str(error))
        if self._skip_bad:
            # The replacement is the same in every epoch: a memory bank has one entry per image.
            others = _generator(self._seed, 0, index, _REPLACEMENT)
            for _ in range(REPLACEMENT_TRIES):
                try:
                    return self._decoded(int(others.random() * len(self)))
                except DataError as error:
                    bad.append(str(error))
        return None

    def _decoded(self, index: int) -> Tensor:
        """Return an image (H, W, 3) uint8, decoded or from the cache."""
        image = self._cache.get(index)
        if image is None:
            image = self._images.read(index)
            if image.nbytes <= self._cache_bytes:
                self._cache_bytes -= image.nbytes
                self._cache[index] = image
        return image


def positions_of_steps(
    images: Images, batch: int, seed: int, start: int, stop: int
) -> Iterator[list[Position]]:
    """Yield the positions of each step, for all processes together.

    The order of an epoch is that of `images.epoch_order`; the incomplete last batch is dropped.

    Args:
        images: Source of at least `batch` images.
        batch: Number of images per step of all processes together.
        seed: Seed of the order.
        start: First step.
        stop: Step after the last one.
    """
    order: Order | None = None
    for step in range(start, stop):
        epoch, step_in_epoch = divmod(step, len(images) // batch)
        if order is None or step_in_epoch == 0:
            order = images.epoch_order(seed, epoch)
        first = step_in_epoch * batch
        yield [(epoch, index) for index in order[first : first + batch].tolist()]


def _generator(seed: int, epoch: int, index: int, stream: int) -> Random:
    """Return an independent generator for each combination; NumPy's are slower to seed."""
    return Random(f"{seed} {epoch} {index} {stream}")
