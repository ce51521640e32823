"""The VOC reader: Detectron2's records, a custom folder, and what is refused."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detection.config.task import default_task
from detection.datasets import cache_clear, folder_sources, known_sources, read_split
from detection.datasets.voc import VOC_CLASSES, VOCSource
from moco.common.errors import DataError
from tests.oracles.real_voc import with_links
from tests.oracles.refused_files import SIZE, box, obj, write_one
from tests.oracles.tiny_voc import write_voc


def source(root: Path) -> VOCSource:
    return VOCSource("x_train", root, "train", 2007, ("blue", "green", "red"), False)


def test_annotations_may_have_another_encoding(tmp_path):
    root = write_one(tmp_path, SIZE + obj())
    path = root / "Annotations" / "1.xml"
    text = path.read_text()
    path.write_bytes(('<?xml version="1.0" encoding="utf-16"?>' + text).encode("utf-16"))
    assert source(root).read().records


def test_a_box_over_the_border_is_clipped_and_counted(tmp_path):
    body = SIZE + obj("red", box(-1, -3, 10, 45)) + obj("blue", box(1, 1, 60, 40))
    split = source(write_one(tmp_path, body)).read()
    assert split.notes == ("boxes over the border, clipped: 1",)
    assert split.truth["1"].boxes.tolist() == [[1, 1, 10, 40], [1, 1, 60, 40]]
    boxes = [annotation["bbox"] for annotation in split.records[0]["annotations"]]
    assert boxes == [[0, 0, 10, 40], [0, 0, 60, 40]]


def test_a_file_that_counts_from_0_is_named(tmp_path):
    body = SIZE + obj("red", box(0, 0, 10, 12)) + obj("blue", box(1, 0, 60, 40))
    (note,) = source(write_one(tmp_path, body)).read().notes
    assert note.startswith("boxes that start at 0: 2; the files count pixels from 0")


def test_coordinates_and_optional_elements(tmp_path):
    """One pixel and fractions are boxes; other tools leave out pose, truncated and difficult."""
    hard = obj("red", box(5, 5, 5, 5) + "<difficult>1</difficult>")
    split = source(write_one(tmp_path, SIZE + hard + obj("blue", box(1.5, 2.25, 9.75, 8)))).read()
    boxes = [annotation["bbox"] for annotation in split.records[0]["annotations"]]
    assert split.notes == ()
    assert boxes == [[4, 4, 5, 5], [0.5, 1.25, 9.75, 8]]
    truth = split.truth["1"]
    np.testing.assert_array_equal(truth.boxes, [[5, 5, 5, 5], [1.5, 2.25, 9.75, 8]])
    assert (truth.classes.tolist(), truth.difficult.tolist()) == ([2, 0], [True, False])
    assert source(write_one(tmp_path, SIZE)).read().records[0]["annotations"] == []


@pytest.mark.detectron2
def test_records_are_detectron2s(tmp_path):
    """Records equal those of Detectron2's reader for boxes of integers inside the image."""
    from detectron2.data.datasets.pascal_voc import load_voc_instances

    split = source(write_voc(tmp_path, {"train": 5})).read()
    theirs = load_voc_instances(str(tmp_path), "train", split.classes)
    assert list(split.records) == theirs
    assert sum(len(record["annotations"]) for record in theirs) >= 5


@pytest.mark.detectron2
@pytest.mark.parametrize("name", ["voc_2007_trainval", "voc_2007_test"])
def test_real_records_and_metadata_are_detectron2s(name, shared_data, tmp_path, monkeypatch):
    from detectron2.data import MetadataCatalog
    from detectron2.data.datasets.pascal_voc import load_voc_instances

    root = with_links(shared_data / "VOC2007", tmp_path / "VOC2007")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    split = read_split(name, default_task())
    meta = MetadataCatalog.get(name)
    assert list(split.records) == load_voc_instances(str(root), meta.split, meta.thing_classes)
    assert split.evaluator_type == meta.evaluator_type == "pascal_voc"
    expected = {key: getattr(meta, key) for key in ("thing_classes", "split", "year")}
    assert split.metadata == {**expected, "dirname": str(root)}
    assert not split.has_masks


@pytest.mark.detectron2
def test_the_published_names_are_detectron2s():
    from detectron2.data import DatasetCatalog, MetadataCatalog

    # Those of segmentation are of this project: another test may have registered them.
    theirs = {n for n in DatasetCatalog.list() if n.startswith("voc_") and "sem_seg" not in n}
    ours = {n: s for n, s in known_sources(default_task()).items() if isinstance(s, VOCSource)}
    assert set(ours) == theirs
    for name, found in ours.items():
        meta = MetadataCatalog.get(name)
        assert Path(meta.dirname).name == found.root.name
        assert (meta.split, meta.year) == (found.split, found.year)
        assert tuple(meta.thing_classes) == found.classes == VOC_CLASSES


@pytest.mark.parametrize("name", ["1.jpg", "1.png", "1.Jpeg", "1.bmp"])
def test_a_custom_folder_may_hold_other_formats(name, tmp_path):
    split = source(write_one(tmp_path, SIZE + obj(), image=name)).read()
    assert split.records[0]["file_name"].endswith(name)


def test_exif_orientation_counts(tmp_path):
    """An image that is shown on its side is as wide as it is shown."""
    root = write_one(tmp_path, SIZE + obj())
    image = Image.new("RGB", (40, 60))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(root / "JPEGImages" / "1.jpg", exif=exif)
    record = source(root).read().records[0]
    assert (record["width"], record["height"]) == (60, 40)


def task_with(folder: Path, **datasets: object):
    cfg = default_task()
    cfg.DATASETS.VOC_DIR = str(folder)
    cfg.DATASETS.update(datasets)
    return cfg


def test_a_custom_folder(tmp_path):
    """Classes are all names, sorted, the same for every split; each split is read once."""
    root = write_voc(tmp_path / "mine", {"train": 6, "val": 3})
    sources = folder_sources(task_with(root).DATASETS)
    assert [s.name for s in sources] == ["mine_train", "mine_val"]
    assert {s.classes for s in sources} == {("blue", "green", "red")}
    given = folder_sources(task_with(root, VOC_CLASSES=["red", "green", "blue"]).DATASETS)
    assert given[0].classes == ("red", "green", "blue")
    first = read_split("mine_train", task_with(root))
    assert read_split("mine_train", task_with(root)) is first
    assert read_split("mine_val", task_with(root)) is not first
    cache_clear()
    assert read_split("mine_train", task_with(root)) is not first


def test_the_digest_is_of_what_is_annotated_and_not_of_where(tmp_path):
    """A folder of the same name elsewhere is the same dataset, unless a box is different."""
    roots = [write_voc(tmp_path / part / "own", {"train": 2}) for part in "ab"]
    first, second = (source(root).read().annotations_sha256 for root in roots)
    assert first == second == "76f755404bd715f8b8e2c4e652a8c3a998c9fae00e9f08fe35a34554498d04b1"
    annotation = roots[1] / "Annotations" / "000001.xml"
    text = annotation.read_text()
    annotation.write_text(text.replace("<difficult>0", "<difficult>1", 1))
    assert source(roots[1]).read().annotations_sha256 != first


def test_lists_of_one_class_are_no_splits(tmp_path):
    """In VOC's own form, of two columns; a list of another form is a split."""
    root = write_voc(tmp_path / "own", {"train": 3, "test": 2})
    lists = root / "ImageSets" / "Main"
    for name, form in (("red_train", "{} {:2d}"), ("my_train", "{}")):
        lines = (lists / "train.txt").read_text().split()
        rows = [form.format(image_id, 1 - i) for i, image_id in enumerate(lines)]
        (lists / f"{name}.txt").write_text("\n".join(rows) + "\n")
    names = [source.name for source in folder_sources(task_with(root).DATASETS)]
    assert names == ["own_my_train", "own_test", "own_train"]


@pytest.mark.parametrize("start, end", [("\ufeff", "\n"), ("", "\r\n"), ("\ufeff", "\r\n\r\n")])
def test_lists_as_windows_writes_them(start, end, tmp_path):
    root = write_voc(tmp_path / "own", {"train": 3})
    path = root / "ImageSets" / "Main" / "train.txt"
    ids = path.read_text().split()
    path.write_bytes((start + end.join([*ids, ""])).encode())
    records = read_split("own_train", task_with(root)).records
    assert [record["image_id"] for record in records] == ids


def test_two_images_of_one_id_are_noted(tmp_path):
    root = write_one(tmp_path, SIZE + obj())
    image = Image.open(root / "JPEGImages/1.jpg")
    for name in ("1.png", "1.JPG", "1.txt"):
        image.save(root / "JPEGImages" / name, "PNG")
    split = source(root).read()
    assert split.records[0]["file_name"].endswith("1.jpg")
    assert split.notes == (
        "ids with several images, of which the first is read: 1 (1.jpg and 1.JPG and 1.png)",
    )


def test_a_listed_name_of_another_spelling_is_named(tmp_path):
    """As macOS writes it."""
    root = write_one(tmp_path, SIZE + obj())
    (root / "ImageSets/Main/train.txt").write_text("caf\u00e9\n")
    (root / "Annotations/1.xml").rename(root / "Annotations/cafe\u0301.xml")
    with pytest.raises(DataError, match=r"missing, .*exists: accents are apart there"):
        source(root).read()


def test_real_annotations(shared_data):
    cfg = task_with(shared_data / "bccd")
    split = read_split("bccd_trainval", cfg)
    assert split.classes == ("Platelets", "RBC", "WBC")
    assert len(split.records) == 292
    assert len(read_split("bccd_test", cfg).records) == 72
    assert os.path.isfile(split.records[0]["file_name"])
