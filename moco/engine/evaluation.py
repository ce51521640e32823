"""Outputs of a network for center crops of images, for evaluation.

n images in a batch, P crop size in pixels.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from moco.common import distributed
from moco.common.async_copy import to_device_async
from moco.common.errors import DataError, UserError
from moco.common.progress import Progress
from moco.data.augment import normalize
from moco.data.images import Images
from moco.engine.loader import batch_loader

IMAGENET_RATIO = 256 / 224  # shorter side of the resized image / side of the crop


class CenterCrop(NamedTuple):
    """Preprocessing of an image for evaluation.

    The shorter side is resized to `resize_px`; the center of `crop_px` x `crop_px` is cropped and
    normalized by `mean` and `std` (RGB, for values in 0..1).
    """

    resize_px: int
    crop_px: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def sized(
        cls,
        crop_px: int,
        resize_px: int,
        training_crop_px: int,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> "CenterCrop":
        """Replace a crop of 0 by the training crop, and a resize of 0 by 256/224 of the crop.

        Raises:
            UserError: If the crop is larger than the resized image.
        """
        crop = crop_px or training_crop_px
        resize = resize_px or round(crop * IMAGENET_RATIO)
        if not resize >= crop > 0:
            raise UserError(
                f"RESIZE_PX: a crop of {crop} px does not fit an image resized to {resize} px; "
                f"set RESIZE_PX to at least {crop}"
            )
        return cls(resize, crop, tuple(mean), tuple(std))


class CenterBatch(NamedTuple):
    """Center crops (n, 3, P, P) uint8, or the reason why an image could not be decoded."""

    pixels: Tensor
    bad: str | None = None


class CenterBatches(torch.utils.data.Dataset[CenterBatch]):
    """Dataset of center crops, indexed by all indices of a batch at once.

    Bitwise identical to torchvision's `Resize(resize_px)` and `CenterCrop(crop_px)` on PIL images.

    A decoding error is returned instead of raised, because an exception in a worker would reach the
    training process as a traceback in a string.

    Args:
        images: Source of the images.
        resize_px: Length to which the shorter side of an image is resized, at least `crop_px`.
        crop_px: Side P of the crop.
    """

    def __init__(self, images: Images, resize_px: int, crop_px: int) -> None:
        self._images, self._resize_px, self._crop_px = images, resize_px, crop_px

    def __getitems__(self, indices: Sequence[int]) -> CenterBatch:
        """Return the batch in the order of `indices`."""
        try:
            return CenterBatch(torch.stack([self._crop(index) for index in indices]))
        except DataError as error:
            return CenterBatch(torch.empty(0), str(error))

    def _crop(self, index: int) -> Tensor:
        """Return a crop (3, P, P) uint8, without the seconds in which torchvision is imported.

        The longer side is truncated, and the offset of the crop is rounded half to even.
        """
        image = Image.fromarray(self._images.read(index).numpy())
        short, P = min(image.size), self._crop_px
        W, H = (int(self._resize_px * side / short) for side in image.size)
        if (W, H) != image.size:
            image = image.resize((W, H), Image.Resampling.BILINEAR)
        left, top = round((W - P) / 2), round((H - P) / 2)
        crop = image.crop((left, top, left + P, top + P))
        return torch.from_numpy(np.array(crop)).permute(2, 0, 1)


def iterate_outputs(
    network: Callable[[Tensor], Tensor],
    images: Images,
    crop: CenterCrop,
    mine: Sequence[int],
    batch_size: int,
    device: torch.device,
    workers: int,
    timeout_seconds: int,
    verb: str,
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the indices of each batch and the network's output (n, ...), without gradients.

    Args:
        network: Function of normalized images (n, 3, P, P) on `device`.
        images: All images.
        crop: Preprocessing of an image.
        mine: Indices of this process's images.
        batch_size: Number of images per batch.
        device: Device of the network.
        workers: See `moco.engine.loader.batch_loader`.
        timeout_seconds: See `moco.engine.loader.batch_loader`.
        verb: Label of the progress bar.

    Raises:
        DataError: On all processes, if one of them could not decode an image; the message of that
            process names the image.
    """
    bad = None
    crops = CenterBatches(images, crop.resize_px, crop.crop_px)
    batches = [list(mine[first : first + batch_size]) for first in range(0, len(mine), batch_size)]
    loader = batch_loader(crops, batches, device, workers, timeout_seconds)
    with Progress(len(mine), verb, "img", silent=not distributed.is_main()) as bar:
        for indices, batch in zip(batches, loader, strict=True):
            bad = bad or batch.bad
            if bad is None:
                with torch.inference_mode():
                    x = normalize(
                        to_device_async(batch.pixels, device).float() / 255, crop.mean, crop.std
                    )
                    result = network(x)
                yield indices, result
            bar.update(len(indices))
    if distributed.max_over_ranks(int(bad is not None)):
        raise DataError(bad or "another process found an image that cannot be decoded")
