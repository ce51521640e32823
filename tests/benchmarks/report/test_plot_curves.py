"""Curves of pre-training runs: what is read, what is plotted, and runs that have none."""

import json

import pytest
from PIL import Image

from benchmarks.plot_curves import label_runs, main, plot_curves, read_curves


def write_metrics(folder, *lines):
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


@pytest.fixture
def run(tmp_path):
    return write_metrics(
        tmp_path / "a/run",
        {"iteration": 10, "epoch": 0.5, "loss": 4.0, "pretext_accuracy": 3.0, "lr": 0.03},
        {"iteration": 20, "epoch": 1.0, "loss": 3.0, "pretext_accuracy": 9.0, "lr": 0.03},
        {"iteration": 20, "epoch": 1.0, "knn/top1": 41.5},
        {"iteration": 20, "epoch": 1.0, "loss": 2.5, "pretext_accuracy": 9.5, "lr": 0.03},
    )


def test_curves_are_over_epochs_and_end_with_the_last_line(run):
    curves = {name: [xy.tolist() for xy in curve] for name, curve in read_curves(run).items()}
    assert curves == {
        "loss": [[0.5, 1.0], [4.0, 2.5]],
        "pretext_accuracy": [[0.5, 1.0], [3.0, 9.5]],
        "lr": [[0.5, 1.0], [0.03, 0.03]],
        "knn/top1": [[1.0], [41.5]],
    }


def test_runs_are_plotted_over_each_other(run, tmp_path, capsys):
    other = write_metrics(
        tmp_path / "b/run",
        {"iteration": 1, "epoch": 0.1, "loss": 5.0},
        {"iteration": 2, "epoch": 0.2, "loss": 4.0},
    )
    assert label_runs([run, other]) == ["a/run", "b/run"]
    assert label_runs([run]) == ["run"]
    figure = plot_curves({"a": read_curves(run), "b": read_curves(other)}).figure
    plotted = {
        axis.get_title(): [(line.get_label(), line.get_ydata().tolist()) for line in axis.lines]
        for axis in figure.axes
    }
    assert plotted == {
        "loss": [("a", [4.0, 2.5]), ("b", [5.0, 4.0])],
        "pretext accuracy (%)": [("a", [3.0, 9.5])],
        "learning rate": [("a", [0.03, 0.03])],
        "kNN top-1 (%)": [("a", [41.5])],
    }
    main([str(run), str(other), "--output", str(tmp_path / "curves.png")])
    wrote = capsys.readouterr().out.splitlines()
    assert wrote == [f"wrote {tmp_path}/curves.{ending}" for ending in ("png", "svg")]
    with Image.open(tmp_path / "curves.png") as image:
        assert image.format == "PNG" and min(image.size) > 2 * 400
