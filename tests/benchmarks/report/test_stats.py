"""Paired tests, Holm, power and equivalence: against closed forms, scipy, and simulated errors."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import integrate, stats

from benchmarks.report.stats import (
    equivalence,
    holm,
    holm_level,
    nothing_shown,
    paired,
    pooled_std,
    runs_needed,
    significance,
    smallest_gap,
    uncertainty,
    unpaired_reason,
    welch_power,
)
from benchmarks.report.table import Cell, aggregate
from moco.common.errors import UserError
from tests.benchmarks.report.fake_runs import CONFIG, report, write_pair
from tests.benchmarks.report.test_table import MOCO, runs

A, B = (10.0, 12.0, 14.0, 11.0), (12.5, 13.0, 16.5, 12.0)


def rows(*members):
    [table] = aggregate(members)
    return table.rows[1], table.rows[0]


def test_paired_by_the_closed_form():
    """Differences 2.5, 1, 2.5, 1: mean 1.75, squared deviations 4 x 0.75^2 over n - 1 = 3."""
    low, high, p = paired(Cell(B), Cell(A))
    error = math.sqrt(4 * 0.75**2 / 3) / math.sqrt(4)
    assert p == pytest.approx(2 * stats.t.sf(1.75 / error, 3), rel=1e-9)
    assert (low + high) / 2 == pytest.approx(1.75)
    assert (high - low) / 2 == pytest.approx(stats.t.ppf(0.975, 3) * error, rel=1e-9)
    assert paired(Cell((2.0,)), Cell((1.0,))) is None
    assert paired(Cell((0.3, 0.4)), Cell((0.2, 0.3))) is None  # both 0.1, but for rounding


@pytest.mark.parametrize(
    ("values", "changes", "reason"),
    [
        (B, {"config": {**CONFIG, "MODEL.WEIGHTS": "a.pth", "INPUT.FORMAT": "BGR"}}, None),
        (B[:3], {}, "seeds 0, 1, 2 / 0, 1, 2, 3"),
        (
            B,
            {"config": {**CONFIG, "DATALOADER.NUM_WORKERS": 2}},
            "DATALOADER.NUM_WORKERS 2 / None (seeds 0, 1, 2, 3)",
        ),
        (B, {"provenance": {"hardware": {"gpus": ["V100", "V100"]}}}, "GPUs 2 / 0"),
        (B, {"start": None}, "first batch"),
        ((*B[:3], None), {}, "no number"),
    ],
)
def test_pairs_are_of_runs_that_differ_in_their_weights_alone(values, changes, reason):
    """`test_isolation` has all differences; keys of the weights themselves are none."""
    found = unpaired_reason(
        *rows(*runs("random", A), *runs("moco", values, MOCO, **changes)), "bbox/AP"
    )
    assert found == "" if reason is None else reason in found


def test_holm_is_the_closure_of_bonferroni():
    """A hypothesis is rejected where every set of hypotheses that holds it is, by Bonferroni."""
    p = [0.011, 0.02, 0.004, 0.3, 0.02]
    sets = [s for n in range(1, 6) for s in itertools.combinations(range(5), n)]
    closed = {
        i: max(min(1, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in range(5)
    }
    assert holm(dict(enumerate(p))) == pytest.approx(closed)
    assert holm({}) == {}


def test_the_level_of_a_gap_is_that_at_which_holm_rejects_it():
    random = np.random.default_rng(0)
    rejected = 0
    for p in random.uniform(size=(2000, 6)) ** 4:
        family = dict(enumerate(p))
        for key, value in holm(family).items():
            assert (value < 0.05) == (p[key] < holm_level(family, key))
            rejected += value < 0.05
    assert 1000 < rejected < 11000, "both cases occur"
    assert holm_level({"a": 0.9, "b": 0.5}, "a") == pytest.approx(0.05 / 2)
    assert holm_level({"a": 0.9, "b": 0.001}, "a") == pytest.approx(0.05)


@pytest.mark.parametrize(("n", "others"), [(3, 0.0), (3, 50.0), (5, 0.0), (5, 50.0)])
def test_a_gap_of_the_reported_size_is_bold_in_80_percent_of_simulated_tables(n, others):
    """Tables of a baseline and two rows with three correlated metrics each: six gaps.

    One metric of the first row has the gap. The second row has none, or gaps that are always found,
    so that Holm's correction asks less of the first row.
    """
    random, tables = np.random.default_rng(0), 4000
    runs = random.normal(size=(3, tables, 3, n)) + random.normal(size=(3, tables, 1, n))
    level = 0.05 / (3 if others else 6)
    gap = smallest_gap(n, level) * math.sqrt(2)  # the standard deviation of a sum of two
    runs[1, :, 0] += gap
    runs[2] += others
    p = stats.ttest_ind(runs[1:], runs[:1], axis=-1, equal_var=False).pvalue  # (2, tables, 3)
    bold = [holm(dict(enumerate(own)))[0] < 0.05 for own in p.transpose(1, 0, 2).reshape(-1, 6)]
    assert np.mean(bold) == pytest.approx(0.8, abs=0.025)
    assert runs_needed(gap / math.sqrt(2), level) in (n, n + 1)


def test_equivalence_is_the_90_percent_interval_within_the_margin():
    test = stats.ttest_ind(B, A, equal_var=False)
    interval = test.confidence_interval(0.9)
    edge = max(abs(interval.low), abs(interval.high))
    assert equivalence(Cell(B), Cell(A), edge) == pytest.approx(0.05)
    error = math.sqrt((np.var(A, ddof=1) + np.var(B, ddof=1)) / 4)
    closed = stats.t.sf((5 - (np.mean(B) - np.mean(A))) / error, test.df)
    assert equivalence(Cell(B), Cell(A), 5.0) == pytest.approx(closed, rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_power_by_the_noncentral_t(n):
    """The power is a mean over the degrees of freedom that Welch's test may take."""
    gap = smallest_gap(n)

    def found(quantile: float) -> float:
        share = stats.beta.ppf(quantile, (n - 1) / 2, (n - 1) / 2)
        limit = stats.t.ppf(0.975, (n - 1) / (share**2 + (1 - share) ** 2))
        return stats.nct.sf(limit, 2 * n - 2, gap * math.sqrt(n / 2))

    assert integrate.quad(found, 0, 1, epsabs=1e-4)[0] == pytest.approx(0.8, abs=0.002)
    assert welch_power(gap, n) == pytest.approx(0.8, abs=1e-4)
    assert smallest_gap(runs_needed(gap + 1e-3)) <= gap + 1e-3 and runs_needed(gap + 1e-3) == n


def test_runs_that_find_a_gap():
    for gap in (0.3, 1.0, 2.5):
        n = runs_needed(gap)
        assert smallest_gap(n) <= gap < smallest_gap(n - 1)
    assert runs_needed(100.0) == 2 and runs_needed(0.01) == runs_needed(0.0) == math.inf
    assert pooled_std([Cell((1.0, 3.0)), Cell((4.0, 4.0)), Cell((9.0,)), None]) == 1.0
    assert pooled_std([Cell((1.0,))]) == 0.0


@pytest.mark.slow
def test_simulated_error_rates():
    """Tables of three equal rows with three runs each; a seed does the same to every row."""
    random, n = np.random.default_rng(0), 3
    base, first, second = random.normal(size=(3, 4000, n))
    shared = 3 * random.normal(size=(4000, n))

    def welch(x, y):
        return stats.ttest_ind(x, y, axis=1, equal_var=False).pvalue

    def rate(test, x, y, *more):
        pairs = zip(x[:500], y[:500], strict=True)
        return np.mean([test(Cell(tuple(a)), Cell(tuple(b)), *more) < 0.05 for a, b in pairs])

    def pair(x, y):
        return paired(x, y)[2]

    families = zip(welch(first, base), welch(second, base), strict=True)
    assert np.mean([min(holm(dict(enumerate(p))).values()) < 0.05 for p in families]) < 0.055
    assert rate(pair, first + shared, base + shared) == pytest.approx(0.05, abs=0.03)
    unseen = (welch(first + shared + 4, base + shared) < 0.05).mean()
    assert rate(pair, first + shared + 4, base + shared) > unseen + 0.3  # what pairing is for
    assert (welch(first + smallest_gap(n), base) < 0.05).mean() == pytest.approx(0.8, abs=0.02)
    # Of a table with two gaps, one of them real: Holm's test finds the gap that is reported.
    largest = smallest_gap(n, 0.05 / 2)
    families = zip(welch(first + largest, base), welch(second, base), strict=True)
    found = np.mean([holm(dict(enumerate(p)))[0] < 0.05 for p in families])
    assert found == pytest.approx(0.8, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "margin"), [(3, 7.0), (5, 3.0)])
def test_simulated_error_rates_of_equivalence(n, margin):
    """A true gap of the margin is called equal in at most 5 % of tables, none in nearly all."""
    times, level = 500, 0.05
    first, base = stats.norm.rvs(size=(2, times, n), random_state=n)

    def equal(gap: float, scale: float) -> int:
        """Count the tables whose rows have this gap, one with `scale` times the spread."""
        pairs = zip(scale * first + gap, base, strict=True)
        p_values = [equivalence(Cell(tuple(a)), Cell(tuple(b)), margin) for a, b in pairs]
        return sum(p < level for p in p_values)

    for gap, scale in ((margin, 1.0), (-margin, 2.0)):
        assert equal(gap, scale) <= stats.binom.ppf(0.999, times, level)
    assert equal(0.0, 1.0) > 0.9 * times


@pytest.fixture
def folder(tmp_path):
    aps = {"random": [*A], "moco": [*B], "other": [10.5, 11.5], "once": [12.0]}
    return write_pair(tmp_path / "runs", aps, task="t")


def test_every_gap_of_a_table_is_in_the_family(folder):
    [table] = report(folder).tables
    found = significance(replace(table, margin=1.0))
    assert [(each.row.init, each.n) for each in found] == [("moco", 4)] * 3 + [("other", 2)] * 3
    p = {i: each.row.gaps[each.metric].p_value for i, each in enumerate(found)}
    assert holm(p) == {i: each.holm for i, each in enumerate(found)}
    assert found[0].paired[:3] == paired(Cell(B), Cell(A))
    assert found[0].paired[3] == pytest.approx(3 * found[0].paired[2])  # `other` has no pairs
    assert found[3].paired is None and "seeds 0, 1 / 0, 1, 2, 3" in found[3].unpaired
    level, std = 0.05 / 6, pooled_std([Cell(A), Cell(B)])
    assert found[0].smallest == pytest.approx(smallest_gap(4, level) * std)
    assert found[0].runs == runs_needed(abs(found[0].row.gaps["bbox/AP"].value) / std, level)
    assert found[3].smallest is found[3].runs is None, "two runs do not know their spread"
    assert not found[0].significant and found[0].runs > 4
    far = write_pair(folder / "far", {"far": [x + 33 for x in B]}, task="t")
    found = [e for e in significance(report(far.parent).tables[0]) if e.row.init in ("far", "moco")]
    assert all(each.significant and each.runs is None for each in found[:3]), "it is found"
    assert found[3].smallest == pytest.approx(smallest_gap(4, 0.05 / 6) * std), "3 of 9 are left"
    found = significance(replace(table, margin=1.0))
    assert found[0].same[0] == equivalence(Cell(B), Cell(A), 1.0)
    assert significance(replace(table, baseline=None)) == []


def test_pre_trainings_are_values_of_a_row(tmp_path):
    """Three files, the mean of two runs each; the other row has one file."""
    members = runs("one", A, "e" * 64)
    for number, values in enumerate(((20.0, 22.0), (24.0, 24.0), (20.0, 20.0)), 1):
        members += runs(f"moco@{number}", values, f"{number}" * 64)
    [table] = aggregate(members, "one")
    row = next(row for row in table.rows if row.init == "moco")
    assert row.cells["bbox/AP"].values == (21.0, 24.0, 20.0) and row.n == 3 and row.several
    expected = stats.ttest_ind((21.0, 24.0, 20.0), A, equal_var=False).pvalue
    assert row.gaps["bbox/AP"].p_value == pytest.approx(expected)
    [found] = significance(table)
    assert found.n == 3 and "pre-trainings" in found.unpaired
    text = uncertainty(table)
    assert "moco (3 files" in text and "pre-training of one (one file" in text
    assert "test images" in text and "fine-tuning seeds" in text
    assert "one file" not in uncertainty(aggregate([*runs("random", A), *members[4:]])[0])
    with pytest.raises(UserError, match="baseline"):
        aggregate(members, "moco@1")


def test_against_statsmodels():
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    power = pytest.importorskip("statsmodels.stats.power")
    p = [0.011, 0.02, 0.004, 0.3, 0.02]
    corrected = multitest.multipletests(p, method="holm")[1]
    assert [holm(dict(enumerate(p)))[i] for i in range(5)] == pytest.approx(corrected)
    tost = weightstats.ttost_ind(B, A, -5, 5, usevar="unequal")[0]
    assert equivalence(Cell(B), Cell(A), 5.0) == pytest.approx(tost)
    test = weightstats.DescrStatsW(np.subtract(B, A))
    assert paired(Cell(B), Cell(A))[2] == pytest.approx(test.ttest_mean(0)[1])
    assert paired(Cell(B), Cell(A))[:2] == pytest.approx(test.tconfint_mean(0.05))
    # With many runs Welch's power is the pooled test's.
    pooled = power.TTestIndPower().solve_power(nobs1=40, alpha=0.05, power=0.8)
    assert smallest_gap(40) == pytest.approx(pooled, rel=0.01)


def test_a_table_without_a_significant_gap_has_a_note_on_what_it_detects():
    def notes(base, *others):
        [table] = aggregate([*runs("random", base), *others])
        found = significance(table)
        return nothing_shown(table, found), found[0].smallest

    assert notes(A, *runs("moco", [x + 20 for x in B], MOCO))[0] == []
    [text], smallest = notes(A, *runs("moco", B, MOCO))
    assert "(of 1 gap)" in text and "difference from random" in text
    size = f"{smallest:.1f} AP 80% of the time, with the same correction"
    assert text.endswith(f"4 runs per row find gaps of {size}")
    [text], _ = notes(A[:2], *runs("moco", [x + 1 for x in A[:2]], MOCO))
    assert text.endswith("is below 0.05 after Holm's correction"), "no gap of two runs is known"
    [text], _ = notes(A, *runs("moco", B, MOCO), *runs("few", A[1:], "b" * 64))
    assert "; 3 to 4 runs per row find gaps of " in text
