"""Runs on Detectron2: files, records, errors."""

import json
import pickle
from pathlib import Path

import pytest

from detection.train_net import main
from moco.common.errors import UserError
from moco.common.run import read_record
from tests.oracles.connection import detectron2s_gloo_threads
from tests.oracles.processes import run_on

pytestmark = [pytest.mark.detectron2, pytest.mark.slow, pytest.mark.usefixtures("detectron2")]


def test_a_run_has_the_files_of_detectron2_and_a_record(
    small_config, small_options, r18_file, tmp_path
):
    folder = tmp_path / "run"
    options = [*small_options, "MODEL.WEIGHTS", str(r18_file), "DATALOADER.NUM_WORKERS", "0"]
    argv = ["--config-file", small_config, "--engine", "detectron2", *options]
    assert main([*argv, "OUTPUT_DIR", str(folder)]) == 0
    for name in ("config.yaml", "log.txt", "metrics.json", "model_final.pth", "last_checkpoint"):
        assert (folder / name).is_file(), name
    assert (folder / "last_checkpoint").read_text() == "model_final.pth"
    assert (folder / "model_0000001.pth").is_file()
    assert list(folder.glob("events.out.tfevents.*"))
    found = json.loads((folder / "inference" / "shapes_test.json").read_text())
    assert len(found["predictions"]) > 30
    log = (folder / "log.txt").read_text()
    assert "recipe: not a task of the paper" in log
    assert "MODEL.RESNETS.NORM naiveSyncBN: one process, so this is plain BN" in log
    record = read_record(folder / "run.json")
    assert (record.status, record.engine, record.init) == ("done", "detectron2", "r18")
    assert record.task == "faster_rcnn_R_18_C4_small"
    assert (record.seed, record.iterations) == (7, 3)
    assert record.weights_source and record.weights_sha256 and len(record.weights_sha256) == 64
    assert record.coverage is not None and record.coverage["loaded"] == 100
    assert "roi_heads.res5.norm.weight" in record.coverage["left_at_init"]
    assert record.provenance["versions"]["detectron2"]
    assert record.config["MODEL.RESNETS.NORM"] == "naiveSyncBN"
    assert set(record.metrics) >= {"bbox/AP", "bbox/AP50", "bbox/AP75", "bbox/AP50-blue"}


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of threads")
def test_no_thread_of_a_connection_outlives_the_training():
    for connected, afterwards in run_on(2, detectron2s_gloo_threads, connect=False, fresh=True):
        assert connected and not afterwards


@pytest.mark.parametrize(
    ("content", "files", "error"),
    [
        ({"ids": [1]}, 1, r"proposals\.pkl: does not contain proposals of shapes_trainval"),
        ([1, 2], 1, r"proposals\.pkl: does not contain proposals of shapes_trainval"),
        (b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00exit\x85R.", 1, r"proposals\.pkl"),
        ({}, 2, "got 2 proposal files for shapes_trainval"),
    ],
    ids=["other images", "no dict", "a program", "two files"],
)
def test_files_of_proposals_that_do_not_fit(content, files, error, task_cfg, tmp_path):
    """They are refused, and nothing in them is executed."""
    from detection.d2 import engine

    path = tmp_path / "proposals.pkl"
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    cfg = task_cfg.clone()
    cfg.defrost()
    cfg.MODEL.LOAD_PROPOSALS, cfg.DATASETS.PROPOSAL_FILES_TRAIN = True, (str(path),) * files
    with pytest.raises(UserError, match=error):
        engine.mapper(cfg, training=True)
