"""PASCAL VOC layout, read strictly, because flawed annotations train without an error.

    <root>/ImageSets/Main/<split>.txt    one image id per line
    <root>/Annotations/<id>.xml          size, and per object: name, difficult, bndbox
    <root>/JPEGImages/<id>.jpg           or .jpeg, .png, .bmp, in any case

Other tools write annotations/ or annots/, and images/.

Everything is checked before training. Annotations are 1-based and inclusive, and `VOCObject.box`
and `Split.truth` keep them so; `Split.records` has 0-based half-open XYXY as Detectron2 does
(detectron2/data/datasets/pascal_voc.py): xmin - 1, ymin - 1, xmax, ymax. R: objects of one image.
"""

import contextlib
import functools
import hashlib
import itertools
import math
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fvcore.common.config import CfgNode
from numpy.typing import NDArray

from detection.datasets import voc_sem_seg
from detection.datasets.base import (
    FORMATS,
    OK,
    TUNE,
    WRONG,
    XYXY_ABS,
    Custom,
    Finding,
    Format,
    Source,
    Split,
    choose_splits,
    split_command,
    splits_expected,
    with_coco_metric,
)
from detection.datasets.download import fetch_hint
from detection.datasets.files import (
    describe_folder,
    image_size,
    inner_folders,
    list_names,
    read_content,
    read_ids,
    spelling_hint,
)
from moco.common.command import quote
from moco.common.errors import DataError, UserError, first_few, plural
from moco.common.files import expand_home

VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train",
    "tvmonitor",
)  # fmt: skip

# Images of Detectron2's splits (detectron2/data/datasets/builtin.py).
_COUNTS = {
    (2007, "trainval"): 5011, (2007, "train"): 2501, (2007, "val"): 2510, (2007, "test"): 4952,
    (2012, "trainval"): 11540, (2012, "train"): 5717, (2012, "val"): 5823,
}  # fmt: skip

LISTS = "ImageSets/Main"  # folder of the splits
# VOC's name, then others'.
_ANNOTATIONS = ("Annotations", "annotations", "annots")
_IMAGES = ("JPEGImages", "images")
ENDINGS = (".jpg", ".jpeg", ".png", ".bmp")  # in order of preference
_OF_CLASS = re.compile(r".*\S\s+(-1|0|1)")  # line of a list of one class
_LINES = 9  # that tell such a list


@dataclass(frozen=True)
class GroundTruth:
    """Objects of one image: boxes (R, 4), classes (R,), difficult (R,)."""

    boxes: NDArray[np.float64]
    classes: NDArray[np.int64]
    difficult: NDArray[np.bool_]


class VOCObject(NamedTuple):
    """One annotated object; `box` = (xmin, ymin, xmax, ymax), 1-based, inclusive, inside."""

    class_id: int
    box: tuple[float, float, float, float]
    difficult: bool


@dataclass(frozen=True)
class VOCSource:
    """Location and reader of a split.

    Attributes:
        name: Name of the split in DATASETS.TRAIN and DATASETS.TEST.
        root: Folder of the dataset.
        split: Name of the list.
        year: Year of the metric: 2007 = 11 points, 2012 = area.
        classes: Allowed class names in the order of their ids.
        published: True for Detectron2's own names.
        metric: DATASETS.VOC_METRIC.
    """

    name: str
    root: Path
    split: str
    year: int
    classes: tuple[str, ...]
    published: bool
    metric: str = "voc"

    @property
    def _list(self) -> Path:
        return self.root / "ImageSets" / "Main" / f"{self.split}.txt"

    def present(self) -> bool:
        """Return whether the list of the split exists."""
        return self._list.is_file()

    def read(self) -> Split:
        """Read the split; boxes over the border are clipped and noted."""
        if not self.present():
            raise DataError(f"{self.name}: {self._list} is missing; {self._expected()}")
        annotations, images = find_folders(self.root)
        files = defaultdict(list)  # by stem
        for name in sorted(list_names(str(images))):
            files[Path(name).stem].append(name)
        records, truth, clipped, from_zero, several = [], {}, 0, 0, []
        digest = hashlib.sha256()
        for image_id in read_ids(self._list):
            annotation = annotations / f"{image_id}.xml"
            if not annotation.is_file():
                raise self._missing(annotation, image_id)
            image = self._image(images, image_id, files[image_id])
            if len(same := _images_among(files[image_id])) > 1:
                several.append(" and ".join(same))
            root = _parse(annotation)
            # Annotations are of the image after its EXIF orientation.
            width, height = size = image_size(image)
            stated = [
                _number(root, f"size/{side}", str(annotation)) for side in ("width", "height")
            ]
            if stated != [width, height]:
                annotated, actual = (f"{w:g}x{h:g}" for w, h in (stated, size))
                contradicts = f"size {annotated} contradicts {image.name}, which is {actual}"
                raise DataError(f"{annotation}: {contradicts}")
            nodes = _objects(root, annotation)
            found = [self._object(*item, width, height) for item in nodes]
            from_zero += sum(_starts_at_zero(node) for node, _ in nodes)
            clipped += sum(was_clipped for _, was_clipped in found)
            objects = tuple(item for item, _ in found)
            digest.update(repr((self.name, image_id, height, width, objects)).encode())
            records.append(
                {
                    "file_name": str(image),
                    "image_id": image_id,
                    "height": height,
                    "width": width,
                    "annotations": [
                        {
                            "category_id": obj.class_id,
                            "bbox": [obj.box[0] - 1.0, obj.box[1] - 1.0, obj.box[2], obj.box[3]],
                            "bbox_mode": XYXY_ABS,
                        }
                        for obj in objects
                    ],
                }
            )
            truth[image_id] = GroundTruth(
                boxes=np.array([obj.box for obj in objects], dtype=np.float64).reshape(-1, 4),
                classes=np.array([obj.class_id for obj in objects], dtype=np.int64),
                difficult=np.array([obj.difficult for obj in objects], dtype=bool),
            )
        split = Split(
            name=self.name,
            evaluator_type="pascal_voc",
            classes=self.classes,
            records=tuple(records),
            annotations_sha256=digest.hexdigest(),
            notes=tuple(_notes(clipped, from_zero, several)),
            metadata={
                "thing_classes": list(self.classes),
                "dirname": str(self.root),
                "split": self.split,
                "year": self.year,
            },
            truth=truth,
        )
        return with_coco_metric(split) if self.metric == "coco" else split

    def _expected(self) -> str:
        """Format the hint of errors about missing files."""
        if not self.published:
            return _tree(self.root, self.split)
        otherwise = ", or set DATASETS.VOC_DIR to a custom dataset"
        if self.name == "voc_2007_test":
            otherwise += " (the annotations of this split are in VOCtest_06-Nov-2007.tar)"
        return fetch_hint("voc", self.name, self.root.parent, otherwise)

    def _missing(self, path: Path, image_id: str, hint: str = "") -> DataError:
        listed = f"missing, but {image_id} is listed in {self._list}"
        hint = hint or spelling_hint(path) or self._expected()
        return DataError(f"{path}: {listed}; {hint}")

    def _image(self, folder: Path, image_id: str, files: Sequence[str]) -> Path:
        """Return the image among the `files` of a folder with its id as stem."""
        if found := _images_among(files):
            return folder / found[0]
        others = f"{', '.join(files)} exists, expected {' or '.join(ENDINGS)}" if files else ""
        raise self._missing(folder / f"{image_id}.jpg", image_id, others)

    def _object(
        self, node: ET.Element, where: str, width: int, height: int
    ) -> tuple[VOCObject, bool]:
        """Parse an object; also return whether its box was clipped. `where` starts errors."""
        name = _text(node, "name", where)
        if name not in self.classes:
            choices = ", ".join(self.classes)
            raise DataError(f"{where}: unknown class {name!r}; {self.name} has {choices}")
        where += f" ({name})"
        box = xmin, ymin, xmax, ymax = tuple(
            _number(node, f"bndbox/{side}", where) for side in ("xmin", "ymin", "xmax", "ymax")
        )
        if xmax < xmin or ymax < ymin:
            raise DataError(f"{where}: box {box} is inverted (xmin, ymin, xmax, ymax)")
        if xmin > width or ymin > height or xmax < 1 or ymax < 1:
            raise DataError(f"{where}: box {box} is outside the {width}x{height} image")
        inside = (max(xmin, 1.0), max(ymin, 1.0), min(xmax, float(width)), min(ymax, float(height)))
        difficult = (node.findtext("difficult") or "0").strip()  # other tools omit it
        if difficult not in ("0", "1"):
            raise DataError(f"{where}: <difficult> is {difficult!r}, expected 0 or 1")
        return VOCObject(self.classes.index(name), inside, difficult == "1"), inside != box


def folder_sources(datasets: CfgNode) -> list[VOCSource]:
    """Return the splits of DATASETS.VOC_DIR, named `<folder>_<split>`, sorted by name.

    Without DATASETS.VOC_CLASSES the classes are all names in the folder's annotations, sorted; when
    tuning, which must not see the test split, those in the annotations of the training lists.

    Raises:
        DataError: If the folder is missing or has another layout.
        UserError: If DATASETS.VOC_YEAR is neither 2007 nor 2012.
    """
    if not datasets.get("VOC_DIR", ""):
        return []
    root = expand_home(datasets.VOC_DIR)
    if not root.is_dir():
        raise DataError(f"DATASETS.VOC_DIR {root}: no such folder; {_tree(root, 'trainval')}")
    lists = split_lists(root)
    folders = {f"{path.name}/": path.is_dir() for path in find_folders(root)}
    if missing := [name for name, exists in folders.items() if not exists]:
        inner = [str(folder) for folder in inner_folders(root) if is_voc(folder)]
        seen = f"did you mean {first_few(inner)}?" if inner else describe_folder(root)
        has_no = f"has no {', '.join(missing)}; {_tree(root, 'trainval')}"
        raise DataError(f"DATASETS.VOC_DIR {root}: {has_no}; {seen}")
    if not lists:
        has_no = f"has no {LISTS}/*.txt; expected train.txt and test.txt, one image id per line"
        raise DataError(f"DATASETS.VOC_DIR {root}: {has_no}; to divide it: {split_command(root)}")
    if datasets.VOC_YEAR not in (2007, 2012):
        raise UserError(f"DATASETS.VOC_YEAR: got {datasets.VOC_YEAR}, choices are 2007, 2012")
    tuning = datasets.get("PART", "") == TUNE
    classes = tuple(datasets.VOC_CLASSES) or annotated_classes(root, tuning)
    stem, metric = root.resolve().name, datasets.get("VOC_METRIC", "voc")
    return [
        VOCSource(f"{stem}_{path.stem}", root, path.stem, datasets.VOC_YEAR, classes, False, metric)
        for path in lists
    ]


def find_folders(root: Path) -> tuple[Path, Path]:
    """Return the folders of annotations and of images: VOC's, or those of other tools."""
    annotations, images = (
        next((root / name for name in names if (root / name).is_dir()), root / names[0])
        for names in (_ANNOTATIONS, _IMAGES)
    )
    return annotations, images


def is_voc(root: Path) -> bool:
    """Return whether a folder has annotations and images in VOC layout, with lists or without."""
    annotations, images = find_folders(root)
    return images.is_dir() and any(annotations.glob("*.xml"))


def split_lists(root: Path) -> list[Path]:
    """Return the lists of splits in a folder in VOC layout, sorted.

    VOC itself and CVAT have a list per class, too, such as car_train.txt: the ids of train.txt,
    each with 1 if the image has an object of the class, else -1 or 0.
    """
    lists = sorted(path for path in (root / LISTS).glob("*.txt") if path.is_file())
    stems = {path.stem for path in lists}
    return [
        path
        for path in lists
        if not (any(path.stem.endswith(f"_{other}") for other in stems) and _is_of_class(path))
    ]


def _is_of_class(path: Path) -> bool:
    with contextlib.suppress(UnicodeDecodeError), path.open(encoding="utf-8-sig") as file:
        return all(_OF_CLASS.fullmatch(line.strip()) for line in itertools.islice(file, _LINES))
    return False


@functools.lru_cache(maxsize=8)
def annotated_classes(root: Path, training: bool = False) -> tuple[str, ...]:
    """Return all class names in a folder's annotations, sorted, the same for every split.

    Args:
        root: Folder in VOC layout.
        training: Read only the annotations of the lists train and trainval.

    Raises:
        DataError: If an annotation is damaged, or there is no object.
    """
    folder = find_folders(root)[0]
    files = sorted(folder.glob("*.xml"))
    if training:
        lists = [root / "ImageSets" / "Main" / f"{name}.txt" for name in ("train", "trainval")]
        ids = {image_id for path in lists if path.is_file() for image_id in read_ids(path)}
        files = [path for path in files if path.stem in ids]
    names = {name for path in files for name in class_names(path)}
    if not names:
        raise DataError(f"{folder}: no annotated objects, so no classes to learn")
    return tuple(sorted(names))


def class_names(path: Path) -> list[str]:
    """Return the class name of each object of an annotation.

    Raises:
        DataError: If it is damaged.
    """
    return [_text(node, "name", where) for node, where in _objects(_parse(path), path)]


def check_trainval(lists: Path) -> None:
    """Check that trainval.txt has all images of train.txt and val.txt.

    Args:
        lists: Folder of the lists.

    Raises:
        DataError: If images are left out, or a list is damaged.
    """
    whole = set(read_ids(lists / "trainval.txt"))
    for name in ("train.txt", "val.txt"):
        ids = read_ids(lists / name) if (lists / name).is_file() else []
        if left_out := [image_id for image_id in ids if image_id not in whole]:
            raise DataError(
                f"{lists / 'trainval.txt'}: has {plural(len(whole), 'image')}, without "
                f"{len(left_out)} of the {len(ids)} in {name} ({left_out[0]}); complete it, or "
                "delete it to train on train.txt"
            )


def _tree(root: Path, split: str) -> str:
    return (
        f"expected {root}/ with Annotations/000001.xml ..., ImageSets/Main/{split}.txt (one image "
        "id per line), JPEGImages/000001.jpg ..."
    )


class _WithoutDoctype(ET.TreeBuilder):
    """Tree builder that refuses document types, whose entities can expand to fill the memory."""

    def doctype(self, name: str, pubid: str, system: str) -> None:
        raise ValueError("it declares a document type, or entities")


def _parse(path: Path) -> ET.Element:
    try:
        root = ET.fromstring(read_content(path), ET.XMLParser(target=_WithoutDoctype()))
    except (ET.ParseError, ValueError, LookupError) as error:
        raise DataError(f"{path}: not valid XML ({error})") from error
    if root.tag != "annotation":
        raise DataError(f"{path}: expected <annotation>, got <{root.tag}>")
    return root


def _starts_at_zero(node: ET.Element) -> bool:
    """Return whether a box has a corner at 0, where VOC's first pixel is 1."""
    return any(not float(node.findtext(f"bndbox/{side}") or 1) for side in ("xmin", "ymin"))


def _images_among(files: Sequence[str]) -> list[str]:
    """Return the images among the files of one stem, the preferred one first."""
    return [name for end in ENDINGS for name in reversed(files) if Path(name).suffix.lower() == end]


def _notes(clipped: int, from_zero: int, several: Sequence[str]) -> Iterator[str]:
    if several:
        yield f"ids with several images, of which the first is read: {len(several)} ({several[0]})"
    if from_zero:
        yield (
            f"boxes that start at 0: {from_zero}; the files count pixels from 0 and VOC counts "
            "from 1, so every box is one pixel off; add 1 to all coordinates"
        )
    if clipped > from_zero:
        yield f"boxes over the border, clipped: {clipped - from_zero}"


def _objects(root: ET.Element, path: Path) -> list[tuple[ET.Element, str]]:
    """Return each object, and the start of messages about it."""
    return [(node, f"{path}: object {i}") for i, node in enumerate(root.findall("object"), 1)]


def _text(node: ET.Element, tag: str, where: str) -> str:
    text = (node.findtext(tag) or "").strip()
    if not text:
        raise DataError(f"{where}: <{tag}> is missing or empty")
    return text


def _number(node: ET.Element, tag: str, where: str) -> float:
    text = _text(node, tag, where)
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise DataError(f"{where}: <{tag}> is {text!r}, expected a finite number")


@FORMATS.register()
def voc() -> Format:
    """Return the format of boxes and semantic segmentation in VOC layout."""
    return Format(
        sources=_published,
        counts={
            **{f"voc_{year}_{split}": (n, 0) for (year, split), n in _COUNTS.items()},
            **voc_sem_seg.COUNTS,
        },
        tree="""\
VOC2007/  VOC2012/                     (trainval and test of 2007 in one folder)
  Annotations/000001.xml ...
  ImageSets/Main/{trainval,test}.txt
  ImageSets/Segmentation/{train,val,train_aug}.txt
  JPEGImages/000001.jpg ...
  SegmentationClass/2007_000032.png ...
  SegmentationClassAug/2007_000032.png ...       (train_aug of 2012)""",
        tasks={
            "configs/voc/faster_rcnn_R_50_C4_24k.yaml": (
                "voc_2007_trainval",
                "voc_2012_trainval",
                "voc_2007_test",
            ),
            "configs/voc/faster_rcnn_R_50_C4_9k.yaml": ("voc_2007_trainval", "voc_2007_test"),
            "configs/voc/fcn16s_R_50_30k.yaml": (
                "voc_2012_sem_seg_train_aug",
                "voc_2012_sem_seg_val",
            ),
        },
        check_folders=_check_folders,
        custom=Custom(
            flag="--voc-dir",
            options={"metavar": "DIR", "help": "a custom dataset, as in DATASETS.VOC_DIR"},
            task=_custom_task,
            sources=folder_sources,
            parse=_parse_custom,
            arguments=lambda datasets: (
                [["--voc-dir", datasets.VOC_DIR]] if datasets.get("VOC_DIR", "") else []
            ),
            find=lambda folder: [{"DATASETS.VOC_DIR": folder}] if is_voc(folder) else [],
        ),
    )


def _published(root: str) -> list[Source]:
    boxes = [
        VOCSource(f"voc_{year}_{split}", Path(root) / f"VOC{year}", split, year, VOC_CLASSES, True)
        for year, split in _COUNTS
    ]
    return [*boxes, *voc_sem_seg.sources(root, ("background", *VOC_CLASSES))]


def _parse_custom(folder: str, root: str) -> tuple[list[VOCSource], dict[str, str]]:
    if root:
        raise UserError("--root belongs to --coco-json, or to the name of a published dataset")
    keys = {"VOC_DIR": folder}
    custom = {"VOC_YEAR": 2007, "VOC_METRIC": "coco", "VOC_CLASSES": []}
    return folder_sources(CfgNode({**keys, **custom})), keys


def _custom_task(splits: Sequence[Split], keys: Mapping[str, str]) -> list[str]:
    stem = expand_home(keys["VOC_DIR"]).resolve().name
    lists = sorted(split.name.removeprefix(f"{stem}_") for split in splits)
    if not (chosen := choose_splits(lists, ("TRAIN", "TEST"))):
        # The user can name two other lists, but one list alone cannot train and test.
        error = UserError if len(lists) > 1 else DataError
        raise error(splits_expected(LISTS, lists, keys["VOC_DIR"]))
    if "trainval" in chosen.values():
        check_trainval(expand_home(keys["VOC_DIR"]) / LISTS)
    return ["configs/voc/faster_rcnn_R_18_C4_small.yaml"]


def _check_folders(root: str, states: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings on the lists of each year."""
    devkit = Path(root) / "VOCdevkit"
    if devkit.is_dir() and not any(Path(root).glob("VOC20*")):
        text = f"is one folder too many; use --root {quote(devkit)}, or move its folders up"
        yield Finding("VOCdevkit/", WRONG, text)
    for name in ("VOC2007", "VOC2012"):
        if (Path(root) / name).is_dir():
            for found in _check_lists(Path(root) / name / "ImageSets"):
                yield Finding(f"{name}/", *found)


def _check_lists(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield state and text of the findings on the ImageSets of one year."""
    lists = {}
    for split in ("train", "val", "trainval", "test"):
        with contextlib.suppress(DataError, OSError):  # the readers report these
            lists[split] = set(read_ids(folder / "Main" / f"{split}.txt"))
    if not lists and not any((folder / "Segmentation").glob("*.txt")):
        yield WRONG, "exists, but ImageSets/Main and ImageSets/Segmentation have no lists"
    if lists.keys() >= {"trainval", "test"}:
        if both := lists["trainval"] & lists["test"]:
            yield (
                WRONG,
                f"in trainval.txt and in test.txt: {plural(len(both), 'image')} ({min(both)})",
            )
        else:
            yield OK, "trainval and test are in one folder and share no image"
    if "trainval" in lists:
        try:
            check_trainval(folder / "Main")
        except DataError as error:
            yield WRONG, str(error)
