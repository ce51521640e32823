"""The official evaluators compute what ours do, the command runs; no test looks at a time."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.speed import __main__ as command
from benchmarks.speed import detection, engines, evaluators, reference_voc
from benchmarks.speed.measure import Setting
from detection.datasets.layout import DATASETS_VARIABLE
from detection.datasets.voc import VOC_CLASSES


@pytest.fixture(autouse=True)
def data_as_before(monkeypatch):
    """What the command does to the environment must not outlive it."""
    monkeypatch.setenv(DATASETS_VARIABLE, "elsewhere")
    yield
    assert os.environ[DATASETS_VARIABLE] == "elsewhere"


def test_the_official_voc_evaluator_is_ours(tmp_path):
    """Bitwise identical, with difficult objects, some found twice, false alarms."""
    for num_images, num_false in ((30, 3), (60, 5)):
        given = evaluators.VOCPredictions(num_images, num_false)
        ours = given.ours()
        assert ours == given.official(tmp_path)
        assert 90 > ours["AP50"] > ours["AP"] > 1


@pytest.mark.detectron2
def test_the_official_voc_evaluator_is_detectron2s(detectron2, tmp_path):
    """Some classes at one threshold, from the same result files."""
    from detectron2.evaluation.pascal_voc_evaluation import voc_eval

    given = evaluators.VOCPredictions(100, num_false=5)
    given.official(tmp_path)  # leaves its result files
    (tmp_path / "list.txt").write_text("\n".join(given.objects))
    for image_id, objects in given.objects.items():
        parts = []
        for item in objects:
            sides = zip(("xmin", "ymin", "xmax", "ymax"), map(int, item["bbox"]), strict=True)
            box = "".join(f"<{tag}>{side}</{tag}>" for tag, side in sides)
            parts.append(
                f"<object><name>{item['name']}</name><pose/><truncated>0</truncated>"
                f"<difficult>{item['difficult']:d}</difficult><bndbox>{box}</bndbox></object>"
            )
        (tmp_path / f"{image_id}.xml").write_text(f"<annotation>{''.join(parts)}</annotation>")
    found = []
    for name in VOC_CLASSES[::2]:
        ap = reference_voc.average_precision(tmp_path / f"{name}.txt", given.objects, name, 0.5)
        paths = [str(tmp_path / file) for file in ("{}.txt", "{}.xml", "list.txt")]
        assert ap == voc_eval(*paths, name, 0.5, True)[2]
        found.append(ap)
    assert 0.1 < max(found) < 1 and len(set(found)) > 3


def test_the_official_coco_evaluator_is_ours(tmp_path):
    given = evaluators.COCOPredictions(12, 10, tmp_path)
    ours = given.ours()
    assert ours == given.official()
    assert 90 > ours["AP50"] > ours["AP"] > 1
    pytest.importorskip("hotcoco")
    assert given.compiled() == ours


def test_an_evaluator_that_differs_is_marked(monkeypatch, tmp_path):
    assert not evaluators.voc_row(5, 2, tmp_path, 1).differs
    wrong = {"AP": 1.0, "AP50": 1.0, "AP75": 1.0}
    monkeypatch.setattr(evaluators.VOCPredictions, "official", lambda given, folder: wrong)
    assert evaluators.voc_row(5, 2, tmp_path, 1).differs


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
    assert "| C9 " in capsys.readouterr().out
    written = output.read_text()
    count = len(detection.keys()["tasks"])
    assert [written.count(f"\n| {goal} ") for goal in ("D1", "D2", "D3")] == [count, count, 4]
    assert written.count("weights after 3 of them compared") == count
    assert written.count(" detections compared") == count - 1 and "label map compared" in written
    assert written.count("\n| C9 ") == 2 and "DIFFER" not in written
    if not torch.cuda.is_available():
        assert "needs a GPU" in written


@pytest.mark.parametrize(
    "engine", ["embedded", pytest.param("detectron2", marks=pytest.mark.detectron2)]
)
def test_the_gpus_levers_as_far_as_a_cpu_has_them(engine, tmp_path, request):
    """Detectron2's mixed precision needs a GPU."""
    if engine == "detectron2":
        request.getfixturevalue("detectron2")
    given = {**detection.keys()["small"], **detection.keys()["quick"], **detection.keys()["fast"]}
    given["SOLVER.AMP.ENABLED"] = engine == "embedded"
    with detection.generated_datasets(Setting(tmp_path, 1, True)):
        config = detection.keys()["tasks"][detection.VOC_C4]["config"]
        side = engines.BUILD[engine](engines.task_config(engine, config, given, tmp_path))
    side.model.train()
    side.step()
    weights = dict(side.model.named_parameters())["backbone.res2.0.conv2.weight"]
    assert weights.is_contiguous(memory_format=torch.channels_last)
    assert weights.grad is not None and weights.grad.isfinite().all()


def test_without_detectron2_the_rows_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.speed.measure.installed", lambda: False)
    runs = {name: detection.GOALS[name] for name in ("D1", "D2", "D3", "G9")}
    rows = command.measure(runs, Setting(tmp_path, 1, True))
    assert [row.goal for row in rows] == ["D1", "D2", "D3", "G9"]
    assert all("Detectron2" in row.cells()[1] for row in rows) and {row.met for row in rows} == {
        None
    }


def test_the_measured_tasks_exist():
    for task in detection.keys()["tasks"].values():
        assert Path(engines.CONFIGS / f"{task['config']}.yaml").is_file()
