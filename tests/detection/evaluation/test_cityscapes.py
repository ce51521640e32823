"""Cityscapes' AP of instances: equal to Detectron2's evaluator, and to cases done by hand."""

import importlib
import json
import math
import os

import numpy as np
import pytest
from fvcore.common.config import CfgNode
from PIL import Image

from detection.datasets.base import Split
from detection.evaluation.cityscapes import _METRIC
from detection.evaluation.evaluators import build_evaluator
from tests.oracles.tiny_cityscapes import alias_package
from tests.oracles.tiny_instances import (
    detectron2_instances,
    empty_prediction,
    instances,
    rectangle,
    with_masks,
)

pytest.importorskip("cityscapesscripts")

CLASSES = ("person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle")
IDS = {"person": 24, "car": 26, "bus": 28}
H, W = 120, 200
MASKS = CfgNode({"MODEL": {"MASK_ON": True, "KEYPOINT_ON": False}})


def cityscapes(root, images):
    """Write a split in Cityscapes' layout; per image a list of (class name, box, is a group)."""
    gt_dir = root / "gtFine" / "val"
    records, truth = [], {}
    for index, objects in enumerate(images):
        stem = f"bonn_{index:06d}_000019_"
        ids = np.full((H, W), 7, dtype=np.int32)  # road
        ids[:5] = 3  # out of the region of interest
        for number, (name, box, group) in enumerate(objects):
            value = IDS[name] if group else 1000 * IDS[name] + number
            ids[rectangle(H, W, np.array(box)) > 0] = value
        path = gt_dir / "bonn" / f"{stem}gtFine_instanceIds.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(ids.astype(np.uint16)).save(path)
        image = root / "leftImg8bit" / "val" / "bonn" / f"{stem}leftImg8bit.png"
        records.append({"file_name": str(image), "image_id": image.name, "height": H, "width": W})
        truth[str(image)] = str(path)
    return Split(
        name="cityscapes",
        evaluator_type="cityscapes_instance",
        classes=CLASSES,
        records=tuple(records),
        annotations_sha256="0" * 64,
        metadata={"gt_dir": str(gt_dir), "thing_classes": list(CLASSES)},
        truth=truth,
        has_masks=True,
    )


def predicted(*found):
    """Build a prediction from (class name, box, score) triples, each mask filling its box."""
    rows = [(box, score, CLASSES.index(name)) for name, box, score in found]
    return with_masks(instances(*rows), H, W)


def measure(split, predictions, folder):
    evaluator = build_evaluator(split, MASKS, folder)
    for record, prediction in zip(split.records, predictions, strict=True):
        evaluator.add(record, prediction)
    return evaluator.evaluate()


A, B, C = (10, 20, 60, 60), (80, 20, 130, 60), (140, 20, 190, 60)


# The metric's curve has a point per score and one at recall 0; a point's precision weighs half of
# the way in recall from its neighbor on one side to that on the other.
@pytest.mark.parametrize(
    ("found", "ap", "ap50"),
    [
        pytest.param([("car", A, 0.9), ("car", B, 0.8)], 100, 100, id="perfect"),
        pytest.param([("car", A, 0.9)], 50, 50, id="half missing"),
        pytest.param([("car", (10, 70, 60, 110), 0.9)], 0, 0, id="elsewhere"),
        # IoU 2/3: right at 4 of 10 thresholds; else precision 1/2 at recall 1/2, weight 1/4.
        pytest.param([("car", (20, 20, 70, 60), 0.9), ("car", B, 0.8)], 47.5, 100, id="shifted"),
        pytest.param([("bus", A, 0.9), ("bus", B, 0.8)], 0, 0, id="another class"),
        pytest.param([], 0, 0, id="nothing"),
        # Precision 2/3, 1/2, 0 with weights 1/4, 1/2, 1/4.
        pytest.param(
            [("car", C, 0.95), ("car", A, 0.9), ("car", B, 0.8)], 125 / 3, 125 / 3, id="false first"
        ),
    ],
)
def test_by_hand(tmp_path, found, ap, ap50):
    split = cityscapes(tmp_path, [[("car", A, False), ("car", B, False)]])
    metrics = measure(split, [predicted(*found)], tmp_path / "out")
    assert (metrics["segm/AP"], metrics["segm/AP50"]) == pytest.approx((ap, ap50))
    assert metrics["segm/AP-car"] == metrics["segm/AP"]  # the only class that occurs
    assert math.isnan(metrics["segm/AP-bus"])


def test_groups_and_void_do_not_count(tmp_path):
    split = cityscapes(tmp_path, [[("car", A, False), ("car", B, True)]])
    void = ("car", (0, 0, 100, 5), 0.99)
    metrics = measure(split, [predicted(void, ("car", B, 0.95), ("car", A, 0.9))], tmp_path / "out")
    assert metrics["segm/AP"] == pytest.approx(100)


def test_detections_inside_a_group_alone(tmp_path):
    """The person is missed, and the only detection of its class does not count."""
    objects = [("person", (20, 20, 60, 60), False), ("person", (100, 20, 180, 100), True)]
    split = cityscapes(tmp_path, [[*objects, ("car", (20, 70, 90, 110), False)]])
    found = predicted(("person", (110, 30, 150, 90), 0.9), ("car", (20, 70, 90, 110), 0.8))
    metrics = measure(split, [found], tmp_path / "inference")
    assert metrics["segm/AP-person"] == 0
    assert metrics["segm/AP-car"] == 100


def test_a_split_without_instances_is_nan(tmp_path, recwarn):
    split = cityscapes(tmp_path, [[]])
    assert all(map(math.isnan, measure(split, [predicted()], tmp_path / "out").values()))
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def made_up(tmp_path, seed):
    """Images of people, cars and buses, and answers of changing quality."""
    rng = np.random.default_rng(seed)
    images, predictions = [], []
    for _ in range(4):
        objects, found = [], []
        for slot in range(6):
            if rng.random() < 0.3:
                continue
            x, y = 10 + 62 * (slot % 3), 10 + 55 * (slot // 3)
            box = np.array([x, y, x + rng.integers(8, 50), y + rng.integers(8, 45)])
            name = str(rng.choice(list(IDS)))
            objects.append((name, box, rng.random() < 0.15))
            for _ in range(rng.integers(0, 3)):
                moved = box + rng.normal(0, 2, 4)
                found.append((name, moved, round(float(rng.random()), 1)))
        images.append(objects)
        predictions.append(predicted(*found))
    return cityscapes(tmp_path, images), predictions


@pytest.fixture
def aliases(monkeypatch):
    """Provide the package as Detectron2 imports it, with what today's numpy lacks."""
    metric = importlib.import_module(_METRIC)
    alias_package(monkeypatch, "helpers.labels", f"evaluation.{_METRIC.rsplit('.', 1)[1]}")
    monkeypatch.setattr(np, "in1d", lambda a, b: np.isin(np.ravel(a), b), raising=False)
    monkeypatch.setattr(metric, "writeDict2JSON", lambda content, path: None)
    for name in ("predictionPath", "predictionWalk", "JSONOutput", "colorized", "gtInstancesFile"):
        monkeypatch.setattr(metric.args, name, getattr(metric.args, name))


@pytest.mark.detectron2
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equals_detectron2s(aliases, tmp_path, seed, capsys):
    from detectron2.data import MetadataCatalog
    from detectron2.evaluation import CityscapesInstanceEvaluator

    split, predictions = made_up(tmp_path, seed)
    mine = measure(split, predictions, tmp_path / "out")
    name = str(tmp_path)
    MetadataCatalog.get(name).set(**split.metadata)
    theirs = CityscapesInstanceEvaluator(name)
    theirs.reset()
    for record, prediction in zip(split.records, predictions, strict=True):
        found = detectron2_instances(prediction, H, W)
        theirs.process([record], [{"instances": found}])
    expected = theirs.evaluate()["segm"]
    assert 10 < mine["segm/AP"] < mine["segm/AP50"] < 100
    assert {n: mine[f"segm/{n}"] for n in expected} == pytest.approx(expected, abs=1e-12)


def test_nothing_is_printed_or_left_behind(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    split, predictions = made_up(tmp_path, 3)
    before = sorted(os.listdir(tmp_path))
    measure(split, predictions, tmp_path / "out")
    assert capfd.readouterr() == ("", "")
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "out"])
    assert os.listdir(tmp_path / "tmp") == [] and os.listdir(tmp_path / "out") == [
        "cityscapes.json"
    ]
    rows = json.loads((tmp_path / "out" / "cityscapes.json").read_text())
    assert {row["category_id"] for row in rows} == set(IDS.values())
    assert {row["image_id"] for row in rows} <= {r["image_id"] for r in split.records}


def test_faults_of_the_engine(tmp_path):
    split = cityscapes(tmp_path, [[("car", A, False)], []])
    evaluator = build_evaluator(split, MASKS, tmp_path / "out")
    evaluator.add(split.records[0], empty_prediction())
    with pytest.raises(ValueError, match="1 images"):
        evaluator.evaluate()
    prediction = predicted(("car", A, 0.9))
    del prediction["masks"]
    with pytest.raises(ValueError, match="masks"):
        evaluator.add(split.records[1], prediction)
