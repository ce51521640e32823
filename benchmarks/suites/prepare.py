"""The user's own images made small enough for the quickstart; the originals are not touched.

    python -m benchmarks.suites.prepare images FOLDER OUT      every image in a folder
    python -m benchmarks.suites.prepare voc-images FOLDER OUT  those of a VOC layout's training list

Each image is read once and scaled so that its shorter side is 128 pixels, into one flat folder,
so that pre-training does not decode megapixels over and over. Which images are taken when there
are more than the limit is sampled with a fixed seed.
"""

import argparse
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from moco.common.errors import DataError, UserError, run_cli
from moco.common.files import TEMPORARY_PREFIX, PathLike
from moco.common.progress import Progress
from moco.data.decode import decode
from moco.data.images import find_images

SPLIT_PAIRS = (("trainval", "test"), ("train", "test"), ("train", "val"))
JPEG_QUALITY = 95
SAMPLE_SEED = 0


@contextmanager
def whole_folder(folder: PathLike) -> Iterator[Path]:
    """A folder that appears under its name when all of its files are written.

    Raises:
        UserError: the folder exists already.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"{folder} exists already; remove it or choose another folder")
    part = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}")
    if part.exists():
        shutil.rmtree(part)  # of an earlier, interrupted call
    part.mkdir(parents=True)
    yield part
    part.rename(folder)


def shrink_images(sources: Sequence[Path], folder: PathLike, side_px: int) -> None:
    """Write small copies as `folder/000001.jpg`, ... with the shorter side `side_px` pixels.

    Raises:
        DataError: an image that cannot be decoded, by name.
    """
    with whole_folder(folder) as part, Progress(len(sources), "shrink images", "img") as progress:
        for number, source in enumerate(sources, start=1):
            image = decode(source)
            scale = side_px / min(image.size)
            size = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
            small = image.resize(size, Image.Resampling.BICUBIC)
            small.save(part / f"{number:06d}.jpg", quality=JPEG_QUALITY)
            progress.update()


def sample(items: Sequence[Path] | Sequence[str], limit: int) -> list:
    """At most `limit` items in their order, the same ones each time."""
    if len(items) <= limit:
        return list(items)
    chosen = sorted(random.Random(SAMPLE_SEED).sample(range(len(items)), limit))
    return [items[i] for i in chosen]


def voc_splits(root: PathLike) -> tuple[str, str]:
    """Names of the training and the test list of a VOC-layout folder.

    Raises:
        DataError: the folder has no pair of lists to train and to test on.
    """
    lists = Path(root) / "ImageSets" / "Main"
    for train, test in SPLIT_PAIRS:
        if (lists / f"{train}.txt").is_file() and (lists / f"{test}.txt").is_file():
            return train, test
    raise DataError(
        f"{root}: expected a VOC layout with ImageSets/Main/trainval.txt (or train.txt) and "
        "test.txt (or val.txt), Annotations/*.xml and JPEGImages/*.jpg"
    )


def training_images(root: PathLike) -> list[Path]:
    """The images of a VOC-layout folder's training list (never those of its test list).

    Raises:
        DataError: no lists, or a listed image that is not there.
    """
    root = Path(root)
    train, test = (_ids(root, split) for split in voc_splits(root))
    held_out = set(test)
    by_name = {path.stem: path for path in find_images(root / "JPEGImages")}
    if missing := [image_id for image_id in train if image_id not in by_name]:
        raise DataError(f"{root}: no image of {missing[0]} in JPEGImages, but it is listed")
    return [by_name[image_id] for image_id in train if image_id not in held_out]


def limit_voc(root: PathLike, folder: PathLike, max_train: int, max_test: int) -> None:
    """A VOC-layout folder of links to `root` with lists `trainval` and `test` of its own."""
    root = Path(root).resolve()
    train, test = voc_splits(root)
    with whole_folder(folder) as part:
        for name, split, limit in (("trainval", train, max_train), ("test", test, max_test)):
            path = part / "ImageSets" / "Main" / f"{name}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                "".join(f"{i}\n" for i in sample(_ids(root, split), limit)), encoding="utf-8"
            )
        for name in ("Annotations", "JPEGImages"):
            (part / name).symlink_to(root / name, target_is_directory=True)


def _ids(root: Path, split: str) -> list[str]:
    return (root / "ImageSets" / "Main" / f"{split}.txt").read_text(encoding="utf-8").split()


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    find = find_images if args.kind == "images" else training_images
    shrink_images(sample(find(args.folder), args.limit), args.out, args.side)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suites.prepare",
        description="Small copies of custom images for a short pre-training.",
    )
    add = parser.add_argument
    add("kind", choices=("images", "voc-images"))
    add("folder", type=Path, metavar="FOLDER", help="read, never written")
    add("out", type=Path, metavar="OUT", help="new folder of small JPEG files")
    add("--side", type=int, default=128, help="shorter side in pixels (%(default)s)")
    add("--limit", type=int, default=20000, help="of images (%(default)s)")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    run_cli(main)
