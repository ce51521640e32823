"""The COCO reader: Detectron2's records, custom datasets, and what is refused."""

import json
import os
import re
import shutil
import unicodedata
from pathlib import Path

import pytest

from detection.config.task import default_task
from detection.datasets import custom_names, known_sources, read_split
from detection.datasets.__main__ import main as doctor
from detection.datasets.base import with_masks
from detection.datasets.coco import DENSEPOSE_KEYS, COCOSource
from detection.train_net import main
from moco.common.errors import DataError
from tests.detection.datasets.conftest import read
from tests.oracles.broken_coco import COUNTED, HEIGHT, WIDTH, write_good
from tests.oracles.tiny_coco import write_coco

ROOT = Path(__file__).resolve().parents[3]
R18 = "configs/voc/faster_rcnn_R_18_C4_small.yaml"
MASK_RCNN = "configs/coco/mask_rcnn_R_50_FPN_1x.yaml"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """All kinds of files: instances and keypoints of 2017, DensePose of 2014."""
    folder = tmp_path_factory.mktemp("coco")
    write_coco(folder, {"train2017": 4, "val2017": 3}, keypoints=True)
    write_coco(folder, {"train2014": 3, "minival2014": 2}, densepose=True, seed=1)
    return folder


@pytest.fixture
def root(tiny, monkeypatch) -> Path:
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tiny))
    return tiny


def read_custom(file: Path, **datasets: object):
    return read(f"{file.parent.name}_{file.stem}", COCO_TRAIN_JSON=file, **datasets)


def detectron2s(source, *keys: str) -> list:
    """Return the records of Detectron2's own reader."""
    from detectron2.data.datasets.coco import load_coco_json

    name = f"copy_of_{source.json_file}"
    return load_coco_json(source.json_file, source.image_root, name, list(keys))


@pytest.mark.detectron2
@pytest.mark.parametrize("name", ["coco_2017_train", "coco_2017_val", "keypoints_coco_2017_train"])
def test_records_and_metadata_are_detectron2s(name, root):
    from detectron2.data import MetadataCatalog

    split, source = read(name), known_sources(default_task())[name]
    theirs = detectron2s(source)
    assert list(split.records) == theirs
    assert sum(len(record["annotations"]) for record in theirs) >= 4
    assert any(obj["iscrowd"] for record in theirs for obj in record["annotations"])
    assert all(os.path.isfile(record["file_name"]) for record in split.records)
    builtin = MetadataCatalog.get(name)
    loaded = MetadataCatalog.get(f"copy_of_{source.json_file}")
    assert split.metadata["thing_dataset_id_to_contiguous_id"] == (
        loaded.thing_dataset_id_to_contiguous_id
    )
    assert split.metadata["thing_classes"] == loaded.thing_classes == builtin.thing_classes
    assert split.classes == tuple(builtin.thing_classes)
    for field in ("keypoint_names", "keypoint_flip_map", "keypoint_connection_rules"):
        assert split.metadata.get(field) == builtin.get(field)
    assert split.metadata["json_file"] == source.json_file
    assert split.metadata["image_root"] == source.image_root
    assert split.evaluator_type == builtin.evaluator_type == "coco"
    assert split.has_masks and split.has_keypoints == name.startswith("keypoints")


@pytest.mark.detectron2
@pytest.mark.parametrize("name", ["densepose_coco_2014_train", "densepose_coco_2014_minival"])
def test_densepose_records_are_detectron2s_with_more_keys(name, root):
    split = read(name)
    assert list(split.records) == detectron2s(known_sources(default_task())[name], *DENSEPOSE_KEYS)
    assert split.evaluator_type == "densepose" and split.classes == ("person",)
    assert len(split.records[0]["annotations"][0]["dp_masks"]) == 14


@pytest.mark.detectron2
@pytest.mark.parametrize("name", ["coco_2017_train", "coco_2017_val"])
def test_real_annotations_are_read_as_by_detectron2(name, shared_data, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(shared_data))
    split = read(name)
    theirs = detectron2s(known_sources(default_task())[name])
    assert list(split.records) == theirs and len(theirs) == 100
    assert split.notes[-1].startswith("100 images, the official split has ")


@pytest.mark.detectron2
def test_names_and_paths_are_detectron2s(monkeypatch):
    monkeypatch.delenv("DETECTRON2_DATASETS", raising=False)
    from detectron2.data import DatasetCatalog, MetadataCatalog

    ours = {n: s for n, s in known_sources(default_task()).items() if isinstance(s, COCOSource)}
    theirs = {
        name
        for name in DatasetCatalog.list()
        if name.startswith(("coco_2", "keypoints_coco_2"))
        and not name.endswith(("panoptic", "separated", "stuffonly", "test", "test-dev"))
    }
    assert {name for name in ours if not name.startswith("densepose")} == {
        name for name in theirs if "panoptic" not in name
    }
    metadata = {name: MetadataCatalog.get(name) for name in theirs & ours.keys()}
    expected = {name: (meta.image_root, meta.json_file) for name, meta in metadata.items()}
    try:
        from densepose.data.datasets.coco import DATASETS
    except ImportError:
        pass
    else:
        expected |= {e.name: (e.images_root, e.annotations_fpath) for e in DATASETS}
    for name, source in ours.items():
        images, annotations = expected.get(name, (source.image_root, source.json_file))
        assert images.endswith(source.image_root.removeprefix("datasets/"))
        assert annotations.endswith(source.json_file.removeprefix("datasets/"))


def options(file: Path) -> list[str]:
    opts = ["MODEL.WEIGHTS", "random", "OUTPUT_DIR", str(file.parent / "out"), "SEED", "1"]
    for role in ("TRAIN", "TEST"):
        opts += [f"DATASETS.COCO_{role}_JSON", str(file)]
        opts += [f"DATASETS.COCO_{role}_ROOT", str(file.parent)]
    return opts


def in_run_lengths(*numbers: int, crowd: int = 0):
    """Return an edit that turns masks of annotations into uncompressed run lengths."""

    def edit(content):
        for row in content["annotations"]:
            if row["id"] in numbers:
                row |= {"segmentation": {"size": [40, 60], "counts": [99, 1, 2300]}}
                row["iscrowd"] = crowd

    return edit


def check_only(file: Path, engine: str, *opts: str, task: str = MASK_RCNN) -> int:
    argv = ["--config-file", str(ROOT / task), "--engine", engine, "--check-only"]
    return main([*argv, *options(file), *opts])


def test_run_lengths_where_polygons_are_learned_from(engine, tmp_path):
    """A crowd's are no fault, for it is not learned from."""
    file = write_good(tmp_path / "set", in_run_lengths(12, 13))
    assert check_only(file, engine, "INPUT.MASK_FORMAT", "bitmask") == 0
    assert check_only(file, engine, task=R18) == 0  # boxes alone
    crowds = write_good(tmp_path / "crowds", in_run_lengths(12, 13, crowd=1))
    assert check_only(crowds, engine) == 0


@pytest.mark.parametrize("case", COUNTED)
def test_what_detectron2_clips_or_leaves_out_is_counted(case, tmp_path):
    edit, note = COUNTED[case]
    assert note in read_custom(write_good(tmp_path / "set", edit)).notes


def with_keypoints(content):
    for category in content["categories"]:
        category["keypoints"] = ["nose", "left_ear", "right_ear"]
    for row in content["annotations"]:
        row["keypoints"] = [6, 7, 2, 8, 9, 1, 0, 0, 0]


@pytest.mark.detectron2
@pytest.mark.parametrize("edit", [None, with_keypoints, *(edit for edit, _ in COUNTED.values())])
def test_custom_records_are_detectron2s(edit, tmp_path):
    file = write_good(tmp_path / "set", edit)
    expected = detectron2s(COCOSource("", str(file), str(file.parent), ""))
    for obj in (obj for record in expected for obj in record["annotations"]):
        x, y, w, h = obj["bbox"]  # Detectron2 clips it in training only
        obj["bbox"] = [x, y, min(w, WIDTH - x), min(h, HEIGHT - y)]
    # Its reader leaves an object without a polygon out of boxes, too.
    assert list(with_masks(read_custom(file)).records) == expected


def test_a_custom_file(tmp_path):
    """Classes in the order of the file's ids."""
    split = read_custom(write_good(tmp_path / "mine"))
    assert split.name == "mine_objects" and split.notes == ()
    assert split.classes == ("red", "blue")
    assert split.metadata["thing_dataset_id_to_contiguous_id"] == {3: 0, 7: 1}
    assert split.evaluator_type == "coco" and split.has_masks


def test_custom_keypoints(tmp_path):
    split = read_custom(write_good(tmp_path / "set", with_keypoints))
    assert split.has_keypoints
    assert split.metadata["keypoint_names"] == ("nose", "left_ear", "right_ear")
    assert split.metadata["keypoint_flip_map"] == (("left_ear", "right_ear"),)


NAMES = {
    "none": (
        ["absent", "absent"],
        "the category 'red' has no 'keypoints', the list of their names",
    ),
    "empty": ([[], None], "the category 'red' has no 'keypoints', the list of their names"),
    "numbers": ([[1, 2, 3]] * 2, "the category 'red' has no 'keypoints', the list of their names"),
    "one of two": (
        [["nose", "left_ear", "right_ear"], []],
        "the categories 'red' and 'blue' have different 'keypoints'; one list is supported",
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_keypoints_that_categories_do_not_name(case, tmp_path, capsys):
    """Boxes are used; a task of keypoints names the category."""
    names, why = NAMES[case]

    def edit(content):
        with_keypoints(content)
        for category, own in zip(sorted(content["categories"], key=str), names, strict=True):
            del category["keypoints"]
            if own != "absent":
                category["keypoints"] = own

    file = write_good(tmp_path / "set", edit)
    split = read_custom(file)
    note = f"keypoints are not used, because {why}"
    assert not split.has_keypoints and split.notes[-1] == note
    assert doctor(["doctor", "--coco-json", str(file)]) == 0
    assert note in capsys.readouterr().out
    assert check_only(file, "embedded", task=R18) == 0
    with pytest.raises(DataError, match=re.escape(note)):
        check_only(file, "embedded", "MODEL.KEYPOINT_ON", "True")


def test_keypoints_of_another_tool(shared_data):
    assert doctor(["doctor", "--coco-json", str(shared_data / "oddities/c30_kpnonames")]) == 0


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark(encoding, tmp_path, capsys):
    """The metrics' packages fail on it, so they get another file."""
    file = write_good(tmp_path / "set")
    file.write_text(file.read_text(), encoding=encoding)
    assert read_custom(file).notes == ()
    assert doctor(["doctor", "--coco-json", str(file)]) == 0
    assert "bbox/AP 100.0" in capsys.readouterr().out


ACCENTED = unicodedata.normalize("NFC", "caf\u00e9")
SPELLINGS = {
    "backslashes": ("images\\1.jpg", "images/1.jpg", "images/1.jpg.* backslashes; write slashes"),
    "apart": (
        f"{ACCENTED}.jpg",
        unicodedata.normalize("NFD", f"{ACCENTED}.jpg"),
        "apart there .NFD",
    ),
    "composed": (
        unicodedata.normalize("NFD", f"{ACCENTED}.jpg"),
        f"{ACCENTED}.jpg",
        "composed there",
    ),
    "latin-1": (
        f"{ACCENTED}.jpg",
        os.fsdecode(b"caf\xe9.jpg"),
        r"caf\\udce9.jpg.*not in UTF-8.*convmv",
    ),
}


@pytest.mark.parametrize("searched", [True, False])
@pytest.mark.parametrize("case", SPELLINGS)
def test_files_of_another_spelling_are_named(case, searched, tmp_path):
    stated, actual, words = SPELLINGS[case]
    file = write_good(tmp_path / "set", lambda c: c["images"][0].update(file_name=stated))
    image = file.parent / actual
    image.parent.mkdir(exist_ok=True)
    content = json.loads(file.read_text())
    first = min(content["images"], key=lambda each: each["id"])
    assert first["file_name"] == stated
    sorted(file.parent.glob("*.jpg"))[0].rename(image)
    root = {} if searched else {"COCO_TRAIN_ROOT": file.parent}
    with pytest.raises(DataError, match=words):
        read_custom(file, **root)


def test_names_of_custom_files(tmp_path):
    cfg = default_task()
    assert custom_names(cfg) == {}
    train, test = write_good(tmp_path / "a"), write_good(tmp_path / "b")
    cfg.DATASETS.COCO_TEST_JSON = str(test)
    assert custom_names(cfg) == {"TEST": "b_objects"}
    cfg.DATASETS.COCO_TRAIN_JSON = str(train)
    assert custom_names(cfg) == {"TRAIN": "a_objects", "TEST": "b_objects"}
    assert {"a_objects", "b_objects", "coco_2017_val"} <= set(known_sources(cfg))
    cfg.DATASETS.COCO_TRAIN_JSON = str(test)
    assert len(read_split("b_objects", cfg).records) == 2


@pytest.mark.parametrize(
    "images", [".", "images", "../images", "../objects", "..", "../data", "../images/objects"]
)
def test_images_near_the_file_are_found(images, tmp_path):
    file = write_good(tmp_path / "set" / "annotations")
    folder = file.parent / images
    folder.mkdir(parents=True, exist_ok=True)
    for image in sorted(file.parent.glob("*.jpg")):
        image.rename(folder.resolve() / image.name)
    assert Path(read_custom(file).metadata["image_root"]) == folder.resolve()


def test_images_in_several_places_or_none(tmp_path):
    """train/1.jpg and val/1.jpg are other images: the file's own name decides, or the user."""
    file = write_good(tmp_path / "set" / "annotations")
    folders = [file.parent.parent / name for name in ("train", "val")]
    for folder in folders:
        folder.mkdir()
        for image in file.parent.glob("*.jpg"):
            shutil.copy(image, folder)
    for image in file.parent.glob("*.jpg"):
        image.unlink()
    named = file.rename(file.with_name("my_val.json"))
    assert Path(read_custom(named).metadata["image_root"]) == folders[1]
    chosen = read_custom(named, COCO_TRAIN_ROOT=folders[0])
    assert Path(chosen.metadata["image_root"]) == folders[0]


def test_the_minival_files_of_2014_may_hold_an_annotation_twice(tiny, tmp_path, monkeypatch):
    """The published files do, and Detectron2 accepts them."""
    shutil.copytree(tiny / "coco", tmp_path / "coco")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    for split in ("minival", "train"):
        file = tmp_path / "coco" / "annotations" / f"instances_{split}2014.json"
        content = json.loads(file.read_text())
        content["annotations"].append(dict(content["annotations"][0]))
        file.write_text(json.dumps(content))
    assert any("with the id of another one" in note for note in read("coco_2014_minival").notes)


def test_images_are_listed_once_and_not_opened(tmp_path, monkeypatch):
    """118287 images on a network disk: one listing of the folder, not a call for each."""
    write_coco(tmp_path, {"val2017": 3})
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    for image in (tmp_path / "coco/val2017").iterdir():
        image.write_bytes(b"")
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    assert len(read("coco_2017_val").records) == 3
    assert listed == [str(tmp_path / "coco/val2017")]
