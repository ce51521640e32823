"""Refusals of `train`, `doctor` and `datasets` about datasets: names, folders, annotations."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from tests.oracles.broken_coco import write_good
from tests.oracles.refused_files import SIZE, Edit, both, box, gone, json_edit, obj, text, write_one
from tests.oracles.tiny_coco import write_coco
from tests.refusals.rows import Row, rows

R18 = "train --check-only --engine embedded MODEL.DEVICE cpu MODEL.WEIGHTS random OUTPUT_DIR run"
R18 += " --config-file voc/faster_rcnn_R_18_C4_small"
FPN = R18.replace("voc/faster_rcnn_R_18_C4_small", "coco/mask_rcnn_R_50_FPN_1x")
FPN += " SOLVER.REFERENCE_WORLD_SIZE 0"

# A folder in VOC's layout. `BODIES`: an annotation and a pattern of the message.
ONE = f"{R18} DATASETS.VOC_DIR {{tmp}}/one DATASETS.VOC_CLASSES \"['blue','green','red']\""
BODIES = (
    (SIZE + obj("purple"), "object 1: .*'purple'.* blue, green, red"),
    (obj(), "<size/width>"),
    ("<size><width></width><height>40</height></size>" + obj(), "<size/width>"),
    ("<size><width>40</width><height>60</height></size>" + obj(), "40x60.*60x40"),
    (SIZE + obj() + obj("blue", box(20, 1, 10, 9)), r"object 2 \(blue\): "),
    (SIZE + obj("red", box(1, 30, 10, 9)), "inverted"),
    (SIZE + obj("red", box(61, 1, 70, 9)), "outside the 60x40"),
    (SIZE + obj("red", box(-9, 1, 0, 9)), "outside the 60x40"),
    (SIZE + obj("red", box("nan", 1, 10, 9)), "<bndbox/xmin> is 'nan'"),
    (SIZE + obj("red", box(1, 1, "inf", 9)), "<bndbox/xmax> is 'inf'"),
    (SIZE + obj("red", box(1, 1, "ten", 9)), "<bndbox/xmax> is 'ten'"),
    (SIZE + obj("red", ""), "<bndbox/xmin>"),
    (SIZE + obj("red", box(1)), "<bndbox/ymin>"),
    (SIZE + f"<object>{box(1, 1, 9, 9)}</object>", "object 1: <name>"),
    (SIZE + obj("red", box(1, 1, 9, 9) + "<difficult>maybe</difficult>"), "<difficult> is 'maybe'"),
    (SIZE + "<object><name>red</name>", "XML"),
    ("<!DOCTYPE a [<!ENTITY b 'c'>]>" + SIZE, "XML"),
)
DOCTYPE = "<?xml version='1.0' encoding='utf-16'?><!DOCTYPE a [<!ENTITY b 'c'>]>"
UTF_16 = f"{DOCTYPE}<annotation>{SIZE}{obj()}</annotation>".encode("utf-16")


def gray(folder: Path) -> None:
    """Write an image of 16 bits, which Detectron2's reader would clip to white."""
    write_one(folder / "one", image="1.png")
    (folder / "one/JPEGImages/1.jpg").unlink()
    pixels = np.full((40, 60), 999, np.uint16)
    Image.fromarray(pixels).save(folder / "one/JPEGImages/1.png")


def other_ending(folder: Path) -> None:
    (folder / "one/JPEGImages/1.jpg").rename(folder / "one/JPEGImages/1.tif")


VOC = [
    *rows(
        ONE,
        *(
            (
                text("one/Annotations/1.xml", f"<annotation>{body}</annotation>"),
                rf"1\.xml: .*{named}",
            )
            for body, named in BODIES
        ),
        (text("one/Annotations/1.xml", UTF_16), r"1\.xml: .*declares a document type, or entities"),
        (
            both(text("real.jpg", ""), text("one/JPEGImages/1.jpg", "../../real.jpg")),
            r"1\.jpg: .* \.\./\.\./real\.jpg.*links",
        ),
        (text("one/JPEGImages/1.jpg", b""), r"1\.jpg"),
        (text("one/JPEGImages/1.jpg", b"no image"), r"1\.jpg"),
        (gone("one/JPEGImages/1.jpg"), r"1\.jpg"),
        (gray, r"1\.png.*8 bits"),
        (other_ending, r"^(?!.*VOC2007).*1\.jpg: missing.* 1\.tif .*\.bmp"),
        *(
            (text("one/ImageSets/Main/train.txt", f"{line}\n"), r"train\.txt")
            for line in ("../1", "/etc/passwd", "..", "1\n1", "1 1", "\n", "2")
        ),
        (
            both(gone("one/ImageSets/Main/train.txt"), text("one/ImageSets/Main/val.txt", "1\n")),
            "ImageSets/Main has .*val; expected trainval or train",
        ),
        (
            text("one/Annotations/1.xml", f"<annotation>{SIZE}</annotation>"),
            "no annotated objects, so nothing can be trained",
        ),
        code=3,
    ),
    *rows(f"{R18} DATASETS.VOC_DIR {{tmp}}/images", ("", "VOC_DIR .*Annotations/"), code=3),
    *rows(f"{R18} DATASETS.COCO_DIR {{tmp}}/images", ("", "COCO_DIR .*train, valid"), code=3),
    *rows(
        R18,
        *(
            (f"DATASETS.{key} ~nobody_here/x", "~nobody_here/x")
            for key in ("VOC_DIR", "COCO_DIR", "YOLO_YAML")
        ),
        code=3,
    ),
    *rows(
        "doctor",
        *((f"{flag} ~nobody_here", "~nobody_here") for flag in ("--voc-dir", "--yolo")),
        code=3,
    ),
    *rows(
        f"{R18} DATASETS.YOLO_YAML {{tmp}}/images/data.yaml",
        ("", r"data\.yaml: no such file"),
        (text("images/data.yaml", "names: [a]"), "YOLO_YAML .* has no split; expected trainval or"),
        (text("images/data.yaml", "train: .\nval: .\nnames: [a]"), "none of .* has a label file"),
        code=3,
    ),
    *rows(
        f"{R18} DATASETS.VOC_DIR {{tmp}}/voc DATASETS.YOLO_YAML x.yaml",
        ("", "DATASETS.VOC_DIR and DATASETS.YOLO_YAML are both set; keep one"),
    ),
    *rows(
        f"{R18} DATASETS.COCO_DIR {{tmp}}/voc DATASETS.COCO_TEST_JSON x.json",
        ("", r"DATASETS.COCO_DIR and DATASETS.COCO_\*_JSON are both set; keep one"),
    ),
]


def voc_mask(make: Callable[[int, int], np.ndarray]) -> Edit:
    def edit(folder: Path) -> None:
        mask = folder / "VOC2012/SegmentationClass/2012_000004.png"
        Image.fromarray(make(*np.asarray(Image.open(mask)).shape)).save(mask)

    return edit


def moved(folder: Path) -> None:
    """Move all masks but one to the folder of VOC's own masks."""
    augmented = folder / "VOC2012/SegmentationClassAug"
    for mask in sorted(augmented.iterdir()):
        if mask.stem != "2012_000001":
            mask.rename(folder / "VOC2012/SegmentationClass" / mask.name)


FCN = R18.replace("voc/faster_rcnn_R_18_C4_small", "voc/fcn16s_R_50_30k")
MASK = r"2012_000004\.png"
SEM_SEG = rows(
    FCN,
    (moved, r"000000\.png: .*3 of the 4"),
    *(
        (voc_mask(make), named)
        for make, named in (
            (lambda h, w: np.full((h, w), 21, np.uint8), f"{MASK}.*label 21"),
            (lambda h, w: np.zeros((h, w + 2), np.uint8), rf"{MASK}.*2012_000004\.jpg"),
            (lambda h, w: np.zeros((h, w, 3), np.uint8), f"{MASK}.*mode RGB"),
            (lambda h, w: np.zeros((h, w), np.uint16), f"{MASK}.*mode I;16"),
        )
    ),
    *(
        (text("VOC2012/SegmentationClass/2012_000004.png", content), MASK)
        for content in (b"", b"text", b"\x89PNG\r\n\x1a\n")
    ),
    code=3,
    files="VOC2012",
)

DETECTRON2S = [
    *rows(
        FPN,
        (
            lambda at: (at / "coco/annotations/instances_val2017.json").write_text(
                write_good(at / "set").read_text()
            ),
            "instances_val2017.json: the categories .*COCO_TRAIN_JSON",
        ),
        (
            lambda at: [p.unlink() for p in sorted((at / "coco/train2017").iterdir())[:2]],
            r"\.jpg: .*2 of the 4 .*doctor coco",
        ),
        code=3,
    ),
    *rows(
        f"{FPN} DATASETS.TRAIN \"('coco_2014_train',)\"",
        (
            both(
                lambda at: write_coco(at, {"train2014": 3}),
                json_edit(
                    "coco/annotations/instances_train2014.json",
                    lambda c: c["annotations"].append(c["annotations"][0]),
                ),
            ),
            r"instances_train2014\.json: annotation",
        ),
        code=3,
    ),
    *rows(
        f"{R18} MODEL.ROI_HEADS.NUM_CLASSES 3",
        ("", "NUM_CLASSES: got 3, but voc_2007_test has 20"),
        files="VOC2007",
    ),
    *rows(
        R18 + " DATASETS.TRAIN \"('{}',)\" DATASETS.TEST \"('{}',)\"",
        *(
            (name, rf"{name}.*{near}")
            for name, near in (
                ("my_voc_2007_test", "voc_2007_test"),
                ("voc_2012_test", "voc_2012_train"),
                ("coco", "DATASETS.VOC_DIR"),
                ("my_coco_2017_train", "coco_2017_train"),
                ("coco_2017_test-dev", "not public"),
                ("lvis_v1_test_dev", "not public"),
                ("cityscapes_fine_sem_seg_test", "not public"),
            )
        ),
    ),
    *rows(
        R18 + " DATASETS.TRAIN \"('{}',)\" DATASETS.TEST \"('{}',)\"",
        *(
            (name, rf"{name}: {{tmp}}/{file}.*\$DETECTRON2_DATASETS.*moco-transfer doctor {kind}$")
            for kind, name, file in (
                ("voc", "voc_2007_trainval", "VOC2007/ImageSets/Main/trainval.txt"),
                (
                    "voc",
                    "voc_2012_sem_seg_train_aug",
                    "VOC2012/ImageSets/Segmentation/train_aug.txt",
                ),
                ("coco", "coco_2017_train", "coco/annotations/instances_train2017.json"),
                (
                    "coco",
                    "densepose_coco_2014_minival_100",
                    "coco/annotations/densepose_minival2014_100.json",
                ),
                ("lvis", "lvis_v0.5_val", "lvis/lvis_v0.5_val.json"),
                ("cityscapes", "cityscapes_fine_instance_seg_val", "cityscapes/leftImg8bit/val/"),
                ("cityscapes", "cityscapes_fine_sem_seg_train", "cityscapes/leftImg8bit/train/"),
            )
        ),
        code=3,
    ),
    *rows(
        f"{FPN} DATASETS.PART",
        *((part, r"DATASETS\.PART") for part in ("0%.1", "101%.1", "ten", "10", "10%.-1")),
    ),
    *rows(
        f"{FPN} DATASETS.PART 50%.3 DATASETS.PART_INDEX {{tmp}}/index.txt",
        *(
            (text("index.txt", json.dumps(content)), r"index\.txt")
            for content in (
                [],
                {"50.0": [1]},
                {"50.0": {"3": [0]}},
                {"50.0": {"3": [-1, 1]}},
                {"50.0": {"3": [10**6, 1]}},
                {"50.0": {"3": [True, 0]}},
            )
        ),
        code=3,
    ),
]

# The commands about datasets.
COMMANDS = [
    *rows(
        "doctor",
        ("x", "invalid choice|expected"),
        ("voc --voc-dir x", "not allowed|exclude"),
        ("--voc-dir x --coco-json y", "not allowed|exclude"),
        ("--voc-dir one --root x", "--root"),
    ),
    *rows("datasets doctor", ("", "one of the arguments|required|expected")),
    *rows("doctor", ("--verify", "name the dataset")),
    *rows(
        "doctor --voc-dir one",
        (gone("one/JPEGImages"), "has no JPEGImages/; expected"),
        (gone("one/Annotations", "one/JPEGImages"), "has no Annotations/, JPEGImages/; expected"),
        (gone("one/ImageSets"), r"has no ImageSets/Main/\*.txt; expected"),
        (
            both(gone("one/JPEGImages"), lambda at: write_one(at / "one/devkit/VOC2007")),
            "did you mean one/devkit/VOC2007",
        ),
        (gone("one"), "no such folder"),
        code=3,
    ),
    *rows("datasets fetch", ("no_such_dataset", "no_such_dataset"), ("", "NAME|required")),
]
DATASETS: list[Row] = [*VOC, *SEM_SEG, *DETECTRON2S, *COMMANDS]
