"""Evaluation on labeled images: what a network gives for their center crops.

n images of a batch, P crop size in pixels.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moco.common import distributed
from moco.common.errors import DataError, UserError
from moco.data.augment import normalize
from moco.data.images import Images
from moco.data.views import CenterCrops

IMAGENET_RATIO = 256 / 224  # of the resized image's shorter side to the crop's


@dataclass(frozen=True)
class CenterCrop:
    """How images reach the network.

    The shorter side is resized to `resize_px`, the center `crop_px` x `crop_px` is taken and
    normalized by `mean` and `std` (RGB, of 0..1).

    Raises:
        UserError: the crop is larger than the image.
    """

    resize_px: int
    crop_px: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.resize_px >= self.crop_px > 0:
            raise UserError(
                f"RESIZE_PX: a crop of {self.crop_px} px does not fit an image resized to "
                f"{self.resize_px} px; set it at least as large"
            )

    @classmethod
    def sized(
        cls,
        crop_px: int,
        resize_px: int,
        training_crop_px: int,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> "CenterCrop":
        """With 0 replaced: by the training crop, and by 256/224 of the crop."""
        crop = crop_px or training_crop_px
        return cls(resize_px or round(crop * IMAGENET_RATIO), crop, tuple(mean), tuple(std))


class Centers(NamedTuple):
    """Center crops (n, 3, P, P) uint8; or why an image could not be decoded."""

    pixels: Tensor
    bad: str | None = None


class CenterBatches(torch.utils.data.Dataset[Centers]):
    """Batches of `moco.data.views.CenterCrops`; called with the indices of a batch at once.

    An exception raised in a worker would reach the training process as a traceback in a string.
    """

    def __init__(self, images: Images, resize_px: int, crop_px: int) -> None:
        self._crops = CenterCrops(images, resize_px, crop_px)

    def __len__(self) -> int:
        return len(self._crops)

    def __getitems__(self, indices: Sequence[int]) -> Centers:
        """The batch, in the order of `indices`."""
        try:
            return Centers(torch.stack([self._crops[index] for index in indices]))
        except DataError as error:
            return Centers(torch.empty(0), str(error))


def outputs(
    network: Callable[[Tensor], Tensor],
    images: Images,
    crop: CenterCrop,
    batches: Sequence[Sequence[int]],
    device: torch.device,
    load: Callable[[Any, Any], Iterator[Centers]],
) -> Iterator[tuple[list[int], Tensor]]:
    """The network's output (n, ...) for each batch of indices, without gradients.

    Args:
        network: takes normalized images (n, 3, P, P) on `device`.
        batches: of this process.
        load: makes a loader of a dataset and a batch sampler.

    Raises:
        DataError: on all processes where one could not decode an image, naming it there.
    """
    bad = None
    crops = CenterBatches(images, crop.resize_px, crop.crop_px)
    for indices, batch in zip(batches, load(crops, batches), strict=True):
        bad = bad or batch.bad
        if bad is None:
            with torch.inference_mode():
                x = normalize(batch.pixels.to(device).float() / 255, crop.mean, crop.std)
                result = network(x)
            yield list(indices), result
    if distributed.highest(int(bad is not None)):
        raise DataError(bad or "another process found an image that cannot be decoded")


def in_batches(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    """The indices in batches, the last one incomplete."""
    return [indices[first : first + size] for first in range(0, len(indices), size)]
