"""Every task file cut down to two iterations on generated images, for either engine.

Only sizes and durations are overridden. The weights are a quarter-width ResNet-50, so that a run
takes seconds: depth and width come with the weights' contract and are not overridden either.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from detection.train_net import main
from moco.common.run import RunRecord, read_record

ENGINES = ("detectron2", "embedded")
CONFIGS = Path(__file__).resolve().parents[2] / "configs"

# Sizes, durations, and no threshold for the scores; "sem_seg" tasks take the second table.
SMALL = {
    "MODEL.DEVICE": "cpu",
    "MODEL.FPN.OUT_CHANNELS": 32,
    "MODEL.ROI_BOX_HEAD.CONV_DIM": 32,
    "MODEL.ROI_BOX_HEAD.FC_DIM": 64,
    "MODEL.ROI_MASK_HEAD.CONV_DIM": 32,
    "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS": (32,) * 2,
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE": 32,
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": 60,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 60,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 20,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 10,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 8,
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,  # hardly trained, and yet with detections
    "MODEL.RETINANET.SCORE_THRESH_TEST": 0.0,
    "MODEL.RETINANET.TOPK_CANDIDATES_TEST": 20,
    "TEST.DETECTIONS_PER_IMAGE": 5,
    "INPUT.MIN_SIZE_TRAIN": (96,),
    "INPUT.MIN_SIZE_TEST": 96,
}
SMALL_SEM_SEG = {"MODEL.DEVICE": "cpu", "INPUT.SEM_SEG_CROP_SIZE": 65}
# A narrow transformer, as a file's contract would say it, and batches that are squares of 128 px.
SMALL_VIT = {
    "MODEL.BACKBONE.SQUARE_PAD": 128,
    "MODEL.VIT.EMBED_DIM": 32,
    "MODEL.VIT.DEPTH": 4,
    "MODEL.VIT.NUM_HEADS": 4,
    "MODEL.VIT.MLP_DIM": 64,
    "MODEL.VIT.DROP_PATH": 0.2,
    "MODEL.FPN.OUT_CHANNELS": 32,
    "INPUT.LSJ.SIZE": 128,
    "INPUT.MAX_SIZE_TEST": 128,
    "SOLVER.PRECISION": "fp32",
    "SOLVER.AMP.ENABLED": False,
}
# Crops of a few patches; for tasks that are tested in windows also these.
SMALL_ADE = {
    "INPUT.SEM_SEG_SIZE": 64,
    "INPUT.SEM_SEG_CROP_SIZE": 64,
    "INPUT.MIN_SIZE_TEST": 64,
    "MODEL.SEM_SEG_HEAD.CONVS_DIM": 16,
    "SOLVER.PRECISION": "fp32",
    "SOLVER.AMP.ENABLED": False,
}
WINDOWS = ("TEST.SEM_SEG_WINDOW", 64, "TEST.SEM_SEG_STRIDE", 40)
SHORT = {
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.MAX_ITER": 2,
    "SOLVER.STEPS": (1,),
    "SOLVER.WARMUP_ITERS": 0,
    "SOLVER.CHECKPOINT_PERIOD": 2,
    "DATALOADER.NUM_WORKERS": 0,
    "TEST.PRECISE_BN.NUM_ITER": 2,
    "SEED": 3,
}


# voc/faster_rcnn_R_18_C4_small on a folder in VOC's layout: 3 iterations of 2 images.
SMALL_VOC = {
    "MODEL.DEVICE": "cpu",
    "SOLVER.PRECISION": "fp32",  # the task's auto is another precision on another processor
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 8,
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,  # hardly trained, and yet with detections
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 30,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 15,
    "INPUT.MIN_SIZE_TRAIN": (80, 96),
    "INPUT.MIN_SIZE_TEST": 96,
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.MAX_ITER": 3,
    "SOLVER.STEPS": (2,),
    "SOLVER.WARMUP_ITERS": 1,
    "SOLVER.CHECKPOINT_PERIOD": 2,
    "TEST.PRECISE_BN.NUM_ITER": 2,
    "SEED": 7,
}


def narrow_file(depth: int, folder: Path) -> Path:
    """Write a converted ResNet of a quarter of the width, as our pre-training saves it."""
    from convert.convert_to_d2 import convert_file
    from tests.oracles.checkpoints import own

    torch.save(own(depth=depth, base=16), folder / "checkpoint.pth.tar")
    path = folder / f"narrow_r{depth}.pth"
    convert_file(folder / "checkpoint.pth.tar", path)
    return path


def options(task: str) -> dict[str, object]:
    """Keys that make a task `voc/faster_rcnn_R_50_C4_24k` small."""
    small = SMALL_SEM_SEG if "fcn16s" in task else SMALL
    vit = SMALL_VIT if "ViT" in task else {}
    if task.startswith("ade20k/") or "upernet" in task:
        vit = {**vit, **SMALL_ADE, "MODEL.BACKBONE.SQUARE_PAD": 0, "MODEL.VIT.DEPTH": 12}
    elif "ViT" in task and "frozen" in task:
        vit = {**SMALL_VIT, "MODEL.BACKBONE.FREEZE_AT": 5, "MODEL.VIT.DROP_PATH": 0.0}
    return small | vit | SHORT


def run(
    task: str,
    weights: Path | str,
    folder: Path,
    engine: str,
    *opts: object,
    flags: tuple[str, ...] = (),
) -> RunRecord:
    """Train and evaluate it in `folder`; `opts`: further KEY VALUE pairs."""
    values = options(task) | {"MODEL.WEIGHTS": weights, "OUTPUT_DIR": folder}
    argv = ["--config-file", str(CONFIGS / f"{task}.yaml"), "--engine", engine, *flags]
    argv += [str(item) for pair in values.items() for item in pair]
    assert main([*argv, *map(str, opts)]) == 0
    return read_record(folder / "run.json")


def run_both(task: str, weights: Path | str, folder: Path, *opts: object, **kw: Any) -> RunRecord:
    """Run a task on both engines, check that nothing differs, and return the embedded record."""
    for engine in ENGINES:
        record = run(task, weights, folder / engine, engine, *opts, **kw)
    assert_same_run(*(folder / engine for engine in ENGINES))
    return record


def logged(folder: Path) -> dict[str, Any]:
    """Return the last value of every name in metrics.json."""
    lines = (folder / "metrics.json").read_text(encoding="utf-8").splitlines()
    return {name: value for line in lines for name, value in json.loads(line).items()}


def assert_same_run(theirs: Path, ours: Path) -> None:
    """Check that tensors, predictions and records in two folders are equal, and losses to 1e-6."""
    expected, actual = (
        torch.load(folder / "model_final.pth", weights_only=True)["model"]
        for folder in (theirs, ours)
    )
    assert set(expected) == set(actual)
    different = [name for name, x in expected.items() if not torch.equal(x, actual[name])]
    assert not different
    records = [read_record(folder / "run.json") for folder in (theirs, ours)]
    for field in ("metrics", "coverage", "config_sha256", "recipe"):
        assert getattr(records[0], field) == getattr(records[1], field), field
    losses = [
        {name: value for name, value in logged(folder).items() if "loss" in name}
        for folder in (theirs, ours)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and losses[0]
    predictions = [sorted((folder / "inference").glob("*.json")) for folder in (theirs, ours)]
    assert [path.name for path in predictions[0]] == [path.name for path in predictions[1]]
    for one, other in zip(*predictions, strict=True):
        assert json.loads(one.read_text()) == json.loads(other.read_text())
