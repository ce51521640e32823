"""The official evaluators compute what ours do, the command runs; no test looks at a time."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.speed import __main__ as command
from benchmarks.speed import detection, engines, evaluators, reference_voc
from benchmarks.speed.report import Row
from detection.datasets.layout import DATASETS_VARIABLE
from detection.datasets.voc import VOC_CLASSES
from moco.common.errors import UserError


@pytest.fixture(autouse=True)
def data_as_before(monkeypatch):
    """What the command does to the environment must not outlive it."""
    monkeypatch.setenv(DATASETS_VARIABLE, "elsewhere")
    yield
    assert os.environ[DATASETS_VARIABLE] == "elsewhere"


def test_the_official_voc_evaluator_is_ours(tmp_path):
    """To the last bit; with difficult objects, some found twice, false alarms."""
    for num_images, num_false in ((30, 3), (60, 5)):
        given = evaluators.VOCPredictions(num_images, num_false)
        ours = given.ours()
        assert ours == given.official(tmp_path)
        assert 90 > ours["AP50"] > ours["AP"] > 1


def test_the_official_voc_evaluator_is_detectron2s(detectron2, tmp_path):
    """Some classes at one threshold, both metrics, from the same result files."""
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
        for use_11_points in (True, False):
            path = tmp_path / f"{name}.txt"
            ap = reference_voc.average_precision(path, given.objects, name, 0.5, use_11_points)
            templates = (str(tmp_path / "{}.txt"), str(tmp_path / "{}.xml"))
            paths = (*templates, str(tmp_path / "list.txt"))
            assert ap == voc_eval(*paths, name, 0.5, use_11_points)[2]
            found.append(ap)
    assert 0.1 < max(found) < 1 and len(set(found)) > 3


def test_the_official_coco_evaluator_is_ours(tmp_path):
    given = evaluators.COCOPredictions(12, 10, tmp_path)
    ours = given.ours()
    assert ours == given.official()
    assert 90 > ours["AP50"] > ours["AP"] > 1
    pytest.importorskip("hotcoco")
    assert given.compiled() == ours


def test_an_evaluator_that_differs_meets_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(evaluators, "WANTED", 1e-9)
    assert evaluators.voc_row(5, 2, tmp_path, 1).met is True
    wrong = {"AP": 1.0, "AP50": 1.0, "AP75": 1.0}
    monkeypatch.setattr(evaluators.VOCPredictions, "official", lambda given, folder: wrong)
    row = evaluators.voc_row(5, 2, tmp_path, 1)
    assert row.met is False and "AP DIFFERENT" in row.what


def test_ratios_count_to_two_digits_beside_their_noise():
    row = detection.ratio_row("D1", "x", {"ours": [2.0, 1.004, 1.5], "reference": [1.03, 1.0, 2]})
    assert (row.measured, row.wanted, row.met) == ("1.004 (49.4%)", "<= 1.00", True)
    assert detection.ratio_row("D1", "x", {"ours": [1.006], "reference": [1.0]}).met is False
    assert detection.ratio_row("D1", "DIFFERENT", {"ours": [1], "reference": [2]}).met is False


def test_differences_are_seen():
    torch.manual_seed(0)
    a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert detection.same_weights(a, b) == "DIFFERENT"
    b.load_state_dict(a.state_dict())
    assert detection.same_weights(a, b) == "equal"
    one = {"scores": np.ones(2), "masks": ["a"]}
    assert detection.same_prediction(one, {"scores": np.ones(2), "masks": ["a"]})
    for other in ({"scores": np.ones(2)}, {**one, "scores": np.ones(3)}, {**one, "masks": ["b"]}):
        assert not detection.same_prediction(one, other)
    batch = [{"image": torch.zeros(3, 2, 2), "file_name": "a.jpg"}]
    side = engines.Side(a, lambda: None, lambda: None, batch, batch)
    detection.check_same_images(side, side)
    other = replace(side, test_batch=[{"image": torch.ones(3, 2, 2), "file_name": "b.jpg"}])
    with pytest.raises(ValueError, match=r"the engines read a.jpg and b.jpg"):
        detection.check_same_images(side, other)


def test_command_measures_detection(detectron2, tmp_path, capsys):
    page = tmp_path / "speed.md"
    command.main(["detection", "--quick", "--output", str(page)])
    assert "| C9 " in capsys.readouterr().out
    written = page.read_text()
    count = len(detection.TASKS)
    assert [written.count(f"\n| {goal} ") for goal in ("D1", "D2", "D3")] == [count, count, 4]
    assert written.count("weights after 2 of them equal") == count
    assert written.count(" detections, equal") == count - 1 and "label map, equal" in written
    assert written.count("AP equal") >= 2 and "DIFFERENT" not in written
    assert "smoke test" in written
    if not torch.cuda.is_available():
        assert "Detectron2's default: needs a GPU" in written


@pytest.mark.parametrize("engine", ["embedded", "detectron2"])
def test_the_gpus_levers_as_far_as_a_cpu_has_them(engine, tmp_path, request):
    """Detectron2's mixed precision needs a GPU, and a GPU's speed nobody has measured."""
    if engine == "detectron2":
        request.getfixturevalue("detectron2")
    keys = {**detection.SMALL, **detection.QUICK, **detection.GPU_KEYS}
    keys["SOLVER.AMP.ENABLED"] = engine == "embedded"
    setting = detection.Setting(tmp_path, 1, True)
    config, _ = detection.TASKS["Faster R-CNN C4, extra BN"]
    with setting.data():
        cfg = engines.task_config(engine, config, keys, setting.folder("gpu"))
        side = {"embedded": engines.embedded, "detectron2": engines.detectron2}[engine](cfg)
    side.model.train()
    side.step()
    weights = dict(side.model.named_parameters())["backbone.res2.0.conv2.weight"]
    assert weights.is_contiguous(memory_format=torch.channels_last)
    assert weights.grad is not None and weights.grad.isfinite().all()


def test_without_detectron2_the_rows_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr(detection, "installed", lambda: False)
    rows = detection.measure(detection.Setting(tmp_path, 1, True), ["D1", "D2", "D3"])
    assert [row.what.split(": ")[1] for row in rows] == ["needs Detectron2"] * 3
    assert {row.met for row in rows} == {None} and isinstance(rows[0], Row)


def test_an_unknown_goal():
    with pytest.raises(UserError, match=r"--goals: got 'C1', choices are D1, D2, D3, C9, G9"):
        command.main(["detection", "--goals", "D1,C1"])


def test_the_measured_tasks_exist():
    for config, _ in detection.TASKS.values():
        assert Path(engines.CONFIGS / f"{config}.yaml").is_file()
