"""The COCO reader: Detectron2's records, a dataset of one's own, and what is refused."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from detection.config.task import default_task, load_task
from detection.datasets import cache_clear, coco, custom_names, known, read_split
from detection.train_net import main
from moco.common.errors import DataError, UserError
from tests.oracles.broken_coco import BROKEN, COUNTED, second, write_good
from tests.oracles.tiny_coco import write_coco

ROOT = Path(__file__).resolve().parents[3]
R18 = "configs/voc/faster_rcnn_R_18_C4_small.yaml"
MASK_RCNN = "configs/coco/mask_rcnn_R_50_FPN_1x.yaml"


pytestmark = pytest.mark.usefixtures("fresh_cache")


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


def read(name: str, **datasets: object):
    cfg = default_task()
    for key, value in datasets.items():
        cfg.DATASETS[key] = str(value)
    return read_split(name, cfg)


@pytest.mark.parametrize("name", ["coco_2017_train", "coco_2017_val", "keypoints_coco_2017_train"])
def test_records_and_metadata_are_detectron2s(name, detectron2, root):
    from detectron2.data import MetadataCatalog
    from detectron2.data.datasets.coco import load_coco_json

    split = read(name)
    source = known(default_task())[name]
    key = f"copy_of_{name}_{root.name}"
    theirs = load_coco_json(source.json_file, source.image_root, key)
    assert list(split.records) == theirs
    assert sum(len(record["annotations"]) for record in theirs) >= 4
    assert any(obj["iscrowd"] for record in theirs for obj in record["annotations"])
    loaded, builtin = MetadataCatalog.get(key), MetadataCatalog.get(name)
    assert split.metadata["thing_dataset_id_to_contiguous_id"] == (
        loaded.thing_dataset_id_to_contiguous_id
    )
    assert split.metadata["thing_classes"] == loaded.thing_classes == builtin.thing_classes
    assert split.classes == tuple(builtin.thing_classes)
    for field in ("keypoint_names", "keypoint_flip_map", "keypoint_connection_rules"):
        assert split.metadata.get(field) == builtin.get(field)
    assert split.metadata["json_file"] == str(root / annotations)
    assert split.metadata["image_root"] == str(root / images)
    assert split.evaluator_type == builtin.evaluator_type == "coco"
    assert split.has_masks
    assert split.has_keypoints == name.startswith("keypoints")
    assert all(os.path.isfile(record["file_name"]) for record in split.records)


def test_densepose_records_are_detectron2s_with_more_keys(detectron2, root):
    from detectron2.data.datasets.coco import load_coco_json

    for name in ("densepose_coco_2014_train", "densepose_coco_2014_minival"):
        split = read(name)
        _, images, annotations = coco.BUILTIN[name]
        theirs = load_coco_json(
            str(root / annotations), str(root / images), f"x_{name}", list(coco.DENSEPOSE_KEYS)
        )
        assert list(split.records) == theirs
        assert split.evaluator_type == "densepose" and split.classes == ("person",)
        assert len(split.records[0]["annotations"][0]["dp_masks"]) == 14


def test_real_annotations_are_read_as_by_detectron2(detectron2, shared_data, monkeypatch):
    from detectron2.data.datasets.coco import load_coco_json

    monkeypatch.setenv("DETECTRON2_DATASETS", str(shared_data))
    for name in ("coco_2017_train", "coco_2017_val"):
        split = read(name)
        _, images, annotations = coco.BUILTIN[name]
        theirs = load_coco_json(
            str(shared_data / annotations), str(shared_data / images), f"shared_{name}"
        )
        assert list(split.records) == theirs and len(theirs) == 100
        assert split.notes[-1].startswith("100 images, the official split has ")


def test_the_names_and_paths_are_detectron2s(detectron2, monkeypatch):
    from detectron2.data import DatasetCatalog, MetadataCatalog

    sources = coco.sources(default_task())
    theirs = {
        name
        for name in DatasetCatalog.list()
        if name.startswith(("coco_2", "keypoints_coco_2"))
        and not name.endswith(("panoptic", "separated", "stuffonly", "test", "test-dev"))
    }
    densepose = {name for name in sources if name.startswith("densepose")}
    assert set(sources) - densepose == {name for name in theirs if "panoptic" not in name}
    for name in set(sources) - densepose:
        meta, (_, images, annotations) = MetadataCatalog.get(name), coco.BUILTIN[name]
        assert meta.image_root.endswith(f"/{images}")
        assert meta.json_file.endswith(f"/{annotations}")


def test_the_densepose_names_are_the_projects(detectron2):
    pytest.importorskip("densepose", reason="the DensePose project is not installed")
    from densepose.data.datasets.coco import DATASETS

    theirs = {entry.name: entry for entry in DATASETS}
    ours = {name: row for name, row in coco.BUILTIN.items() if row[0] == "densepose"}
    assert len(ours) == 4
    for name, (_, images, annotations) in ours.items():
        assert theirs[name].images_root == images
        assert theirs[name].annotations_fpath == annotations


def own(file: Path, **datasets: object) -> tuple[str, dict[str, object]]:
    """The name and the keys of a dataset of one's own."""
    return f"{file.parent.name}_{file.stem}", {"COCO_TRAIN_JSON": file, **datasets}


@pytest.mark.parametrize("engine", ["embedded", "detectron2"])
@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_stop_both_engines_before_training(
    case, engine, tmp_path, request, monkeypatch
):
    if engine == "detectron2":
        request.getfixturevalue("detectron2")
    monkeypatch.chdir(ROOT)
    edit, message = BROKEN[case]
    file = write_good(tmp_path / "set", edit)
    opts = ["MODEL.WEIGHTS", "random", "OUTPUT_DIR", str(tmp_path / "o")]
    for role in ("TRAIN", "TEST"):
        opts += [
            f"DATASETS.COCO_{role}_JSON",
            str(file),
            f"DATASETS.COCO_{role}_ROOT",
            str(file.parent),
        ]
    with pytest.raises(DataError, match=message) as caught:
        load_task(R18, opts, engine)
    assert "objects.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def in_run_lengths(*numbers: int, crowd: int = 0):
    """An edit: these annotations' masks as uncompressed run lengths."""

    def edit(content):
        for row in content["annotations"]:
            if row["id"] in numbers:
                row |= {"segmentation": {"size": [40, 60], "counts": [99, 1, 2300]}}
                row["iscrowd"] = crowd

    return edit


def check_only(file: Path, engine: str, *opts: str, task: str = MASK_RCNN) -> int:
    argv = ["--config-file", str(ROOT / task), "--engine", engine, "--check-only"]
    words = ["MODEL.WEIGHTS", "random", "OUTPUT_DIR", str(file.parent / "out"), "SEED", "1"]
    for role in ("TRAIN", "TEST"):
        words += [f"DATASETS.COCO_{role}_JSON", str(file)]
        words += [f"DATASETS.COCO_{role}_ROOT", str(file.parent)]
    return main([*argv, *words, *opts])


@pytest.mark.parametrize("engine", ["embedded", "detectron2"])
def test_run_lengths_where_polygons_are_learned_from(engine, tmp_path, request):
    """A crowd's are no fault, for it is not learned from."""
    if engine == "detectron2":
        request.getfixturevalue("detectron2")
    file = write_good(tmp_path / "set", in_run_lengths(12, 13))
    with pytest.raises(DataError) as caught:
        check_only(file, engine)
    assert str(caught.value).startswith(
        f"{file}: masks in run lengths, not in polygons: 2, the first of annotation 12; set "
        "INPUT.MASK_FORMAT bitmask; "
    )
    assert not (tmp_path / "set" / "out").exists()
    assert check_only(file, engine, "INPUT.MASK_FORMAT", "bitmask") == 0
    assert check_only(file, engine, task=R18) == 0  # boxes alone
    crowds = write_good(tmp_path / "crowds", in_run_lengths(12, 13, crowd=1))
    assert check_only(crowds, engine) == 0


@pytest.mark.parametrize("case", COUNTED)
def test_what_detectron2_clips_or_leaves_out_is_counted(case, detectron2, tmp_path):
    from detectron2.data.datasets.coco import load_coco_json

    edit, note = COUNTED[case]
    file = write_good(tmp_path / "set", edit)
    name, keys = own(file)
    split = read(name, **keys)
    assert note in split.notes
    assert list(split.records) == load_coco_json(str(file), str(file.parent), f"{name}_{tmp_path}")


def test_a_file_of_ones_own(detectron2, tmp_path):
    """Classes in the order of the file's ids, and Detectron2's records."""
    from detectron2.data.datasets.coco import load_coco_json

    file = write_good(tmp_path / "mine")
    name, keys = own(file)
    assert name == "mine_objects"
    split = read(name, **keys)
    assert split.classes == ("red", "blue") and split.notes == ()
    assert split.metadata["thing_dataset_id_to_contiguous_id"] == {3: 0, 7: 1}
    assert list(split.records) == load_coco_json(str(file), str(file.parent), f"x_{tmp_path}")
    assert split.evaluator_type == "coco" and split.has_masks


@pytest.mark.parametrize(("key", "value"), [("area", None), ("area", "x"), ("iscrowd", None)])
def test_what_only_the_metric_needs(key, value, tmp_path):
    """Without it Detectron2 would train to the end, and then fail."""
    file = write_good(tmp_path / "set", second(**{key: value}))
    assert len(read("set_objects", COCO_TRAIN_JSON=file).records) == 2
    with pytest.raises(DataError, match=rf"annotation 12: {key} is .*metric needs the number"):
        read("set_objects", COCO_TEST_JSON=file)


def test_keypoints_without_their_number(tmp_path):
    file = write_good(tmp_path / "set", with_keypoints)
    assert read("set_objects", COCO_TRAIN_JSON=file).has_keypoints
    with pytest.raises(DataError, match=r"annotation 11: num_keypoints is None, and COCO's metric"):
        read("set_objects", COCO_TEST_JSON=file)


def test_names_of_ones_own_files(tmp_path):
    cfg = default_task()
    assert custom_names(cfg) == {}
    train, test = write_good(tmp_path / "a"), write_good(tmp_path / "b")
    cfg.DATASETS.COCO_TEST_JSON = str(test)
    assert custom_names(cfg) == {"TEST": "b_objects"}
    cfg.DATASETS.COCO_TRAIN_JSON = str(train)
    assert custom_names(cfg) == {"TRAIN": "a_objects", "TEST": "b_objects"}
    assert {"a_objects", "b_objects", "coco_2017_val"} <= set(known(cfg))
    cfg.DATASETS.COCO_TRAIN_JSON = str(test)
    assert len(read_split("b_objects", cfg).records) == 2
    cfg.DATASETS.COCO_TRAIN_JSON = str(write_good(tmp_path / "elsewhere" / "b"))
    with pytest.raises(UserError, match="would both be named b_objects; rename"):
        known(cfg)
    cfg.DATASETS.COCO_TRAIN_JSON = ""
    cfg.DATASETS.COCO_TRAIN_ROOT = "x"
    with pytest.raises(UserError, match=r"COCO_TRAIN_ROOT belongs to DATASETS.COCO_TRAIN_JSON"):
        known(cfg)


@pytest.mark.parametrize(
    "images", [".", "images", "../images", "../objects", "..", "../data", "../images/objects"]
)
def test_images_near_the_file_are_found(images, tmp_path):
    file = write_good(tmp_path / "set" / "annotations")
    folder = file.parent / images
    folder.mkdir(parents=True, exist_ok=True)
    for image in sorted(file.parent.glob("*.jpg")):
        image.rename(folder.resolve() / image.name)
    name, keys = own(file)
    split = read(name, **keys)
    assert Path(split.metadata["image_root"]) == folder.resolve()


def test_images_in_several_places_or_none(tmp_path):
    """train/1.jpg and val/1.jpg are other images: the file's own name decides, or the user."""
    file = write_good(tmp_path / "set" / "annotations")
    for folder in ("train", "val"):
        (file.parent.parent / folder).mkdir()
        for name in ("1.jpg", "2.jpg"):
            (file.parent.parent / folder / name).write_bytes((file.parent / name).read_bytes())
    for image in file.parent.glob("*.jpg"):
        image.unlink()
    name, keys = own(file)
    with pytest.raises(
        DataError, match=r"1.jpg is in .*train, .*val; set DATASETS.COCO_TRAIN_ROOT"
    ):
        read(name, **keys)
    named = file.rename(file.with_name("my_val.json"))
    name, keys = own(named)
    assert Path(read(name, **keys).metadata["image_root"]).name == "val"
    name, keys = own(named, COCO_TRAIN_ROOT=file.parent.parent / "train")
    assert Path(read(name, **keys).metadata["image_root"]).name == "train"
    for folder in ("train", "val"):
        (file.parent.parent / folder / "1.jpg").unlink()
    cache_clear()
    name, keys = own(named)
    with pytest.raises(DataError, match=r"1.jpg is not near it; set DATASETS.COCO_TRAIN_ROOT"):
        read(name, **keys)


def with_keypoints(content):
    for category in content["categories"]:
        category["keypoints"] = ["nose", "left_ear", "right_ear"]
        category["skeleton"] = [[1, 2], [1, 3]]
    for row in content["annotations"]:
        row["keypoints"] = [6, 7, 2, 8, 9, 1, 0, 0, 0]


def test_keypoints_of_ones_own(detectron2, tmp_path):
    from detectron2.data.datasets.coco import load_coco_json

    file = write_good(tmp_path / "set", with_keypoints)
    name, keys = own(file)
    split = read(name, **keys)
    assert split.has_keypoints
    assert split.metadata["keypoint_names"] == ("nose", "left_ear", "right_ear")
    assert split.metadata["keypoint_flip_map"] == (("left_ear", "right_ear"),)
    lines = [line[:2] for line in split.metadata["keypoint_connection_rules"]]
    assert lines == [("nose", "left_ear"), ("nose", "right_ear")]
    assert list(split.records) == load_coco_json(str(file), str(file.parent), f"x_{tmp_path}")


@pytest.mark.parametrize(
    ("keypoints", "message"),
    [
        ([6, 7, 2], "expected 3 keypoints of .* got 3 numbers"),
        ([6, 7, 3] * 3, "v = 0, 1 or 2"),
        ([6, float("nan"), 2] * 3, "keypoints is not a list of finite numbers"),
    ],
)
def test_odd_keypoints_are_refused(keypoints, message, tmp_path):
    def edit(content):
        with_keypoints(content)
        content["annotations"][1]["keypoints"] = keypoints

    name, keys = own(write_good(tmp_path / "set", edit))
    with pytest.raises(DataError, match=rf"annotation 12: .*{message}"):
        read(name, **keys)


def test_the_minival_files_of_2014_may_hold_an_annotation_twice(tiny, tmp_path, monkeypatch):
    """As published; Detectron2 lets them pass, and nothing else."""
    shutil.copytree(tiny / "coco", tmp_path / "coco")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    for split, passes in (("minival2014", True), ("train2014", False)):
        file = tmp_path / "coco" / "annotations" / f"instances_{split}.json"
        content = json.loads(file.read_text())
        content["annotations"].append(dict(content["annotations"][0]))
        file.write_text(json.dumps(content))
        name = f"coco_2014_{split.removesuffix('2014')}"
        if passes:
            assert any("with the id of another one" in note for note in read(name).notes)
        else:
            with pytest.raises(DataError, match="there are two with this id"):
                read(name)


def test_other_categories_under_cocos_names(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    file = write_good(tmp_path / "coco" / "annotations")
    for name, what in (("instances", "COCO's 80"), ("person_keypoints", "person alone")):
        shutil.copy(file, file.with_name(f"{name}_val2017.json"))
        prefix = "" if name == "instances" else "keypoints_"
        with pytest.raises(DataError, match=f"the categories are not {what}; .*COCO_TRAIN_JSON"):
            read(f"{prefix}coco_2017_val")


@pytest.mark.parametrize("engine", ["embedded", "detectron2"])
@pytest.mark.parametrize("what", ["nothing", "no annotations", "no images", "half the images"])
def test_a_missing_or_half_data_set_shows_what_is_expected_where(
    what, engine, tmp_path, request, monkeypatch
):
    if engine == "detectron2":
        request.getfixturevalue("detectron2")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    monkeypatch.chdir(ROOT)
    opts = ["MODEL.WEIGHTS", "random", "OUTPUT_DIR", str(tmp_path / "o")]
    opts += ["DATASETS.TRAIN", "('coco_2017_train',)", "DATASETS.TEST", "('coco_2017_val',)"]
    if what != "nothing":
        write_coco(tmp_path, {"train2017": 4, "val2017": 1})
    if what == "no annotations":
        (tmp_path / "coco/annotations/instances_train2017.json").unlink()
    elif what != "nothing":
        images = sorted((tmp_path / "coco/train2017").iterdir())
        for image in images[: 4 if what == "no images" else 2]:
            image.unlink()
    started = time.process_time()
    with pytest.raises(DataError) as caught:
        load_task(R18, opts, engine)
    assert time.process_time() - started < 10
    for word in (
        "coco/annotations/instances_train2017.json",
        "coco/train2017/*.jpg",
        "$DETECTRON2_DATASETS",
        "https://cocodataset.org/#download",
    ):
        assert word in str(caught.value)
    if "images" in what:
        number = 2 if what.startswith("half") else 4
        assert f"missing ({number} of the 4 images" in str(caught.value)


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
