"""Small copies of the user's images for the quickstart; the originals are not changed.

Each image is scaled so that its shorter side is 128 pixels, and written to one flat folder, so that
pre-training does not decode megapixels in every epoch. If there are more images than the limit,
they are sampled with a fixed seed.
"""

import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from detection.datasets.files import read_ids
from detection.datasets.voc import LISTS, find_folders
from moco.common.errors import DataError, UserError
from moco.common.files import TEMPORARY_PREFIX, PathLike
from moco.common.progress import Progress
from moco.data.decode import decode
from moco.data.images import find_images

SPLIT_PAIRS = (("trainval", "test"), ("train", "test"), ("train", "val"))
JPEG_QUALITY = 95
SAMPLE_SEED = 0
LIMIT = 20_000  # images


@contextmanager
def atomic_folder(folder: PathLike) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` when all files are written.

    Raises:
        UserError: If the folder exists already.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"{folder} exists already; remove it or choose another folder")
    part = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}")
    if part.exists():
        shutil.rmtree(part)  # left by an interrupted call
    part.mkdir(parents=True)
    yield part
    part.rename(folder)


def shrink_images(sources: Sequence[Path], folder: PathLike, side_px: int) -> None:
    """Write small copies as `folder/000001.jpg`, ... with a shorter side of `side_px` pixels.

    Raises:
        DataError: If an image cannot be decoded; names it.
    """
    with atomic_folder(folder) as part, Progress(len(sources), "shrink images", "img") as progress:
        for number, source in enumerate(sources, start=1):
            image = decode(source)
            scale = side_px / min(image.size)
            size = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
            small = image.resize(size, Image.Resampling.BICUBIC)
            small.save(part / f"{number:06d}.jpg", quality=JPEG_QUALITY)
            progress.update()


def sample(items: Sequence[Path] | Sequence[str], limit: int) -> list:
    """Sample at most `limit` items with a fixed seed, and keep their order."""
    if len(items) <= limit:
        return list(items)
    chosen = sorted(random.Random(SAMPLE_SEED).sample(range(len(items)), limit))
    return [items[i] for i in chosen]


def voc_splits(root: PathLike) -> tuple[str, str]:
    """Find the names of the training and the test list of a VOC-layout folder.

    Raises:
        DataError: If the folder has no such pair of lists.
    """
    lists = Path(root) / LISTS
    for train, test in SPLIT_PAIRS:
        if (lists / f"{train}.txt").is_file() and (lists / f"{test}.txt").is_file():
            return train, test
    raise DataError(
        f"{root}: expected a VOC layout with ImageSets/Main/trainval.txt (or train.txt) and "
        "test.txt (or val.txt), Annotations/*.xml and JPEGImages/*.jpg"
    )


def training_images(root: PathLike) -> list[Path]:
    """List the images in the training list of a VOC-layout folder that are not in the test list.

    Raises:
        DataError: If there are no lists, or a listed image is missing.
    """
    root = Path(root)
    train, test = (_ids(root, split) for split in voc_splits(root))
    held_out = set(test)
    _, images = find_folders(root)
    by_name = {path.stem: path for path in find_images(images)}
    if missing := [image_id for image_id in train if image_id not in by_name]:
        raise DataError(f"{root}: {missing[0]} is listed, but has no image in {images.name}")
    return [by_name[image_id] for image_id in train if image_id not in held_out]


def limit_voc(root: PathLike, folder: PathLike, max_train: int, max_test: int) -> None:
    """Make a VOC-layout folder of links to `root`, with shorter lists `trainval` and `test`."""
    root = Path(root).resolve()
    train, test = voc_splits(root)
    with atomic_folder(folder) as part:
        for name, split, limit in (("trainval", train, max_train), ("test", test, max_test)):
            path = part / "ImageSets" / "Main" / f"{name}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                "".join(f"{i}\n" for i in sample(_ids(root, split), limit)), encoding="utf-8"
            )
        for own in find_folders(root):
            (part / own.name).symlink_to(own, target_is_directory=True)


def convert_checkpoint(checkpoints: Path, weights: Path) -> str:
    """Convert the last checkpoint of a pre-training; return the agreement of the features."""
    from convert.convert_to_d2 import convert_file
    from convert.report import agreement

    return agreement(convert_file(checkpoints, weights).features)


def _ids(root: Path, split: str) -> list[str]:
    return read_ids(root / LISTS / f"{split}.txt")
