"""Curves from metrics lines, bands by hand, figures as PNG files."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from benchmarks.report.plots import (
    MAX_CLASSES,
    Plot,
    ap_curve_figure,
    ap_figure,
    band,
    class_figure,
    family,
    gap_figure,
    loss_figure,
    pretty,
    read_curves,
    schedule_figure,
)
from benchmarks.report.records import collect
from benchmarks.report.table import aggregate
from tests.benchmarks.report.fake_runs import write_pair, write_run


def test_curves_are_in_order_and_a_resumed_run_keeps_its_last_value(tmp_path):
    folder = write_run(tmp_path / "run", losses=[])
    write_run(tmp_path / "without metrics", seed=1)
    (folder / "metrics.json").write_text(
        '{"iteration": 40, "loss": 2}\n{"iteration": 0, "total_loss": 4}\n'
        '{"iteration": 20, "total_loss": 3}\n{"iteration": 20, "total_loss": 2.5}\n'
        '{"iteration": 40, "bbox/AP": 12.0}\n{"iteration": 60, "total_loss": null}\n'
    )
    [(iterations, losses)] = read_curves(collect([tmp_path]).transfer)
    assert iterations.tolist() == [0, 20, 40] and losses.tolist() == [4, 2.5, 2]


@pytest.mark.parametrize("top, last", [(97.0, 100), (70.0, 100), (41.0, 40)])
def test_the_axis_of_ap_ends_at_100(top, last, tmp_path):
    """Beyond it is room for the labels alone."""
    aps = {"random": [top / 3], "moco": [top / 2]}  # AP50 is twice AP
    write_pair(tmp_path, aps)
    for axis in ap_figure(aggregate(collect([tmp_path]).transfer)[0]).axes:
        assert max(axis.get_xticks()) == last
        assert last <= axis.spines["bottom"].get_bounds()[1] <= 100  # the line of the axis
        labels = [text.get_position()[0] for text in axis.texts]
        assert max(labels) < axis.get_xlim()[1]


def test_an_ap_of_0_is_plotted_without_a_word(tmp_path, recwarn):
    write_run(tmp_path / "run", metrics={"bbox/AP": 0.0, "bbox/AP50": 0.0, "bbox/AP75": 0.0})
    Plot(ap_figure(aggregate(collect([tmp_path]).transfer)[0])).save(tmp_path / "x.png")
    assert not recwarn.list


@pytest.mark.parametrize("name", ["\u725b", "\u0642\u0637\u0629"])
def test_names_in_any_script_are_plotted_without_a_word(name, tmp_path, recwarn):
    write_pair(tmp_path / "runs", {"random": [10.0], name: [20.0]})
    plot = Plot(ap_figure(aggregate(collect([tmp_path]).transfer)[0]))
    plot.save(tmp_path / "x.png")
    assert name in plot.svg and not recwarn.list


def test_band_by_hand():
    one = (np.array([0, 20, 40]), np.array([4.0, 2.0, 1.0]))
    two = (np.array([0, 20]), np.array([2.0, 3.0]))
    iterations, mean, low, high = band([one, two])
    assert iterations.tolist() == [0, 20]
    assert (mean.tolist(), low.tolist(), high.tolist()) == ([3.0, 2.5], [2.0, 2.0], [4.0, 3.0])


def test_figures_are_a_png_and_an_svg_file_always_the_same(tmp_path):
    write_pair(tmp_path / "runs", {"random": [10.0, 12.0], "moco": [20.0, 21.0], "x": [5.0]})
    write_run(tmp_path / "runs" / "none", init="none", metrics={})
    [table] = aggregate(collect([tmp_path]).transfer)
    curves = {row.init: read_curves(row.runs) for row in table.rows}
    assert [len(runs) for runs in curves.values()] == [2, 2, 0, 1]
    panels = {"Pre-training": {"pre": curves["x"]}, "Fine-tuning": curves}
    for figure in (loss_figure(panels), loss_figure({}), ap_figure(table)):
        png, svg = Plot(figure).save(tmp_path / "x.png")
        with Image.open(png) as image:
            assert image.format == "PNG" and min(image.size) > 300
        assert (png, svg) == (tmp_path / "x.png", tmp_path / "x.svg")
        assert ElementTree.parse(svg).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert Plot(ap_figure(table)).svg == svg.read_text()


def test_metrics_are_small_multiples_and_names_literal_text(tmp_path):
    """Seven inits of six metrics are two rows of three panels, narrower than a page."""
    metrics = {
        f"{kind}/{name}": 9.0 for kind in ("bbox", "segm") for name in ("AP", "AP50", "AP75")
    }
    names = ["random", *"abcde", "$\\frac{1}{$"]
    for init in names:
        write_run(tmp_path / init.encode().hex(), task="t", init=init, metrics=metrics)
    [table] = aggregate(collect([tmp_path]).transfer)
    figure = ap_figure(table, "a $\\title{")
    places = [axis.get_subplotspec() for axis in figure.axes]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [
        *((row, column) for row in range(2) for column in range(3))
    ]
    assert figure.get_figwidth() * figure.dpi < 1600 and "svg" in Plot(figure).svg
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert sorted(labels) == sorted([*names[:-1], "\\$\\frac{1}{\\$"])
    assert figure.get_suptitle() == "a \\$\\title{"
    gaps = gap_figure(table)
    assert len(gaps.axes) == 6 and "svg" in Plot(gaps).svg


def test_gaps_have_their_interval_and_a_single_trial_is_hollow(tmp_path):
    write_pair(tmp_path, {"random": [10.0, 12.0], "moco": [20.0, 21.0], "one": [9.0]}, task="t")
    [table] = aggregate(collect([tmp_path]).transfer)
    figure = gap_figure(table)
    axis = figure.axes[0]
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([9.5, -2.0])
    assert [bar.get_facecolor()[3] for bar in axis.patches] == pytest.approx([0.45, 0.0])
    [(_, _, [bars])] = axis.containers[1:2]  # of the error bar: its line, caps and sides
    low, high = bars.get_segments()[0][:, 0]
    gap = table.rows[1].gaps["bbox/AP"]
    assert (low, high) == pytest.approx((gap.low, gap.high))
    [alone] = aggregate([run for run in table.runs if run.record.init == "one"])
    assert gap_figure(alone) is None


def test_ap_over_iterations_needs_more_than_the_last_evaluation(tmp_path):
    for seed in range(2):
        folder = write_run(tmp_path / str(seed), seed=seed, task="t")
        lines = [{"iteration": i, "bbox/AP": 0.1 * i + seed} for i in (100, 200, 300)]
        (folder / "metrics.json").write_text("\n".join(map(json.dumps, lines)))
    [table] = aggregate(collect([tmp_path]).transfer)
    [line] = ap_curve_figure(table).axes[0].lines
    assert line.get_xdata().tolist() == [100, 200, 300]
    assert line.get_ydata().tolist() == pytest.approx([10.5, 20.5, 30.5])
    for seed in range(2):
        (tmp_path / str(seed) / "metrics.json").write_text('{"iteration": 300, "bbox/AP": 3}')
    assert ap_curve_figure(table) is None


def test_schedules_of_one_family(tmp_path):
    for name, length in (("m_FPN_1x", 90), ("m_FPN_2x", 180), ("m_FPN_2x_frozen_bn", 180)):
        write_pair(tmp_path / name, {"random": [1.0 * length]}, task=name, iterations=length)
    for folder in tmp_path.rglob("run.json"):
        text = folder.read_text().replace('"bbox/AP50": 360.0', '"bbox/AP50": 36.0')
        text = text.replace("180.0", "18.0").replace("178.0", "17.0")
        folder.write_text(text)
    tables = aggregate(collect([tmp_path]).transfer)
    assert [family(table)[0] for table in tables] == ["m_FPN", "m_FPN", "m_FPN_frozen_bn"]
    axis = schedule_figure(tables[:2]).axes[0]
    assert axis.lines[0].get_xdata().tolist() == [90, 180]
    assert axis.lines[0].get_ydata().tolist() == [90.0, 18.0]
    assert schedule_figure(tables[1:]) is None  # one length


def test_of_many_classes_those_that_differ_most(tmp_path):
    count = MAX_CLASSES + 20
    for init, factor in (("random", 1.0), ("moco", 1.2)):
        ap = {f"bbox/AP-{i:02d}": factor * i for i in range(count)}
        write_run(tmp_path / init, task="t", init=init, metrics={"bbox/AP": 9.0, **ap})
    [table] = aggregate(collect([tmp_path]).transfer)
    axis = class_figure(table).axes[0]
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == [f"{i:02d}" for i in range(20, count)]
    assert f"{MAX_CLASSES} of {count}" in axis.get_xlabel()
    [random, _] = axis.collections
    assert random.get_offsets()[:, 0].tolist() == [float(i) for i in range(20, count)]


def test_titles_as_the_paper_sets_them():
    found = [pretty(title) for title in ("AP", "AP50", "AP^bb", "AP75^mk", "mIoU")]
    assert found == ["AP", "AP$_{50}$", r"AP$^{\mathrm{bb}}$", r"AP$^{\mathrm{mk}}_{75}$", "mIoU"]
