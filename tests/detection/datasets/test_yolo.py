"""The reader of YOLO layout: records, masks, background, and what is refused or noted."""

import os
import re
from pathlib import Path

import pytest
from PIL import Image

from detection.config.checks import require_polygons
from detection.config.resolve import resolve_names
from detection.config.task import default_task
from detection.datasets import cache_clear
from detection.datasets.__main__ import main
from detection.datasets.base import Split
from detection.datasets.yolo import read_data_yaml
from moco.common.errors import DataError
from tests.detection.datasets.conftest import read

BOX = "1 0.5 0.5 0.5 0.25"
TRIANGLE = "0 0.1 0.2 0.9 0.2 0.5 0.8"
YAML = "train: images/train\nnames: [cat, dog]\n"


def write(folder: Path, *labels: str | None, yaml: str = YAML, size=(60, 40), exif=None) -> Path:
    """Write an image for each text of labels, None for no file; returns the data.yaml."""
    for number, text in enumerate(labels):
        image = folder / "images/train" / f"{number}.jpg"
        label = folder / "labels/train" / f"{number}.txt"
        for path in (image, label):
            path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.new("RGB", size)
        tags = picture.getexif()
        if exif:
            tags[0x0112] = exif
        picture.save(image, exif=tags)
        if text is not None:
            label.write_text(text)
    (folder / "data.yaml").write_text(yaml)
    return folder / "data.yaml"


def split_of(file: Path, name: str = "train") -> Split:
    return read(f"{file.parent.name}_{name}", YOLO_YAML=file)


def test_boxes_polygons_and_background(tmp_path):
    file = write(tmp_path / "set", f"{BOX}\n\n0.0 0.1 0.1 0.2 0.2\n", "", None)
    split = split_of(file)
    assert (split.evaluator_type, split.classes) == ("coco", ("cat", "dog"))
    first, *others = split.records
    assert (first["image_id"], first["width"], first["height"]) == (1, 60, 40)
    boxes = [(item["category_id"], item["bbox"]) for item in first["annotations"]]
    assert boxes == [(1, [15, 15, 30, 10]), (0, [0, 0, 12, 8])]
    assert [record["annotations"] for record in others] == [[], []]
    assert split.notes == (
        "background images, without an object: 2, of which 1 have no label file",
    )
    assert not split.has_masks
    split = split_of(write(tmp_path / "masks", TRIANGLE, None))
    (item,) = split.records[0]["annotations"]
    assert item["segmentation"] == [pytest.approx([6, 8, 54, 8, 30, 32])]
    assert item["bbox"] == pytest.approx([6, 8, 48, 24])
    assert split.has_masks
    require_polygons(split)


def test_mixed_boxes_and_polygons_are_boxes(tmp_path):
    """A box is never read as a polygon of two points."""
    split = split_of(write(tmp_path / "set", f"{TRIANGLE}\n{BOX}"))
    found = [item["bbox"] for item in split.records[0]["annotations"]]
    assert found == [pytest.approx([6, 8, 48, 24]), [15, 15, 30, 10]]
    assert not split.has_masks and "segmentation" not in split.records[0]["annotations"][0]
    assert split.notes == (
        "boxes among polygons: 1; all objects are read as boxes, because masks need a polygon for "
        "each",
    )


def test_what_is_noted(tmp_path):
    lines = ("0 1.02 0.5 0.2 0.5", BOX, BOX, "0 0.5 0.5 0 0.5", "0 0.9 0.5 0.2000001 0.5")
    split = split_of(write(tmp_path / "set", "\n".join(lines), BOX))
    assert split.notes == (
        "boxes over the border, clipped: 1",
        "images with a coordinate beyond 0 to 1: 1, used here, which Ultralytics leaves out",
        "lines equal to another one in the file, which no detector finds: 1",
        "boxes without area, left out in training: 1",
    )
    clipped, *_, rounded = split.records[0]["annotations"]
    assert clipped["bbox"] == pytest.approx([55.2, 10, 4.8, 20])
    assert sum(rounded["bbox"][::2]) == pytest.approx(60, abs=1e-12)


def test_a_label_file_is_too_large(tmp_path):
    """Reading it took two minutes, which no label file of an image needs."""
    file = write(tmp_path / "set", BOX, f"{BOX}\n" * 300_000)
    with pytest.raises(DataError, match=r"1\.txt:1: .*5,700,000 bytes, expected at most 4,194,304"):
        split_of(file)


def test_fractions_are_of_the_image_as_it_is_shown(tmp_path):
    record = split_of(write(tmp_path / "set", BOX, exif=6)).records[0]
    assert (record["width"], record["height"]) == (40, 60)
    assert record["annotations"][0]["bbox"] == [10, 22.5, 20, 15]


@pytest.mark.parametrize(
    "line, reason",
    [
        ("1 0.5 0.5 0.5 0.25 0.9", "6 columns, .*score"),
        ("1 0.5 0.5 0.5", "4 columns, expected class cx cy w h"),
        ("1 0.1 0.1 0.2 0.2 0.3 0.3 0.4", "8 columns"),
        ("2 0.5 0.5 0.5 0.25", "class '2', expected an integer from 0 to 1"),
        ("-1 0.5 0.5 0.5 0.25", "class '-1'"),
        ("0.5 0.5 0.5 0.5 0.25", "class '0.5'"),
        ("1e400 0.5 0.5 0.5 0.25", "'1e400' is not a finite"),
        (f"{'9' * 5000} 0.5 0.5 0.5 0.25", "is not a finite"),
        ("cat 0.5 0.5 0.5 0.25", "'cat' is not a number"),
        ("1 nan 0.5 0.5 0.25", "'nan' is not a finite number"),
        ("1 0.5 0.5 -0.5 0.25", "below 0"),
        ("1 320 240 100 100", "outside the image; .*0 to 1"),
        ("1 1e308 0.5 1e308 1e308", "far outside"),
        ("1 0.1 0.1 1e9 0.2 0.3 0.3", "far outside"),
        ("\x00", "1 column"),
    ],
)
def test_broken_lines_are_named(line, reason, tmp_path):
    file = write(tmp_path / "set", f"{BOX}\n{line}\n", BOX)
    with pytest.raises(DataError, match=rf"1 broken line: labels/train/0\.txt:2: .*{reason}"):
        split_of(file)


def test_the_doctor_counts_broken_lines_and_images(tmp_path, capsys):
    labels = [f"{BOX}\n9 0.5 0.5 0.5 0.5"] * 12
    file = write(tmp_path / "set", *labels, yaml=f"{YAML}val: images/val\n")
    (tmp_path / "set/labels/train/0.txt").write_bytes(b"\xff")
    assert main(["doctor", "--yolo", str(file)]) == 3
    shown = capsys.readouterr().out
    assert "WRONG  set_train  set_train: 12 broken lines: labels/train/0.txt:1: cannot" in shown
    assert "labels/train/7.txt:2: class '9'" in shown and "; and 2 more\n" in shown
    assert re.search(r"absent  set_val .*data\.yaml: val: .*set/images/val is neither", shown)
    file = write(tmp_path / "set", TRIANGLE, TRIANGLE, yaml=f"{YAML}val: images/train\n")
    for path in (tmp_path / "set/labels/train").glob("*"):
        path.write_text(TRIANGLE)
    assert main(["doctor", "--yolo", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "12 images, 12 objects" in shown and "segm/AP 100.0" in shown
    assert shown.endswith(
        f"mask_rcnn_R_50_FPN_1x.yaml DATASETS.YOLO_YAML {file} MODEL.WEIGHTS random\n"
    )


@pytest.mark.parametrize(
    "yaml, classes",
    [
        ("names: {1: dog, 0: cat}", ("cat", "dog")),
        ("names: {'1': dog, '0': cat}", ("cat", "dog")),
        ("nc: 2", ("class_0", "class_1")),
        ("nc: 2\nnames: [cat, 7]", ("cat", "7")),
    ],
)
def test_class_names(yaml, classes, tmp_path):
    assert read_data_yaml(write(tmp_path, BOX, yaml=yaml)).classes == classes


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{to}: &{to} [{', '.join(f'*{of}' for _ in range(9))}]\n"
    for of, to in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "yaml, reason",
    [
        ("names: [cat]", "is not in|unknown dataset"),
        ("train: images/train", "neither names nor nc"),
        ("names: [cat, dog]\nnc: 3", "nc is 3, but names has 2"),
        ("nc: 99999999999999999999", "nc: got"),
        ("nc: .nan", "nc: got nan"),
        ("nc: 20000", "nc: got 20000, expected a number of classes from 1 to 10000"),
        ("names: [no, yes]", "got False.*quotes"),
        ("names: [cat, cat]", "'cat' occurs twice"),
        ("names: {0: cat, 2: dog}", "not 0, 1, 2"),
        ("names: {'0': cat, dog: 1}", "not 0, 1, 2"),
        ("names: cat", "names: got 'cat'"),
        (f"{YAML}kpt_shape: [17, 3]", "kpt_shape"),
        (f"{YAML}path: /nowhere", "path: /nowhere is no folder"),
        (f"{YAML}path: [1]", "path: got a list"),
        ("train: 3\nnames: [cat]", "train: got 3"),
        ("train: images/none\nnames: [cat]", "images/none is neither"),
        ("train: pipe.txt\nnames: [cat]", "pipe.txt is neither"),
        ("train: labels/train\nnames: [cat]", "no images in"),
        ("train: [images, images/train]\nnames: [cat, dog]", "0.jpg is listed twice"),
        (f"{YAML}download: !!python/object/apply:os.system ['touch ran']", "YAML tags"),
        (BOMB, "more than"),
        ("names: [", "not valid YAML"),
    ],
)
def test_a_data_yaml_that_is_refused(yaml, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "set", BOX, yaml=yaml)
    os.mkfifo(tmp_path / "set/pipe.txt")
    with pytest.raises(Exception, match=reason) as caught:
        split_of(file)
    assert "\n" not in str(caught.value) and not Path("ran").exists()


def test_download_is_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "download: |\n  open('ran', 'w')\n"
    assert len(split_of(write(tmp_path / "set", BOX, yaml=YAML + code)).records) == 1
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "line, reason",
    [
        ("../secret.jpg", "leads out"),
        ("/etc/passwd", "leads out"),
        ("images/train/9.jpg", "is missing"),
        ("labels/train/0.txt", "has none of the endings"),
        ("a\0b.jpg", "expected the name"),
    ],
)
def test_lines_of_a_list_stay_in_the_folder(line, reason, tmp_path):
    yaml = "train: train.txt\nnames: [cat, dog]"
    file = write(tmp_path / "set", BOX, yaml=yaml)
    list_, image = tmp_path / "set/train.txt", tmp_path / "set/images/train/0.jpg"
    list_.write_text(f"./images/train/0.jpg\n{line}\n")
    with pytest.raises(DataError, match=rf"train\.txt:2: .*{reason}"):
        split_of(file)
    list_.write_text(f"\n{image}\n")
    assert split_of(file).records[0]["file_name"] == str(image)


@pytest.mark.parametrize(
    "image, label, stated",
    [
        ("set/train/images/0.jpg", "set/train/labels/0.txt", "../train/images"),
        ("set/images/a/images/b/0.jpg", "set/images/a/labels/b/0.txt", "images/a/images/b"),
        ("set/photos/0.jpg", "set/photos/0.txt", "photos"),
        ("other/0.jpg", "other/0.txt", "../other"),
        ("all/mine/images/0.jpg", "all/mine/labels/0.txt", "images\npath: mine"),
    ],
)
def test_where_folders_and_labels_are(image, label, stated, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "all"))
    for name in ("set/data.yaml", image, label):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "set/data.yaml").write_text(f"train: {stated}\nnames: [cat, dog]")
    Image.new("RGB", (60, 40)).save(tmp_path / image)
    (tmp_path / label).write_text(BOX)
    (record,) = split_of(tmp_path / "set/data.yaml").records
    assert Path(record["file_name"]).resolve() == tmp_path / image
    assert len(record["annotations"]) == 1
    (tmp_path / label).unlink()
    cache_clear()
    with pytest.raises(DataError, match="none of 1 image has a label file; the first is"):
        split_of(tmp_path / "set/data.yaml")


def test_a_cache_is_not_read_and_the_digest_is_of_the_labels(tmp_path):
    files = [write(tmp_path / part / "set", BOX) for part in "ab"]
    (tmp_path / "a/set/labels/train.cache").write_bytes(b"\x80\x04]")
    first, second = (split_of(file).annotations_sha256 for file in files)
    assert first == second
    (tmp_path / "b/set/labels/train/0.txt").write_text(TRIANGLE)
    other = write(tmp_path / "c" / "set", TRIANGLE)
    assert split_of(other).annotations_sha256 != first


def test_images_that_only_ultralytics_reads_are_named(tmp_path):
    file = write(tmp_path / "set", BOX)
    (tmp_path / "set/images/train/1.HEIC").touch()
    with pytest.raises(DataError, match=r"1\.HEIC: not read in this format"):
        split_of(file)


def with_split(folder: Path, split: str, *labels: str | None) -> None:
    """Write images/<split> beside images/train."""
    write(folder / split, *labels)
    for kind in ("images", "labels"):
        if (source := folder / split / kind / "train").is_dir():
            source.rename(folder / kind / split)


def resolved(file: Path, *overrides: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    cfg = default_task()
    cfg.DATASETS.YOLO_YAML = str(file)
    cfg.merge_from_list(list(overrides))
    resolve_names(cfg, overrides[::2], eval_only=False)
    return cfg.DATASETS.TRAIN, cfg.DATASETS.TEST


@pytest.mark.parametrize("key", ["val", "validation", "valid"])
def test_names_of_the_validation_split(key, tmp_path):
    file = write(tmp_path / "set", BOX, yaml=f"{YAML}{key}: images/train\n")
    assert resolved(file) == (("set_train",), ("set_val",))


def test_paths_of_windows(tmp_path):
    yaml = "path: .\\\ntrain: images\\train\nval: val.txt\nnames: [cat, dog]"
    file = write(tmp_path / "set", BOX, BOX, yaml=yaml)
    (tmp_path / "set/val.txt").write_bytes(b"images\\train\\0.jpg\r\n.\\images\\train\\1.jpg\r\n")
    for split in ("train", "val"):
        records = split_of(file, split).records
        assert [len(record["annotations"]) for record in records] == [1, 1]


def test_missing_folders_are_named_and_not_called_no_split(tmp_path, capsys):
    places = "train: C:\\data\\images\\train\nval: C:\\data\\images\\val\n"
    file = write(tmp_path / "set", BOX, yaml=f"{places}names: [cat, dog]")
    named = r"set/data\.yaml: train: .*/C:/data/images/train is neither a folder nor"
    with pytest.raises(DataError, match=named):
        resolved(file)
    assert main(["doctor", "--yolo", str(file)]) == 3
    shown = capsys.readouterr().out
    assert re.search(named, shown) and "C:/data/images/val" in shown


@pytest.mark.parametrize("test", ["test: images/none\n", "test: images/test\n"])
def test_a_test_split_that_cannot_be_used_is_replaced_by_val(test, tmp_path, capsys):
    """There is no folder, or its images have no labels."""
    file = write(tmp_path / "set", BOX, yaml=f"{YAML}val: images/val\n{test}")
    with_split(tmp_path / "set", "val", BOX)
    with_split(tmp_path / "set", "test", None, None)
    assert resolved(file) == (("set_train",), ("set_val",))
    chosen = resolved(file, "DATASETS.TEST", "('set_train',)")
    assert chosen == (("set_train",), ("set_train",))
    assert main(["doctor", "--yolo", str(file)]) == 0
    shown = capsys.readouterr().out
    why = "none is neither" if "none" in test else "none of 2 images has a label file"
    assert (
        re.search(f"absent  set_test .*{why}", shown)
        and "next: python -m benchmarks train" in shown
    )


@pytest.mark.parametrize(
    "boxes, noted", [(["1 .2 .2 .7 .9", "0 .4 .5 .9 .8"], True), ([BOX], False)]
)
def test_boxes_of_two_corners_are_noted(boxes, noted, tmp_path):
    notes = split_of(write(tmp_path / "set", "\n".join(boxes), BOX if not noted else "")).notes
    assert any("look like x1 y1 x2 y2, but YOLO's format" in note for note in notes) == noted


@pytest.mark.parametrize("ending", ["jfif", "jpe", "gif", "ppm", "JFIF"])
def test_images_of_other_endings_are_read(ending, tmp_path):
    file = write(tmp_path / "set", BOX, BOX)
    image = tmp_path / "set/images/train/0.jpg"
    Image.open(image).save(image, {"gif": "GIF", "ppm": "PPM"}.get(ending, "JPEG"))
    image.rename(image.with_suffix(f".{ending}"))
    assert [len(record["annotations"]) for record in split_of(file).records] == [1, 1]


def test_names_that_are_not_utf_8(tmp_path, capsys):
    """The metrics' packages get a readable name."""
    file = write(tmp_path / "set", BOX, yaml=f"{YAML}val: images/train\n")
    for kind, ending in (("images", "jpg"), ("labels", "txt")):
        folder = tmp_path / "set" / kind / "train"
        os.rename(folder / f"0.{ending}", os.fsencode(folder) + b"/caf\xe9." + ending.encode())
    assert main(["doctor", "--yolo", str(file), "--verify"]) == 0
    assert "bbox/AP 100.0" in capsys.readouterr().out


def test_relative_folders_are_read_as_absolute_ones(tmp_path, monkeypatch):
    """The first folder of a relative path has no slash before it."""
    write(tmp_path / "set/more", f"{BOX}\n{BOX}", BOX)
    yaml = YAML.replace("images/train", "[images/train, more/images/train]")
    file = write(tmp_path / "set", BOX, yaml=yaml)
    absolute = split_of(file)
    monkeypatch.chdir(tmp_path / "set")
    cache_clear()
    relative = read("set_train", YOLO_YAML="data.yaml")
    objects = [len(record["annotations"]) for record in relative.records]
    assert objects == [1, 2, 1]
    assert relative.annotations_sha256 == absolute.annotations_sha256


def test_the_dataset_s_own_folder_is_read_and_not_a_neighbor_s(tmp_path):
    """Roboflow's ../train/images, in a folder that lies in another dataset."""
    image, label = "train/images/0.jpg", "train/labels/0.txt"
    for root, text in ((tmp_path / "all", ""), (tmp_path / "all/set", BOX)):
        for name in (image, label):
            (root / name).parent.mkdir(parents=True)
        Image.new("RGB", (60, 40)).save(root / image)
        (root / label).write_text(text)
    file = tmp_path / "all/set/data.yaml"
    file.write_text("train: ../train/images\nnames: [cat, dog]")
    split = split_of(file)
    assert [record["file_name"] for record in split.records] == [str(tmp_path / "all/set" / image)]
    own, other = tmp_path / "all/set/train/images", tmp_path / "all/set/../train/images"
    assert split.notes == (
        f"../train/images is read as {own}, as Roboflow means it; {other} exists, too",
    )


@pytest.mark.parametrize(
    "folder, split, images, objects",
    [
        ("y27_backslash", "train", 8, 16),
        ("y27_backslash", "val", 4, 8),
        ("y36_partial", "train", 14, 28),
        ("y01_cwd", "train", 8, 16),
        ("y38_sibling/second", "train", 8, 16),
    ],
)
def test_folders_that_others_tools_wrote(folder, split, images, objects, shared_data, monkeypatch):
    """Started from the dataset's folder."""
    monkeypatch.chdir(shared_data / "oddities" / folder)
    found = read(f"{Path(folder).name}_{split}", YOLO_YAML="data.yaml")
    assert len(found.records) == images
    assert sum(len(record["annotations"]) for record in found.records) == objects
