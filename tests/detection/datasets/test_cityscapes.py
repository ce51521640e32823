"""The Cityscapes reader: Detectron2's records, hidden and grouped objects, missing label files."""

import json
from pathlib import Path

import pytest

from detection.datasets import cache_clear, cityscapes
from moco.common.errors import DataError, UserError
from tests.detection.datasets.conftest import read
from tests.oracles.tiny_cityscapes import alias_package, write_cityscapes

INSTANCES, SEMANTIC = "cityscapes_fine_instance_seg_train", "cityscapes_fine_sem_seg_train"


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    return write_cityscapes(tmp_path, {"train": 4, "val": 2})


@pytest.fixture
def shapely():
    return pytest.importorskip("shapely", reason="shapely is not installed")


@pytest.fixture
def theirs(monkeypatch):
    """Detectron2's readers."""
    pytest.importorskip("cityscapesscripts", reason="cityscapesscripts is not installed")
    alias_package(monkeypatch, "helpers.labels")
    from detectron2.data.datasets import cityscapes as module

    return module


def by_name(records):
    return sorted(records, key=lambda record: record["file_name"])


@pytest.mark.detectron2
@pytest.mark.parametrize("split", ["train", "val"])
def test_instances_are_detectron2s(split, theirs, shapely, root):
    from detectron2.data import MetadataCatalog

    name = f"cityscapes_fine_instance_seg_{split}"
    ours = read(name)
    folders = (f"{root}/cityscapes/leftImg8bit/{split}/", f"{root}/cityscapes/gtFine/{split}/")
    records = theirs.load_cityscapes_instances(*folders)
    assert list(ours.records) == by_name(records)
    assert sum(len(record["annotations"]) for record in records) >= 4
    meta = MetadataCatalog.get(name)
    assert list(ours.classes) == meta.thing_classes == ours.metadata["thing_classes"]
    assert ours.metadata["stuff_classes"] == meta.stuff_classes
    assert ours.evaluator_type == meta.evaluator_type
    assert (ours.metadata["image_dir"], ours.metadata["gt_dir"]) == folders
    assert meta.image_dir.endswith(f"cityscapes/leftImg8bit/{split}/")
    assert ours.has_masks


@pytest.mark.detectron2
@pytest.mark.parametrize("split", ["train", "val"])
def test_semantic_records_are_detectron2s(split, theirs, root):
    from detectron2.data import MetadataCatalog

    name = f"cityscapes_fine_sem_seg_{split}"
    ours = read(name)
    records = theirs.load_cityscapes_semantic(*ours_folders(ours))
    assert list(ours.records) == by_name(records)
    meta = MetadataCatalog.get(name)
    assert list(ours.classes) == meta.stuff_classes
    assert ours.metadata["ignore_label"] == meta.ignore_label == 255
    assert ours.evaluator_type == "sem_seg"  # Detectron2's metric for it needs its file layout


def ours_folders(split):
    return split.metadata["image_dir"], split.metadata["gt_dir"]


def test_labels_are_cityscapesscripts():
    labels = pytest.importorskip("cityscapesscripts.helpers.labels").labels
    assert {label.name: label.id for label in labels} == cityscapes._LABEL_IDS
    things = [label.name for label in labels if label.hasInstances and not label.ignoreInEval]
    assert things == list(cityscapes.THING_CLASSES)
    trained = sorted((label.trainId, label.name) for label in labels if 0 <= label.trainId < 255)
    assert trained == list(enumerate(cityscapes.STUFF_CLASSES))


def test_hidden_grouped_and_deleted_objects(shapely, root):
    split = read(INSTANCES)
    objects = split.records[0]["annotations"]
    assert split.notes[0] == "objects hidden by others, left out: 1"
    classes = [split.classes[obj["category_id"]] for obj in objects]
    # The last polygon comes first. The trailer hides a part of the bicycle and is no class.
    assert classes[:3] == ["person", "bicycle", "car"]
    assert [obj["iscrowd"] for obj in objects[:3]] == [True, False, False]
    assert [len(obj["segmentation"]) for obj in objects[:3]] == [1, 2, 1]
    assert objects[0]["bbox"] == (70.0, 89.0, 91.0, 94.0)


def test_many_images_are_read_by_several_processes(shapely, root, monkeypatch):
    alone = read(INSTANCES)
    monkeypatch.setattr(cityscapes, "_FEW", 1)
    cache_clear()
    together = read(INSTANCES)
    assert together.records == alone.records
    assert together.annotations_sha256 == alone.annotations_sha256


def test_instances_without_shapely_name_the_extra(root, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"shapely.*\[cityscapes\]"):
        read(INSTANCES)


def polygons(root: Path) -> Path:
    return sorted((root / "cityscapes/gtFine/train/aachen").glob("*_polygons.json"))[0]


def change(root: Path, edit) -> None:
    content = json.loads(polygons(root).read_text())
    edit(content)
    polygons(root).write_text(json.dumps(content))


def set_polygon(*corners: object):
    return lambda content: content["objects"][3].update(polygon=list(corners))


BROKEN = {
    "not an object": (lambda c: c.clear(), "imgHeight"),
    "no size": (lambda c: c.pop("imgWidth"), "imgWidth"),
    "unknown label": (lambda c: c["objects"][1].update(label="cart"), "object 2: .*'cart'"),
    "unknown group": (lambda c: c["objects"][1].update(label="group"), "object 2: .*'group'"),
    "two corners": (set_polygon([1, 1], [2, 2]), "object 4: .*polygon"),
    "no polygon": (lambda c: c["objects"][3].pop("polygon"), "object 4: "),
    "text": (set_polygon(*[["a", 1]] * 3), "object 4: .*polygon"),
    "not a number": (set_polygon([float("nan"), 1], [1, 2], [3, 3]), "object 4: .*number"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_polygons_are_refused(case, shapely, root):
    edit, named = BROKEN[case]
    change(root, edit)
    with pytest.raises(DataError, match=named) as caught:
        read(INSTANCES)
    assert polygons(root).name in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_missing_or_odd(root):
    file = polygons(root)
    file.write_text("{")
    with pytest.raises(DataError, match=file.name):
        read(SEMANTIC)
    file.unlink()
    with pytest.raises(DataError, match=rf"{file.name}: missing \(1 of the 4 .*doctor cityscapes"):
        read(SEMANTIC)
    next(root.rglob("gtFine/val/*/*_instanceIds.png")).unlink()
    with pytest.raises(DataError, match=r"instanceIds\.png: missing \(1 of the 2 "):
        read("cityscapes_fine_instance_seg_val")
    odd = root / "cityscapes/leftImg8bit/train/aachen/readme.txt"
    odd.write_text("x")
    with pytest.raises(DataError, match=r"readme\.txt"):
        read(SEMANTIC)
    odd.unlink()
    for labels in root.rglob("*_labelTrainIds.png"):
        labels.unlink()
    make = f"CITYSCAPES_DATASET={root}/cityscapes csCreateTrainIdLabelImgs"
    with pytest.raises(DataError, match=rf"labelTrainIds\.png.*{make}"):
        read("cityscapes_fine_sem_seg_val")
