"""COCO's and LVIS's metrics: equal to Detectron2's evaluator, and to cases done by hand."""

import json
import logging
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from detection.config.task import default_task
from detection.evaluation.coco import COCOEvaluator, LVISEvaluator
from detection.evaluation.evaluators import metric_package
from tests.oracles.tiny_instances import (
    answers,
    coco_annotations,
    coco_split,
    detectron2_instances,
    empty_prediction,
    instances,
    rectangle,
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
@pytest.mark.parametrize("seed", [0, 1])
def test_boxes_and_masks_equal_detectron2s(tmp_path, seed):
    content = coco_annotations(seed, classes=4, keypoints=0)
    split = coco_split(tmp_path / "tiny.json", content)
    predictions = answers(split, content, seed)
    mine = ours(split, predictions, ["bbox", "segm"], tmp_path)
    same(mine, detectron2s(split, predictions, ["bbox", "segm"], tmp_path))
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


@pytest.mark.detectron2
def test_real_images_equal_detectron2s(shared_data, tmp_path):
    path = shared_data / "coco" / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    split = coco_split(tmp_path / "instances_val2017.json", content)
    predictions = answers(split, content, 10)
    mine = ours(split, predictions, ["bbox", "segm"], tmp_path)
    same(mine, detectron2s(split, predictions, ["bbox", "segm"], tmp_path))
    assert 20 < mine["bbox/AP"] < 100


def test_perfect_boxes_masks_and_keypoints(tmp_path):
    """Whatever is annotated is found, so that also the half pixel of the keypoints is right."""
    content = coco_annotations(11, classes=2, keypoints=17)
    for annotation in content["annotations"]:
        annotation["iscrowd"] = 0
        x, y, w, h = annotation["bbox"]
        annotation["segmentation"] = rle(rectangle(200, 260, np.array([x, y, x + w, y + h])))
    split = coco_split(tmp_path / "tiny.json", content)
    ids = split.metadata["thing_dataset_id_to_contiguous_id"]
    predictions = []
    for record in split.records:
        mine = [a for a in content["annotations"] if a["image_id"] == record["image_id"]]
        boxes = np.array([a["bbox"] for a in mine], dtype=np.float32)
        points = np.array([a["keypoints"] for a in mine], dtype=np.float32).reshape(-1, 17, 3)
        prediction = {
            "boxes": np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1),
            "scores": np.full(len(mine), 0.9, dtype=np.float32),
            "classes": np.array([ids[a["category_id"]] for a in mine]),
            "masks": [a["segmentation"] for a in mine],
            "keypoints": points + np.array([0.5, 0.5, 0], dtype=np.float32),
        }
        predictions.append(prediction)
    strict = (1e-4,) * 17  # hardly any distance is forgiven
    kinds = ["bbox", "segm", "keypoints"]
    metrics = ours(split, predictions, kinds, tmp_path, oks_sigmas=strict)
    for kind in kinds:
        assert metrics[f"{kind}/AP"] == metrics[f"{kind}/AP75"] == pytest.approx(100)


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


def test_extending_equals_one_process(tmp_path):
    content = coco_annotations(13, classes=3, keypoints=0)
    split = coco_split(tmp_path / "tiny.json", content)
    predictions = answers(split, content, 14)
    halves = [evaluator(split, ["bbox", "segm"], tmp_path / "a") for _ in range(2)]
    for index, pair in enumerate(zip(split.records, predictions, strict=True)):
        halves[index >= 3].add(*pair)
    halves[0].extend(halves[1])
    assert repr(halves[0].evaluate()) == repr(
        ours(split, predictions, ["bbox", "segm"], tmp_path / "b")
    )


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
    """Rare, common, frequent; what was not looked for, and what was not annotated exhaustively."""
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
    """One image; class 2 is rare, 5 common, 8 frequent. Nobody looked for 8 in it."""
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


def test_lvis_without_predictions(tmp_path):
    split = lvis_case(tmp_path)
    pytest.importorskip("hotcoco")
    metrics = ours(split, [empty_prediction()], ["bbox"], tmp_path, cls=LVISEvaluator)
    assert metrics["bbox/AP"] == 0
    rare = {name for name, value in metrics.items() if math.isnan(value)}
    assert rare == {"bbox/APf", "bbox/APm"}  # of which there is no object


LVIS_PACKAGE = {
    "bbox/AP": 16.4365452608,
    "bbox/AP50": 21.2085541793,
    "bbox/AP75": 18.4277774442,
    "bbox/APs": 5.0476190476,
    "bbox/APm": 17.3021504811,
    "bbox/APl": 94.5159515952,
    "bbox/APr": 11.7215154255,
    "bbox/APc": 10.8675167371,
    "bbox/APf": 26.7206036197,
    "segm/AP": 4.7699727999,
    "segm/AP50": 19.4596889199,
    "segm/AP75": 0.0,
    "segm/APs": 2.9437229437,
    "segm/APm": 4.788842326,
    "segm/APl": 27.2112211221,
    "segm/APr": 3.7414274584,
    "segm/APc": 2.6811914165,
    "segm/APf": 7.8872995249,
}
