"""Runs on the real Detectron2: training, resume, evaluation, processes, and the other engine."""

import json
from pathlib import Path

import pytest
import torch

from detection.train_net import main
from moco.common.cfgnode import flatten
from moco.common.errors import DataError, NumericError, UserError
from moco.common.files import load_torch
from moco.common.run import RunRecord, read_record
from tests.oracles.connection import detectron2s_gloo_threads
from tests.oracles.processes import run_on

pytestmark = pytest.mark.usefixtures("detectron2")


@pytest.fixture(scope="module")
def train(small_config, small_options, r18_file):
    """Run the command line into a folder and read its record."""

    def call(folder: Path, *opts: object, flags: tuple[str, ...] = (), engine: str = "detectron2"):
        options = [*small_options, "MODEL.WEIGHTS", str(r18_file), "DATALOADER.NUM_WORKERS", "0"]
        argv = ["--config-file", small_config, "--engine", engine, *flags, *options]
        argv += ["OUTPUT_DIR", str(folder), *map(str, opts)]
        assert main(argv) == 0
        name = "inference/run.json" if "--eval-only" in flags else "run.json"
        return read_record(folder / name)

    return call


@pytest.fixture(scope="module")
def finished(train, tmp_path_factory) -> tuple[Path, RunRecord]:
    folder = tmp_path_factory.mktemp("d2") / "run"
    return folder, train(folder)


@pytest.fixture(scope="module")
def finished_embedded(train, tmp_path_factory) -> tuple[Path, RunRecord]:
    folder = tmp_path_factory.mktemp("embedded") / "run"
    return folder, train(folder, engine="embedded")


def predictions(folder: Path) -> list[dict]:
    return json.loads((folder / "inference" / "shapes_test.json").read_text())["predictions"]


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


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


def test_the_backbone_started_from_the_file(finished, r18_file):
    """After 3 steps at a small rate the weights are near the file's and not equal to them."""
    folder, _ = finished
    trained = load_torch(folder / "model_final.pth")["model"]
    start = load_torch(r18_file)["model"]["res4.1.conv2.weight"]
    difference = (trained["backbone.res4.1.conv2.weight"] - start).abs().max()
    assert 0 < difference < 0.05


def test_a_trained_model_evaluates_to_its_numbers(finished, train):
    folder, record = finished
    before = (folder / "run.json").read_bytes(), (folder / "config.yaml").read_bytes()
    again = train(folder, flags=("--eval-only", "--resume"))
    assert again.metrics == record.metrics
    assert (again.iterations, again.coverage) == (0, None)
    assert before == ((folder / "run.json").read_bytes(), (folder / "config.yaml").read_bytes())


def test_either_engine_evaluates_the_others_model(finished, finished_embedded, train, tmp_path):
    """Weights are exchanged by name; the numbers are the same to the last bit."""
    for engine, (folder, record) in (
        ("embedded", finished),
        ("detectron2", finished_embedded),
    ):
        other = train(
            tmp_path / engine,
            "MODEL.WEIGHTS",
            folder / "model_final.pth",
            flags=("--eval-only",),
            engine=engine,
        )
        assert other.engine == engine != record.engine
        assert other.metrics == record.metrics
        assert predictions(tmp_path / engine) == predictions(folder)


def test_both_engines_train_alike(finished, finished_embedded):
    """Same seed, same file: the same losses and the same learned weights after 3 steps."""
    (theirs, their_record), (ours, our_record) = finished, finished_embedded
    names = ("total_loss", "loss_cls", "loss_box_reg", "loss_rpn_cls", "loss_rpn_loc", "lr")
    for name in names:
        assert lines(theirs)[0][name] == pytest.approx(lines(ours)[0][name], rel=1e-6), name
    parameters = load_torch(theirs / "model_final.pth")["model"]
    for name, value in load_torch(ours / "model_final.pth")["model"].items():
        if "running" not in name:  # PreciseBN sees other images, a few in this short test
            torch.testing.assert_close(value, parameters[name], rtol=0, atol=1e-6)
    assert their_record.config_sha256 == our_record.config_sha256
    assert their_record.coverage == our_record.coverage


def test_resume_continues_at_the_right_iteration(train, finished, tmp_path):
    """Stopped after iteration 1 (its checkpoint), the run ends at 3 with the schedule of 3."""
    folder, _ = finished
    resumed = tmp_path / "run"
    resumed.mkdir()
    for name in ("model_0000001.pth", "config.yaml"):
        (resumed / name).write_bytes((folder / name).read_bytes())
    (resumed / "last_checkpoint").write_text("model_0000001.pth")
    record = train(resumed, flags=("--resume",))
    content = load_torch(resumed / "model_final.pth")
    assert content["iteration"] == 2
    assert "resuming after iteration 2" in (resumed / "log.txt").read_text()
    assert "Starting training from iteration 2" in (resumed / "log.txt").read_text()
    assert lines(resumed)[0]["lr"] == lines(folder)[0]["lr"]
    assert record.status == "done"
    assert record.coverage is not None and record.coverage["loaded"] == 100


def test_resume_without_a_checkpoint_starts_anew(train, tmp_path):
    record = train(
        tmp_path / "run", "SOLVER.MAX_ITER", 1, "SOLVER.STEPS", "()", flags=("--resume",)
    )
    assert "no checkpoint in" in (tmp_path / "run" / "log.txt").read_text()
    assert record.iterations == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "0 bytes"), (b"rubbish", "damaged"), (None, "has no iteration, trainer")],
)
def test_a_damaged_checkpoint_is_named(content, message, train, finished, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "last_checkpoint").write_text("model_0000001.pth")
    if content is None:
        torch.save({"model": {}}, folder / "model_0000001.pth")
    else:
        (folder / "model_0000001.pth").write_bytes(content)
    with pytest.raises(DataError, match=message):
        train(folder, flags=("--resume",))
    assert read_record(folder / "run.json").status == "failed"


def test_a_loss_that_is_not_finite_stops_the_run(train, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(NumericError, match=r"iteration \d: .*SOLVER\.BASE_LR") as caught:
        train(folder, "SOLVER.BASE_LR", 1e12, "SOLVER.WARMUP_ITERS", 0)
    assert caught.value.exit_code == 4
    assert not (folder / "model_final.pth").exists()
    record = read_record(folder / "run.json")
    assert record.status == "failed" and "NumericError" in record.notes[-1]


def test_checkpoints_are_written_whole_or_not_at_all(finished, monkeypatch):
    """A save that fails half-way leaves the file before it and the pointer to it."""
    from detection.d2.checkpoint import SafeCheckpointer

    folder, _ = finished
    before = (folder / "model_final.pth").read_bytes()

    def broken(value, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    checkpointer = SafeCheckpointer(torch.nn.Linear(2, 2), str(folder))
    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(UserError, match="No space left on device"):
        checkpointer.save("model_final")
    assert (folder / "model_final.pth").read_bytes() == before
    assert not list(folder.glob(".tmp-*"))


def test_two_processes_without_a_gpu(train, tmp_path):
    """gloo, naive SyncBN and DDP: one batch of two images over two processes."""
    record = train(tmp_path / "run", flags=("--num-gpus", "2"))
    assert record.status == "done"
    assert record.coverage is not None and record.coverage["loaded"] == 100
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "process 0 of 2" in log
    assert "NaiveSyncBatchNorm" in log
    assert (tmp_path / "run" / "log.txt.rank1").is_file()
    assert set(record.metrics) >= {"bbox/AP", "bbox/AP50", "bbox/AP75"}
    assert flatten(record.config)["MODEL.RESNETS.NORM"] == "naiveSyncBN"
    images = {row["image_id"] for row in predictions(tmp_path / "run")}
    assert images == {"000006", "000007", "000008"}


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of threads")
def test_no_thread_of_a_connection_outlives_the_training():
    for connected, afterwards in run_on(2, detectron2s_gloo_threads):
        assert connected and not afterwards
