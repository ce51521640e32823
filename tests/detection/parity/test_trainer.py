"""Bitwise equality of whole runs of both engines with the same task, seed and images."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from detection.config.task import load_task
from detection.config.trained import read_start
from detection.engine import launch
from detection.engine.job import Job
from moco.common.files import load_torch
from moco.common.run import RunFolder
from tests.oracles import tiny_detector as tiny
from tests.oracles.small_tasks import logged
from tests.oracles.tiny_voc import write_voc

pytestmark = [pytest.mark.detectron2, pytest.mark.usefixtures("detectron2")]

KEYS: dict[str, Any] = {
    **tiny.NARROW_R50,
    "MODEL.WEIGHTS": "random",
    "MODEL.ANCHOR_GENERATOR.SIZES": [[24, 40, 64]],
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.05,
    "MODEL.ROI_HEADS.NUM_CLASSES": 3,
    "INPUT.MIN_SIZE_TRAIN": (90, 100),
    "INPUT.MIN_SIZE_TEST": 96,
    "DATALOADER.NUM_WORKERS": 0,
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.MAX_ITER": 8,
    "SOLVER.STEPS": (6,),
    "SOLVER.WARMUP_ITERS": 4,
    "SOLVER.WEIGHT_DECAY_NORM": 1e-4,
    "SOLVER.BIAS_LR_FACTOR": 2.0,
    "SEED": 42,
}


ADAMW = {
    "SOLVER.OPTIMIZER": "AdamW",
    "SOLVER.BASE_LR": 1e-3,
    "SOLVER.WEIGHT_DECAY": 0.05,
    "SOLVER.LR_DECAY": 0.7,
    "SOLVER.LR_SCHEDULER_NAME": "WarmupCosineLR",
    "SOLVER.BASE_LR_END": 1e-5,
    "SOLVER.STEPS": (),
    "INPUT.LSJ.ENABLED": True,
    "INPUT.LSJ.SIZE": 96,
}


# Windows that do not divide the maps, relative positions, drop path; for each pyramid.
SFP, FOUR_MAPS = (
    {
        **network,
        "MODEL.ROI_HEADS.NUM_CLASSES": 3,
        "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.05,
        "MODEL.MASK_ON": False,
        **ADAMW,
    }
    for network in (tiny.VIT_SFP, tiny.VIT_FPN)
)

# Few regions: a processor without bf16 emulates it.
BF16 = {
    "SOLVER.PRECISION": "bf16",
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 8,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 16,
}


@pytest.fixture(scope="module")
def voc(tmp_path_factory):
    return write_voc(tmp_path_factory.mktemp("voc") / "voc", {"train": 10, "val": 4})


def run_engine(engine, voc, out, keys, eval_only=False):
    own = {"DATASETS.VOC_DIR": voc, "DATASETS.VOC_METRIC": "voc", "OUTPUT_DIR": out}
    every = {**KEYS, **own, **keys}
    opts = [str(item) for pair in every.items() for item in pair]
    task = load_task(None, opts, engine, eval_only=eval_only)
    with RunFolder(out):
        return launch.run(Job(engine, task.cfg, eval_only=eval_only))


@pytest.mark.parametrize(
    "keys",
    [
        {"MODEL.CHANNELS_LAST": True},
        BF16,
        {
            **ADAMW,
            **BF16,
            "SOLVER.CLIP_GRADIENTS.ENABLED": True,
            "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": "norm",
        },
        {**SFP, **BF16},
        {**FOUR_MAPS, **BF16},
        {**FOUR_MAPS, **BF16, "MODEL.VIT.CHECKPOINT_BLOCKS": True, "MODEL.CHANNELS_LAST": True},
    ],
    ids=[
        "channels-last",
        "bf16",
        "adamw-bf16",
        "vit-bf16",
        "vit-fpn-bf16",
        "vit-fpn-bf16-checkpointed",
    ],
)
def test_a_whole_run(keys, voc, tmp_path):
    """Runs with keys that plain Detectron2 lacks are equal, and each engine reads both models."""
    theirs = run_engine("detectron2", voc, tmp_path / "d2", keys)
    ours = run_engine("embedded", voc, tmp_path / "embedded", keys)
    folders = tmp_path / "d2", tmp_path / "embedded"
    starts = [read_start(folder) for folder in folders]
    assert starts[0] == starts[1] and len(starts[0]["batches"]) == 1
    expected, actual = (load_torch(folder / "model_final.pth") for folder in folders)
    assert actual["iteration"] == expected["iteration"] == 7
    assert set(actual["model"]) == set(expected["model"])
    assert not [n for n, x in expected["model"].items() if not torch.equal(x, actual["model"][n])]
    their_log, our_log = map(logged, folders)
    for name in ("total_loss", "loss_cls", "loss_box_reg", "loss_rpn_cls", "loss_rpn_loc"):
        assert np.isclose(their_log[name], our_log[name], rtol=1e-6)
    # With other groups Detectron2 logs the rate of the largest one.
    if not {"SOLVER.WEIGHT_DECAY_BIAS", "SOLVER.LR_DECAY"} & set(keys):
        assert their_log["lr"] == our_log["lr"]
    assert theirs.metrics == ours.metrics
    predictions = [
        json.loads((folder / "inference" / "voc_val.json").read_text()) for folder in folders
    ]
    assert predictions[0] == predictions[1]
    assert predictions[0]["predictions"]
    # Each engine reads the other's trained model.
    for engine, other in (("detectron2", "embedded"), ("embedded", "d2")):
        trained = {**keys, "MODEL.WEIGHTS": tmp_path / other / "model_final.pth"}
        out = tmp_path / f"{engine}-reads-{other}"
        assert run_engine(engine, voc, out, trained, eval_only=True).metrics == ours.metrics


@pytest.mark.parametrize("engine", ["detectron2", "embedded"])
def test_channels_last_is_the_models_memory_format(engine, voc, tmp_path, monkeypatch):
    from torch.nn import Conv2d

    formats = []

    def look(module, args, out):
        if out.shape[1] > 1 and out[0, 0].numel() > 1:
            formats.append(out.is_contiguous(memory_format=torch.channels_last))

    init = Conv2d.__init__

    def watched(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.register_forward_hook(look)

    monkeypatch.setattr(Conv2d, "__init__", watched)
    for wanted in (True, False):
        formats.clear()
        keys = {"SOLVER.MAX_ITER": 1, "SOLVER.STEPS": (), "SOLVER.WARMUP_ITERS": 0}
        keys["MODEL.CHANNELS_LAST"] = wanted
        run_engine(engine, voc, tmp_path / str(wanted), keys)
        assert set(formats) == {wanted}


@pytest.mark.parametrize("keys", [{}, ADAMW, {**ADAMW, "SOLVER.WARMUP_METHOD": "constant"}])
def test_learning_rates_of_a_long_schedule(keys):
    from detectron2.solver import build_lr_scheduler

    from detection.engine.solver import build_schedule, set_learning_rate

    length = {"SOLVER.MAX_ITER": 240, "SOLVER.STEPS": (180, 220), "SOLVER.WARMUP_ITERS": 17}
    cfg = tiny.task({**keys, **length})
    solver = cfg.SOLVER
    layers = [solver.BASE_LR * solver.LR_DECAY**k for k in range(3)]
    theirs, ours = (
        torch.optim.SGD(
            [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in layers]
        )
        for _ in range(2)
    )
    for group in ours.param_groups:
        group["initial_lr"] = group["lr"]
    scheduler = build_lr_scheduler(cfg, theirs)
    schedule = build_schedule(solver)
    for iteration in range(solver.MAX_ITER):
        set_learning_rate(ours, schedule(iteration / solver.MAX_ITER))
        for expected, actual in zip(theirs.param_groups, ours.param_groups, strict=True):
            assert actual["lr"] == expected["lr"], iteration
        theirs.step()
        scheduler.step()
