"""CIFAR-10 as its authors hand it out: the binary version, or the Python version (pickles).

https://www.cs.toronto.edu/~kriz/cifar.html
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moco.common.errors import DataError
from moco.common.files import PathLike, load_pickle

FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py")  # of the two archives
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = ("test_batch",)
CLASSES = 10
SIDE_PX = 32
_PIXELS = 3 * SIDE_PX**2  # an image: its red, then its green, then its blue pixels, row by row


class Cifar(NamedTuple):
    """Images in memory, in the files' order.

    Attributes:
        pixels: (N, 32, 32, 3) uint8 RGB.
        labels: (N,) indices into the classes.
        files: the files in order, each with the same number of images.
    """

    pixels: NDArray[np.uint8]
    labels: list[int]
    files: list[Path]


def find_cifar(root: PathLike) -> Path | None:
    """The folder of CIFAR-10's files: `root` or a folder of that name in it; None if neither."""
    root = Path(root).expanduser()
    for folder in (root, *(root / name for name in FOLDERS)):
        if any((folder / f"{TRAIN[0]}{suffix}").is_file() for suffix in (".bin", "")):
            return folder
    return None


def read_cifar(folder: PathLike, names: Sequence[str]) -> Cifar:
    """The images of the files `TRAIN` or `TEST`.

    Raises:
        DataError: a file is missing, damaged, or not what the name promises.
    """
    folder = Path(folder)
    is_binary = (folder / f"{TRAIN[0]}.bin").is_file()
    files = [folder / (f"{name}.bin" if is_binary else name) for name in names]
    pixels: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for path in files:
        rows, classes = (_read_binary if is_binary else _read_pickle)(path)
        if len(classes) and not 0 <= min(classes) <= max(classes) < CLASSES:
            raise DataError(f"{path}: labels outside 0..{CLASSES - 1}; was it copied completely?")
        if len(rows) != len(classes) or (pixels and len(rows) != len(pixels[0])):
            raise DataError(f"{path}: {len(rows)} images, {len(classes)} labels; damaged?")
        pixels.append(rows.reshape(-1, 3, SIDE_PX, SIDE_PX).transpose(0, 2, 3, 1))
        labels += classes
    return Cifar(np.ascontiguousarray(np.concatenate(pixels)), labels, files)


def class_names(folder: PathLike) -> list[str]:
    """The ten names, from `batches.meta.txt` (binary version) or `batches.meta`.

    Raises:
        DataError: no such file, or not ten names.
    """
    path = Path(folder) / "batches.meta.txt"
    names: object
    if path.is_file():
        names = path.read_text(errors="replace").split()
    else:
        path = Path(folder) / "batches.meta"
        content = load_pickle(path)
        names = content.get("label_names") if isinstance(content, dict) else None
    if not isinstance(names, list) or len(names) != CLASSES:
        raise DataError(f"{path}: expected the names of {CLASSES} classes")
    return [str(name) for name in names]


def _read_binary(path: Path) -> tuple[NDArray[np.uint8], list[int]]:
    """Rows of a label and the pixels."""
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not len(content) or len(content) % (1 + _PIXELS):
        raise DataError(
            f"{path}: {len(content)} bytes, expected a multiple of {1 + _PIXELS}; "
            "was it copied completely?"
        )
    rows = content.reshape(-1, 1 + _PIXELS)
    return rows[:, 1:], rows[:, 0].tolist()


def _read_pickle(path: Path) -> tuple[NDArray[np.uint8], list[int]]:
    content = load_pickle(path)
    rows = content.get("data") if isinstance(content, dict) else None
    labels = content.get("labels") if isinstance(content, dict) else None
    if not (
        isinstance(rows, np.ndarray)
        and rows.dtype == np.uint8
        and rows.ndim == 2
        and rows.shape[1] == _PIXELS
        and isinstance(labels, list)
        and all(type(label) is int for label in labels)
    ):
        raise DataError(f"{path}: expected data (N, {_PIXELS}) uint8 and N labels of CIFAR-10")
    return rows, labels
