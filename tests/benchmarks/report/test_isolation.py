"""Evidence that two rows differ in their weights only, or the differences by name."""

from dataclasses import replace

import pytest

from benchmarks.report.isolation import isolation, shortened
from benchmarks.report.records import collect
from benchmarks.report.report import tuned, tuned_keys, tuned_value
from benchmarks.report.table import aggregate
from detection.config.keys import DATA_KEY
from moco.common.shipped import RESULTS
from tests.benchmarks.report.fake_runs import CONFIG
from tests.benchmarks.report.test_table import MOCO, run, runs

START = {"batches": ["b"]}
# An earlier record.
OLD = {"head": {"rpn.conv": "1f"}, "batches": ["b", *"cdefghi"]}


def compared(moco, base=None):
    [table] = aggregate([*(base or runs("random", (1.0, 2.0), start=START)), *moco])
    [found] = isolation(table)
    return found


def test_the_proof():
    own = {"MODEL.WEIGHTS": "x", "INPUT.FORMAT": "BGR"}
    found = compared(runs("moco", (3.0, 4.0), MOCO, start=START, config={**CONFIG, **own}))
    assert not found.differs
    for text in ("only the weights", "c" * 10, "equal first batch", "seeds 0, 1"):
        assert text in str(found)
    assert "INPUT.FORMAT 'BGR' / None" in str(found)  # not the weights' tensors, but their pixels


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"start": None}, "no digest of the first batch"),
        ({"start": {"weights_sha256": None}}, "no digest of the first batch"),
        ({"start": {"batches": ["c"]}}, "differ: first batch (seeds 0, 1)"),
        ({"config": {**CONFIG, "MODEL.CHANNELS_LAST": True}}, "MODEL.CHANNELS_LAST True / None"),
        ({"provenance": {"versions": {"torch": "2.4.0"}}}, "torch '2.4.0' / None"),
    ],
)
def test_what_differs_is_named(changes, named):
    found = compared(runs("moco", (3.0, 4.0), MOCO, **{"start": START, **changes}))
    assert not found.proof and "not shown" in str(found) and named in str(found)


def test_earlier_records_are_compared():
    """Of eight batches and of every tensor without weights, the first batch is compared."""
    assert not compared(runs("moco", (3.0, 4.0), MOCO, start=OLD)).differs
    other = OLD | {"batches": ["x", *OLD["batches"][1:]]}
    assert "differ: first batch" in str(compared(runs("moco", (3.0, 4.0), MOCO, start=other)))


def test_an_earlier_bundle_is_compared():
    """Its records have digests of heads and of eight batches."""
    found = collect([RESULTS / "quickstart.zip"]).transfer
    assert {len(run.record.start["batches"]) for run in found} == {8}
    [table] = aggregate(found)
    [line] = shortened(isolation(table))
    assert line.startswith("only the weights differ (config ") and ", first batch " in line


MACHINE = {"cpu": "Xeon", "cpu_threads": 1, "gpus": []}
MADE = {
    "versions": {"torch": "2.5.1"},
    "hardware": MACHINE,
    "project": {"source_sha256": "ab" * 32},
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"project": {"source_sha256": "cd" * 32}}, "code cdcd… / abab…"),
        ({"project": {"source_sha256": "ab" * 31 + "cd"}}, "code abab… / abab…"),
        ({"hardware": MACHINE | {"cpu": "EPYC"}}, "processor EPYC / Xeon"),
        ({"hardware": MACHINE | {"cpu_threads": 2}}, "threads 2 / 1"),
    ],
)
def test_other_code_and_hardware_are_named(changes, named):
    base = runs("random", (1.0, 2.0), start=START, provenance=MADE)
    same = compared(runs("moco", (3.0, 4.0), MOCO, start=START, provenance=MADE), base)
    assert same.short.startswith("only the weights differ (")
    assert same.short.endswith(", versions, code and hardware equal)")
    own = MADE | changes
    found = compared(runs("moco", (3.0, 4.0), MOCO, start=START, provenance=own), base)
    assert found.short.startswith(f"only the weights, and {named} (seeds 0, 1), differ (")
    assert str(found).startswith(f"only the weights of moco and random, and {named} (seeds 0, 1), ")
    others = "code" if "hardware" in changes else "hardware"
    assert found.short.endswith(f", versions and {others} equal)")


def test_another_gpu_of_the_same_number_is_named():
    cards = [MADE | {"hardware": MACHINE | {"gpus": [name]}} for name in ("H100", "T4")]
    base = runs("random", (1.0, 2.0), start=START, provenance=cards[1])
    found = compared(runs("moco", (3.0, 4.0), MOCO, start=START, provenance=cards[0]), base)
    assert "and GPUs H100 / T4 (seeds 0, 1), differ" in found.short


def test_what_a_record_lacks_is_not_called_equal():
    made = {"versions": {"torch": "2.5.1"}, "hardware": MACHINE}
    base = runs("random", (1.0, 2.0), start=START, provenance=MADE)
    found = compared(runs("moco", (3.0, 4.0), MOCO, start=START, provenance=made), base)
    assert found.short.endswith(", versions and hardware equal, code not recorded)")


def test_the_short_lines_name_rows_only_if_their_proofs_differ():
    base = runs("random", (1.0, 2.0), start=START)
    versions = {"start": START, "provenance": {"versions": {"torch": "2.5.1"}}}
    others = [*runs("a", (3.0, 4.0), "a" * 64, start=START)]
    others += runs("b", (3.0, 4.0), "b" * 64, start=START)
    found = isolation(aggregate([*base, *others])[0])
    [line] = shortened(found)
    of = f"first batch {found[0].proof[1].partition('first batch (sha256 ')[2][:4]}"
    unknown = "versions, code and hardware not recorded"
    assert line == f"only the weights differ (config cccc…, {of}…, {unknown})"
    assert found[0].proof[0].startswith("equal configuration (")
    [same] = isolation(
        aggregate(
            [
                *runs("random", (1.0, 2.0), **versions),
                *runs("a", (3.0, 4.0), "a" * 64, **versions),
            ]
        )[0]
    )
    assert same.short.endswith(", versions equal, code and hardware not recorded)")
    seeds = runs("c", (3.0, 4.0, 5.0, 6.0), "d" * 64, start=START)
    found = isolation(aggregate([*base, *others, *seeds])[0])
    assert shortened(found) == [
        f"a, b: {line}",
        "c: not shown that only the weights differ: only one of them has seed 2 and 1 more",
    ]
    assert "seed 2; only one of them has seed 3" in str(found[2]), "the page of runs has all"


def test_data_are_named_only_where_their_digest_is_recorded():
    """It is in the configuration, whose hash is equal."""
    config = {**CONFIG, DATA_KEY: "9b1cd" * 12 + "e" * 4}
    base = runs("random", (1.0, 2.0), start=START, config=config)
    found = compared(runs("moco", (3.0, 4.0), MOCO, start=START, config=config), base)
    assert found.short.startswith("only the weights differ (config cccc…, data 9b1c…, first batch ")
    assert found.proof[0].startswith("equal configuration and data (")


def test_seeds_without_a_partner_are_named():
    found = compared(runs("moco", (3.0, 4.0, 5.0), MOCO, start=START))
    assert found.differs == ("only one of them has seed 2",)


def test_python_is_declared_to_have_no_effect():
    found = compared(
        runs("moco", (3.0, 4.0), MOCO, start=START, provenance={"versions": {"python": "3.12"}})
    )
    assert not found.differs


def test_what_was_tuned_differs_and_is_named():
    """Tuning chose another learning rate for the second seed."""
    grid = {"SOLVER.TUNED": "SOLVER.BASE_LR=0.01,0.02 SOLVER.WEIGHT_DECAY=0,1e-4 at 0.5 of it"}
    chosen = [
        {**CONFIG, **grid, "SOLVER.BASE_LR": lr, "SOLVER.WEIGHT_DECAY": 0} for lr in (0.01, 0.02)
    ]
    base = runs("random", (1.0, 2.0), start=START, config=chosen[1])
    moco = [
        run(init="moco", seed=seed, weights_sha256=MOCO, start=START, config=config)
        for seed, config in enumerate(chosen)
    ]
    assert str(compared(moco, base)).startswith(
        "only the weights of moco and random and what was tuned for each differ: tuned "
        "SOLVER.BASE_LR 0.01 / 0.02 against 0.02, of the same 4 candidates; equal configuration"
    )
    assert "tuned" not in str(compared(moco[1:], base[1:])), "the same was chosen for both"
    assert compared(moco, base).short.startswith("only the weights and what was tuned differ (")
    [table] = aggregate([*moco, *base])
    lr, decay = tuned_keys(table)
    assert (lr, decay) == ("SOLVER.BASE_LR", "SOLVER.WEIGHT_DECAY")
    values = [[tuned_value(row, key) for key in (lr, decay)] for row in table.rows]
    assert values == [
        ["0.02 (at the edge)", "0 (at the edge)"],
        ["0.01 (at the edge) (seed 0) / 0.02 (at the edge) (seed 1)", "0 (at the edge)"],
    ]
    [grid] = tuned(table)
    assert "SOLVER.BASE_LR=0.01,0.02 SOLVER.WEIGHT_DECAY=0,1e-4 at 0.5 of it" in grid
    wide = {"SOLVER.TUNED": f"{lr}=0.01,0.02,0.04 {decay}=0 at 0.5 of it"}
    middle = [
        replace(r, record=replace(r.record, config={**r.record.config, **wide})) for r in base
    ]
    assert tuned_value(aggregate(middle)[0].rows[0], lr) == "0.02 (inside)"
    for own, shown in (("x=1 SOLVER.BASE_LR=a,<b> at", "0.02"), (7, "–")):
        odd = {**CONFIG, "SOLVER.TUNED": own, "SOLVER.BASE_LR": "0.02"}
        [table] = aggregate(runs("random", (1.0, 2.0), config=odd))
        assert tuned_value(table.rows[0], lr) == shown and len(tuned(table)) == 1
