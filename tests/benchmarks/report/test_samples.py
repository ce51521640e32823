"""Sample predictions: which images, which boxes in which color, and where."""

import json

import numpy as np
import pytest
from PIL import Image, ImageColor

from benchmarks.report.records import collect
from benchmarks.report.samples import GAP_PX, HEAD_PX, IMAGE_PX, samples_image, save_samples
from benchmarks.report.style import PALETTE, RIGHT, TRUTH, WRONG
from benchmarks.report.table import Table, aggregate
from detection.datasets.base import Split
from detection.datasets.voc import GroundTruth
from tests.benchmarks.report.fake_runs import write_pair

SPLIT = "voc_2007_test"
CAT, DOG = 0, 1
TWO = [(10, 30, 50, 90), (60, 30, 90, 90)]  # a cat and a dog, 0-based, half-open
SIX = [(x, 80, x + 10, 95) for x in range(0, 90, 15)]  # too many tags
# Color and boxes of an image, and per init which of them it finds. Of all 16 objects random finds
# 5 and MoCo 10: "six", "both", "moco" and "first" are the nearest to that, in this order.
IMAGES = {
    "random": ("#fafa00", TWO, [0, 1], []),
    "first": ("#fa00fa", TWO, [], [0, 1]),
    "moco": ("#00fafa", TWO, [], [1]),
    "six": ("#808080", SIX, [0, 1], [0, 1, 2, 3]),
    "none": ("#000000", [], [], []),
    "both": ("#0000fa", TWO, [0], [0]),
    "last": ("#ffffff", TWO, [], [0, 1]),
}


@pytest.fixture
def made(tmp_path) -> tuple[Table, Split]:
    """Finished runs with predictions, and what they were tested on."""
    write_pair(tmp_path / "runs", {"random": [10.0, 12.0], "moco": [20.0, 23.0]})
    records, truth = [], {}
    rows: dict[str, list[dict]] = {"random": [], "moco": []}
    for name, (color, boxes, *found) in IMAGES.items():
        path = tmp_path / f"{name}.png"
        Image.new("RGB", (100, 100), color).save(path)
        records.append({"file_name": str(path), "image_id": name, "height": 100, "width": 100})
        array = np.array(boxes, float).reshape(-1, 4)
        classes = np.arange(len(boxes)) % 2
        truth[name] = GroundTruth(array + [1, 1, 0, 0], classes, np.zeros(len(boxes), bool))  # noqa: RUF005
        for init, of_init in zip(rows, found, strict=True):
            for i, box in enumerate(boxes):
                kind = int(classes[i]) if i in of_init else 1 - int(classes[i])
                row = {"image_id": name, "category_id": kind, "bbox": box, "score": 0.5}
                late = {**row, "category_id": int(classes[i]), "score": 0.4}  # beyond the budget
                rows[init] += [late, row]
    for init, found_rows in rows.items():
        folder = tmp_path / "runs" / f"{init}-0" / "inference"
        folder.mkdir()
        content = {"classes": ["cat", "dog"], "predictions": found_rows}
        (folder / f"{SPLIT}.json").write_text(json.dumps(content))
    [table] = aggregate(collect([tmp_path / "runs"]).transfer)
    split = Split(SPLIT, "pascal_voc", ("cat", "dog"), tuple(records), "e" * 64, truth=truth)
    return table, split


def pixel(image: Image.Image, column: int, line: int, x: int, y: int) -> tuple[int, ...]:
    """Return the color of a panel at a place in pixels of the test image."""
    step, scale = IMAGE_PX + GAP_PX, IMAGE_PX / 100
    place = GAP_PX + column * step + round(scale * x), HEAD_PX + line * step + round(scale * y)
    color = image.convert("RGB").getpixel(place)
    assert isinstance(color, tuple)
    return color


def test_typical_images_with_right_and_wrong_boxes_of_one_budget(made):
    image = samples_image(*made)
    columns = (
        [(TRUTH, TRUTH)] * 3,
        [(RIGHT, WRONG), (WRONG, WRONG), (WRONG, WRONG)],
        [(RIGHT, WRONG), (WRONG, RIGHT), (RIGHT, RIGHT)],
    )
    for column, colors in enumerate(columns):
        for line, name in enumerate(("both", "moco", "first")):
            assert pixel(image, column, line, 2, 2) == ImageColor.getrgb(IMAGES[name][0])
            sides = [pixel(image, column, line, box[0], 60) for box in TWO]
            assert sides == [ImageColor.getrgb(color) for color in colors[line]], (column, line)
    bars = np.asarray(image)[:, GAP_PX + 3 * (IMAGE_PX + GAP_PX) :]
    assert (bars == ImageColor.getrgb(PALETTE[0])).all(axis=2).any()


def test_the_file_keeps_the_colors_of_boxes(made, tmp_path):
    path = save_samples(tmp_path / "samples.png", *made)
    with Image.open(path) as image:
        assert (image.format, image.mode) == ("PNG", "P")
        assert pixel(image, 2, 0, 10, 60) == ImageColor.getrgb(RIGHT)
        assert pixel(image, 2, 0, 60, 60) == ImageColor.getrgb(WRONG)


def test_difficult_objects_are_neither_shown_nor_part_of_the_budget(made, monkeypatch):
    monkeypatch.setattr("benchmarks.report.samples.IMAGES", len(IMAGES))
    table, split = made
    truth = split.truth["both"]
    split.truth["both"] = GroundTruth(truth.boxes, truth.classes, np.array([True, False]))
    image, background = samples_image(table, split), ImageColor.getrgb(IMAGES["both"][0])
    [line] = [line for line in range(5) if pixel(image, 0, line, 2, 2) == background]
    cat, dog = ([pixel(image, column, line, box[0], 60) for column in range(3)] for box in TWO)
    assert cat == [background, *[ImageColor.getrgb(WRONG)] * 2]
    assert dog == [ImageColor.getrgb(TRUTH), background, background]
