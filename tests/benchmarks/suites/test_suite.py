"""Suites: reading, expansion, ids, stated speeds; and the files in configs/suites."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks.report.published import load_paper
from benchmarks.suites.checks import option_pairs
from benchmarks.suites.suite import Init, RunSpec, Suite, SuiteTask, expand, run_id, with_metric
from benchmarks.suites.suite_file import load_suite, parse_inits, with_options
from moco.common.cfgnode import read_yaml
from moco.common.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
NOT_THE_PAPERS = (
    "smoke",
    "variants",
    "frozen",
    "low_data",
    "vit",
    "many",
    "many_small",
    "real_small",
    "real_person",
    "real_lite0",
    "real_moco",
    "real_gpu",
)
SUITES = sorted((ROOT / "configs" / "suites").glob("*.yaml"))
ONE = {"random": Init("random", None)}
INITS = {**ONE, "mine": Init("/weights/my.pth", "a" * 64)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a task's file and its base."""
    (tmp_path / "base.yaml").write_text("SOLVER: {BASE_LR: 0.02}\n")
    (tmp_path / "task.yaml").write_text("_BASE_: base.yaml\nSOLVER: {MAX_ITER: 40}\n")
    return tmp_path


def write(folder: Path, **changes) -> Path:
    content = {"name": "s", "trials": 2, "tasks": [{"config": "task.yaml"}], **changes}
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def two_tasks(folder: Path) -> Suite:
    tasks = [{"config": "task.yaml", "name": "a"}, {"config": "task.yaml", "name": "b"}]
    return load_suite(write(folder, tasks=tasks))


def runs(suite: Suite, trials: int | None = 2, **changes) -> tuple[RunSpec, ...]:
    arguments = {"inits": INITS, "engines": ["embedded"], "version": "1", **changes}
    return expand(with_options(suite, {}, {}, trials), **arguments)


def test_the_first_trial_of_everything_comes_first(folder):
    specs = runs(two_tasks(folder), trials=3)
    assert [(s.seed, s.task, s.init) for s in specs] == [
        (seed, task, init) for seed in range(3) for task in "ab" for init in ("random", "mine")
    ]
    assert len({spec.id for spec in specs}) == len({spec.name for spec in specs}) == 12
    one = specs[1]
    assert re.fullmatch(r"a/mine/seed0-[0-9a-f]{10}", one.name) and one.name.endswith(one.id)
    assert (one.weights, one.weights_sha256, one.gpus) == ("/weights/my.pth", "a" * 64, 0)


def test_a_custom_folders_metric_is_in_the_ids_of_its_runs(folder):
    """A suite that was begun with VOC's, when no key named it, continues its runs with it."""
    key = "DATASETS.VOC_METRIC"
    tasks = [
        {"config": "task.yaml", "name": "own", "overrides": {"DATASETS.VOC_DIR": "/data/own"}},
        {"config": "task.yaml", "name": "published"},
    ]
    old = load_suite(write(folder, tasks=tasks))
    new, notes = with_metric(old, {})
    (own, published), (before, other) = (runs(each, 1, inits=ONE) for each in (new, old))
    assert dict(own.overrides)[key] == "coco" and own.id != before.id and not notes
    assert published == other
    begun, notes = with_metric(old, {"tasks": {"own": {"keys": {}}, "published": {"keys": {}}}})
    continued, same = runs(begun, 1, inits=ONE)
    assert dict(continued.overrides)[key] == "voc" and continued.id == before.id and same == other
    assert notes == ["own: its runs were begun with VOC's 11-point metric, and keep it"]
    tasks[0]["overrides"][key] = "voc"
    stated, notes = with_metric(load_suite(write(folder, tasks=tasks)), {})
    assert runs(stated, 1, inits=ONE)[0].id == before.id and not notes


def test_each_engine_is_a_run_of_its_own_where_the_task_has_it(folder):
    tasks = [
        {"config": "faster_rcnn_R_50_C4_9k", "name": "both"},  # a shipped one
        {"config": "task.yaml", "name": "one", "engines": ["detectron2"]},
        {"config": "task.yaml", "name": "probe", "program": "linear"},
    ]
    suite = load_suite(write(folder, tasks=tasks))
    specs = runs(suite, engines=["detectron2", "embedded"], trials=1, inits={"mine": INITS["mine"]})
    found = " ".join(f"{spec.task}:{spec.engine}" for spec in specs)
    assert found == "both:detectron2 both:embedded one:detectron2 probe:moco"
    assert specs[0].config == ROOT / "configs" / "voc" / "faster_rcnn_R_50_C4_9k.yaml"


def test_a_task_may_leave_out_inits_and_has_keys_for_random_alone(folder):
    task = {"config": "task.yaml", "without": ["m_*", "other"]}
    task["overrides"] = {"SOLVER.BASE_LR": 0.1}
    task["random_overrides"] = {"MODEL": {"ARCH": "resnet50"}}
    inits = {**INITS, "m_0.9": Init("/m", "b" * 64)}
    specs = runs(load_suite(write(folder, tasks=[task])), inits=inits, trials=1)
    assert {spec.init: spec.overrides for spec in specs} == {
        "random": (("SOLVER.BASE_LR", "0.1"), ("MODEL.ARCH", "resnet50")),
        "mine": (("SOLVER.BASE_LR", "0.1"),),
    }


def test_gpus_of_a_run(folder):
    suite = load_suite(write(folder, tasks=[{"config": "task.yaml", "gpus": 8}]))

    def size(engine, **changes):
        return runs(suite, engines=[engine], **changes)[0].gpus

    assert size("detectron2", available=16) == 8
    assert size("detectron2", available=2) == 2  # limited to those available
    assert size("detectron2", available=8, gpus=4) == 4
    assert size("embedded", available=8, gpus=4) == 4
    assert size("detectron2", available=0) == 0  # the CPU
    with pytest.raises(UserError, match="--gpus-per-run: got 4, expected 1 to 2"):
        size("detectron2", available=2, gpus=4)


def test_a_runs_id_is_the_hash_of_what_makes_its_numbers(folder):
    task = load_suite(write(folder)).tasks[0]
    plain = (task, "mine", "a" * 64, "embedded", 0, "1")

    def other(**changes) -> SuiteTask:
        return replace(task, **changes)

    own = run_id(*plain)
    assert own == run_id(*plain) and re.fullmatch("[0-9a-f]{10}", own)
    other_length = other(overrides=(("SOLVER.MAX_ITER", "41"),))
    for index, value in {0: other_length, 2: "b" * 64, 3: "detectron2", 4: 1, 5: "2"}.items():
        assert run_id(*plain[:index], value, *plain[index + 1 :]) != own, value
    # Paths of data, loggers and the notation of a value do not change it.
    places = (("DATASETS.VOC_DIR", "/data"), ("LOG.LOGGERS", "('wandb',)"))
    assert run_id(other(overrides=places), *plain[1:]) == own
    half, full, moved = (
        run_id(other(overrides=(("DATASETS.COCO_TRAIN_JSON", path),)), *plain[1:])
        for path in ("/data/half.json", "/data/full.json", "/other/full.json")
    )
    assert half != full == moved, "files in one folder are different data"
    assert run_id(other(overrides=(("SOLVER.MAX_ITER", "40.0"),)), *plain[1:]) == own
    a, b = ((("SOLVER.STEPS", text),) for text in ("(10, 20)", "[10,20]"))
    assert run_id(other(overrides=a), *plain[1:]) == run_id(other(overrides=b), *plain[1:])
    # The keys of a base file count as well.
    (folder / "base.yaml").write_text("SOLVER: {BASE_LR: 0.03}\n")
    assert run_id(*plain) != own


def test_inits_of_the_command_line():
    address = "https://host/r101.pth#sha256=0123abcd"
    remote = {"moco_v2_r50_800ep": "moco_v2_r50_800ep", "r101": address, "other": address}
    zoo = "detectron2://ImageNetPretrained/MSRA/R-50.pkl"
    arguments = ["mine=my.pth.tar", "random", "weights/r50.pth", "a.b=x=y.pth"]
    arguments += ["moco_v2_r50_800ep", address, f"other={address}", zoo]
    files = {"mine": "my.pth.tar", "r50": "weights/r50.pth", "a.b": "x=y.pth"}
    assert parse_inits(arguments) == remote | files | {"MSRA_R-50": zoo, "random": "random"}


def test_several_pre_trainings_of_a_row(folder):
    several = {"moco@1": "a.pth", "moco@2": "b.pth", "moco@3": "c.pth"}
    assert parse_inits(["moco=a.pth,b.pth,c.pth", "x=d.pth"]) == {**several, "x": "d.pth"}
    assert parse_inits(['x="lr0,03/d.pth"']) == {"x": "lr0,03/d.pth"}
    pair = {"x@1": "lr0,03/d.pth", "x@2": "e.pth"}
    assert parse_inits(['x="lr0,03/d.pth",e.pth']) == pair
    suite = load_suite(write(folder, inits={"moco": ["a.pth", "b.pth", "c.pth"]}))
    assert suite.inits == several
    inits = {name: Init(f"/{name}", name * 10) for name in ("moco@1", "moco@2", "x")}
    tasks = [{"config": "task.yaml", "without": ["moco"]}]
    specs = runs(load_suite(write(folder, tasks=tasks)), inits=inits, trials=1)
    assert [spec.init for spec in specs] == ["x"]


def test_options_reach_the_tasks(folder):
    probe = {"program": "linear", "trials": 1, "seconds_per_iteration": 3}
    tasks = [
        {"config": "task.yaml", "name": "a", "overrides": {"SOLVER.BASE_LR": 1}},
        {"config": "task.yaml", "name": "p", **probe},
    ]
    suite = load_suite(write(folder, tasks=tasks))
    for trials, of_tasks in ((None, [2, 1]), (3, [3, 3])):  # of the file, of the command line
        assert [t.trials for t in with_options(suite, {}, {}, trials).tasks] == of_tasks
    opts = option_pairs(suite.tasks, ["SOLVER.BASE_LR", "2", "DATA.ROOT=x"])
    assert opts == {
        "detection": [("SOLVER.BASE_LR", "2")],
        "linear": [("SOLVER.BASE_LR", "2"), ("DATA.ROOT", "x")],
    }
    changed = with_options(suite, opts, {"": 0.5, "a": 0.25})
    assert changed.tasks[0].overrides == (("SOLVER.BASE_LR", "1"), ("SOLVER.BASE_LR", "2"))
    assert [task.seconds_of(0) for task in changed.tasks] == [0.25, 0.5]
    assert [task.seconds_of(2) for task in suite.tasks] == [None, None]
    assert [task.seconds_of(1) for task in suite.tasks] == [None, 3]  # of a group of its size


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_every_suite_loads_and_expands(path):
    suite = load_suite(path)
    assert suite.name == path.stem and suite.title
    engines = ["detectron2", "embedded"]
    specs = expand(suite, INITS, engines, version="1", available=8)
    assert len({spec.id for spec in specs}) == len(specs)
    for task in suite.tasks:
        assert option_pairs([task], [part for pair in task.overrides for part in pair])


def test_there_is_a_suite_of_each_dataset_and_one_of_all():
    names = {path.stem for path in SUITES}
    assert names >= {"smoke", "voc", "coco", "lvis", "cityscapes", "imagenet", "inaturalist"}
    single = {
        (task.config, task.program)
        for path in SUITES
        if path.stem not in (*NOT_THE_PAPERS, "paper")
        for task in load_suite(path).tasks
    }
    paper = load_suite(ROOT / "configs" / "suites" / "paper.yaml")
    assert {(task.config, task.program) for task in paper.tasks} == single


def paper_tables() -> dict[tuple[str, tuple[str, ...]], list[int]]:
    """Return (task, test datasets) → trials of the paper's tables that have it."""
    tables: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for table in load_paper()[1]:
        for name in table.tasks:
            stem = name if table.tested_on else name.rsplit("_resn", 1)[0]
            tables.setdefault((stem, tuple(table.tested_on)), []).append(table.trials or 1)
    return tables


def table_key(task: SuiteTask) -> tuple[str, tuple[str, ...]]:
    """Return the key of `paper_tables` that a task's runs belong to."""
    tree = read_yaml(task.config)
    tested_on = tree.get("DATASETS", {}).get("TEST", ())  # a list, or a tuple in a text
    names = re.findall(r"[\w.]+", tested_on) if isinstance(tested_on, str) else tested_on
    return tree.get("TASK") or task.config.stem, tuple(names)


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_trials_are_the_papers(path):
    """A task has the trials of the paper's mean, or one if the paper states none."""
    suite, tables = load_suite(path), paper_tables()
    for task in suite.tasks if suite.name not in NOT_THE_PAPERS else ():
        assert task.trials == max(tables[table_key(task)]), task.name


def test_the_paper_suite_has_every_table():
    """The suite `paper` has a task for each of the paper's tables that this project can make."""
    suite = load_suite(ROOT / "configs" / "suites" / "paper.yaml")
    assert set(paper_tables()) <= {table_key(task) for task in suite.tasks}
