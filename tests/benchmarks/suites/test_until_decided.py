"""Suites that add seeds until gaps are decided: error rates, tables, and a kill."""

import json
import os
import signal
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
from scipy import special, stats

from benchmarks import make_table
from benchmarks.report.records import collect
from benchmarks.report.report import Report, make_tables
from benchmarks.report.stats import equivalence, significance
from benchmarks.report.table import Cell, gap
from benchmarks.run_suite import SuiteFailed
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.suite import Init, expand
from benchmarks.suites.suite_file import load_suite, with_options
from benchmarks.suites.until_decided import InterimPlan, next_runs, with_looks, with_seeds
from moco.common.errors import UserError
from moco.common.run import write_record
from tests.benchmarks.report.fake_runs import rendered, write_run
from tests.benchmarks.suites.fake_trainer import record
from tests.benchmarks.suites.lab import Lab

PLAN = InterimPlan("random", ["strong", "mine"], 3, 6, 0.5)
LEVEL, REPETITIONS = 0.05, 40_000

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
    """A task stops when every gap is decided; a row without evidence continues to the maximum."""
    whole, killed = (lab_of(tmp_path / name, "strong", "same", "mine") for name in ("a", "b"))
    whole.run(*UNTIL)
    printed = capsys.readouterr().out
    runner = killed.start(*UNTIL)
    killed.wait_for(lambda: len(killed.count("done")) >= 14)  # 12 come before the first look
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    killed.run(*UNTIL)
    for lab in (whole, killed):
        lab.assert_once()
        assert set(seeds_done(lab).values()) == {5}
    texts = []
    bundle = tmp_path / "shared.zip"
    for source in (whole.out, killed.out, bundle):
        files = ["--out", str(tmp_path / "out"), "--format", "csv,md"]
        files += ["--bundle", str(bundle)] if source == whole.out else []
        make_table.main([str(source), *files])
        texts.append([(tmp_path / "out" / f"table.{end}").read_text() for end in ("csv", "md")])
    assert texts == [texts[0]] * 3
    for how in ("a gap", "no: looks are at 3 to 5 equal seeds of both rows"):
        assert how in printed and how in texts[0][1]
    few = lab_of(tmp_path / "few", "strong", "same")
    few.run(*UNTIL, "--margin", "10")  # the fake AP varies by 10 points
    assert set(seeds_done(few).values()) <= {3, 4}  # decided before the maximum
    assert "within ±10" in capsys.readouterr().out


@pytest.mark.slow
def test_a_failed_run_stops_its_own_comparison(tmp_path, quick):
    """No gap is tested without it, and the other rows go on."""
    lab = lab_of(tmp_path, "bad", "strong")
    with pytest.raises(SuiteFailed, match="3 of"):
        lab.run(*UNTIL)
    done = seeds_done(lab)
    assert "bad" not in done and 3 <= done["strong"] == done["random"] < 5


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
    assert asked() == dict.fromkeys(inits, 5)


def simulated(shift, std, first=3, most=9, ratio=1.0, margin=0.5):
    """Return Welch's nominal p-values (B, looks) of the gap and of equivalence, for normal runs."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, REPETITIONS, most))
    a, b = shift + std * ratio * a, std * b
    gaps, sames = [], []
    for n in range(first, most + 1):
        va, vb = a[:, :n].var(1, ddof=1) / n, b[:, :n].var(1, ddof=1) / n
        df = (va + vb) ** 2 / ((va**2 + vb**2) / (n - 1))
        mean, error = a[:, :n].mean(1) - b[:, :n].mean(1), np.sqrt(va + vb)
        gaps.append(2 * special.stdtr(df, -abs(mean) / error))
        sames.append(special.stdtr(df, (abs(mean) - margin) / error))
        if n == first:  # these are the p-values of the tables
            cells = [Cell(tuple(values[0, :n].tolist())) for values in (a, b)]
            assert gap(*cells, 2).p_value == pytest.approx(min(1, 2 * gaps[-1][0]))
            assert equivalence(*cells, margin) == pytest.approx(sames[-1][0])
    return np.array(gaps).T, np.array(sames).T


@pytest.mark.slow
class TestErrorRates:
    """Simulations of normal runs with every look that a plan allows."""

    @pytest.mark.parametrize("first, most", [(2, 5), (3, 9), (5, 12)])
    @pytest.mark.parametrize("ratio", [1, 4])
    def test_equal_rows_differ_in_at_most_5_percent(self, first, most, ratio):
        """Also if they vary unequally; without correction, at some look, far more often."""
        gaps, _ = simulated(0.0, 1.0, first, most, ratio)
        assert 0.01 < (gaps <= LEVEL / (most - first + 1)).any(1).mean() < LEVEL
        assert (gaps <= LEVEL).any(1).mean() > 0.09

    @pytest.mark.parametrize("std", [0.05, 0.1, 0.2])
    def test_a_gap_at_the_margin_is_called_equivalent_in_at_most_5_percent(self, std):
        _, sames = simulated(0.5, std)
        assert (sames <= LEVEL / 7).any(1).mean() < LEVEL
        assert (sames <= LEVEL).any(1).mean() > 0.1

    def test_holm_over_rows_that_share_the_baseline(self):
        """One of five equal rows differs in at most 5% of all suites."""
        rng = np.random.default_rng(1)
        runs = rng.standard_normal((6, REPETITIONS, 9))
        crossed = np.zeros(REPETITIONS, bool)
        for row in runs[1:]:
            for n in range(3, 10):
                test = stats.ttest_ind(row[:, :n], runs[0, :, :n], axis=1, equal_var=False)
                crossed |= test.pvalue <= LEVEL / 7 / 5
        assert 0.005 < crossed.mean() < LEVEL

    @pytest.mark.parametrize(
        "shift, std, gap, same, seeds",
        [
            (16.3, 1.0, 1.0, 0.0, 3.0),
            (1.0, 0.2, 1.0, 0.0, 3.5),
            (1.0, 0.4, 0.98, 0.0, 5.3),
            (0.5, 0.2, 0.97, 0.01, 5.3),
            (0.0, 0.2, 0.01, 0.97, 5.5),
            (0.0, 1.0, 0.02, 0.0, 8.9),
        ],
    )
    def test_seeds_saved(self, shift, std, gap, same, seeds):
        """The numbers of docs/guides/suites.md, against nine seeds in all."""
        gaps, sames = (p_values <= LEVEL / 7 for p_values in simulated(shift, std))
        stop = gaps | sames
        at = np.where(stop.any(1), stop.argmax(1), 6)
        of_gaps, of_same = (each[np.arange(len(at)), at] for each in (gaps, sames & ~gaps))
        assert (of_gaps.mean(), of_same.mean()) == pytest.approx((gap, same), abs=0.006)
        assert 3 + at.mean() == pytest.approx(seeds, abs=0.06)
        fixed = (simulated(shift, std)[0][:, -1] <= LEVEL).mean()
        assert shift == 0 or fixed - of_gaps.mean() < 0.032  # lost against a fixed number


def write_suite(root, plan, aps):
    """Write the folder of a suite with a run per init and value."""
    for init, values in aps.items():
        for seed, ap in enumerate(values):
            write_run(
                root / "runs" / "task" / init / f"seed{seed}-abc",
                **{"init": init, "seed": seed},
                metrics={"bbox/AP": ap, "bbox/AP50": ap + 20, "bbox/AP75": ap - 5},
            )
    content = {"until_decided": None if plan is None else asdict(plan)}
    (root / "suite.json").write_text(json.dumps(content))
    return root


RUNS = {
    "random": [30.0, 30.1, 29.9, 30.0],
    "strong": [35.1, 34.4, 35.9, 35.3],
    "same": [30.05, 30.1, 30.0, 29.9],
    "few": [33.0, 33.1],
}


@pytest.mark.slow
def test_the_table_accounts_for_the_looks(tmp_path):
    root = write_suite(tmp_path / "s", replace(PLAN, rows=["strong", "same", "few"]), RUNS)
    results = collect([root])
    [table] = with_looks(make_tables(results, resamples=0))
    rows = {row.init: row for row in table.rows}
    found = rows["strong"].gaps["bbox/AP"]
    test = stats.ttest_ind(RUNS["strong"], RUNS["random"], equal_var=False)
    interval = test.confidence_interval(1 - 0.05 / 4)  # of four possible looks
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.p_value == pytest.approx(4 * test.pvalue)
    assert rows["strong"].gaps["bbox/AP50"].p_value is None  # the looks were not at AP50
    assert rows["few"].gaps["bbox/AP"].p_value is None  # nor at unequal seeds
    found = {each.row.init: each for each in significance(table)}
    strong, same = found["strong"], found["same"]
    assert strong.significant and not same.significant and same.equivalent
    cells = [Cell(tuple(RUNS[row])) for row in ("same", "random")]
    assert same.same[0] == pytest.approx(4 * equivalence(*cells, 0.5))
    assert same.paired[2] == pytest.approx(
        min(1, 4 * stats.ttest_rel(RUNS["same"], RUNS["random"]).pvalue)
    )
    texts = rendered(Report([table], results))
    for name, text in texts.items():
        if name != "terminal":
            assert "2 of 4" in text and "no: looks are at 3 to 6 equal seeds of both rows" in text
        assert "seeds were added until each gap to random was decided" in text
    with pytest.raises(UserError, match=r"--margin 0\.3: the looks of this suite were at 0\.5"):
        with_looks(make_tables(results), margin=0.3)


def test_runs_of_another_suite_are_refused(tmp_path):
    """Their number did not depend on the looks, or on others."""
    write_suite(tmp_path / "a", PLAN, RUNS)
    write_suite(tmp_path / "b", None, {"other": [31.0, 31.5, 32.0]})
    with pytest.raises(UserError, match="cannot be in one table, as --until-decided"):
        make_table.main([str(tmp_path)])


@pytest.mark.parametrize(
    "plan",
    [
        7,
        {"rows": ["mine"]},
        {**asdict(PLAN), "most": 10**9},
        {**asdict(PLAN), "margin": float("nan")},
        {**asdict(PLAN), "first": "3"},
        {**asdict(PLAN), "rows": []},
    ],
)
def test_hostile_plans_are_refused(tmp_path, plan):
    root = write_suite(tmp_path / "s", PLAN, {"random": [30.0]})
    (root / "suite.json").write_text(json.dumps({"until_decided": plan}))
    with pytest.raises(UserError, match=r"until|margin"):
        make_table.main([str(root)])
    (root / "suite.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"suite\.json: not valid JSON"):
        make_table.main([str(root)])
