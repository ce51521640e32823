"""Parts of splits: their images and metric; tuning never reads the test split."""

import json
from pathlib import Path

import pytest

from detection.config.task import default_task, load_task
from detection.datasets import read_split
from detection.evaluation.evaluators import build_evaluator
from detection.train_net import main
from moco.common.errors import DataError
from moco.common.run import read_record
from tests.detection.datasets.conftest import read
from tests.detection.evaluation.test_evaluators import prediction_of
from tests.oracles.small_tasks import SMALL_VOC
from tests.oracles.tiny_coco import write_coco
from tests.oracles.tiny_voc import write_voc

SMALL = "configs/voc/faster_rcnn_R_18_C4_small.yaml"


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    write_coco(tmp_path, {"train2017": 40, "val2017": 3})
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    return tmp_path


def ids(split) -> list[int]:
    return [record["image_id"] for record in split.records]


def test_subsets_are_nested_and_of_images_with_objects(root):
    whole = read("coco_2017_train")
    objects = {r["image_id"] for r in whole.records if r["annotations"]}
    small, large = (set(ids(read(f"coco_2017_train@{p}%.1"))) for p in (10, 50))
    other = set(ids(read("coco_2017_train@10%.2")))
    assert small < large <= objects
    assert len(large) == len(objects) // 2
    assert other != small and len(other) == len(small)
    # Fixed for good: a subset that moved would be other data under an old name.
    assert sorted(small) == [776, 797, 839, 881]


def test_seeds_choose_subsets_of_one_experiment(root):
    def by_seed(seed: int):
        cfg = default_task()
        cfg.SEED = seed
        return read_split("coco_2017_train@10%", cfg)

    assert ids(by_seed(0)) == ids(read("coco_2017_train@10%.1")) == ids(by_seed(5))
    assert ids(by_seed(1)) == ids(read("coco_2017_train@10%.2"))
    assert by_seed(0).annotations_sha256 == by_seed(1).annotations_sha256


def test_held_and_kept_are_all_images(root):
    held, kept = read("coco_2017_train@held"), read("coco_2017_train@kept")
    assert len(held.records) == 4
    assert sorted(ids(held) + ids(kept)) == sorted(ids(read("coco_2017_train")))
    assert held.annotations_sha256 != kept.annotations_sha256


def test_published_positions(root, tmp_path):
    whole = [r for r in read("coco_2017_train").records if r["annotations"]]
    count = int(0.1 * len(whole))
    chosen = list(range(0, 3 * count, 3))
    index = tmp_path / "COCO_supervision.txt"
    index.write_text(json.dumps({"10.0": {"3": chosen[::-1]}}))
    split = read("coco_2017_train@10%.3", PART_INDEX=str(index))
    assert ids(split) == [whole[i]["image_id"] for i in chosen]


def test_metric_of_a_part_is_that_of_its_images_alone(root, tmp_path):
    """Perfect detections on the part: images without detections would lower the recall."""
    cfg = default_task()
    split = read("coco_2017_train@held")
    evaluator = build_evaluator(split, cfg, tmp_path)
    for record in split.records:
        evaluator.add(record, prediction_of(record))
    assert evaluator.evaluate()["bbox/AP"] == pytest.approx(100)


@pytest.mark.slow
def test_tuning_never_reads_the_test_split(tmp_path, engine):
    """Its images, lists and annotations are gone, and a tuning run trains and measures."""
    folder = write_voc(tmp_path / "data", {"trainval": 20, "test": 4})
    for line in (folder / "ImageSets/Main/test.txt").read_text().split():
        (folder / f"JPEGImages/{line}.jpg").unlink()
        (folder / f"Annotations/{line}.xml").write_text("<no")
    # Without names the classes would be those of all annotations.
    names = "DATASETS.VOC_CLASSES=['blue','green','red']"
    values = {**SMALL_VOC, "DATASETS.VOC_DIR": folder, "DATASETS.PART": "tune"}
    opts = [names, "MODEL.WEIGHTS=random", *(f"{key}={value}" for key, value in values.items())]
    out = tmp_path / "out"
    main(["--config-file", SMALL, "--engine", engine, *opts, f"OUTPUT_DIR={out}"])
    record = read_record(out / "run.json")
    assert record.config["DATASETS.TEST"][0].endswith("_trainval@held")
    assert "bbox/AP" in record.metrics
    with pytest.raises(DataError):  # without the part the test split is read
        values = ["DATASETS.VOC_DIR", str(folder), "DATASETS.VOC_CLASSES", "['blue','green','red']"]
        load_task(SMALL, [*values, "MODEL.WEIGHTS", "random"], engine)
