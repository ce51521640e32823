"""ADE20k: 0 is ignored, classes count from 1 in the files, and the full ADE20K is refused."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detection.datasets import cache_clear
from detection.datasets.base import WRONG, formats
from detection.datasets.doctor import examine
from detection.datasets.labels import check_labels, read_labels, read_record_labels
from moco.common.errors import DataError
from tests.detection.datasets.conftest import read
from tests.oracles.tiny_ade import LABELS, write_ade

TRAIN = "ade20k_sem_seg_train"


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    return write_ade(tmp_path, {"train": 4, "val": 2}) / "ADEChallengeData2016"


def test_records_and_labels(root):
    split = read(TRAIN)
    assert (split.evaluator_type, len(split.classes), split.classes[149]) == (
        "sem_seg",
        150,
        "thing 150",
    )
    assert split.metadata["ignore_label"] == 255
    record = split.records[0]
    assert record["file_name"] == f"{root}/images/training/ADE_train_00000001.jpg"
    assert record["sem_seg_file_name"] == f"{root}/annotations/training/ADE_train_00000001.png"
    for record in split.records:
        raw, labels = read_labels(record["sem_seg_file_name"]), read_record_labels(record)
        assert np.array_equal(labels[raw > 0], raw[raw > 0] - 1)
        assert (labels[raw == 0] == 255).all() and (raw == 0).any()
    found = np.unique(np.concatenate([np.unique(read_record_labels(r)) for r in split.records]))
    assert found.tolist() == [*(label - 1 for label in LABELS), 255]


@pytest.mark.detectron2
def test_detectron2s_reader_of_its_prepared_labels_gives_the_same(root):
    """Its datasets/prepare_ade20k_sem_seg.py writes label - 1 as uint8."""
    from detectron2.data.datasets import load_sem_seg

    prepared = root / "annotations_detectron2" / "training"
    prepared.mkdir(parents=True)
    for path in (root / "annotations" / "training").iterdir():
        Image.fromarray(np.asarray(Image.open(path)) - np.uint8(1)).save(prepared / path.name)
    theirs = load_sem_seg(str(prepared), str(root / "images" / "training"))
    ours = read(TRAIN).records
    assert [r["file_name"] for r in theirs] == [r["file_name"] for r in ours]
    for one, other in zip(theirs, ours, strict=True):
        assert np.array_equal(read_labels(one["sem_seg_file_name"]), read_record_labels(other))


def test_a_label_beyond_the_classes(root):
    path = root / "annotations" / "training" / "ADE_train_00000002.png"
    labels = np.array(Image.open(path))
    labels[0, 0] = 151
    Image.fromarray(labels).save(path)
    with pytest.raises(DataError, match=r"00002\.png: label 151, expected 1\.\.150 or 0"):
        read(TRAIN)


def test_a_file_that_detectron2_prepared_is_found(root):
    """Its ignored pixels are 255, which no published label map has."""
    path = root / "annotations" / "training" / "ADE_train_00000001.png"
    Image.fromarray(np.array(Image.open(path)) - np.uint8(1)).save(path)
    with pytest.raises(DataError, match="label 255, expected 1"):
        read(TRAIN)


@pytest.mark.parametrize("place", ["next", "inside"])
def test_the_full_dataset_is_named(place, root, tmp_path):
    root.rename(tmp_path / "ADE20K_2021_17_01")
    name = "ADE20K_2021_17_01"
    if place == "inside":
        name = "ADEChallengeData2016"
        (tmp_path / "ADE20K_2021_17_01").rename(root)
        (root / "index_ade20k.pkl").touch()
        (root / "images").rename(root / "elsewhere")
        (root / "annotations").rename(root / "images")
    cache_clear()
    with pytest.raises(DataError, match=f"{name} is the full ADE20K"):
        read(TRAIN)
    findings = {f.name: f for f in examine(formats()["ade20k"], str(tmp_path))}
    assert findings[f"{name}/"].state == WRONG and "SceneParsing" in findings[f"{name}/"].text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:-1], "150 lines"),
        (lambda lines: [*lines[:-1], lines[-1].replace("thing 150", "thing 1")], "same name"),
    ],
)
def test_class_names_are_checked(change, message, root):
    path = root / "objectInfo150.txt"
    path.write_text("\n".join(change(path.read_text().split("\n"))))
    with pytest.raises(DataError, match=rf"objectInfo150\.txt.*{message}"):
        read(TRAIN)


def test_every_label_map_is_checked_on_request(root):
    records = read(TRAIN).records
    check_labels(records, 150, 255, everything=True)
    with pytest.raises(DataError, match=r"expected 1\.\.149 or 0"):
        check_labels(records, 149, 255, everything=True)
