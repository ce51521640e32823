"""Evaluation on labeled images: what a network gives for their center crops.

n images of a batch, P crop size in pixels.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moco.common import distributed
from moco.common.errors import DataError, UserError
from moco.common.progress import Progress
from moco.data.augment import normalize
from moco.data.images import Images
from moco.data.views import CenterCrops
from moco.engine.loader import batch_loader

IMAGENET_RATIO = 256 / 224  # of the resized image's shorter side to the crop's


class CenterCrop(NamedTuple):
    """How images reach the network.

    The shorter side is resized to `resize_px`, the center `crop_px` x `crop_px` is taken and
    normalized by `mean` and `std` (RGB, of 0..1).
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
        """With 0 replaced: by the training crop, and by 256/224 of the crop.

        Raises:
            UserError: the crop is larger than the image.
        """
        crop = crop_px or training_crop_px
        resize = resize_px or round(crop * IMAGENET_RATIO)
        if not resize >= crop > 0:
            raise UserError(
                f"RESIZE_PX: a crop of {crop} px does not fit an image resized to {resize} px; "
                "set it at least as large"
            )
        return cls(resize, crop, tuple(mean), tuple(std))


class Centers(NamedTuple):
    """Center crops (n, 3, P, P) uint8; or why an image could not be decoded."""

    pixels: Tensor
    bad: str | None = None


class CenterBatches(CenterCrops):
    """Batches of center crops; called with the indices of a batch at once.

    An exception raised in a worker would reach the training process as a traceback in a string.
    """

    def __getitems__(self, indices: Sequence[int]) -> Centers:
        """The batch, in the order of `indices`."""
        try:
            return Centers(torch.stack([self[index] for index in indices]))
        except DataError as error:
            return Centers(torch.empty(0), str(error))


def outputs(
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
    """Indices of each batch and the network's output (n, ...) for them, without gradients.

    Args:
        network: takes normalized images (n, 3, P, P) on `device`.
        mine: indices of the images of this process.
        workers: see `moco.engine.loader.batch_loader`.
        timeout_seconds: the same.
        verb: for the progress display.

    Raises:
        DataError: on all processes where one could not decode an image, naming it there.
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
                    x = normalize(batch.pixels.to(device).float() / 255, crop.mean, crop.std)
                    result = network(x)
                yield indices, result
            bar.update(len(indices))
    if distributed.highest(int(bad is not None)):
        raise DataError(bad or "another process found an image that cannot be decoded")
