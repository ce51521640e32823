"""Which metric a dataset gets, and what stops a task that its metric cannot be had for."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from fvcore.common.config import CfgNode

from detection.datasets import read_split
from detection.datasets.base import Split
from detection.datasets.coco import PERSON_KEYPOINTS
from detection.datasets.labels import read_labels
from detection.datasets.voc import GroundTruth
from detection.evaluation.base import EVALUATORS, Metric
from detection.evaluation.coco import LVISEvaluator
from detection.evaluation.evaluators import build_evaluator, metric_kinds
from detection.evaluation.metrics import for_record
from detection.evaluation.sem_seg import SemSegEvaluator
from detection.evaluation.voc import VOCEvaluator
from moco.common.errors import UserError
from tests.oracles.tiny_cityscapes import write_cityscapes
from tests.oracles.tiny_coco import write_coco
from tests.oracles.tiny_instances import (
    answers,
    coco_annotations,
    coco_split,
    empty_prediction,
    instances,
    rle,
)
from tests.oracles.tiny_lvis import write_lvis
from tests.oracles.tiny_voc import VOC_NAMES, write_voc
from tests.oracles.tiny_voc_seg import write_voc_seg


def config(mask=False, keypoint=False, sigmas=()):
    return CfgNode(
        {
            "MODEL": {"MASK_ON": mask, "KEYPOINT_ON": keypoint},
            "TEST": {"KEYPOINT_OKS_SIGMAS": list(sigmas), "COCO_MAX_DETECTIONS": 100},
        }
    )


def truth(*boxes, classes=None):
    return GroundTruth(
        boxes=np.array(boxes, dtype=float).reshape(-1, 4),
        classes=np.array(classes or [0] * len(boxes), dtype=np.int64),
        difficult=np.zeros(len(boxes), dtype=bool),
    )


def split_of(evaluator_type, **changes):
    fields = {
        "name": "tiny",
        "evaluator_type": evaluator_type,
        "classes": ("cell", "blob"),
        "records": (
            {"file_name": "a.jpg", "image_id": "a"},
            {"file_name": "b.jpg", "image_id": "b"},
        ),
        "annotations_sha256": "0" * 64,
    }
    return Split(**{**fields, **changes})


VOC = split_of(
    "pascal_voc",
    metadata={"year": 2007},
    truth={"a": truth((11, 11, 50, 50), (1, 1, 9, 9), classes=[0, 1]), "b": truth((5, 5, 20, 20))},
)


def test_voc_numbers_and_its_prediction_file(tmp_path):
    """Half the objects of one class are found: 6 of 11 points of recall."""
    parts = [build_evaluator(VOC, config(), tmp_path) for _ in range(2)]
    right = instances(((10, 10, 50, 50), 0.9, 0), ((0, 0, 9, 9), 0.1, 1))
    for index, part in enumerate(parts):
        part.add(VOC.records[0], {key: value[[index]] for key, value in right.items()})
    parts[0].add(VOC.records[1], empty_prediction())
    parts[0].extend(pickle.loads(pickle.dumps(parts[1])))
    metrics = parts[0].evaluate()
    assert metrics["bbox/AP-cell"] == pytest.approx(600 / 11)
    assert metrics["bbox/AP50-blob"] == pytest.approx(100)
    assert metrics["bbox/AP"] == pytest.approx((600 / 11 + 100) / 2)
    assert json.loads((tmp_path / "tiny.json").read_text()) == {
        "classes": ["cell", "blob"],
        "predictions": [
            {"image_id": "a", "category_id": 0, "bbox": [10, 10, 50, 50], "score": 0.9},
            {"image_id": "a", "category_id": 1, "bbox": [0, 0, 9, 9], "score": 0.1},
        ],
    }


def test_voc_year_chooses_the_metric(tmp_path):
    newer = dataclasses.replace(VOC, metadata={"year": 2012})
    evaluator = build_evaluator(newer, config(), tmp_path)
    evaluator.add(VOC.records[0], instances(((10, 10, 50, 50), 0.9, 0)))
    assert evaluator.evaluate()["bbox/AP-cell"] == pytest.approx(50)


@pytest.mark.parametrize(
    ("mask", "keypoint", "kinds"),
    [
        (False, False, ("bbox",)),
        (True, False, ("bbox", "segm")),
        (False, True, ("bbox", "keypoints")),
        (True, True, ("bbox", "segm", "keypoints")),
    ],
)
def test_kinds_of_coco_follow_the_model(tmp_path, mask, keypoint, kinds):
    content = coco_annotations(1, classes=2, keypoints=17)
    split = coco_split(tmp_path / "tiny.json", content)
    cfg = config(mask, keypoint, sigmas=(0.1,) * 17)
    evaluator = build_evaluator(split, cfg, tmp_path / "inference")
    for record, prediction in zip(split.records, answers(split, content, 2, 17), strict=True):
        evaluator.add(record, prediction)
    metrics = pickle.loads(pickle.dumps(evaluator)).evaluate()
    assert {name.split("/")[0] for name in metrics} == set(kinds)
    assert metric_kinds(split, cfg) == kinds
    stored, _ = for_record(metrics, kinds)
    assert all(stored[f"{kind}/AP"] > 0 for kind in kinds)
    assert len(json.loads((tmp_path / "inference" / "tiny.json").read_text())) > 10


@pytest.mark.parametrize(
    ("evaluator_type", "cls", "kinds"),
    [
        ("pascal_voc", VOCEvaluator, ("bbox",)),
        ("lvis", LVISEvaluator, ("bbox", "segm")),
        ("sem_seg", SemSegEvaluator, ("sem_seg",)),
        ("cityscapes_instance", None, ("segm",)),
        ("densepose", None, ("bbox", "densepose")),
    ],
)
def test_evaluators_of_the_other_types(evaluator_type, cls, kinds, tmp_path):
    metadata = {"year": 2007, "ignore_label": 255, "json_file": "x"}
    metadata["thing_dataset_id_to_contiguous_id"] = {}
    split = split_of(evaluator_type, metadata=metadata, has_masks=True)
    assert metric_kinds(split, config(True, True)) == kinds
    if evaluator_type == "lvis":
        pytest.importorskip("hotcoco")
        assert metric_kinds(split, config(False)) == ("bbox",)
    if cls:
        assert isinstance(build_evaluator(split, config(True, True), tmp_path), cls)


def test_an_evaluator_from_outside(tmp_path, monkeypatch):
    def toy(cfg: CfgNode) -> Metric:
        return Metric(("bbox",), lambda split, folder: SemSegEvaluator(split.classes, 0))

    with pytest.raises(UserError, match="'toy'"):
        build_evaluator(split_of("toy"), config(), tmp_path)
    monkeypatch.setattr(EVALUATORS, "_obj_map", dict(EVALUATORS))
    EVALUATORS.register(toy)
    assert metric_kinds(split_of("toy"), config()) == ("bbox",)
    assert isinstance(build_evaluator(split_of("toy"), config(), tmp_path), SemSegEvaluator)


def test_cocos_sigmas_are_for_cocos_keypoints(tmp_path):
    """Seventeen keypoints of another animal are not a person's."""
    split = coco_split(tmp_path / "t.json", coco_annotations(1, classes=1, keypoints=17))
    own = {"keypoint_names": tuple(f"leg {i}" for i in range(17))}
    other = dataclasses.replace(split, metadata={**split.metadata, **own})
    with pytest.raises(UserError, match=r"KEYPOINT_OKS_SIGMAS: .* keypoints of its own"):
        build_evaluator(other, config(False, True), tmp_path)
    build_evaluator(other, config(False, True, (0.1,) * 17), tmp_path)
    persons = {**split.metadata, "keypoint_names": PERSON_KEYPOINTS}
    build_evaluator(dataclasses.replace(split, metadata=persons), config(False, True), tmp_path)


def test_own_sigmas_are_used(tmp_path):
    content = coco_annotations(1, classes=1, keypoints=4)
    split = coco_split(tmp_path / "tiny.json", content)
    values = []
    for sigmas in ([0.1] * 4, [0.3] * 4):
        evaluator = build_evaluator(split, config(False, True, sigmas), tmp_path / "inference")
        for record, prediction in zip(split.records, answers(split, content, 2, 4), strict=True):
            evaluator.add(record, prediction)
        values.append(evaluator.evaluate()["keypoints/AP"])
    assert values[1] > values[0] > 0


def prediction_of(record):
    """The record's own annotations as a model would say them."""
    from pycocotools import mask as mask_util

    if "sem_seg_file_name" in record:
        labels = read_labels(record["sem_seg_file_name"]).astype(np.int64)
        return {"sem_seg": np.where(labels == 255, 0, labels)}
    objects = [o for o in record["annotations"] if not o.get("iscrowd", 0)]
    boxes = np.array([o["bbox"] for o in objects], dtype=np.float32).reshape(-1, 4)
    for box, annotation in zip(boxes, objects, strict=True):
        if annotation["bbox_mode"] == 1:  # XYWH
            box[2:] += box[:2]
    masks = []
    for annotation in objects:
        shape = annotation.get("segmentation", [])
        if isinstance(shape, list):
            H, W = record["height"], record["width"]
            shape = mask_util.merge(mask_util.frPyObjects(shape, H, W)) if shape else rle(np.eye(4))
        counts = shape["counts"]
        masks.append({**shape, "counts": counts if isinstance(counts, str) else counts.decode()})
    prediction = {
        "boxes": boxes,
        "scores": np.linspace(1, 0.6, len(boxes), dtype=np.float32),
        "classes": np.array([o["category_id"] for o in objects], dtype=np.int64),
        "masks": masks,
    }
    if objects and "keypoints" in objects[0]:
        points = [o["keypoints"] for o in objects]
        prediction["keypoints"] = np.array(points, dtype=np.float32).reshape(len(objects), -1, 3)
    return prediction


@pytest.mark.parametrize(
    ("name", "model", "headlines"),
    [
        ("voc_2007_test", {}, ["bbox/AP", "bbox/AP75"]),
        ("coco_2017_val", {"mask": True}, ["bbox/AP", "segm/AP"]),
        ("keypoints_coco_2017_val", {"keypoint": True}, ["bbox/AP", "keypoints/AP"]),
        ("lvis_v0.5_val", {"mask": True}, ["bbox/AP", "segm/AP", "segm/APr"]),
        ("cityscapes_fine_instance_seg_val", {"mask": True}, ["segm/AP", "segm/AP50"]),
        ("cityscapes_fine_sem_seg_val", {}, ["sem_seg/mIoU", "sem_seg/pACC"]),
        ("voc_2012_sem_seg_val", {}, ["sem_seg/mIoU"]),
    ],
)
def test_what_the_readers_give_scores_100(tmp_path, monkeypatch, name, model, headlines):
    """Reader and metric agree about ids, files and coordinates."""
    pytest.importorskip("hotcoco")
    pytest.importorskip("cityscapesscripts")
    write = {
        "voc_2007": lambda: write_voc(tmp_path / "VOC2007", {"test": 3}, names=VOC_NAMES),
        "coco": lambda: write_coco(tmp_path, {"val2017": 4}),
        "keypoints": lambda: write_coco(tmp_path, {"val2017": 4}, keypoints=True),
        "lvis": lambda: write_lvis(tmp_path, {"val": 5}),
        "cityscapes": lambda: write_cityscapes(tmp_path, {"val": 3}, size=(192, 288)),
        "voc_2012": lambda: write_voc_seg(tmp_path, {"val": 4}),
    }
    next(function for start, function in write.items() if name.startswith(start))()
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    cfg = config(**model)
    cfg.DATASETS = CfgNode({"VOC_DIR": "", "TRAIN": (), "TEST": (name,)})
    split = read_split(name, cfg)
    evaluator = build_evaluator(split, cfg, tmp_path / "out")
    for record in split.records:
        evaluator.add(record, prediction_of(record))
    metrics = evaluator.evaluate()
    assert {n: metrics[n] for n in headlines} == pytest.approx(dict.fromkeys(headlines, 100.0))
