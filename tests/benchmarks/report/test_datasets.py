"""Summary over datasets: on numbers whose results are known by hand, and of run folders."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from scipy import stats

from benchmarks.report.bundle import share
from benchmarks.report.datasets import (
    RESAMPLES,
    Collection,
    datasets_needed,
    interval,
    reach,
    signed_rank,
)
from benchmarks.report.plots import differences_figure
from benchmarks.report.report import Report
from benchmarks.report.table import aggregate
from tests.benchmarks.report.fake_runs import CONFIG, csv_rows, record, rendered, report, write_run

AP = {
    "random": {"air--a": (10.0, 12.0), "air--b": (20.0,), "sea--c": (30.0,)},
    "mine": {"air--a": (21.0, 23.0), "air--b": (19.0,), "sea--c": (30.04,)},
}
ABSENT = {("mine", "sea--d"): "failed: the loss is nan"}


def collection(absent=None, values=AP) -> Collection:
    names = {name for of in values.values() for name in of} | {name for _, name in absent or ()}
    return Collection(
        "t", "embedded", "bbox/AP", values, tuple(sorted(names)), absent or {}, "random"
    )


def test_means_ranks_and_wins_by_hand():
    found = collection()
    assert found.complete == found.datasets == ("air--a", "air--b", "sea--c")
    assert found.over == "mean over 3 datasets"
    assert found.means("random") == [11.0, 20.0, 30.0]
    assert found.mean_ranks == {"random": (2 + 1 + 1.5) / 3, "mine": (1 + 2 + 1.5) / 3}
    [pair] = found.pairs
    assert (pair.a, pair.b, pair.wins, pair.losses) == ("mine", "random", 1, 1)
    assert pair.differences == pytest.approx((11.0, -1.0, 0.04))
    # Ranks 3, -2, 1: four of eight sums are as far from the middle as 2.
    assert pair.p_value == pair.holm == 0.75
    assert found.domains == {"air": ["air--a", "air--b"], "sea": ["sea--c"]}
    of_datasets, of_rows, of_domains, of_pairs = found.grids
    assert [c.text for c in of_datasets.rows[0]] == ["air--a", "11.0 ± 1.4", "22.0 ± 1.4"]
    assert of_rows.head[1:] == [found.over, "95% interval", "mean of domain means", "mean rank"]
    assert [of_rows.rows[0][i].text for i in (0, 1, 3, 4)] == ["random", "20.3", "22.8", "1.50"]
    assert [c.text for c in of_domains.rows[0]] == ["air (2 datasets)", "15.5", "20.5"]
    assert of_pairs.rows[0][1].text == "1 / 1 / 1" and "+3.3" in of_pairs.rows[0][2].text


def test_a_failed_dataset_is_in_the_table_and_in_no_mean():
    found = collection(ABSENT)
    assert found.complete == ("air--a", "air--b", "sea--c") and "sea--d" in found.datasets
    assert found.over == "mean over 3 of 4, failed: sea--d"
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in found.grids[0].rows}
    assert rows["sea--d"] == ["–", "failed"]
    assert found.grids[1].head[1] == found.over
    assert "sea--d, mine: failed: the loss is nan" in found.notes
    # One failed seed counts, too: the seeds that are left may be those that went well.
    part = collection({("mine", "air--a"): "failed: killed"})
    assert part.complete == ("air--b", "sea--c") and part.over == "mean over 2 of 3, failed: air--a"
    assert part.grids[0].rows[0][2].text == "22.0 ± 1.4 (failed in part)"
    others = {"random": AP["random"], "mine": {"air--a": (1.0,)}}
    assert collection(values=others).over == "mean over 1 of 3, not run: air--b, sea--c"
    none = collection({("mine", "a"): "unfinished: it was interrupted"}, {"mine": {}, "x": {}})
    assert none.over == "mean over 0 of 1, unfinished: a" and len(none.grids) == 1
    assert differences_figure(none) is None and none.notes


def test_the_interval_is_over_datasets_and_seeds():
    assert interval([[[7.0]] * 6]) == (7.0, 7.0) and interval([[[7.0, 8.0]]]) is None
    # Of two datasets each is drawn twice with probability 1/4.
    assert interval([[[0.0], [10.0]]]) == (0.0, 10.0)
    # Seeds that differ, in datasets that do not: the mean of two draws of each of two.
    assert interval([[[0.0, 10.0], [0.0, 10.0]]]) == (0.0, 10.0)
    many = [[float(i % 2)] for i in range(100)]
    low, high = interval([many])
    assert (low, high) == pytest.approx((0.402, 0.598), abs=0.02)
    # Datasets are drawn for both rows at once, so that what they share cancels.
    shifted = [[value + 2 for value in values] for values in many]
    assert interval([shifted, many]) == (2.0, 2.0)
    # A row of fewer seeds on some datasets is not padded.
    assert interval([[[4.0, 4.0, 4.0], [4.0]]]) == (4.0, 4.0)
    assert RESAMPLES >= 1000


def test_the_signed_rank_test_is_exact():
    values = [1.0, -2.0, 3.0, 4.5, -5.0, 6.0, 7.25, 9.0]
    for signs in itertools.product((1, -1), repeat=4):
        own = [v * s for v, s in zip(values, (*signs, *signs), strict=True)]
        assert signed_rank(own) == pytest.approx(stats.wilcoxon(own, method="exact").pvalue)
    assert signed_rank([1.0, 2.0, 3.0, 4.0, 5.0]) == 0.0625
    assert signed_rank([1.0] * 5) == 0.0625, "ties do not make it smaller"
    assert signed_rank([1.0] * 6) == 0.03125
    assert signed_rank([2.0, 1.0, 0.0]) == signed_rank([2.0, 1.0]) == 0.5
    assert signed_rank([0.0, 0.0]) == signed_rank([]) == 1.0
    for tied in ([1.0, 1.0, -2.0, 2.0, 3.0, -3.0, 4.0], [1.0, -1.0, 1.0, 2.0, 2.0, 2.0, -5.0, 5.0]):
        every_sign = stats.PermutationMethod(n_resamples=2 ** len(tied))
        assert signed_rank(tied) == pytest.approx(stats.wilcoxon(tied, method=every_sign).pvalue)
    # Ranks 1.5, 1.5, 3 of a tie: sums 0 and 6 are the farthest, 1.5 and 4.5 the next.
    assert signed_rank([1.0, -1.0, 5.0]) == 0.75


@pytest.mark.slow
@pytest.mark.parametrize("decimals", [15, 1])
@pytest.mark.parametrize("datasets", [6, 9, 14])
def test_simulated_error_rates_of_the_signed_rank_test(datasets, decimals):
    """Rows without a difference, also with ties: p < 0.05 at most as often as the level says."""
    times, level = 4000, 0.05
    drawn = stats.t.rvs(3, size=(times, datasets), random_state=datasets).round(decimals)
    p_values = [signed_rank(differences) for differences in drawn]
    false_positives = sum(p < level for p in p_values)
    assert false_positives <= stats.binom.ppf(0.999, times, level)
    # With ranks from 1 to n, the attained level is that of scipy's exact distribution.
    if decimals == 15:
        signs = [stats.wilcoxon(each, method="exact").pvalue < level for each in drawn[:500]]
        assert [p < level for p in p_values[:500]] == signs
    moved = [signed_rank(differences + 2.0) < level for differences in drawn[:500]]
    assert sum(moved) / 500 > 2 * false_positives / times, "a difference is found more often"


def test_what_a_number_of_datasets_can_reach():
    assert [datasets_needed(pairs) for pairs in (1, 2, 3, 10)] == [6, 7, 7, 9]
    five, six = reach(5, 2), reach(6, 2)
    assert "5 datasets reaches p = 0.062 at best" in five
    assert "fewer than six datasets can never reach p < .05" in five
    assert "can never" not in six and "p = 0.031" in six
    assert "Holm's correction for 3 pairs of rows, p < .05 takes at least 7 datasets" in reach(6, 3)


def write_suite_runs(
    root: Path, failed: bool = False, keys: Sequence[str] = ("DATASETS.COCO_DIR",) * 3, **changes
) -> Path:
    """Write two seeds of two rows on three datasets, of which one run of `mine` may fail."""
    (root / "many").mkdir(parents=True)
    (root / "many" / "suite.json").write_text("{}")
    for number, name in enumerate(("a", "b", "sea--c")):
        config = {**CONFIG, "DATASETS.TEST": [f"{name}_test"], keys[number]: f"/x/{name}"}
        for init, seed in itertools.product(("random", "mine"), range(2)):
            ap = 10.0 * (number + 1) + seed + 5 * (init == "mine")
            own = {"init": init, "seed": seed, "task": "one", "config": {**config, **changes}}
            own |= {"weights_sha256": None if init == "random" else "a" * 64}
            own |= {"metrics": {"bbox/AP": ap, "bbox/AP50": ap, "bbox/AP75": ap}}
            if failed and (name, init, seed) == ("b", "mine", 1):
                own |= {"status": "failed", "metrics": {}, "notes": ["the loss is nan"]}
            write_run(root / "many" / "runs" / name / init / f"seed{seed}-0a1b2c3d4e", **own)
    return root


def test_the_summary_is_in_every_format(tmp_path):
    made = report(write_suite_runs(tmp_path))
    [found] = made.collections
    assert found.datasets == ("a", "b", "sea--c") and list(found.values) == ["random", "mine"]
    assert found.values["mine"]["b"] == (25.0, 26.0) and made.summary is None
    for name, text in rendered(made).items():
        plain = text.replace("\\", "")
        assert "All datasets: one, embedded engine" in plain, name
        assert "mean over 3 datasets" in text and "3 / 0 / 0" in text, name
        assert "fewer than six datasets can never reach" in text, name
    assert f"{found.figure}" in made.plots
    shared = share(made.results)
    assert shared.transfer[0].record.config["DATASETS.COCO_DIR"] == "a"
    again = type(made)(made.tables, shared)
    assert [again.collections[0].over] == [found.over]


@pytest.mark.slow
def test_the_page_and_the_files_have_the_figure_and_the_numbers(tmp_path):
    from benchmarks.report.export import write_files

    made = report(write_suite_runs(tmp_path / "runs", failed=True))
    paths = {path.name: path for path in write_files(tmp_path / "out", made)}
    [found] = made.collections
    assert f"{found.figure}.png" in paths
    page = paths["table.html"].read_text()
    assert f"{found.heading}: differences from random</figcaption>" in page
    rows = csv_rows(paths["table.datasets.csv"].read_text())
    [failed] = [row for row in rows if row["absent"]]
    assert (failed["init"], failed["dataset"], failed["n"]) == ("mine", "b", "1")
    assert failed["absent"] == "failed: the loss is nan" and failed["in_mean"] == "False"
    assert {row["in_mean"] for row in rows if row["dataset"] != "b"} == {"True"}


def test_datasets_in_other_layouts_are_summarized_too(tmp_path):
    keys = ("DATASETS.VOC_DIR", "DATASETS.YOLO_YAML", "DATASETS.COCO_TRAIN_JSON")
    [found] = report(write_suite_runs(tmp_path, keys=keys)).collections
    assert found.datasets == ("a", "b", "sea--c")


def test_a_run_without_numbers_takes_its_dataset_out(tmp_path):
    [found] = report(write_suite_runs(tmp_path, failed=True)).collections
    assert found.absent == {("mine", "b"): "failed: the loss is nan"}
    assert found.over == "mean over 2 of 3, failed: b"
    # A dataset of which nothing is done is still one.
    folder = tmp_path / "many" / "runs" / "d" / "random" / "seed0-0a1b2c3d4e"
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps({"iteration": 1}) + "\n")
    [found] = report(tmp_path).collections
    assert found.datasets == ("a", "b", "d", "sea--c")
    assert found.over == "mean over 2 of 4, failed: b; unfinished: d"
    # A run beside the suite is not its own; in a bundle its folder is a single name.
    (tmp_path / "seed0-0a1b2c3d4e").mkdir()
    (tmp_path / "seed0-0a1b2c3d4e" / "metrics.json").write_text("{}\n")
    shared = share(report(tmp_path).results)
    [again] = Report(aggregate(shared.transfer), shared).collections
    assert again.over == found.over


def test_other_suites_have_no_such_summary(tmp_path):
    own = write_suite_runs(tmp_path / "names", **{"DATASETS.COCO_DIR": ""})
    assert report(own).collections == [] and report(own).summary is not None
    own = write_suite_runs(tmp_path / "mixed")
    folder = own / "many" / "runs" / "voc" / "random" / "seed0-0a1b2c3d4e"
    write_run(folder, task="another", metrics=record().metrics)
    assert report(own).collections == [] and report(own).summary is not None


def test_tuned_rows_are_a_summary_of_their_own(tmp_path):
    write_suite_runs(tmp_path)
    runs = tmp_path / "many" / "runs"
    for path in list(runs.glob("*/*/*/run.json")):
        name, init, seed, _ = path.relative_to(runs).parts
        content = json.loads(path.read_text())
        content["task"] = "one_tuned"
        content["config"]["SOLVER.TUNED"] = "SOLVER.BASE_LR=0.01,0.02 at 0.5 of the schedule"
        (runs / f"{name}_tuned" / init / seed).mkdir(parents=True)
        (runs / f"{name}_tuned" / init / seed / "run.json").write_text(json.dumps(content))
    plain, tuned = report(tmp_path).collections
    assert plain.datasets == ("a", "b", "sea--c") and plain.task == "one"
    assert tuned.datasets == ("a_tuned", "b_tuned", "sea--c_tuned")
