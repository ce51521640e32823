"""COCO: instances, person keypoints, DensePose, and custom datasets in COCO's format.

coco/annotations/<kind>_<split><year>.json
coco/{train,val}{2014,2017}/      the images, by the `file_name` of each image

A custom dataset is two JSON files, such as annotations/custom_{train,val}.json of DETR, or a folder
as Roboflow exports it:

<folder>/{train,valid,test}/      _annotations.coco.json and the images
"""

import dataclasses
import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from detection.datasets.base import (
    ABSENT,
    FORMATS,
    NOTE,
    SPLITS,
    WRONG,
    Custom,
    Finding,
    Format,
    Split,
    choose_splits,
    doctor_command,
    splits_expected,
)
from detection.datasets.coco_json import (
    TABLES,
    AnnotationFile,
    Json,
    read_annotations,
    suspicious,
)
from detection.datasets.download import fetch_hint
from detection.datasets.files import image_size, other_spellings, read_json
from moco.common.command import quote
from moco.common.errors import DataError, UserError, first_few
from moco.common.files import expand_home

# (id, name) of COCO's 80 categories; the ids have gaps.
COCO_CATEGORIES = (
    (1, "person"), (2, "bicycle"), (3, "car"), (4, "motorcycle"), (5, "airplane"), (6, "bus"),
    (7, "train"), (8, "truck"), (9, "boat"), (10, "traffic light"), (11, "fire hydrant"),
    (13, "stop sign"), (14, "parking meter"), (15, "bench"), (16, "bird"), (17, "cat"), (18, "dog"),
    (19, "horse"), (20, "sheep"), (21, "cow"), (22, "elephant"), (23, "bear"), (24, "zebra"),
    (25, "giraffe"), (27, "backpack"), (28, "umbrella"), (31, "handbag"), (32, "tie"),
    (33, "suitcase"), (34, "frisbee"), (35, "skis"), (36, "snowboard"), (37, "sports ball"),
    (38, "kite"), (39, "baseball bat"), (40, "baseball glove"), (41, "skateboard"),
    (42, "surfboard"), (43, "tennis racket"), (44, "bottle"), (46, "wine glass"), (47, "cup"),
    (48, "fork"), (49, "knife"), (50, "spoon"), (51, "bowl"), (52, "banana"), (53, "apple"),
    (54, "sandwich"), (55, "orange"), (56, "broccoli"), (57, "carrot"), (58, "hot dog"),
    (59, "pizza"), (60, "donut"), (61, "cake"), (62, "chair"), (63, "couch"), (64, "potted plant"),
    (65, "bed"), (67, "dining table"), (70, "toilet"), (72, "tv"), (73, "laptop"), (74, "mouse"),
    (75, "remote"), (76, "keyboard"), (77, "cell phone"), (78, "microwave"), (79, "oven"),
    (80, "toaster"), (81, "sink"), (82, "refrigerator"), (84, "book"), (85, "clock"), (86, "vase"),
    (87, "scissors"), (88, "teddy bear"), (89, "hair drier"), (90, "toothbrush"),
)  # fmt: skip

_PARTS = ("eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
PERSON_KEYPOINTS = ("nose", *(f"{side}_{part}" for part in _PARTS for side in ("left", "right")))
# Keypoints that horizontal flips swap.
PERSON_FLIP_MAP = tuple((f"left_{part}", f"right_{part}") for part in _PARTS)
# Lines between keypoints in visualizations, and their RGB colors.
PERSON_LINES = (
    ("left_ear", "left_eye", (102, 204, 255)),
    ("right_ear", "right_eye", (51, 153, 255)),
    ("left_eye", "nose", (102, 0, 204)),
    ("nose", "right_eye", (51, 102, 255)),
    ("left_shoulder", "right_shoulder", (255, 128, 0)),
    ("left_shoulder", "left_elbow", (153, 255, 204)),
    ("right_shoulder", "right_elbow", (128, 229, 255)),
    ("left_elbow", "left_wrist", (153, 255, 153)),
    ("right_elbow", "right_wrist", (102, 255, 224)),
    ("left_hip", "right_hip", (255, 102, 0)),
    ("left_hip", "left_knee", (255, 255, 77)),
    ("right_hip", "right_knee", (153, 255, 204)),
    ("left_knee", "left_ankle", (191, 255, 128)),
    ("right_knee", "right_ankle", (255, 195, 77)),
)


_KEYS = ("iscrowd", "bbox", "keypoints", "category_id")  # copied from annotations
DENSEPOSE_KEYS = ("dp_masks", "dp_x", "dp_y", "dp_I", "dp_U", "dp_V")
_ROBOFLOW = "_annotations.coco.json"
_MAX_PAIRS = 30  # pairs of keypoints in a note
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")  # of the name of a keypoint
_SIDES = {"left": "left", "l": "left", "right": "right", "r": "right"}
_DENSEPOSE_FILES = "https://dl.fbaipublicfiles.com/densepose/data/"

# (kind, year and split) of a published split → its (images, objects); 0 if not published.
_COUNTS = {
    ("instances", "2017_train"): (118287, 860001),
    ("instances", "2017_val"): (5000, 36781),
    ("instances", "2017_val_100"): (0, 0),
    ("keypoints", "2017_train"): (118287, 262465),
    ("keypoints", "2017_val"): (5000, 11004),
    ("keypoints", "2017_val_100"): (0, 0),
    ("instances", "2014_train"): (82783, 604907),
    ("instances", "2014_val"): (40504, 291875),
    ("instances", "2014_minival"): (5000, 0),
    ("instances", "2014_valminusminival"): (35504, 0),
    ("keypoints", "2014_train"): (0, 0),
    ("keypoints", "2014_val"): (0, 0),
    ("keypoints", "2014_minival"): (0, 0),
    ("keypoints", "2014_valminusminival"): (0, 0),
    ("densepose", "2014_train"): (0, 0),
    ("densepose", "2014_minival"): (0, 0),
    ("densepose", "2014_minival_100"): (0, 0),
    ("densepose", "2014_valminusminival"): (0, 0),
}
# Kind → (prefix of Detectron2's names in builtin.py and DensePose, prefix of the files).
_PREFIXES = {
    "instances": ("coco", "instances"),
    "keypoints": ("keypoints_coco", "person_keypoints"),
    "densepose": ("densepose_coco", "densepose"),
}


@dataclass(frozen=True)
class COCOSource:
    """Location and reader of a split.

    Attributes:
        name: Name of the split in DATASETS.TRAIN and DATASETS.TEST.
        json_file: Path of the annotations.
        image_root: Folder of the images; if empty, it is searched near `json_file`.
        kind: instances, keypoints or densepose for Detectron2's own names, else custom.
        split: Folder of the split in a folder of Roboflow, such as valid; else empty.
        role: TRAIN or TEST for a custom dataset, as in DATASETS.COCO_TRAIN_JSON; empty if it was
            named by the doctor's flags.
        flip_pairs: DATASETS.KEYPOINT_FLIP_PAIRS.
    """

    name: str
    json_file: str
    image_root: str
    kind: str
    role: str = ""
    flip_pairs: tuple[tuple[str, str], ...] = ()
    split: str = ""

    def present(self) -> bool:
        """Return whether the annotations exist."""
        return os.path.isfile(self.json_file)

    def read(self) -> Split:
        """Read the split, repaired as in coco_json.py."""
        if not self.present():
            raise DataError(f"{self.name}: {self.json_file} is missing; {self._expected()}")
        # The minival files of 2014 contain some annotations twice, and Detectron2 accepts them.
        tolerant = self.kind != "custom" and "minival" in os.path.basename(self.json_file)
        file = AnnotationFile(self.json_file, file_name=self._file_name, tolerant=tolerant)
        split = file.split(
            self.name,
            "densepose" if self.kind == "densepose" else "coco",
            [category["name"] for category in file.categories],
            self.image_root or _find_images(self, file),
            self._expected(),
            self._metadata(file),
            keys=_KEYS + DENSEPOSE_KEYS if self.kind == "densepose" else _KEYS,
        )
        if self.kind == "custom" and (why := _unnamed_keypoints(file)) and file.has_keypoints():
            split = dataclasses.replace(
                split,
                notes=(*split.notes, f"keypoints are not used, because {why}"),
                unused_keypoints=why,
            )
        for record in split.records:
            # JPEG files never have more than 8 bits, and COCO has too many to open.
            if not record["file_name"].lower().endswith((".jpg", ".jpeg")):
                image_size(record["file_name"])
        return split

    def _file_name(self, image: Json, where: str) -> Any:
        """Return an image's file name, relative to its folder if it is absolute.

        Detectron2's exporter writes absolute paths.
        """
        name = image.get("file_name", "")
        if self.kind != "custom" or not isinstance(name, str) or not os.path.isabs(name):
            return name
        here = Path(self.json_file).resolve().parent
        folders = [Path(self.image_root)] if self.image_root else [here, here.parent]
        inside = (f for f in folders if Path(name).is_relative_to(f.absolute()))
        return next((str(Path(name).relative_to(f.absolute())) for f in inside), name)

    def _expected(self) -> str:
        """Format the hint of errors about missing files."""
        if self.kind == "custom":
            key = f"DATASETS.COCO_{self.role}_JSON"
            file = f"set {key} to a file in COCO's format and " if self.role else ""
            return file + self.images_hint
        custom = ", or set DATASETS.COCO_TRAIN_JSON and COCO_TEST_JSON to a custom dataset"
        return fetch_hint("coco", self.name, Path(self.json_file).parents[2], custom)

    @property
    def images_hint(self) -> str:
        """Hint, for errors, how to set the folder of the images of a custom file."""
        if self.split:
            return "the images belong beside that file"
        key = f"set DATASETS.COCO_{self.role}_ROOT to" if self.role else "give --root,"
        return f"{key} the images' folder"

    def _metadata(self, file: AnnotationFile) -> Json:
        """Return Detectron2's metadata of this kind of split, beyond that of every COCO file."""
        wanted = {"instances": COCO_CATEGORIES, "keypoints": COCO_CATEGORIES[:1]}.get(self.kind)
        found = tuple((category["id"], category["name"]) for category in file.categories)
        if wanted and found != wanted:
            what = "COCO's 80" if self.kind == "instances" else "person alone"
            raise DataError(
                f"{file.path}: the categories are not {what}; for a custom dataset set "
                "DATASETS.COCO_TRAIN_JSON and DATASETS.COCO_TEST_JSON"
            )
        if self.kind == "keypoints":
            return {
                "keypoint_names": PERSON_KEYPOINTS,
                "keypoint_flip_map": PERSON_FLIP_MAP,
                "keypoint_connection_rules": list(PERSON_LINES),
            }
        if self.kind == "densepose":
            return {
                "categories": dict(found),
                "densepose_transform_src": _DENSEPOSE_FILES + "UV_symmetry_transforms.mat",
                "densepose_smpl_subdiv": _DENSEPOSE_FILES + "SMPL_subdiv.mat",
                "densepose_smpl_subdiv_transform": _DENSEPOSE_FILES + "SMPL_SUBDIV_TRANSFORM.mat",
            }
        return _custom_keypoints(file, self.flip_pairs) if self.kind == "custom" else {}


def _published(root: str) -> list[COCOSource]:
    sources = []
    for kind, fold in _COUNTS:
        prefix, file = _PREFIXES[kind]
        year, split, *number = fold.split("_")  # only the smallest splits have a number of images
        annotations = "_".join([file, split + year, *number])
        images = f"{'train' if split == 'train' else 'val'}{year}"
        json_file = os.path.join(root, f"coco/annotations/{annotations}.json")
        image_root = os.path.join(root, f"coco/{images}")
        sources.append(COCOSource(f"{prefix}_{fold}", json_file, image_root, kind))
    return sources


def custom_sources(datasets: CfgNode) -> list[COCOSource]:
    """Return the splits of DATASETS.COCO_TRAIN_JSON and COCO_TEST_JSON, as far as set.

    They are named `<folder of the file>_<stem of the file>`.

    Raises:
        UserError: If a folder of images is set without a file, or two files have the same name.
    """
    sources = []
    for role, file, root in _custom_files(datasets):
        if file:
            source = _custom_source(file, root, role)
            sources.append(dataclasses.replace(source, flip_pairs=_flip_pairs(datasets)))
        elif root:
            key = f"DATASETS.COCO_{role}"
            raise UserError(f"{key}_ROOT belongs to {key}_JSON; set both or none")
    files = {(source.json_file, source.image_root) for source in sources}
    if len({source.name for source in sources}) < len(files):
        raise UserError(
            "DATASETS.COCO_TRAIN_JSON and DATASETS.COCO_TEST_JSON would both be named "
            f"{sources[0].name}; rename one of the files"
        )
    return sources


def roboflow_sources(datasets: CfgNode) -> list[COCOSource]:
    """Return the splits of DATASETS.COCO_DIR, named `<folder>_<split>`.

    Raises:
        DataError: If the folder has no split.
    """
    if not (folder := datasets.get("COCO_DIR", "")):
        return []
    root = expand_home(folder)
    files = {split: root / split / _ROBOFLOW for split in ("train", "valid", "val", "test")}
    pairs = _flip_pairs(datasets)
    stem = root.resolve().name
    sources = [
        COCOSource(f"{stem}_{split}", str(file), str(file.parent), "custom", "", pairs, split)
        for split, file in files.items()
        if file.is_file()
    ]
    if not sources:
        raise DataError(
            f"DATASETS.COCO_DIR {root}: expected the folders train, valid and test, each with "
            f"{_ROBOFLOW} and its images; for other files set DATASETS.COCO_TRAIN_JSON and "
            "DATASETS.COCO_TEST_JSON"
        )
    return sources


def _flip_pairs(datasets: CfgNode) -> tuple[tuple[str, str], ...]:
    return tuple((left, right) for left, right in datasets.get("KEYPOINT_FLIP_PAIRS", ()))


def custom_names(cfg: CfgNode) -> dict[str, str]:
    """Return {"TRAIN": name, "TEST": name} of the custom COCO JSON files, as far as set."""
    return {source.role: source.name for source in custom_sources(cfg.DATASETS)}


def _custom_files(datasets: CfgNode) -> list[tuple[str, str, str]]:
    """Return (role, annotations, folder of images) from DATASETS, with "" for unset keys."""
    return [
        (role, datasets.get(f"COCO_{role}_JSON", ""), datasets.get(f"COCO_{role}_ROOT", ""))
        for role in ("TRAIN", "TEST")
    ]


def _custom_source(file: str, root: str, role: str) -> COCOSource:
    path = expand_home(file)
    name = f"{path.resolve().parent.name}_{path.stem}"
    return COCOSource(name, str(path), os.path.expanduser(root), "custom", role)


def find_images(json_file: str, role: str) -> str:
    """Find the images' folder of a custom file for which DATASETS.COCO_*_ROOT is not set.

    Raises:
        DataError: If the file is damaged, or its images are not found.
    """
    source = _custom_source(json_file, "", role)
    return _find_images(source, AnnotationFile(source.json_file, file_name=source._file_name))


def _find_images(source: COCOSource, file: AnnotationFile) -> str:
    """Find the images' folder of a custom file: the file's own folder, or one in or next to it.

    If several folders contain the first image, the one whose name is part of the file's is chosen,
    as in instances_train2017.json.
    """
    here = Path(file.path).resolve().parent
    first = file.file_name(next(iter(file.images.values())), "")
    depth = len(Path(first).parts) - 1
    holding = {found.parents[depth] for found in _near(here, first)}
    # The file's own folder is unambiguous, and so is a folder whose name is part of the file's.
    chosen = (
        holding & {here}
        or {path for path in holding if path.name in Path(file.path).stem}
        or holding
    )
    if len(chosen) == 1:
        return str(chosen.pop())
    for other, why in other_spellings(first).items() if not chosen else ():
        if found := next(_near(here, other), None):
            raise DataError(f"{file.path}: {first} was not found, but {str(found)!r}: {why}")
    where = f"is in {', '.join(sorted(map(str, chosen)))}" if chosen else "was not found near it"
    raise DataError(f"{file.path}: {first} {where}; {source.images_hint}")


def _near(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files of a name in, or beside, the folder of the annotations."""
    for place in (folder, folder.parent):
        for pattern in ("", "*/", "images/*/", "data/*/", "*/images/"):
            yield from place.glob(pattern + glob.escape(name))


def _unnamed_keypoints(file: AnnotationFile) -> str:
    """Return the reason why the categories do not determine one list of keypoints, or ""."""
    first, *others = file.categories
    names = first.get("keypoints")
    for other in others:
        if (other.get("keypoints") or []) != (names or []):
            both = f"{first['name']!r} and {other['name']!r}"
            return f"the categories {both} have different 'keypoints'; one list is supported"
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        return ""
    return f"the category {first['name']!r} has no 'keypoints', the list of their names"


def _custom_keypoints(file: AnnotationFile, pairs: tuple[tuple[str, str], ...]) -> Json:
    """Return names and left-right pairs of the keypoints, or {} if the categories have none.

    Args:
        file: The annotations.
        pairs: DATASETS.KEYPOINT_FLIP_PAIRS; if empty, pairs are inferred from the names.
    """
    if _unnamed_keypoints(file):
        return {}
    names = file.categories[0]["keypoints"]
    if unknown := [name for pair in pairs for name in pair if name not in names]:
        raise DataError(
            f"DATASETS.KEYPOINT_FLIP_PAIRS: {file.path} has no keypoint {unknown[0]!r}; its "
            f"keypoints are {', '.join(names)}"
        )
    return {"keypoint_names": tuple(names), "keypoint_flip_map": pairs or flip_pairs(names)}


def masks_in_run_lengths(split: Split) -> int:
    """Count the non-crowd masks that are run lengths instead of polygons."""
    return sum(_in_run_lengths(item) for one in split.records for item in one["annotations"])


def require_polygons(split: Split) -> None:
    """Check that all non-crowd masks are polygons, as INPUT.MASK_FORMAT polygon requires.

    Raises:
        DataError: If masks are run lengths. The message states their number and the first one.
    """
    if not (number := masks_in_run_lengths(split)):
        return
    file = split.metadata["json_file"]
    annotations = read_annotations(file)
    rows = annotations.content["annotations"]
    first = next(annotations.file_id(row) for row in rows if _in_run_lengths(row))
    raise DataError(
        f"{file}: masks in run lengths, not in polygons: {number}, the first of annotation "
        f"{first}; set INPUT.MASK_FORMAT bitmask"
    )


def _in_run_lengths(annotation: Mapping[str, Any]) -> bool:
    """Return whether an annotation (of a file or a record) is a non-crowd mask in run lengths."""
    return isinstance(annotation.get("segmentation"), dict) and not annotation.get("iscrowd", 0)


@FORMATS.register()
def coco() -> Format:
    """Return the format of COCO's JSON files."""
    return Format(
        sources=_published,
        counts={f"{_PREFIXES[kind][0]}_{fold}": n for (kind, fold), n in _COUNTS.items()},
        tree="""\
coco/
  annotations/instances_{train,val}2017.json
  annotations/person_keypoints_{train,val}2017.json
  annotations/densepose_{train,valminusminival,minival}2014.json
  {train,val}2017/000000000009.jpg ...
  {train,val}2014/COCO_train2014_000000000009.jpg ...    (DensePose)""",
        tasks={
            "configs/coco/mask_rcnn_R_50_FPN_1x.yaml": ("coco_2017_train", "coco_2017_val"),
            "configs/coco/keypoint_rcnn_R_50_FPN_2x.yaml": (
                "keypoints_coco_2017_train",
                "keypoints_coco_2017_val",
            ),
            "configs/coco/densepose_rcnn_R_50_FPN_s1x.yaml": (
                "densepose_coco_2014_train",
                "densepose_coco_2014_valminusminival",
                "densepose_coco_2014_minival",
            ),
        },
        check_folders=_check_folders,
        private=("coco_2017_test", "coco_2017_test-dev"),
        custom=Custom(
            flag="--coco-json",
            options={
                "metavar": "FILE",
                "action": "append",
                "help": "a custom dataset, as in DATASETS.COCO_TRAIN_JSON, may be repeated; or a "
                "folder, as in DATASETS.COCO_DIR",
            },
            task=_custom_task,
            sources=lambda datasets: [*roboflow_sources(datasets), *custom_sources(datasets)],
            parse=_parse_custom,
            arguments=_doctor_arguments,
            find=_find,
            check=_check_custom,
        ),
    )


def _check_folders(root: str, states: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings on folders of images without annotations."""
    used = {Path(s.image_root).name for s in _published(root) if states[s.name] != ABSENT}
    for name in ("train2017", "val2017", "train2014", "val2014"):
        if name not in used and os.path.isdir(os.path.join(root, "coco", name)):
            yield Finding(f"coco/{name}/", WRONG, f"exists, but no annotations/*_{name}.json")


def _parse_custom(files: list[str], root: str) -> tuple[list[COCOSource], dict[str, str]]:
    if len(files) == 1 and os.path.isdir(files[0]):
        found = _find(Path(files[0]))
        if len(found) != 1 or "DATASETS.COCO_DIR" in found[0]:
            keys = {"COCO_DIR": files[0]}
            return roboflow_sources(CfgNode(keys)), keys
        files = [str(file) for file in found[0].values()]
    keys = {}
    for role, file in zip(("TRAIN", "TEST"), files, strict=False):
        keys |= {f"COCO_{role}_JSON": file} | ({f"COCO_{role}_ROOT": root} if root else {})
    return [_custom_source(file, root, "") for file in files], keys


def json_files(folder: Path) -> list[Path]:
    """Return the JSON files that a dataset in COCO's format may consist of."""
    patterns = ("*.json", "annotations/*.json", f"train/{Path(_ROBOFLOW).stem}_*.json")
    return [path for pattern in patterns for path in sorted(folder.glob(pattern))]


def is_coco(path: Path) -> bool:
    """Return whether a JSON file has the three lists of COCO's format; raise as `read_json`."""
    content, _ = read_json(path)
    return isinstance(content, dict) and all(isinstance(content.get(key), list) for key in TABLES)


def _find(folder: Path) -> list[dict[str, Path]]:
    """Find pairs of JSON files by their names, else Roboflow's folders.

    COCO and DETR have annotations/instances_train2017.json and instances_val2017.json; COCO's files
    of other kinds are not for boxes alone.
    """
    groups: dict[str, dict[str, Path]] = {}  # what the names of one dataset share → its splits
    for path in json_files(folder):
        words = re.findall("[a-z]+", path.stem.lower())
        if last := next((word for word in reversed(words) if word in SPLITS), ""):
            words.remove(last)
            groups.setdefault(f"{path.parent} {' '.join(words)}", {})[last] = path
    pairs = [
        {f"DATASETS.COCO_{key}_JSON": splits[chosen[key]] for key in ("TRAIN", "TEST")}
        for splits in groups.values()
        if (chosen := choose_splits(splits, ("TRAIN", "TEST")))
    ]
    boxes = [pair for pair in pairs if "instances" in pair["DATASETS.COCO_TRAIN_JSON"].stem]
    if pairs:
        return boxes or pairs
    return [{"DATASETS.COCO_DIR": folder}] if (folder / "train" / _ROBOFLOW).is_file() else []


def _custom_task(splits: Sequence[Split], keys: Mapping[str, str]) -> list[str]:
    """Choose COCO's own task if all objects have masks, else the tutorial's small one for boxes."""
    if "COCO_DIR" in keys:
        names = [split.name.rpartition("_")[2] for split in splits]
        if not choose_splits(names, ("TRAIN", "TEST")):
            raise DataError(splits_expected(keys["COCO_DIR"], names, keys["COCO_DIR"]))
    elif "COCO_TEST_JSON" not in keys:
        [call] = _doctor_arguments(CfgNode(keys))
        again = quote(*call, "--coco-json")
        raise UserError(
            f"also give the annotations of the test images: {doctor_command()} {again} FILE"
        )
    if not all(split.has_masks for split in splits):
        return ["configs/voc/faster_rcnn_R_18_C4_small.yaml"]
    bitmask = ["INPUT.MASK_FORMAT", "bitmask"] if masks_in_run_lengths(splits[0]) else []
    return ["configs/coco/mask_rcnn_R_50_FPN_1x.yaml", *bitmask]


def _doctor_arguments(datasets: CfgNode) -> list[list[str]]:
    """Return the doctor's arguments, one list per folder of images."""
    if datasets.get("COCO_DIR", ""):
        return [["--coco-json", datasets.COCO_DIR]]
    calls: dict[str, list[str]] = {}
    for _, file, root in _custom_files(datasets):
        call = calls.setdefault(root, ["--root", root] if root else [])
        if file and file not in call:
            call += ["--coco-json", file]
    return [call for call in calls.values() if "--coco-json" in call]


def _check_custom(source: COCOSource) -> Iterator[Finding]:
    """Yield notes on suspicious contents of a readable file, which only the user can correct."""
    for text in suspicious(read_json(source.json_file)[0]):
        yield Finding(source.name, NOTE, text)


def split_side(name: str) -> tuple[str, tuple[str, ...]]:
    """Return "left", "right" or "", and the words of a keypoint's name without its side.

    Names are split at non-letters and at capitals, case-insensitively: `Left_Eye`, `LEFT EYE`,
    `leftEye`, `eye.left`. A single L or R is a side only at the start or the end.
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    for place, word in enumerate(words):
        at_an_end = len(words) > 1 and place in (0, len(words) - 1)
        if word in ("left", "right") or (word in _SIDES and at_an_end):
            return _SIDES[word], (*words[:place], "", *words[place + 1 :])
    for side in ("left", "right"):  # lefteye
        if words and words[0].startswith(side):
            return side, ("", words[0].removeprefix(side), *words[1:])
    return "", tuple(words)


def flip_pairs(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the (left, right) pairs among the keypoint names."""
    sides = {split_side(name): name for name in names}
    return tuple(
        (name, sides["right", rest])
        for (side, rest), name in sides.items()
        if side == "left" and ("right", rest) in sides
    )


def unpaired(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return the names that have a side but are in no pair."""
    paired = {name for pair in pairs for name in pair}
    return [name for name in names if split_side(name)[0] and name not in paired]


def pairs_note(split: Split) -> str:
    """Format a note on the keypoints of a split that horizontal flips swap.

    Raises:
        UserError: If the names do not determine the pairs.
    """
    pairs = split.metadata["keypoint_flip_map"]
    lost = unpaired(split.metadata["keypoint_names"], pairs)
    if lost or not pairs:
        what = f"no opposite side of {first_few(lost)}" if lost else "no left and right keypoints"
        raise UserError(
            f"{split.name}: {what} in the names, so flipped images would be mislabeled; set "
            "DATASETS.KEYPOINT_FLIP_PAIRS to the pairs to swap, or INPUT.RANDOM_FLIP none"
        )
    shown = first_few([f"{left} and {right}" for left, right in pairs], _MAX_PAIRS)
    return f"{split.name}: keypoints that a horizontal flip swaps: {shown}"
