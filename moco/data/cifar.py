"""CIFAR-10 dataset in the published Python version, read by torchvision.

https://www.cs.toronto.edu/~kriz/cifar.html
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moco.common.errors import DataError
from moco.common.files import PathLike, expand_home

FOLDER = "cifar-10-batches-py"  # top folder of the published archive
_FIRST = "data_batch_1"


class Cifar(NamedTuple):
    """One split of CIFAR-10 in memory, in the order of the files.

    Attributes:
        pixels: Images (N, 32, 32, 3) uint8 RGB.
        labels: N indices into `classes`.
        classes: Names of the classes.
        files: Files in order, each with the same number of images.
    """

    pixels: NDArray[np.uint8]
    labels: list[int]
    classes: list[str]
    files: list[Path]


def find_cifar(root: PathLike) -> Path | None:
    """Return the folder with CIFAR-10's files, `root` or `root/FOLDER`, or None."""
    root = expand_home(root)
    for folder in (root, root / FOLDER):
        if (folder / _FIRST).is_file():
            return folder
    return None


def read_cifar(folder: PathLike, train: bool) -> Cifar:
    """Read the training or the test split.

    The files are pickles, which can execute arbitrary code. torchvision compares all files with the
    published MD5 digests before it opens the first one, so only published files are unpickled.

    Raises:
        DataError: If a file is missing or differs from the published file.
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
