"""Splits for a custom dataset without any: `moco-transfer datasets split`.

The images of each class are divided by the shares, the rarest class first (iterative
stratification, Sechidis et al. 2011), in an order that the seed and the images' bytes determine.
Images of equal bytes stay in one split. Only new files are written.
"""

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml

from detection.datasets.base import SPLITS, Split, doctor_command
from detection.datasets.coco import COCOSource, is_coco
from detection.datasets.coco_json import as_integer
from detection.datasets.files import describe_folder, read_ids, read_json, read_lines
from detection.datasets.voc import ENDINGS, LISTS, class_names, find_folders, is_voc, split_lists
from detection.datasets.yolo import DataYaml, read_data_yaml, read_images
from moco.common.command import quote
from moco.common.errors import DataError, UserError, echo, plural
from moco.common.errors import format_value as short
from moco.common.files import expand_home, sha256_file, write_together

Parts = dict[str, list[int]]  # split → positions of its images, those for training first
_ROBOFLOW = "*/_annotations.coco.json"
_COCO = "COCO's format"


@dataclass(frozen=True)
class Undivided:
    """Custom dataset without splits.

    Attributes:
        layout: Name of the layout in messages.
        images: Path of each image, and the classes of its objects.
        files: (positions of the images by split) → text of each file to write; the others
            are not used before the last one exists.
        arguments: Doctor's arguments for the result.
    """

    layout: str
    images: Sequence[tuple[str, frozenset[str]]]
    files: Callable[[Parts], dict[Path, str]]
    arguments: Sequence[str]


def write_splits(place: str, shares: Mapping[str, float], seed: int, root: str = "") -> None:
    """Divide a dataset, write the lists, and print what was written.

    Args:
        place: Folder of the dataset, or its data.yaml or annotations.
        shares: Split → share of the images; they add up to 1.
        seed: Seed.
        root: Folder of the images of a file in COCO's format; "": found near the file.

    Raises:
        UserError: If the dataset has splits, or a file to write exists, or `root` is given for
            another format.
        DataError: If there is no dataset, it is damaged, or has too few images.
    """
    data = find_undivided(expand_home(place), root)
    if root and data.layout != _COCO:
        raise UserError(f"--root belongs to a file in {_COCO}; {place} is in {data.layout}")
    copies, parts, files = divide_dataset(data, shares, seed, place)
    kept = f", {copies} of them copies of others, which are kept together" if copies else ""
    echo(f"{place}: {data.layout}, {plural(len(data.images), 'image')}{kept}")
    for split, chosen in parts.items():
        having = Counter(name for i in chosen for name in data.images[i][1])
        named = ", ".join(f"{name} {having[name]}" for name in sorted(having))
        echo(f"  {split}: {plural(len(chosen), 'image')}; with objects of {named or 'no class'}")
    write_together(files)
    echo(
        *(f"wrote {path}" for path in files),
        "",
        f"next: {doctor_command()} {quote(*data.arguments)}",
    )


def divide_fetched(folder: Path) -> None:
    """Write the splits of a published dataset that has none, 60 % to train on, 40 % to test on."""
    shares = {"train": 0.6, "test": 0.4}
    write_together(divide_dataset(find_undivided(folder), shares, 0, str(folder)).files)


class Division(NamedTuple):
    """A dataset divided.

    Attributes:
        copies: Number of images that are copies of others.
        parts: Split → positions of its images.
        files: Text of each file to write.
    """

    copies: int
    parts: Parts
    files: dict[Path, str]


def divide_dataset(data: Undivided, shares: Mapping[str, float], seed: int, where: str) -> Division:
    """Divide the images of a dataset; nothing is written.

    Args:
        data: Dataset without splits.
        shares: Split → share of the images; they add up to 1.
        seed: Seed.
        where: Name of the dataset in messages.

    Raises:
        DataError: If the dataset has too few images.
    """
    digests = [sha256_file(path) for path, _ in data.images]
    parts = divide(digests, [classes for _, classes in data.images], shares, seed)
    different = len(set(digests))
    if empty := [split for split, chosen in parts.items() if not chosen]:
        few = plural(different, "different image")
        raise DataError(f"{where}: {few} are too few: {', '.join(empty)} would have none")
    return Division(len(digests) - different, parts, data.files(parts))


def divide(
    digests: Sequence[str],
    classes: Sequence[frozenset[str]],
    shares: Mapping[str, float],
    seed: int,
) -> dict[str, list[int]]:
    """Divide images by shares, as far as possible also within each class.

    Args:
        digests: Digest of each image; equal ones stay together.
        classes: Classes of the objects of each image.
        shares: Split → share; they add up to 1.
        seed: Seed.

    Returns:
        Positions of each split's images, ascending.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for position, digest in enumerate(digests):
        groups[digest].append(position)
    order = sorted(groups, key=lambda each: hashlib.sha256(f"{seed} {each}".encode()).digest())
    counts = {g: Counter(name for i in groups[g] for name in classes[i]) for g in order}
    left: Counter[str] = sum(counts.values(), Counter())
    need = {split: {name: share * left[name] for name in left} for split, share in shares.items()}
    room = {split: share * len(digests) for split, share in shares.items()}
    parts: dict[str, list[int]] = {split: [] for split in shares}
    waiting = dict.fromkeys(order)
    while waiting:
        open_classes = [name for name in left if left[name]]
        rarest = min(open_classes, key=lambda name: (left[name], name), default="")
        for group in [g for g in waiting if not rarest or rarest in counts[g]]:
            split = max(shares, key=lambda s: (need[s].get(rarest, 0), room[s]))
            parts[split] += groups[group]
            room[split] -= len(groups[group])
            for name, number in counts[group].items():
                need[split][name] -= number
                left[name] -= number
            del waiting[group]
    return {split: sorted(chosen) for split, chosen in parts.items()}


def find_undivided(place: Path, root: str = "") -> Undivided:
    """Recognize the layout of a dataset without splits.

    Args:
        place: Folder of the dataset, or its data.yaml or annotations.
        root: Folder of the images of a file in COCO's format; "": found near the file.

    Raises:
        UserError: If it has splits.
        DataError: If there is no dataset, or it is damaged.
    """
    if place.suffix in (".yaml", ".yml") or (place / "data.yaml").is_file():
        return _yolo(read_data_yaml(place / "data.yaml" if place.is_dir() else place))
    if (place / "classes.txt").is_file():  # as in Label Studio's exports
        names = tuple(name for line in read_lines(place / "classes.txt") if (name := line.strip()))
        splits = {"train": (place / "images",)}
        return _yolo(DataYaml(place / "data.yaml", place, names, splits))
    if is_voc(place):
        return _voc(place)
    files = [place] if place.is_file() else _coco_files(place)
    if len(files) > 1:
        named = ", ".join(path.relative_to(place).as_posix() for path in files)
        raise UserError(f"{place}: has splits, or several datasets: {named}; give one of the files")
    if not files:
        raise DataError(
            f"{place}: {describe_folder(place)}; expected a dataset: data.yaml or classes.txt with "
            f"images/ and labels/, Annotations/ with JPEGImages/, or a JSON file in {_COCO}"
        )
    return _coco(files[0], root)


def _voc(root: Path) -> Undivided:
    lists = split_lists(root)
    own = [path.stem for path in lists if path.stem in SPLITS]
    # Lists of test images alone are those of a split that was killed, and are completed.
    divided = not {"train", "trainval"}.isdisjoint(own) or len(own) < len(lists)
    if len(lists) > 1 and divided:
        raise UserError(f"{root}: has splits: {', '.join(f'{LISTS}/{p.name}' for p in lists)}")
    annotations, images_folder = find_folders(root)
    images = {
        path.stem: path
        for path in sorted(images_folder.glob("*"))
        if path.suffix.lower() in ENDINGS
    }
    files = {path.stem: path for path in sorted(annotations.glob("*.xml"))}
    # CVAT writes one list of all images, default.txt.
    names = read_ids(lists[0]) if lists and not own else list(files)
    for name in names:
        for folder, having in ((annotations, files), (images_folder, images)):
            if name not in having:
                raise DataError(f"{folder}: has no file of {name}")

    def written(parts: Parts) -> dict[Path, str]:
        return {
            root / LISTS / f"{split}.txt": _lines(names[i] for i in chosen)
            for split, chosen in reversed(parts.items())
        }

    found = [(str(images[name]), frozenset(class_names(files[name]))) for name in names]
    return Undivided("VOC layout", found, written, ["--voc-dir", str(root)])


def _yolo(data: DataYaml) -> Undivided:
    # Tools write the same folder for every split where there is only one.
    places = {places: split for split, places in data.splits.items() if _exists(places)}
    if len(places) != 1:
        names = ", ".join(places.values())
        raise (UserError if places else DataError)(
            f"{data.path}: has splits: {names}" if places else f"{data.path}: names no images"
        )
    split = read_images("dataset", data, *places.values())
    shown = [os.path.relpath(record["file_name"], data.root) for record in split.records]
    if outside := [name for name in shown if name.startswith("..")]:
        raise DataError(
            f"{data.path}: {outside[0]} is outside of {data.root}; set path to a folder with all "
            "images"
        )
    exists = data.path.exists()
    target = data.path.with_name(f"{data.path.stem}_split.yaml") if exists else data.path

    def files(parts: Parts) -> dict[Path, str]:
        lists = {
            data.root / f"{split}.txt": _lines(f"./{shown[i]}" for i in chosen)
            for split, chosen in parts.items()
        }
        root = os.path.relpath(data.root, target.parent)
        content = {} if root == "." else {"path": root}
        content |= {split: f"{split}.txt" for split in parts}
        names = {"names": dict(enumerate(data.classes))}
        text = yaml.safe_dump({**content, **names}, sort_keys=False, allow_unicode=True)
        return {**lists, target: text}

    return Undivided("YOLO layout", _images(split), files, ["--yolo", str(target)])


def _exists(places: Sequence[Path]) -> bool:
    return any(path.exists() for path in places)


def _coco_files(folder: Path) -> list[Path]:
    files = (
        path
        for pattern in ("*.json", "annotations/*.json", _ROBOFLOW)
        for path in sorted(folder.glob(pattern))
    )
    return [path for path in files if is_coco(path)]


def _coco(file: Path, root: str) -> Undivided:
    split = COCOSource(file.stem, str(file), os.path.expanduser(root), "custom").read()
    content, _ = read_json(file)
    ids = [record["image_id"] for record in split.records]

    def files(parts: Parts) -> dict[Path, str]:
        written = {}
        for name, chosen in reversed(parts.items()):
            own = {ids[i] for i in chosen}
            rows = {
                kind: [row for row in content[kind] if as_integer(row[key]) in own]
                for kind, key in (("images", "id"), ("annotations", "image_id"))
            }
            written[_part_of(file, name)] = json.dumps({**content, **rows})
        return written

    arguments = ["--root", root] if root else []
    arguments += [
        word for name in ("train", "test") for word in ("--coco-json", str(_part_of(file, name)))
    ]
    return Undivided(_COCO, _images(split), files, arguments)


def _part_of(file: Path, split: str) -> Path:
    return file.with_name(f"{file.stem}_{split}.json")


def _images(split: Split) -> list[tuple[str, frozenset[str]]]:
    return [
        (
            record["file_name"],
            frozenset(split.classes[item["category_id"]] for item in record["annotations"]),
        )
        for record in split.records
    ]


def _lines(names: Iterable[str]) -> str:
    """Return a list of one name per line.

    Raises:
        DataError: If a name would take several lines, or is no text in UTF-8.
    """
    lines = list(names)
    for name in lines:
        own = name.strip().splitlines() == [name]
        if not own or name.encode(errors="replace").decode() != name:
            raise DataError(
                f"{short(name)}: a list cannot have this name, with a line break, spaces at an end "
                "or not in UTF-8; rename the file"
            )
    return "".join(f"{name}\n" for name in lines)
