"""Choice of a dataset's metric, and tasks whose metric cannot be computed."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from fvcore.common.config import CfgNode

from detection.config.task import default_task
from detection.datasets import read_split
from detection.datasets.base import Split
from detection.datasets.coco import PERSON_KEYPOINTS
from detection.datasets.labels import read_labels
from detection.datasets.voc import GroundTruth
from detection.evaluation.base import EVALUATORS, Metric
from detection.evaluation.evaluators import build_evaluator, metric_kinds
from detection.evaluation.metrics import headline_names
from detection.evaluation.reachable import doctor_config, evaluate_perfect
from detection.evaluation.sem_seg import SemSegEvaluator
from moco.common.errors import UserError
from tests.oracles.tiny_cityscapes import write_cityscapes
from tests.oracles.tiny_coco import write_coco
from tests.oracles.tiny_instances import (
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


@pytest.mark.parametrize("year, cell_ap", [(2007, 600 / 11), (2012, 50)])
def test_voc_numbers_and_its_prediction_file(year, cell_ap, tmp_path):
    """Half the objects of one class are found: 6 of 11 points of recall, half of the area."""
    evaluator = build_evaluator(
        dataclasses.replace(VOC, metadata={"year": year}), config(), tmp_path
    )
    evaluator.add(VOC.records[0], instances(((10, 10, 50, 50), 0.9, 0), ((0, 0, 9, 9), 0.1, 1)))
    evaluator.add(VOC.records[1], empty_prediction())
    metrics = evaluator.evaluate()
    assert metrics["bbox/AP-cell"] == pytest.approx(cell_ap)
    assert metrics["bbox/AP50-blob"] == pytest.approx(100)
    assert metrics["bbox/AP"] == pytest.approx((cell_ap + 100) / 2)
    assert json.loads((tmp_path / "tiny.json").read_text()) == {
        "classes": ["cell", "blob"],
        "predictions": [
            {"image_id": "a", "category_id": 0, "bbox": [10, 10, 50, 50], "score": 0.9},
            {"image_id": "a", "category_id": 1, "bbox": [0, 0, 9, 9], "score": 0.1},
        ],
    }


@pytest.mark.parametrize(
    "evaluator_type, mask, keypoint, kinds",
    [
        ("coco", False, False, ("bbox",)),
        ("coco", True, False, ("bbox", "segm")),
        ("coco", False, True, ("bbox", "keypoints")),
        ("coco", True, True, ("bbox", "segm", "keypoints")),
        ("lvis", False, False, ("bbox",)),
        ("lvis", True, True, ("bbox", "segm")),
        ("pascal_voc", True, True, ("bbox",)),
        ("sem_seg", True, True, ("sem_seg",)),
        ("cityscapes_instance", True, True, ("segm",)),
        ("densepose", True, True, ("bbox", "densepose")),
    ],
)
def test_kinds_follow_the_dataset_and_the_model(evaluator_type, mask, keypoint, kinds):
    assert metric_kinds(split_of(evaluator_type), config(mask, keypoint)) == kinds


def test_an_evaluator_from_outside(register, tmp_path):
    def toy(cfg: CfgNode) -> Metric:
        return Metric(("bbox",), lambda split, folder: SemSegEvaluator(split.classes, 0))

    with pytest.raises(UserError, match="'toy'"):
        build_evaluator(split_of("toy"), config(), tmp_path)
    register(EVALUATORS, toy)
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


def prediction_of(record):
    """Return the record's own annotations as a prediction."""
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


READABLE = {
    "voc_2007_test": lambda at: write_voc(at / "VOC2007", {"test": 3}, names=VOC_NAMES),
    "coco_2017_val": lambda at: write_coco(at, {"val2017": 4}),
    "keypoints_coco_2017_val": lambda at: write_coco(at, {"val2017": 4}, keypoints=True),
    "lvis_v0.5_val": lambda at: write_lvis(at, {"val": 5}),
    "cityscapes_fine_instance_seg_val": lambda at: write_cityscapes(
        at, {"val": 3}, size=(192, 288)
    ),
    "cityscapes_fine_sem_seg_val": lambda at: write_cityscapes(at, {"val": 3}),
    "voc_2012_sem_seg_val": lambda at: write_voc_seg(at, {"val": 4}),
}
BEYOND_HEADLINES = {
    "lvis_v0.5_val": ["segm/APr"],
    "cityscapes_fine_sem_seg_val": ["sem_seg/pACC"],
}


@pytest.mark.parametrize("name", READABLE)
def test_what_the_readers_give_scores_100(name, tmp_path, monkeypatch, fresh_cache):
    """Reader and metric agree about ids, files and coordinates; two processes give the same."""
    pytest.importorskip("hotcoco")
    pytest.importorskip("cityscapesscripts")
    READABLE[name](tmp_path)
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    split = read_split(name, default_task())
    cfg = doctor_config(split)
    if split.has_keypoints:  # hardly any distance is forgiven: not half a pixel
        cfg.TEST.KEYPOINT_OKS_SIGMAS = [1e-4] * 17
    whole, *parts = (build_evaluator(split, cfg, tmp_path / folder) for folder in "abc")
    for index, record in enumerate(split.records):
        whole.add(record, prediction_of(record))
        parts[index % 2].add(record, prediction_of(record))
    metrics = whole.evaluate()
    headlines = headline_names(metrics)
    assert {name.split("/")[0] for name in headlines} == set(metric_kinds(split, cfg))
    shown = [*headlines, *BEYOND_HEADLINES.get(name, [])]
    assert {n: metrics[n] for n in shown} == pytest.approx(dict.fromkeys(shown, 100.0))
    result = evaluate_perfect(split, cfg)
    assert result.faults == () and set(result.highest) == set(headlines)
    assert min(result.highest.values()) == pytest.approx(100, abs=0.01)
    parts[0].extend(pickle.loads(pickle.dumps(parts[1])))
    assert repr(parts[0].evaluate()) == repr(metrics)
    stored = [json.loads(path.read_text()) for path in tmp_path.glob(f"[ab]/{name}.json")]
    assert len(stored) == (0 if "sem_seg" in name else 2)
    rows = [part["predictions"] if isinstance(part, dict) else part for part in stored]
    assert len({repr(sorted(part, key=repr)) for part in rows}) <= 1
