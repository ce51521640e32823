"""Loading of tasks: the same files for both engines, and resolved keys."""

import json
import re
from pathlib import Path

import pytest

from detection.config.keys import protocol_sha256
from detection.config.task import (
    default_task,
    load_task,
    resolved_config,
)
from detection.datasets import cache_clear
from detection.datasets.__main__ import main as doctor
from detection.embedded.supported import check_supported
from detection.modeling.backbones import backbone_type
from moco.common.cfgnode import flatten, load_cfg, read_yaml
from moco.common.errors import DataError, UserError
from tests.oracles.tiny_voc import VOC_NAMES, write_voc

ROOT = Path(__file__).resolve().parents[3]
LEAVES = [
    path
    for folder in ("voc", "coco", "lvis", "cityscapes", "ade20k")
    for path in sorted((ROOT / "configs" / folder).glob("*.yaml"))
]
C4_ON_VOC = [path for path in LEAVES if path.parent.name == "voc" and "_C4_" in path.name]
OTHERS = [path for path in LEAVES if path not in C4_ON_VOC and "quickstart" not in path.name]


def protocol(task):
    return protocol_sha256(resolved_config(task))


@pytest.fixture
def load(small_config, voc_folder, tmp_path):
    """`load_task` on the small task with random weights and a custom folder."""

    def call(*opts: object, engine: str = "embedded", config: str = small_config, **kwargs):
        base = ["MODEL.WEIGHTS", "random", "DATASETS.VOC_DIR", str(voc_folder)]
        base += ["OUTPUT_DIR", str(tmp_path / "out"), "MODEL.DEVICE", "cpu"]
        return load_task(config, [*base, *map(str, opts)], engine, **kwargs)

    return call


@pytest.mark.parametrize("path", LEAVES, ids=lambda path: path.stem)
def test_shipped_files_name_no_weights_and_no_normalization(path):
    flat = flatten(read_yaml(path))
    forbidden = {"MODEL.WEIGHTS", "MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD", "INPUT.FORMAT"}
    assert not forbidden & set(flat)
    frozen_at = {"1x_frozen": 5, "frozen_to_res4": 4, "25ep_frozen": 13, "frozen_small": 5}
    expected = next((n for end, n in frozen_at.items() if path.stem.endswith(end)), 0)
    is_whole = path.stem.startswith("linear_frozen") or ("_timm_" in path.stem and expected)
    expected = -1 if is_whole else expected
    assert flat["MODEL.BACKBONE.FREEZE_AT"] == expected
    if backbone_type(flat.get("MODEL.BACKBONE.NAME", "")).family == "resnet":
        frozen = "frozen_bn" in path.name
        # mmsegmentation evaluates with running averages; the other trains no batch norm.
        precise = not frozen and not path.name.startswith(("upernet", "frozen_small"))
        assert flat["TEST.PRECISE_BN.ENABLED"] is precise
        tuned = ("naiveSyncBN", "SyncBN")  # As in the official release, or in other work.
        assert flat["MODEL.RESNETS.NORM"] in (("FrozenBN",) if frozen else tuned)
    header = path.read_text().split("\n_BASE_")[0]
    assert re.search("Table|ppendix A", header) or "Not in the paper" in header
    assert f"--config-file {path.relative_to(ROOT)}" in header


@pytest.mark.parametrize("path", C4_ON_VOC, ids=lambda path: path.stem)
def test_shipped_files_load_in_both_engines(path, engine, load):
    loaded = load(engine=engine, config=str(path))
    assert loaded.name == path.stem
    assert loaded.cfg.is_frozen()
    assert loaded.cfg.MODEL.ROI_HEADS.NUM_CLASSES == 3


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_embedded_engine_has_every_task_but_densepose(path):
    if "densepose" not in path.name:
        check_supported(load_cfg(default_task(), path, []))


@pytest.mark.detectron2
def test_both_engines_resolve_alike(load, detectron2):
    """Keys, values and protocol hash are equal."""
    ours, theirs = load("SEED", 1), load("SEED", 1, engine="detectron2")
    assert flatten(ours.cfg) == flatten(theirs.cfg)
    assert protocol(ours) == protocol(theirs)


def test_protocol_hash_is_of_the_experiment_only(load, tmp_path):
    same = protocol(load("SEED", 1))
    assert protocol(load("SEED", 2, "OUTPUT_DIR", tmp_path / "b")) == same
    assert protocol(load("INPUT.FORMAT", "BGR", "DATALOADER.NUM_WORKERS", 3)) == same
    assert protocol(load("SOLVER.BASE_LR", 0.02)) != same
    assert protocol(load("TEST.PRECISE_BN.ENABLED", False)) != same


@pytest.mark.parametrize(("seed", "is_same"), [(0, True), (1, False)])
def test_protocol_hash_knows_the_data_by_content(load, voc_folder, tmp_path, seed, is_same):
    """A copy is the same dataset; other annotations under the same name are not."""
    other = write_voc(tmp_path / voc_folder.name, {"trainval": 6, "test": 3}, seed=seed)
    here, there = load("SEED", 1), load("SEED", 1, "DATASETS.VOC_DIR", other)
    assert here.test.name == there.test.name
    assert (protocol(here) == protocol(there)) == is_same


def test_random_gets_torchvisions_convention(load):
    cfg = load().cfg
    assert cfg.INPUT.FORMAT == "RGB"
    assert list(cfg.MODEL.PIXEL_MEAN) == [123.675, 116.28, 103.53]
    assert list(cfg.MODEL.PIXEL_STD) == [58.395, 57.12, 57.375]
    assert cfg.MODEL.RESNETS.STRIDE_IN_1X1 is False
    bgr = load("INPUT.FORMAT", "BGR").cfg
    assert list(bgr.MODEL.PIXEL_MEAN) == [103.53, 116.28, 123.675]
    assert list(load("MODEL.PIXEL_STD", "[1.0, 1.0, 1.0]").cfg.MODEL.PIXEL_STD) == [1, 1, 1]


def test_the_contract_is_applied(load, r18_file):
    loaded = load("MODEL.WEIGHTS", r18_file)
    assert loaded.init == "r18"
    assert loaded.weights is not None
    flat = flatten(loaded.cfg)
    for key, value in loaded.weights.contract.d2_keys().items():
        assert flat[key] == value, key


def test_a_seed_is_sampled_and_recorded(load):
    sampled = load()
    assert sampled.cfg.SEED >= 0
    assert any(str(sampled.cfg.SEED) in note for note in sampled.notes)
    assert load("SEED", 5).cfg.SEED == 5
    assert load().cfg.SEED != sampled.cfg.SEED


PLAIN_BN = "MODEL.RESNETS.NORM naiveSyncBN: one process, so this is plain BN"


def test_resuming_keeps_the_sampled_seed_and_notes_changes(load, tmp_path):
    fp32 = ("SOLVER.PRECISION", "fp32")  # auto would add a note.
    first = load(*fp32)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text(first.cfg.dump())
    again = load(*fp32, resume=True)
    assert again.cfg.SEED == first.cfg.SEED
    assert again.notes == (PLAIN_BN,) and again.warnings == first.warnings != ()
    changed = load(*fp32, "TEST.DETECTIONS_PER_IMAGE", 50, resume=True)
    changes = "resumed with other values of TEST.DETECTIONS_PER_IMAGE"
    assert set(changed.notes) == {PLAIN_BN, changes}


def test_resuming_keeps_the_precision_that_auto_chose(load, tmp_path, monkeypatch):
    """The precision stays on another processor."""
    (tmp_path / "out").mkdir()
    for fast in (True, False):
        monkeypatch.setattr("moco.engine.device.has_fast_bf16", lambda device, fast=fast: fast)
        auto = ("SOLVER.PRECISION", "auto", "MODEL.DEVICE", "cpu")
        task = load(*auto, "SEED", 1, resume=not fast)
        assert task.cfg.SOLVER.PRECISION == "bf16"
        (tmp_path / "out" / "config.yaml").write_text(task.cfg.dump())


@pytest.mark.parametrize(
    ("key", "value"), [("BASE_LR", 0.5), ("IMS_PER_BATCH", 2), ("STEPS", (99,)), ("GAMMA", 0.5)]
)
def test_keys_that_a_checkpoint_overrides_cannot_change(key, value, load, tmp_path):
    """The checkpoint restores the optimizer, so that the record would name an unused rate."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text(load("SEED", 1).cfg.dump())
    with pytest.raises(UserError, match=rf"^--resume: SOLVER\.{key} is .* was started with"):
        load(f"SOLVER.{key}", value, resume=True)
    notes = load("SOLVER.MAX_ITER", 400, resume=True).notes
    assert any(note.startswith("resumed with") for note in notes)


def as_json(cfg) -> str:
    return json.dumps(flatten(cfg), sort_keys=True)


@pytest.mark.detectron2
def test_a_resolved_config_loads_again(load, tmp_path, detectron2):
    """config.yaml of either engine is a task for either engine, with the same result."""
    first = load("SEED", 3)
    path = tmp_path / "config.yaml"
    for engine in ("embedded", "detectron2"):
        path.write_text(load("SEED", 3, engine=engine).cfg.dump())
        for reader in ("embedded", "detectron2"):
            again = load_task(str(path), [], reader)
            # Through JSON, because YAML has no tuples inside tuples.
            assert as_json(again.cfg) == as_json(first.cfg)


def test_splits_of_a_folder(load, tmp_path):
    """The splits are trainval and test, or train and val, never trainval and val."""
    assert load().cfg.DATASETS.TRAIN == ("shapes_trainval",)
    assert load().cfg.DATASETS.TEST == ("shapes_test",)
    root = write_voc(tmp_path / "own", {"train": 2, "val": 2, "trainval": 1})
    cfg = load("DATASETS.VOC_DIR", root).cfg
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("own_train",), ("own_val",))
    chosen = load("DATASETS.VOC_DIR", root, "DATASETS.TRAIN", "('own_val',)")
    assert chosen.cfg.DATASETS.TRAIN == ("own_val",)
    assert "2 of 2 test images are also training images" in chosen.warnings[-1]


def test_a_trainval_that_lacks_training_images_is_refused(load, tmp_path, capsys):
    """It is chosen before train, and would train on a part of the images in silence."""
    root = write_voc(tmp_path / "own", {"train": 4, "trainval": 2, "test": 2})
    named = r"trainval\.txt: has 2 images, without 4 of the 4 in train\.txt \(000000\); .*delete"
    with pytest.raises(DataError, match=named):
        load("DATASETS.VOC_DIR", root)
    chosen = load("DATASETS.VOC_DIR", root, "DATASETS.TRAIN", "('own_train',)")
    assert chosen.cfg.DATASETS.TEST == ("own_test",)
    assert doctor(["doctor", "--voc-dir", str(root)]) == 3
    assert re.search(f"WRONG  own_.*{named}", capsys.readouterr().out)
    lists = root / "ImageSets" / "Main"
    whole = (lists / "train.txt").read_text() + (lists / "trainval.txt").read_text()
    (lists / "trainval.txt").write_text(whole)
    assert load("DATASETS.VOC_DIR", root).cfg.DATASETS.TRAIN == ("own_trainval",)


def test_tuning_opens_no_annotation_of_the_test_split(load, tmp_path):
    root = write_voc(tmp_path / "own", {"train": 40, "test": 2})
    whole = load("DATASETS.VOC_DIR", root).cfg.DATASETS.VOC_CLASSES
    for image_id in (root / "ImageSets" / "Main" / "test.txt").read_text().split():
        (root / "Annotations" / f"{image_id}.xml").write_text("not XML")
    cache_clear()
    task = load("DATASETS.VOC_DIR", root, "DATASETS.PART", "tune")
    assert task.cfg.DATASETS.VOC_CLASSES == whole == ["blue", "green", "red"]
    assert task.cfg.DATASETS.TEST == ("own_train@held",)


def test_classes_of_a_builtin_dataset(small_config, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    write_voc(tmp_path / "VOC2007", {"trainval": 2, "test": 1}, names=VOC_NAMES)
    opts = ["MODEL.WEIGHTS", "random", "SEED", "1"]
    assert load_task(small_config, opts, "embedded").cfg.MODEL.ROI_HEADS.NUM_CLASSES == 20


def without(root: Path, split: str, name: str) -> None:
    """Remove the objects of a class from a split."""
    for image_id in (root / "ImageSets" / "Main" / f"{split}.txt").read_text().split():
        path = root / "Annotations" / f"{image_id}.xml"
        objects = re.findall(r"<object>.*?</object>", path.read_text())
        kept = "".join(text for text in objects if f"<name>{name}<" not in text)
        path.write_text(re.sub(r"<object>.*</object>", kept, path.read_text()))


@pytest.mark.parametrize("year", [2007, 2012])
def test_classes_without_objects_are_noted_before_training(year, load, tmp_path):
    root = write_voc(tmp_path / "own", {"train": 4, "test": 4})
    assert not any("classes without" in note for note in load("DATASETS.VOC_DIR", root).notes)
    root = write_voc(tmp_path / "less", {"train": 4, "test": 4})
    without(root, "train", "red")
    without(root, "test", "blue")
    task = load("DATASETS.VOC_DIR", root, "DATASETS.VOC_YEAR", year)
    learned, measured = (note for note in task.notes if "classes without" in note)
    assert "train" in learned and "red" in learned
    assert "less_test" in measured and "blue" in measured and "bbox/AP_detectron2" in measured


def test_no_objects_to_measure(load, tmp_path):
    root = write_voc(tmp_path / "own", {"train": 1, "test": 1})
    for name in ("red", "green", "blue"):
        without(root, "test", name)
    with pytest.raises(DataError, match="own_test: no annotated objects, so nothing can be tested"):
        load("DATASETS.VOC_DIR", root)
