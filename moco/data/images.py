"""Image datasets (files, tar shards, CIFAR-10) and the order of their images in an epoch.

H W image size in pixels.
"""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from moco.common.errors import DataError, UserError, first_few, plural
from moco.common.files import PathLike, expand_home, files_below, read_text, require_regular
from moco.common.progress import Progress
from moco.data import cifar
from moco.data.decode import FORMATS, SUFFIXES, decode_pixels
from moco.data.shards import SHARD_WINDOW, ShardImages, find_shards

if TYPE_CHECKING:
    from torch import Tensor

CHECK_CHUNK = 256  # images that one thread decodes at a time
NUM_SAMPLED = 8  # images of a dataset whose brightness is checked
SPLITS = {"train", "val", "test"}  # folder names that are splits, if a dataset has no others
EXAMPLE_TREE = "ROOT/0001.jpg or ROOT/any/folder/0001.jpg or ROOT/train/class/0001.jpg"
LABELED_TREE = "ROOT/train/<class>/1.jpg and ROOT/val/<class>/2.jpg"


class Order(Protocol):
    """Indices of the images in the order of an epoch, read by slices."""

    def __getitem__(self, part: slice, /) -> NDArray[np.int64]: ...


class Images(Protocol):
    """Interface of an image dataset, independent of how the images are stored."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> "Tensor":
        """Return an image (H, W, 3) uint8 RGB, which must not be modified.

        Raises:
            DataError: If the image cannot be decoded; the message starts with the image's name.
        """
        ...

    def name(self, index: int) -> str:
        """Return where an image is stored, for messages."""
        ...

    def epoch_order(self, seed: int, epoch: int) -> Order:
        """Return a permutation of all indices that depends on (seed, epoch) only."""
        ...


class FileImages:
    """Dataset of image files.

    Args:
        images: Paths of the images.
        left_out: Note on skipped files in the same folder, or "".
    """

    def __init__(self, images: Sequence[PathLike], left_out: str = "") -> None:
        self.left_out = left_out
        # With a list, workers would copy the memory pages that hold the reference counts.
        self._paths = np.array([os.fsencode(path) for path in images])

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: int) -> "Tensor":
        """Decode the file of an image."""
        return decode_pixels(self.name(index))

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return os.fsdecode(self._paths[index])

    def epoch_order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return a random permutation of all indices."""
        return permutation(len(self), seed, epoch)


class ArrayImages:
    """Dataset of images in memory.

    Args:
        pixels: Images (N, H, W, 3) uint8 RGB.
        files: Files of the images, each with the same number of images.
    """

    def __init__(self, pixels: NDArray[np.uint8], files: Sequence[Path]) -> None:
        self._pixels, self._files = pixels, files

    def __len__(self) -> int:
        return len(self._pixels)

    def read(self, index: int) -> "Tensor":
        """Return a view of an image, without a copy."""
        import torch

        return torch.from_numpy(self._pixels[index])

    def name(self, index: int) -> str:
        """Return the file of an image and the number of the image in the file."""
        file, number = divmod(index, len(self) // len(self._files))
        return f"{self._files[file]}:{number}"

    def epoch_order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return a random permutation of all indices."""
        return permutation(len(self), seed, epoch)


@dataclass(frozen=True)
class LabeledSets:
    """Images and labels of the training and the validation split; labels index `classes`."""

    classes: list[str]
    train: Images
    train_labels: list[int]
    val: Images
    val_labels: list[int]


def open_images(
    root: PathLike, index_file: PathLike | None = None, window: int = SHARD_WINDOW
) -> Images:
    """Open the images for pre-training at `root`.

    Args:
        root: Folder of images (nested or flat; its `train` if it has one), `.txt` list of images,
            tar shards (`moco.data.shards.find_shards`), or folder with CIFAR-10's files.
        index_file: Index of the shards (`moco.data.shards.ShardImages`).
        window: Number of shards whose images are shuffled together.

    Raises:
        UserError: If `root` is a pipe, a URL or a compressed tar.
        DataError: If `root` does not exist or contains no usable images.
    """
    shards = find_shards(root)
    if shards:
        return ShardImages(shards, index_file, window)
    folder = cifar.find_cifar(root)
    if folder:
        data = cifar.read_cifar(folder, train=True)
        return ArrayImages(data.pixels, data.files)
    return FileImages(*_found(root))


def describe_images(images: Images) -> list[str]:
    """Return notes on the skipped files of a folder and on images that are nearly black.

    12-bit gray stored in 16-bit files has no value above 4095, which becomes 16 of 255.
    """
    if not isinstance(images, FileImages):
        return []
    notes = [images.left_out] if images.left_out else []
    highest = []
    for index in np.unique(np.linspace(0, len(images) - 1, NUM_SAMPLED, dtype=int)).tolist():
        with suppress(DataError):  # training reports images that cannot be decoded
            if _has_16_bits(images.name(index)):
                highest.append(int(images.read(index).max()))
    if highest and max(highest) <= 4095 / 257 + 0.5:
        notes.append(
            f"no value is above {max(highest)} of 255 in {len(highest)} sampled images: 12-bit "
            "gray in 16-bit files is nearly black here; multiply its values by 16"
        )
    return notes


def _has_16_bits(path: PathLike) -> bool:
    """Return whether pixels have 16 bits, without decoding, which might hang or crash."""
    unreadable = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
    with suppress(*unreadable), Image.open(require_regular(path), formats=FORMATS) as image:
        return image.mode.startswith("I")
    return False


def find_bad_images(images: Images) -> list[str]:
    """Decode every image as in training and return one message per unreadable image."""
    parts = [
        range(start, min(start + CHECK_CHUNK, len(images)))
        for start in range(0, len(images), CHECK_CHUNK)
    ]
    found = []
    with (
        ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
        Progress(len(images), "decode", "img") as progress,
    ):
        for part, bad in zip(parts, pool.map(partial(_bad_among, images), parts), strict=True):
            progress.update(len(part))
            found += bad
    return found


def _bad_among(images: Images, indices: Sequence[int]) -> list[str]:
    own, found = copy(images), []  # open shards must not be shared between threads
    for index in indices:
        try:
            own.read(index)
        except DataError as error:
            found.append(str(error))
    return found


def check_root(root: PathLike, labeled: bool = False) -> None:
    """Check that DATA.ROOT exists, without listing it or importing torch.

    Args:
        root: Value of DATA.ROOT.
        labeled: Expect a dataset for classification, which cannot be in shards.

    Raises:
        UserError: If `root` is empty.
        DataError: If it does not exist.
    """
    tree = LABELED_TREE if labeled else EXAMPLE_TREE
    if not root:
        raise UserError(f"DATA.ROOT is not set; add DATA.ROOT and a folder with {tree}")
    if not expand_home(root).exists() and (labeled or not find_shards(root)):
        raise DataError(f"{root}: no such folder; expected images as {tree}")


def read_labeled_sets(root: PathLike) -> LabeledSets:
    """Read `root/train/<class>/*` and `root/val/<class>/*`, or CIFAR-10's files.

    The training split defines the classes.

    Raises:
        DataError: If a folder is missing, or a class is in `val` only.
    """
    folder = cifar.find_cifar(root)
    if folder:
        train, val = (cifar.read_cifar(folder, train=train) for train in (True, False))
        return LabeledSets(
            train.classes,
            ArrayImages(train.pixels, train.files),
            train.labels,
            ArrayImages(val.pixels, val.files),
            val.labels,
        )
    images, labels, classes, left_out = find_labeled_images(Path(root) / "train")
    val_images, val_labels, val_classes, val_left_out = find_labeled_images(Path(root) / "val")
    unknown = sorted(set(val_classes) - set(classes))
    if unknown:
        raise DataError(f"{root}: class {unknown[0]} is in val but not in train")
    as_train = [classes.index(val_classes[label]) for label in val_labels]
    return LabeledSets(
        classes,
        FileImages(images, left_out),
        labels,
        FileImages(val_images, val_left_out),
        as_train,
    )


def permutation(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation of 0 to `length` - 1 that (seed, epoch) determines."""
    return np.random.default_rng([seed, epoch]).permutation(length)


def find_images(root: PathLike) -> list[Path]:
    """Return all images below a folder, sorted, or the images listed in a `.txt` file, in order.

    If all images of a folder are in `train`, `val` and `test`, only those in `train` are returned;
    next to other folders, `train` is a class of that name. Names that start with a dot and files
    whose suffix is not in `SUFFIXES` are ignored.

    Relative paths in a list start at the list's folder and must stay below it. Absolute paths
    (`/data/…`) may point anywhere, because files are only decoded.

    Raises:
        DataError: If there are no images, or a listed file is missing or outside the folder.
    """
    return _found(root)[0]


def _found(root: PathLike) -> tuple[list[Path], str]:
    """Return the images of `find_images` and a note on skipped files."""
    root = expand_home(root)
    if root.suffix == ".txt" and root.is_file():
        return _listed_images(root), ""
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; expected images as {EXAMPLE_TREE}")
    folder, (names, others) = root, _image_names(root)
    if (root / "train").is_dir() and {name.split(os.sep)[0] for name in names} <= SPLITS:
        folder = root / "train"
        names, others = (
            [name.partition(os.sep)[2] for name in kind if name.startswith("train" + os.sep)]
            for kind in (names, others)
        )
    images = sorted(Path(folder, name) for name in names)
    if not images:
        raise DataError(
            f"{folder}: no images ({' '.join(SUFFIXES)}) in it or below; expected {EXAMPLE_TREE}"
        )
    return images, _left_out(folder, others)


def find_labeled_images(folder: PathLike) -> tuple[list[Path], list[int], list[str], str]:
    """Find the images of `folder/<class>/**`.

    Returns:
        Images, their labels, class names in sorted order, and a note on skipped files.

    Raises:
        DataError: If the folder does not exist or has no class folder with images.
    """
    folder = expand_home(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected {LABELED_TREE}")
    images: list[Path] = []
    labels: list[int] = []
    names: list[str] = []
    left_out: list[str] = []
    for child in sorted(folder.iterdir()):
        if not child.is_dir() or child.name.startswith("."):
            continue
        found, others = _image_names(child)
        left_out += others
        if found:
            labels += [len(names)] * len(found)
            images += sorted(Path(child, name) for name in found)
            names.append(child.name)
    if not images:
        raise DataError(f"{folder}: no class folder with images; expected {LABELED_TREE}")
    return images, labels, names, _left_out(folder, left_out)


def _image_names(folder: Path) -> tuple[list[str], list[str]]:
    """Return the paths of images and of other files below a folder, relative to the folder."""
    names: tuple[list[str], list[str]] = [], []
    for name in files_below(folder):
        names[not name.lower().endswith(SUFFIXES)].append(name)
    return names


def _left_out(folder: Path, others: Sequence[str]) -> str:
    """Return a note on skipped files: `…: left out by suffix: 3 files (.heic 2, none 1)`, or ""."""
    counts = Counter(os.path.splitext(name)[1].lower() or "none" for name in others)
    listed = first_few([f"{suffix} {number}" for suffix, number in counts.most_common()])
    return (
        f"{folder}: left out by suffix: {plural(len(others), 'file')} ({listed})" if others else ""
    )


def _listed_images(path: Path) -> list[Path]:
    images = []
    text = read_text(path, encoding="utf-8-sig", errors="surrogateescape")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        entry = os.path.normpath(line.strip())
        if entry.split(os.sep)[0] == os.pardir:
            raise DataError(
                f"{path}: line {number}: {line.strip()} is outside the list's folder; move the "
                "list, or write an absolute path"
            )
        image = path.parent / entry
        if not image.is_file():
            raise DataError(f"{path}: line {number}: no such file {image}")
        images.append(image)
    if not images:
        raise DataError(f"{path}: the list is empty; expected the path of one image per line")
    return images
