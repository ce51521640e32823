"""Transfer along pre-training: rank correlations by hand, and the part of a report of fake runs."""

import itertools
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.make_table import main
from benchmarks.report.along import epoch_of, rank_correlation, transfer_figure
from benchmarks.report.records import collect
from benchmarks.report.report import Report, make_tables
from tests.benchmarks.report.fake_runs import (
    csv_rows,
    rendered,
    report,
    write_pair,
    write_run,
)

AP = {10: [20.0, 22.0], 50: [30.0, 32.0], 100: [29.0, 29.0], 1000: [35.0, 37.0]}


def test_the_rank_correlation_by_hand():
    assert rank_correlation([1, 2], [1, 2]) == (None, None)
    assert rank_correlation([1, 2, 3], [5, 5, 5]) == (None, None)
    # d = (0, 1, -1, 0): 1 - 6 * 2 / (4 * 15); no p-value of four.
    assert rank_correlation([1, 2, 3, 4], [10, 30, 20, 40]) == (pytest.approx(0.8), None)
    # Of the 120 orders of five, one is as high as the perfect one and one as low.
    rho, p = rank_correlation(range(5), [1, 10, 100, 1000, 10000])
    assert (rho, p) == (pytest.approx(1.0), pytest.approx(2 / 120))


def test_the_p_value_is_that_of_all_orders():
    x, y = [3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]  # with ties
    rho, p = rank_correlation(x, y)
    assert rho == pytest.approx(stats.spearmanr(x, y).statistic)
    rx, ry = stats.rankdata(x), stats.rankdata(y)
    own = float(rx @ ry)
    sums = np.array([np.dot(order, ry) for order in itertools.permutations(rx)])
    assert p == pytest.approx(2 * min(np.mean(sums >= own), np.mean(sums <= own)))


def test_the_p_value_of_many_is_over_random_orders():
    random = np.random.default_rng(1)
    x, y = random.random(20), random.random(20)
    first, again = rank_correlation(x, y), rank_correlation(x, y)
    assert first == again and first[1] == pytest.approx(stats.spearmanr(x, y).pvalue, abs=0.02)


def test_the_names_of_checkpoints():
    assert epoch_of("mine-epoch0100") == ("mine", 100) and epoch_of("a-epoch1-epoch2")[1] == 2
    assert epoch_of("mine") is None and epoch_of("mine-epoch") is None
    assert epoch_of("../mine-epoch1") is None and epoch_of("..\\mine-epoch1") is None


def write_series(root: Path, aps=AP) -> Path:
    """Write a suite's runs of a task from random weights and from checkpoints of `mine`."""
    rows = {"random": [10.0, 11.0]} | {f"mine-epoch{epoch:04d}": ap for epoch, ap in aps.items()}
    (root / "suite.json").write_text("{}")
    for init, values in rows.items():
        write_pair(root / "runs" / "voc" / init, {init: values})
    return root


def write_cheap(root: Path, kind: str, top1: dict[int, float]) -> None:
    """Write the evaluations of checkpoints under other names, with the same weights."""
    for epoch, value in top1.items():
        sha256 = f"mine-epoch{epoch:04d}".encode().hex().ljust(64, "0")
        names = {"kind": kind, "task": f"{kind}_r18", "engine": "moco", "init": f"x{epoch}"}
        keys = {"iterations": 0, "config": {}, "weights_sha256": sha256}
        write_run(root / kind / str(epoch), **names, **keys, metrics={f"{kind}/top1": value})


def write_logged(root: Path, top1: dict[int, float]) -> None:
    """Write the kNN accuracies that the suite copied from the pre-training's folder."""
    lines = [{"iteration": 4 * e, "epoch": e, "knn/top1": value} for e, value in top1.items()]
    (root / "inits").mkdir()
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (root / "inits" / "mine.knn.json").write_text(text)


def test_the_part_of_a_report(tmp_path):
    made = report(write_series(tmp_path))
    [along] = made.transfer_curves
    assert not along.measures and len(along.grids) == 1 and len(transfer_figure(along).axes) == 1
    write_cheap(tmp_path, "knn", {10: 40.0, 50: 50.0, 100: 60.0, 1000: 70.0})
    write_cheap(tmp_path, "linear", {10: 50.0, 100: 55.0, 1000: 60.0})
    write_logged(tmp_path, {5: 10.0, 10: 20.0, 50: 100.0, 1000: 2000.0})
    results = collect([tmp_path])
    made = Report(make_tables(results, engine="each"), results)
    [along] = made.transfer_curves  # neither kNN nor linear have names of checkpoints here
    assert along.measures == ["kNN during pre-training", "knn_r18", "linear_r18"]
    points, correlations = along.grids
    rows = [[cell.text for cell in row] for row in points.rows]
    assert rows[0] == ["mine", "10", "21.0 ± 1.4", "20.0", "40.0", "50.0"]
    assert rows[1] == ["mine", "50", "31.0 ± 1.4", "100.0", "50.0", "–"]
    assert [row[1] for row in rows] == ["10", "50", "100", "1000"]
    assert rows[2][3] == "–" and rows[3][5] == "60.0"
    found = {row[1].text: [cell.text for cell in row[2:]] for row in correlations.rows}
    assert found == {
        "kNN during pre-training": ["3", "1.00", "–"],
        "knn_r18": ["4", "0.80", "–"],
        "linear_r18": ["3", "1.00", "–"],
    }
    ap, accuracy = transfer_figure(along).axes
    labels = [text.get_text() for text in accuracy.get_legend().get_texts()]
    assert labels == [f"mine, {name}" for name in along.measures]
    assert [line.get_xdata()[-1] for line in accuracy.lines] == [1000, 1000, 1000]
    assert ap.containers[0].lines[0].get_ydata() == pytest.approx([21.0, 31.0, 29.0, 36.0])
    assert "along-faster_rcnn_R_50_C4_24k-embedded" in made.plots
    for name, text in rendered(made).items():
        assert "Along pre-training" in text, name
        assert "Spearman" in text and "linear_r18" in text.replace("\\_", "_"), name


@pytest.mark.slow
def test_a_bundle_keeps_the_logged_accuracies(tmp_path):
    (tmp_path / "suite").mkdir()
    write_logged(write_series(tmp_path / "suite"), {5: 8.0, 10: 20.0, 50: 30.0, 100: 40.0})
    bundle, both = tmp_path / "b.zip", ["--format", "md,csv,tex"]
    main([str(tmp_path / "suite"), *both, "--out", str(tmp_path / "a"), "--bundle", str(bundle)])
    with zipfile.ZipFile(bundle) as archive:
        page = archive.read("table.html").decode()
    shutil.rmtree(tmp_path / "suite")
    main([str(bundle), *both, "--out", str(tmp_path / "b")])
    for name in ("table.md", "table.along.csv", "table.tex"):
        texts = [(tmp_path / side / name).read_text() for side in "ab"]
        assert texts[0] == texts[1] and "kNN during pre-training" in texts[0], name
    assert page.count('data-head="kNN during pre-training"') == len(AP)  # in the shared page, too
    rows = csv_rows((tmp_path / "b" / "table.along.csv").read_text())
    assert [rows[0][name] for name in ("pretraining", "epoch", "measure", "n")] == [
        *("mine", "10", "bbox/AP", "2")
    ]
    assert float(rows[0]["mean"]) == 21.0 and len(rows) == 4 + 4
    assert [row["mean"] for row in rows[4:]] == ["8", "20", "30", "40"]


def test_a_single_checkpoint_or_none_has_no_part(tmp_path):
    assert report(write_series(tmp_path, {10: [20.0]})).transfer_curves == []
    assert (
        report(write_pair(tmp_path / "x", {"random": [5.0], "mine": [6.0]})).transfer_curves == []
    )


def test_linear_accuracy_is_compared_with_knn_alone(tmp_path):
    for kind, top1 in {"knn": (10.0, 20.0), "linear": (30.0, 50.0)}.items():
        for epoch, value in zip((1, 2), top1, strict=True):
            names = {"kind": kind, "task": f"{kind}_r18", "engine": "moco"}
            keys = {"iterations": 0, "config": {}, "weights_sha256": f"{epoch}" * 64}
            init, metrics = f"mine-epoch{epoch:04d}", {f"{kind}/top1": value}
            write_run(tmp_path / kind / str(epoch), init=init, metrics=metrics, **names, **keys)
    [along] = report(tmp_path).transfer_curves
    assert along.table.task == "linear_r18" and along.measures == ["knn_r18"]
