"""COCO: instances, person keypoints, DensePose, and custom datasets in COCO's format.

coco/annotations/<kind>_<split><year>.json
coco/{train,val}{2014,2017}/      the images, by the `file_name` of each image
"""

import dataclasses
import glob
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from detection.datasets.base import ABSENT, FORMATS, NOTE, WRONG, Custom, Finding, Format, Split
from detection.datasets.coco_json import AnnotationFile, Json, masks_in_run_lengths
from detection.datasets.coco_oddities import oddities
from detection.datasets.flips import flip_pairs
from detection.datasets.layout import doctor_command, expected, image_size, read_json
from moco.common.errors import DataError, UserError

# (id, name) of the 80 categories that COCO annotates; the ids have gaps.
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

_SIDES = ("eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
PERSON_KEYPOINTS = ("nose", *(f"{side}_{part}" for part in _SIDES for side in ("left", "right")))
# Keypoints that are exchanged when an image is flipped.
PERSON_FLIP_MAP = tuple((f"left_{part}", f"right_{part}") for part in _SIDES)
# Lines that a drawing has between keypoints, and their RGB colors.
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

_KEYS = ("iscrowd", "bbox", "keypoints", "category_id")  # of annotations
DENSEPOSE_KEYS = ("dp_masks", "dp_x", "dp_y", "dp_I", "dp_U", "dp_V")
_DENSEPOSE_FILES = "https://dl.fbaipublicfiles.com/densepose/data/"

# (images, objects) of the published splits by (kind, year and split); 0 where not published.
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
# Kind → prefix of the names (Detectron2's builtin.py and the DensePose project), of the files.
_PREFIXES = {
    "instances": ("coco", "instances"),
    "keypoints": ("keypoints_coco", "person_keypoints"),
    "densepose": ("densepose_coco", "densepose"),
}


@dataclass(frozen=True)
class COCOSource:
    """Where a split is and how it is read.

    Attributes:
        image_root: folder of the images; empty: looked for beside `json_file`.
        kind: instances, keypoints or densepose for Detectron2's own names, else custom.
        role: TRAIN or TEST for a custom dataset, as in DATASETS.COCO_TRAIN_JSON; empty: the
            doctor's, which takes flags.
        flip_pairs: DATASETS.KEYPOINT_FLIP_PAIRS.
    """

    name: str
    json_file: str
    image_root: str
    kind: str
    role: str = ""
    flip_pairs: tuple[tuple[str, str], ...] = ()

    def present(self) -> bool:
        return os.path.isfile(self.json_file)

    def read(self) -> Split:
        if not self.present():
            raise DataError(f"{self.name}: {self.json_file} is missing; {self._expected()}")
        # The minival files of 2014 hold some annotations twice, and Detectron2 lets them pass.
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
        for record in split.records:
            # A JPEG never has more than 8 bits, and COCO's are too many to open.
            if not record["file_name"].lower().endswith((".jpg", ".jpeg")):
                image_size(record["file_name"])
        return split

    def _file_name(self, image: Json, where: str) -> Any:
        """An image's name; of a whole path, as Detectron2's exporter writes, what is inside."""
        name = image.get("file_name", "")
        if self.kind != "custom" or not isinstance(name, str) or not os.path.isabs(name):
            return name
        here = Path(self.json_file).resolve().parent
        folders = [Path(self.image_root)] if self.image_root else [here, here.parent]
        inside = (f for f in folders if Path(name).is_relative_to(f.absolute()))
        return next((str(Path(name).relative_to(f.absolute())) for f in inside), name)

    def _expected(self) -> str:
        """The end of a message about missing files."""
        if self.kind == "custom":
            key = f"DATASETS.COCO_{self.role}_JSON"
            file = f"set {key} to a file in COCO's format and " if self.role else ""
            return file + self.images_folder
        custom = ", or set DATASETS.COCO_TRAIN_JSON and COCO_TEST_JSON to a custom dataset"
        return expected("coco", self.name, Path(self.json_file).parents[2], custom)

    @property
    def images_folder(self) -> str:
        """How to say where the images of a custom file are."""
        key = f"set DATASETS.COCO_{self.role}_ROOT to" if self.role else "give --root,"
        return f"{key} the images' folder"

    def _metadata(self, file: AnnotationFile) -> Json:
        """What Detectron2's catalog has on such a split beyond any other file of the format."""
        wanted = {"instances": COCO_CATEGORIES, "keypoints": COCO_CATEGORIES[:1]}.get(self.kind)
        given = tuple((category["id"], category["name"]) for category in file.categories)
        if wanted and given != wanted:
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
                "categories": dict(given),
                "densepose_transform_src": _DENSEPOSE_FILES + "UV_symmetry_transforms.mat",
                "densepose_smpl_subdiv": _DENSEPOSE_FILES + "SMPL_subdiv.mat",
                "densepose_smpl_subdiv_transform": _DENSEPOSE_FILES + "SMPL_SUBDIV_TRANSFORM.mat",
            }
        return _custom_keypoints(file, self.flip_pairs) if self.kind == "custom" else {}


def _published(root: str) -> list[COCOSource]:
    sources = []
    for kind, fold in _COUNTS:
        prefix, file = _PREFIXES[kind]
        year, split, *number = fold.split("_")  # the number of images, of the smallest ones
        annotations = "_".join([file, split + year, *number])
        images = f"{'train' if split == 'train' else 'val'}{year}"
        json_file = os.path.join(root, f"coco/annotations/{annotations}.json")
        image_root = os.path.join(root, f"coco/{images}")
        sources.append(COCOSource(f"{prefix}_{fold}", json_file, image_root, kind))
    return sources


def custom_sources(datasets: CfgNode) -> list[COCOSource]:
    """The splits of DATASETS.COCO_TRAIN_JSON and COCO_TEST_JSON, those that are set.

    Their name is `<folder of the file>_<file without ending>`.
    """
    sources = []
    for role, file, root in _custom_files(datasets):
        if file:
            source = _custom_source(file, root, role)
            pairs = tuple((left, right) for left, right in datasets.get("KEYPOINT_FLIP_PAIRS", ()))
            sources.append(dataclasses.replace(source, flip_pairs=pairs))
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


def custom_names(cfg: CfgNode) -> dict[str, str]:
    """{"TRAIN": name, "TEST": name} of custom COCO-JSON files; only of those that are set."""
    return {source.role: source.name for source in custom_sources(cfg.DATASETS)}


def _custom_files(datasets: CfgNode) -> list[tuple[str, str, str]]:
    """(role, annotations, folder of images) as DATASETS has them, "" where it does not."""
    return [
        (role, datasets.get(f"COCO_{role}_JSON", ""), datasets.get(f"COCO_{role}_ROOT", ""))
        for role in ("TRAIN", "TEST")
    ]


def _custom_source(file: str, root: str, role: str) -> COCOSource:
    path = Path(file).expanduser()
    name = f"{path.resolve().parent.name}_{path.stem}"
    return COCOSource(name, str(path), os.path.expanduser(root), "custom", role)


def images_of(json_file: str, role: str) -> str:
    """The folder with the images of a custom file for which DATASETS.COCO_*_ROOT is not set.

    Raises:
        DataError: the file is damaged, or its images are not found.
    """
    source = _custom_source(json_file, "", role)
    return _find_images(source, AnnotationFile(source.json_file, file_name=source._file_name))


def _find_images(source: COCOSource, file: AnnotationFile) -> str:
    """The folder with the images of a custom file: its own, or one in it or beside it.

    Among several that hold the first image the one whose name is part of the file's, as in
    instances_train2017.json.
    """
    here = Path(file.path).resolve().parent
    first = file.file_name(next(iter(file.images.values())), "")
    depth = len(Path(first).parts) - 1
    holding = {
        found.parents[depth]
        for folder in (here, here.parent)
        for pattern in ("", "*/", "images/*/", "data/*/", "*/images/")
        for found in folder.glob(pattern + glob.escape(first))
    }
    # Both a folder with the file itself in it and one of its name are beyond doubt.
    chosen = (
        holding & {here}
        or {path for path in holding if path.name in Path(file.path).stem}
        or holding
    )
    if len(chosen) == 1:
        return str(chosen.pop())
    where = f"in {', '.join(sorted(map(str, chosen)))}" if chosen else "not near it"
    raise DataError(f"{file.path}: {first} is {where}; {source.images_folder}")


def _custom_keypoints(file: AnnotationFile, pairs: tuple[tuple[str, str], ...]) -> Json:
    """Return names and left-right pairs from the categories, where they have keypoints.

    Args:
        pairs: DATASETS.KEYPOINT_FLIP_PAIRS; empty: they are found by the names.
    """
    given = [category.get("keypoints") for category in file.categories]
    if not any(given):
        return {}
    names = given[0]
    if any(others != names for others in given):
        raise DataError(f"{file.path}: categories have different keypoints; one set is supported")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{file.path}: 'keypoints' of a category: expected a list of names")
    if unknown := [name for pair in pairs for name in pair if name not in names]:
        raise DataError(
            f"DATASETS.KEYPOINT_FLIP_PAIRS: {file.path} has no keypoint {unknown[0]!r}; its "
            f"keypoints are {', '.join(names)}"
        )
    return {"keypoint_names": tuple(names), "keypoint_flip_map": pairs or flip_pairs(names)}


@FORMATS.register()
def coco() -> Format:
    """COCO's JSON files."""
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
                "help": "a custom dataset, as DATASETS.COCO_TRAIN_JSON; again for its other files",
            },
            task=_custom_task,
            sources=custom_sources,
            parse=_parse_custom,
            arguments=_doctor_arguments,
            check=_check_custom,
        ),
    )


def _check_folders(root: str, states: Mapping[str, str]) -> Iterator[Finding]:
    """Folders of images that no annotations use."""
    used = {Path(s.image_root).name for s in _published(root) if states[s.name] != ABSENT}
    for name in ("train2017", "val2017", "train2014", "val2014"):
        if name not in used and os.path.isdir(os.path.join(root, "coco", name)):
            yield Finding(f"coco/{name}/", WRONG, f"exists, but no annotations/*_{name}.json")


def _parse_custom(files: list[str], root: str) -> tuple[list[COCOSource], dict[str, str]]:
    keys: dict[str, str] = {}
    for role, file in zip(("TRAIN", "TEST"), files, strict=False):
        keys |= {f"COCO_{role}_JSON": file} | ({f"COCO_{role}_ROOT": root} if root else {})
    return [_custom_source(file, root, "") for file in files], keys


def _custom_task(splits: Sequence[Split], keys: Mapping[str, str]) -> list[str]:
    """The tutorial's small task for boxes alone; COCO's own where every object has a mask."""
    if "COCO_TEST_JSON" not in keys:
        [call] = _doctor_arguments(CfgNode(keys))
        again = shlex.join([*call, "--coco-json"])
        raise UserError(f"give the test images' file as well: {doctor_command()} {again} FILE")
    if not all(split.has_masks for split in splits):
        return ["configs/voc/faster_rcnn_R_18_C4_small.yaml"]
    bitmask = ["INPUT.MASK_FORMAT", "bitmask"] if masks_in_run_lengths(splits[0]) else []
    return ["configs/coco/mask_rcnn_R_50_FPN_1x.yaml", *bitmask]


def _doctor_arguments(datasets: CfgNode) -> list[list[str]]:
    """One call for each folder of images."""
    calls: dict[str, list[str]] = {}
    for _, file, root in _custom_files(datasets):
        call = calls.setdefault(root, ["--root", root] if root else [])
        if file and file not in call:
            call += ["--coco-json", file]
    return [call for call in calls.values() if "--coco-json" in call]


def _check_custom(source: COCOSource) -> Iterator[Finding]:
    """What looks wrong in a file that can be read, and is nobody's to repair but the user's."""
    for text in oddities(read_json(source.json_file)[0]):
        yield Finding(source.name, NOTE, text)
