"""Equal-budget tuning: one grid for every init, the choice of a point, its description."""

import ast
import json
import math
import shutil
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.run_suite import SuiteFailed
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.suite import CHOOSE, DETECTION, GRID_POINT, Init, Suite, SuiteTask, expand
from benchmarks.suites.suite_file import load_suite
from benchmarks.suites.tuning import Choice, choose, describe, grid_of, with_grids
from detection.config.keys import protocol_sha256
from detection.config.task import default_task
from moco.common.cfgnode import flatten
from moco.common.errors import UserError
from tests.benchmarks.suites.lab import ROOT, Lab, write_suite

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


def points_of(suite: Suite) -> list[SuiteTask]:
    return [task for task in with_grids(suite).tasks if task.point_of]


def test_every_init_has_the_same_shortened_runs_without_the_test_split(suite):
    points = points_of(suite)
    assert [task.trials for task in points] == [1] * 4
    for task in points:
        keys = dict(task.keys("mine"))
        assert task.keys("mine") == task.keys("other") and task.point_of == "voc"
        assert keys == {
            "DATASETS.PART": "tune",
            "SOLVER.MAX_ITER": "6000",
            "SOLVER.STEPS": "(4500, 5500)",
            **dict(task.point),
        }


def test_what_is_chosen_comes_after_the_grid_and_before_the_tuned_task(suite):
    inits = {"random": Init("random", None), "mine": Init("/w", "a" * 64)}
    specs = expand(with_grids(suite), inits, ["embedded"], version="1")
    [choice] = [spec for spec in specs if spec.program == CHOOSE and spec.init == "mine"]
    grid = [spec for spec in specs if spec.program == GRID_POINT and spec.init == "mine"]
    tuned = [spec for spec in specs if spec.task == "voc_tuned" and spec.init == "mine"]
    assert choice.after == tuple(spec.name for spec in grid) and len(grid) == 4
    assert len(tuned) == 5 and all(spec.after == (choice.name,) for spec in tuned)
    assert choice.points == tuple(f"{LR}={dict(spec.overrides)[LR]}" for spec in grid)
    # The untuned rows are those of the suite without a grid.
    plain = {spec.id for spec in expand(suite, inits, ["embedded"], version="1")}
    assert plain == {spec.id for spec in specs if spec.task == "voc" and spec.program == DETECTION}


@pytest.mark.parametrize("path", sorted(SUITES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_suites_have_grids(path):
    suite = load_suite(path)
    detection = [task for task in suite.tasks if task.program == DETECTION]
    if not detection:
        with pytest.raises(UserError, match="no detection task"):
            with_grids(suite)
        return
    points, names = points_of(suite), [task.name for task in with_grids(suite).tasks]
    assert set(names) >= {task.name for task in suite.tasks}
    assert [n for n in names if n.endswith("_tuned")] == [f"{t.name}_tuned" for t in detection]
    assert Counter(task.point_of for task in points) == {
        task.name: len(grid_of(task, suite.tune).points) for task in detection
    }
    for task in points:
        keys = dict(task.keys(""))
        assert int(keys["SOLVER.MAX_ITER"]) > max(ast.literal_eval(keys["SOLVER.STEPS"]) or (0,))


def test_choices(suite):
    grid = grid_of(suite.tasks[0])

    def chosen(*values: float) -> Choice:
        return choose(grid.axes, dict(zip(grid.points, values, strict=True)), grid.untuned)

    mine, other = chosen(40, 45, 45, math.nan), chosen(9, 8, 7, 6)
    assert (mine.point, mine.value, mine.untuned) == (((LR, "0.02"),), 45, 45)
    assert (mine.edges, mine.diverged) == ((), 1)
    assert (other.point, other.untuned, other.edges) == (((LR, "0.01"),), 8, (LR,))
    text = "\n".join([*describe("mine", mine), *describe("random", other)])
    assert "mine: SOLVER.BASE_LR 0.02: 45.0 (untuned: 45.0)" in text
    assert text.count("at the edge") == 1 and "1 point diverged" in text
    assert text.count("2 points are equal, the first was taken") == 1
    for value, text in (
        (45.0, "4 points are equal, the first"),
        (0.0, "no point is above 0.0"),
    ):
        equal = chosen(*[value] * 4)
        assert equal.point == grid.points[0] and text in "".join(describe("mine", equal))
    with pytest.raises(UserError, match="diverged"):
        chosen(*[math.nan] * 4)


def test_tuned_rows_are_one_protocol(suite):
    """The chosen learning rate is not part of the protocol, but the grid is."""
    cfg = default_task()
    cfg.SOLVER.TUNED = str(grid_of(suite.tasks[0]))

    def sha256(**values: object) -> str:
        return protocol_sha256({**flatten(cfg), **{f"SOLVER.{k}": v for k, v in values.items()}})

    assert sha256(BASE_LR=0.1) == sha256(BASE_LR=0.01) != sha256(TUNED="")
    assert sha256(TUNED="SOLVER.BASE_LR=1,2 at 0.25 of the schedule") != sha256()
    assert sha256(BASE_LR=0.1, TUNED="") != sha256(BASE_LR=0.01, TUNED="")
    assert sha256(GAMMA=0.5) != sha256()


def rates(lab: Lab) -> dict[tuple[str, str], float]:
    """Return (task, init) → learning rate, computed from the metric of the record."""
    found = {}
    for path in lab.out.glob("runs/a_tuned/*/seed0-*/run.json"):
        peak = {"random": 0.2, "mine": 0.1}[path.parts[-3]]
        ap = json.loads(path.read_text())["metrics"]["bbox/AP"]
        found["a_tuned", path.parts[-3]] = peak + (40 - ap) / 100
    return found


@pytest.mark.slow
def test_a_tuned_suite(lab, capsys):
    """Every init has as many points; its best one trains on all images; untuned rows stay."""
    own = {"values": {LR: [0.1, 0.2, 0.3, 5.0]}}
    write_suite(lab.path, {"name": "a"}, name="small", trials=2, tune=own)
    lab.run("--tune", "--dry-run")
    assert not lab.events()
    lab.with_tables = True
    lab.run("--tune")
    lab.with_tables = False
    text = capsys.readouterr().out
    assert "mine: SOLVER.BASE_LR 0.1: 40.0 (untuned: not tried)" in text
    assert "random: SOLVER.BASE_LR 0.2: 40.0" in text and "1 point diverged" in text

    def points() -> Counter:
        specs = SuiteFolder(lab.out).read()[1]
        return Counter(spec.init for spec in specs if spec.program == GRID_POINT)

    assert points() == {"mine": 4, "random": 4}
    runs = (lab.out / "tables" / "runs.csv").read_text()
    assert "a_tuned" in runs and "a.0.1" not in runs, "a point of the grid is in no table"
    assert rates(lab) == pytest.approx({("a_tuned", "mine"): 0.1, ("a_tuned", "random"): 0.2})
    before = lab.events()
    lab.run("--tune")  # nothing is done again
    assert lab.events() == before
    own["values"][LR].insert(0, 0.05)  # a wider grid
    write_suite(lab.path, {"name": "a"}, name="small", trials=2, tune=own)
    lab.run("--tune", "--dry-run")
    assert lab.events() == before
    lab.run("--tune")
    assert points() == {"mine": 5, "random": 5}
    new = [e for e in lab.events() if e not in before]
    assert sum(e[0] == "start" for e in new) == 2 + 2 * 2  # the new points, the tuned rows
    own["values"][LR].remove(0.3)
    write_suite(lab.path, {"name": "a"}, name="small", trials=2, tune=own)
    after = lab.events()
    with pytest.raises(UserError, match=r"another command \(tasks\.a\.0\.3\."):
        lab.run("--tune", "--dry-run")
    assert lab.events() == after


@pytest.mark.slow
def test_a_suite_that_an_earlier_version_left_half_done(tmp_path, quick, capsys):
    """Its `suite.json` had templates of the choice's command, and of the file that it writes."""
    lab = Lab(tmp_path, inits=("random",), trials=1)
    write_suite(lab.path, {"name": "a"}, name="small", trials=1, tune={"values": {LR: [0.1, 0.2]}})
    lab.run("--tune")
    content = json.loads((lab.out / "suite.json").read_text())
    for run in content["runs"]:
        points = zip(run.pop("points"), run["after"], strict=False)
        run["arguments"] += [word for point, name in points for word in ("--run", point, name)]
        run |= {"makes": "", "reads": ""}
        if run["program"] == CHOOSE:
            run["makes"] = f"grid/{run['name']}/task.yaml"
        elif run["after"]:
            run["reads"] = f"${{{run['after'][0]}}}"
            shutil.rmtree(lab.out / "runs" / run["name"])
    (lab.out / "suite.json").write_text(json.dumps(content))
    lab.run("--tune", "--status")
    assert "4 done, 1 waiting of 5" in capsys.readouterr().out
    before = lab.events()
    lab.run("--tune")
    again = {name for _, name, _ in lab.events()[len(before) :]}
    assert {name.partition("/")[0] for name in again} == {"a_tuned"} and len(again) == 1
    assert lab.states() == {"done": 5}


@pytest.mark.slow
def test_tuned_tasks_join_a_suite_that_was_run_without(lab):
    write_suite(lab.path, {"name": "a"}, name="small", trials=1, tune={"values": {LR: [0.1, 0.2]}})
    lab.run()
    lab.run("--tune")
    tasks = {spec.task for spec in SuiteFolder(lab.out).read()[1]}
    assert tasks == {"a", "a.0.1", "a.0.2", "a.choose", "a_tuned"}
    lab.assert_once(2 + 4 + 2)


@pytest.mark.slow
def test_a_grid_with_a_failed_run_chooses_nothing(failing_lab, capsys):
    """The tuned task of that init is not trained, but that of the other init is."""
    own = {"values": {LR: [0.1, 0.2]}}
    write_suite(failing_lab.path, {"name": "a"}, name="small", trials=1, tune=own)
    with pytest.raises(SuiteFailed):
        failing_lab.run("--tune")
    assert "failed, which it depends on" in capsys.readouterr().err
    assert not list(failing_lab.out.glob("runs/a_tuned/bad/*/run.json"))
    assert list(failing_lab.out.glob("runs/a_tuned/mine/*/run.json"))
