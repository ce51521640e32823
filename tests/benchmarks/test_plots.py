"""Curves from metrics lines, bands by hand, figures as PNG files."""

import numpy as np
import pytest
from PIL import Image

from benchmarks.aggregate import aggregate
from benchmarks.plots import band, plot_ap, plot_losses, read_losses
from benchmarks.results import collect
from moco.errors import UserError
from tests.benchmarks.fake_runs import write_pair, write_run


def test_a_resumed_run_keeps_its_last_value(tmp_path):
    folder = write_run(tmp_path / "run", losses=[])
    (folder / "metrics.json").write_text(
        '{"iteration": 0, "total_loss": 4}\n{"iteration": 20, "total_loss": 3}\n'
        '{"iteration": 20, "total_loss": 2.5}\n{"iteration": 40, "loss": 2}\n'
        '{"iteration": 40, "bbox/AP": 12.0}\n{"iteration": 60, "total_loss": null}\n'
    )
    [(iterations, losses)] = read_losses(collect([tmp_path]).transfer)
    assert iterations.tolist() == [0, 20, 40] and losses.tolist() == [4, 2.5, 2]


def test_a_run_without_metrics_has_no_curve(tmp_path):
    write_run(tmp_path / "run")
    assert read_losses(collect([tmp_path]).transfer) == []


def test_a_broken_line_is_named(tmp_path):
    folder = write_run(tmp_path / "run", losses=[1.0])
    with open(folder / "metrics.json", "a") as file:
        file.write("{half\n")
    with pytest.raises(UserError, match="line 2 is not a line of metrics"):
        read_losses(collect([tmp_path]).transfer)


def test_band_by_hand():
    one = (np.array([0, 20, 40]), np.array([4.0, 2.0, 1.0]))
    two = (np.array([0, 20]), np.array([2.0, 3.0]))
    iterations, mean, low, high = band([one, two])
    assert iterations.tolist() == [0, 20]
    assert (mean.tolist(), low.tolist(), high.tolist()) == ([3.0, 2.5], [2.0, 2.0], [4.0, 3.0])


def test_figures_are_pictures(tmp_path):
    write_pair(tmp_path / "runs", {"random": [10.0, 12.0], "moco": [20.0, 21.0], "x": [5.0]})
    write_run(tmp_path / "runs" / "none", init="none", metrics={})
    [table] = aggregate(collect([tmp_path]).transfer)
    curves = {row.init: read_losses(row.runs) for row in table.rows}
    assert [len(runs) for runs in curves.values()] == [2, 2, 0, 1]
    plot_losses(tmp_path / "loss.png", {"pre": curves["x"]}, curves)
    plot_losses(tmp_path / "empty.png", {}, {"random": []})
    plot_ap(tmp_path / "ap.png", table)
    for name in ("loss.png", "ap.png", "empty.png"):
        with Image.open(tmp_path / name) as image:
            assert image.format == "PNG" and min(image.size) > 300
            if name != "empty.png":
                assert len(image.convert("RGB").getcolors(1 << 20) or []) > 50
