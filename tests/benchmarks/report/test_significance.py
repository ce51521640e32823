"""Paired tests, Holm, power and equivalence: against closed forms, scipy, and simulated errors."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import integrate, stats

from benchmarks.make_table import main
from benchmarks.report.aggregate import Cell, aggregate
from benchmarks.report.captions import nothing_shown, uncertainty
from benchmarks.report.significance import (
    equivalence,
    holm,
    paired,
    pooled_std,
    runs_needed,
    significance,
    smallest_gap,
    unpaired,
    welch_power,
)
from moco.common.errors import UserError
from tests.benchmarks.report.fake_runs import CONFIG, csv_rows, rendered, report, write_pair
from tests.benchmarks.report.test_aggregate import MOCO, run, runs

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


def test_pairs_are_of_runs_that_differ_in_their_weights_alone():
    own = {"MODEL.WEIGHTS": "a.pth", "OUTPUT_DIR": "x", "INPUT.FORMAT": "BGR"}  # the weights' own
    equal = rows(*runs("random", A), *runs("moco", B, MOCO, config={**CONFIG, **own}))
    assert unpaired(*equal, "bbox/AP") == ""
    fewer = rows(*runs("random", A), *runs("moco", B[:3], MOCO))
    assert unpaired(*fewer, "bbox/AP") == "seeds 0, 1, 2 / 0, 1, 2, 3"
    workers = runs("moco", B, MOCO, config={**CONFIG, "DATALOADER.NUM_WORKERS": 2})
    assert "DATALOADER.NUM_WORKERS 2 / None (seeds 0, 1, 2, 3)" in unpaired(
        *rows(*runs("random", A), *workers), "bbox/AP"
    )
    gpus = runs("moco", B, MOCO, provenance={"hardware": {"gpus": ["V100", "V100"]}})
    assert "GPUs 2 / 0" in unpaired(*rows(*runs("random", A), *gpus), "bbox/AP")
    for start, why in (
        (None, "initial head"),
        ({"head": {"rpn.conv.weight": "2f"}, "batches": ["a0", "a1"]}, "rpn.conv.weight"),
        ({"head": {"rpn.conv.weight": "1f"}, "batches": ["a0", "a2"]}, "batch 2"),
    ):
        other = runs("moco", B, MOCO, start=start)
        assert why in unpaired(*rows(*runs("random", A), *other), "bbox/AP")
    absent = run(init="moco", seed=3, weights_sha256=MOCO, metrics={"bbox/AP": None})
    found = rows(*runs("random", A), *runs("moco", B[:3], MOCO), absent)
    assert "no number" in unpaired(*found, "bbox/AP")


def test_holm_is_the_closure_of_bonferroni():
    """A hypothesis is rejected where every set of hypotheses that holds it is, by Bonferroni."""
    p = [0.011, 0.02, 0.004, 0.3, 0.02]
    sets = [s for n in range(1, 6) for s in itertools.combinations(range(5), n)]
    closed = {
        i: max(min(1, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in range(5)
    }
    assert holm(dict(enumerate(p))) == pytest.approx(closed)
    assert holm({}) == {}


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
    """Of the degrees of freedom that Welch's test takes, each as probable as it is."""
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
    # Of a table with two gaps, one of them real: the gap that is said is found by Holm's test.
    largest = smallest_gap(n, 0.05 / 2)
    families = zip(welch(first + largest, base), welch(second, base), strict=True)
    found = np.mean([holm(dict(enumerate(p)))[0] < 0.05 for p in families])
    assert found == pytest.approx(0.8, abs=0.03)
    # A true gap of the margin itself is called equal in at most 5%, none in nearly all.
    assert rate(equivalence, first + 7, base, 7.0) < 0.08
    assert rate(equivalence, first, base, 7.0) > 0.9


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
    assert found[0].same[0] == equivalence(Cell(B), Cell(A), 1.0)
    assert significance(replace(table, baseline=None)) == []


def test_in_every_format(folder, tmp_path, capsys):
    main([str(folder), "--margin", "0.3", "--out", str(tmp_path), "--format", "md,csv,tex,html"])
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if line.startswith("moco − random, AP:")]
    for text in (
        "Holm (6 gaps) p = ",
        "paired by seed [",
        "runs for this gap",
        "within ±0.3",
    ):
        assert text in line
    for name in ("table.md", "table.html"):
        text = (tmp_path / name).read_text()
        assert "Holm (6 gaps)" in text and "seeds 0, 1 / 0, 1, 2, 3" in text, name
    line = csv_rows((tmp_path / "table.csv").read_text())[3]
    assert line["init"] == "moco" and float(line["equivalence_p"]) > 0.05
    assert float(line["paired_low"]) == pytest.approx(paired(Cell(B), Cell(A))[0], rel=1e-4)


def test_pre_trainings_are_values_of_a_row(tmp_path):
    """Three files, the mean of two runs each; the other row has one file."""
    members = [
        run(init="one", seed=s, weights_sha256="e" * 64, metrics={"bbox/AP": ap})
        for s, ap in enumerate(A)
    ]
    for number, values in enumerate(((20.0, 22.0), (24.0, 24.0), (20.0, 20.0)), 1):
        members += runs(f"moco@{number}", values, f"{number}" * 64)
    [table] = aggregate(members, "one")
    row = next(row for row in table.rows if row.init == "moco")
    assert row.cells["bbox/AP"].values == (21.0, 24.0, 20.0) and row.n == 3 and row.several
    expected = stats.ttest_ind((21.0, 24.0, 20.0), A, equal_var=False).pvalue
    assert row.gaps["bbox/AP"].p_value == pytest.approx(expected)
    [found] = significance(table)
    assert found.n == 3 and "pre-trainings" in found.unpaired
    said = uncertainty(table)
    assert "moco (3 files" in said and "pre-training of one (one file" in said
    assert "test images" in said and "fine-tuning seeds" in said
    random = [
        replace(each, record=replace(each.record, init="random", weights_sha256=None))
        for each in members[:4]
    ]
    assert "one file" not in uncertainty(aggregate([*random, *members[4:]])[0])
    with pytest.raises(UserError, match="baseline"):
        aggregate(members, "moco@1")


def test_simulated_error_rate_over_pre_trainings():
    """Files differ by 1, runs of one file by 0.2: with runs as values, equal methods differ."""
    random = np.random.default_rng(0)
    files = random.normal(size=(1000, 2, 3, 1))
    values = files + 0.2 * random.normal(size=(1000, 2, 3, 4))

    def rate(x):
        return np.mean(stats.ttest_ind(x[:, 0], x[:, 1], axis=1, equal_var=False).pvalue < 0.05)

    assert rate(values.mean(axis=3)) < 0.055 < 0.2 < rate(values.reshape(1000, 2, 12))


def test_against_statsmodels():
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    power = pytest.importorskip("statsmodels.stats.power")
    p = [0.011, 0.02, 0.004, 0.3, 0.02]
    corrected = multitest.multipletests(p, method="holm")[1]
    assert list(holm(dict(enumerate(p))).values()) != []
    assert [holm(dict(enumerate(p)))[i] for i in range(5)] == pytest.approx(corrected)
    tost = weightstats.ttost_ind(B, A, -5, 5, usevar="unequal")[0]
    assert equivalence(Cell(B), Cell(A), 5.0) == pytest.approx(tost)
    test = weightstats.DescrStatsW(np.subtract(B, A))
    assert paired(Cell(B), Cell(A))[2] == pytest.approx(test.ttest_mean(0)[1])
    assert paired(Cell(B), Cell(A))[:2] == pytest.approx(test.tconfint_mean(0.05))
    # With many runs Welch's power is the pooled test's.
    pooled = power.TTestIndPower().solve_power(nobs1=40, alpha=0.05, power=0.8)
    assert smallest_gap(40) == pytest.approx(pooled, rel=0.01)


@pytest.mark.parametrize("trials", [1, 2])
def test_each_table_says_what_its_uncertainty_is_of(tmp_path, trials):
    write_pair(tmp_path, {"random": [*A[:trials]], "moco": [*B[:trials]]}, task="t")
    for renderer, text in rendered(report(tmp_path)).items():
        for word in ("fine-tuning seeds", "pre-training (one file", "test images"):
            assert word in text, renderer
        assert ("no uncertainty is known" in text) == (trials == 1)


@pytest.mark.parametrize(("values", "shown"), [(B, False), ([x + 20 for x in B], True)])
def test_a_table_that_shows_nothing_says_so(values, shown):
    [table] = aggregate([*runs("random", A), *runs("moco", values, MOCO)])
    found = significance(table)
    said = nothing_shown(table, found)
    if shown:
        assert said == []
        return
    [gap] = found
    assert "(of 1 gap)" in said[0] and "difference to random" in said[0]
    assert said[0].endswith(
        f"4 runs per row find gaps of {gap.smallest:.1f} AP 80% of the time, corrected as these are"
    )
    [table] = aggregate([*runs("random", A[:2]), *runs("moco", [x + 1 for x in A[:2]], MOCO)])
    [said] = nothing_shown(table, significance(table))
    assert said.endswith("is below 0.05 after Holm's correction"), "no gap of two runs is known"
    several = [*runs("random", A), *runs("moco", values, MOCO), *runs("few", A[1:], "b" * 64)]
    [table] = aggregate(several)
    [said] = nothing_shown(table, significance(table))
    assert "; 3 to 4 runs per row find gaps of " in said
