"""iNaturalist 2018 as its authors hand it out: for each split a list of images and labels.

https://github.com/visipedia/inat_comp/tree/master/2018: `train2018.json` and `val2018.json`
(COCO's format) beside the folder `train_val2018` that their file names start with.
"""

import json
from pathlib import Path
from typing import Any

from moco.common.errors import DataError
from moco.common.files import PathLike
from moco.data.images import FileImages, LabeledSets

LISTS = ("train2018.json", "val2018.json")


def find_inaturalist(root: PathLike) -> Path | None:
    """`root` if it holds the lists; None otherwise."""
    root = Path(root).expanduser()
    return root if all((root / name).is_file() for name in LISTS) else None


def read_inaturalist(root: Path) -> LabeledSets:
    """Both splits; a class is a category, in the order of the categories' ids.

    Raises:
        DataError: a list that is damaged, names files outside `root`, or whose first image is
            not there.
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
    """Names of the categories by id; paths and categories of the images, by the images' ids."""
    path = root / name
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        names = {int(entry["id"]): str(entry["name"]) for entry in content["categories"]}
        of_image = {entry["image_id"]: entry["category_id"] for entry in content["annotations"]}
        images = sorted((int(entry["id"]), str(entry["file_name"])) for entry in content["images"])
        categories = [int(of_image[image]) for image, _ in images]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not iNaturalist's list ({type(error).__name__}: {str(error)[:100]})"
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
        raise DataError(f"{path}: no such file {paths[0]}; unpack train_val2018.tar.gz beside it")
    return names, paths, categories
