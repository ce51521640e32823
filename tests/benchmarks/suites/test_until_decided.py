"""Suites that add seeds until gaps are decided: which runs, the same looks after a kill."""

import json
import os
import signal
from collections import Counter
from dataclasses import asdict, replace

import pytest

from benchmarks import make_table
from benchmarks.report.sequential import SeedPlan
from benchmarks.run_suite import SuiteFailed
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.plan import expand
from benchmarks.suites.suite import Init
from benchmarks.suites.suite_file import load_suite, with_options
from benchmarks.suites.until_decided import next_runs, with_seeds
from moco.common.errors import UserError
from moco.common.run import write_record
from tests.benchmarks.report.fake_runs import csv_rows
from tests.benchmarks.suites.fake_trainer import record
from tests.benchmarks.suites.lab import Lab

PLAN = SeedPlan("random", ("strong", "mine"), 3, 6, 0.5)

UNTIL = ("--until-decided", "--max-seeds", "5", "--skip", "b")


def lab_of(path, *inits: str) -> Lab:
    path.mkdir(exist_ok=True)
    return Lab(path, inits=("random", *inits))


def seeds_done(lab: Lab) -> dict[str, int]:
    """Return init → number of runs."""
    rows = [name.split("/")[1] for name in lab.count("done")]
    return {row: rows.count(row) for row in sorted(set(rows))}


@pytest.mark.slow
def test_killed_and_resumed_with_the_same_looks(tmp_path, quick, capsys):
    """A row of a large gap stops, an equal one stops, and one without evidence continues."""
    whole = lab_of(tmp_path / "whole", "strong", "same", "mine")
    killed = lab_of(tmp_path / "killed", "strong", "same", "mine")
    whole.run(*UNTIL)
    printed = capsys.readouterr().out
    runner = killed.start(*UNTIL)
    killed.wait_for(lambda: len(killed.count("done")) >= 14)  # 12 come before the first look
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    killed.run(*UNTIL)
    for lab in (whole, killed):
        lab.assert_once()
        done = seeds_done(lab)
        assert done["random"] == done["mine"] == 5
        assert 3 <= done["strong"] < 5 and 3 <= done["same"] < 5
    assert seeds_done(whole) == seeds_done(killed)
    made = []
    bundle = tmp_path / "shared.zip"
    for source in (whole.out, killed.out, bundle):
        files = ["--out", str(tmp_path / "out"), "--format", "csv,md"]
        files += ["--bundle", str(bundle)] if source == whole.out else []
        make_table.main([str(source), *files])
        made.append((tmp_path / "out" / "table.looks.csv").read_text())
    assert made == [made[0]] * 3
    rows = [row["seeds"] for row in csv_rows(made[0]) if row["init"] == "mine"]
    assert rows == ["3", "4", "5"]
    for how in ("a gap at look", "within ±0.5 at look", "no: 5 seeds are the maximum"):
        assert how in printed and how in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.slow
def test_a_failed_run_stops_its_own_comparison(tmp_path, quick):
    """No look is taken without it, and the other rows go on."""
    lab = lab_of(tmp_path, "bad", "strong")
    with pytest.raises(SuiteFailed, match="3 of"):
        lab.run(*UNTIL)
    done = seeds_done(lab)
    assert "bad" not in done and 3 <= done["strong"] == done["random"] <= 5


def test_a_dry_run_lists_the_runs_up_to_the_first_look(tmp_path, quick, capsys):
    lab = lab_of(tmp_path, "strong")
    lab.run(*UNTIL, "--dry-run")
    shown = capsys.readouterr().out
    assert "from 3 to at most 5 seeds per row, at most 10 runs in all" in shown
    assert "\n6 to do" in shown and not lab.out.exists()


@pytest.mark.slow
def test_the_plan_is_fixed_before_the_first_look(tmp_path, quick):
    lab = lab_of(tmp_path, "strong")
    lab.run(*UNTIL)
    count = len(lab.events())
    content = json.loads((lab.out / "suite.json").read_text())["until_decided"]
    plan = {"baseline": "random", "rows": ["strong"], "first": 3, "most": 5, "margin": 0.5}
    assert content == plan
    for more in (
        ("--until-decided", "--skip", "b"),
        (*UNTIL, "--margin", "0.3"),
        (*UNTIL, "--trials", "4"),
        ("--trials", "5", "--skip", "b"),
    ):
        with pytest.raises(UserError, match=r"until_decided|trials"):
            lab.run(*more)
    lab.run(*UNTIL)
    assert len(lab.events()) == count


@pytest.mark.parametrize(
    "more, error",
    [
        (("--margin", "0.3"), "--margin 0.3: is for --until-decided"),
        ((*UNTIL, "--plan", "x.json"), "--plan submits all runs at once"),
        ((*UNTIL, "--executor", "slurm"), "--executor slurm submits all runs at once"),
        ((*UNTIL, "--baseline", "mine", "--trials", "5"), "the first below the last"),
        ((*UNTIL, "--margin", "0"), "--margin 0.0: expected points above 0"),
        ((*UNTIL, "--max-seeds", "51"), "at most 50"),
    ],
)
def test_refusals(lab, more, error):
    with pytest.raises(UserError, match=error):
        lab.run(*more)
    assert not lab.out.exists()


def test_several_pre_trainings_and_no_baseline_are_refused(lab):
    (lab.path / "second.pth").write_text("another")
    both = f"mine={lab.path}/mine.pth,{lab.path}/second.pth"
    for inits, error in (
        (("--init", "random", "--init", both), "mine has several pre-trainings"),
        (("--init", f"mine={lab.path}/mine.pth"), "no row random to compare with"),
    ):
        lab.inits = inits
        with pytest.raises(UserError, match=error):
            lab.run(*UNTIL)


def test_no_row_runs_ahead_of_a_look_that_is_not_over(tmp_path, quick):
    """A killed suite may have more seeds of one row than of another."""
    lab = lab_of(tmp_path, "strong", "mine")
    suite = with_seeds(with_options(load_suite(lab.path / "suite.yaml"), {}, {}), PLAN.most)
    suite = replace(suite, tasks=suite.tasks[:1])
    inits = {name: Init(name, None if name == "random" else "1") for name in ("random", *PLAN.rows)}
    specs = expand(suite, inits, ["embedded"], version="1")
    folder = SuiteFolder(lab.out)
    lab.out.mkdir()
    (lab.out / "suite.json").write_text(json.dumps({"until_decided": asdict(PLAN)}))

    def finish(seed: int, init: str) -> None:
        for spec in specs:
            if (spec.seed, spec.init) == (seed, init):
                folder.folder_of(spec).mkdir(parents=True)
                fields = {**asdict(spec), "config": str(spec.config), "iterations": 8}
                write_record(folder.folder_of(spec), record(fields))

    def asked() -> dict[str, int]:
        return Counter(spec.init for spec in next_runs(specs, folder, PLAN)[0])

    for seed in range(3):
        for init in inits:
            finish(seed, init)
    assert asked() == dict.fromkeys(inits, 4)
    finish(3, "random")
    finish(3, "strong")
    assert asked() == dict.fromkeys(inits, 4)
    finish(3, "mine")
    assert asked()["mine"] == asked()["random"] == 5
