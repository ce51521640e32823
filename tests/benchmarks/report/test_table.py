"""Statistics against hand-computed numbers, and everything that must not be averaged."""

import math
from pathlib import Path

import pytest
from scipy import stats

from benchmarks.report.records import FinishedRun, collect
from benchmarks.report.table import NETWORK_KEYS, Cell, aggregate, gap, stems, untuned
from convert.families.base import families
from moco.common.errors import UserError
from moco.common.shipped import RESULTS
from tests.benchmarks.report.fake_runs import CONFIG, record

A, B = (10.0, 12.0, 14.0), (20.0, 21.0, 25.0)
MOCO = "a" * 64


def run(folder: str = "", **changes) -> FinishedRun:
    made = record(**changes)
    return FinishedRun(Path(folder or f"{made.init}-{made.seed}"), made)


def runs(init: str, values, weights: str | None = None, **changes) -> list[FinishedRun]:
    return [
        run(init=init, seed=seed, weights_sha256=weights, metrics={"bbox/AP": value}, **changes)
        for seed, value in enumerate(values)
    ]


def test_mean_and_sample_std_by_hand():
    cell = Cell(A)
    # mean 36 / 3; squared deviations 4 + 0 + 4 over n - 1 = 2 gives variance 4
    assert (cell.mean, cell.std, cell.n) == (12.0, 2.0, 3)
    assert (Cell((7.5,)).mean, Cell((7.5,)).std) == (7.5, None)


def test_gap_and_welch_by_hand():
    result = gap(Cell(B), Cell(A))
    # variances 7 and 4, n = 3 each: se^2 = 11/3, df = se^4 / ((7/3)^2 / 2 + (4/3)^2 / 2)
    se2 = 11 / 3
    df = se2**2 / ((7 / 3) ** 2 / 2 + (4 / 3) ** 2 / 2)
    assert result.value == pytest.approx(10.0)
    assert result.p_value == pytest.approx(2 * stats.t.sf(10 / math.sqrt(se2), df), abs=1e-8)
    half = (result.high - result.low) / 2
    assert (result.low + result.high) / 2 == pytest.approx(10.0)
    assert 2 * stats.t.sf(half / math.sqrt(se2), df) == pytest.approx(0.05, abs=1e-6)


def test_gap_without_enough_trials_has_no_interval():
    single = gap(Cell((20.0,)), Cell(A))
    assert single.value == pytest.approx(8.0)
    assert single.low is single.high is single.p_value is None
    constant = gap(Cell((5.0, 5.0)), Cell((4.0, 4.0)))
    assert constant.value == 1.0 and constant.p_value is None
    last_bit = gap(Cell((5.0, math.nextafter(5.0, 6.0))), Cell((4.0, math.nextafter(4.0, 5.0))))
    assert last_bit.value == pytest.approx(1.0)
    assert last_bit.low is last_bit.high is last_bit.p_value is None


def test_rows_baseline_and_order():
    [table] = aggregate([*runs("zebra", B, MOCO), *runs("moco", A, MOCO), *runs("random", A)])
    assert [row.init for row in table.rows] == ["random", "moco", "zebra"]
    assert table.baseline == "random" and table.rows[0].gaps["bbox/AP"] is None
    assert table.rows[2].gaps["bbox/AP"].value == pytest.approx(10.0)
    [table] = aggregate(table.runs, baseline="zebra")
    assert [row.init for row in table.rows] == ["random", "zebra", "moco"]
    assert table.rows[2].gaps["bbox/AP"].value == pytest.approx(-10.0)
    [table] = aggregate([*runs("one", A, MOCO), *runs("two", B, "b" * 64)])
    assert table.baseline is None
    assert all(gap is None for row in table.rows for gap in row.gaps.values())


def test_missing_metrics_never_become_numbers():
    members = [
        run(seed=0, metrics={"bbox/AP": 10.0, "bbox/AP50": None}),
        run(seed=1, metrics={"bbox/AP": None, "bbox/AP50": None}),
    ]
    [row] = aggregate(members)[0].rows
    assert row.n == 2
    assert row.cells["bbox/AP"].values == (10.0,)
    assert row.cells["bbox/AP50"] is None and row.cells["bbox/AP75"] is None
    # Nor does a mean of fewer runs than others have stand for a pre-training.
    members = [*runs("moco@1", (10.0, None), "1" * 64), *runs("moco@2", (8.0, 9.0), "2" * 64)]
    [row] = aggregate(members)[0].rows
    assert row.n == 2 and row.cells["bbox/AP"].values == (8.5,)


def test_refusal_names_every_differing_key_of_each_protocol_and_no_other():
    members = []
    for seed, (name, lr, more) in enumerate(
        [("a", 0.02, {}), ("b", 0.01, {}), ("c", 0.02, {"SOLVER.NESTEROV": True})]
    ):
        own = {"SOLVER.BASE_LR": lr, "OUTPUT_DIR": name, "DATA.ROOT": name, "SEED": seed, **more}
        config = {"config": {**CONFIG, **own}, "config_sha256": name * 64}
        members.append(run(f"runs/{name}", seed=seed, **config))
    with pytest.raises(UserError) as error:
        aggregate(members)
    message = str(error.value)
    assert "aaaaaaaaaa (runs/a)" in message and "bbbbbbbbbb (runs/b)" in message
    keys = "SOLVER.BASE_LR (0.02 / 0.01 / 0.02), SOLVER.NESTEROV (None / None / True)"
    assert message.endswith(keys)


def test_columns_are_what_the_runs_of_a_task_measured():
    three = {"AP": 30.0, "AP50": 50.0, "AP75": 32.0}
    both = {f"{kind}/{name}": v for kind in ("segm", "bbox") for name, v in three.items()}
    tables = aggregate(
        [
            run(task="coco", metrics={**both, "bbox/APs": 9.0, "bbox/AP-cat": 1.0}),
            run(task="fcn", metrics={"sem_seg/mIoU": 70.0, "sem_seg/pACC": 90.0}),
            run(task="streets", metrics={"segm/AP": 30.0, "segm/AP50": None}),
        ]
    )
    assert [table.metrics for table in tables] == [
        ("bbox/AP", "bbox/AP50", "bbox/AP75", "segm/AP", "segm/AP50", "segm/AP75"),
        ("sem_seg/mIoU",),
        ("segm/AP", "segm/AP50"),
    ]
    assert tables[0].rows[0].cells["segm/AP75"].mean == 32.0
    assert aggregate([run(task="mine", metrics={})])[0].metrics == tables[0].metrics[:3]


def test_files_of_one_name_on_other_data_are_other_tasks():
    """configs/coco and configs/lvis both have a mask_rcnn_R_50_FPN_2x."""
    members = []
    for data, values in (("lvis_v0.5_val", A), ("coco_2017_val", B)):
        config = {"DATASETS.TEST": [data], "MODEL.ROI_HEADS.NUM_CLASSES": len(data)}
        members += runs("random", values, task="m", config=config, config_sha256=data)
    tables = aggregate([*members, *runs("random", A, task="z")])
    found = [(t.task, t.tested_on, t.rows[0].n, t.rows[0].cells["bbox/AP"].mean) for t in tables]
    assert found == [
        ("m", ("coco_2017_val",), 3, 22.0),
        ("m", ("lvis_v0.5_val",), 3, 12.0),
        ("z", ("voc_2007_test",), 3, 12.0),
    ]
    assert stems(tables) == ["m-coco_2017_val", "m-lvis_v0.5_val", "z"]
    twice = [*tables, *aggregate(runs("random", A, task="z", engine="detectron2"))]
    assert len(set(stems(twice))) == 4 and stems(twice)[-1] == "z-detectron2"


def test_each_network_of_one_task_file_has_a_table():
    """Real MobileNetV2 and EfficientNet-Lite0 on the same photographs."""
    bundles = [RESULTS / "real_small.zip", RESULTS / "real_lite0.zip"]
    tables = aggregate(collect(bundles).transfer)
    lite0, mobilenet = "tf_efficientnet_lite0", "mobilenetv2_100"
    found = {(t.task, t.tested_on): round(t.rows[1].cells["bbox/AP"].mean, 1) for t in tables}
    # As printed in docs/results.md and README.md.
    of_raccoons = {
        (f"faster_rcnn_timm_small (timm {lite0})", ("raccoon_test",)): 58.3,
        (f"faster_rcnn_timm_small (timm {mobilenet})", ("raccoon_test",)): 57.9,
    }
    assert found.items() > of_raccoons.items() and len(found) == 5
    assert len(set(stems(tables))) == 5
    alone = {table.task for table in aggregate(collect(bundles[:1]).transfer)}
    assert alone == {"faster_rcnn_timm_small"}


def test_a_tuned_task_is_that_of_its_network():
    configs = [{**CONFIG, "MODEL.RESNETS.DEPTH": depth} for depth in (18, 50)]
    tuned = {**configs[1], "SOLVER.TUNED": True}
    members = [*runs("random", A, task="m", config=configs[0])]
    members += runs("random", B, task="m", config=configs[1])
    members += runs("random", B, task="m_tuned", config=tuned, config_sha256="b" * 64)
    tables = aggregate(members)
    names = ["m (resnet 18)", "m (resnet 50)", "m_tuned (resnet 50)"]
    assert [table.task for table in tables] == names
    assert untuned(tables[2], tables) is tables[1]


def test_the_keys_of_networks_are_those_of_the_families():
    found = {each.name: each.architecture.task_key(None)[0] for each in families()}
    assert found == NETWORK_KEYS


def test_the_order_of_the_folders_changes_nothing():
    """Runs do not take precedence by age or by place."""
    members = [*runs("random", A), *runs("moco", B, MOCO)]
    assert aggregate(members) == aggregate(members[::-1]) == aggregate(members[3:] + members[:3])


def test_pretrainings_of_one_row_are_different_files():
    """Three names of one file would be three files of weights, with a std of their own."""
    weights = {"moco@1": "1" * 64, "moco@2": "2" * 64, "moco@3": "1" * 64}
    made = [run for init, sha256 in weights.items() for run in runs(init, (10.0, 11.0), sha256)]
    with pytest.raises(UserError, match=r"moco@1, moco@3 are the same weights \(1{10}\); expected"):
        aggregate(made)
