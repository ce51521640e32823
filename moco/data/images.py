"""Datasets of images: files, tar shards, CIFAR-10's own files; the order of an epoch.

H W pixels.
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
from moco.common.files import PathLike, files_below
from moco.common.progress import Progress
from moco.data import cifar
from moco.data.decode import FORMATS, SUFFIXES, decode_pixels
from moco.data.shards import SHARD_WINDOW, ShardImages, find_shards

if TYPE_CHECKING:
    from torch import Tensor

CHECKED_TOGETHER = 256  # images of one thread, before another takes the next
LOOKED_AT = 8  # images of a dataset whose brightness is noted
SPLITS = {"train", "val", "test"}  # folders of a dataset, where there are no others
EXAMPLE_TREE = "ROOT/0001.jpg or ROOT/any/folder/0001.jpg or ROOT/train/class/0001.jpg"
LABELLED_TREE = "ROOT/train/<class>/1.jpg and ROOT/val/<class>/2.jpg"


class Order(Protocol):
    """The indices of one epoch; a slice gives that part of it."""

    def __getitem__(self, part: slice, /) -> NDArray[np.int64]: ...


class Images(Protocol):
    """A dataset of images, wherever they are stored."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> "Tensor":
        """The image (H, W, 3) uint8 RGB; not to be written to.

        Raises:
            DataError: it cannot be decoded; the message starts with its name.
        """
        ...

    def name(self, index: int) -> str:
        """Where the image is stored, for messages."""
        ...

    def epoch_order(self, seed: int, epoch: int) -> Order:
        """Every index once, in an order that (seed, epoch) determines."""
        ...


class FileImages:
    """Images that are files.

    Args:
        left_out: what is said of the files beside them that are none; "": there is nothing to say.
    """

    def __init__(self, images: Sequence[PathLike], left_out: str = "") -> None:
        self.left_out = left_out
        # One array instead of a million objects, whose reference counts each worker would copy.
        self._paths = np.array([os.fsencode(path) for path in images])

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: int) -> "Tensor":
        """See `Images`."""
        return decode_pixels(self.name(index))

    def name(self, index: int) -> str:
        """See `Images`."""
        return os.fsdecode(self._paths[index])

    def epoch_order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """A permutation."""
        return permutation(len(self), seed, epoch)


class ArrayImages:
    """Images in memory.

    Args:
        pixels: (N, H, W, 3) uint8 RGB.
        files: where they are from, each with the same number of them.
    """

    def __init__(self, pixels: NDArray[np.uint8], files: Sequence[Path]) -> None:
        self._pixels, self._files = pixels, files

    def __len__(self) -> int:
        return len(self._pixels)

    def read(self, index: int) -> "Tensor":
        """See `Images`; no copy."""
        import torch

        return torch.from_numpy(self._pixels[index])

    def name(self, index: int) -> str:
        """The file, and the image's number in it."""
        file, number = divmod(index, len(self) // len(self._files))
        return f"{self._files[file]}:{number}"

    def epoch_order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """A permutation."""
        return permutation(len(self), seed, epoch)


@dataclass(frozen=True)
class LabeledSets:
    """Images and labels of two splits; labels are indices into `classes`."""

    classes: list[str]
    train: Images
    train_labels: list[int]
    val: Images
    val_labels: list[int]


def open_images(
    root: PathLike, index_file: PathLike | None = None, window: int = SHARD_WINDOW
) -> Images:
    """The images for pre-training that `root` names.

    Args:
        root: a folder of images (nested or flat; its `train` where it has one), a `.txt` list
            of them, tar shards (see `moco.data.shards.find_shards`), or the folder of
            CIFAR-10's own files.
        index_file: of shards, see `moco.data.shards.ShardImages`.
        window: of shards, the same.

    Raises:
        UserError, DataError: nothing there, or nothing that can be used.
    """
    shards = find_shards(root)
    if shards:
        return ShardImages(shards, index_file, window)
    folder = cifar.find_cifar(root)
    if folder:
        data = cifar.read_cifar(folder, train=True)
        return ArrayImages(data.pixels, data.files)
    return FileImages(*_found(root))


def notes_on(images: Images) -> list[str]:
    """Say what of a folder is left out, and whether its images are nearly black.

    Gray of 12 bits in files of 16 has no value above 4095, which is 16 of 255.
    """
    if not isinstance(images, FileImages):
        return []
    notes = [images.left_out] if images.left_out else []
    highest = []
    for index in np.unique(np.linspace(0, len(images) - 1, LOOKED_AT, dtype=int)).tolist():
        with suppress(DataError):  # named where it is trained on
            if _has_16_bits(images.name(index)):
                highest.append(int(images.read(index).max()))
    if highest and max(highest) <= 4095 / 257 + 0.5:
        notes.append(
            f"no value above {max(highest)} of 255 in the {len(highest)} images looked at: gray of "
            "12 bits in files of 16 is nearly black here; multiply its values by 16"
        )
    return notes


def _has_16_bits(path: PathLike) -> bool:
    """Read the header alone: what decodes may hang or die, which a data-loader worker is for."""
    wrong = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
    with suppress(*wrong), Image.open(path, formats=FORMATS) as image:
        return image.mode.startswith("I")
    return False


def bad_images(images: Images) -> list[str]:
    """Decode every image as training does; returns why those that it cannot read are bad."""
    parts = [
        range(start, min(start + CHECKED_TOGETHER, len(images)))
        for start in range(0, len(images), CHECKED_TOGETHER)
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
    own, found = copy(images), []  # the shards that one thread has open are not another's
    for index in indices:
        try:
            own.read(index)
        except DataError as error:
            found.append(str(error))
    return found


def check_present(root: PathLike, labeled: bool = False) -> None:
    """Whether something is at DATA.ROOT, without listing it or importing torch.

    Args:
        labeled: for classification.

    Raises:
        UserError, DataError: nothing.
    """
    tree = LABELLED_TREE if labeled else EXAMPLE_TREE
    if not root:
        raise UserError(f"DATA.ROOT is not set; add DATA.ROOT and a folder with {tree}")
    if not Path(root).expanduser().exists() and (labeled or not find_shards(root)):
        raise DataError(f"{root}: no such folder; expected images as {tree}")


def labeled_sets(root: PathLike) -> LabeledSets:
    """`root/train/<class>/*` and `root/val/<class>/*`, or CIFAR-10's own files.

    The classes are those of train.

    Raises:
        DataError: a folder is missing, or `val` has a class that `train` has not.
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
        raise DataError(f"{root}: class {unknown[0]} is in val and not in train")
    as_train = [classes.index(val_classes[label]) for label in val_labels]
    return LabeledSets(
        classes,
        FileImages(images, left_out),
        labels,
        FileImages(val_images, val_left_out),
        as_train,
    )


def permutation(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """0 to `length` - 1 in the order that (seed, epoch) determines."""
    return np.random.default_rng([seed, epoch]).permutation(length)


def find_images(root: PathLike) -> list[Path]:
    """All images below a folder, sorted, or those listed in a `.txt` file, in its order.

    A folder's `train` subfolder is used instead of it where its images are in `train`, `val` and
    `test` alone: among other folders it is a class of that name. Names that start with a dot are
    ignored, and so is everything whose suffix is not one of `SUFFIXES`.

    A list's paths are relative to its folder and stay below it; whole paths (`/data/…`) may lead
    anywhere, and nothing but decoding an image is ever done with a file.

    Raises:
        DataError: nothing there, or a listed file that does not exist or is outside.
    """
    return _found(root)[0]


def _found(root: PathLike) -> tuple[list[Path], str]:
    """`find_images`, and what is said of the other files."""
    root = Path(root).expanduser()
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
    """Images, labels and class names of `folder/<class>/**`, and what is said of the other files.

    Classes are in sorted order.

    Raises:
        DataError: no folder, or no class folder with images.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected {LABELLED_TREE}")
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
        raise DataError(f"{folder}: no class folder with images; expected {LABELLED_TREE}")
    return images, labels, names, _left_out(folder, left_out)


def _image_names(folder: Path) -> tuple[list[str], list[str]]:
    """Paths below a folder, relative to it: of images, and of files of other suffixes."""
    names: tuple[list[str], list[str]] = [], []
    for name in files_below(folder):
        names[not name.lower().endswith(SUFFIXES)].append(name)
    return names


def _left_out(folder: Path, others: Sequence[str]) -> str:
    """`…: left out by suffix: 3 files (.heic 2, none 1)`; "" where there are none."""
    counts = Counter(os.path.splitext(name)[1].lower() or "none" for name in others)
    listed = first_few([f"{suffix} {number}" for suffix, number in counts.most_common()])
    return (
        f"{folder}: left out by suffix: {plural(len(others), 'file')} ({listed})" if others else ""
    )


def _listed_images(path: Path) -> list[Path]:
    images = []
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        entry = os.path.normpath(line.strip())
        if entry.split(os.sep)[0] == os.pardir:
            raise DataError(
                f"{path}: line {number}: {line.strip()} leads out of the list's folder; move the "
                "list, or write the whole path"
            )
        image = path.parent / entry
        if not image.is_file():
            raise DataError(f"{path}: line {number}: no such file {image}")
        images.append(image)
    if not images:
        raise DataError(f"{path}: the list is empty; expected one path of an image per line")
    return images
