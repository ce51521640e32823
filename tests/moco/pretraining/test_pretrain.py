"""The command `pretrain`: files of a run, flags, bad images and notes."""

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moco.common.errors import DataError
from moco.common.run import read_record
from moco.engine.checkpoint import list_checkpoints, load_checkpoint
from moco.modeling.mechanisms.momentum_queue import MomentumQueue
from moco.pretrain import parse_args
from tests.moco.commands import pretrain as main
from tests.oracles.training import metrics, newest, weights


def test_files_of_a_run(opts, tmp_path, images, capsys):
    main(opts(SEED=7, LOG__LOGGERS=("tensorboard",)))
    run = tmp_path / "run"
    names = ["checkpoint_0001.pth.tar", "checkpoint_0002.pth.tar"]
    assert [path.name for path in list_checkpoints(run)] == names
    assert (run / "last_checkpoint").read_text() == names[-1]
    state = load_checkpoint(run / names[-1])
    assert (state["step"], state["epoch"], state["arch"], state["seed"]) == (8, 2, "resnet10", 7)
    encoder = {"arch": "resnet10", "stem": "stride2", "width": 0.125, "dim": 16, "mlp": False}
    assert state["encoder"] == encoder
    assert state["input"]["channel_order"] == "RGB"
    assert state["state_dict"]["module.queue"].shape == (16, 20)
    assert state["state_dict"]["module.queue_ptr"].item() == 8 * 8 % 20
    lines = metrics(run)
    assert [line["iteration"] for line in lines] == [2, 4, 6, 8]
    keys = {"loss", "lr", "pretext_accuracy", "images_per_second", "epoch"}
    assert all(keys <= line.keys() for line in lines)
    record = read_record(run / "run.json")
    assert (record.kind, record.status) == ("pretrain", "done")
    assert (record.seed, record.iterations) == (7, 8)
    assert record.metrics["pretrain/loss"] == lines[-1]["loss"]
    out = capsys.readouterr().out
    assert f"next: python -m benchmarks convert {run / 'checkpoint_0002.pth.tar'}" in out
    facts = record.provenance["images"]
    assert facts["number"] > 0 and Path(facts["folder"]).is_relative_to(images)
    assert f"images: {facts['number']} below {facts['folder']}" in out
    events = EventAccumulator(str(run))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("loss")}
    assert logged == pytest.approx({line["iteration"]: line["loss"] for line in lines})


@pytest.mark.parametrize(("K", "is_noted"), [(26, False), (27, True)])
def test_a_queue_longer_than_the_dataset_is_noted(opts, tmp_path, capsys, K, is_noted):
    main(opts(MOCO__K=K, SOLVER__MAX_ITERS=1))
    assert ("note: MOCO.K 27 exceeds the 26 images" in capsys.readouterr().out) == is_noted
    assert len(read_record(tmp_path / "run" / "run.json").notes) == is_noted


class TestBadImages:
    @pytest.fixture
    def one_bad(self, images, tmp_path):
        folder = tmp_path / "one_bad"
        folder.mkdir()
        for path in images.iterdir():
            (folder / path.name).symlink_to(path)
        (folder / "004.jpg").unlink()
        (folder / "004.jpg").write_bytes((images / "004.jpg").read_bytes()[:300])
        return folder

    @pytest.mark.parametrize("workers", [0, 1])
    def test_fail_names_the_file(self, opts, one_bad, workers):
        with pytest.raises(DataError, match=r"^\S*one_bad/004.jpg: cannot be decoded"):
            main([*opts(DATA__NUM_WORKERS=workers), "DATA.ROOT", str(one_bad)])

    def test_skip_replaces_and_counts(self, opts, tmp_path, one_bad, capsys):
        keys = {"DATA.ROOT": one_bad, "DATA.BAD_IMAGES": "skip", "DATA.MAX_BAD_FRACTION": 0.1}
        skip = [str(word) for pair in keys.items() for word in pair]
        for name, workers in (("a", 0), ("b", 2)):
            main([*opts(name, DATA__NUM_WORKERS=workers), *skip])
        assert weights(tmp_path / "a") == weights(tmp_path / "b")
        assert capsys.readouterr().out.count("another image takes its place") == 2
        notes = read_record(tmp_path / "a/run.json").notes
        assert notes == ["replaced 1 image that could not be decoded"]

    def test_too_many(self, opts, one_bad):
        with pytest.raises(DataError, match=r"1 of 26 images are bad, more than DATA\.MAX_BAD"):
            main([*opts(), "DATA.ROOT", str(one_bad), "DATA.BAD_IMAGES", "skip"])


def test_names_of_the_official_flags():
    line = (
        "-a resnet18 -j 3 -b 64 --lr 0.1 --momentum 0.8 --wd 1e-3 --epochs 9 --seed 5 "
        "--moco-dim 32 --moco-k 99 --moco-m 0.5 --moco-t 0.3 --mlp --aug-plus --cos "
        "--bn-splits 4 --symmetric --dist-timeout 30 "
        "--schedule 3 6 DATA.ROOT x --resume --debug SEED 6"
    )
    args = parse_args(line.split())
    assert args.resume == "auto"
    pairs = dict(zip(args.opts[::2], args.opts[1::2], strict=True))
    # --lr is not scaled to the batch (REFERENCE_BATCH_SIZE 0), and the pair SEED overrides --seed.
    expected = (
        "MODEL.ARCH resnet18 DATA.NUM_WORKERS 3 SOLVER.BATCH_SIZE 64 SOLVER.BASE_LR 0.1 "
        "SOLVER.REFERENCE_BATCH_SIZE 0 SOLVER.MOMENTUM 0.8 SOLVER.WEIGHT_DECAY 1e-3 "
        "SOLVER.MAX_EPOCHS 9 SOLVER.SCHEDULE cosine SOLVER.MILESTONES_EPOCHS (3,6,) SEED 6 "
        "DIST_TIMEOUT_SECONDS 30 MOCO.DIM 32 MOCO.K 99 MOCO.M 0.5 MOCO.T 0.3 MOCO.BN_SPLITS 4 "
        "MOCO.SYMMETRIC True MOCO.MLP True AUG.KIND v2 DATA.ROOT x"
    )
    words = expected.split()
    assert pairs == dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize(
    "line, resume",
    [
        ("", None),
        ("--resume", "auto"),
        ("--resume DATA.ROOT x", "auto"),
        ("--resume a/checkpoint_0001.pth.tar DATA.ROOT x", "a/checkpoint_0001.pth.tar"),
        ("--resume DATA.ROOT=x", "auto"),
        ("DATA.ROOT=x --resume a.pth.tar", "a.pth.tar"),
    ],
)
def test_resume_flag(line, resume):
    args = parse_args(line.split())
    assert args.resume == resume
    assert args.opts == (["DATA.ROOT", "x"] if "DATA" in line else [])


@pytest.mark.slow
def test_real_images(shared_data, opts, tmp_path):
    """The command trains on 100 photographs in a flat folder."""
    root = str(shared_data / "coco" / "val2017")
    main([*opts(SOLVER__MAX_ITERS=2, SOLVER__BATCH_SIZE=16), "DATA.ROOT", root])
    state = newest(tmp_path / "run")
    assert state["num_images"] == 100
    assert torch.isfinite(state["state_dict"]["module.queue"]).all()


def test_a_collapsed_encoder_is_noted(opts, tmp_path, capsys, monkeypatch):
    """With a head that is 0 but for its bias, all images have the same feature."""

    def collapsed(self, x):
        return (0 * self.encoder_q(x) + torch.eye(16)[0]).requires_grad_()

    monkeypatch.setattr(MomentumQueue, "queries", collapsed)
    main(opts())
    note = "collapsed: the features of a batch have a standard deviation of 0"
    assert capsys.readouterr().out.count(note) == 1
    record = read_record(tmp_path / "run" / "run.json")
    assert any(found.startswith(note) for found in record.notes)
