"""iNaturalist 2018 dataset in the published layout: a list of images and labels for each split.

`train2018.json` and `val2018.json` (COCO's format) are next to the folder `train_val2018`, which
their file names start with: https://github.com/visipedia/inat_comp/tree/master/2018.
"""

import json
from pathlib import Path
from typing import Any

from moco.common.errors import DataError
from moco.common.files import PathLike, expand_home, read_text
from moco.data.images import FileImages, LabeledSets

LISTS = ("train2018.json", "val2018.json")


def find_inaturalist(root: PathLike) -> Path | None:
    """Return `root` if it contains the lists of both splits, else None."""
    root = expand_home(root)
    return root if all((root / name).is_file() for name in LISTS) else None


def read_inaturalist(root: Path) -> LabeledSets:
    """Read both splits; classes are the categories in the order of the category ids.

    Raises:
        DataError: If a list is damaged or names files outside `root`, or if the first image of a
            list is missing.
    """
    train_names, train, train_ids = _split(root, LISTS[0])
    val_names, val, val_ids = _split(root, LISTS[1])
    if train_names != val_names:
        raise DataError(f"{root}: {LISTS[0]} and {LISTS[1]} do not have the same categories")
    labels = {category: label for label, category in enumerate(sorted(train_names))}
    classes = [train_names[category] for category in sorted(train_names)]
    return LabeledSets(
        classes,
        FileImages(train),
        [labels[category] for category in train_ids],
        FileImages(val),
        [labels[category] for category in val_ids],
    )


def _split(root: Path, name: str) -> tuple[dict[int, str], list[str], list[int]]:
    """Read the list of a split.

    Returns:
        Category names by id, paths of the images, and category ids of the images. Paths and
        category ids are sorted by image id.
    """
    path = root / name
    try:
        content: dict[str, Any] = json.loads(read_text(path))
        names = {int(entry["id"]): str(entry["name"]) for entry in content["categories"]}
        labels = {entry["image_id"]: entry["category_id"] for entry in content["annotations"]}
        images = sorted((int(entry["id"]), str(entry["file_name"])) for entry in content["images"])
        categories = [int(labels[image]) for image, _ in images]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not a list of iNaturalist ({type(error).__name__}: {str(error)[:100]})"
        ) from error
    if not images:
        raise DataError(f"{path}: lists no images")
    unknown = set(categories) - set(names)
    if unknown:
        raise DataError(f"{path}: category {min(unknown)} is not among its categories")
    for _, file in images:
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise DataError(f"{path}: {file[:200]!r} is outside {root}; expected a path below it")
    paths = [str(root / file) for _, file in images]
    if not Path(paths[0]).is_file():
        raise DataError(f"{path}: no such file {paths[0]}; unpack train_val2018.tar.gz next to it")
    return names, paths, categories
