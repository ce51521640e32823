"""Repairs of COCO files and their notes; test_traps.py tests the scores."""

import copy
import hashlib
import json

import pytest

from detection.config.task import default_task
from detection.datasets import read_split
from detection.datasets.base import object_counts
from detection.datasets.coco_json import read_annotations, repair, suspicious
from detection.evaluation.coco import metric_annotations
from moco.common.errors import DataError
from tests.detection.datasets.conftest import read
from tests.oracles.coco_dialects import HEIGHT, WIDTH, annotations, categories, images, write

BOXES = {"drop": ("segmentation",)}
TWO_POINTS = {"segmentation": [[5, 5, 25, 15]]}


def content_of(*, start=1, **fields):
    return {
        "images": images(),
        "annotations": annotations(start, **fields),
        "categories": categories(),
    }


@pytest.mark.parametrize("start", [0, -4])
def test_ids_below_1(start):
    repaired = repair(content_of(start=start))
    assert [row["id"] for row in repaired.content["annotations"]] == [1, 2, 3, 4, 5]
    low = 1 if start == 0 else 5
    assert len(repaired.notes) == 1
    assert repaired.notes[0].endswith(f": {low} (the first: annotation {start})")


def test_ids_of_refusals_are_the_files(tmp_path):
    content = content_of(start=-1)
    content["annotations"][3]["bbox"] = [61, 5, 3, 3]
    with pytest.raises(DataError, match="annotation 2: bbox"):
        read("set_test", COCO_TEST_JSON=write(tmp_path / "set", content))


@pytest.mark.parametrize(
    "others, annotated, left",
    [
        ({"supercategory": "pets"}, 1, ["cat", "dog"]),
        ({}, 1, ["cat", "dog"]),
        ({"supercategory": "none"}, 1, ["pets", "cat", "dog"]),  # a class without an object
        ({"supercategory": "pets"}, 0, ["pets", "cat", "dog"]),
    ],
)
def test_roboflows_category_0(others, annotated, left):
    content = content_of(category=annotated)
    dummy = {"id": 0, "name": "pets", "supercategory": "none"}
    content["categories"] = [dummy, *categories(**others)]
    repaired = repair(content)
    assert [row["name"] for row in repaired.content["categories"]] == left
    assert (repaired.content is not content) == (len(left) == 2) == len(repaired.notes)


@pytest.mark.parametrize("fields", [{}, BOXES], ids=["masks", "boxes"])
@pytest.mark.parametrize("area", [0, 1, -7, 2403, None, "200", float("nan"), 10**400])
def test_areas(area, fields):
    content = content_of(**fields)
    for row in content["annotations"]:
        row["area"] = area
    repaired = repair(content)
    areas = [row["area"] for row in repaired.content["annotations"]]
    assert areas == pytest.approx([200, 200, 400, 1200, 600])
    assert [note.partition(":")[2] for note in repaired.notes] == [" 5 (the first: annotation 1)"]


def test_what_may_be_right_stays():
    """Thin masks, areas of the box of a mask, rounded boxes also over the border."""
    content = content_of()
    content["annotations"][0]["bbox"] = [-0.9, 5, 61.8, 10]
    assert repair(content).content is content
    thin = [5, 5, 25, 5, 25, 15, 24.5, 5.5]  # a corner of a box of 20x10
    for area, shape in ((12, [thin]), (200, [thin]), (20, None), (260, None), (150.5, None)):
        content = content_of(**BOXES)
        row = content["annotations"][0]
        row |= {"area": area} | ({"segmentation": shape} if shape else {})
        repaired = repair(content)
        assert repaired.content is content and not repaired.notes


@pytest.mark.parametrize(
    "change, note",
    [
        (lambda x, y, w, h: [x, y, x + w, y + h], "like [x1, y1, x2, y2], but COCO's format has"),
        (
            lambda x, y, w, h: [x / WIDTH, y / HEIGHT, w / WIDTH, h / HEIGHT],
            "boxes that look relative (0 to 1), but COCO's format has pixels: 5",
        ),
        (lambda x, y, w, h: [x, y, w / 2, h], "masks that extend beyond their boxes: 5"),
        (
            lambda x, y, w, h: [int(x), y, w, h],
            "boxes of integers, which lose up to a pixel when training",
        ),
        (lambda x, y, w, h: [x, y, w + 0.5, h], None),
    ],
    ids=["corners", "relative", "elsewhere", "integers", "right"],
)
def test_what_looks_wrong_is_noted(change, note):
    content = content_of()
    for row in content["annotations"]:
        row["bbox"] = change(*map(int if note and "integers" in note else float, row["bbox"]))
    found = [text for text in suspicious(content) if note is None or note in text]
    assert len(found) == (note is not None)
    assert all("(the first: annotation " in text for text in found)


def with_keypoints(number, *, drop=()):
    content = content_of(**BOXES)
    for category in content["categories"]:
        category["keypoints"] = ["nose", "left_ear", "right_ear"]
    for row in content["annotations"]:
        x, y, *_ = row["bbox"]
        row |= {"keypoints": [x, y, 2, x + 3, y + 4, 1, 0, 0, 0], "num_keypoints": number}
        for key in drop:
            del row[key]
    return content


@pytest.mark.parametrize("number, drop", [(0, ()), (3, ()), ("2", ()), (0, ("num_keypoints",))])
def test_num_keypoints(number, drop):
    """With 0, COCO's metric of keypoints would ignore the object."""
    content = with_keypoints(number, drop=drop)
    before = copy.deepcopy(content)
    repaired = repair(content)
    assert content == before  # pure
    assert [row["num_keypoints"] for row in repaired.content["annotations"]] == [2] * 5
    assert len(repaired.notes) == 1
    assert repaired.notes[0].startswith("num_keypoints that are missing")
    assert repaired.notes[0].endswith(": 5 (the first: annotation 1)")
    assert not repair(with_keypoints(2)).notes


def test_polygons_of_fewer_than_3_points(tmp_path):
    """Boxes count; where masks are learned, objects without another polygon are left out."""
    content = content_of()
    content["annotations"][3]["segmentation"] = [[2, 3, 40, 30]]
    content["annotations"][1]["segmentation"].append([30, 5, 50])
    file = write(tmp_path / "set", content)
    split = read("set_test", COCO_TEST_JSON=file)
    assert split.has_masks
    assert [note.partition(":")[2] for note in split.notes] == [
        " 1 (the first: annotation 2)",
        " 1 (the first: annotation 4)",
    ]
    cfg = default_task()
    cfg.DATASETS.COCO_TEST_JSON = str(file)
    for learned, objects in ((False, {"cat": 3, "dog": 2}), (True, {"cat": 3, "dog": 1})):
        cfg.MODEL.MASK_ON = learned
        assert object_counts(read_split("set_test", cfg)) == objects


def test_a_file_whose_masks_are_all_none_is_one_of_boxes(tmp_path):
    split = read("set_test", COCO_TEST_JSON=write(tmp_path / "set", content_of(**TWO_POINTS)))
    assert len(split.notes) == 1 and split.notes[0].endswith(": 5 (the first: annotation 1)")
    assert not split.has_masks and object_counts(split) == {"cat": 3, "dog": 2}


@pytest.mark.parametrize("fields", [{}, BOXES], ids=["masks", "boxes"])
def test_boxes_over_the_border(fields):
    content = content_of(**fields)
    content["annotations"][3] |= {"bbox": [-38, 3, 80, 30], "area": 80 * 30}
    repaired = repair(content)
    assert repaired.notes[0] == "boxes over the border, clipped: 1 (the first: annotation 4)"
    row = repaired.content["annotations"][3]
    assert row["bbox"] == [0, 3, 42, 30] and row["area"] == (1200 if not fields else 42 * 30)


def test_the_hash_is_that_of_the_disk(tmp_path):
    file = write(tmp_path / "set", content_of(start=0))
    split = read("set_test", COCO_TEST_JSON=file)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert split.annotations_sha256 == read_annotations(file).sha256 == sha256
    assert json.loads(file.read_text()) == content_of(start=0)


@pytest.mark.parametrize("name", ["instances_train2017", "instances_val2017"])
def test_real_annotations_come_through_unchanged(name, shared_data):
    path = str(shared_data / "coco" / "annotations" / f"{name}.json")
    original, repaired = json.loads((shared_data / path).read_text()), read_annotations(path)
    assert not repaired.notes and repaired.content == original
    content = metric_annotations(path)
    for table in ("images", "annotations", "categories"):
        assert len(content[table]) == len(original[table])
        for row, other in zip(content[table], original[table], strict=True):
            assert row == {key: other[key] for key in row} and {"id"} < row.keys()
