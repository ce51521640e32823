"""YOLO layout (Ultralytics), read in place: a data.yaml, images, and a label file for each image.

    data.yaml                 names or nc; train, val, test: folders or .txt lists of images; path
    images/train/a.jpg        or train/images/a.jpg, as Roboflow has it
    labels/train/a.txt        the last /images/ of the path becomes /labels/

A line of a label file is `class cx cy w h`, or `class x1 y1 x2 y2 x3 y3 …`, a polygon. Numbers are
fractions of the image's width and height, after its EXIF orientation; classes count from 0. An
image without a label file, or with an empty one, is background.

`.cache` files, which can be older than the labels, are not read. `download:` in a data.yaml, which
can be code, is not executed. The folders that a data.yaml names may be anywhere, as those of a
task's keys. A line of a list must stay in the folder of the dataset or of the list, because nobody
looks at thousands of lines.
"""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fvcore.common.config import CfgNode

from detection.datasets.base import (
    FORMATS,
    MAX_CLASSES,
    XYWH_ABS,
    Custom,
    Format,
    Record,
    Split,
    choose_splits,
    splits_expected,
    with_coco_metric,
)
from detection.datasets.coco_json import (
    MOST,
    are_coordinates,
    as_integer,
    farthest_polygon_px,
)
from detection.datasets.files import (
    check_relative,
    datasets_root,
    image_size,
    missing_files,
    read_lines,
    with_slashes,
)
from moco.common.cfgnode import read_yaml
from moco.common.errors import DataError, UserError, format_value, plural
from moco.common.files import expand_home, files_below, read_bytes
from moco.data.decode import SUFFIXES

_SPLITS = {"train": ("train",), "val": ("val", "validation", "valid"), "test": ("test",)}
_ENDINGS = (*SUFFIXES, ".jfif", ".jpe", ".mpo")  # the last three are JPEG
_NAMED = 10  # broken lines in one message
_ROUNDING_PX = 1.0  # extent of a box over the border that is not noted
MAX_LABEL_BYTES = 4 << 20  # of one image; 100,000 boxes take half of it
_ACCEPTED = (-0.01, 1.01)  # Ultralytics drops an image with a number outside
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
        DataError: If it is missing or damaged, has no classes, or describes keypoints.
    """
    path = expand_home(file)
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
            raise DataError(f"{path}: {split}: got {format_value(wrong[0])}, expected {expected}")
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
        raise DataError(f"{file}: path: got {format_value(stated)}, expected a folder")
    stated = with_slashes(stated, file.parent)
    places = [file.parent / expand_home(stated), Path(datasets_root()) / stated]
    for place in places:
        if place.is_dir():
            return place
    raise DataError(f"{file}: path: {places[0]} is no folder; correct it, or delete the line")


def _place(root: Path, stated: str) -> tuple[Path, str]:
    """Return a folder or list, and a note if there are two, else "".

    Roboflow writes ../train/images where it means train/images. Beside several datasets of one
    folder, the first may exist, too, and has the images of another dataset.
    """
    stated = with_slashes(stated, root)
    path = root / expand_home(stated)
    own = root / expand_home(stated.removeprefix("../"))
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
        raise DataError(f"{file}: nc: got {format_value(number)}, expected {expected}")
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
        raise DataError(f"{file}: names: got {format_value(names)}, expected a list of class names")
    for name in names:
        # YAML reads no and yes as booleans, and an empty line as null.
        if type(name) not in (str, int) or name == "":
            raise DataError(
                f"{file}: names: got {format_value(name)}, expected a name; put it in quotes"
            )
    if number not in (None, len(names)):
        raise DataError(f"{file}: nc is {number}, but names has {len(names)}; correct one of them")
    name, count = Counter(map(str, names)).most_common(1)[0]
    if count > 1:
        raise DataError(f"{file}: names: {format_value(name)} occurs twice; rename one of them")
    return tuple(map(str, names))


def list_images(data: DataYaml, split: str) -> list[Path]:
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


def _listed(file: Path, root: Path) -> Iterator[Path]:
    """Yield the images of a list, whose lines are relative to the list's folder."""
    for number, line in enumerate(map(str.strip, read_lines(file)), start=1):
        if not line:
            continue
        where = f"{file}:{number}"
        folder, name = file.parent, with_slashes(line, file.parent)
        for own in (file.parent.absolute(), root.absolute()):
            if Path(name).is_relative_to(own):
                folder, name = own, str(Path(name).relative_to(own))
        path = folder / check_relative(name, where)
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


class Label(NamedTuple):
    """Line of a label file: a class, and the numbers of a box (4) or of a polygon (6 or more)."""

    line: int
    class_id: int
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class YOLOSource:
    """Location and reader of a split.

    Attributes:
        name: Name of the split in DATASETS.TRAIN and DATASETS.TEST.
        file: Path of the data.yaml.
        split: Key of the split in the data.yaml: train, val or test.
    """

    name: str
    file: str
    split: str

    def present(self) -> bool:
        """Return whether a folder or list of the split exists and, for `test`, a label file.

        Test images are often published without labels.
        """
        data = read_data_yaml(self.file)
        if not any(path.exists() for path in data.splits[self.split]):
            return False
        try:
            return self.split != "test" or bool(_labeled(list_images(data, "test")))
        except DataError:  # reading the split raises it again
            return True

    def read(self) -> Split:
        """Read the split; boxes over the border are clipped and noted."""
        return read_images(self.name, read_data_yaml(self.file), self.split)


def read_images(name: str, data: DataYaml, split: str) -> Split:
    """Read a split of a data.yaml, called `name`; raise DataError as `Source.read`."""
    images = list_images(data, split)
    if not (labeled := _labeled(images)):
        raise DataError(
            f"{name}: none of {plural(len(images), 'image')} has a label file; the first "
            f"is expected in {label_path(images[0])}"
        )
    reader = _Reader(data)
    labels = {
        image: reader.labels(label_path(image)) if image in labeled else [] for image in images
    }
    polygons = [len(label.numbers) > 4 for found in labels.values() for label in found]
    has_masks = bool(polygons) and all(polygons)
    records, digest = [], hashlib.sha256(repr((name, data.classes)).encode())
    for image, found in labels.items():
        record = reader.record(image, found, has_masks)
        content = (
            os.path.relpath(image, data.root),
            record["width"],
            record["height"],
            [label[1:] for label in found],
        )
        digest.update(repr(content).encode(errors="surrogateescape"))
        records.append(record)
    if faults := reader.faults:
        more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        named = "; ".join(faults[:_NAMED]) + more
        raise DataError(f"{name}: {plural(len(faults), 'broken line')}: {named}")
    reader.counts["missing"] = len(images) - len(labeled)
    if any(polygons) and not has_masks:
        reader.counts["mixed"] = polygons.count(False)
    return with_coco_metric(
        Split(
            name=name,
            evaluator_type="coco",
            classes=data.classes,
            records=tuple(records),
            annotations_sha256=digest.hexdigest(),
            notes=(*data.notes.get(split, ()), *_notes(reader.counts)),
            has_masks=has_masks,
        )
    )


def _labeled(images: Sequence[Path]) -> set[Path]:
    """Return the images that have a label file."""
    missing = set(missing_files([str(label_path(image)) for image in images]))
    return {image for image in images if str(label_path(image)) not in missing}


class _Reader:
    """Reader of label files.

    Attributes:
        counts: Counts that the notes state.
        faults: Broken lines, as file, number and reason.
    """

    def __init__(self, data: DataYaml) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._data = data

    def _fault(self, path: Path, line: int, reason: object) -> None:
        self.faults.append(f"{os.path.relpath(path, self._data.root)}:{line}: {reason}")

    def labels(self, path: Path) -> list[Label]:
        """Read the lines of a label file."""
        try:
            if not path.is_file():
                raise ValueError("not a file")
            if (size := path.stat().st_size) > MAX_LABEL_BYTES:
                raise ValueError(f"{size:,} bytes, expected at most {MAX_LABEL_BYTES:,}")
            lines = read_bytes(path).decode("utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            self._fault(path, 1, f"cannot be read as text ({error})")
            return []
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                if columns := line.split():
                    found.append(_label(number, columns, self._data.classes))
            except ValueError as error:
                self._fault(path, number, error)
        return found

    def record(self, image: Path, labels: Sequence[Label], has_masks: bool) -> Record:
        """Return Detectron2's dict of an image, without its id."""
        width, height = image_size(image)
        objects = []
        for label in labels:
            pixels = [v * (width, height)[i % 2] for i, v in enumerate(label.numbers)]
            try:
                item = self._object(label.class_id, pixels, width, height)
            except ValueError as error:
                self._fault(label_path(image), label.line, error)
                continue
            objects.append({**item, "segmentation": [pixels]} if has_masks else item)
        numbers = [number for label in labels for number in label.numbers]
        low, high = _ACCEPTED
        self.counts["dropped"] += any(not low <= number <= high for number in numbers)
        self.counts["background"] += not labels
        self.counts["twice"] += len(labels) - len({label[1:] for label in labels})
        return {
            "file_name": str(image),
            "height": height,
            "width": width,
            "annotations": objects,
        }

    def _object(self, class_id: int, pixels: list[float], width: int, height: int) -> Record:
        """Return an object without its mask; its box is clipped."""
        if len(pixels) == 4:
            x, y, w, h = pixels
            left, top, right, bottom = x - w / 2, y - h / 2, x + w / 2, y + h / 2
        else:
            left, right = min(pixels[::2]), max(pixels[::2])
            top, bottom = min(pixels[1::2]), max(pixels[1::2])
        if left >= width or top >= height or right <= 0 or bottom <= 0:
            raise ValueError(
                "outside the image; coordinates are fractions of its width and height, 0 to 1"
            )
        if not are_coordinates(pixels, farthest_polygon_px({"width": width, "height": height})):
            raise ValueError("a coordinate is far outside the image")
        over = max(-left, -top, right - width, bottom - height)
        left, top, right, bottom = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
        self.counts["clipped"] += over > _ROUNDING_PX
        if len(pixels) == 4:
            self.counts["boxes"] += 1
            self.counts["corners"] += pixels[0] < pixels[2] and pixels[1] < pixels[3]
        self.counts["empty"] += right <= left or bottom <= top
        box = [left, top, right - left, bottom - top]
        return {"category_id": class_id, "bbox": box, "bbox_mode": XYWH_ABS}


def _label(line: int, columns: Sequence[str], classes: Sequence[str]) -> Label:
    """Parse a line; raise ValueError with the reason if it is broken."""
    if len(columns) == 6:
        raise ValueError("6 columns, the last of which looks like a detector's score; delete it")
    if len(columns) < 5 or len(columns) % 2 == 0:
        expected = "class cx cy w h, or class and the points of a polygon"
        raise ValueError(f"{plural(len(columns), 'column')}, expected {expected}")
    number, *numbers = map(_number, columns)
    if number != int(number) or not 0 <= number < len(classes):
        expected = f"an integer from 0 to {len(classes) - 1}, the classes of data.yaml"
        raise ValueError(f"class {format_value(columns[0])}, expected {expected}")
    if len(numbers) == 4 and min(numbers[2:]) < 0:
        raise ValueError("width or height is below 0")
    return Label(line, int(number), tuple(numbers))


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise ValueError(f"{format_value(text)} is not a number") from error
    if not math.isfinite(number):
        raise ValueError(f"{format_value(text)} is not a finite number")
    return number


def _notes(counts: Counter[str]) -> Iterator[str]:
    if counts["background"]:
        yield (
            f"background images, without an object: {counts['background']}, of which "
            f"{counts['missing']} have no label file"
        )
    if counts["mixed"]:
        yield (
            f"boxes among polygons: {counts['mixed']}; all objects are read as boxes, because "
            "masks need a polygon for each"
        )
    if counts["clipped"] and counts["corners"] >= MOST * counts["boxes"]:
        yield (
            f"boxes beyond the image that look like x1 y1 x2 y2, but YOLO's format has cx cy w h: "
            f"{counts['clipped']}"
        )
    elif counts["clipped"]:
        yield f"boxes over the border, clipped: {counts['clipped']}"
    if counts["dropped"]:
        yield (
            f"images with a coordinate beyond 0 to 1: {counts['dropped']}, used here, which "
            "Ultralytics leaves out"
        )
    if counts["twice"]:
        yield f"lines equal to another one in the file, which no detector finds: {counts['twice']}"
    if counts["empty"]:
        yield f"boxes without area, left out in training: {counts['empty']}"


def data_sources(datasets: CfgNode) -> list[YOLOSource]:
    """Return the splits of DATASETS.YOLO_YAML, named `<folder of the file>_<split>`.

    Raises:
        DataError: If the file is missing or damaged.
    """
    if not (file := datasets.get("YOLO_YAML", "")):
        return []
    data = read_data_yaml(file)
    stem = data.path.resolve().parent.name
    return [YOLOSource(f"{stem}_{split}", str(data.path), split) for split in data.splits]


@FORMATS.register()
def yolo() -> Format:
    """Return the format of YOLO layout, which has custom datasets only."""
    return Format(
        sources=lambda root: (),
        counts={},
        tree="",
        tasks={},
        custom=Custom(
            flag="--yolo",
            options={"metavar": "FILE", "help": "a custom dataset, as in DATASETS.YOLO_YAML"},
            task=_custom_task,
            sources=data_sources,
            parse=_parse_custom,
            arguments=lambda datasets: (
                [["--yolo", datasets.YOLO_YAML]] if datasets.get("YOLO_YAML", "") else []
            ),
            find=_find,
        ),
    )


def _parse_custom(file: str, root: str) -> tuple[list[YOLOSource], dict[str, str]]:
    if root:
        raise UserError("--root belongs to --coco-json, or to the name of a published dataset")
    keys = {"YOLO_YAML": file}
    return data_sources(CfgNode(keys)), keys


def _find(folder: Path) -> list[dict[str, Path]]:
    names = ("data_split.yaml", "data.yaml", "dataset.yaml")  # the first is of `datasets split`
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    return [{"DATASETS.YOLO_YAML": file}] if file else []


def _custom_task(splits: Sequence[Split], keys: Mapping[str, str]) -> list[str]:
    """Choose COCO's own task if all objects have masks, else the tutorial's small one for boxes."""
    names = [split.name.rpartition("_")[2] for split in splits]
    if not choose_splits(names, ("TRAIN", "TEST")):
        raise DataError(splits_expected(keys["YOLO_YAML"], names, keys["YOLO_YAML"]))
    if all(split.has_masks for split in splits):
        return ["configs/coco/mask_rcnn_R_50_FPN_1x.yaml"]
    return ["configs/voc/faster_rcnn_R_18_C4_small.yaml"]
