"""Two folders of results: differences by hand, what came and went, what makes them unlike."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.report.aggregate import Table, aggregate
from benchmarks.report.compare import compare
from benchmarks.report.records import Run
from benchmarks.report.render import diff_files, diff_text
from tests.benchmarks.report.fake_runs import CONFIG, csv_rows, record

A, B = (10.0, 12.0, 14.0), (20.0, 21.0, 25.0)  # as in test_aggregate.py
NAMES = ("old", "new")


def tables(rows: dict[str, tuple[float, ...]], **changes) -> list[Table]:
    runs = []
    for init, values in rows.items():
        for seed, value in enumerate(values):
            fields = {"task": "t", "init": init, "seed": seed, "metrics": {"sem_seg/mIoU": value}}
            runs.append(Run(Path(init, str(seed)), record(**{**fields, **changes})))
    return aggregate(runs)


def test_difference_of_means_by_hand():
    found = compare(tables({"random": A}), tables({"random": B}))
    [change] = found.both[0].changes
    gap = change.gaps["sem_seg/mIoU"]
    # 22 - 12; se^2 = 4/3 + 7/3, 3.71 degrees of freedom: t is 2.86, half the interval 5.48
    assert gap.value == pytest.approx(10.0)
    assert (gap.low, gap.high) == (pytest.approx(4.52, abs=0.02), pytest.approx(15.48, abs=0.02))
    assert (change.same, change.doubts) == (False, [])
    text = diff_text(found, NAMES)
    assert "A: old\nB: new" in text
    words = text.replace("  ", "")
    assert "12.0 ± 2.0 (n = 3)" in words and "22.0 ± 2.6 (n = 3)" in words
    assert "+10.0 [4.5, 15.5], p = 0.008" in words


def test_what_appeared_and_vanished():
    first = [*tables({"random": A, "gone": B}), *tables({"random": A}, task="old")]
    second = [*tables({"random": A, "came": B}), *tables({"random": A}, task="young")]
    found = compare(first, second)
    [change] = found.both[0].changes
    assert change.a.init == "random" and change.same
    assert found.both[0].notes == ["only in A: gone", "only in B: came"]
    assert [len(found.vanished), len(found.appeared)] == [1, 1]
    text = diff_text(found, NAMES)
    for line in ("- only in A: gone", "only in A: old: e", "only in B: young: e", "same numbers"):
        assert line in text


@pytest.mark.parametrize(
    "changes", [{"engine": "detectron2"}, {"config": {"DATASETS.TEST": ["lvis"]}}]
)
def test_engines_and_datasets_are_not_compared_with_each_other(changes):
    found = compare(tables({"random": A}), tables({"random": B}, **changes))
    assert found.both == [] and len(found.vanished) == len(found.appeared) == 1


def test_what_makes_a_comparison_doubtful_is_said():
    second = tables(
        {"random": B},
        config={**CONFIG, "SOLVER.BASE_LR": 0.01, "OUTPUT_DIR": "/x"},
        **{"config_sha256": "d" * 64, "iterations": 100, "weights_sha256": "b" * 64},
    )
    found = compare(tables({"random": A}), second)
    [change] = found.both[0].changes
    assert change.doubts == [
        "protocols differ in SOLVER.BASE_LR (0.02 / 0.01)",
        "iterations: 300 / 100",
        "weights: none / bbbbbbbb",
    ]
    files = diff_files(found, NAMES)
    assert "not comparable, random: iterations: 300 / 100" in files["diff.md"]
    [line] = csv_rows(files["diff.csv"])
    assert line["doubts"] == "; ".join(change.doubts)
    numbers = [line[key] for key in ("n_a", "mean_a", "mean_b", "difference")]
    assert numbers == ["3", "12", "22", "10"]


def test_missing_numbers_stay_missing():
    found = compare(tables({"random": A}, metrics={"sem_seg/mIoU": None}), tables({"random": B}))
    assert found.both[0].changes[0].gaps["sem_seg/mIoU"] is None
    files = diff_files(found, NAMES)
    [line] = csv_rows(files["diff.csv"])
    assert [line[k] for k in ("n_a", "mean_a", "n_b", "difference")] == ["0", "", "3", ""]
    assert "| random | mIoU | – | 22.0 ± 2.6 (n = 3) | – |" in files["diff.md"]


def test_one_more_seed_is_not_the_same():
    first, second = tables({"random": A}), tables({"random": A[:2]})
    assert not compare(first, second).both[0].changes[0].same
    reordered = [replace(table, rows=table.rows[::-1]) for table in first]
    assert compare(first, reordered).both[0].changes[0].same


def test_runs_that_both_sides_have_are_not_tested():
    """Two of the three runs are copies, so that the sides are not independent."""
    found = compare(tables({"random": A}), tables({"random": (*A[:2], 25.0)}))
    [change] = found.both[0].changes
    gap = change.gaps["sem_seg/mIoU"]
    assert gap.value == pytest.approx(11 / 3) and gap.low is gap.high is gap.p_value is None
    text = diff_text(found, NAMES)
    assert "random: A and B share seeds 0, 1 with the same numbers, so the difference is" in text
    assert "+3.7 (no interval)" in text
