"""Images of predictions: what is rendered, where, and under which name."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageChops

from detection.datasets.base import Split
from detection.evaluation.visualize import Visualizer, render, visible_instances
from tests.oracles.tiny_instances import empty_prediction, instances, rectangle, rle

H, W = 120, 160
GRAY = (128, 128, 128)


@pytest.fixture
def record(tmp_path) -> dict:
    Image.new("RGB", (W, H), GRAY).save(tmp_path / "one.png")
    return {"file_name": str(tmp_path / "one.png"), "image_id": 1, "height": H, "width": W}


def changed(image: Image.Image) -> np.ndarray:
    """(H, W) of the pixels that are no longer gray."""
    return (np.asarray(image) != np.array(GRAY)).any(axis=2)


def test_boxes_and_their_tags(record):
    image = render(record, instances(((40, 50, 120, 100), 0.9, 0)), ["cat"])
    assert image.size == (W, H)
    touched = changed(image)
    for y, x in ((50, 80), (99, 80), (75, 40), (75, 119)):  # the four sides
        assert touched[y - 1 : y + 2, x - 1 : x + 2].any()
    assert not touched[60:90, 60:110].any()  # inside
    assert touched[38:49, 42:60].all()  # the tag, above
    assert not touched[:30].any() and not touched[105:].any()


def test_two_classes_have_two_colors(record):
    boxes = [((5, 50, 60, 100), 0.9, 0), ((80, 50, 140, 100), 0.9, 1)]
    pixels = np.asarray(render(record, instances(*boxes), ["cat", "dog"]))
    assert tuple(pixels[75, 5]) != tuple(pixels[75, 80])
    assert tuple(pixels[75, 5]) != GRAY != tuple(pixels[75, 80])


def test_tags_stay_inside_and_apart(record):
    corner = instances(((150, 0, 160, 40), 0.9, 0), ((149, 0, 160, 41), 0.8, 0))
    one = instances(((150, 0, 160, 40), 0.9, 0))
    both, first = (
        changed(render(record, corner, ["elephant"])),
        changed(render(record, one, ["elephant"])),
    )
    assert first[1:10, 110:148].any()  # moved to the left
    assert both.sum() > 1.7 * first.sum()  # the second tag is not on the first


def test_which_instances_are_drawn():
    assert visible_instances(np.array([0.6, 0.2, 0.9, 0.49])) == [2, 0]
    assert visible_instances(np.array([0.1, 0.4, 0.3, 0.2])) == [1, 2, 3]
    assert visible_instances(np.array([0.3])) == [0]
    assert visible_instances(np.empty(0)) == []


def test_nothing_found_leaves_the_image(record):
    assert not changed(render(record, empty_prediction(), ["cat"])).any()


def test_masks_tint_what_they_cover(record):
    mask = rectangle(H, W, np.array([50, 60, 90, 80]))
    prediction = {**instances(((40, 50, 120, 100), 0.9, 0)), "masks": [rle(mask)]}
    touched = changed(render(record, prediction, ["cat"]))
    assert touched[60:80, 50:90].all()
    assert not touched[82:97, 92:117].any()


def test_keypoints_with_a_skeleton_for_coco(record):
    points = np.zeros((1, 17, 3), dtype=np.float32)
    points[0, 5], points[0, 6] = (60, 70, 1), (100, 70, 1)  # the shoulders, which are joined
    points[0, 9] = (80, 90, 0.01)  # too uncertain
    prediction = {**instances(((40, 50, 120, 100), 0.9, 0)), "keypoints": points}
    touched = changed(render(record, prediction, ["person"]))
    assert touched[70, 60] and touched[70, 100] and touched[69:72, 80].any()
    assert not touched[85:95, 75:85].any()
    prediction["keypoints"] = points[:, 5:7]  # two keypoints of somebody's own
    touched = changed(render(record, prediction, ["person"]))
    assert touched[70, 60] and not touched[65:75, 75:85].any()


def test_labels_tint_all_but_the_background(record):
    labels = np.zeros((H, W), dtype=np.int64)
    labels[40:80, 50:90] = 15
    names = ["background", *(f"class{i}" for i in range(1, 21))]
    image = render(record, {"sem_seg": labels}, names)
    touched = changed(image)[:H]
    assert touched[40:80, 50:90].all() and touched.sum() == 40 * 40
    # VOC's color of a person is (192, 128, 128).
    assert np.asarray(image)[60, 70] == pytest.approx(
        0.4 * 128 + 0.6 * np.array([192, 128, 128]), abs=1
    )
    assert image.height > H  # the legend
    legend = np.asarray(image)[H:].reshape(-1, 3)
    assert (legend == (192, 128, 128)).all(axis=1).any()
    colored = render(record, {"sem_seg": labels}, names, [(10 * i, 0, 250) for i in range(21)])
    assert np.asarray(colored)[60, 70, 2] == pytest.approx(0.4 * 128 + 0.6 * 250, abs=1)


def split_of(folder: Path, names: list[str]) -> Split:
    records = []
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        Image.new("RGB", (W, H), GRAY).save(path)
        records.append({"file_name": str(path), "image_id": name, "height": H, "width": W})
    return Split("tiny", "coco", ("cat",), tuple(records), "0" * 64)


def test_images_spread_over_the_split(tmp_path):
    split = split_of(tmp_path / "in", [f"{i}.jpg" for i in range(10)])
    visualizer = Visualizer(tmp_path / "out", 4, split)
    for record in reversed(split.records):  # whatever the order and the process
        visualizer.add(record, instances(((40, 50, 120, 100), 0.9, 0)))
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["0.jpg", "2.jpg", "5.jpg", "7.jpg"]
    with Image.open(tmp_path / "out" / "0.jpg") as written:
        expected = render(split.records[0], instances(((40, 50, 120, 100), 0.9, 0)), ["cat"])
        difference = np.asarray(ImageChops.difference(written.convert("RGB"), expected))
    assert difference.mean() < 3


@pytest.mark.parametrize(
    "names, number, files",
    [
        (["a.jpg", "b.jpg", "c.jpg"], 0, []),
        (["a.jpg", "b.jpg", "c.jpg"], 99, ["a.jpg", "b.jpg", "c.jpg"]),
        (["x/a.jpg", "y/a.jpg"], 2, ["000-a.jpg", "001-a.jpg"]),
    ],
    ids=["none", "more than there are", "of one name"],
)
def test_names_of_the_files(names, number, files, tmp_path):
    split = split_of(tmp_path / "in", names)
    visualizer = Visualizer(tmp_path / "out", number, split)
    for record in split.records:
        visualizer.add(record, empty_prediction())
    assert sorted(path.name for path in tmp_path.glob("out/*")) == files


def test_colors_of_the_dataset_are_used(tmp_path):
    split = split_of(tmp_path / "in", ["a.png"])
    split = dataclasses.replace(
        split, classes=("road", "car"), metadata={"stuff_colors": [[0, 250, 0], [250, 0, 0]]}
    )
    Visualizer(tmp_path / "out", 1, split).add(
        split.records[0], {"sem_seg": np.zeros((H, W), dtype=np.int64)}
    )
    with Image.open(tmp_path / "out" / "a.jpg") as image:
        red, green, blue = np.asarray(image.convert("RGB"))[60, 70].astype(int)
    assert green > 190 and red < 70 and blue < 70
