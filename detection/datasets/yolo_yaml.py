"""The data.yaml of a dataset in YOLO layout: its classes, and the images of its splits.

Its `download:`, which can be code, is not executed. The folders that it names may be anywhere, as
those of a task's keys. A line of a list must stay in the folder of the dataset or of the list,
because nobody looks at thousands of lines.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detection.datasets.base import MAX_CLASSES
from detection.datasets.coco_repair import as_integer
from detection.datasets.layout import datasets_root, inside, slashed
from moco.common.cfgnode import read_yaml
from moco.common.errors import DataError, UserError, shown
from moco.common.files import expanded, files_below, read_text
from moco.data.decode import SUFFIXES

_SPLITS = {"train": ("train",), "val": ("val", "validation", "valid"), "test": ("test",)}
_ENDINGS = (*SUFFIXES, ".jfif", ".jpe", ".mpo")  # the last three are JPEG
_UNREAD = (".avif", ".dng", ".heic", ".heif", ".jp2", ".pfm")  # images that only Ultralytics reads


@dataclass(frozen=True)
class DataYaml:
    """Content of a data.yaml.

    Attributes:
        path: The file.
        root: Folder of the dataset.
        classes: Class names in the order of their ids.
        splits: train, val, test, as far as the file has them → folders and lists of images.
        notes: Split → notes on which of two possible folders is read.
    """

    path: Path
    root: Path
    classes: tuple[str, ...]
    splits: Mapping[str, tuple[Path, ...]]
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_data_yaml(file: str | Path) -> DataYaml:
    """Read a data.yaml.

    Raises:
        DataError: If it is missing or damaged, has no classes, or is of keypoints.
    """
    path = expanded(file)
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected the data.yaml of a dataset in YOLO layout")
    try:
        content = read_yaml(path)
    except UserError as error:
        raise DataError(str(error)) from error
    if "kpt_shape" in content:
        raise DataError(
            f"{path}: kpt_shape says that the labels are keypoints, which are read in COCO's "
            "format only; export the dataset as COCO keypoints"
        )
    root = _root(path, content.get("path"))
    splits, notes = {}, {}
    for split, keys in _SPLITS.items():
        stated: Any = next((content[key] for key in keys if content.get(key)), [])
        entries = stated if isinstance(stated, list) else [stated]
        if wrong := [each for each in entries if not isinstance(each, str) or "\0" in each]:
            expected = "a folder, a .txt list, or a list of these"
            raise DataError(f"{path}: {split}: got {shown(wrong[0])}, expected {expected}")
        if entries:
            places = [_place(root, each) for each in entries]
            splits[split] = tuple(place for place, _ in places)
            notes[split] = tuple(note for _, note in places if note)
    return DataYaml(path, root, _classes(path, content), splits, notes)


def _root(file: Path, stated: Any) -> Path:
    """Return the folder of a dataset: `path` of its data.yaml, else the file's folder."""
    if stated is None:
        return file.parent
    if not isinstance(stated, str) or "\0" in stated:
        raise DataError(f"{file}: path: got {shown(stated)}, expected a folder")
    stated = slashed(stated, file.parent)
    places = [file.parent / expanded(stated), Path(datasets_root()) / stated]
    for place in places:
        if place.is_dir():
            return place
    raise DataError(f"{file}: path: {places[0]} is no folder; correct it, or delete the line")


def _place(root: Path, stated: str) -> tuple[Path, str]:
    """Return a folder or list, and a note if there are two, else "".

    Roboflow writes ../train/images where it means train/images. Beside several datasets of one
    folder, the first may exist, too, and has the images of another dataset.
    """
    stated = slashed(stated, root)
    path = root / expanded(stated)
    own = root / expanded(stated.removeprefix("../"))
    if path.exists() and not own.exists():
        return path, ""
    two = own != path and path.exists()
    return (
        own,
        f"{stated} is read as {own}, as Roboflow means it; {path} exists, too" if two else "",
    )


def _classes(file: Path, content: Mapping[str, Any]) -> tuple[str, ...]:
    names, number = content.get("names"), content.get("nc")
    if number is not None and (type(number) is not int or not 0 < number <= MAX_CLASSES):
        expected = f"a number of classes from 1 to {MAX_CLASSES}"
        raise DataError(f"{file}: nc: got {shown(number)}, expected {expected}")
    if names is None:
        if number is None:
            raise DataError(f"{file}: has neither names nor nc; write the class names into names")
        names = [f"class_{i}" for i in range(number)]
    if isinstance(names, dict):
        names = {as_integer(key): name for key, name in names.items()}
        if set(names) != set(range(len(names))):
            raise DataError(f"{file}: names: the numbers of the classes are not 0, 1, 2, …")
        names = [names[i] for i in range(len(names))]
    if not isinstance(names, list) or not 0 < len(names) <= MAX_CLASSES:
        raise DataError(f"{file}: names: got {shown(names)}, expected a list of class names")
    for name in names:
        # YAML reads no and yes as booleans, and an empty line as null.
        if type(name) not in (str, int) or name == "":
            raise DataError(f"{file}: names: got {shown(name)}, expected a name; put it in quotes")
    if number not in (None, len(names)):
        raise DataError(f"{file}: nc is {number}, but names has {len(names)}; correct one of them")
    name, count = Counter(map(str, names)).most_common(1)[0]
    if count > 1:
        raise DataError(f"{file}: names: {shown(name)} is there twice; rename one of them")
    return tuple(map(str, names))


def images_of(data: DataYaml, split: str) -> list[Path]:
    """Return the images of a split, those of a folder sorted by path.

    Raises:
        DataError: If there is none, or a folder or list is missing or damaged, or an image is
            listed twice.
    """
    images: list[Path] = []
    for place in data.splits[split]:
        if place.is_dir():
            images += _images_below(place)
        elif place.is_file() and place.suffix == ".txt":
            images += _listed(place, data.root)
        else:
            raise DataError(
                f"{data.path}: {split}: {place} is neither a folder nor a .txt list; correct it"
            )
    if not images:
        places = ", ".join(map(str, data.splits[split]))
        raise DataError(f"{data.path}: {split}: no images in {places}")
    image, count = Counter(images).most_common(1)[0]
    if count > 1:
        raise DataError(f"{data.path}: {split}: {image} is listed twice")
    return images


def _images_below(folder: Path) -> Iterator[Path]:
    for name in sorted(files_below(folder)):
        if name.lower().endswith(_UNREAD):
            raise DataError(f"{folder / name}: not read in this format; convert it to PNG")
        if name.lower().endswith(_ENDINGS):
            yield folder / name


def lines_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of the lines that are not empty; raise DataError unless it is UTF-8."""
    try:
        lines = read_text(file, encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not a text file in UTF-8") from error
    for number, line in enumerate(lines, start=1):
        if text := line.strip():
            yield number, text


def _listed(file: Path, root: Path) -> Iterator[Path]:
    """Yield the images of a list; its lines are relative to its folder."""
    for number, line in lines_of(file):
        where = f"{file}:{number}"
        folder, name = file.parent, slashed(line, file.parent)
        for own in (file.parent.absolute(), root.absolute()):
            if Path(name).is_relative_to(own):
                folder, name = own, str(Path(name).relative_to(own))
        path = folder / inside(name, where)
        if not name.lower().endswith(_ENDINGS):
            raise DataError(f"{where}: {name} has none of the endings {', '.join(_ENDINGS)}")
        if not path.is_file():
            raise DataError(f"{where}: {path} is missing; lines are relative to the list's folder")
        yield path


def label_path(image: Path) -> Path:
    """Return the path of an image's labels: its last /images/ becomes /labels/, as in Ultralytics.

    Without such a folder, the labels are beside the image.
    """
    before, found, after = str(image.absolute()).rpartition("/images/")
    return Path(f"{before}/labels/{after}" if found else image).with_suffix(".txt")
