"""The COCO reader: Detectron2's records, a data set of one's own, and what is refused."""

import json
import os
from pathlib import Path

import pytest

from detection.datasets import cache_clear, coco, custom_names, known, read_split
from detection.task import default_task, load_task
from moco.errors import DataError, UserError
from tests.oracles.tiny_coco import write_coco

ROOT = Path(__file__).resolve().parents[2]
R18 = "configs/voc/faster_rcnn_R_18_C4_small.yaml"


@pytest.fixture(autouse=True)
def fresh_cache():
    cache_clear()
    yield
    cache_clear()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """All kinds of files: instances and keypoints of 2017, DensePose of 2014."""
    folder = tmp_path_factory.mktemp("coco")
    write_coco(folder, {"train2017": 4, "val2017": 3}, keypoints=True)
    write_coco(folder, {"train2014": 3, "minival2014": 2}, densepose=True, seed=1)
    return folder


@pytest.fixture
def root(tiny, monkeypatch) -> Path:
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tiny))
    return tiny


def read(name: str, **datasets: object):
    cfg = default_task()
    for key, value in datasets.items():
        cfg.DATASETS[key] = str(value)
    return read_split(name, cfg)


@pytest.mark.parametrize("name", ["coco_2017_train", "coco_2017_val", "keypoints_coco_2017_train"])
def test_records_and_metadata_are_detectron2s(name, detectron2, root):
    from detectron2.data import MetadataCatalog
    from detectron2.data.datasets.coco import load_coco_json

    split = read(name)
    _, pictures, annotations = coco.BUILTIN[name]
    key = f"copy_of_{name}_{root.name}"
    theirs = load_coco_json(str(root / annotations), str(root / pictures), key)
    assert list(split.records) == theirs
    assert sum(len(record["annotations"]) for record in theirs) >= 4
    assert any(obj["iscrowd"] for record in theirs for obj in record["annotations"])
    loaded, builtin = MetadataCatalog.get(key), MetadataCatalog.get(name)
    assert split.metadata["thing_dataset_id_to_contiguous_id"] == (
        loaded.thing_dataset_id_to_contiguous_id
    )
    assert split.metadata["thing_classes"] == loaded.thing_classes == builtin.thing_classes
    assert split.classes == tuple(builtin.thing_classes)
    for field in ("keypoint_names", "keypoint_flip_map", "keypoint_connection_rules"):
        assert split.metadata.get(field) == builtin.get(field)
    assert split.metadata["json_file"] == str(root / annotations)
    assert split.metadata["image_root"] == str(root / pictures)
    assert split.evaluator_type == builtin.evaluator_type == "coco"
    assert split.has_masks
    assert split.has_keypoints == name.startswith("keypoints")
    assert all(os.path.isfile(record["file_name"]) for record in split.records)


def test_densepose_records_are_detectron2s_with_more_keys(detectron2, root):
    from detectron2.data.datasets.coco import load_coco_json

    for name in ("densepose_coco_2014_train", "densepose_coco_2014_minival"):
        split = read(name)
        _, pictures, annotations = coco.BUILTIN[name]
        theirs = load_coco_json(
            str(root / annotations), str(root / pictures), f"x_{name}", list(coco.DENSEPOSE_KEYS)
        )
        assert list(split.records) == theirs
        assert split.evaluator_type == "densepose" and split.classes == ("person",)
        assert len(split.records[0]["annotations"][0]["dp_masks"]) == 14


def test_real_annotations_are_read_as_by_detectron2(detectron2, shared_data, monkeypatch):
    from detectron2.data.datasets.coco import load_coco_json

    monkeypatch.setenv("DETECTRON2_DATASETS", str(shared_data))
    for name in ("coco_2017_train", "coco_2017_val"):
        split = read(name)
        _, pictures, annotations = coco.BUILTIN[name]
        theirs = load_coco_json(
            str(shared_data / annotations), str(shared_data / pictures), f"shared_{name}"
        )
        assert list(split.records) == theirs and len(theirs) == 100
        assert split.notes[-1].startswith("100 pictures, the official split has ")


def test_the_names_and_paths_are_detectron2s(detectron2, monkeypatch):
    from detectron2.data import DatasetCatalog, MetadataCatalog

    sources = coco.sources(default_task())
    theirs = {
        name
        for name in DatasetCatalog.list()
        if name.startswith(("coco_2", "keypoints_coco_2"))
        and not name.endswith(("panoptic", "separated", "stuffonly", "test", "test-dev"))
    }
    densepose = {name for name in sources if name.startswith("densepose")}
    assert set(sources) - densepose == {name for name in theirs if "panoptic" not in name}
    for name in set(sources) - densepose:
        meta, (_, pictures, annotations) = MetadataCatalog.get(name), coco.BUILTIN[name]
        assert meta.image_root.endswith(f"/{pictures}")
        assert meta.json_file.endswith(f"/{annotations}")


def test_the_densepose_names_are_the_projects(detectron2):
    pytest.importorskip("densepose", reason="the DensePose project is not installed")
    from densepose.data.datasets.coco import DATASETS

    theirs = {entry.name: entry for entry in DATASETS}
    ours = {name: row for name, row in coco.BUILTIN.items() if row[0] == "densepose"}
    assert len(ours) == 4
    for name, (_, pictures, annotations) in ours.items():
        assert theirs[name].images_root == pictures
        assert theirs[name].annotations_fpath == annotations
