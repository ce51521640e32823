"""Runs on Detectron2: files, records, checkpoints, errors."""

import io
import json
import pickle
import tarfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from convert.verify import build_backbone
from detection.train_net import main
from moco.common.errors import DataError, NumericError
from moco.common.run import RunRecord, read_record
from tests.oracles.connection import detectron2s_gloo_threads
from tests.oracles.processes import run_on

pytestmark = [pytest.mark.detectron2, pytest.mark.slow, pytest.mark.usefixtures("detectron2")]


@pytest.fixture(scope="module")
def train(small_config, small_options, r18_file):
    """Run the command line into a folder and read its record."""

    def call(folder: Path, *opts: object, flags: tuple[str, ...] = ()):
        options = [*small_options, "MODEL.WEIGHTS", str(r18_file), "DATALOADER.NUM_WORKERS", "0"]
        argv = ["--config-file", small_config, "--engine", "detectron2", *flags, *options]
        argv += ["OUTPUT_DIR", str(folder), *map(str, opts)]
        assert main(argv) == 0
        return read_record(folder / "run.json")

    return call


@pytest.fixture(scope="module")
def finished(train, tmp_path_factory) -> tuple[Path, RunRecord]:
    folder = tmp_path_factory.mktemp("d2") / "run"
    return folder, train(folder)


def predictions(folder: Path) -> list[dict]:
    return json.loads((folder / "inference" / "shapes_test.json").read_text())["predictions"]


def test_a_run_leaves_what_a_detectron2_user_expects(finished):
    folder, _ = finished
    for name in ("config.yaml", "log.txt", "metrics.json", "model_final.pth", "last_checkpoint"):
        assert (folder / name).is_file(), name
    assert (folder / "last_checkpoint").read_text() == "model_final.pth"
    assert (folder / "model_0000001.pth").is_file()
    assert list(folder.glob("events.out.tfevents.*"))
    assert len(predictions(folder)) > 30
    log = (folder / "log.txt").read_text()
    assert "recipe: not a task of the paper" in log
    assert "MODEL.RESNETS.NORM naiveSyncBN: one process, so this is plain BN" in log
    assert "Running precise-BN for 2 iterations" in log


def test_the_record_says_what_was_run(finished):
    _, record = finished
    assert (record.status, record.engine, record.init) == ("done", "detectron2", "r18")
    assert record.task == "faster_rcnn_R_18_C4_small"
    assert (record.seed, record.iterations) == (7, 3)
    assert record.weights_source and record.weights_sha256 and len(record.weights_sha256) == 64
    assert record.coverage is not None and record.coverage["loaded"] == 100
    assert "roi_heads.res5.norm.weight" in record.coverage["left_at_init"]
    assert record.provenance["versions"]["detectron2"]
    assert record.config["MODEL.RESNETS.NORM"] == "naiveSyncBN"
    assert set(record.metrics) >= {"bbox/AP", "bbox/AP50", "bbox/AP75", "bbox/AP50-blue"}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "0 bytes"), (b"rubbish", "text file"), (None, "has no iteration, trainer")],
)
def test_a_damaged_checkpoint_is_named(content, message, tmp_path):
    from detection.d2.checkpoint import check_checkpoint

    path = tmp_path / "model_0000001.pth"
    if content is None:
        torch.save({"model": {}}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"model_0000001.*{message}"):
        check_checkpoint(path)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (None, "Detectron2 itself wrote it"),
        ({"ranks": [{"data": {}}] * 2}, "2 processes wrote it, now there are 1"),
        ({"ranks": [{"data": {}}]}, "NUM_WORKERS was 0 and is not"),
    ],
)
def test_a_checkpoint_that_does_not_fit_any_longer_is_said(state, reason, monkeypatch):
    """Resumed as Detectron2 does, with a warning."""
    from detection.d2 import state as d2

    said = []
    monkeypatch.setattr(d2.logger, "warning", lambda text, *args: said.append(text % args))
    assert d2.usable_state(state, "x.pth", Mock(fits=lambda data: False)) is None
    assert said[0].startswith("x.pth: resumed with other images") and reason in said[0]


def test_a_loss_that_is_not_finite_stops_the_run(train, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(NumericError, match=r"iteration \d: .*SOLVER\.BASE_LR") as caught:
        train(folder, "SOLVER.BASE_LR", 1e12, "SOLVER.WARMUP_ITERS", 0)
    assert caught.value.exit_code == 4
    assert not (folder / "model_final.pth").exists()
    record = read_record(folder / "run.json")
    assert record.status == "failed" and "NumericError" in record.notes[-1]


def test_a_file_of_two_formats_runs_nothing(converted, tmp_path, monkeypatch):
    """A tar to one reader; a pickle, from the first member's name on, to another."""
    from detection.d2.checkpoint import SafeCheckpointer

    content = {
        "model": {key: value.numpy() for key, value in converted.model.items()},
        "__author__": "x",
        "matching_heuristics": True,
        "contract": converted.contract.to_dict(),
    }
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "m"
    name = f"cos\nsystem\n(S'touch {marker.name}'\ntR."
    path = tmp_path / "w.pkl"
    none = pickle.dumps(0, 2)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for member, data in (
            (name, b""),
            ("storages", none + pickle.dumps([], 2)),
            ("tensors", none),
            ("pickle", pickle.dumps(content, 2)),
        ):
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with pytest.raises(DataError, match=r"w\.pkl: damaged or made to mislead"):
        SafeCheckpointer(build_backbone(converted.contract)).load(str(path))
    assert not marker.exists()
    with open(path, "rb") as file:
        pickle.load(file)
    assert marker.exists(), "to Python it is a program"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of threads")
def test_no_thread_of_a_connection_outlives_the_training():
    for connected, afterwards in run_on(2, detectron2s_gloo_threads, fresh=True):
        assert connected and not afterwards
