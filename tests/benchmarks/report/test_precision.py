"""Precision and recall by hand, and only of predictions on the dataset that they were made on."""

import json

import numpy as np
import pytest

from benchmarks.report.analysis import precision_recall
from benchmarks.report.records import FinishedRun, collect
from detection.datasets.base import Split
from detection.datasets.voc import GroundTruth
from moco.common.errors import UserError
from tests.benchmarks.report.fake_runs import CONFIG, write_run


def predicted(tmp_path, monkeypatch, split: Split, predictions, ap50: float) -> FinishedRun:
    folder = write_run(tmp_path / "run", config=CONFIG, metrics={"bbox/AP50": ap50})
    (folder / "inference").mkdir()
    (folder / "inference" / "voc_2007_test.json").write_text(json.dumps(predictions))
    monkeypatch.setattr("detection.datasets.read_split", lambda name, cfg: split)
    return collect([tmp_path]).transfer[0]


BOXES = [[10, 10, 50, 50], [60, 60, 90, 90]]


def by_hand(recall, precision) -> None:
    """Check the curve of a hit, a miss, a hit, a miss: 1 up to half the recall, then 2 of 3."""
    assert len(recall) == 101
    np.testing.assert_allclose(precision, np.where(np.asarray(recall) <= 0.5, 1.0, 2 / 3))


def voc_split() -> Split:
    truth = GroundTruth(np.array(BOXES, float), np.zeros(2, np.int64), np.zeros(2, bool))
    kinds = ("voc_2007_test", "pascal_voc", ("cat", "absent"), (), "e" * 64)
    return Split(*kinds, truth={"7": truth}, metadata={"year": 2007})


VOC_AP50 = 100 * (6 + 5 * 2 / 3) / 11  # recall 0, .1, … 1; the class that is absent has none
COCO_AP50 = 100 * (51 + 50 * 2 / 3) / 101


def test_precision_and_recall_by_hand_voc(tmp_path, monkeypatch):
    boxes = [[9, 9, 50, 50], [200, 200, 240, 240], [59, 59, 90, 90], [5, 200, 9, 240]]
    rows = [
        {"image_id": "7", "category_id": 0, "bbox": box, "score": score}
        for box, score in zip(boxes, (0.9, 0.8, 0.7, 0.6), strict=True)
    ]
    content = {"classes": ["cat", "absent"], "predictions": rows}
    by_hand(*precision_recall(predicted(tmp_path, monkeypatch, voc_split(), content, VOC_AP50)))


def test_precision_and_recall_by_hand_coco(tmp_path, monkeypatch):
    pytest.importorskip("pycocotools")
    boxes = [[10, 10, 40, 40], [60, 60, 30, 30]]
    objects = [
        {"id": i, "image_id": 7, "category_id": 3, "bbox": box, "area": 900, "iscrowd": 0}
        for i, box in enumerate(boxes, start=1)
    ]
    images = [{"id": 7, "width": 300, "height": 300}]
    names = [{"id": 3, "name": "cat"}, {"id": 4, "name": "absent"}]
    content = {"images": images, "annotations": objects, "categories": names}
    (tmp_path / "truth.json").write_text(json.dumps(content))
    split = Split(
        "voc_2007_test",
        "coco",
        ("cat", "absent"),
        (),
        "e" * 64,
        metadata={"json_file": str(tmp_path / "truth.json")},
    )
    found = [boxes[0], [60, 60, 9, 30], boxes[1], [5, 200, 9, 9]]  # IoU 1, 0.3, 1, 0
    rows = [
        {"image_id": 7, "category_id": 3, "bbox": box, "score": score}
        for box, score in zip(found, (0.9, 0.8, 0.7, 0.6), strict=True)
    ]
    by_hand(*precision_recall(predicted(tmp_path, monkeypatch, split, rows, COCO_AP50)))


def test_predictions_are_compared_with_their_own_data_alone(tmp_path, monkeypatch):
    """A dataset that does not give the number of the record is another one."""
    content = {"classes": ["cat"], "predictions": []}
    run = predicted(tmp_path, monkeypatch, voc_split(), content, 30.0)
    with pytest.raises(UserError, match=r"give AP50 0\.0 on the voc_2007_test .* record has 30\.0"):
        precision_recall(run)
    file = run.folder / "inference" / "voc_2007_test.json"
    other = {"image_id": "8", "category_id": 0, "bbox": [0, 0, 9, 9], "score": 0.5}
    for text in (json.dumps({**content, "predictions": [other]}), "[]", "{half"):
        file.write_text(text)
        with pytest.raises(UserError, match=r"json: no predictions on the voc_2007_test"):
            precision_recall(run)
    file.unlink()
    with pytest.raises(UserError, match="no predictions"):
        precision_recall(run)


def test_no_prediction_at_all_is_a_precision_of_nothing(tmp_path, monkeypatch):
    content = {"classes": ["cat", "absent"], "predictions": []}
    _, precision = precision_recall(predicted(tmp_path, monkeypatch, voc_split(), content, 0.0))
    assert not precision.any()
