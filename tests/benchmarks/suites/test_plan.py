"""Plan as a file: its content, and GNU make as another program that computes it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.suites.lab import ROOT, Lab, write_suite

LR = "SOLVER.BASE_LR"


def make(folder: Path, jobs: int = 2) -> None:
    """Compute the plan in a folder with GNU make, as docs/guides/plan.md describes."""
    if shutil.which("make") is None:
        pytest.skip("GNU make is not installed")
    page = (ROOT / "docs" / "guides" / "plan.md").read_text(encoding="utf-8")
    [code] = re.findall(r"## GNU make\n\n```python\n(.*?)```", page, re.DOTALL)
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    done = subprocess.run(["make", f"-j{jobs}"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_a_plan_says(lab):
    path = lab.path / "plan.json"
    lab.run("--plan", str(path), "--seconds-per-iteration", "2")
    plan = json.loads(path.read_text())
    assert plan["suite"] == "small" and plan["run_again_on_exit_code"] == 85
    assert len(plan["runs"]) == 8 and not lab.events()
    for run in plan["runs"]:
        assert run["command"][1] == "-m" and run["after"] == [] and run["gpus"] == 0
        assert run["seconds"] == 16
        assert run["done"] == str(Path(run["folder"]) / "run.json")
        assert run["folder"].startswith(str(lab.out / "runs"))
    assert (lab.out / "inits" / "mine.pth").exists(), "what the commands read is there"


def test_a_plan_is_for_the_gpus_that_tasks_are_meant_for(lab, monkeypatch):
    """GPUs need not be visible; --executor cpu uses none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_suite(lab.path, {"name": "a", "gpus": 8}, name="small", trials=1)
    lab.executor = ()
    path = lab.path / "plan.json"
    for more, gpus in (((), 8), (("--gpus-per-run", "4"), 4), (("--executor", "cpu"), 0)):
        shutil.rmtree(lab.out, ignore_errors=True)
        lab.run("--plan", str(path), *more)
        assert {run["gpus"] for run in json.loads(path.read_text())["runs"]} == {gpus}


@pytest.mark.slow
@pytest.mark.race
def test_gnu_make_computes_a_plan(tmp_path, quick):
    """The plan has dependencies, and runs that are interrupted again and again."""
    lab = Lab(tmp_path, inits=("random", "often"), trials=1)
    own = {"values": {LR: [0.1, 0.2]}}
    write_suite(lab.path, {"name": "a"}, name="small", trials=1, tune=own)
    path = lab.path / "plan.json"
    lab.run("--tune", "--init", f"mine={lab.path / 'random.pth'}", "--plan", str(path))
    make(lab.path)
    assert len(lab.count("done")) == 3 * 4 and set(lab.count("done").values()) == {1}
    assert set(lab.count("saved").values()) == {7}, "those from often"
    before = lab.events()
    lab.run("--tune", "--init", f"mine={lab.path / 'random.pth'}")
    assert lab.events() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a b; #c", "$(touch x) $HOME `id`", 'it\'s "a"\nb % : \\'])
def test_gnu_make_computes_a_plan_in_any_folder(tmp_path, quick, name):
    (tmp_path / name).mkdir()
    lab = Lab(tmp_path / name, inits=("random",), trials=1)
    lab.run("--plan", str(lab.path / "plan.json"))
    make(lab.path)
    lab.assert_once(2)
    assert [path.name for path in tmp_path.iterdir()] == [name], "a part of the name was run"
