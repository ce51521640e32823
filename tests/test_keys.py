"""A key that is added to the table of detection: the role decides about hashes and ids."""

import json

import pytest

from benchmarks.report.records import TASK_KEYS
from benchmarks.suites.suite import SuiteTask, run_id, without_places
from detection.config.keys import KEYS, OURS, protocol_sha256
from detection.config.task import default_task
from detection.config.trained import apply_trained_config
from moco.common.keys import NOT_PROTOCOL, Key, Role, at_least
from moco.engine import config as training_config
from moco.engine.keys import CLASSIFICATION, PRETRAIN
from tests.golden import regenerate_protocols as protocols

NEW = "SOLVER.NEW"


@pytest.fixture
def add(monkeypatch):
    """Return a function that adds `NEW` to the table of detection for this test."""

    def call(**fields):
        key = Key(3, "How new it is, days.", at_least(1), **fields)
        for table in (KEYS, OURS, TASK_KEYS):
            monkeypatch.setitem(table, NEW, key)

    return call


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({}, 4),
        ({"role": Role.SPEED}, 3),
        ({"role": Role.SPEED, "model": True}, 4),
        ({"role": Role.WEIGHTS}, 4),
    ],
)
def test_an_evaluation_takes_it_from_the_training(add, tmp_path, fields, value):
    add(**fields)
    trained = default_task()
    trained.SOLVER.NEW = 4
    (tmp_path / "config.yaml").write_text(trained.dump())
    cfg = default_task()
    cfg.MODEL.WEIGHTS = str(tmp_path / "model_final.pth")
    apply_trained_config(cfg, ())
    assert cfg.SOLVER.NEW == value


def test_a_new_key_changes_no_hash_and_no_id(add):
    before = protocol_sha256({"SOLVER.GAMMA": 0.2})
    add()
    expected = json.loads(protocols.FILE.read_text(encoding="utf-8"))
    assert protocols.run_ids() == expected["run_ids"]
    assert protocol_sha256({"SOLVER.GAMMA": 0.2, NEW: 3}) == before
    assert protocol_sha256({"SOLVER.GAMMA": 0.2, NEW: 4}) != before
    for role in NOT_PROTOCOL:
        add(role=role)
        assert protocol_sha256({"SOLVER.GAMMA": 0.2, NEW: 4}) == before


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, "a/b"),
        ({"role": Role.SPEED}, "a/b"),
        ({"role": Role.WEIGHTS}, "a/b"),
        ({"role": Role.PLACE}, None),
        ({"role": Role.RUN}, None),
    ],
)
def test_the_id_of_a_run(add, tmp_path, fields, kept):
    add(**fields)
    assert without_places({NEW: "a/b"}) == ({} if kept is None else {NEW: kept})
    (tmp_path / "t.yaml").write_text("SOLVER: {MAX_ITER: 10}\n")
    tasks = (
        SuiteTask("t", tmp_path / "t.yaml", "detection", overrides)
        for overrides in ((), ((NEW, "a/b"),))
    )
    ids = {run_id(task, "x", None, "embedded", 0, "1") for task in tasks}
    assert len(ids) == (1 if kept is None else 2)


def test_the_id_of_a_run_has_some_places():
    """Two files of one folder are different data; so are two indices of published subsets."""
    kept = {"DATASETS.COCO_TRAIN_JSON": "b", "DATASETS.COCO_TEST_JSON": "b"}
    kept["DATASETS.PART_INDEX"] = "a/b"
    assert without_places(dict.fromkeys([*kept, "DATASETS.COCO_DIR", "OUTPUT_DIR"], "a/b")) == kept


@pytest.mark.parametrize("keys", [PRETRAIN, CLASSIFICATION])
def test_a_former_key_is_not_hashed(keys):
    """Records and checkpoints of version 0.1.0 have LOG.TENSORBOARD."""
    defaults = training_config.default_cfg(keys)
    hashes = {
        training_config.protocol_sha256(config, defaults, keys)
        for config in ({}, {"LOG": {"TENSORBOARD": True}}, {"LOG.EVERY_ITERS": 7})
    }
    assert len(hashes) == 1
