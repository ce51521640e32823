"""Score of perfect predictions: 100 on sound splits, and the causes of less on others."""

import json

import pytest
from PIL import Image

from benchmarks.make_table import main as table
from benchmarks.report.records import collect
from benchmarks.run_suite import main as run_suite
from detection.config.task import default_task
from detection.datasets import read_split
from detection.datasets.__main__ import main as datasets_command
from detection.evaluation.reachable import doctor_config, evaluate_perfect
from detection.train_net import main as train
from moco.common.errors import DataError
from moco.common.run import read_record
from tests.benchmarks.suites.lab import write_suite

GAP = 12  # pixels between the corners of two objects


def scored(name, **datasets):
    cfg = default_task()
    cfg.DATASETS.update({key: str(value) for key, value in datasets.items()})
    split = read_split(name, cfg)
    return evaluate_perfect(split, doctor_config(split))


def grid(folder, number, *, copies=1):
    """Write a COCO file: one image with `number` objects of one class, each `copies` times."""
    folder.mkdir(exist_ok=True)
    side = GAP * 20
    Image.new("RGB", (side, side)).save(folder / "a.png")
    annotations = [
        {
            "id": 1 + i * copies + copy,
            "image_id": 1,
            "category_id": 1,
            "bbox": [GAP * (i % 20), GAP * (i // 20), 10, 10],
            "area": 100,
            "iscrowd": 0,
        }
        for i in range(number)
        for copy in range(copies)
    ]
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": side, "height": side}],
        "annotations": annotations,
        "categories": [{"id": 1, "name": "red"}],
    }
    file = folder / "test.json"
    file.write_text(json.dumps(content))
    return file


def with_keypoints(folder, number, names):
    """Write the file of `grid` with two corners of each box as keypoints of these names."""
    file = grid(folder, number)
    content = json.loads(file.read_text())
    for row in content["annotations"]:
        x, y, w, h = row["bbox"]
        row |= {"keypoints": [x, y, 2, x + w, y + h, 2], "num_keypoints": 2}
    content["categories"][0]["keypoints"] = names
    file.write_text(json.dumps(content))
    return file


def name_of(file):
    return f"{file.parent.name}_{file.stem}"


def test_more_objects_than_the_metric_counts(tmp_path, fresh_cache, capsys):
    file = grid(tmp_path / "own", 150)
    result = scored(name_of(file), COCO_TEST_JSON=file)
    assert result.highest["bbox/AP"] == pytest.approx(66.3, abs=0.05)
    assert "objects beyond TEST.DETECTIONS_PER_IMAGE 100: 50 in 1 image" in result.faults
    assert datasets_command(["doctor", "--coco-json", str(file)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "highest reachable score bbox/AP 66.3" in shown and "50 in 1 image" in shown


def test_more_detections_are_counted_with_the_key(tmp_path, fresh_cache):
    file = grid(tmp_path / "own", 300)
    cfg = default_task()
    cfg.DATASETS.COCO_TEST_JSON = str(file)
    split = read_split(name_of(file), cfg)
    keys = doctor_config(split)
    keys.TEST.DETECTIONS_PER_IMAGE = 300
    result = evaluate_perfect(split, keys)
    assert result.highest["bbox/AP"] == pytest.approx(33.7, abs=0.05)
    assert any("COCO's metric counts: 200 in 1 image" in fault for fault in result.faults)
    keys.TEST.COCO_MAX_DETECTIONS = 500
    assert evaluate_perfect(split, keys).highest["bbox/AP"] == pytest.approx(100)


def test_every_object_twice(tmp_path, fresh_cache):
    """A detector's NMS keeps one of two equal boxes, so that half of the objects is missed."""
    file = grid(tmp_path / "own", 10, copies=2)
    result = scored(name_of(file), COCO_TEST_JSON=file)
    assert result.highest["bbox/AP"] == pytest.approx(50.5, abs=0.05)
    assert "objects with the class and box of another one: 10 in 1 image" in result.faults


def test_packages_that_differ_are_named(tmp_path, fresh_cache, monkeypatch):
    pytest.importorskip("hotcoco")
    import pycocotools.cocoeval

    evaluate = pycocotools.cocoeval.COCOeval.evaluateImg

    def without_matches(self, *args):
        found = evaluate(self, *args)
        if found is not None:
            found["dtMatches"][:] = 0
        return found

    monkeypatch.setattr(pycocotools.cocoeval.COCOeval, "evaluateImg", without_matches)
    file = grid(tmp_path / "own", 3)
    result = scored(name_of(file), COCO_TEST_JSON=file)
    assert result.highest["bbox/AP"] == 0
    assert "packages differ in bbox/AP: hotcoco 100.0, pycocotools 0.0" in result.faults


def test_a_metric_that_fails_is_the_datas_fault(tmp_path, fresh_cache, monkeypatch):
    file = grid(tmp_path / "own", 3)

    def fail(self):
        raise IndexError("list index out of range")

    monkeypatch.setattr("detection.evaluation.coco.COCOEvaluator.evaluate", fail)
    with pytest.raises(DataError, match="own_test: its metric fails on its own objects"):
        scored(name_of(file), COCO_TEST_JSON=file)


@pytest.mark.parametrize(
    "names, note",
    [
        (["L_Eye", "R_Eye"], "keypoints that a horizontal flip swaps: L_Eye and R_Eye"),
        (["top", "bottom"], "no left and right keypoints in the names"),
    ],
)
def test_the_doctor_notes_what_keypoints_need(names, note, tmp_path, fresh_cache, capsys):
    """It notes sigmas and pairs; boxes are scored without them."""
    datasets_command(["doctor", "--coco-json", str(with_keypoints(tmp_path / "own", 3, names))])
    shown = capsys.readouterr().out
    assert note in shown
    assert "not scored: TEST.KEYPOINT_OKS_SIGMAS: own_test has keypoints of its own" in shown
    assert "perfect predictions score bbox/AP 100.0" in shown


@pytest.mark.parametrize("orientation, turned", [(3, True), (1, False), (0, False)])
def test_the_doctor_notes_images_that_exif_turns(
    orientation, turned, tmp_path, fresh_cache, capsys
):
    file = grid(tmp_path / "own", 3)
    image = Image.open(tmp_path / "own" / "a.png")
    exif = image.getexif()
    exif[0x0112] = orientation  # 3: by 180 degrees, which its size does not show; 0: not known
    image.save(tmp_path / "own" / "a.png", exif=exif)
    datasets_command(["doctor", "--coco-json", str(file)])
    shown = capsys.readouterr().out
    note = "1 image rotated by EXIF: annotations must be of the rotated image"
    assert (note in shown) == turned


def test_keypoints_of_more_persons_than_the_metric_counts(tmp_path, fresh_cache):
    """COCO's metric of keypoints counts 20: recall 20 / 30, so that 67 of 101 points are 1."""
    file = with_keypoints(tmp_path / "own", 30, ["top", "bottom"])
    cfg = default_task()
    cfg.DATASETS.COCO_TEST_JSON = str(file)
    cfg.MODEL.KEYPOINT_ON, cfg.TEST.KEYPOINT_OKS_SIGMAS = True, [0.1, 0.1]
    result = evaluate_perfect(read_split(name_of(file), cfg), cfg)
    assert result.highest["bbox/AP"] == 100
    assert result.highest["keypoints/AP"] == pytest.approx(100 * 67 / 101, abs=0.01)
    assert any("20 of a class" in fault and "10 in 1 image" in fault for fault in result.faults)


@pytest.mark.slow
def test_a_suite_scores_perfect_predictions_once(
    small_config, small_options, tmp_path, capfd, fresh_cache
):
    """Not each run: the suite keeps the score, and tables and bundles show it."""
    pairs = dict(zip(small_options[::2], small_options[1::2], strict=True))
    del pairs["SEED"]
    task = {"config": small_config, "overrides": pairs | {"TEST.DETECTIONS_PER_IMAGE": "1"}}
    suite, out = write_suite(tmp_path, task), tmp_path / "out"
    words = [str(suite), "--init", "random", "--trials", "1", "--engine", "embedded"]
    words += ["--executor", "cpu", "--output", str(out)]
    run_suite([*words, "--dry-run"])
    assert "highest reachable score" in capfd.readouterr().out and not out.exists()
    run_suite(words)
    [score] = json.loads((out / "reachable.json").read_text()).values()
    [fault, *_] = score["faults"]
    assert score["highest"]["bbox/AP"] < 100
    assert fault.startswith("objects beyond TEST.DETECTIONS_PER_IMAGE 1: ")
    [run] = out.glob("runs/*/*/*/run.json")
    assert read_record(run).reachable is None
    assert "reachable score" not in (run.parent / "suite.log").read_text()
    text = (out / "tables" / "table.md").read_text()
    assert "perfect predictions reach AP" in text and fault in text
    capfd.readouterr()
    words[words.index("--trials") + 1] = "2"
    run_suite([*words, "--dry-run"])
    assert "reachable score" not in capfd.readouterr().out, "of the same data"
    table([str(out), "--bundle", str(tmp_path / "a.zip"), "--out", str(tmp_path / "t")])
    [shared] = collect([tmp_path / "a.zip"]).transfer
    assert shared.record.reachable == score


@pytest.mark.slow
def test_only_the_check_of_a_task_scores_perfect_predictions(
    small_config, small_options, tmp_path, capsys
):
    run = ["--config-file", small_config, "--engine", "embedded", *small_options]
    run += ["MODEL.WEIGHTS", "random", "TEST.DETECTIONS_PER_IMAGE", "1"]
    run += ["OUTPUT_DIR", str(tmp_path / "run")]
    assert train([*run, "--check-only"]) == 0
    shown = capsys.readouterr().out
    assert "highest reachable score" in shown
    assert "objects beyond TEST.DETECTIONS_PER_IMAGE 1: " in shown
    assert train(run) == 0
    assert "reachable score" not in capsys.readouterr().out
    assert read_record(tmp_path / "run" / "run.json").reachable is None


@pytest.mark.slow
def test_a_long_score_is_skipped_in_a_run(small_config, small_options, capsys, monkeypatch):
    monkeypatch.setattr("detection.evaluation.reachable.expected_seconds", lambda split, cfg: 61.0)
    run = ["--config-file", small_config, "--engine", "embedded", *small_options]
    run += ["MODEL.WEIGHTS", "random", "TEST.DETECTIONS_PER_IMAGE", "1"]
    assert train([*run, "--check-only"]) == 0
    shown = capsys.readouterr().out
    assert "score of perfect predictions: not computed, as it takes about 61 s" in shown
    assert "; objects beyond TEST.DETECTIONS_PER_IMAGE 1: " in shown
