"""Runs of the embedded engine: learning, evaluation, errors."""

import itertools
import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from convert.modeling.resnet import ResNet
from convert.verify import Converted
from detection.config.task import load_task
from detection.embedded.model import Detector
from detection.engine import launch
from detection.engine.job import Job, iterations_before
from detection.engine.trainer import Trainer
from moco.common.errors import DataError, NumericError, UserError
from moco.common.files import load_torch
from moco.common.run import RunFolder
from tests.oracles import tiny_detector as tiny
from tests.oracles.tiny_voc import write_voc

KEYS = {
    **tiny.COMMON,
    "MODEL.WEIGHTS": "random",
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 16,
    "MODEL.RESNETS.DEPTH": 10,
    "MODEL.RESNETS.STEM": "stride2",
    "MODEL.RESNETS.STEM_OUT_CHANNELS": 16,
    "MODEL.ANCHOR_GENERATOR.SIZES": [[24, 40, 64]],
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": 200,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 60,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 200,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 40,
    "MODEL.ROI_HEADS.NUM_CLASSES": 3,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 16,
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.05,
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 6,
    "MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO": 1,
    "INPUT.MIN_SIZE_TRAIN": (80, 96),
    "INPUT.MIN_SIZE_TEST": 96,
    "DATALOADER.NUM_WORKERS": 0,
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.BASE_LR": 0.01,
    "SOLVER.MAX_ITER": 8,
    "SOLVER.STEPS": (6,),
    "SOLVER.WARMUP_ITERS": 3,
    "SEED": 3,
}
PRECISE_BN = {"TEST.PRECISE_BN.ENABLED": True, "TEST.PRECISE_BN.NUM_ITER": 2}


@pytest.fixture(scope="module")
def voc(tmp_path_factory):
    return write_voc(tmp_path_factory.mktemp("voc") / "voc", {"train": 12, "val": 4})


def run(voc, out, keys=None, *, weights=None, resume=False, eval_only=False):
    every = {**KEYS, "DATASETS.VOC_DIR": voc, "OUTPUT_DIR": out, **(keys or {})}
    opts = [str(item) for pair in every.items() for item in pair]
    task = load_task(None, opts, "embedded", eval_only=eval_only, resume=resume)
    with RunFolder(out, resume=resume or eval_only):
        return launch.run(Job("embedded", task.cfg, weights, resume, eval_only))


@pytest.fixture(scope="module")
def straight(voc, tmp_path_factory):
    """Folder and result of an uninterrupted run with KEYS."""
    out = tmp_path_factory.mktemp("straight") / "run"
    return out, run(voc, out)


@pytest.fixture
def finished(straight, tmp_path):
    """Copy the folder of `straight`, so that a test can change it."""
    return Path(shutil.copytree(straight[0], tmp_path / "finished"))


def log_lines(out):
    return [json.loads(line) for line in (out / "metrics.json").read_text().splitlines()]


def newest(out):
    return (out / "last_checkpoint").read_text()


def checkpoints(out):
    """Return the iterations of the checkpoints in a folder."""
    return sorted(path.stem.removeprefix("model_") for path in out.glob("*.pth"))


def final(out):
    return load_torch(out / "model_final.pth")


def assert_same_state(one, other):
    """Check that two nested states are bitwise identical."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert set(one) == set(other)
        assert_same_state([*one.values()], [other[name] for name in one])
    elif isinstance(one, list | tuple):
        for a, b in zip(one, other, strict=True):
            assert_same_state(a, b)
    else:
        assert one == other


@pytest.mark.slow
def test_learns_its_training_images(voc, tmp_path):
    """AP on the training images is high, so that training and evaluation agree on boxes."""
    keys = {
        "DATASETS.TEST": ("voc_train",),
        "INPUT.MIN_SIZE_TRAIN": (96,),
        "SOLVER.IMS_PER_BATCH": 4,
        "SOLVER.BASE_LR": 0.03,
        "SOLVER.MAX_ITER": 100,
        "SOLVER.STEPS": (80,),
        "SOLVER.WARMUP_ITERS": 15,
        "TEST.PRECISE_BN.ENABLED": True,
        "TEST.PRECISE_BN.NUM_ITER": 6,
    }
    result = run(voc, tmp_path, keys)
    assert result.metrics["bbox/AP50"] > 85
    assert result.metrics["bbox/AP50"] >= result.metrics["bbox/AP75"] > 20
    assert result.iterations == 100
    lines = log_lines(tmp_path)
    assert [line["iteration"] for line in lines] == [19, 39, 59, 79, 99, 99]
    losses = [line["total_loss"] for line in lines[:-1]]
    assert losses[-1] < losses[0] / 2
    assert lines[-1]["bbox/AP50"] == pytest.approx(result.metrics["bbox/AP50"])
    names = {"loss_cls", "loss_box_reg", "loss_rpn_cls", "loss_rpn_loc", "total_loss"}
    names |= {"iteration", "lr", "time", "data_time", "rank_data_time", "eta_seconds"}
    assert names == set(lines[0])
    assert newest(tmp_path) == "model_final.pth"
    assert "total_loss" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_evaluation_in_between_does_not_change_the_training(voc, straight, tmp_path):
    expected = final(straight[0])
    run(voc, tmp_path / "often", {"TEST.EVAL_PERIOD": 2})
    assert_same_state(final(tmp_path / "often"), expected)
    run(voc, tmp_path / "precise", {"TEST.EVAL_PERIOD": 4, **PRECISE_BN})
    assert_same_state(final(tmp_path / "precise")["optimizer"], expected["optimizer"])
    evaluated = [line["iteration"] for line in log_lines(tmp_path / "often") if "bbox/AP" in line]
    assert evaluated == [1, 3, 5, 7]


def test_a_loss_that_is_not_finite_stops_the_run(voc, tmp_path):
    calls, forward = itertools.count(1), Detector.forward

    def broken(self, samples):
        output = forward(self, samples)
        if next(calls) == 6:
            output["loss_rpn_loc"] = output["loss_rpn_loc"] * float("nan")
        return output

    with patch.object(Detector, "forward", broken), pytest.raises(NumericError) as caught:
        run(voc, tmp_path, {"SOLVER.CHECKPOINT_PERIOD": 4})
    message = str(caught.value)
    assert iterations_before(caught.value, tmp_path / "none") == 5
    assert "iteration 5" in message and "loss_rpn_loc is nan" in message
    assert "loss_cls" not in message and "model_0000003.pth" in message
    assert checkpoints(tmp_path) == ["0000003"]
    kept = load_torch(tmp_path / "model_0000003.pth")["model"]
    assert all(torch.isfinite(x).all() for x in kept.values())


def test_diverging_says_so(voc, tmp_path):
    with pytest.raises(NumericError, match=r"iteration 1: .*SOLVER\.BASE_LR"):
        run(voc, tmp_path, {"SOLVER.BASE_LR": 1e30})


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_moved_folder_is_not_created_again(call, voc, tmp_path, monkeypatch):
    """Neither by a checkpoint nor by the predictions of an evaluation."""
    out, usual = tmp_path / "run", getattr(Trainer, call)

    def move(self, iteration, *args):
        if iteration == (2 if call == "step" else 7):
            out.rename(tmp_path / "elsewhere")
        return usual(self, iteration, *args)

    monkeypatch.setattr(Trainer, call, move)
    with pytest.raises(UserError, match=r"/run is gone: it was moved or deleted .* --resume"):
        run(voc, out, {"SOLVER.CHECKPOINT_PERIOD": 2})
    assert not out.exists()
    saved = {"step": ["0000001"], "evaluate": ["0000001", "0000003", "0000005", "final"]}[call]
    assert checkpoints(tmp_path / "elsewhere") == saved


def test_a_converted_backbone_is_where_training_starts(voc, tmp_path):
    keys = {"SOLVER.BASE_LR": 1e-12, "SOLVER.MAX_ITER": 1, "SOLVER.STEPS": ()}
    keys["SOLVER.WARMUP_ITERS"] = 0
    backbone = ResNet(10, stem="stride2", stem_out_channels=16, res2_out_channels=16)
    source = {k: v for k, v in backbone.state_dict().items() if "num_batches" not in k}
    result = run(voc, tmp_path, keys, weights=Converted(model=source, contract=None))
    model = final(tmp_path)["model"]
    for ours, theirs in (
        ("backbone.", "res3.0.conv2.weight"),
        ("roi_heads.", "res5.0.conv1.weight"),
    ):
        torch.testing.assert_close(model[ours + theirs], source[theirs], rtol=0, atol=1e-8)
    assert result.coverage.loaded == len(source)
    fresh = [n for n in result.coverage.left_at_init if n.startswith("roi_heads.res5")]
    assert fresh and all(name.startswith("roi_heads.res5.norm") for name in fresh)


def test_evaluation_only(voc, straight, finished):
    (finished / "inference" / "voc_val.json").unlink()
    lines = log_lines(finished)
    result = run(voc, finished, {"MODEL.WEIGHTS": finished / "model_final.pth"}, eval_only=True)
    assert result.metrics == pytest.approx(straight[1].metrics, rel=0, abs=0, nan_ok=True)
    assert (result.iterations, result.coverage) == (0, None)
    assert (finished / "inference" / "voc_val.json").is_file()
    assert log_lines(finished) == lines  # The evaluated run is unchanged.


def test_checkpoints_that_do_not_fit_are_refused(voc, finished):
    wider = {"MODEL.RESNETS.STEM_OUT_CHANNELS": 24, "MODEL.RESNETS.RES2_OUT_CHANNELS": 24}
    with pytest.raises(UserError, match=r"model_final\.pth"):
        run(voc, finished, wider, resume=True)
    content = final(finished)
    torch.save(content | {"engine": "detectron2"}, finished / "model_final.pth")
    with pytest.raises(UserError, match="written by the detectron2 engine; resume with --engine"):
        run(voc, finished, resume=True)
    torch.save({"model": content["model"], "trainer": {}}, finished / "model_final.pth")
    with pytest.raises(DataError, match=r"can be read; the newest: .*: no 'optimizer'; expected"):
        run(voc, finished, resume=True)
    (finished / "model_final.pth").unlink()
    for name in ("../elsewhere.pth", "model_0000001.pth"):
        (finished / "last_checkpoint").write_text(name)
        with pytest.raises(DataError, match=rf"last_checkpoint names '{name}', which is not there"):
            run(voc, finished, resume=True)
