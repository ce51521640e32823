"""Pictures from files: what is a picture, how it is decoded, and in which order pictures come.

Decoding policy, one for every kind of file: the result is 8-bit RGB. Grey, palette and CMYK are
converted by PIL; transparency is dropped; 16-bit grey is scaled to 8 bits; of an animation the
first frame is taken. EXIF orientation is ignored, as in torchvision's and the official loader:
pictures are used as they are stored.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from moco.augment import NUM_PARAMS, VIEWS, Augmentation, draw_views
from moco.errors import DataError
from moco.fileio import PathLike

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".gif")
MAX_PIXELS = 89_478_485  # PIL's own limit for a warning: a quarter of a gigabyte of RGB
EXAMPLE_TREE = "ROOT/0001.jpg or ROOT/any/folder/0001.jpg or ROOT/train/class/0001.jpg"
LABELLED_TREE = "ROOT/train/<class>/1.jpg and ROOT/val/<class>/2.jpg"
REPLACEMENT_TRIES = 20
_VIEWS, _REPLACEMENT = range(2)  # independent random streams of one (seed, epoch, index)

Position = tuple[int, int]  # (epoch, index into the data set)


def find_images(root: PathLike) -> list[Path]:
    """All pictures below a folder, sorted, or those listed in a ``.txt`` file, in its order.

    A folder's ``train`` subfolder is used instead of it where there is one. Names that start with
    a dot are ignored, and so is everything whose suffix is not one of ``SUFFIXES``.

    Raises:
        DataError: nothing there, or a listed file that does not exist.
    """
    root = Path(root).expanduser()
    if root.suffix == ".txt" and root.is_file():
        return _listed_images(root)
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; expected pictures as {EXAMPLE_TREE}")
    folder = root / "train" if (root / "train").is_dir() else root
    images = _walk(folder)
    if not images:
        raise DataError(
            f"{folder}: no pictures ({' '.join(SUFFIXES)}) in it or below; expected {EXAMPLE_TREE}"
        )
    return images


def find_labelled_images(folder: PathLike) -> tuple[list[Path], list[int], list[str]]:
    """Pictures, labels and class names of ``folder/<class>/**``; classes in sorted order.

    Raises:
        DataError: no folder, or no class folder with pictures.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected {LABELLED_TREE}")
    images: list[Path] = []
    labels: list[int] = []
    names: list[str] = []
    for child in sorted(folder.iterdir()):
        if child.name.startswith(".") or not child.is_dir():
            continue
        found = _walk(child)
        if found:
            labels += [len(names)] * len(found)
            images += found
            names.append(child.name)
    if not images:
        raise DataError(f"{folder}: no class folder with pictures; expected {LABELLED_TREE}")
    return images, labels, names


def decode(path: PathLike) -> Image.Image:
    """One picture as 8-bit RGB, following the policy above.

    Raises:
        DataError: with the path and what is wrong: empty, truncated, no picture, too large.
    """
    try:
        with warnings.catch_warnings():
            # The size is checked here, against the same limit, with an error instead.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path) as picture:
                W, H = picture.size
                if W * H > MAX_PIXELS:
                    raise DataError(_bomb(path, f"{W} x {H} pixels"))
                return _to_rgb(picture)
    except Image.DecompressionBombError as error:
        raise DataError(_bomb(path, "hundreds of millions of pixels")) from error
    except Image.UnidentifiedImageError as error:
        empty = os.path.getsize(path) == 0
        reason = "the file is empty (0 bytes)" if empty else "not a picture that PIL can read"
        raise DataError(f"{path}: {reason}") from error
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise DataError(f"{path}: cannot be decoded ({error})") from error


class Batch(NamedTuple):
    """What the colour part needs of N pictures, and which of them were replaced."""

    pixels: Tensor  # (2, N, 3, P, P) uint8, the two views' crops
    params: Tensor  # (2, N, NUM_PARAMS) float32
    bad: list[str]  # why pictures could not be decoded, with their paths
    complete: bool = True  # False: a bad picture was not replaced; there are no pixels


class TwoViews(torch.utils.data.Dataset[Batch]):
    """Batches of two augmented crops of each picture.

    Args:
        images: the data set.
        aug: what to draw; ``seed``: with (epoch, index) the only source of randomness.
        skip_bad: put another picture in the place of one that cannot be decoded, chosen by
            (seed, epoch, index); otherwise the batch is incomplete. (An exception raised in a
            worker would reach the training process as a traceback in a string.)
        cache_bytes: memory for decoded pictures in this process.
    """

    def __init__(
        self,
        images: Sequence[PathLike],
        aug: Augmentation,
        seed: int,
        skip_bad: bool = False,
        cache_bytes: int = 0,
    ) -> None:
        # One array instead of a million objects, whose reference counts each worker would copy.
        self._paths = np.array([os.fsencode(path) for path in images])
        self._aug, self._seed, self._skip_bad = aug, seed, skip_bad
        self._cache: dict[int, Tensor] = {}
        self._cache_bytes = cache_bytes

    def __len__(self) -> int:
        return len(self._paths)

    def __getitems__(self, positions: Sequence[Position]) -> Batch:
        """The whole batch at once, as a sampler of batches asks for it."""
        N, P = len(positions), self._aug.crop_px
        pixels = torch.empty(VIEWS, N, 3, P, P, dtype=torch.uint8)
        params = torch.empty(VIEWS, N, NUM_PARAMS)
        bad: list[str] = []
        for n, (epoch, index) in enumerate(positions):
            picture = self._picture(epoch, index, bad)
            if picture is None:
                return Batch(torch.empty(0), torch.empty(0), bad, complete=False)
            rng = _generator(self._seed, epoch, index, _VIEWS)
            draw_views(rng, picture, self._aug, pixels[:, n], params[:, n])
        return Batch(pixels, params, bad)

    def _picture(self, epoch: int, index: int, bad: list[str]) -> Tensor | None:
        """The picture or its replacement; what went wrong is added to ``bad``."""
        try:
            return self._decoded(index)
        except DataError as error:
            bad.append(str(error))
        if self._skip_bad:
            others = _generator(self._seed, epoch, index, _REPLACEMENT)
            for _ in range(REPLACEMENT_TRIES):
                try:
                    return self._decoded(int(others.random() * len(self)))
                except DataError as error:
                    bad.append(str(error))
        return None

    def _decoded(self, index: int) -> Tensor:
        """The picture (H, W, 3) uint8."""
        picture = self._cache.get(index)
        if picture is None:
            picture = torch.from_numpy(np.array(decode(os.fsdecode(self._paths[index]))))
            if picture.nbytes <= self._cache_bytes:
                self._cache_bytes -= picture.nbytes
                self._cache[index] = picture
        return picture


class CentreCrops(torch.utils.data.Dataset[Tensor]):
    """The centre of each picture, (3, P, P) uint8, after resizing its shorter side."""

    def __init__(self, images: Sequence[PathLike], resize_px: int, crop_px: int) -> None:
        self._images, self._resize_px, self._crop_px = images, resize_px, crop_px

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Tensor:
        picture = decode(self._images[index])
        scale = self._resize_px / min(picture.size)
        W, H = (max(self._crop_px, round(side * scale)) for side in picture.size)
        if (W, H) != picture.size:
            picture = picture.resize((W, H), Image.Resampling.BILINEAR)
        left, top = (W - self._crop_px) // 2, (H - self._crop_px) // 2
        crop = picture.crop((left, top, left + self._crop_px, top + self._crop_px))
        return torch.from_numpy(np.array(crop)).permute(2, 0, 1)


class StepSampler(torch.utils.data.Sampler[list[Position]]):
    """The pictures of each step from ``start`` to ``stop``: all epochs as one sequence of batches.

    Each epoch is a permutation given by (seed, epoch); its incomplete last batch is dropped.

    Args:
        num_images, batch: num_images >= batch.
    """

    def __init__(self, num_images: int, batch: int, seed: int, start: int, stop: int) -> None:
        self._num_images, self._batch, self._seed = num_images, batch, seed
        self._start, self._stop = start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __iter__(self) -> Iterator[list[Position]]:
        steps_per_epoch = self._num_images // self._batch
        order, order_epoch = np.empty(0, dtype=np.int64), -1
        for step in range(self._start, self._stop):
            epoch, step_in_epoch = divmod(step, steps_per_epoch)
            if epoch != order_epoch:
                rng = np.random.default_rng([self._seed, epoch])
                order = rng.permutation(self._num_images)
                order_epoch = epoch
            first = step_in_epoch * self._batch
            yield [(epoch, int(index)) for index in order[first : first + self._batch]]


def _generator(seed: int, epoch: int, index: int, stream: int) -> Random:
    """Independent random numbers for each combination; Random is quicker to seed than NumPy's."""
    return Random(f"{seed} {epoch} {index} {stream}")


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "F":
        raise ValueError("pixels are floating-point numbers; convert the file to 8 or 16 bits")
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        # PIL's own conversion clips everything above 255 to white.
        wide = np.asarray(picture, dtype=np.int64)
        if wide.min() < 0 or wide.max() > 65535:
            raise ValueError("grey values outside 0..65535; convert the file to 8 or 16 bits")
        picture = Image.fromarray((wide / 257).round().astype(np.uint8))
    elif picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    # convert() returns a picture that no longer depends on the open file.
    return picture.convert("RGB")


def _bomb(path: PathLike, size: str) -> str:
    return (
        f"{path}: decompression bomb? {size} is more than the limit of {MAX_PIXELS}; "
        "shrink or remove it"
    )


def _walk(folder: Path) -> list[Path]:
    """Pictures below a folder, sorted; links are followed, each real folder once."""
    images: list[Path] = []
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        images += [
            Path(parent, name)
            for name in files
            if not name.startswith(".") and name.lower().endswith(SUFFIXES)
        ]
    return sorted(images)


def _listed_images(path: Path) -> list[Path]:
    images = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        image = path.parent / line.strip()
        if not image.is_file():
            raise DataError(f"{path}: line {number}: no such file {image}")
        images.append(image)
    if not images:
        raise DataError(f"{path}: the list is empty; expected one path of a picture per line")
    return images
