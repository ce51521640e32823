"""Frozen against fine-tuned backbones: correlations against scipy and by hand, and the part."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.rank import TRUST
from benchmarks.report.records import collect
from benchmarks.report.report import make_tables
from benchmarks.report.style import EACH
from benchmarks.report.trust import (
    FREEZE_AT,
    frozen_against_tuned,
    inversion,
    kendall,
    spearman,
    with_interval,
)
from tests.benchmarks.report.fake_runs import CONFIG, csv_rows, rendered, report, write_run

ROOT = Path(__file__).resolve().parents[3]
RESNET = {**CONFIG, "MODEL.BACKBONE.NAME": "build_resnet_fpn_backbone"}
VIT = {**CONFIG, "MODEL.BACKBONE.NAME": "build_vit_sfp_backbone", "MODEL.VIT.DEPTH": 12}
DATA = {"data": [["train", "1"], ["test", "2"]]}
# Init → AP frozen and fine-tuned. Of ten pairs b, c and d, e are inverted.
AP = {
    "random": (2.0, 20.0),
    "b": (10.0, 31.0),
    "c": (12.0, 29.5),
    "d": (20.0, 44.0),
    "e": (25.0, 40.0),
}


def write(root, task: str, config, side: int, ap=AP, salt="", **changes) -> None:
    """Write two runs of each init, whose mean AP is the value of one side."""
    for init, values in ap.items():
        for seed, more in enumerate((-0.5, 0.5)):
            fields = {
                "task": task,
                "config": config,
                "config_sha256": f"{task:c<64}"[:64],
                "provenance": DATA,
                "init": init,
                "seed": seed,
                "weights_sha256": None if init == "random" else f"{init}{salt}".encode().hex(),
                "metrics": {f"bbox/{name}": values[side] + more for name in ("AP", "AP50", "AP75")},
            }
            write_run(root / f"{task}-{init}-{seed}", **{**fields, **changes})


def both(root, config=RESNET, whole=5, ap=AP, prefix="", **changes):
    write(root, f"{prefix}probe", {**config, FREEZE_AT: whole}, 0, ap, **changes)
    write(root, f"{prefix}full", {**config, FREEZE_AT: 0}, 1, ap, **changes)
    return root


@pytest.mark.parametrize("values", [100, 3])
def test_the_correlations_are_scipys(values):
    """With and without ties."""
    rng = np.random.default_rng(0)
    for n in (7, 20):
        x, y = (rng.integers(values, size=n).astype(float) for _ in range(2))
        assert kendall(x, y) == pytest.approx(stats.kendalltau(x, y).statistic)
        assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)


def test_the_correlation_of_the_example_by_a_count():
    x, y = (np.array([ap[side] for ap in AP.values()]) for side in (0, 1))
    pairs = list(itertools.combinations(range(5), 2))
    agreeing = sum((x[i] - x[j]) * (y[i] - y[j]) > 0 for i, j in pairs)
    assert (agreeing, len(pairs)) == (8, 10)
    assert with_interval(kendall, x, y)[0] == pytest.approx((8 - 2) / 10)


def test_the_interval_is_that_of_scipys_bootstrap():
    rng = np.random.default_rng(1)
    x = rng.normal(size=12)
    y = x + 0.7 * rng.normal(size=12)
    for own, theirs in ((kendall, stats.kendalltau), (spearman, stats.spearmanr)):
        _, low, high = with_interval(own, x, y)
        expected = stats.bootstrap(
            (x, y),
            lambda a, b, theirs=theirs: theirs(a, b).statistic,
            paired=True,
            vectorized=False,
            method="percentile",
            n_resamples=2000,
            rng=np.random.default_rng(2),
        ).confidence_interval
        assert (low, high) == pytest.approx(tuple(expected), abs=0.04)


@pytest.mark.slow
def test_the_interval_covers_the_truth():
    """Of 20 inits from a normal distribution of correlation 0.7: tau is 2 / pi asin(0.7)."""
    rng, truth = np.random.default_rng(0), 2 / np.pi * np.arcsin(0.7)
    covered = 0
    for _ in range(200):
        x, noise = rng.normal(size=(2, 20))
        _, low, high = with_interval(kendall, x, 0.7 * x + np.sqrt(1 - 0.49) * noise)
        covered += low <= truth <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_constant_numbers_have_no_correlation():
    assert np.isnan(with_interval(kendall, np.ones(5), np.arange(5.0))).all()
    assert np.isnan(with_interval(spearman, np.arange(5.0), np.ones(5))).all()


def test_the_part_in_every_format(tmp_path):
    texts = rendered(made := report(both(tmp_path)))
    [part] = made.trust
    assert [(p.init, p.frozen.mean, p.tuned.mean) for p in part.points] == [
        (init, *ap) for init, ap in sorted(AP.items(), key=lambda item: item[0] != "random")
    ]
    above, below = inversion(part.points)
    assert (above.init, below.init) == ("e", "d")
    for name in ("md", "html", "terminal"):
        text = texts[name].replace("\n", " ")
        assert "Frozen and fine-tuned backbones: voc_2007_test" in text, name
        assert "frozen, e is above d (AP 25.0 and 20.0), fine-tuned it is 4.0 below" in text, name
        assert "0.60" in text and "25.0 ± 0.7" in text
    from benchmarks.report.export import csv

    rows = csv_rows(csv(made)["table.trust.csv"])
    assert [row["init"] for row in rows] == [p.init for p in part.points]
    x, y = ([ap[side] for ap in AP.values()] for side in (0, 1))
    for name, expected in (("tau", stats.kendalltau(x, y)), ("rho", stats.spearmanr(x, y))):
        assert float(rows[0][name]) == pytest.approx(expected.statistic)
        assert float(rows[0][f"{name}_low"]) < expected.statistic < float(rows[0][f"{name}_high"])


def test_equal_orders_have_no_inversion(tmp_path):
    """Neither has a tie on one side."""
    ap = {"random": (1.0, 10.0), "b": (2.0, 20.0), "c": (2.0, 15.0), "d": (3.0, 20.0)}
    [part] = report(both(tmp_path, ap=ap)).trust
    assert inversion(part.points) is None
    assert part.notes[0] == "no two inits are ordered the other way by the frozen ranking"


def test_the_published_correlations_are_those_of_the_bundles():
    """In docs/guides/rank.md, and in the last sentence of `rank`."""
    page = (ROOT / "docs/guides/rank.md").read_text(encoding="utf-8")
    bundles = [ROOT / name for name in re.findall(r"results/\w+\.zip", page)]
    tables = make_tables(collect(bundles), engine=EACH)
    parts = frozen_against_tuned(tables)
    assert len(parts) == 4
    table = page[page.index("| network | init |") :].partition("\n\n")[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table)
    cells = {(network, init): values for network, init, *values in rows}
    columns = {name.removesuffix(": frozen"): i for i, name in enumerate(head[2::2])}
    taus, sizes, inversions, of_resnet = [], [], [], {}
    for part in parts:
        dataset = part.points[0].frozen_task.partition("_frozen_")[0]
        x, y = ([getattr(p, s).mean for p in part.points] for s in ("frozen", "tuned"))
        tau, rho = stats.kendalltau(x, y).statistic, stats.spearmanr(x, y).statistic
        above, below = inversion(part.points)
        lost = below.tuned.mean - above.tuned.mean
        correlations = rf"{tau:.2f} \[.*\] \| {rho:.2f} \[.*\]"
        row = rf"\| {dataset} \| {len(x)} \| {correlations} \| {lost:.1f} AP \|"
        assert re.search(row, page), row
        taus.append(tau)
        sizes.append(len(x))
        inversions.append(lost)
        own = ["ResNet-18" in p.frozen_task for p in part.points]
        x, y = (list(itertools.compress(values, own)) for values in (x, y))
        of_resnet[columns[dataset]] = f"{stats.kendalltau(x, y).statistic:.2f}"
        for p in part.points:
            network = p.frozen_task.removeprefix(f"{dataset}_frozen_").removeprefix("timm_")
            at = 2 * columns[dataset]
            frozen, tuned = cells[network, p.init][at : at + 2]
            assert frozen.startswith(f"{p.frozen.mean:.1f} ± "), (dataset, network, p.init)
            assert tuned.startswith(f"{p.tuned.mean:.1f} ± "), (dataset, network, p.init)
    assert sum("±" in value for values in cells.values() for value in values) == 2 * sum(sizes)
    *others, last = (of_resnet[i] for i in sorted(of_resnet))
    assert f"alone τ is {', '.join(others)} and {last}." in page
    assert f"on {len(parts)} datasets" in TRUST
    assert f"{min(taus):.2f} to {max(taus):.2f} over {min(sizes)} to {max(sizes)} inits" in TRUST
    assert f"inversion was {max(inversions):.1f} AP" in TRUST


def test_few_inits_have_no_correlation(tmp_path):
    few = {init: AP[init] for init in ("random", "d", "e")}
    made = report(both(tmp_path, ap=few))
    [part] = made.trust
    assert len(part.points) == 3 and len(part.grids) == 1 and not part.correlations
    assert part.notes == ["a rank correlation of 3 inits says nothing, so none is shown"]


def test_architectures_are_pooled_each_with_its_own_tasks(tmp_path):
    """Their random rows are two points; a frozen task without a partner is left out."""
    both(tmp_path)
    vits = {"random": (1.0, 10.0), "f": (30.0, 45.0)}
    both(tmp_path, VIT, -1, vits, prefix="vit_")
    write(tmp_path, "lone", {**VIT, FREEZE_AT: 13}, 0, {"g": (1.0, 2.0)})
    [part] = report(tmp_path).trust
    tasks = [(p.init, p.frozen_task, p.tuned_task) for p in part.points]
    assert len(tasks) == 7 and tasks.count(("random", "probe", "full")) == 1
    assert tasks[-2:] == [("random", "vit_probe", "vit_full"), ("f", "vit_probe", "vit_full")]
    x, y = ([getattr(p, s).mean for p in part.points] for s in ("frozen", "tuned"))
    [tau, rho] = part.correlations.values()
    assert tau[0] == pytest.approx(stats.kendalltau(x, y).statistic)
    assert rho[0] == pytest.approx(stats.spearmanr(x, y).statistic)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        ({FREEZE_AT: 4}, {}),
        ({"MODEL.BACKBONE.NAME": "of_a_user"}, {}),
        ({"DATASETS.TEST": ["voc_2012_val"]}, {}),
        ({}, {"provenance": {"data": [["train", "9"], ["test", "2"]]}}),
        ({}, {"salt": "other"}),
        ({}, {"engine": "detectron2"}),
        ({}, None),
    ],
    ids=["half frozen", "unknown", "other test", "other data", "other weights", "engine", "pair"],
)
def test_what_is_a_pair(tmp_path, config, change):
    write(tmp_path, "full", {**RESNET, FREEZE_AT: 0}, 1)
    write(tmp_path, "probe", {**RESNET, FREEZE_AT: 5, **config}, 0, **(change or {}))
    assert len(report(tmp_path).trust) == (change is None)


@pytest.mark.parametrize(
    "config",
    [{FREEZE_AT: [5]}, {FREEZE_AT: "5"}, {**VIT, FREEZE_AT: 13, "MODEL.VIT": 1}],
    ids=str,
)
def test_a_record_may_hold_anything(tmp_path, config):
    write(tmp_path, "full", {**RESNET, FREEZE_AT: 0}, 1)
    write(tmp_path, "probe", {**RESNET, **config}, 0)
    assert not report(tmp_path).trust


def test_the_longest_schedule_counts_and_each_init_once(tmp_path):
    both(tmp_path)
    write(tmp_path, "short", {**RESNET, FREEZE_AT: 0}, 0, iterations=20)
    write(tmp_path, "half", {**RESNET, FREEZE_AT: 5}, 1, iterations=150)
    [part] = report(tmp_path).trust
    assert {(p.frozen_task, p.tuned_task) for p in part.points} == {("probe", "full")}
    assert len(part.points) == 5
