"""Folders → records: what counts, what is listed without a number, what is refused."""

import json
import re
import time
from pathlib import Path

import pytest

from benchmarks.report.records import FinishedRun, collect
from benchmarks.report.report import make_tables
from detection.evaluation.metrics import metric_sha256
from moco.common.errors import UserError
from tests.benchmarks.report.fake_runs import record, write_run


def test_collects_nested_folders_once(tmp_path):
    write_run(tmp_path / "x" / "deep" / "run1")
    write_run(tmp_path / "x" / "run0", seed=1)
    write_run(tmp_path / "pre", kind="pretrain", engine="moco", metrics={"knn/top1": 50.0})
    results = collect([tmp_path, tmp_path / "x", tmp_path / "x" / "run0" / "run.json"])
    assert [run.folder.name for run in results.transfer] == ["run1", "run0"]
    assert [run.folder.name for run in results.pretraining] == ["pre"]
    assert results.unusable == ()


def test_an_evaluation_inside_a_run_is_not_another_run(tmp_path):
    write_run(tmp_path / "run")
    write_run(tmp_path / "run" / "inference")
    assert [run.folder.name for run in collect([tmp_path]).transfer] == ["run"]


def test_failed_and_unfinished_have_no_numbers(tmp_path):
    write_run(tmp_path / "failed", status="failed", notes=["loss became nan at iteration 5"])
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "metrics.json").write_text('{"iteration": 0, "total_loss": 1}\n')
    results = collect([tmp_path])
    assert results.transfer == ()
    assert [(item.folder.name, item.reason) for item in results.unusable] == [
        ("failed", "failed: loss became nan at iteration 5"),
        ("open", "unfinished: it has no run.json yet"),
    ]


@pytest.mark.parametrize(
    ("utc", "text"),
    [
        ("2026-11-21T01:30:00+02:00", "2026-11-20 23:30:00 UTC"),
        ("2026-11-20T23:30:00", "2026-11-20 23:30:00 UTC"),
        (None, ""),
        ("yesterday", ""),
    ],
)
def test_time_is_utc_whatever_the_zone_of_the_record_or_of_the_reader(utc, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "XYZ-9")  # a reader nine hours east of UTC
        time.tzset()
        run = FinishedRun(Path("x"), record(provenance={"utc": utc}))
        assert (run.label, run.versions, run.hardware, run.finished) == ("", "", "", text)
    time.tzset()


@pytest.mark.parametrize(("threads", "text"), [(1, "1 thread"), (2, "2 threads")])
def test_a_processor_with_its_threads(threads, text):
    hardware = {"cpu": "AMD EPYC", "cpu_threads": threads, "gpus": []}
    run = FinishedRun(Path("x"), record(provenance={"hardware": hardware}))
    assert run.hardware == f"AMD EPYC, {text}"


KNN = {"kind": "knn", "engine": "moco"}
LINEAR = {"kind": "linear", "engine": "moco", "metrics": {"linear/top1": 1.0}}


@pytest.mark.parametrize("changes", [{}, LINEAR, KNN])
def test_the_hash_of_the_protocol_is_that_of_the_keys(tmp_path, changes):
    """A record whose keys were edited while its hash stayed is of another protocol."""
    keys = {"SOLVER.BASE_LR": 0.02, "SOLVER.OPTIMIZER": "sgd", "SOLVER.STEPS": (1, 2)}
    for seed in (0, 1):
        write_run(tmp_path / f"{seed}", **{"seed": seed, "config": keys, **changes})
    one, two = (run.record.config_sha256 for run in collect([tmp_path]).transfer)
    assert one == two
    path = tmp_path / "1" / "run.json"
    path.write_text(path.read_text().replace("0.02", "0.01"))
    with pytest.raises(UserError, match=r"SOLVER\.BASE_LR \(0\.02 / 0\.01\)"):
        make_tables(collect([tmp_path]))


@pytest.fixture
def suite(tmp_path):
    """Return a suite's folder with one run, and the digest of its test."""
    (tmp_path / "suite.json").write_text("{}")
    provenance = {"data": [["voc_train", "a"], ["voc_test", "b"]]}
    write_run(tmp_path / "runs/t/random/seed0-ab", provenance=provenance)
    return tmp_path, metric_sha256(("voc_test", "b"), record().config)


def test_the_runs_of_a_suite_share_the_score_of_perfect_predictions(suite):
    folder, sha256 = suite
    score = {"highest": {"bbox/AP": 50.0}, "faults": ["lost"]}
    for key, expected in ((sha256, score), ("0" * 64, None)):
        (folder / "reachable.json").write_text(json.dumps({key: score}))
        [run] = collect([folder]).transfer
        assert run.record.reachable == expected


@pytest.mark.parametrize(("score", "got"), [({"highest": 3}, "highest: got 3"), (5, "got 5")])
def test_scores_of_another_form_are_refused(suite, score, got):
    folder, sha256 = suite
    (folder / "reachable.json").write_text(json.dumps({sha256: score}))
    expected = f"^{re.escape(str(folder / 'reachable.json'))}: .*{got}"
    with pytest.raises(UserError, match=expected):
        collect([folder])
