"""Looks after each added seed: error rates over all of them, seeds saved, tables, hostile plans."""

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import special

from benchmarks import make_table
from benchmarks.report.bundle import PLAN as KEY
from benchmarks.report.content import Report
from benchmarks.report.records import collect
from benchmarks.report.sequential import (
    GAP,
    LEVEL,
    SAME,
    SeedPlan,
    _edges,
    _transition,
    boundaries,
    compare,
)
from benchmarks.report.tables import make_tables
from moco.common.errors import UserError
from tests.benchmarks.report.fake_runs import csv_rows, rendered, write_run

PLAN = SeedPlan("random", ("mine",))
REPETITIONS = 40_000
CHANCE = 3 * np.sqrt(LEVEL * (1 - LEVEL) / REPETITIONS)  # three standard errors of a share of 5%
Array = NDArray[Any]


@cache
def simulated(plan: SeedPlan, shift: float, std: float, ratio: float = 1.0) -> tuple[Array, Array]:
    """Return nominal p-values (B, looks) of the gap and of equivalence, for normal runs.

    Args:
        plan: Plan of the looks.
        shift: Gap in points.
        std: Standard deviation of the runs of the baseline.
        ratio: That of the other row, in multiples of `std`.
    """
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, REPETITIONS, plan.most))
    x = shift + std * (ratio * a - b)
    gaps, sames = [], []
    for n in range(plan.first, plan.most + 1):
        mean, error = x[:, :n].mean(1), x[:, :n].std(1, ddof=1) / np.sqrt(n)
        gaps.append(2 * special.stdtr(n - 1, -abs(mean) / error))
        sames.append(special.stdtr(n - 1, (abs(mean) - plan.margin) / error))
    return np.array(gaps).T, np.array(sames).T


def of_gap(plan: SeedPlan, level: float = LEVEL) -> Array:
    return 2 * np.array(boundaries(plan.first, plan.most, level / 2))


def ends(plan: SeedPlan, shift: float, std: float) -> tuple[float, float, float]:
    """Return the shares that end with a gap and with equivalence, and the mean number of seeds."""
    gaps, sames = simulated(plan, shift, std)
    gap = gaps <= of_gap(plan)
    same = sames <= np.array(boundaries(plan.first, plan.most, LEVEL))
    stop = gap | same
    at = np.where(stop.any(1), stop.argmax(1), plan.looks - 1)
    of_gaps = gap[np.arange(len(at)), at]
    of_same = (same & ~gap)[np.arange(len(at)), at]
    return of_gaps.mean(), of_same.mean(), plan.first + at.mean()


def test_boundaries_grow_with_the_looks_and_with_the_level():
    """Without the second, neither the p-value nor Holm's correction of it would be defined."""
    levels = np.exp(np.linspace(np.log(1e-8), np.log(0.9), 60))
    found = np.array([boundaries(3, 9, level) for level in levels])
    assert (np.diff(found, axis=0) > 0).all()
    assert (np.diff(found[levels < 0.1], axis=1) > 0).all()
    # The first look spends what it may, and so does a single one.
    spent = 2 * special.ndtr(special.ndtri(levels / 2) * np.sqrt(3))
    assert found[:, 0] == pytest.approx(spent, rel=0.02)


@pytest.mark.parametrize("n", [2, 3, 8, 30])
def test_a_step_of_the_chain_keeps_the_distribution_of_t(n):
    """Without boundaries, t of n + 1 seeds is Student's if that of n is."""
    mass = np.diff(special.ndtr(_edges()))
    after = mass @ _transition(n)
    assert np.abs(np.cumsum(after) - np.cumsum(mass)).max() < 6e-4  # of the cells, in the middle


@pytest.mark.slow
class TestErrorRates:
    """Simulations of normal runs with every look that a plan allows."""

    @pytest.mark.parametrize("first, most", [(2, 5), (3, 9), (5, 12)])
    @pytest.mark.parametrize("ratio", [1, 4])
    def test_equal_rows_differ_in_5_percent(self, first, most, ratio):
        """The boundaries are exact, also for rows that vary unequally."""
        plan = SeedPlan("random", ("mine",), first, most)
        gaps, _ = simulated(plan, 0.0, 1.0, ratio)
        assert abs((gaps <= of_gap(plan)).any(1).mean() - LEVEL) < CHANCE

    def test_testing_again_after_each_seed_is_wrong_far_more_often(self):
        gaps, _ = simulated(PLAN, 0.0, 1.0)
        assert (gaps <= LEVEL).any(1).mean() > 0.15
        # The boundaries of normal variables, which have no degrees of freedom.
        normal = [0.000104, 0.000739, 0.002389, 0.005198, 0.009054, 0.013742, 0.019039]
        assert (gaps <= 2 * np.array(normal)).any(1).mean() > LEVEL + CHANCE

    def test_holm_over_rows_that_share_the_baseline(self):
        """One of five equal rows differs in at most 5% of all suites."""
        rng = np.random.default_rng(1)
        runs = rng.standard_normal((6, REPETITIONS, PLAN.most))
        crossed = np.zeros(REPETITIONS, bool)
        for row in runs[1:]:
            for n, bound in zip(range(3, 10), of_gap(PLAN, LEVEL / 5), strict=True):
                x = (row - runs[0])[:, :n]
                t = x.mean(1) / x.std(1, ddof=1) * np.sqrt(n)
                crossed |= 2 * special.stdtr(n - 1, -abs(t)) <= bound
        assert 0.02 < crossed.mean() < LEVEL

    @pytest.mark.parametrize("std", [0.05, 0.1, 0.2])
    def test_a_gap_at_the_margin_is_called_equivalent_in_at_most_5_percent(self, std):
        _, sames = simulated(PLAN, PLAN.margin, std)
        crossed = (sames <= np.array(boundaries(3, 9, LEVEL))).any(1)
        assert crossed.mean() < LEVEL + CHANCE
        assert (sames <= LEVEL).any(1).mean() > 0.1  # without boundaries
        assert ends(PLAN, PLAN.margin, std)[1] < LEVEL + CHANCE

    @pytest.mark.parametrize(
        "shift, std, gap, same, seeds",
        [
            (16.3, 1.0, 1.0, 0.0, 3.9),
            (1.0, 0.2, 1.0, 0.0, 4.9),
            (1.0, 0.4, 0.99, 0.0, 6.3),
            (0.5, 0.2, 0.98, 0.01, 6.2),
            (0.0, 0.2, 0.01, 0.98, 6.0),
            (0.0, 1.0, 0.05, 0.0, 8.9),
        ],
    )
    def test_seeds_saved(self, shift, std, gap, same, seeds):
        """The numbers of docs/guides/suites.md, against nine seeds in all."""
        of_gap, of_same, taken = ends(PLAN, shift, std)
        assert (of_gap, of_same) == pytest.approx((gap, same), abs=0.006)
        assert taken == pytest.approx(seeds, abs=0.06)
        fixed = (simulated(PLAN, shift, std)[0][:, -1] <= LEVEL).mean()
        assert shift == 0 or fixed - of_gap < 0.02  # little is lost against a fixed number


def write_suite(
    root: Path, plan: SeedPlan | None, aps: dict[str, list[float]], **changes: Any
) -> Path:
    """Write the folder of a suite with a run per init and value."""
    for init, values in aps.items():
        for seed, ap in enumerate(values):
            metrics = {"bbox/AP": ap, "bbox/AP50": ap + 20, "bbox/AP75": ap - 5}
            write_run(
                root / "runs" / "task" / init / f"seed{seed}-abc",
                **{"init": init, "seed": seed, "metrics": metrics},
                weights_sha256=None if init == "random" else init.encode().hex().ljust(64, "0"),
                **changes,
            )
    content = {KEY: None if plan is None else asdict(plan)}
    (root / "suite.json").write_text(json.dumps(content))
    return root


RUNS = {
    "random": [30.0, 30.4, 29.8, 30.1, 30.2, 29.9],
    "strong": [35.1, 34.4, 35.9, 35.3],
    "same": [30.1, 30.3, 29.9, 30.1],
}
OF_THREE = SeedPlan("random", ("strong", "same", "absent"), 3, 6, 0.5)


def test_looks_by_hand():
    values = {init: dict(enumerate(numbers)) for init, numbers in RUNS.items()}
    found = compare(OF_THREE, values)
    assert [len(each.looks) for each in found.values()] == [2, 2, 0]
    assert [each.decided for each in found.values()] == [GAP, SAME, ""]
    for row, each in found.items():
        for number, look in enumerate(each.looks):
            n = 3 + number
            x = np.array(RUNS[row][:n]) - RUNS["random"][:n]
            t = x.mean() / x.std(ddof=1) * np.sqrt(n)
            assert look.nominal == pytest.approx(2 * special.stdtr(n - 1, -abs(t)))
            assert look.boundary == of_gap(OF_THREE)[number]
            critical = -special.stdtrit(n - 1, look.boundary / 2) * x.std(ddof=1) / np.sqrt(n)
            assert (look.low, look.high) == pytest.approx(
                (x.mean() - critical, x.mean() + critical)
            )
            # The interval leaves out 0, and the p-value is below 5%, where a boundary is crossed.
            crossed = [each.nominal <= each.boundary for each in each.looks[: number + 1]]
            assert any(crossed) == (look.p_value < LEVEL)
            assert crossed[-1] == (look.low > 0 or look.high < 0)
    last = found["strong"].looks[-1]
    assert found["strong"].holm == pytest.approx(3 * last.p_value)  # over three rows
    assert found["absent"].holm == 1.0


def test_a_missing_seed_and_equal_differences_are_no_evidence():
    values = {"random": {0: 1.0, 1: 1.1, 2: 1.3, 3: 1.2}, "mine": {0: 5.0, 1: 5.1, 3: 5.2}}
    found = compare(PLAN, values)["mine"]
    assert found.looks == [] and found.seeds == 2
    values["mine"] = {seed: 4 + ap for seed, ap in values["random"].items()}
    found = compare(PLAN, values)["mine"]
    assert [look.p_value for look in found.looks] == [1.0, 1.0] and found.decided == ""


@pytest.mark.slow
def test_the_table_accounts_for_the_looks(tmp_path):
    root = write_suite(tmp_path / "s", OF_THREE, RUNS)
    results = collect([root])
    [table] = make_tables(results, resamples=0)
    strong = next(row for row in table.rows if row.init == "strong")
    gap, look = strong.gaps["bbox/AP"], table.looks.comparisons["strong"].looks[-1]
    assert (gap.low, gap.high, gap.p_value) == (look.low, look.high, look.p_value)
    assert strong.gaps["bbox/AP50"].p_value is None  # the looks were not at AP50
    texts = rendered(Report([table], results))
    terminal = texts.pop("terminal")
    assert "looks taken, of 4: strong 2, same 2" in terminal and "over all looks" in terminal
    for text in texts.values():
        assert "2 of 4" in text and "no: a look takes 3 seeds of both rows" in text
        assert "a gap at look 2: nominal p" in text
        assert "within ±0.5 at look 2" in text.replace("$\\pm$", "±")
        assert "seeds were added until each gap to random was decided" in text
    out, bundle = tmp_path / "out", tmp_path / "x.zip"
    make_table.main([str(root), "--out", str(out), "--format", "csv,md", "--bundle", str(bundle)])
    looks = (out / "table.looks.csv").read_text()
    assert [row["init"] for row in csv_rows(looks)] == ["strong"] * 2 + ["same"] * 2
    rows = csv_rows((out / "table.csv").read_text())
    assert {row["metric"] for row in rows if row["p_holm"]} == {"bbox/AP"}
    assert not any(row["paired_p"] or row["smallest_gap"] for row in rows)
    make_table.main([str(bundle), "--out", str(out), "--format", "csv"])
    assert (out / "table.looks.csv").read_text() == looks
    # Another baseline was not looked at.
    [other] = make_tables(results, "same")
    assert all(gap.p_value is None for row in other.rows for gap in row.gaps.values() if gap)
    assert "gaps to another row are not tested" in rendered(Report([other], results))["md"]
    with pytest.raises(UserError, match=r"--margin 0\.3: the looks of this suite were at 0\.5"):
        make_tables(results, margin=0.3)


def test_runs_of_another_suite_are_refused(tmp_path):
    """Their number did not depend on the looks, or on others."""
    write_suite(tmp_path / "a", OF_THREE, RUNS)
    write_suite(tmp_path / "b", None, {"other": [31.0, 31.5, 32.0]})
    with pytest.raises(UserError, match="cannot be in one table, as seeds were added"):
        make_tables(collect([tmp_path]))


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
    root = write_suite(tmp_path / "s", OF_THREE, {"random": [1.0]})
    (root / "suite.json").write_text(json.dumps({KEY: plan}))
    with pytest.raises(UserError, match=r"until|margin"):
        collect([root])
    (root / "suite.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"suite\.json: not valid JSON"):
        collect([root])
