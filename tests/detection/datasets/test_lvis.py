"""The LVIS reader: Detectron2's records without the `lvis` package, and the two versions."""

import copy
import json
import sys
import types
from collections import defaultdict
from pathlib import Path

import pytest

from tests.detection.datasets.conftest import read
from tests.oracles.tiny_lvis import KINDS, write_lvis


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lvis")
    write_lvis(folder, {"train": 4, "val": 3})
    write_lvis(folder, {"train": 3, "val": 2}, version="v1", seed=1)
    return folder


@pytest.fixture
def root(tiny, monkeypatch) -> Path:
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tiny))
    return tiny


@pytest.fixture
def lvis_package(monkeypatch):
    """Provide the `lvis` package, or a substitute with what Detectron2's reader uses of it."""
    try:
        import lvis  # noqa: F401
    except ImportError:
        monkeypatch.setitem(sys.modules, "lvis", types.SimpleNamespace(LVIS=Index))


class Index:
    """The part of lvis/lvis.py that Detectron2's reader uses."""

    def __init__(self, path: str) -> None:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        self.imgs = {image["id"]: image for image in content["images"]}
        self.img_ann_map = defaultdict(list)
        for annotation in content["annotations"]:
            self.img_ann_map[annotation["image_id"]].append(annotation)

    def load_imgs(self, ids):
        return [self.imgs[image_id] for image_id in ids]


@pytest.mark.detectron2
@pytest.mark.parametrize("name", ["lvis_v0.5_train", "lvis_v0.5_val", "lvis_v1_train"])
def test_records_are_detectron2s(name, lvis_package, root):
    from detectron2.data import MetadataCatalog
    from detectron2.data.datasets.lvis import load_lvis_json

    split = read(name)
    theirs = load_lvis_json(str(root / f"lvis/{name}.json"), str(root / "coco") + "/")
    assert list(split.records) == theirs
    assert sum(len(record["annotations"]) for record in theirs) >= 3
    assert all(record["neg_category_ids"] for record in theirs)
    assert all(Path(record["file_name"]).is_file() for record in theirs)
    meta = MetadataCatalog.get(name)
    assert split.evaluator_type == meta.evaluator_type == "lvis"
    assert Path(split.metadata["json_file"]).name == Path(meta.json_file).name
    assert split.metadata["image_root"].endswith("/coco/") and meta.image_root.endswith("coco/")
    assert split.has_masks and not split.has_keypoints


@pytest.mark.detectron2
@pytest.mark.parametrize("version", ["v0.5", "v1"])
def test_class_names_are_detectron2s(version, tmp_path, monkeypatch):
    """From a file with the real categories, in another order than theirs."""
    from detectron2.data import MetadataCatalog
    from detectron2.data.datasets import lvis_v0_5_categories, lvis_v1_categories

    table = lvis_v0_5_categories if version == "v0.5" else lvis_v1_categories
    categories = copy.deepcopy(table.LVIS_CATEGORIES)[::-1]
    write_lvis(tmp_path, {"train": 1}, version=version, categories=categories)
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    split = read(f"lvis_{version}_train")
    assert list(split.classes) == MetadataCatalog.get(f"lvis_{version}_train").thing_classes


def test_the_class_ids_are_the_files(root):
    split = read("lvis_v0.5_train")
    assert len(split.classes) == 1230
    found = {obj["category_id"] + 1 for r in split.records for obj in r["annotations"]}
    assert found <= set(KINDS) and len(found) == 3
    assert split.metadata["thing_dataset_id_to_contiguous_id"][600] == 599
