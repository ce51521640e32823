"""VOC semantic segmentation: labels are palette indices, and odd masks are found."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detection.datasets import cache_clear
from detection.datasets.labels import check_labels, read_labels
from tests.detection.datasets.conftest import read
from tests.oracles.real_voc import with_links
from tests.oracles.tiny_voc_seg import write_voc_seg

AUG, VAL = "voc_2012_sem_seg_train_aug", "voc_2012_sem_seg_val"


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    return write_voc_seg(tmp_path, {"train_aug": 4, "val": 3}) / "VOC2012"


def test_records(root):
    split = read(AUG)
    assert split.evaluator_type == "sem_seg"
    assert split.classes[:3] == ("background", "aeroplane", "bicycle") and len(split.classes) == 21
    assert split.metadata == {"stuff_classes": list(split.classes), "ignore_label": 255}
    record = split.records[0]
    with Image.open(record["file_name"]) as image:
        assert image.size == (record["width"], record["height"])
    assert record == {
        "file_name": str(root / "JPEGImages" / "2012_000000.jpg"),
        "image_id": "2012_000000",
        "height": record["height"],
        "width": record["width"],
        "sem_seg_file_name": str(root / "SegmentationClassAug" / "2012_000000.png"),
    }
    labels = [np.unique(read_labels(r["sem_seg_file_name"])) for r in split.records]
    assert set(np.concatenate(labels)) == {0, 1, 2, 3, 255}
    assert len(read(VAL).records) == 3


@pytest.mark.parametrize("name", ["train_aug.txt", "trainaug.txt"])
@pytest.mark.parametrize("paths", [False, True])
def test_the_forms_of_the_augmented_list(name, paths, root):
    lists = root / "ImageSets" / "Segmentation"
    ids = (lists / "train_aug.txt").read_text().split()
    (lists / "train_aug.txt").unlink()
    line = "/JPEGImages/{0}.jpg /SegmentationClassAug/{0}.png" if paths else "{0}"
    (lists / name).write_text("\n".join(line.format(image_id) for image_id in ids))
    assert [record["image_id"] for record in read(AUG).records] == ids


def test_augmented_masks_may_all_be_with_the_others(root):
    augmented = root / "SegmentationClassAug"
    for mask in augmented.iterdir():
        mask.rename(root / "SegmentationClass" / mask.name)
    split = read(AUG)
    assert {Path(r["sem_seg_file_name"]).parent.name for r in split.records} == {
        "SegmentationClass"
    }


def first_mask(root: Path) -> Path:
    return root / "SegmentationClass" / "2012_000004.png"


def test_the_digest_is_of_the_labels(root):
    before = read(VAL).annotations_sha256
    mask = first_mask(root)
    labels = np.asarray(Image.open(mask)).copy()
    labels[0, 0] = 7
    Image.fromarray(labels).save(mask)
    cache_clear()
    assert read(VAL).annotations_sha256 != before


def test_real_masks(shared_data, tmp_path, monkeypatch):
    with_links(shared_data / "VOC2007", tmp_path / "VOC2007")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    split = read("voc_2007_sem_seg_trainval")
    assert len(split.records) == 77
    check_labels(split.records, 21, 255, everything=True)
