"""PASCAL VOC layout: read strictly, because what is half right trains without complaint.

    <root>/ImageSets/Main/<split>.txt    one image id per line
    <root>/Annotations/<id>.xml          size, and per object: name, difficult, bndbox
    <root>/JPEGImages/<id>.jpg           of a custom dataset also .jpeg, .png, .bmp in any case

Everything is checked before training: a file that is missing or malformed, a class that is not in
the list, a box that is inverted, outside, or not a number, a size that contradicts the image. A
box that reaches over the border is clipped, and the count is kept.

Coordinates: annotations are 1-based and inclusive, and `VOCObject.box` and `Split.truth` keep
them so; `Split.records` has 0-based half-open XYXY as Detectron2 does (detectron2/data/datasets/
pascal_voc.py): xmin - 1, ymin - 1, xmax, ymax. R: objects of one image.
"""

import functools
import hashlib
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fvcore.common.config import CfgNode

from detection.datasets.base import Record, Split
from detection.datasets.layout import DATASETS_VARIABLE, datasets_root, image_size, names_in
from detection.evaluation.voc import GroundTruth
from moco.common.errors import DataError, UserError

VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train",
    "tvmonitor",
)  # fmt: skip

# Detectron2's names (detectron2/data/datasets/builtin.py) → folder, split, year.
_BUILTIN = {
    f"voc_{year}_{split}": (f"VOC{year}", split, year)
    for year, splits in ((2007, ("trainval", "train", "val", "test")),
                         (2012, ("trainval", "train", "val")))
    for split in splits
}  # fmt: skip

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp")  # in order of preference

_TREE = """\
{root}/
  Annotations/000001.xml ...
  ImageSets/Main/{split}.txt   (one image id per line)
  JPEGImages/000001.jpg ..."""


@dataclass(frozen=True)
class VOCSource:
    """Where a split lies and how it is read.

    Attributes:
        name: as in DATASETS.TRAIN and TEST.
        classes: allowed class names in order of their ids.
        year: of the metric: 2007 = 11 points, 2012 = area.
        builtin: one of Detectron2's own names, whose images are .jpg alone.
    """

    name: str
    root: Path
    split: str
    year: int
    classes: tuple[str, ...]
    builtin: bool

    def present(self) -> bool:
        """Whether its annotations are there at all, right or wrong."""
        return _list_path(self).is_file()

    def read(self) -> Split:
        """Read and check the whole split.

        Raises:
            DataError: anything of a file that cannot be used; names file, object, reason.
        """
        images, clipped = _read(self)
        notes = (f"boxes over the border, clipped: {clipped}",) if clipped else ()
        return Split(
            name=self.name,
            evaluator_type="pascal_voc",
            classes=self.classes,
            records=tuple(_record(image) for image in images),
            annotations_sha256=_sha256(self.name, images),
            notes=notes,
            metadata={
                "thing_classes": list(self.classes),
                "dirname": str(self.root),
                "split": self.split,
                "year": self.year,
            },
            truth={image.image_id: _truth(image) for image in images},
        )


@dataclass(frozen=True)
class VOCObject:
    """One annotated object; `box` = (xmin, ymin, xmax, ymax), 1-based, inclusive, inside."""

    class_id: int
    box: tuple[float, float, float, float]
    difficult: bool


@dataclass(frozen=True)
class VOCImage:
    """One image, sizes in pixels as it is shown (EXIF orientation applied)."""

    image_id: str
    file_name: str
    height: int
    width: int
    objects: tuple[VOCObject, ...]


def sources(cfg: CfgNode) -> dict[str, VOCSource]:
    """The splits of DATASETS.VOC_DIR; without one, Detectron2's names."""
    if cfg.DATASETS.get("VOC_DIR", ""):
        return {source.name: source for source in folder_sources(cfg.DATASETS)}
    root = Path(datasets_root())
    return {
        name: VOCSource(name, root / folder, split, year, VOC_CLASSES, True)
        for name, (folder, split, year) in _BUILTIN.items()
    }


def folder_sources(datasets: CfgNode) -> list[VOCSource]:
    """The splits of DATASETS.VOC_DIR, named `<folder>_<split>`, in order of their names.

    Without DATASETS.VOC_CLASSES the classes are all names in the folder's annotations, sorted.
    """
    root = Path(datasets.VOC_DIR).expanduser()
    lists = sorted((root / "ImageSets" / "Main").glob("*.txt"))
    if not lists or not (root / "Annotations").is_dir():
        raise DataError(f"DATASETS.VOC_DIR {root}: {_tree(root, 'trainval')}")
    if datasets.VOC_YEAR not in (2007, 2012):
        raise UserError(f"DATASETS.VOC_YEAR: got {datasets.VOC_YEAR}, choices are 2007, 2012")
    classes = tuple(datasets.VOC_CLASSES) or annotated_classes(root)
    stem = root.resolve().name
    return [
        VOCSource(f"{stem}_{path.stem}", root, path.stem, datasets.VOC_YEAR, classes, False)
        for path in lists
    ]


@functools.lru_cache(maxsize=8)
def annotated_classes(root: Path) -> tuple[str, ...]:
    """All class names in a folder's annotations, sorted, so that every split agrees on the ids."""
    names = set()
    for path in sorted((root / "Annotations").glob("*.xml")):
        for index, element in enumerate(_parse(path).findall("object")):
            names.add(_text(element, "name", path, f"object {index + 1}"))
    if not names:
        raise DataError(f"{root / 'Annotations'}: no annotated objects, so no classes to learn")
    return tuple(sorted(names))


def _read(source: VOCSource) -> tuple[list[VOCImage], int]:
    """All images of a split, and the number of boxes that were clipped."""
    ids = _image_ids(source)
    class_ids = {name: index for index, name in enumerate(source.classes)}
    images, clipped = [], 0
    files = _files(source.root / "JPEGImages")
    for image_id in ids:
        annotation = source.root / "Annotations" / f"{image_id}.xml"
        if not annotation.is_file():
            raise DataError(
                f"{annotation}: missing, but {image_id} is listed in {_list_path(source)}; "
                f"{_expected(source)}"
            )
        image = _image(source, image_id, files.get(image_id, ()))
        root = _parse(annotation)
        width, height = _size(root, annotation, image)
        objects = []
        for index, element in enumerate(root.findall("object")):
            where = f"object {index + 1}"
            name = _text(element, "name", annotation, where)
            if name not in class_ids:
                raise DataError(
                    f"{annotation}: {where}: unknown class {name!r}; "
                    f"{source.name} has {', '.join(source.classes)}"
                )
            box, was_clipped = _box(element, width, height, annotation, f"{where} ({name})")
            clipped += was_clipped
            difficult = _flag(element, "difficult", annotation, f"{where} ({name})")
            objects.append(VOCObject(class_ids[name], box, difficult))
        images.append(VOCImage(image_id, str(image), height, width, tuple(objects)))
    return images, clipped


def _record(image: VOCImage) -> Record:
    """Detectron2's standard dict; `bbox_mode` 0 is its BoxMode.XYXY_ABS."""
    return {
        "file_name": image.file_name,
        "image_id": image.image_id,
        "height": image.height,
        "width": image.width,
        "annotations": [
            {
                "category_id": obj.class_id,
                "bbox": [obj.box[0] - 1.0, obj.box[1] - 1.0, obj.box[2], obj.box[3]],
                "bbox_mode": 0,
            }
            for obj in image.objects
        ],
    }


def _truth(image: VOCImage) -> GroundTruth:
    """What the VOC metric compares with."""
    return GroundTruth(
        boxes=np.array([obj.box for obj in image.objects], dtype=np.float64).reshape(-1, 4),
        classes=np.array([obj.class_id for obj in image.objects], dtype=np.int64),
        difficult=np.array([obj.difficult for obj in image.objects], dtype=bool),
    )


def _sha256(name: str, images: Sequence[VOCImage]) -> str:
    digest = hashlib.sha256()
    for image in images:
        what = (name, image.image_id, image.height, image.width, image.objects)
        digest.update(repr(what).encode())
    return digest.hexdigest()


def _tree(root: Path, split: str) -> str:
    return "expected " + " ".join(_TREE.format(root=root, split=split).split())


def _expected(source: VOCSource) -> str:
    """What should be where, for the end of a message."""
    tree = _tree(source.root, source.split)
    if not source.builtin:
        return tree
    return (
        f"{tree}; set ${DATASETS_VARIABLE} to the folder that holds VOC2007/ and VOC2012/ "
        "(http://host.robots.ox.ac.uk/pascal/VOC/), or DATASETS.VOC_DIR to a folder of your own"
    )


def _list_path(source: VOCSource) -> Path:
    return source.root / "ImageSets" / "Main" / f"{source.split}.txt"


def _image_ids(source: VOCSource) -> list[str]:
    path = _list_path(source)
    if not path.is_file():
        raise DataError(f"{source.name}: {path} is missing; {_expected(source)}")
    return read_ids(path)


def read_ids(path: Path, columns: re.Pattern[str] | None = None) -> list[str]:
    """The image ids of a list, one per line, none of them twice.

    `columns`: another form of a line, whose first group is the id.

    Raises:
        DataError: empty, odd lines, or an id that would lead out of the folder.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text file") from error
    ids = [line for line in lines if line]
    if columns:
        ids = [found[1] if (found := columns.fullmatch(line)) else line for line in ids]
    if not ids:
        raise DataError(f"{path}: no image ids in it; expected one per line")
    seen: set[str] = set()
    for image_id in ids:
        if len(image_id.split()) != 1:
            raise DataError(f"{path}: line {image_id!r}: expected one image id per line")
        if Path(image_id).name != image_id or image_id in (".", ".."):
            raise DataError(f"{path}: id {image_id!r} leads out of the dataset's folder")
        if image_id in seen:
            raise DataError(f"{path}: {image_id} is listed twice")
        seen.add(image_id)
    return ids


def _files(folder: Path) -> dict[str, list[str]]:
    """Name without ending → the files of that name."""
    files: dict[str, list[str]] = {}
    for name in sorted(names_in(str(folder))):
        files.setdefault(Path(name).stem, []).append(name)
    return files


def _image(source: VOCSource, image_id: str, files: Sequence[str]) -> Path:
    """The image among the `files` that bear its id."""
    folder = source.root / "JPEGImages"
    endings = _EXTENSIONS[:1] if source.builtin else _EXTENSIONS
    for ending in endings:
        for name in files:
            found = Path(name).suffix
            if (found if source.builtin else found.lower()) == ending:
                return folder / name
    there = f"; {', '.join(files)} is there, expected {' or '.join(endings)}" if files else ""
    raise DataError(
        f"{folder / image_id}{endings[0]}: missing, but {image_id} is listed in "
        f"{_list_path(source)}{there or '; ' + _expected(source)}"
    )


def _parse(path: Path) -> ET.Element:
    try:
        text = path.read_bytes()
        # A document type is where entities are declared, and expanding them can fill the memory.
        if b"<!DOCTYPE" in text or b"<!ENTITY" in text:
            raise DataError(f"{path}: refused, because it declares a document type or entities")
        root = ET.fromstring(text)
    except (ET.ParseError, ValueError, LookupError) as error:
        raise DataError(f"{path}: not valid XML ({error})") from error
    if root.tag != "annotation":
        raise DataError(f"{path}: expected <annotation>, got <{root.tag}>")
    return root


def _text(element: ET.Element, tag: str, path: Path, where: str) -> str:
    text = (element.findtext(tag) or "").strip()
    if not text:
        raise DataError(f"{path}: {where}: <{tag}> is missing or empty")
    return text


def _number(element: ET.Element, tag: str, path: Path, where: str) -> float:
    text = _text(element, tag, path, where)
    try:
        value = float(text)
    except ValueError as error:
        raise DataError(f"{path}: {where}: <{tag}> is {text!r}, expected a number") from error
    if not math.isfinite(value):
        raise DataError(f"{path}: {where}: <{tag}> is {text!r}, expected a finite number")
    return value


def _flag(element: ET.Element, tag: str, path: Path, where: str) -> bool:
    """An optional 0/1; absent means 0, as tools other than VOC's leave it out."""
    text = (element.findtext(tag) or "0").strip()
    if text not in ("0", "1"):
        raise DataError(f"{path}: {where}: <{tag}> is {text!r}, expected 0 or 1")
    return text == "1"


def _size(root: ET.Element, path: Path, image: Path) -> tuple[int, int]:
    """Width and height in pixels, stated by the annotation and confirmed by the image's header.

    The image counts as it is shown, i.e. with its EXIF orientation, as both engines read it.
    """
    element = root.find("size")
    if element is None:
        raise DataError(f"{path}: <size> with <width> and <height> is missing")
    stated = (_number(element, "width", path, "size"), _number(element, "height", path, "size"))
    actual = image_size(image)
    if stated != actual:
        raise DataError(
            f"{path}: size {stated[0]:g}x{stated[1]:g} contradicts {image.name}, which is "
            f"{actual[0]}x{actual[1]}"
        )
    return actual


def _box(
    element: ET.Element, width: int, height: int, path: Path, where: str
) -> tuple[tuple[float, float, float, float], bool]:
    """The box inside the image, and whether it had to be clipped."""
    bndbox = element.find("bndbox")
    if bndbox is None:
        raise DataError(f"{path}: {where}: <bndbox> is missing")
    xmin, ymin, xmax, ymax = (
        _number(bndbox, tag, path, where) for tag in ("xmin", "ymin", "xmax", "ymax")
    )
    shown = f"({xmin:g}, {ymin:g}, {xmax:g}, {ymax:g})"
    if xmax < xmin or ymax < ymin:
        raise DataError(f"{path}: {where}: box {shown} is inverted (xmin, ymin, xmax, ymax)")
    if xmin > width or ymin > height or xmax < 1 or ymax < 1:
        raise DataError(f"{path}: {where}: box {shown} is outside the {width}x{height} image")
    box = (max(xmin, 1.0), max(ymin, 1.0), min(xmax, float(width)), min(ymax, float(height)))
    return box, box != (xmin, ymin, xmax, ymax)
