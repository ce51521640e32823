"""mIoU: equal to Detectron2's and Cityscapes' evaluators, and to cases done by hand."""

import importlib
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detection.datasets.labels import read_labels
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
    """Records with label maps that hold 255, and predictions that are right for the most part."""
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
    assert sum(map(math.isnan, mine.values())) == len(absent)
    names = [f"sem_seg/{name}" for name in ("mIoU", "fwIoU", "mACC", "pACC")]
    assert set(mine) == {*names, *(f"sem_seg/{n}" for n in expected if n.startswith("IoU-"))}
    assert mine == pytest.approx(
        {name: float(expected[name.removeprefix("sem_seg/")]) for name in mine},
        rel=1e-14,
        nan_ok=True,
    )


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
        "mIoU": 350 / 6,
        "fwIoU": 350 / 6,
        "mACC": 200 / 3,
        "pACC": 200 / 3,
    }
    assert {n: metrics[f"sem_seg/{n}"] for n in expected} == pytest.approx(expected)
    assert math.isnan(metrics["sem_seg/IoU-c"])


def test_nothing_counted_is_nan(tmp_path):
    name = write_labels(tmp_path / "a.png", np.full((3, 4), 255))
    metrics = ours(
        [{"file_name": "a.jpg", "sem_seg_file_name": name}], [np.zeros((3, 4), int)], "ab"
    )
    assert all(map(math.isnan, metrics.values()))


def test_extending_equals_one_process(tmp_path):
    records, predictions = case(tmp_path, 3, 4)
    parts = [SemSegEvaluator("abcd", 255) for _ in range(2)]
    for index, (record, predicted) in enumerate(zip(records, predictions, strict=True)):
        parts[index % 2].add(record, {"sem_seg": predicted})
    parts[0].extend(pickle.loads(pickle.dumps(parts[1])))
    assert parts[0].evaluate() == ours(records, predictions, "abcd")


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
