"""mIoU: equal to Detectron2's and Cityscapes' evaluators, and to cases done by hand."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detection.config.task import default_task
from detection.datasets.labels import read_labels
from detection.evaluation.metrics import for_record
from detection.evaluation.sem_seg import SemSegEvaluator
from moco.common.errors import DataError

PALETTE = [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0] + [9, 60, 200] * 252


def write_labels(path: Path, labels, palette=True) -> str:
    image = Image.fromarray(labels.astype(np.uint8))
    if palette:
        image.putpalette(PALETTE)  # makes it mode P
    image.save(path)
    return str(path)


def case(folder: Path, seed: int, classes: int, absent: tuple[int, ...] = (), images: int = 3):
    """Write label maps that contain 255; return records and mostly right predictions."""
    rng = np.random.default_rng(seed)
    records, predictions = [], []
    for index in range(images):
        H, W = 40 + 7 * index, 63
        present = [c for c in range(classes) if c not in absent]
        truth = rng.choice(present, (H, W))
        truth[: H // 2] = np.sort(truth[: H // 2])
        predicted = np.where(rng.random((H, W)) < 0.7, truth, rng.integers(0, classes, (H, W)))
        truth[rng.random((H, W)) < 0.1] = 255
        name = write_labels(folder / f"{index}.png", truth)
        records.append({"file_name": str(folder / f"{index}.jpg"), "sem_seg_file_name": name})
        predictions.append(predicted.astype(np.int64))
    return records, predictions


def ours(records, predictions, classes):
    evaluator = SemSegEvaluator(classes, 255)
    for record, predicted in zip(records, predictions, strict=True):
        evaluator.add(record, {"sem_seg": predicted})
    return evaluator.evaluate()


@pytest.mark.detectron2
@pytest.mark.parametrize("absent", [(), (2, 4)], ids=["all present", "two absent"])
def test_equals_detectron2s(tmp_path, absent):
    import torch
    from detectron2.data import DatasetCatalog, MetadataCatalog
    from detectron2.evaluation import SemSegEvaluator as Theirs

    names = [f"class{i}" for i in range(6)]
    records, predictions = case(tmp_path, 1, len(names), absent)
    mine = ours(records, predictions, names)
    dataset = str(tmp_path)
    DatasetCatalog.register(dataset, lambda: records)
    MetadataCatalog.get(dataset).set(stuff_classes=names, ignore_label=255)
    theirs = Theirs(dataset, distributed=False)
    theirs.reset()
    for record, predicted in zip(records, predictions, strict=True):
        scores = torch.nn.functional.one_hot(torch.from_numpy(predicted), len(names))
        theirs.process([record], [{"sem_seg": scores.permute(2, 0, 1)}])
    expected = theirs.evaluate()["sem_seg"]
    assert 20 < mine["sem_seg/mIoU"] < 90
    # Predicted and absent: 0 here, and not a number there.
    assert [mine.pop(f"sem_seg/IoU-{names[i]}") for i in absent] == [0.0] * len(absent)
    assert all(math.isnan(expected.pop(f"IoU-{names[i]}")) for i in absent)
    if absent:
        own = mine["sem_seg/mIoU"]
        mine["sem_seg/mIoU"] = mine.pop("sem_seg/mIoU_detectron2")
        assert own == pytest.approx(mine["sem_seg/mIoU"] * 4 / 6)
    names = [f"sem_seg/{name}" for name in ("mIoU", "fwIoU", "mACC", "pACC")]
    assert set(mine) == {*names, *(f"sem_seg/{n}" for n in expected if n.startswith("IoU-"))}
    assert mine == pytest.approx(
        {name: float(expected[name.removeprefix("sem_seg/")]) for name in mine},
        rel=1e-14,
    )


def mmsegmentations(records, predictions, num_classes):
    """Compute mIoU by histograms of each image, as mmseg/evaluation/metrics/iou_metric.py does."""
    intersections = unions = np.zeros(num_classes)
    edges = np.arange(num_classes + 1)
    for record, predicted in zip(records, predictions, strict=True):
        truth = read_labels(record["sem_seg_file_name"])
        predicted, truth = predicted[truth != 255], truth[truth != 255]
        areas = [
            np.histogram(values, edges)[0]
            for values in (predicted[predicted == truth], predicted, truth)
        ]
        intersections = intersections + areas[0]
        unions = unions + areas[1] + areas[2] - areas[0]
    with np.errstate(invalid="ignore"):
        return 100 * np.nanmean(intersections / unions)


@pytest.mark.parametrize("absent", [(), (2, 4)], ids=["all present", "two absent"])
def test_equals_mmsegmentations(tmp_path, absent):
    """On a full set all definitions are equal; on a subset a class predicted but absent is 0."""
    records, predictions = case(tmp_path, 1, 6, absent)
    for seen in (predictions, [np.where(p == 4, 0, p) for p in predictions]):
        metrics = ours(records, seen, [f"class{i}" for i in range(6)])
        expected = mmsegmentations(records, seen, 6)
        assert metrics["sem_seg/mIoU"] == pytest.approx(expected, rel=1e-14)
        assert ("sem_seg/mIoU_detectron2" in metrics) == bool(absent)
        notes = for_record(metrics, ["sem_seg"])[1]
        assert any("mmsegmentation" in note for note in notes) == bool(absent)


def test_reduced_label_maps_give_another_number(tmp_path):
    """Small objects vanish from a reduced label map, and with them the errors on them."""
    truth = np.zeros((64, 64), int)
    truth[3::8, 3::8] = 1
    name = write_labels(tmp_path / "a.png", truth)
    record = {"file_name": "a.jpg", "sem_seg_file_name": name}
    predicted = np.where(np.arange(64) < 32, truth, 0)
    found = {}
    for side in (0, 8):
        evaluator = SemSegEvaluator("ab", 255, side)
        evaluator.add(record, {"sem_seg": predicted})
        found[side] = evaluator.evaluate()
    assert found[0]["sem_seg/IoU-b"] == pytest.approx(50)
    assert found[8]["sem_seg/mIoU"] == 100.0 and math.isnan(found[8]["sem_seg/IoU-b"])
    assert default_task().TEST.SEM_SEG_REDUCED_SIZE == 0


def test_equals_cityscapes_average(tmp_path):
    """19 training ids, of which every one occurs; cityscapesscripts compares label ids."""
    pytest.importorskip("cityscapesscripts")
    from cityscapesscripts.helpers.labels import trainId2label

    name = "cityscapesscripts.evaluation.evalPixelLevelSemanticLabeling"
    metric = importlib.import_module(name)
    records, predictions = case(tmp_path, 2, 19, images=2)
    to_label = np.zeros(256, dtype=np.uint8)  # 0 is "unlabeled", which does not count
    for train_id in range(19):
        to_label[train_id] = trainId2label[train_id].id
    files = []
    for index, (record, predicted) in enumerate(zip(records, predictions, strict=True)):
        truth = to_label[read_labels(record["sem_seg_file_name"])]
        stem = f"city_{index:06d}_000000"
        files.append(
            (
                write_labels(tmp_path / f"{stem}_pred.png", to_label[predicted], palette=False),
                write_labels(tmp_path / f"{stem}_gtFine_labelIds.png", truth, palette=False),
            )
        )
    args = metric.args
    args.JSONOutput = args.evalInstLevelScore = args.evalPixelAccuracy = False
    args.quiet = True
    result = metric.evaluateImgLists([p for p, _ in files], [t for _, t in files], args)
    metrics = ours(records, predictions, [trainId2label[i].name for i in range(19)])
    assert metrics["sem_seg/mIoU"] == pytest.approx(100 * result["averageScoreClasses"], rel=1e-12)
    assert metrics["sem_seg/IoU-bus"] == pytest.approx(100 * result["classScores"]["bus"])


def test_by_hand(tmp_path):
    truth = np.array([[0, 0, 1, 1], [0, 255, 1, 255]])
    name = write_labels(tmp_path / "a.png", truth)
    predicted = np.array([[0, 1, 1, 1], [0, 1, 2, 0]])
    metrics = ours([{"file_name": "a.jpg", "sem_seg_file_name": name}], [predicted], "abc")
    expected = {
        "IoU-a": 200 / 3,
        "IoU-b": 50,
        "mIoU": 350 / 9,
        "mIoU_detectron2": 350 / 6,
        "fwIoU": 350 / 6,
        "mACC": 200 / 3,
        "pACC": 200 / 3,
    }
    assert {n: metrics[f"sem_seg/{n}"] for n in expected} == pytest.approx(expected)
    assert metrics["sem_seg/IoU-c"] == 0  # predicted once, and nowhere true


def test_nothing_counted_is_nan(tmp_path):
    name = write_labels(tmp_path / "a.png", np.full((3, 4), 255))
    metrics = ours(
        [{"file_name": "a.jpg", "sem_seg_file_name": name}], [np.zeros((3, 4), int)], "ab"
    )
    assert all(map(math.isnan, metrics.values()))


def test_palettes_are_read_by_index(tmp_path):
    labels = np.arange(12).reshape(3, 4) % 4
    labels[0, 0] = 255
    for palette in (True, False):
        path = write_labels(tmp_path / f"{palette}.png", labels, palette)
        found = read_labels(path)
        assert found.dtype == np.uint8 and np.array_equal(found, labels)
        found[0, 0] = 0  # writable, as the augmentations need it


def test_label_maps_that_do_not_fit_are_refused(tmp_path):
    name = write_labels(tmp_path / "a.png", np.array([[0, 1, 7]]))
    record = {"file_name": "a.jpg", "sem_seg_file_name": name}
    evaluator = SemSegEvaluator("abc", 255)
    with pytest.raises(DataError, match=r"a\.png: class id 7"):
        evaluator.add(record, {"sem_seg": np.zeros((1, 3), dtype=int)})
    with pytest.raises(DataError, match=r"a\.png: got 3x1.*1x3"):
        evaluator.add(record, {"sem_seg": np.zeros((3, 1), dtype=int)})
