"""Generated images: deterministic, valid VOC data, boxes that fit the objects."""

import hashlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from benchmarks.suites import synthetic


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    text = "".join(
        f"{p.relative_to(folder)} {hashlib.sha256(p.read_bytes()).hexdigest()}\n" for p in files
    )
    return hashlib.sha256(text.encode()).hexdigest()


def test_classes_are_fixed_pairs():
    assert len(set(synthetic.CLASSES)) == 8
    assert synthetic.PAIRS[0] == ("disc", "checker") and synthetic.PAIRS[3] == ("star", "dots")
    shapes, textures = zip(*synthetic.PAIRS, strict=True)
    assert len(set(shapes)) == len(set(textures)) == 8


def test_same_seed_same_bytes(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        synthetic.write_images(tmp_path / name / "images", 9, seed)
        synthetic.write_knn(tmp_path / name / "knn", 8, 8, seed)
        synthetic.write_scenes(tmp_path / name / "scenes", 3, 2, seed)
    assert len(list((tmp_path / "a" / "images").iterdir())) == 9
    for split in ("train", "val"):
        folders = sorted((tmp_path / "a" / "knn" / split).iterdir())
        assert [folder.name for folder in folders] == sorted(synthetic.CLASSES)
        assert {len(list(folder.iterdir())) for folder in folders} == {1}
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")


def test_a_file_depends_on_its_number_only():
    few = [synthetic.make_image(0, synthetic.IMAGES, i, i % 8) for i in range(3)]
    assert np.array_equal(few[2], synthetic.make_image(0, synthetic.IMAGES, 2, 2))
    assert not np.array_equal(few[2], synthetic.make_image(0, synthetic.KNN_VAL, 2, 2))


@pytest.mark.parametrize("label", range(8), ids=synthetic.CLASSES)
def test_box_is_the_tight_box_of_the_rendered_object(label):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        canvas = np.full((160, 160, 3), -1000.0, dtype=np.float32)
        center = np.array([80.0, 70.0], dtype=np.float32)
        box = synthetic.draw_object(canvas, label, center, 60.0, rng)
        # Every color is at least 0, so half-covered pixels are above the middle to -1000.
        ys, xs = np.nonzero(canvas[..., 0] > -510)
        drawn = (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)
        assert np.abs(np.subtract(drawn, (box.x0, box.y0, box.x1, box.y1))).max() <= 1
        assert (box.label, box.truncated) == (label, False)
        assert 25 < box.x1 - box.x0 < 95 and 25 < box.y1 - box.y0 < 95


def test_an_object_over_the_edge_is_marked_truncated():
    canvas = np.zeros((160, 160, 3), dtype=np.float32)
    center = np.array([10.0, 80.0], dtype=np.float32)
    box = synthetic.draw_object(canvas, 1, center, 60.0, np.random.default_rng(0))
    assert box.truncated and box.x0 == 0


def annotated(path: Path) -> tuple[ElementTree.Element, list[tuple]]:
    """Read a VOC annotation, and return it with class and corners of each object."""
    root = ElementTree.parse(path).getroot()
    sides = ("xmin", "ymin", "xmax", "ymax")
    return root, [
        (node.findtext("name"), *(int(node.findtext(f"bndbox/{side}")) for side in sides))
        for node in root.findall("object")
    ]


def test_voc_layout(tmp_path):
    folder = tmp_path / "scenes"
    synthetic.write_scenes(folder, trainval=12, test=7, seed=0)
    lists = [folder / "ImageSets" / "Main" / f"{name}.txt" for name in ("trainval", "test")]
    trainval, test = (path.read_text().split() for path in lists)
    assert (len(trainval), len(test)) == (12, 7)
    assert len({path.read_bytes() for path in (folder / "JPEGImages").iterdir()}) == 19
    seen = set()
    for name in {*trainval, *test}:
        with Image.open(folder / "JPEGImages" / f"{name}.jpg") as image:
            assert (image.size, image.mode, image.format) == ((160, 160), "RGB", "JPEG")
        root, objects = annotated(folder / "Annotations" / f"{name}.xml")
        assert root.findtext("filename") == f"{name}.jpg"
        assert [node.text for node in root.find("size")] == ["160", "160", "3"]
        assert 1 <= len(objects) <= 5
        for label, x0, y0, x1, y1 in objects:
            seen.add(label)
            assert 1 <= x0 < x1 <= 160 and 1 <= y0 < y1 <= 160
        for node in root.findall("object"):
            assert node.findtext("difficult") == "0" and node.findtext("truncated") in ("0", "1")
    assert seen <= set(synthetic.CLASSES) and len(seen) > 5
    for index, name in enumerate(trainval):  # 1-based and inclusive, without large overlaps
        _, boxes = synthetic.make_scene(0, synthetic.SCENES_TRAIN, index)
        assert annotated(folder / "Annotations" / f"{name}.xml")[1] == [
            (synthetic.CLASSES[box.label], box.x0 + 1, box.y0 + 1, box.x1, box.y1) for box in boxes
        ]
        for i, box in enumerate(boxes):
            assert all(box.iou(other) <= synthetic.MAX_OVERLAP_IOU for other in boxes[:i])


def test_color_says_nothing_about_the_class():
    """The mean colors of two classes differ by less than the noise of the mean."""
    means = np.array(
        [
            [synthetic.make_image(0, 0, 8 * i + c, c).mean(axis=(0, 1)) for i in range(60)]
            for c in range(8)
        ]
    )  # (class, image, channel)
    error = means.std(axis=1) / np.sqrt(60)
    assert (np.abs(means.mean(axis=1) - means.mean(axis=(0, 1))) < 4 * error).all()
