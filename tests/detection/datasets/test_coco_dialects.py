"""Exporters' dialects of COCO's format: read as a test split, perfect predictions score 100."""

import json

import numpy as np
import pytest

from detection.datasets import cache_clear
from detection.evaluation.coco import metric_annotations
from moco.common.errors import DataError
from tests.detection.datasets.conftest import read
from tests.oracles.coco_dialects import DIALECTS, labelme2coco, roboflow, scores, write

PACKAGES = ("hotcoco", "pycocotools")
# Start of the note on each repair.
REPAIRED = {
    "roboflow": ("annotation ids below 1", "category 0 of supercategory none"),
    "cvat": (),
    "label_studio": ("annotation ids below 1",),
    "labelme2coco": (),
    "fiftyone": (),
    "ultralytics": (
        "annotation ids below 1",
        "objects without iscrowd",
        "areas that are missing",
        "objects without any other polygon",
    ),
    "spreadsheet": ("ids, sizes or flags", "areas that are missing"),
}


def read_test(file):
    return read(f"{file.parent.name}_test", COCO_TEST_JSON=file)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_perfect_predictions_score_100(dialect, package, tmp_path):
    split = read_test(write(tmp_path / "set", DIALECTS[dialect]()))
    found = scores(split, tmp_path / "out", package)
    for kind in ("bbox", "segm") if split.has_masks else ("bbox",):
        assert found[f"{kind}/AP"] == pytest.approx(100)
        assert found[f"{kind}/APs"] == pytest.approx(100)
        assert np.isnan(found[f"{kind}/APl"])
    assert split.has_masks == (dialect in ("cvat", "labelme2coco", "spreadsheet"))
    assert len(split.notes) == len(REPAIRED[dialect])
    for text in REPAIRED[dialect]:
        assert any(note.startswith(text) for note in split.notes)


@pytest.mark.detectron2
@pytest.mark.parametrize("package", PACKAGES)
def test_of_detectron2s_own_exporter(package, tmp_path):
    """It writes whole paths, and null for the licenses."""
    from detectron2.data import DatasetCatalog, MetadataCatalog
    from detectron2.data.datasets.coco import convert_to_coco_dict

    source = read_test(write(tmp_path / "source", labelme2coco()))
    name = str(tmp_path)
    DatasetCatalog.register(name, lambda: list(source.records))
    MetadataCatalog.get(name).set(thing_classes=list(source.classes))
    content = convert_to_coco_dict(name)
    for folder in ("source", "source/annotations"):
        file = tmp_path / folder / "test.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
        cache_clear()
        split = read_test(file)
        assert split.records[0]["file_name"] == source.records[0]["file_name"]
        assert scores(split, tmp_path / "out", package)["segm/AP"] == pytest.approx(100)
    file = write(tmp_path / "not" / "near" / "elsewhere", content)
    with pytest.raises(DataError, match="leads out"):
        read_test(file)
    split = read("elsewhere_test", COCO_TEST_JSON=file, COCO_TEST_ROOT=tmp_path / "source")
    assert split.records[0]["file_name"] == source.records[0]["file_name"]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_part_is_repaired_too(package, tmp_path):
    file = write(tmp_path / "set", roboflow())
    split = read("set_test@kept", COCO_TEST_JSON=file)
    content = metric_annotations(str(file), split.images)
    assert len(content["images"]) == len(split.records) == 4 - 1
    assert min(row["id"] for row in content["annotations"]) >= 1
