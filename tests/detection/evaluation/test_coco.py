"""COCO's and LVIS's metrics: equal to Detectron2's evaluator, and to cases done by hand."""

import json
import logging
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from detection.config.task import default_task
from detection.evaluation.coco import LVIS_METRICS, COCOEvaluator, LVISEvaluator
from detection.evaluation.evaluators import metric_package
from tests.oracles.tiny_instances import (
    answers,
    coco_annotations,
    coco_split,
    detectron2_instances,
    empty_prediction,
    instances,
    rle,
    with_masks,
)


def evaluator(split, kinds, folder, cls=COCOEvaluator, **options):
    contiguous = split.metadata["thing_dataset_id_to_contiguous_id"]
    return cls(
        split.name,
        split.metadata["json_file"],
        {own: given for given, own in contiguous.items()},
        split.classes,
        kinds,
        folder,
        **options,
    )


def ours(split, predictions, kinds, folder, **options):
    mine = evaluator(split, kinds, folder / "ours", **options)
    for record, prediction in zip(split.records, predictions, strict=True):
        mine.add(record, prediction)
    return mine.evaluate()


def detectron2s(split, predictions, kinds, folder, **options):
    """Detectron2's own evaluator on the same answers, as canonical names."""
    from detectron2.data import MetadataCatalog
    from detectron2.evaluation import COCOEvaluator as Theirs

    fields = {"segm": "masks", "keypoints": "keypoints"}
    unused = {field for kind, field in fields.items() if kind not in kinds}
    name = f"{folder}"  # unique: metadata cannot be set twice
    MetadataCatalog.get(name).set(**split.metadata)
    options = {"use_fast_impl": False, **options}
    theirs = Theirs(name, kinds, False, str(folder / "theirs"), **options)
    theirs.reset()
    for record, prediction in zip(split.records, predictions, strict=True):
        used = {name: prediction[name] for name in prediction.keys() - unused}
        found = detectron2_instances(used, record["height"], record["width"])
        theirs.process([record], [{"instances": found}])
    results = theirs.evaluate()
    return {f"{kind}/{name}": v for kind, values in results.items() for name, v in values.items()}


def same(mine, expected, tolerance=0.0):
    """Equal to the last digit, NaN where NaN."""
    assert list(mine) and set(mine) == set(expected)
    assert mine == pytest.approx(expected, abs=tolerance, rel=0, nan_ok=True)


@pytest.mark.detectron2
@pytest.mark.parametrize("seed", [0, 1, "real"])
def test_boxes_and_masks_equal_detectron2s(tmp_path, seed, request):
    real = seed == "real"
    if real:
        shared_data, seed = request.getfixturevalue("shared_data"), 10
        content = json.loads((shared_data / "coco/annotations/instances_val2017.json").read_text())
    else:
        content = coco_annotations(seed, classes=4, keypoints=0)
    split = coco_split(tmp_path / "instances.json", content)
    predictions = answers(split, content, seed)
    mine = ours(split, predictions, ["bbox", "segm"], tmp_path)
    same(mine, detectron2s(split, predictions, ["bbox", "segm"], tmp_path))
    assert 20 * real < mine["bbox/AP"] < 100
    if not real:
        # Its own C++ adds in another order.
        faster = detectron2s(split, predictions, ["bbox", "segm"], tmp_path, use_fast_impl=True)
        same(mine, faster, tolerance=1e-10)
        assert math.isnan(mine["bbox/AP-class11"])  # which has no object
        assert 0 < mine["segm/AP"] < mine["segm/AP50"] < 100
        assert mine["segm/APs"] != mine["bbox/APs"]


@pytest.mark.detectron2
@pytest.mark.parametrize(
    ("keypoints", "sigmas"),
    [(17, ()), (17, tuple(np.linspace(0.02, 0.2, 17))), (4, (0.05, 0.1, 0.07, 0.2))],
    ids=["COCO's", "own sigmas", "own keypoints"],
)
def test_keypoints_equal_detectron2s(tmp_path, keypoints, sigmas):
    content = coco_annotations(3, classes=1, keypoints=keypoints)
    split = coco_split(tmp_path / "people.json", content)
    predictions = answers(split, content, 4, keypoints=keypoints)
    kinds = ["bbox", "keypoints"]
    mine = ours(split, predictions, kinds, tmp_path, oks_sigmas=sigmas)
    same(mine, detectron2s(split, predictions, kinds, tmp_path, kpt_oks_sigmas=sigmas))
    assert 0 < mine["keypoints/AP"] < 100


def test_without_the_compiled_package_the_metrics_are_the_same(tmp_path, monkeypatch):
    content = coco_annotations(0, classes=4, keypoints=0)
    split = coco_split(tmp_path / "tiny.json", content)
    predictions = answers(split, content, 16)
    compiled = ours(split, predictions, ["bbox", "segm"], tmp_path)
    cfg = default_task()
    assert metric_package(split, cfg) == "hotcoco"
    monkeypatch.setitem(sys.modules, "hotcoco", None)
    same(ours(split, predictions, ["bbox", "segm"], tmp_path), compiled)
    assert metric_package(split, cfg) == "pycocotools"


@pytest.mark.detectron2
def test_no_predictions_are_ap_0_where_detectron2_has_nan(tmp_path):
    """A mean over seeds would leave out the worst of them."""
    content = coco_annotations(9, classes=3, keypoints=17)
    split = coco_split(tmp_path / "tiny.json", content)
    nothing = [empty_prediction(17) for _ in split.records]
    kinds = ["bbox", "segm", "keypoints"]
    mine = ours(split, nothing, kinds, tmp_path)
    assert all(map(math.isnan, detectron2s(split, nothing, kinds, tmp_path).values()))
    assert {v for v in mine.values() if not math.isnan(v)} == {0.0}
    assert mine["bbox/AP"] == mine["segm/AP"] == mine["keypoints/AP"] == 0
    assert json.loads((tmp_path / "ours" / "tiny.json").read_text()) == []


def test_file_holds_coco_results_with_the_annotations_ids(tmp_path):
    content = coco_annotations(12, classes=3, keypoints=17)
    split = coco_split(tmp_path / "tiny.json", content)
    prediction = {
        "boxes": np.array([[1.25, 2.5, 11.35, 22.5]], dtype=np.float32),
        "scores": np.array([0.1], dtype=np.float32),
        "classes": np.array([1]),
        "masks": [rle(np.ones((200, 260)))],
        "keypoints": np.full((1, 17, 3), 10.6, dtype=np.float32),
    }
    mine = evaluator(split, ["bbox", "segm", "keypoints"], tmp_path / "out")
    mine.add(split.records[1], prediction)
    mine.add(split.records[2], empty_prediction(17))
    mine.evaluate()
    (row,) = json.loads((tmp_path / "out" / "tiny.json").read_text())
    assert (row["image_id"], row["category_id"], row["score"]) == (8, 5, 0.1)
    assert row["bbox"] == [1.25, 2.5, 10.1, 20.0]
    assert row["segmentation"] == prediction["masks"][0]
    assert row["keypoints"][:3] == [10.1, 10.1, 10.6] and len(row["keypoints"]) == 51
    assert prediction["keypoints"][0, 0, 0] == np.float32(10.6)  # the caller's array is its own


def test_missing_masks_are_a_fault_of_the_engine(tmp_path):
    content = coco_annotations(15, classes=3, keypoints=0)
    split = coco_split(tmp_path / "tiny.json", content)
    prediction = answers(split, content, 16)[0]
    del prediction["masks"]
    with pytest.raises(ValueError, match="segmentation"):
        evaluator(split, ["bbox", "segm"], tmp_path).add(split.records[0], prediction)


@pytest.mark.parametrize("cls", [COCOEvaluator, LVISEvaluator])
def test_nothing_is_printed(tmp_path, capfd, caplog, cls):
    if cls is LVISEvaluator:
        pytest.importorskip("hotcoco")
    content = lvis_annotations(0)
    split = coco_split(tmp_path / "tiny.json", content)
    caplog.set_level(logging.DEBUG, logger="detection.evaluation.coco")
    predictions = answers(split, content, 16)
    ours(split, predictions, ["bbox", "segm"], tmp_path, cls=cls)
    assert capfd.readouterr() == ("", "")
    assert "INFO" not in caplog.text
    if cls is LVISEvaluator:
        assert "DEBUG" in caplog.text


# --- LVIS ---


def lvis_annotations(seed):
    """Return rare, common and frequent classes; some not or not exhaustively annotated."""
    rng = np.random.default_rng(seed)
    content = coco_annotations(seed, classes=7, keypoints=0, num_images=8)
    for index, category in enumerate(content["categories"]):
        category["frequency"] = "rcf"[index % 3]
    for annotation in content["annotations"]:
        annotation["iscrowd"] = 0
        x, y, w, h = annotation["bbox"]
        annotation["segmentation"] = [[x, y, x + w, y, x + w, y + h, x + 0.4 * w, y + 0.7 * h]]
    ids = [category["id"] for category in content["categories"]]
    for image in content["images"]:
        here = {a["category_id"] for a in content["annotations"] if a["image_id"] == image["id"]}
        image["neg_category_ids"] = [i for i in ids if i not in here and rng.random() < 0.5]
        image["not_exhaustive_category_ids"] = [i for i in sorted(here) if rng.random() < 0.3]
    return content


def lvis_case(tmp_path: Path):
    """Build one image; class 2 is rare, 5 common, 8 frequent, and 8 was not annotated in it."""
    annotations = []
    for number, (category, x, side) in enumerate([(2, 0, 100), (5, 150, 30)], start=1):
        corners = [x, 0, x + side, 0, x + side, side, x, side]
        row = {"id": number, "image_id": 1, "category_id": category, "iscrowd": 0}
        row |= {"area": side * side, "bbox": [x, 0, side, side], "segmentation": [corners]}
        annotations.append(row)
    image = {"id": 1, "file_name": "1.jpg", "height": 200, "width": 260}
    content = {
        "info": {},
        "licenses": [],
        "annotations": annotations,
        "images": [{**image, "neg_category_ids": [], "not_exhaustive_category_ids": [5]}],
        "categories": [
            {"id": 2, "name": "a", "frequency": "r"},
            {"id": 5, "name": "b", "frequency": "c"},
            {"id": 8, "name": "c", "frequency": "f"},
        ],
    }
    return coco_split(tmp_path / "lvis.json", content, "lvis")


def test_lvis_by_hand(tmp_path):
    pytest.importorskip("hotcoco")
    split = lvis_case(tmp_path)
    away = [200, 100, 250, 150]
    prediction = instances(
        (away, 0.9, 0),  # wrong: the rare class is exhaustive in this image
        ([0, 0, 100, 100], 0.8, 0),
        (away, 0.9, 1),  # not counted: not exhaustive
        ([150, 0, 180, 30], 0.8, 1),
        (away, 0.9, 2),  # not counted: nobody looked for it
    )
    metrics = ours(
        split, [with_masks(prediction, 200, 260)], ["bbox", "segm"], tmp_path, cls=LVISEvaluator
    )
    for kind in ("bbox", "segm"):
        expected = {"AP": 75, "AP50": 75, "APs": 100, "APl": 100, "APr": 50, "APc": 100}
        assert {n: metrics[f"{kind}/{n}"] for n in expected} == pytest.approx(expected)
        assert math.isnan(metrics[f"{kind}/APf"]) and math.isnan(metrics[f"{kind}/APm"])


def test_lvis_counts_300_detections_of_an_image(tmp_path):
    pytest.importorskip("hotcoco")
    split = lvis_case(tmp_path)
    away, right = [200, 100, 250, 150], ([0, 0, 100, 100], 0.5, 0)
    for ahead, expected in ((299, 100), (300, 0)):
        others = [(away, 0.9, 2)] * ahead  # of another class, not counted but for the limit
        metrics = ours(
            split,
            [with_masks(instances(*others, right), 200, 260)],
            ["bbox"],
            tmp_path,
            cls=LVISEvaluator,
        )
        assert metrics["bbox/APr"] == pytest.approx(expected)


@pytest.mark.stored
def test_lvis_equals_the_package_of_the_dataset(tmp_path):
    """Numbers of the package `lvis` 0.5.3, made to run with `np.float = float`."""
    pytest.importorskip("hotcoco")
    content = lvis_annotations(1)
    split = coco_split(tmp_path / "lvis.json", content, "lvis")
    predictions = answers(split, content, 2, extra=60)
    metrics = ours(split, predictions, ["bbox", "segm"], tmp_path, cls=LVISEvaluator)
    assert metrics == pytest.approx(LVIS_PACKAGE, abs=1e-9)


LVIS_PACKAGE = {
    f"{kind}/{name}": value
    for kind, values in {
        "bbox": (16.4365452608, 21.2085541793, 18.4277774442, 5.0476190476, 17.3021504811,
            94.5159515952, 11.7215154255, 10.8675167371, 26.7206036197),
        "segm": (4.7699727999, 19.4596889199, 0.0, 2.9437229437, 4.788842326,
            27.2112211221, 3.7414274584, 2.6811914165, 7.8872995249),
    }.items()
    for name, value in zip(LVIS_METRICS, values, strict=True)
}  # fmt: skip
