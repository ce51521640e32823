"""Cityscapes' fine annotations: instance segmentation (8 classes), semantic segmentation (19).

    cityscapes/leftImg8bit/<split>/<city>/<frame>_leftImg8bit.png
    cityscapes/gtFine/<split>/<city>/<frame>_gtFine_polygons.json, _instanceIds.png, _labelIds.png
                                     <frame>_gtFine_labelTrainIds.png  (csCreateTrainIdLabelImgs)

The records equal those of Detectron2's readers (detectron2/data/datasets/cityscapes.py, polygons
from the JSON files), in the order of the file names instead of the file system's.

Polygons are ordered from back to front, and each occludes those below it. So they are read from the
last to the first, and each loses its occluded part. This needs shapely.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from detection.datasets.base import (
    ABSENT,
    FORMATS,
    NOTE,
    WRONG,
    XYXY_ABS,
    Finding,
    Format,
    Record,
    Split,
    require_package,
)
from detection.datasets.download import fetch_hint
from detection.datasets.files import read_json, require_files
from detection.datasets.labels import semantic_record, semantic_split
from moco.common.command import quote
from moco.common.distributed import usable_cores
from moco.common.errors import DataError

# Name of each label → id; negative ids are no labels of pixels.
_LABEL_IDS = {
    "unlabeled": 0, "ego vehicle": 1, "rectification border": 2, "out of roi": 3, "static": 4,
    "dynamic": 5, "ground": 6, "road": 7, "sidewalk": 8, "parking": 9, "rail track": 10,
    "building": 11, "wall": 12, "fence": 13, "guard rail": 14, "bridge": 15, "tunnel": 16,
    "pole": 17, "polegroup": 18, "traffic light": 19, "traffic sign": 20, "vegetation": 21,
    "terrain": 22, "sky": 23, "person": 24, "rider": 25, "car": 26, "truck": 27, "bus": 28,
    "caravan": 29, "trailer": 30, "train": 31, "motorcycle": 32, "bicycle": 33,
    "license plate": -1,
}  # fmt: skip

THING_CLASSES = ("person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle")
# In the order of their train ids, which are the values of labelTrainIds.png; 255 is ignored.
STUFF_CLASSES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign",
    "vegetation", "terrain", "sky", *THING_CLASSES,
)  # fmt: skip

_IMAGES = {"train": 2975, "val": 500}
_IMAGE = "_leftImg8bit.png"
_FEW = 64  # up to this number, images are read faster in one process


@dataclass(frozen=True)
class CityscapesSource:
    """Location and reader of a split.

    Attributes:
        kind: instance_seg or sem_seg.
        split: train or val.
        root: The folder `cityscapes`.
    """

    kind: str
    split: str
    root: str

    @property
    def name(self) -> str:
        """Name of the split in DATASETS.TRAIN and DATASETS.TEST."""
        return f"cityscapes_fine_{self.kind}_{self.split}"

    @property
    def image_dir(self) -> str:
        """Folder of the split's images, by city."""
        return os.path.join(self.root, f"leftImg8bit/{self.split}/")

    @property
    def gt_dir(self) -> str:
        """Folder of the split's annotations, by city."""
        return os.path.join(self.root, f"gtFine/{self.split}/")

    def present(self) -> bool:
        """Return whether any annotation of this kind exists."""
        ending = "labelTrainIds.png" if self.kind == "sem_seg" else "polygons.json"
        return any(Path(self.gt_dir).glob(f"*/*_{ending}"))

    def read(self) -> Split:
        """Read the split; instances need the package shapely, else UserError is raised."""
        hint = fetch_hint("cityscapes", self.name, os.path.dirname(self.root))
        frames = self._frames()
        if not frames:
            raise DataError(f"{self.name}: {self.image_dir} has no images; {hint}")
        semantic = self.kind == "sem_seg"
        # instanceIds.png is what the metric compares with.
        labels = "labelTrainIds.png" if semantic else "instanceIds.png"
        how = {"polygons.json": hint, labels: labels_command(self.root) if semantic else hint}
        for ending in how:
            files = [f"{stem}_{ending}" for _, stem in frames]
            require_files(files, f"files *_{ending}", how[ending])
        return self._read_semantic(frames) if semantic else self._read_instances(frames)

    def _frames(self) -> list[tuple[str, str]]:
        """Return (image, path of its annotations without ending) of each frame, sorted by name."""
        frames = []
        for path in sorted(Path(self.image_dir).glob("*/[!.]*")):
            if not path.name.endswith(_IMAGE):
                raise DataError(f"{path}: not an image named *{_IMAGE}; remove it")
            stem = path.name.removesuffix(_IMAGE) + "_gtFine"
            frames.append((str(path), os.path.join(self.gt_dir, path.parent.name, stem)))
        return frames

    def _metadata(self) -> dict[str, Any]:
        return {
            "image_dir": self.image_dir,
            "gt_dir": self.gt_dir,
            "thing_classes": list(THING_CLASSES),
            "stuff_classes": list(STUFF_CLASSES),
        }

    def _read_semantic(self, frames: Sequence[tuple[str, str]]) -> Split:
        records = []
        for image, stem in frames:
            height, width, _, _ = _polygon_file(f"{stem}_polygons.json")
            records.append(semantic_record(image, f"{stem}_labelTrainIds.png", (width, height)))
        return semantic_split(self.name, STUFF_CLASSES, records, self._metadata())

    def _read_instances(self, frames: Sequence[tuple[str, str]]) -> Split:
        require_package("shapely", "cityscapes", f"{self.name}: needs")
        read = _map_parallel if len(frames) > _FEW else map
        results = list(read(_instances, frames))
        files = "".join(f"{record['image_id']} {sha256}\n" for record, sha256, _ in results)
        hidden = sum(hidden for _, _, hidden in results)
        return Split(
            name=self.name,
            evaluator_type="cityscapes_instance",
            classes=THING_CLASSES,
            records=tuple(record for record, _, _ in results),
            annotations_sha256=hashlib.sha256(files.encode()).hexdigest(),
            notes=(f"objects hidden by others, left out: {hidden}",) if hidden else (),
            metadata=self._metadata(),
            truth={image: f"{stem}_instanceIds.png" for image, stem in frames},
            has_masks=any(record["annotations"] for record, _, _ in results),
        )


def labels_command(root: str) -> str:
    """Return the command that creates the label maps in train ids, which are not published."""
    where = f"CITYSCAPES_DATASET={quote(root)}"
    return f"make them with: pip install cityscapesscripts && {where} csCreateTrainIdLabelImgs"


def _map_parallel(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Map over processes, because the polygons of 2975 images take minutes in one."""
    # A process that holds CUDA or threads must not be forked.
    with ProcessPoolExecutor(min(8, usable_cores()), get_context("spawn")) as pool:
        return list(pool.map(function, items, chunksize=16))


def _polygon_file(path: str) -> tuple[int, int, list[dict[str, Any]], str]:
    """Read height, width, objects in drawing order, and the SHA-256 of the file."""
    content, sha256 = read_json(path)
    try:
        height, width, objects = (content[key] for key in ("imgHeight", "imgWidth", "objects"))
        valid = isinstance(height, int) and isinstance(width, int) and min(height, width) > 0
    except (TypeError, KeyError):
        valid = False
    if not valid or not isinstance(objects, list):
        raise DataError(f"{path}: expected imgHeight and imgWidth above 0, and a list of objects")
    return height, width, objects, sha256


def _label(name: Any, where: str) -> tuple[int, bool]:
    """Return the label's id, and whether it is a group of objects that are not separated."""
    single = name.removesuffix("group") if isinstance(name, str) else ""
    for known in (name, single):
        if isinstance(known, str) and known in _LABEL_IDS:
            return _LABEL_IDS[known], name.endswith("group")
    raise DataError(f"{where}: unknown label {name!r}")


def _instances(frame: tuple[str, str]) -> tuple[Record, str, int]:
    """Return a frame's record, its annotations' SHA-256, and its number of hidden objects."""
    from shapely import GEOSException
    from shapely.geometry import Polygon

    image, stem = frame
    path = f"{stem}_polygons.json"
    height, width, items, sha256 = _polygon_file(path)
    ids = {_LABEL_IDS[name]: index for index, name in enumerate(THING_CLASSES)}
    annotations: list[dict[str, Any]] = []
    above = Polygon()  # the union of the polygons above
    lost = 0
    for number, item in reversed(list(enumerate(items, 1))):
        where = f"{path}: object {number}"
        if not isinstance(item, dict):
            raise DataError(f"{where}: expected an object")
        if "deleted" in item:
            continue
        label, is_group = _label(item.get("label"), where)
        if label < 0:
            continue
        try:
            # Corners are pixel indices; a drawn polygon covers half a pixel around them.
            shape = Polygon(_corners(item.get("polygon"), where)).buffer(0.5, quad_segs=4)
            visible = shape.difference(above) if label in ids else shape
            if not visible.is_empty:
                above = above.union(shape)
        except GEOSException as error:
            raise DataError(f"{where}: not a polygon ({error})") from error
        if label not in ids:
            continue
        parts = [p for p in getattr(visible, "geoms", [visible]) if p.geom_type == "Polygon"]
        if visible.is_empty or not parts:
            lost += 1
            continue
        annotations.append(
            {
                "iscrowd": is_group,
                "category_id": ids[label],
                "segmentation": [list(chain(*part.exterior.coords)) for part in parts],
                "bbox": visible.bounds,
                "bbox_mode": XYXY_ABS,
            }
        )
    record = {
        "file_name": image,
        "image_id": os.path.basename(image),
        "height": height,
        "width": width,
        "annotations": annotations,
    }
    return record, sha256, lost


def _corners(polygon: Any, where: str) -> np.ndarray:
    """Return the corners (number of corners, 2), float32, shifted to the pixels' centers."""
    try:
        corners = np.asarray(polygon, dtype="f4") + 0.5
    except (TypeError, ValueError):
        corners = np.empty(0)
    if corners.ndim != 2 or corners.shape[1] != 2 or len(corners) < 3:
        raise DataError(f"{where}: expected a polygon of 3 or more [x, y]")
    if not np.isfinite(corners).all():
        raise DataError(f"{where}: a corner is not a finite number")
    return corners


@FORMATS.register()
def cityscapes() -> Format:
    """Return the format of Cityscapes' fine annotations."""
    return Format(
        sources=_published,
        counts={source.name: (_IMAGES[source.split], 0) for source in _published("")},
        tree="""\
cityscapes/
  leftImg8bit/{train,val}/<city>/*_leftImg8bit.png
  gtFine/{train,val}/<city>/*_gtFine_polygons.json
                            *_gtFine_{instanceIds,labelIds}.png
                            *_gtFine_labelTrainIds.png     (semantic segmentation)""",
        tasks={
            "configs/cityscapes/mask_rcnn_R_50_FPN_24k.yaml": (
                "cityscapes_fine_instance_seg_train",
                "cityscapes_fine_instance_seg_val",
            ),
            "configs/cityscapes/fcn16s_R_50_90k.yaml": (
                "cityscapes_fine_sem_seg_train",
                "cityscapes_fine_sem_seg_val",
            ),
        },
        check_folders=_check_folders,
        private=("cityscapes_fine_instance_seg_test", "cityscapes_fine_sem_seg_test"),
    )


def _published(root: str) -> list[CityscapesSource]:
    folder = os.path.join(root, "cityscapes")
    kinds = ("instance_seg", "sem_seg")
    return [CityscapesSource(kind, split, folder) for kind in kinds for split in _IMAGES]


def _check_folders(root: str, states: Mapping[str, str]) -> Iterator[Finding]:
    folder = Path(root) / "cityscapes"
    for split in _IMAGES:
        if (folder / "leftImg8bit" / split).is_dir() and not (folder / "gtFine" / split).is_dir():
            yield Finding(f"leftImg8bit/{split}/", WRONG, f"exists, but gtFine/{split}/ does not")
        semantic = states[f"cityscapes_fine_sem_seg_{split}"]
        if semantic == ABSENT != states[f"cityscapes_fine_instance_seg_{split}"]:
            text = f"no *_labelTrainIds.png; {labels_command(str(folder))}"
            yield Finding(f"gtFine/{split}/", NOTE, text)
