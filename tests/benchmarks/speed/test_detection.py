"""The official evaluators compute what ours do, the command runs; no test looks at a time."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.speed import __main__ as command
from benchmarks.speed import detection, evaluators
from benchmarks.speed.measure import Setting
from detection.datasets.layout import DATASETS_VARIABLE


@pytest.fixture(autouse=True)
def data_as_before(monkeypatch):
    """What the command does to the environment must not outlive it."""
    monkeypatch.setenv(DATASETS_VARIABLE, "elsewhere")
    yield
    assert os.environ[DATASETS_VARIABLE] == "elsewhere"


@pytest.mark.detectron2
def test_the_official_voc_evaluator_is_ours(detectron2, tmp_path):
    """Bitwise identical, with difficult objects, some found twice, false alarms."""
    for num_images, num_false in ((30, 3), (60, 5)):
        folder = tmp_path / str(num_images)
        folder.mkdir()
        given = evaluators.VOCPredictions(num_images, num_false, folder)
        ours = given.ours()
        assert ours == given.official()
        assert 90 > ours["AP50"] > ours["AP"] > 1


def test_the_official_coco_evaluator_is_ours(tmp_path):
    given = evaluators.COCOPredictions(12, 10, tmp_path)
    ours = given.ours()
    assert ours == given.official()
    assert 90 > ours["AP50"] > ours["AP"] > 1
    pytest.importorskip("hotcoco")
    assert given.compiled() == ours


def test_an_evaluator_that_differs_is_marked(monkeypatch, tmp_path):
    for official, differs in ((evaluators.VOCPredictions.ours, False), (lambda given: {}, True)):
        monkeypatch.setattr(evaluators.VOCPredictions, "official", official)
        assert evaluators.voc_row(5, 2, tmp_path, 1).differs is differs


def test_differences_are_seen():
    torch.manual_seed(0)
    a, b = (torch.nn.Linear(2, 2).state_dict() for _ in range(2))
    assert not detection.same(a, b) and detection.same(a, {**a})
    one = {"scores": np.ones(2), "masks": ["a"]}
    assert detection.same(one, {"scores": np.ones(2), "masks": ["a"]})
    for other in ({"scores": np.ones(2)}, {**one, "scores": np.ones(3)}, {**one, "masks": ["b"]}):
        assert not detection.same(one, other)


@pytest.mark.slow
@pytest.mark.detectron2
def test_command_measures_detection(detectron2, tmp_path, capsys):
    output = tmp_path / "speed.md"
    command.main(["detection", "--quick", "--output", str(output)])
    assert "pycocotools" in capsys.readouterr().out
    written = output.read_text()
    count = len(detection.KEYS["tasks"])
    assert [
        written.count(f"\n| {row}; ")
        for row in ("training iteration", "inference of an image", "a training image")
    ] == [count, count, 4]
    assert written.count("weights after 3 of them compared") == count
    assert written.count(" detections compared") == count - 1 and "label map compared" in written
    assert (
        len(re.findall("^\\| (VOC|COCO)'s AP.*;", written, re.M)) == 3 and "DIFFER" not in written
    )
    if not torch.cuda.is_available():
        assert "needs a GPU" in written


@pytest.mark.slow
@pytest.mark.detectron2
def test_command_measures_fine_tuning(detectron2, tmp_path, capsys):
    output = tmp_path / "speed.md"
    command.main(["finetune", "--quick", "--output", str(output)])
    written = output.read_text()
    for engine in detection.ENGINES.values():
        assert written.count(f"; engine {engine} ") == 5
    peaks = re.findall(r"\| peak memory of training, .*\| ([\d.]+) MiB +\| ([\d.]+) MiB,", written)
    assert len(peaks) == 2 and all(0 < float(side) < 200 for row in peaks for side in row)


@pytest.mark.parametrize(
    "engine", ["embedded", pytest.param("detectron2", marks=pytest.mark.detectron2)]
)
def test_the_gpus_levers_as_far_as_a_cpu_has_them(engine, tmp_path, request):
    if engine == "detectron2":
        request.getfixturevalue("detectron2")
    names = ("small", "quick", "fast")
    keys = [detection.KEYS["tasks"][detection.VOC_C4], *(detection.KEYS[name] for name in names)]
    setting = Setting(tmp_path, 1, True)
    with detection.generated_datasets(setting):
        side = detection.build_side(detection.task_config(setting, engine, *keys), engine)
    side.model.train()
    side.step()
    weights = dict(side.model.named_parameters())["backbone.res2.0.conv2.weight"]
    assert weights.is_contiguous(memory_format=torch.channels_last)
    assert weights.grad is not None and weights.grad.isfinite().all()


def test_without_detectron2_the_rows_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.speed.measure.installed", lambda: False)
    runs = {
        name: detection.GOALS[name]
        for name in ("training", "inference", "loading", "evaluation", "gpu_training")
    }
    rows = command.measure(runs, Setting(tmp_path, 1, True))
    assert [row.goal for row in rows] == [
        *("training", "inference", "loading"),
        *("evaluation voc", "evaluation coco", "gpu_training"),
    ]
    assert all("Detectron2" in row.cells()[0] and row.met is None for row in rows)


def test_the_measured_tasks_exist():
    for task in detection.KEYS["tasks"].values():
        assert Path(detection.CONFIGS / f"{task['config']}.yaml").is_file()
