"""Inputs for which a metric was silently wrong, with the right number by hand.

`TRAPS` are files in COCO's format with detections and their score: with each package, through
Detectron2, and by Detectron2's own evaluator. `FORMATS` are traps of the other formats.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from detection.config.engines import find_engine
from detection.config.task import default_task
from detection.datasets import read_split
from detection.datasets.base import XYXY_ABS
from detection.engine.evaluate import GatheredEvaluator
from detection.evaluation.evaluators import build_evaluator
from tests.oracles import coco_dialects as coco
from tests.oracles.tiny_instances import (
    detectron2_instances,
    empty_prediction,
    instances,
    with_masks,
)
from tests.oracles.tiny_lvis import write_lvis
from tests.oracles.tiny_voc import write_voc

pytestmark = pytest.mark.usefixtures("fresh_cache")

BY_DETECTRON2 = ("detectron2", "catalog")
ENGINES = (
    "hotcoco",
    "pycocotools",
    *(pytest.param(name, marks=pytest.mark.detectron2) for name in BY_DETECTRON2),
)
# The number of the image, class, and box XYWH of each object or detection.
Boxes = Sequence[tuple[int, int, Sequence[float]]]
Edit = Callable[[list[dict[str, Any]]], Any]
LARGE = 3  # of `coco.OBJECTS`: one of two dogs, and the only one above 32 x 32 px
KINDS = {"boxes": ("bbox",), "masks": ("bbox", "segm"), "keypoints": ("keypoints",)}
KEYS = {
    "boxes": {},
    "masks": {"MODEL.MASK_ON": True},
    # With this sigma one pixel off is right at all thresholds for 200 px, at none for 1 px.
    "keypoints": {"MODEL.KEYPOINT_ON": True, "TEST.KEYPOINT_OKS_SIGMAS": [0.15] * 3},
}


@dataclasses.dataclass(frozen=True)
class Trap:
    """A file in COCO's format, and the score of its detections.

    Attributes:
        right: Metric → its value by hand.
        edit: Changes the annotations of the `objects`.
        found: Detections, with score 1; keypoints are one pixel to the right of their place.
        task: boxes, masks or keypoints.
        keys: Keys of its configuration.
    """

    name: str
    right: Mapping[str, float]
    edit: Edit = lambda rows: None
    found: Boxes = coco.OBJECTS
    task: str = "boxes"
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    objects: Boxes = coco.OBJECTS


def numbered(start: int) -> Edit:
    return lambda rows: [row.update(id=i) for i, row in enumerate(rows, start)]


def each(**fields: Any) -> Edit:
    return lambda rows: [row.update(fields) for row in rows]


def large(**fields: Any) -> Edit:
    return lambda rows: rows[LARGE].update(fields)


def grid(number: int) -> Boxes:
    return [(0, 0, [4 * (i % 15), 2 * (i // 15), 3, 1.5]) for i in range(number)]


OTHERS = [found for i, found in enumerate(coco.OBJECTS) if i != LARGE]
# Of a class with one of two objects found, precision is 1 up to half the recall: 51 of 101 points.
HALF = {"AP": (100 + 100 * 51 / 101) / 2}
NO_MASK = {"segmentation": None}
TRAPS = [
    *(Trap("no detection", {"AP": 0}, found=[], task=task) for task in KINDS),
    *(
        Trap(f"ids from {start}", {"AP": 100}, numbered(start), task=task)
        for start in (0, -4)
        for task in KINDS
    ),
    *(
        Trap(name, {"AP": right}, found=grid(n), objects=grid(n), keys=keys)
        for name, n, right, keys in (
            ("150 of a class", 150, 100 * 67 / 101, {}),
            ("300 of a class", 300, 100 * 34 / 101, {}),
            ("300 and the key", 300, 100, {"TEST.COCO_MAX_DETECTIONS": 500}),
        )
    ),
    *(
        Trap(
            f"area {area!s:.5}",
            HALF | {"APs": 100, "APm": 0},
            each(area=area, **fields),
            OTHERS,
            task,
        )
        for area in (0, 1, -7, 2400, None, "200", float("nan"), 10**400)
        for task, fields in (("boxes", {}), ("boxes", NO_MASK), ("masks", {}))
    ),
    *(Trap(f"area {a}", {"AP": 100}, each(area=a), task="keypoints") for a in (0, 1, None)),
    Trap("area below 0 of one", HALF, large(area=-7), OTHERS),
    Trap("num_keypoints 0 of one", HALF, large(num_keypoints=0), OTHERS, "keypoints"),
    *(
        Trap(f"polygon of {len(points) // 2}, {name}", right, large(segmentation=[points]), *rest)
        for points in ([2, 3], [2, 3, 40, 30])
        for name, right, *rest in (
            ("found", {"AP": 100}),
            ("missed", HALF, OTHERS),
            ("no mask", {"AP": 100}, OTHERS, "masks"),
        )
    ),
    *(
        Trap(
            "over the border, found as clipped",
            {"AP": 100},
            large(bbox=[-38, 3, 80, 30], area=2400, **fields),
            [*OTHERS, (2, 1, [0, 3, 42, 30])],
        )
        for fields in ({}, NO_MASK)
    ),
]


def write(folder: Any, trap: Trap) -> Any:
    """Write the file; keypoints are two corners of a box and one without a label, not masks."""
    rows = []
    for number, (image, class_id, (x, y, w, h)) in enumerate(trap.objects, 1):
        row = {"id": number, "image_id": image + 1, "category_id": class_id + 1}
        row |= {"bbox": [x, y, w, h], "area": w * h, "iscrowd": 0}
        if trap.task == "keypoints":
            row |= {"keypoints": [x, y, 2, x + w, y + h, 2, 0, 0, 0], "num_keypoints": 2}
        else:
            row["segmentation"] = [coco.polygon([x, y, w, h])]
        rows.append(row)
    trap.edit(rows)
    rows = [{key: value for key, value in row.items() if value is not None} for row in rows]
    categories = coco.categories()
    if trap.task == "keypoints":
        categories = coco.categories(keypoints=["nose", "left_ear", "right_ear"])
    content = {"images": coco.images(), "annotations": rows, "categories": categories}
    return coco.write(folder, content)


def prediction(found: Boxes, image: int, task: str) -> dict[str, Any]:
    """Return the detections of an image."""
    mine = [(class_id, x, y, w, h) for i, class_id, (x, y, w, h) in found if i == image]
    if not mine:
        return empty_prediction(3 if task == "keypoints" else 0)
    answer = instances(*(((x, y, x + w, y + h), 1.0, class_id) for class_id, x, y, w, h in mine))
    if task == "masks":
        return with_masks(answer, coco.HEIGHT, coco.WIDTH)
    if task == "keypoints":
        corners = [[(x, y, 1), (x + w, y + h, 1), (0, 0, 1)] for _, x, y, w, h in mine]
        answer["keypoints"] = np.array(corners, np.float32) + np.float32([1.5, 0.5, 0])
    return answer


def scores(split: Any, cfg: Any, engine: str, predictions: Any, folder: Any) -> dict[str, float]:
    """Return the metrics of predictions, one per record, by canonical name."""
    if engine not in BY_DETECTRON2:
        evaluator = build_evaluator(split, cfg, folder)
        if engine != "embedded":
            pytest.importorskip(engine)
            evaluator = dataclasses.replace(evaluator, package=engine)
        for record, answer in zip(split.records, predictions, strict=True):
            evaluator.add(record, answer)
        return evaluator.evaluate()
    plugin = find_engine("detectron2")
    evaluator = plugin.evaluator(split, cfg, folder) or GatheredEvaluator(
        split, cfg, folder, plugin
    )
    assert isinstance(evaluator, GatheredEvaluator) == (engine != "catalog")
    for record, answer in zip(split.records, predictions, strict=True):
        found = detectron2_instances(answer, record["height"], record["width"])
        evaluator.process([record], [{"instances": found}])
    return dict(evaluator.evaluate())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: f"{trap.name}, {trap.task}")
def test_of_cocos_format(trap, engine, tmp_path, request):
    file, cfg = write(tmp_path / "set", trap), default_task()
    cfg.merge_from_list([x for pair in (KEYS[trap.task] | trap.keys).items() for x in pair])
    cfg.DATASETS.COCO_TEST_JSON = str(file)
    if engine == "catalog":
        from detectron2.data.datasets import register_coco_instances

        from detection.d2.catalog import CatalogSource

        register_coco_instances(request.node.name, {}, str(file), str(file.parent))
        split = CatalogSource(request.node.name).read()
    else:
        split = read_split("set_test", cfg)
    answers = [prediction(trap.found, i, trap.task) for i in range(len(split.records))]
    measured = scores(split, cfg, engine, answers, tmp_path / "out")
    for kind in KINDS[trap.task]:
        ours = {name: measured[f"{kind}/{name}"] for name in trap.right}
        assert ours == pytest.approx(trap.right)


def edited_lvis(folder: Any, edit: Edit) -> tuple[str, dict[str, str]]:
    """Write a split of LVIS with edited annotations."""
    write_lvis(folder, {"val": 3})
    file = folder / "lvis" / "lvis_v0.5_val.json"
    content = json.loads(file.read_text())
    edit(content["annotations"])
    file.write_text(json.dumps(content))
    return "lvis_v0.5_val", {}


def edited_voc(folder: Any, xmin: str) -> tuple[str, dict[str, str]]:
    """Write a folder in VOC's layout whose boxes all start at `xmin`."""
    write_voc(folder / "own", {"test": 3})
    for file in (folder / "own" / "Annotations").glob("*.xml"):
        file.write_text(re.sub(r"<xmin>\d+", f"<xmin>{xmin}", file.read_text()))
    return "own_test", {"VOC_DIR": str(folder / "own")}


def twice_as_wide(rows: list[dict[str, Any]]) -> None:
    """Begin boxes left of the image, where as much of them is as in it."""
    for row in rows:
        _, y, w, h = row["bbox"]
        row["bbox"] = [-w, y, 2 * w, h]


def clipped(record: dict[str, Any]) -> dict[str, Any]:
    """Return a perfect detector's prediction: the objects, clipped to the image."""
    found = []
    for item in record["annotations"]:
        x, y, *end = item["bbox"]
        right, bottom = end if item["bbox_mode"] == XYXY_ABS else (x + end[0], y + end[1])
        box = (max(x, 0), max(y, 0), min(right, record["width"]), min(bottom, record["height"]))
        found.append((box, 1.0, item["category_id"]))
    return instances(*found)


# What the file is, whether its objects are detected, as they are in the image, and the AP.
FORMATS = {
    "LVIS, no detection": (lambda folder: edited_lvis(folder, list), False, 0),
    "LVIS, ids from 0": (lambda folder: edited_lvis(folder, numbered(0)), True, 100),
    "LVIS, ids from -4": (lambda folder: edited_lvis(folder, numbered(-4)), True, 100),
    "LVIS, area 0": (lambda folder: edited_lvis(folder, each(area=0)), True, 100),
    "LVIS, over the border": (lambda folder: edited_lvis(folder, twice_as_wide), True, 100),
    "VOC, no detection": (lambda folder: edited_voc(folder, "1"), False, 0),
    "VOC, over the border": (lambda folder: edited_voc(folder, "-30"), True, 100),
}


@pytest.mark.parametrize("engine", ["embedded", ENGINES[2]])
@pytest.mark.parametrize("name", FORMATS)
def test_of_other_formats(name, engine, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    build, is_found, right = FORMATS[name]
    split_name, keys = build(tmp_path)
    if name.startswith("LVIS"):
        pytest.importorskip("hotcoco")
    cfg = default_task()
    cfg.DATASETS.update(keys)
    split = read_split(split_name, cfg)
    answers = [clipped(record) if is_found else empty_prediction() for record in split.records]
    measured = scores(split, cfg, engine, answers, tmp_path / "out")
    assert measured["bbox/AP"] == pytest.approx(right, abs=0.01)  # VOC's 11 points round
