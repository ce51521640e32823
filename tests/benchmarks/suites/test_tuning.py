"""Equal-budget tuning: the same grid for every init, the best of each, and what is said of it."""

import ast
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.run_suite import SuiteFailed
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.suite import DETECTION, LINEAR, Suite, SuiteTask
from benchmarks.suites.suite_file import load_suite
from benchmarks.suites.tuning import choose, describe, grid_of, grid_suite, with_tuned
from detection.config.keys import protocol_sha256
from detection.config.task import default_task
from moco.common.cfgnode import flatten
from moco.common.errors import UserError
from tests.benchmarks.suites.lab import ROOT, write_suite

LR = "SOLVER.BASE_LR"
SUITES = ROOT / "configs" / "suites"


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    (tmp_path / "task.yaml").write_text(
        "SOLVER:\n  BASE_LR: 0.02\n  MAX_ITER: 24000\n  STEPS: (18000, 22000)\n"
    )
    return Suite("s", "", (SuiteTask("voc", tmp_path / "task.yaml", DETECTION),), None, {})


def test_grid_around_the_tasks_own_values(suite):
    (task,) = suite.tasks
    assert grid_of(task).axes == {LR: ("0.01", "0.02", "0.04", "0.1")}
    own = {"share": 0.5, "values": {"SOLVER": {"BASE_LR": [0.3], "WEIGHT_DECAY": [1e-4, 1e-5]}}}
    grid = grid_of(task, own)
    assert grid.points == (
        ((LR, "0.3"), ("SOLVER.WEIGHT_DECAY", "0.0001")),
        ((LR, "0.3"), ("SOLVER.WEIGHT_DECAY", "1e-05")),
    )
    assert grid.untuned == ((LR, "0.02"), ("SOLVER.WEIGHT_DECAY", "0.0001"))


def test_every_init_has_the_same_shortened_runs_without_the_test_split(suite):
    grids, points = grid_suite(suite)
    assert [task.trials for task in grids.tasks] == [1] * 4
    for task, (of, point) in zip(grids.tasks, points.values(), strict=True):
        keys = dict(task.keys("mine"))
        assert task.keys("mine") == task.keys("other") and of == "voc"
        assert keys == {
            "DATASETS.PART": "tune",
            "SOLVER.MAX_ITER": "6000",
            "SOLVER.STEPS": "(4500, 5500)",
            **dict(point),
        }


@pytest.mark.parametrize("path", sorted(SUITES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_suites_have_grids(path):
    suite = load_suite(path)
    detection = [task.name for task in suite.tasks if task.program == DETECTION]
    if not detection:
        with pytest.raises(UserError, match="no task of detection"):
            grid_suite(suite)
        return
    grids, points = grid_suite(suite)
    assert Counter(of for of, _ in points.values()) == {
        task.name: len(grid_of(task, suite.tune).points)
        for task in suite.tasks
        if task.name in detection
    }
    for task in grids.tasks:
        keys = dict(task.keys(""))
        assert int(keys["SOLVER.MAX_ITER"]) > max(ast.literal_eval(keys["SOLVER.STEPS"]) or (0,))


def test_choices(suite):
    _, points = grid_suite(suite)
    names = list(points)
    found = dict(zip(((n, "mine") for n in names), (40, 45, 45, math.nan), strict=True))
    found |= dict(zip(((n, "random") for n in names), (9, 8, 7, 6), strict=True))
    mine, other = choose(suite, points, found)["voc"].values()
    assert (mine.point, mine.value, mine.untuned) == (((LR, "0.02"),), 45, 45)
    assert (mine.edges, mine.diverged) == ((), 1)
    assert (other.point, other.untuned, other.edges) == (((LR, "0.01"),), 8, (LR,))
    text = describe({"voc": {"mine": mine, "random": other}})
    assert "mine: SOLVER.BASE_LR 0.02: 45.0 (untuned: 45.0)" in text
    assert text.count("at the edge") == 1 and "1 point diverged" in text
    assert text.count("2 points are equal, the first was taken") == 1
    for value, said in (
        (45.0, "4 points are equal, the first"),
        (0.0, "no point is above 0.0"),
    ):
        [equal] = choose(suite, points, {(name, "mine"): value for name in names})["voc"].values()
        assert equal.point == points[names[0]][1] and said in describe({"voc": {"mine": equal}})
    with pytest.raises(UserError, match="diverged"):
        choose(suite, points, {(name, "mine"): math.nan for name in names})


def test_tuned_rows_are_one_protocol(suite):
    """Their learning rates are the weights' doing; another grid is another protocol."""
    cfg = default_task()
    cfg.SOLVER.TUNED = str(grid_of(suite.tasks[0]))

    def sha256(**values: object) -> str:
        return protocol_sha256({**flatten(cfg), **{f"SOLVER.{k}": v for k, v in values.items()}})

    assert sha256(BASE_LR=0.1) == sha256(BASE_LR=0.01) != sha256(TUNED="")
    assert sha256(TUNED="SOLVER.BASE_LR=1,2 at 0.25 of the schedule") != sha256()
    assert sha256(BASE_LR=0.1, TUNED="") != sha256(BASE_LR=0.01, TUNED="")
    assert sha256(GAMMA=0.5) != sha256()


def test_only_detection_is_tuned(suite):
    linear = replace(suite.tasks[0], name="linear", program=LINEAR)
    both = replace(suite, tasks=(*suite.tasks, linear))
    assert [task.name for task in with_tuned(both, {}).tasks] == ["voc", "voc_tuned", "linear"]


@pytest.mark.slow
def test_a_tuned_suite(lab, capsys):
    """The best of each init trains on everything; equal numbers of runs, the untuned rows stay."""
    own = {"values": {LR: [0.1, 0.2, 0.3, 5.0]}}
    write_suite(lab.path, {"name": "a"}, name="small", trials=2, tune=own)
    lab.run("--tune", "--dry-run")
    assert not lab.events()
    lab.run("--tune")
    text = capsys.readouterr().out
    assert "mine: SOLVER.BASE_LR 0.1: 40.0 (untuned: not tried)" in text
    assert "random: SOLVER.BASE_LR 0.2: 40.0" in text
    grids = SuiteFolder(Path(f"{lab.out}-tuning"))
    assert Counter(spec.init for spec in grids.read()[1]) == {"mine": 4, "random": 4}
    assert not list(grids.tables.glob("*.csv"))
    rates = {
        (spec.task, spec.init): dict(spec.overrides).get(LR)
        for spec in SuiteFolder(lab.out).read()[1]
    }
    assert rates == {
        ("a", "mine"): None,
        ("a", "random"): None,
        ("a_tuned", "mine"): "0.1",
        ("a_tuned", "random"): "0.2",
    }
    content = json.loads((lab.out / "suite.json").read_text())
    assert content["tasks"]["a_tuned"]["init_keys"]["mine"] == {LR: "0.1"}
    before = lab.events()
    lab.run("--tune")  # nothing is done again
    assert [e for e in lab.events() if e not in before and e[0] != "start"] == []
    own["values"][LR].insert(0, 0.05)  # as the note about the edge asks for
    write_suite(lab.path, {"name": "a"}, name="small", trials=2, tune=own)
    lab.run("--tune", "--dry-run")
    assert lab.events() == before
    lab.run("--tune")
    assert Counter(spec.init for spec in grids.read()[1]) == {"mine": 5, "random": 5}
    new = [e for e in lab.events() if e not in before]
    assert sum(e[0] == "start" for e in new) == 2 + 2 * 2  # the new points, the tuned rows
    own["values"][LR].remove(0.3)
    write_suite(lab.path, {"name": "a"}, name="small", trials=2, tune=own)
    after = lab.events()
    with pytest.raises(UserError, match=r"another call \(tasks\.a\.0\.3\."):
        lab.run("--tune", "--dry-run")
    assert lab.events() == after


@pytest.mark.slow
def test_tuned_tasks_join_a_suite_that_was_run_without(lab):
    write_suite(lab.path, {"name": "a"}, name="small", trials=1, tune={"values": {LR: [0.1, 0.2]}})
    lab.run()
    lab.run("--tune")
    assert {spec.task for spec in SuiteFolder(lab.out).read()[1]} == {"a", "a_tuned"}
    write_suite(lab.path, {"name": "a"}, name="small", trials=1, tune={"values": {LR: [0.1, 0.3]}})
    with pytest.raises(UserError, match="another call"):
        lab.run("--tune")


@pytest.mark.slow
def test_a_grid_with_a_failed_run_chooses_nothing(failing_lab):
    own = {"values": {LR: [0.1, 0.2]}}
    write_suite(failing_lab.path, {"name": "a"}, name="small", trials=1, tune=own)
    with pytest.raises(SuiteFailed):
        failing_lab.run("--tune")
    assert not failing_lab.out.exists()
