"""The Cityscapes reader: Detectron2's records, hidden and grouped objects, missing label files."""

from pathlib import Path

import pytest

from detection.datasets import cache_clear, cityscapes
from tests.detection.datasets.conftest import read
from tests.oracles.tiny_cityscapes import alias_package, write_cityscapes

INSTANCES, SEMANTIC = "cityscapes_fine_instance_seg_train", "cityscapes_fine_sem_seg_train"


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    return write_cityscapes(tmp_path, {"train": 4, "val": 2})


@pytest.fixture
def shapely():
    return pytest.importorskip("shapely")


@pytest.fixture
def theirs(monkeypatch):
    """Detectron2's readers."""
    pytest.importorskip("cityscapesscripts")
    alias_package(monkeypatch, "helpers.labels")
    from detectron2.data.datasets import cityscapes as module

    return module


@pytest.mark.detectron2
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("kind", ["instance_seg", "sem_seg"])
def test_records_and_metadata_are_detectron2s(kind, split, theirs, shapely, root):
    from detectron2.data import MetadataCatalog

    name, instances = f"cityscapes_fine_{kind}_{split}", kind == "instance_seg"
    load = theirs.load_cityscapes_instances if instances else theirs.load_cityscapes_semantic
    folders = (f"{root}/cityscapes/leftImg8bit/{split}/", f"{root}/cityscapes/gtFine/{split}/")
    ours, meta, records = read(name), MetadataCatalog.get(name), load(*folders)
    assert list(ours.records) == sorted(records, key=lambda record: record["file_name"])
    assert (ours.metadata["image_dir"], ours.metadata["gt_dir"]) == folders
    assert meta.image_dir.endswith(f"cityscapes/leftImg8bit/{split}/")
    assert ours.metadata["stuff_classes"] == meta.stuff_classes
    assert ours.has_masks == instances
    if instances:
        assert sum(len(record["annotations"]) for record in records) >= 4
        assert list(ours.classes) == meta.thing_classes == ours.metadata["thing_classes"]
        assert ours.evaluator_type == meta.evaluator_type
    else:
        assert list(ours.classes) == meta.stuff_classes
        assert ours.metadata["ignore_label"] == meta.ignore_label == 255
        assert ours.evaluator_type == "sem_seg"  # Detectron2's metric for it needs its file layout


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
