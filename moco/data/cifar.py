"""CIFAR-10, read by torchvision from the Python version that its authors publish.

https://www.cs.toronto.edu/~kriz/cifar.html
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moco.common.errors import DataError
from moco.common.files import PathLike

FOLDER = "cifar-10-batches-py"  # of the archive
_FIRST = "data_batch_1"


class Cifar(NamedTuple):
    """One split in memory, in the files' order.

    Attributes:
        pixels: (N, 32, 32, 3) uint8 RGB.
        labels: (N,) indices into `classes`.
        files: the files in order, each with the same number of images.
    """

    pixels: NDArray[np.uint8]
    labels: list[int]
    classes: list[str]
    files: list[Path]


def find_cifar(root: PathLike) -> Path | None:
    """The folder of CIFAR-10's files: `root` or `FOLDER` in it; None if neither."""
    root = Path(root).expanduser()
    for folder in (root, root / FOLDER):
        if (folder / _FIRST).is_file():
            return folder
    return None


def read_cifar(folder: PathLike, train: bool) -> Cifar:
    """Read the training or the test split.

    The files are pickles, which may run anything: torchvision compares every file with its
    published MD5 before it opens the first, so only the authors' own are unpickled.

    Raises:
        DataError: a file is missing, or is not the published one.
    """
    from torchvision import datasets

    path = Path(folder)

    class Files(datasets.CIFAR10):
        base_folder = path.name

    try:
        found = Files(path.parent, train=train)
    except RuntimeError as error:
        raise DataError(
            f"{path}: a file of CIFAR-10 is missing or is not the published one (MD5); unpack "
            f"{Files.filename} again, from its authors' page"
        ) from error
    files = [path / name for name, _ in (Files.train_list if train else Files.test_list)]
    return Cifar(np.ascontiguousarray(found.data), found.targets, found.classes, files)
