"""The VOC reader: what it accepts, what it refuses and how, the same for both engines."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detection.config.task import default_task, load_task
from detection.datasets import (
    VOC_CLASSES,
    VOCSource,
    cache_clear,
    folder_sources,
    known,
    read_split,
)
from moco.common.errors import DataError, UserError
from tests.oracles.real_voc import with_links
from tests.oracles.tiny_voc import write_voc

R18 = "configs/voc/faster_rcnn_R_18_C4_small.yaml"
ROOT = Path(__file__).resolve().parents[3]


pytestmark = pytest.mark.usefixtures("fresh_cache")


def source(root: Path, split: str = "train", classes: tuple[str, ...] = ("blue", "green", "red")):
    return VOCSource(f"x_{split}", root, split, 2007, classes, False)


def write_one(
    root: Path, body: str, size: tuple[int, int] = (60, 40), image: str = "1.jpg"
) -> Path:
    """A dataset of one image (width, height) whose annotation has `body` in it."""
    for part in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / part).mkdir(parents=True, exist_ok=True)
    (root / "ImageSets" / "Main" / "train.txt").write_text("1\n")
    (root / "ImageSets" / "Main" / "test.txt").write_text("1\n")
    Image.new("RGB", size).save(root / "JPEGImages" / image)
    (root / "Annotations" / "1.xml").write_text(f"<annotation>{body}</annotation>")
    return root


SIZE = "<size><width>60</width><height>40</height><depth>3</depth></size>"


def box(xmin: object, ymin: object, xmax: object, ymax: object) -> str:
    return (
        f"<bndbox><xmin>{xmin}</xmin><ymin>{ymin}</ymin><xmax>{xmax}</xmax><ymax>{ymax}</ymax>"
        "</bndbox>"
    )


def obj(name: str = "red", inside: str = box(1, 1, 10, 10)) -> str:
    return f"<object><name>{name}</name>{inside}</object>"


BROKEN = {
    "unknown class": (
        SIZE + obj("purple"),
        "object 1: unknown class 'purple'; .* blue, green, red",
    ),
    "no size": (obj(), "<size> with <width> and <height> is missing"),
    "empty width": (
        "<size><width></width><height>40</height></size>" + obj(),
        "size: <width> is missing or empty",
    ),
    "other size": (
        "<size><width>40</width><height>60</height></size>" + obj(),
        "size 40x60 contradicts 1.jpg, which is 60x40",
    ),
    "zero size": (
        "<size><width>0</width><height>0</height></size>" + obj(),
        "size 0x0 contradicts 1.jpg",
    ),
    "inverted in x": (
        SIZE + obj() + obj("blue", box(20, 1, 10, 9)),
        r"object 2 \(blue\): .*inverted",
    ),
    "inverted in y": (SIZE + obj("red", box(1, 30, 10, 9)), "inverted"),
    "right of the image": (SIZE + obj("red", box(61, 1, 70, 9)), "outside the 60x40 image"),
    "left of the image": (SIZE + obj("red", box(-9, 1, 0, 9)), "outside the 60x40 image"),
    "not a number": (SIZE + obj("red", box("nan", 1, 10, 9)), "<xmin> is 'nan', expected a finite"),
    "infinite": (SIZE + obj("red", box(1, 1, "inf", 9)), "<xmax> is 'inf', expected a finite"),
    "text": (SIZE + obj("red", box(1, 1, "ten", 9)), "<xmax> is 'ten', expected a number"),
    "no box": (SIZE + obj("red", ""), "<bndbox> is missing"),
    "half a box": (SIZE + obj("red", "<bndbox><xmin>1</xmin></bndbox>"), "<ymin> is missing"),
    "no name": (SIZE + f"<object>{box(1, 1, 9, 9)}</object>", "object 1: <name> is missing"),
    "odd difficult": (
        SIZE + obj("red", box(1, 1, 9, 9) + "<difficult>maybe</difficult>"),
        "<difficult> is 'maybe', expected 0 or 1",
    ),
    "cut off": (SIZE + "<object><name>red</name>", "not valid XML"),
    "entities": ("<!DOCTYPE a [<!ENTITY b 'c'>]>" + SIZE, "declares a document type or entities"),
}


@pytest.mark.parametrize("engine", ["embedded", "detectron2"])
@pytest.mark.parametrize("case", BROKEN)
def test_broken_annotations_stop_both_engines_before_training(
    case, engine, tmp_path, request, monkeypatch
):
    if engine == "detectron2":
        request.getfixturevalue("detectron2")
    monkeypatch.chdir(ROOT)
    body, message = BROKEN[case]
    root = write_one(tmp_path / "set", body)
    opts = ["MODEL.WEIGHTS", "random", "DATASETS.VOC_DIR", str(root)]
    opts += ["DATASETS.VOC_CLASSES", "['blue', 'green', 'red']", "OUTPUT_DIR", str(tmp_path / "o")]
    with pytest.raises(DataError, match=message) as caught:
        load_task(R18, opts, engine)
    assert "1.xml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_box_over_the_border_is_clipped_and_counted(tmp_path):
    body = SIZE + obj("red", box(0, -3, 10, 45)) + obj("blue", box(1, 1, 60, 40))
    split = source(write_one(tmp_path, body)).read()
    assert split.notes == ("boxes over the border, clipped: 1",)
    assert split.truth["1"].boxes.tolist() == [[1, 1, 10, 40], [1, 1, 60, 40]]
    boxes = [annotation["bbox"] for annotation in split.records[0]["annotations"]]
    assert boxes == [[0, 0, 10, 40], [0, 0, 60, 40]]


def test_one_pixel_boxes_and_fractions_are_boxes(tmp_path):
    body = SIZE + obj("red", box(5, 5, 5, 5)) + obj("red", box(1.5, 2.25, 9.75, 8))
    split = source(write_one(tmp_path, body)).read()
    boxes = [annotation["bbox"] for annotation in split.records[0]["annotations"]]
    assert split.notes == ()
    assert boxes == [[4, 4, 5, 5], [0.5, 1.25, 9.75, 8]]


def test_optional_elements_may_be_missing(tmp_path):
    """Other tools leave out pose, truncated and difficult; an image may have no object."""
    split = source(write_one(tmp_path / "a", SIZE + obj())).read()
    assert split.truth["1"].difficult.tolist() == [False]
    assert source(write_one(tmp_path / "b", SIZE)).read().records[0]["annotations"] == []


def test_records_are_detectron2s(detectron2, tmp_path):
    """The same dicts as Detectron2's own reader gives, on whole-number boxes inside."""
    from detectron2.data.datasets.pascal_voc import load_voc_instances

    root = write_voc(tmp_path / "set", {"train": 5})
    split = source(root).read()
    theirs = load_voc_instances(str(root), "train", split.classes)
    assert list(split.records) == theirs
    assert sum(len(record["annotations"]) for record in theirs) >= 5


@pytest.mark.parametrize("name", ["voc_2007_trainval", "voc_2007_test"])
def test_real_records_and_metadata_are_detectron2s(
    name, detectron2, shared_data, tmp_path, monkeypatch
):
    from detectron2.data import MetadataCatalog
    from detectron2.data.datasets.pascal_voc import load_voc_instances

    root = with_links(shared_data / "VOC2007", tmp_path / "VOC2007")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    split = read_split(name, default_task())
    meta = MetadataCatalog.get(name)
    assert list(split.records) == load_voc_instances(str(root), meta.split, meta.thing_classes)
    assert split.evaluator_type == meta.evaluator_type == "pascal_voc"
    assert split.metadata == {
        "thing_classes": meta.thing_classes,
        "dirname": str(root),
        "split": meta.split,
        "year": meta.year,
    }
    assert not split.has_masks


def test_images_that_are_the_text_of_a_link(shared_data, monkeypatch):
    """As in ../shared/data, which was copied without its links: the message says so."""
    image = next((shared_data / "VOC2007" / "JPEGImages").iterdir())
    if image.stat().st_size > 255:
        pytest.skip("these are the images themselves")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(shared_data))
    with pytest.raises(DataError, match=r"a text with the path \.\./\.\./coco/.*with its links"):
        read_split("voc_2007_trainval", default_task())


def test_ground_truth_is_one_based(tmp_path):
    body = SIZE + obj("red", box(3, 4, 10, 12) + "<difficult>1</difficult>") + obj("blue")
    truth = source(write_one(tmp_path, body)).read().truth["1"]
    np.testing.assert_array_equal(truth.boxes, [[3, 4, 10, 12], [1, 1, 10, 10]])
    assert truth.classes.tolist() == [2, 0]
    assert truth.difficult.tolist() == [True, False]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("../1\n", "leads out of the dataset"),
        ("/etc/passwd\n", "leads out of the dataset"),
        ("..\n", "leads out of the dataset"),
        ("1\n1\n", "1 is listed twice"),
        ("1 1\n", "expected one image id per line"),
        ("\n\n", "no image ids"),
        ("2\n", "2.xml: missing, but 2 is listed"),
    ],
)
def test_bad_lists_are_refused(lines, message, tmp_path):
    root = write_one(tmp_path, SIZE + obj())
    (root / "ImageSets" / "Main" / "train.txt").write_text(lines)
    with pytest.raises(DataError, match=message):
        source(root).read()


def test_missing_and_damaged_images_are_named(tmp_path):
    root = write_one(tmp_path, SIZE + obj())
    image = root / "JPEGImages" / "1.jpg"
    for content, message in ((b"", "not an image or damaged"), (b"no image", "1.jpg")):
        image.write_bytes(content)
        with pytest.raises(DataError, match=message):
            source(root).read()
    image.unlink()
    with pytest.raises(DataError, match=r"1.jpg: missing, but 1 is listed in .*train.txt"):
        source(root).read()


@pytest.mark.parametrize("name", ["1.jpg", "1.jpeg", "1.png", "1.JPG", "1.Jpeg", "1.PNG", "1.bmp"])
def test_a_folder_of_ones_own_may_hold_other_formats(name, tmp_path):
    split = source(write_one(tmp_path, SIZE + obj(), image=name)).read()
    assert split.records[0]["file_name"].endswith(name)


def test_a_file_with_another_ending_is_named(tmp_path):
    """And the tree of VOC2007 is no advice for a custom dataset."""
    root = write_one(tmp_path, SIZE + obj(), image="1.tif")
    with pytest.raises(DataError, match=r"1\.jpg: missing.* 1\.tif is there.*\.bmp") as error:
        source(root).read()
    assert "VOC2007" not in str(error.value)
    (root / "JPEGImages" / "1.tif").rename(root / "JPEGImages" / "1.JPG")
    builtin = dataclasses.replace(source(root), builtin=True)  # Detectron2 opens 1.jpg
    with pytest.raises(DataError, match=r"1\.JPG is there"):
        builtin.read()


def test_exif_orientation_counts(tmp_path):
    """An image that is shown on its side is as wide as it is shown."""
    root = write_one(tmp_path, SIZE + obj())
    image = Image.new("RGB", (40, 60))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(root / "JPEGImages" / "1.jpg", exif=exif)
    record = source(root).read().records[0]
    assert (record["width"], record["height"]) == (60, 40)


def task_with(folder: Path | str, **datasets: object):
    cfg = default_task()
    cfg.DATASETS.VOC_DIR = str(folder)
    for key, value in datasets.items():
        cfg.DATASETS[key] = value
    return cfg


def test_classes_are_all_names_sorted_and_the_same_for_every_split(tmp_path):
    root = write_voc(tmp_path / "mine", {"train": 6, "val": 3})
    sources = folder_sources(task_with(root).DATASETS)
    assert [s.name for s in sources] == ["mine_train", "mine_val"]
    assert {s.classes for s in sources} == {("blue", "green", "red")}
    given = folder_sources(task_with(root, VOC_CLASSES=["red", "green", "blue"]).DATASETS)
    assert given[0].classes == ("red", "green", "blue")


def test_names_are_looked_up_whole(tmp_path, monkeypatch):
    """'voc' somewhere in a name means nothing."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    table = known(default_task())
    found = table["voc_2007_trainval"]
    assert (found.root, found.split, found.year) == (tmp_path / "VOC2007", "trainval", 2007)
    assert found.classes == VOC_CLASSES and found.builtin
    assert table["voc_2012_val"].year == 2012
    for name, near in (
        ("my_voc_2007_test", "voc_2007_test"),
        ("voc_2012_test", "voc_2012_train"),
        ("coco", "DATASETS.VOC_DIR"),
        ("my_coco_2017_train", "coco_2017_train"),
    ):
        with pytest.raises(UserError, match=rf"unknown dataset .*{near}.*COCO_TRAIN_JSON") as error:
            read_split(name, default_task())
        assert "\n" not in str(error.value)
    root = write_voc(tmp_path / "own", {"train": 1})
    with pytest.raises(UserError, match=r"choices are own_train$"):
        read_split("voc_2007_trainval", task_with(root))


def test_names_whose_annotations_are_not_public_say_so():
    for name in ("coco_2017_test-dev", "lvis_v1_test_dev", "cityscapes_fine_sem_seg_test"):
        with pytest.raises(UserError, match=r"its annotations are not public"):
            read_split(name, default_task())


def test_asking_twice_reads_once(tmp_path):
    root = write_voc(tmp_path / "own", {"train": 1, "val": 1})
    first = read_split("own_train", task_with(root))
    assert read_split("own_train", task_with(root)) is first
    assert read_split("own_val", task_with(root)) is not first
    cache_clear()
    assert read_split("own_train", task_with(root)) is not first


def test_the_digest_is_of_what_is_annotated_and_not_of_where_it_lies(tmp_path):
    """A folder of the same name elsewhere is the same dataset, unless a box is different."""
    roots = [write_voc(tmp_path / part / "own", {"train": 2}) for part in "ab"]
    first, second = (source(root).read().annotations_sha256 for root in roots)
    assert first == second and len(first) == 64
    annotation = roots[1] / "Annotations" / "000001.xml"
    text = annotation.read_text()
    annotation.write_text(text.replace("<difficult>0", "<difficult>1", 1))
    assert source(roots[1]).read().annotations_sha256 != first


def test_the_builtin_names_are_detectron2s(detectron2):
    from detectron2.data import DatasetCatalog, MetadataCatalog

    from detection.datasets import voc

    # Those of segmentation are of this project: another test may have registered them.
    theirs = {n for n in DatasetCatalog.list() if n.startswith("voc_") and "sem_seg" not in n}
    assert set(voc._BUILTIN) == theirs
    for name, (folder, split, year) in voc._BUILTIN.items():
        meta = MetadataCatalog.get(name)
        assert (Path(meta.dirname).name, meta.split, meta.year) == (folder, split, year)
        assert tuple(meta.thing_classes) == VOC_CLASSES


def test_a_missing_data_set_shows_the_tree_and_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "nowhere"))
    with pytest.raises(DataError) as caught:
        read_split("voc_2007_trainval", default_task())
    for word in ("ImageSets/Main/trainval.txt", "Annotations/", "$DETECTRON2_DATASETS", "VOC_DIR"):
        assert word in str(caught.value)
    with pytest.raises(DataError, match=r"expected .*Annotations/"):
        folder_sources(task_with(tmp_path).DATASETS)


def test_real_annotations(shared_data):
    cfg = task_with(shared_data / "bccd")
    split = read_split("bccd_trainval", cfg)
    assert split.classes == ("Platelets", "RBC", "WBC")
    assert len(split.records) == 292
    assert len(read_split("bccd_test", cfg).records) == 72
    assert os.path.isfile(split.records[0]["file_name"])
