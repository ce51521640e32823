"""Checks before the first run starts, by the real programs."""

import re
from dataclasses import replace

import pytest

from benchmarks.suites.checks import check
from benchmarks.suites.suite import Init, expand
from benchmarks.suites.suite_file import load_suite, with_options
from tests.benchmarks.suites.lab import ROOT, classes, from_random, write_suite
from tests.oracles.tiny_voc import write_voc

SUITES = ROOT / "configs" / "suites"
LIMIT = "TEST.DETECTIONS_PER_IMAGE"


def test_missing_data_are_looked_for_by_their_own_kind(tmp_path, monkeypatch):
    """Tasks on VOC, COCO and a custom folder name the command that checks each."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "nowhere"))
    suite = load_suite(SUITES / "smoke.yaml")
    found = check(from_random(suite), False)
    voc, coco, own = found.problems
    # The size of a checkpoint depends on the classes, which are in the data of a custom folder.
    assert {task for task, *_ in found.iterations} == {"voc_small", "coco_small", "bccd_small"}
    assert {task for task, *_ in found.checkpoints} == {"voc_small", "coco_small"}
    assert voc.startswith("voc_small") and voc.endswith("benchmarks doctor voc")
    assert coco.startswith("coco_small") and coco.endswith("benchmarks doctor coco")
    assert own.startswith("bccd_small") and "benchmarks doctor --voc-dir" in own


def test_the_real_checks_name_every_problem(tmp_path, monkeypatch):
    """Missing data and bad weights of detection and classification are listed, once each."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "nowhere"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = tmp_path / "text.pth"
    text.write_text("not weights")
    suite = load_suite(SUITES / "smoke.yaml")
    probe = load_suite(SUITES / "imagenet.yaml").tasks[0]
    suite = with_options(replace(suite, tasks=(suite.tasks[0], probe)), {}, {}, trials=3)
    inits = {"random": Init("random", None), "text": Init(str(text), "a" * 64)}
    specs = expand(suite, inits, ["embedded"], version="1")
    found = check(specs, False)
    assert len(found.problems) == 2, found.problems  # not one for each trial
    data, weights = found.problems
    assert data.startswith("voc_small from random (embedded): ") and "nowhere/VOC2007" in data
    assert "python -m benchmarks doctor voc" in data
    assert weights.startswith("voc_small from text (embedded), imagenet_linear from text: ")
    assert "text.pth" in weights
    assert all("\n" not in problem for problem in found.problems)
    assert found.hardware["gpus"] == []
    # Bad weights do not hide missing data, even if no row has random weights.
    found = check([spec for spec in specs if spec.init == "text"], False)
    assert len(found.problems) == 2 and any("nowhere/VOC2007" in p for p in found.problems)


@pytest.fixture
def own_data(tmp_path, monkeypatch):
    """Return a folder in VOC layout, and runs of one task on it from two inits."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    root = write_voc(tmp_path / "own", {"train": 5, "test": 3})
    task = {"config": str(ROOT / "configs/voc/faster_rcnn_R_18_C4_small.yaml")}
    task["overrides"] = {"DATASETS.VOC_DIR": str(root)}
    suite = with_options(load_suite(write_suite(tmp_path, task)), {}, {}, trials=2)
    inits = {name: Init("random", None) for name in ("random", "other")}
    return root, expand(suite, inits, ["embedded"], version="1")


def test_a_score_of_perfect_predictions_is_computed_once(own_data, monkeypatch):
    """Of the same test and metric, in runs of one check and in later checks."""
    few = [replace(s, overrides=(*s.overrides, (LIMIT, "1"))) for s in own_data[1]]
    found = check([*own_data[1], *(replace(s, task="few") for s in few)], False)
    assert len(found.scores) == 2
    [faults] = [score["faults"] for score in found.scores.values() if score["faults"]]
    [note] = [note for note in found.notes if "perfect" in note or "reachable" in note]
    assert note.startswith("few: ") and faults[0] in note
    monkeypatch.setattr("detection.evaluation.reachable.evaluate_perfect", None)
    again = check(few, False, [*found.scores])
    assert not again.problems and not again.scores


@pytest.mark.parametrize("split", ["train", "test"])
def test_truncated_images_are_found_before_the_first_run(split, own_data):
    """The file's header, which the reader opens, is whole."""
    root, specs = own_data
    assert not check(specs, False).problems
    name = (root / f"ImageSets/Main/{split}.txt").read_text().split()[-1]
    image = root / f"JPEGImages/{name}.jpg"
    image.write_bytes(image.read_bytes()[:-400])
    [problem] = check(specs, False).problems
    assert re.search(
        rf"random.*other.*{name}\.jpg: .*truncated.*doctor --voc-dir .* --verify", problem
    )


def test_many_images_are_not_decoded_and_a_note_says_so(own_data, monkeypatch):
    root, specs = own_data
    monkeypatch.setattr("benchmarks.suites.checks.DECODING_SECONDS", 0)
    notes = [note for note in check(specs, False).notes if "not decoded beforehand" in note]
    assert len(notes) == 1 and " of 8 images were not decoded" in notes[0]
    assert notes[0].endswith(f"doctor --voc-dir {root} --verify")


def test_tasks_that_tables_would_take_for_one(tmp_path, monkeypatch):
    """Two tasks of one name are refused before the runs, not when their tables are made."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    classes(tmp_path / "data")
    overrides = {"DATA.ROOT": str(tmp_path / "data"), "MODEL.ARCH": "resnet18"}
    tasks = [{"name": n, "program": n, "overrides": overrides} for n in ("linear", "finetune")]
    task = "TASK: tiny\nSOLVER: {BATCH_SIZE: 2, MAX_EPOCHS: 200}"
    specs = from_random(load_suite(write_suite(tmp_path, *tasks, task=task)))
    found = check(specs, False)
    assert found.problems == (
        "linear and finetune: both would be tiny_resnet18 in the tables; give one of them a file "
        "(or TASK) of its own name",
    )
    assert set(found.iterations.values()) == {400}
    assert check(specs[:1], False).problems == ()
