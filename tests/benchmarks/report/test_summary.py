"""Ranks over several tasks and AP over the schedule, by hand."""

import json

import pytest

from benchmarks.report.analysis import SHARES, convergence, row_cells
from benchmarks.report.datasets import Summary, ranks, summarize
from benchmarks.report.records import collect
from benchmarks.report.table import aggregate
from tests.benchmarks.report.fake_runs import CONFIG, rendered, report, write_pair, write_run


def test_ranks_by_hand():
    assert ranks([10.0, 30.0, None, 20.0]) == [3, 1, None, 2]
    assert ranks([38.94, 38.86, 40.0, 1.0]) == [2.5, 2.5, 1, 4]  # both are printed as 38.9


def test_mean_rank_is_over_the_tasks_that_all_have():
    means = {"random": (10.0, 5.0, None), "moco": (20.0, 5.0, 9.0), "x": (15.0, 4.0, 8.0)}
    found = Summary(("a", "b", "c"), means)
    assert found.ranked == (0, 1)
    assert [found.mean_rank(init) for init in means] == [2.25, 1.25, 2.5]
    assert found.ranks["x"] == (2, 3, 2)
    assert [row[0].text for row in found.rows] == ["moco", "random", "x"]
    assert "2 of 3 tasks" in found.note and "(not c)" in found.note
    assert Summary(("a",), {"x": (None,), "y": (1.0,)}).mean_rank("y") is None


def test_a_task_and_its_tuned_rows_are_one_task_of_the_mean_rank(tmp_path):
    aps = {"random": [10.0], "moco": [20.0]}
    write_pair(tmp_path / "own", aps, task="one")
    write_pair(tmp_path / "other", {"random": [9.0], "moco": [8.0]}, task="two")
    grid = {**CONFIG, "SOLVER.TUNED": "SOLVER.BASE_LR=0.01,0.02 at 0.5 of the schedule"}
    tuned = {init: [ap + 5 for ap in values] for init, values in aps.items()}
    write_pair(tmp_path / "tuned", tuned, task="one_tuned", config=grid)
    summary = report(tmp_path).summary
    assert [task.partition(":")[0] for task in summary.tasks] == ["one", "one_tuned", "two"]
    assert summary.mean_rank("moco") == summary.mean_rank("random") == 1.5
    assert "mean rank over 2 of 3 tasks" in summary.note
    assert "(not one_tuned: AP, which is another task's with tuned values)" in summary.note
    alone = report(tmp_path / "tuned").tables + report(tmp_path / "other").tables
    assert summarize(alone).ranked == (0, 1), "without the task itself its tuned rows count"


def test_convergence_by_hand(tmp_path):
    """300 iterations, evaluated after 30 and 150, of one seed also after 75."""
    for seed, (points, last) in enumerate([({29: 2.0, 149: 8.0}, 10.0), ({29: 4.0, 74: 6.0}, 9.0)]):
        own = {"seed": seed, "task": "own", "metrics": {"bbox/AP": last}}
        folder = write_run(tmp_path / str(seed), **own)
        lines = [json.dumps({"iteration": i, "bbox/AP": ap}) for i, ap in points.items()]
        (folder / "metrics.json").write_text("\n".join(lines) + "\n")
    [table] = aggregate(collect([tmp_path]).transfer)
    cells = row_cells(table, lambda run: convergence(run, "bbox/AP"), SHARES)["random"]
    values = [cell and cell.values for cell in cells]
    assert values == [(2.0, 4.0), (6.0,), (8.0,), None, (10.0, 9.0)]
    for name in ("md", "tex", "html", "terminal"):
        text = rendered(report(tmp_path))[name].replace("\\%", "%")
        assert "25% of the schedule" in text and "6.0 (n = 1 of 2)" in text, name


@pytest.mark.parametrize(("before", "noted"), [(17.0, True), (19.0, False)])
def test_a_row_that_still_rises_by_more_than_its_gap_is_noted(tmp_path, before, noted):
    """The gap is 1.5: from 10 to 20 in the end, after `before` at three quarters."""
    for init, last in {"random": 18.5, "mine": 20.0}.items():
        folder = write_run(
            tmp_path / init,
            init=init,
            task="own",
            weights_sha256=None if init == "random" else "a" * 64,
            metrics={"bbox/AP": last},
        )
        lines = [json.dumps({"iteration": 224, "bbox/AP": last - 20.0 + before})]
        (folder / "metrics.json").write_text("\n".join(lines) + "\n")
    text = rendered(report(tmp_path))["md"]
    rise = f"still changed by +{20 - before:.1f} (mine) and +{20 - before:.1f} (random)"
    assert (rise in text and "the gap is +1.5: more iterations may change" in text) == noted


@pytest.mark.parametrize(("ap", "learned"), [((0.2, 0.9), False), ((0.2, 1.1), True)])
def test_two_rows_at_the_floor_have_no_gap(tmp_path, ap, learned):
    for init, value in zip(("random", "mine"), ap, strict=True):
        for seed in range(3):
            write_run(
                tmp_path / f"{init}-{seed}",
                init=init,
                seed=seed,
                task="own",
                weights_sha256=None if init == "random" else "a" * 64,
                metrics={"bbox/AP": value + seed / 100, "bbox/AP50": 40.0 + seed},
            )
    made = report(tmp_path)
    gap = made.tables[0].rows[1].gaps["bbox/AP"]
    assert (gap is not None) == learned
    for name in ("md", "tex", "html", "terminal"):
        text = rendered(made)[name].replace("\\", "")
        assert ("this compares nothing" in text) != learned, name
        assert any(gap in text for gap in ("+0.7", "+0.9")) == learned, name


def test_without_evaluations_on_the_way_there_is_no_table_of_convergence(tmp_path):
    write_pair(tmp_path, {"random": [10.0]})
    assert "of the schedule" not in rendered(report(tmp_path))["html"]
