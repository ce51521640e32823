"""Suites over a folder of datasets: tasks, runs, refusals, and one to its table."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import run_suite
from benchmarks.report.records import collect
from benchmarks.report.report import Report
from benchmarks.report.table import aggregate
from benchmarks.suites.data_digest import data_digests
from benchmarks.suites.folder import SuiteFolder
from benchmarks.suites.suite import Init, expand
from benchmarks.suites.suite_file import expand_datasets, find_datasets, load_suite
from benchmarks.suites.tuning import with_grids
from convert.convert_to_d2 import convert_file
from moco.common.errors import DataError, UserError
from moco.common.shipped import CONFIGS
from tests.benchmarks.report.fake_runs import csv_rows
from tests.benchmarks.suites.fake_trainer import FakePrograms
from tests.benchmarks.suites.lab import write_suite
from tests.oracles.checkpoints import own
from tests.oracles.collection import NAMES, TASKS, write_collection

FILE = "_annotations.coco.json"
INITS = {"random": Init("random", None), "mine": Init("/weights/my.pth", "a" * 64)}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return write_collection(tmp_path_factory.mktemp("collection"))


@pytest.fixture
def empty(tmp_path) -> Path:
    """Folder of the same datasets without images."""
    for name in NAMES:
        for split in ("train", "test"):
            (tmp_path / "data" / name / split).mkdir(parents=True)
            (tmp_path / "data" / name / split / FILE).write_text("{}")
    return tmp_path / "data"


def many(data: Path, name: str = "many", config: str | None = None):
    return expand_datasets(load_suite(CONFIGS / "suites" / f"{name}.yaml"), data, config)


@pytest.mark.parametrize("name", ["many", "many_small"])
def test_every_dataset_is_a_task(empty, name):
    suite = many(empty, name)
    assert tuple(task.name for task in suite.tasks) == TASKS
    assert [dict(task.overrides)["DATASETS.COCO_DIR"] for task in suite.tasks] == [
        str(empty / name.replace("--", "/")) for name in TASKS
    ]
    specs = expand(suite, INITS, ["embedded"], version="1", data=data_digests(suite, None))
    assert [(s.task, s.init) for s in specs] == [(task, init) for task in TASKS for init in INITS]
    assert len({spec.id for spec in specs}) == 12 and len({spec.config for spec in specs}) == 1


def test_another_place_is_the_same_run_and_other_annotations_are_another(empty):
    def ids() -> dict[str, str]:
        suite = many(empty)
        specs = expand(suite, INITS, ["embedded"], version="1", data=data_digests(suite, None))
        return {f"{spec.task} {spec.init}": spec.id for spec in specs}

    before = ids()
    empty = empty.rename(empty.parent / "elsewhere")
    assert ids() == before
    (empty / "cars" / "test" / FILE).write_text("[]")  # of the same size
    after = ids()
    assert {name for name in before if before[name] != after[name]} == {"cars random", "cars mine"}


def test_another_task_file_is_for_all(empty):
    suite = many(empty, config="faster_rcnn_ViT_Ti_small")
    assert {task.config for task in suite.tasks} == {CONFIGS / "voc/faster_rcnn_ViT_Ti_small.yaml"}
    assert len(with_grids(suite).tasks) > 3 * len(TASKS)


def test_what_is_left_out_is_printed(empty, capsys):
    (empty / "notes" / "old").mkdir(parents=True)
    (empty / "aerial" / "thumbnails").mkdir()
    (empty / "README.txt").write_text("")
    assert tuple(sorted(find_datasets(empty))) == TASKS
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"left out: {empty / 'aerial' / 'thumbnails'}, which is no dataset",
        f"left out: {empty / 'notes'}, which is no dataset",
    ]


def test_names_of_folders_become_names_of_tasks(tmp_path):
    for name in ("my data (2)", "a--b", "-x"):
        (tmp_path / name / "train").mkdir(parents=True)
    assert set(find_datasets(tmp_path)) == {"my_data_2_", "a-b", "x"}


def test_refusals(empty, tmp_path):
    suite = load_suite(CONFIGS / "suites" / "many.yaml")
    with pytest.raises(UserError, match=r"suite many: .*give --data FOLDER"):
        expand_datasets(suite, None)
    voc = load_suite(CONFIGS / "suites" / "voc.yaml")
    assert expand_datasets(voc, None) is voc
    with pytest.raises(UserError, match=r"--data: suite voc has no task with \$DATASET"):
        expand_datasets(voc, empty)
    with pytest.raises(UserError, match=r"--task: suite voc has no task"):
        expand_datasets(voc, None, "faster_rcnn_ViT_Ti_small")
    two = {"overrides": {"DATASETS.COCO_DIR": "$DATASET"}}, {"name": "other"}
    with pytest.raises(UserError, match="has 2 tasks"):
        expand_datasets(load_suite(write_suite(tmp_path, *two)), empty)
    with pytest.raises(DataError, match="no such folder"):
        find_datasets(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is one dataset"):
        find_datasets(empty / "cars")
    with pytest.raises(DataError, match="got 0 datasets, expected folders of datasets"):
        find_datasets(tmp_path / "data" / "cars" / "train")
    (empty / "sea" / "ships" / "valid").mkdir(parents=True)
    with pytest.raises(DataError, match=r"aerial/ships and .*sea/ships have the same name"):
        find_datasets(empty)


def run(empty: Path, *more: str) -> None:
    words = ["many_small", "--data", str(empty), "--output", str(empty.parent / "out")]
    programs = FakePrograms(empty.parent / "journal")
    run_suite.main([*words, "--init", "random", "--executor", "cpu", *more], programs)


def test_what_the_test_can_reach_is_said_before_a_run(empty, capsys):
    (empty.parent / "my.pth").write_text("weights")
    mine = ("--init", f"mine={empty.parent / 'my.pth'}")
    run(empty, *mine, "--seeds", "2", "--dry-run")
    shown = capsys.readouterr().out
    assert f"6 datasets: {', '.join(TASKS)}" in shown and "24 to do" in shown
    assert "p = 0.031 at best" in shown and "can never" not in shown
    run(empty, *mine, "--skip", "cars", "--dry-run")
    shown = capsys.readouterr().out
    assert "left out: cars, by --skip" in shown and "10 to do" in shown
    assert "fewer than six datasets can never reach p < .05" in shown
    run(empty, *mine, "--plan", str(empty.parent / "plan.json"), "--tune")
    plan = json.loads((empty.parent / "plan.json").read_text())
    assert {run["name"].split("/")[0] for run in plan["runs"]} >= {"cars", "cars_tuned"}
    run(empty, "--status")


def test_a_broken_dataset_is_named_before_the_first_run(written, tmp_path, capfd):
    data = tmp_path / "data"
    for name in ("cars", "eggs"):
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).symlink_to(written / name)
    (data / "null" / "train").mkdir(parents=True)
    (data / "null" / "train" / FILE).write_text("null")
    (data / "null" / "test").mkdir()
    (data / "null" / "test" / FILE).write_text("null")
    words = ["many_small", "--data", str(data), "--init", "random", "--output", str(tmp_path / "o")]
    with pytest.raises(UserError, match=r"null from random .*holds null.*a loader overwrote it"):
        run_suite.main([*words, "--engine", "embedded", "--dry-run"])
    run_suite.main([*words, "--engine", "embedded", "--dry-run", "--skip", "null"])
    assert "category 0 of supercategory none" in capfd.readouterr().out


SMOKE = {
    "MODEL.RESNETS.STEM_OUT_CHANNELS": 16,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 16,
    "MODEL.FPN.OUT_CHANNELS": 16,
    "MODEL.ROI_BOX_HEAD.FC_DIM": 32,
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 8,
    "INPUT.MIN_SIZE_TRAIN": (96,),
    "INPUT.MIN_SIZE_TEST": 96,
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.MAX_ITER": 6,
    "SOLVER.STEPS": (4, 5),
    "SOLVER.WARMUP_ITERS": 1,
    "SOLVER.CHECKPOINT_PERIOD": 2,
    "SOLVER.PRECISION": "fp32",
    "TEST.PRECISE_BN.NUM_ITER": 2,
}


@pytest.mark.slow
def test_a_complete_table(written, tmp_path, capfd):
    torch.save(own(depth=18, base=16), tmp_path / "checkpoint.pth.tar")
    convert_file(tmp_path / "checkpoint.pth.tar", tmp_path / "r18.pth")
    out = tmp_path / "out"
    words = ["many_small", "--data", str(written), "--init", "random"]
    words += ["--init", f"mine={tmp_path / 'r18.pth'}", "--output", str(out), "--engine"]
    words += ["embedded", "--executor", "cpu", "--workers", "2", "--opts"]
    run_suite.main([*words, *(str(word) for pair in SMOKE.items() for word in pair)])
    states = [SuiteFolder(out).run(spec).state().kind for spec in SuiteFolder(out).read()[1]]
    assert states == ["done"] * 12
    shown = capfd.readouterr().out
    assert "mean over 6 datasets" in shown and "All datasets:" in shown
    results = collect([out / "runs"])
    [found] = Report(aggregate(results.transfer), results).collections
    assert found.complete == TASKS and list(found.values) == ["random", "mine"]
    assert {len(values) for of in found.values.values() for values in of.values()} == {1}
    rows = csv_rows((out / "tables" / "table.datasets.csv").read_text())
    assert len(rows) == 12 and {row["in_mean"] for row in rows} == {"True"}
