"""Refusals of `train` about annotations of COCO, LVIS and Cityscapes, and about metrics."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.oracles.broken_coco import BROKEN, write_good
from tests.oracles.refused_files import Edit, both, gone, json_edit, text
from tests.oracles.tiny_coco import write_coco
from tests.oracles.tiny_lvis import write_lvis
from tests.refusals.datasets import FPN, R18
from tests.refusals.rows import Row, rows

# A custom dataset in COCO's format.
SET = " ".join(
    f"DATASETS.COCO_{role}_JSON {{tmp}}/set/objects.json DATASETS.COCO_{role}_ROOT {{tmp}}/set"
    for role in ("TRAIN", "TEST")
)


def coco(edit: Callable[[dict[str, Any]], Any]) -> Edit:
    return lambda folder: write_good(folder / "set", edit)


def keypoints(values: list[float] | None = None, *names: str) -> Edit:
    """Add three keypoints to each object; one object gets `values`."""

    def edit(content: dict[str, Any]) -> None:
        for category in content["categories"]:
            category["keypoints"] = list(names) or ["nose", "left_ear", "right_ear"]
        for annotation in content["annotations"]:
            annotation["keypoints"] = [6, 7, 2, 8, 9, 1, 0, 0, 0][: 3 * (len(names) or 3)]
        if values is not None:
            content["annotations"][1]["keypoints"] = values

    return coco(edit)


def run_lengths(content: dict[str, Any]) -> None:
    for annotation in content["annotations"][1:]:
        annotation["segmentation"] = {"size": [40, 60], "counts": [99, 1, 2300]}


def no_ids(content: dict[str, Any]) -> None:
    for annotation in content["annotations"]:
        annotation["id"] = 0


def two_places(folder: Path) -> None:
    """Make two folders with different images of one name, train/1.jpg and val/1.jpg."""
    for name in ("train", "val"):
        shutil.copytree(folder / "set", folder / name, ignore=shutil.ignore_patterns("*.json"))
    (folder / "set/1.jpg").unlink()
    (folder / "set/2.jpg").unlink()


NAN = float("nan")
COCO = [
    *rows(
        f"{R18} {SET}",
        *((coco(edit), rf"(?=.*objects\.json).*{named}") for edit, named in BROKEN.values()),
        *(
            (keypoints(values), "annotation 12: .*keypoints")
            for values in ([6, 7, 2], [6, 7, 3] * 3, [6, NAN, 2] * 3)
        ),
        (coco(no_ids), "annotation 0: two annotations have this id"),
        *(
            (text("set/objects.json", raw), r"objects\.json: holds .*images, annotations, categ")
            for raw in ("[]", "3", '"x"')
        ),
        (text("set/objects.json", "null"), r"objects\.json: holds null, .*overwrote it: get it"),
        code=3,
    ),
    *(
        row
        for needs, engine in (((), "embedded"), (("detectron2",), "detectron2"))
        for row in rows(
            f"{FPN} {SET} --engine {engine}",
            (coco(run_lengths), r"objects\.json: .*: 2, .* 12; .*MASK_FORMAT bitmask"),
            code=3,
            needs=needs,
        )
    ),
    *rows(
        f"{R18} DATASETS.COCO_TRAIN_JSON {{tmp}}/set/objects.json "
        "DATASETS.COCO_TEST_JSON {tmp}/set/objects.json",
        (two_places, r"1.jpg .*train, .*val; .*COCO_TEST_ROOT"),
        (gone("set/1.jpg"), r"1.jpg .*COCO_TEST_ROOT"),
        code=3,
    ),
    *rows(f"{R18} DATASETS.COCO_TRAIN_ROOT x", ("", "COCO_TRAIN_ROOT .*COCO_TRAIN_JSON")),
    *rows(
        f"{R18} DATASETS.COCO_TRAIN_JSON {{tmp}}/a/set/x.json "
        "DATASETS.COCO_TEST_JSON {tmp}/b/set/x.json",
        ("", "set_x"),
    ),
]
LVIS_FILE = "lvis/lvis_v0.5_train.json"


def lvis(change: Callable[[dict[str, Any]], object]) -> Edit:
    made = json_edit(LVIS_FILE, change)
    return both(lambda at: write_lvis(at, {"train": 3, "val": 1}), made)


def lvis_renamed(version: str, to: str) -> Edit:
    def edit(folder: Path) -> None:
        write_lvis(folder, {"train": 1, "val": 1}, version=version)
        for split in ("train", "val"):
            file = folder / "lvis" / f"lvis_{version}_{split}.json"
            file.rename(file.with_name(f"lvis_{to}_{split}.json"))

    return edit


def first(content: dict[str, Any], **fields: Any) -> None:
    content["annotations"][0].update(fields)


LVIS_TASK = FPN.replace("coco/mask_rcnn_R_50_FPN_1x", "lvis/mask_rcnn_R_50_FPN_1x")
LVIS = [
    *rows(
        LVIS_TASK,
        *(
            (lvis(change), rf"lvis_v0\.5_train\.json.*{named}")
            for change, named in (
                (lambda c: c["images"][0].update(coco_url="http://x/train2017/.."), r"'\.\.'"),
                (lambda c: c["images"][0].pop("coco_url"), "coco_url"),
                (lambda c: first(c, segmentation=[["a"] * 6]), "annotation 1: a polygon"),
                (lambda c: first(c, segmentation=[]), "annotation 1: segmentation"),
                (lambda c: first(c, segmentation=[[1, 2, 3, 4]]), "annotation 1: .*polygons"),
                (lambda c: c["images"][0].update(neg_category_ids=[1231]), "neg_category_ids"),
                (lambda c: c["images"][0].pop("neg_category_ids"), "neg_category_ids: expected"),
                (lambda c: c["categories"][4].pop("synonyms"), "category 5: 'synonyms'"),
                (lambda c: c["categories"][4].pop("frequency"), "category 5: 'frequency'"),
                (lambda c: c["categories"][1229].update(id=1300), r"1\.\.1230"),
                (lambda c: first(c, id=2), "annotation 2: .*two"),
                (lambda c: first(c, bbox=[1, 1, -3, 3]), "annotation 1: bbox .* inverted"),
            )
        ),
        (lvis_renamed("v1", "v0.5"), r"1203 .*1230 .*LVIS v1"),
        code=3,
    ),
    *rows(
        f"{LVIS_TASK} DATASETS.TRAIN \"('lvis_v1_train',)\" DATASETS.TEST \"('lvis_v1_val',)\"",
        (lvis_renamed("v0.5", "v1"), r"1230 .*1203 .*LVIS v0\.5"),
        code=3,
    ),
]
LABELS = "cityscapes/gtFine/train/aachen/aachen_000000_000019_gtFine_{}"
POLYGONS = LABELS.format("polygons.json")


def polygon(*corners: object) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["objects"][3].update(polygon=list(corners))


def first_gone(pattern: str) -> Edit:
    return lambda folder: min(folder.glob(pattern)).unlink()


def all_gone(pattern: str) -> Edit:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


CITYSCAPES_TASK = FPN.replace("coco/mask_rcnn_R_50_FPN_1x", "cityscapes/mask_rcnn_R_50_FPN_24k")
INSTANCES = rows(
    CITYSCAPES_TASK,
    *(
        (json_edit(POLYGONS, change), rf"polygons\.json.*{named}")
        for change, named in (
            (lambda c: c.clear(), "imgHeight"),
            (lambda c: c.pop("imgWidth"), "imgWidth"),
            (lambda c: c["objects"][1].update(label="cart"), "object 2: .*'cart'"),
            (lambda c: c["objects"][1].update(label="group"), "object 2: .*'group'"),
            (polygon([1, 1], [2, 2]), "object 4: .*polygon"),
            (lambda c: c["objects"][3].pop("polygon"), "object 4: "),
            (polygon(*[["a", 1]] * 3), "object 4: .*polygon"),
            (polygon([NAN, 1], [1, 2], [3, 3]), "object 4: .*number"),
        )
    ),
    (first_gone("cityscapes/gtFine/val/*/*_instanceIds.png"), r"nstanceIds\.png: missing \(1 of "),
    code=3,
    files="cityscapes",
    needs=("shapely", "cityscapesscripts"),
)
SEMANTIC = rows(
    f"{CITYSCAPES_TASK} DATASETS.TRAIN \"('cityscapes_fine_sem_seg_train',)\" "
    "DATASETS.TEST \"('cityscapes_fine_sem_seg_val',)\"",
    (text(POLYGONS, "{"), r"polygons\.json"),
    (gone(POLYGONS), r"polygons\.json: missing \(1 of the 4 .*doctor cityscapes"),
    (text("cityscapes/leftImg8bit/train/aachen/readme.txt", "x"), r"readme\.txt"),
    (
        all_gone("cityscapes/gtFine/*/*/*_labelTrainIds.png"),
        r"labelTrainIds\.png.*CITYSCAPES_DATASET={tmp}/cityscapes csCreateTrainIdLabelImgs",
    ),
    code=3,
    files="cityscapes",
)
SEMANTIC += rows(
    CITYSCAPES_TASK,
    ("", r"shapely.*\[cityscapes\]"),
    files="cityscapes",
    without=("shapely", "cityscapesscripts"),
)

# Metrics that cannot be computed are refused before the training.
KEYPOINTS = FPN.replace("mask_rcnn_R_50_FPN_1x", "keypoint_rcnn_R_50_FPN_2x")
OKS = "TEST.KEYPOINT_OKS_SIGMAS [0.1,0.1,0.1,0.1,0.1]"
OF_DENSEPOSE = " ".join(
    f"DATASETS.{role} \"('densepose_coco_2014_minival',)\"" for role in ("TRAIN", "TEST")
)
METRICS = [
    *rows(f"{KEYPOINTS} {SET}", ("", "MODEL.KEYPOINT_ON"), code=3),
    *rows(
        f"{KEYPOINTS} {SET}",
        (keypoints(), "KEYPOINT_OKS_SIGMAS"),
        (keypoints(None, "nose", "tail"), "no .* DATASETS.KEYPOINT_FLIP_PAIRS"),
    ),
    *rows(f"{KEYPOINTS} {SET} {OKS}", (keypoints(), "KEYPOINT_OKS_SIGMAS")),
    *rows(
        f"{FPN} MODEL.ROI_HEADS.NUM_CLASSES 1 {OF_DENSEPOSE}",
        (lambda at: write_coco(at, {"minival2014": 2}, densepose=True), "DensePose"),
        files="coco",
    ),
    *rows(f"{CITYSCAPES_TASK} MODEL.MASK_ON False", ("", "MODEL.MASK_ON"), files="cityscapes"),
    *rows(
        CITYSCAPES_TASK,
        ("", r"\[cityscapes\]"),
        files="cityscapes",
        needs=("shapely",),
        without=("cityscapesscripts",),
    ),
    *rows(f"{R18} DATASETS.VOC_DIR {{tmp}}/voc MODEL.MASK_ON True", ("", "MODEL.MASK_ON"), code=3),
    *rows(
        LVIS_TASK,
        (lambda at: write_lvis(at, {"train": 3, "val": 1}), r"hotcoco.*\[metrics\]"),
        without=("hotcoco",),
    ),
    *rows(
        f"{R18} DATASETS.VOC_DIR {{tmp}}/voc INPUT.CORRUPTION fog.3",
        ("", "imagecorruptions"),
        without=("imagecorruptions",),
    ),
]

ANNOTATIONS: list[Row] = [*COCO, *LVIS, *INSTANCES, *SEMANTIC, *METRICS]
